"""Signals as messages: a descriptor that a poller can wait for, from which their numbers are read."""

from __future__ import annotations

import signal
import socket as sockets


class Signals:
    """SIGTERM, SIGINT, SIGCHLD and SIGHUP (unless that is ignored, as under nohup), from now on."""

    def __init__(self) -> None:
        self.source, self._write = sockets.socketpair()
        for end in (self.source, self._write):
            end.setblocking(False)
        numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGCHLD]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        for number in numbers:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)

    def read(self) -> bytes:
        """The numbers that have come, once `source` is readable."""
        return self.source.recv(4096)

    @staticmethod
    def let_go() -> None:
        """From here on a signal may simply end this process."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
