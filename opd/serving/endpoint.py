"""The server's address: one ROUTER socket, who may talk to it, and the envelopes that come and go.

It reads whole messages and sends whole replies, and knows nothing of what they mean. A peer that is slow, gone, or
speaks another protocol costs bounded memory and never makes anybody wait.

Not covered: encryption (CURVE keys would be set in `_open_router`, and checked in `answer_zap`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import numpy as np
import zmq

from opd import wire
from opd.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_HOPS = 16  # frames in an envelope: the peer, its correlation id, proxies on the way
MAX_ENVELOPE_BYTES = 4096
MESSAGES_PER_TURN = 256  # read from the socket before the worker and the clock get their turn
TRACK_BYTES = 65_536  # replies from here on are sent without a copy, and counted until the peer has taken them
ZAP_DOMAIN = b"opd"


class _Tracked:
    """A big reply that its peer has not taken yet."""

    def __init__(self, client: str, nbytes: int, frames: list[zmq.Frame]):
        self.client = client
        self.nbytes = nbytes
        self._trackers = [frame.tracker for frame in frames]

    @property
    def done(self) -> bool:
        return all(tracker.done for tracker in self._trackers)


class Endpoint:
    """See the module. All methods are for the front's only thread."""

    def __init__(self, context: zmq.Context, bind: str, *, max_message_bytes: int):
        self.address = ""  # the one that was bound
        self.dropped = 0  # messages without an envelope
        self.undeliverable = 0  # replies whose peer was gone or did not read
        self._wanted = bind
        self.zap = context.socket(zmq.REP)
        # before bind: without a handler libzmq takes an HTTP request for an old peer and hands us its bytes
        self.zap.bind("inproc://zeromq.zap.01")
        self.router = _open_router(context, bind, max_message_bytes)
        self._unsent: list[_Tracked] = []
        self._next_complaint, self._complaints = 0.0, 0

    def bind(self) -> str:
        """Bind, and return the address with the port that was taken.

        Raises:
            ConfigError: the address is taken or is none.
        """
        try:
            self.router.bind(self._wanted)
        except zmq.ZMQError as e:
            if e.errno == zmq.EADDRINUSE:
                reason = "is taken: another server may still run; stop it, or choose another port with --bind"
            else:
                reason = f"cannot be bound ({e}); give --bind an address of this machine, like tcp://127.0.0.1:15555"
            raise ConfigError(f"{self._wanted} {reason}") from None
        self.address = self.router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\x00")
        return self.address

    def answer_zap(self) -> None:
        """Let every peer of our domain in that uses no mechanism; the point is that a peer must speak ZMTP 3 to ask."""
        while True:
            try:
                frames = self.zap.recv_multipart(flags=zmq.DONTWAIT)
            except zmq.Again:
                return
            fits = len(frames) >= 6 and frames[0] == b"1.0" and frames[2] == ZAP_DOMAIN and frames[5] == b"NULL"
            code, text = (b"200", b"OK") if fits else (b"400", b"refused")
            self.zap.send_multipart([b"1.0", frames[1] if len(frames) > 1 else b"", code, text, b"", b""])

    def receive(self) -> Iterator[tuple[list[bytes], list[zmq.Frame]]]:
        """Envelope and body of the messages that have come; some of them, when there are many."""
        for _ in range(MESSAGES_PER_TURN):
            if not self.router.poll(0):
                return
            frames = self.router.recv_multipart(flags=zmq.DONTWAIT, copy=False)
            # REQ-compatible: everything up to and including the first empty frame goes back as it came
            hops = next((i for i in range(1, min(len(frames), MAX_HOPS + 1)) if len(frames[i]) == 0), None)
            if hops is None or sum(len(frame) for frame in frames[: hops + 1]) > MAX_ENVELOPE_BYTES:
                self.dropped += 1
                self.complain("a message without the empty frame of a REQ envelope was dropped: it cannot be answered")
                continue
            yield [frame.bytes for frame in frames[: hops + 1]], frames[hops + 1 :]

    def send(
        self,
        envelope: list[bytes],
        reply: wire.Reply,
        topk_ids: np.ndarray | None = None,
        topk_logprobs: np.ndarray | None = None,
        candidate_logprobs: np.ndarray | None = None,
        *,
        client: str = "",
    ) -> bool:
        """Hand a reply to the socket, without ever waiting for a slow peer; False if it could not be sent."""
        frames = wire.encode_reply(reply, topk_ids, topk_logprobs, candidate_logprobs)
        sizes = [memoryview(frame).nbytes for frame in frames]
        out, tracked = list(frames), []
        for index, size in enumerate(sizes):
            if size >= TRACK_BYTES:
                out[index] = zmq.Frame(frames[index], copy=False, track=True)
                tracked.append(out[index])
        try:
            self.router.send_multipart([*envelope, *out], flags=zmq.DONTWAIT, copy=False)
        except zmq.ZMQError as e:
            if e.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self.undeliverable += 1
            why = "it is gone" if e.errno == zmq.EHOSTUNREACH else "it does not read its replies"
            self.complain(f"a reply of {sum(sizes)} bytes could not be sent to its peer: {why}")
            return False
        if tracked:
            self._unsent.append(_Tracked(client, sum(sizes), tracked))
        return True

    def unsent_bytes(self, client: str) -> tuple[int, int]:
        """Bytes of big replies that peers have not taken yet: of all clients, and of this one."""
        self._unsent = [reply for reply in self._unsent if not reply.done]
        mine = sum(reply.nbytes for reply in self._unsent if reply.client == client)
        return sum(reply.nbytes for reply in self._unsent), mine

    def complain(self, text: str) -> None:
        """Log what peers do wrong, at most once a second: they must not be able to fill the disk."""
        now = time.monotonic()
        if now < self._next_complaint:
            self._complaints += 1
            return
        more = f" ({self._complaints} more like this were not logged)" if self._complaints else ""
        logger.warning("%s%s", wire.clip(text), more)
        self._next_complaint, self._complaints = now + 1.0, 0

    def close(self, linger_ms: int) -> None:
        self.router.close(linger=linger_ms)
        self.zap.close(linger=0)


def _open_router(context: zmq.Context, bind: str, max_message_bytes: int) -> zmq.Socket:
    router = context.socket(zmq.ROUTER)
    options: dict[int, int | bytes] = {
        zmq.LINGER: 0,
        zmq.ROUTER_MANDATORY: 1,  # a reply that cannot be delivered is counted, not dropped in silence
        zmq.SNDHWM: 1000,  # messages; the bytes are bounded by what `_unsent` counts
        zmq.RCVHWM: 16,
        zmq.MAXMSGSIZE: max_message_bytes,
        zmq.BACKLOG: 1024,
        zmq.HANDSHAKE_IVL: 5000,
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: 30,
        zmq.TCP_KEEPALIVE_INTVL: 10,
        zmq.TCP_KEEPALIVE_CNT: 3,
        zmq.TCP_MAXRT: 60_000,  # a peer that takes no bytes for a minute is cut, and its replies are freed
        zmq.IPV6: int("[" in bind),
        zmq.ZAP_DOMAIN: ZAP_DOMAIN,
        zmq.ZAP_ENFORCE_DOMAIN: 1,
    }
    for option, value in options.items():
        router.setsockopt(option, value)
    return router
