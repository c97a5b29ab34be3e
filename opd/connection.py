"""One connection to a teacher: a socket, and what becomes of the connection under it.

It moves whole messages and reports what happens to the link; what a message means, and when to open another connection,
is opd/replica.py's. A connection that failed is closed and a new one made: what was half sent goes with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

import zmq
from zmq.utils.monitor import recv_monitor_message

from opd.chunks import MAX_REPLY_BYTES
from opd.errors import ConfigError
from opd.wire import COPY_BYTES

_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)
_MESSAGES_PER_TURN = 64  # a peer that floods must not keep the caller from looking at its deadline


class Event(Enum):
    """What a connection can come to."""

    CONNECTED = "connected, no handshake"  # the kernel accepts for a stopped process too
    READY = "connected, no answer to info"
    STRANGER = "whoever listens there does not speak our protocol"
    DENIED = "it refuses our credentials"
    LOST = "the connection was lost"


_MEANING = {
    zmq.EVENT_CONNECTED: Event.CONNECTED,
    zmq.EVENT_HANDSHAKE_SUCCEEDED: Event.READY,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: Event.STRANGER,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: Event.DENIED,
}


class Connection:
    """See the module. For one thread at a time.

    Raises:
        ConfigError: no socket can connect to the address.
    """

    def __init__(self, context: zmq.Context, address: str):
        # DEALER, not REQ: after a timeout a REQ socket refuses the next send. One per replica: a socket that is
        # connected to several would go on sending to a dead one in turn.
        socket = context.socket(zmq.DEALER)
        socket.linger = 0
        socket.copy_threshold = COPY_BYTES
        socket.immediate = 1  # nothing is queued for a peer that is not there
        socket.ipv6 = int("[" in address)
        socket.sndhwm = socket.rcvhwm = 16  # messages, a few more than requests are ever under way
        socket.maxmsgsize = MAX_REPLY_BYTES + (1 << 20)
        socket.handshake_ivl = socket.connect_timeout = 5000
        socket.reconnect_ivl, socket.reconnect_ivl_max = 100, 2000
        socket.tcp_keepalive, socket.tcp_keepalive_idle = 1, 30
        socket.tcp_keepalive_intvl, socket.tcp_keepalive_cnt = 10, 3
        socket.setsockopt(zmq.TCP_MAXRT, 60_000)
        self._monitor = socket.get_monitor_socket(_EVENTS)
        self._socket = socket
        try:
            socket.connect(address)
        except zmq.ZMQError as e:
            self.close()
            raise ConfigError(f"teacher address {address!r} cannot be connected to: {e}") from None

    @property
    def sockets(self) -> list[zmq.Socket]:
        """What to poll."""
        return [self._socket, self._monitor]

    def close(self) -> None:
        """Drop whatever was half sent or half received."""
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._socket.close(linger=0)
            self._monitor.close(linger=0)

    def send(self, body: bytes) -> bool:
        """Send one message; False when the connection does not take it now."""
        try:
            self._socket.send_multipart([b"", body], flags=zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def messages(self) -> Iterator[list[memoryview]]:
        """The frames of each message that has arrived; ends early when the connection is closed meanwhile."""
        for _ in range(_MESSAGES_PER_TURN):
            if self._socket.closed or not self._socket.poll(0):
                return
            yield [frame.buffer for frame in self._socket.recv_multipart(zmq.NOBLOCK, copy=False)]

    def events(self) -> Iterator[Event]:
        """What has happened to the link; ends early when the connection is closed meanwhile."""
        while not self._monitor.closed and self._monitor.poll(0):
            yield _MEANING.get(recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"], Event.LOST)
