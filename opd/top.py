"""All replicas of a teacher in one table: `python -m opd.top tcp://host:15555,tcp://host:15556`.

Asks each address for `info` every few seconds, as any client could, and shows what its counters did in between: rates
and means are of the time between two answers, or since the replica's start after the first one; busy, failed, bad rows,
lost and restarts are totals since its start. A replica that does not answer is shown with the age of its last answer.
Ctrl-C ends it.

Exit codes of --once: 0 all replicas answered; 1 some did not. 2: an address is none.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import zmq

from opd.errors import WireError
from opd.wire import Counters, InfoRequest, ServerInfo, clip, decode_reply, encode_request, new_id

ANSWER_S = 3.0  # an answer that takes longer is not waited for: a new connection asks again
HOME, CLEAR, END_OF_LINE, BELOW = "\x1b[H", "\x1b[2J", "\x1b[K", "\x1b[J"
NONE = "-"  # not known; never 0
COLUMNS = [
    *("replica", "state", "model", "up", "req/s", "tok/s", "rows/batch", "tok/batch", "queued", "queue ms", "score ms"),
    *("request ms", "cache", "busy", "failed", "bad rows", "lost", "restarts", "age"),
]


class Sample(NamedTuple):
    """One answer, and when it came."""

    info: ServerInfo
    boot: str
    at: float


class Replica:
    """One address: asks, listens, and keeps the last two answers."""

    def __init__(self, context: zmq.Context, address: str):
        self.address = address
        self.last: Sample | None = None
        self.before: Sample | None = None  # the answer before that, of the same start of the server
        self.problem = ""  # it answered, but not with what we asked for
        self.began = time.monotonic()
        self._context = context
        self._asked: bytes | None = None  # id of the question without an answer
        self._asked_at = 0.0
        self.socket = self._open()

    def _open(self) -> zmq.Socket:
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.ipv6 = int("[" in self.address)
        socket.connect(self.address)
        return socket

    def ask(self) -> None:
        now = time.monotonic()
        if self._asked is not None:
            if now - self._asked_at < ANSWER_S:
                return
            self.socket.close()
            self.socket = self._open()
            self.problem = ""
        self._asked, self._asked_at = new_id(), now
        self.socket.send_multipart([b"", encode_request(InfoRequest(id=self._asked, client="opd.top"))])

    def listen(self) -> None:
        """Take the answers that have come."""
        while True:
            try:
                frames = self.socket.recv_multipart(flags=zmq.DONTWAIT)
            except zmq.Again:
                return
            try:
                reply, _ = decode_reply(frames[1:])
            except WireError as e:
                self._asked, self.problem = None, clip(str(e))
                continue
            if reply.id != self._asked:
                continue
            self._asked = None
            if reply.info is None:
                self.problem = clip(f"{reply.code}: {reply.message}")
                continue
            self.problem = ""
            same_start = self.last is not None and self.last.boot == reply.boot
            self.before = self.last if same_start else None
            self.last = Sample(reply.info, reply.boot, time.monotonic())

    @property
    def answers(self) -> bool:
        late = self._asked is not None and time.monotonic() - self._asked_at >= ANSWER_S
        return self.last is not None and not self.problem and not late

    @property
    def waiting(self) -> bool:
        return self._asked is not None

    @property
    def age_s(self) -> float:
        """Since its last answer, or since we began to ask."""
        return time.monotonic() - (self.last.at if self.last is not None else self.began)


def ratio(amount: float, per: float, scale: float = 1.0) -> float | None:
    return amount / per * scale if per > 0 else None


class Rates(NamedTuple):
    """What happened between two answers; None where nothing did."""

    requests_per_s: float | None
    tokens_per_s: float | None
    rows_per_batch: float | None
    tokens_per_batch: float | None
    queue_ms: float | None
    score_ms: float | None  # of a batch
    request_ms: float | None
    cache: float | None  # share of hits


def rates(new: Counters, old: Counters | None) -> Rates:
    """Rates and means between two answers of one start of a server, or since its start."""

    def more(name: str) -> float:
        return (getattr(new, name) or 0) - (getattr(old, name) or 0 if old is not None else 0)

    seconds, requests, batches = more("uptime_s"), more("scored_requests"), more("batches")
    return Rates(
        ratio(requests, seconds),
        ratio(more("tokens"), seconds),
        ratio(more("rows"), batches),
        ratio(more("tokens"), batches),
        ratio(more("queue_s"), requests, 1000),
        ratio(more("score_s"), batches, 1000),
        ratio(more("request_s"), requests, 1000),
        None if new.cache_hits is None else ratio(more("cache_hits"), more("cache_hits") + more("cache_misses")),
    )


def line_of(replica: Replica) -> list[str]:
    """A replica's cells, in the order of COLUMNS."""
    age = f"{replica.age_s:.0f} s"
    sample = replica.last
    model = clip(sample.info.model.name.rstrip("/").rpartition("/")[2]) if sample and sample.info.model else NONE
    if not replica.answers or sample is None:
        state = (
            "no teacher" if replica.problem else "no answer" if replica.last or replica.age_s >= ANSWER_S else "asked"
        )
        return [replica.address, state, model, *[NONE] * (len(COLUMNS) - 4), age]
    counters = sample.info.counters
    if counters is None:
        return [replica.address, sample.info.state, model, *[NONE] * (len(COLUMNS) - 4), age]
    now = rates(counters, replica.before.info.counters if replica.before is not None else None)
    replies = counters.replies
    return [
        *(replica.address, sample.info.state, model, _duration(counters.uptime_s)),
        *map(_number, (now.requests_per_s, now.tokens_per_s, now.rows_per_batch, now.tokens_per_batch)),
        f"{counters.queued_requests} ({_number(sample.info.queued_tokens)} tok)",
        *map(_number, (now.queue_ms, now.score_ms, now.request_ms)),
        NONE if now.cache is None else f"{100 * now.cache:.0f}%",
        str(replies.get("busy", 0)),
        str(replies.get("error", 0) + replies.get("expired", 0)),
        str(sum(counters.row_errors.values())),
        str(counters.undeliverable + counters.dropped),
        str(counters.worker_restarts),
        age,
    ]


def table(replicas: Sequence[Replica]) -> list[str]:
    """The lines of the screen: a heading, the table, and what needs words."""
    answering = [replica for replica in replicas if replica.answers]
    lines = [f"{len(replicas)} replicas, {len(answering)} answer; {time.strftime('%H:%M:%S')}", ""]
    rows = [COLUMNS, *map(line_of, replicas)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:  # text to the left, numbers to the right
        cells = [f"{c:<{w}}" if i < 3 else f"{c:>{w}}" for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    notes = [note for replica in replicas for note in _notes(replica)]
    weights = {s.info.model.model for r in answering if (s := r.last) is not None and s.info.model is not None}
    if len(weights) > 1:
        notes.append(f"the replicas serve {len(weights)} different models: a client refuses to use them together")
    return [*lines, "", *notes] if notes else lines


def _notes(replica: Replica) -> list[str]:
    notes = [f"{replica.address}: {replica.problem}"] if replica.problem else []
    if replica.answers and replica.last is not None:
        info = replica.last.info
        if info.state != "ready":
            notes.append(f"{replica.address}: {info.state}: {clip(info.detail)}")
        if info.counters is not None:
            for kind, codes in (("errors", info.counters.errors), ("row errors", info.counters.row_errors)):
                if codes:
                    listing = ", ".join(f"{clip(code)} {number}" for code, number in sorted(codes.items()))
                    notes.append(f"{replica.address}: {kind} by code: {listing}")
    return notes


def _number(value: float | None) -> str:
    """Three digits that matter, with k and M."""
    if value is None:
        return NONE
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}"


def _duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if hours < 2 else f"{hours:.0f} h"


def as_json(replicas: Sequence[Replica]) -> str:
    """The answers as they came, one object for each replica."""
    objects: list[dict[str, Any]] = []
    for replica in replicas:
        info = msgspec.to_builtins(replica.last.info) if replica.last is not None else None
        objects.append(
            {
                "address": replica.address,
                "answers": replica.answers,
                "age_s": round(replica.age_s, 3),
                "problem": replica.problem,
                "info": info,
            }
        )
    return json.dumps({"replicas": objects})


def listen_for(replicas: Sequence[Replica], seconds: float, *, until_all: bool = False) -> None:
    """Take answers for some time, or until nobody owes one."""
    end = time.monotonic() + seconds
    poller = zmq.Poller()
    for replica in replicas:
        poller.register(replica.socket, zmq.POLLIN)
    while (left := end - time.monotonic()) > 0:
        if until_all and not any(replica.waiting for replica in replicas):
            return
        ready = dict(poller.poll(int(left * 1000) + 1))
        for replica in replicas:
            if replica.socket in ready:
                replica.listen()


def draw(replicas: Sequence[Replica]) -> None:
    lines = table(replicas)
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        sys.stdout.write(HOME + "".join(f"{line[:width]}{END_OF_LINE}\n" for line in lines) + BELOW)
    else:
        sys.stdout.write("\n".join(lines) + "\n\n")
    sys.stdout.flush()


def watch(replicas: Sequence[Replica], interval_s: float) -> None:
    """Ask and draw until somebody interrupts."""
    if sys.stdout.isatty():
        sys.stdout.write(CLEAR)
    wait_s = min(interval_s, 0.5)  # the first answers come at once
    while True:
        for replica in replicas:
            replica.ask()
        listen_for(replicas, wait_s)
        draw(replicas)
        wait_s = interval_s


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m opd.top",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("addresses", nargs="+", metavar="ADDR", help="tcp://host:port; several also with commas")
    parser.add_argument("--interval", type=float, default=2.0, help="seconds between two questions (default 2)")
    parser.add_argument("--once", action="store_true", help="print one table and end")
    parser.add_argument("--json", action="store_true", help="with --once: the answers as one line of JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.json and not args.once:
        parser.error("--json goes with --once")
    if not args.interval >= 0.1:
        parser.error(f"--interval {args.interval:g} is below 0.1 seconds")
    addresses = [part.strip() for text in args.addresses for part in text.split(",") if part.strip()]
    context = zmq.Context()
    try:
        replicas = []
        for address in dict.fromkeys(addresses):
            try:
                replicas.append(Replica(context, address))
            except zmq.ZMQError as e:
                parser.error(f"{address!r} is no address ({e}); write tcp://host:port")
        if not args.once:
            watch(replicas, args.interval)
        for replica in replicas:
            replica.ask()
        listen_for(replicas, ANSWER_S, until_all=True)
        print(as_json(replicas) if args.json else "\n".join(table(replicas)), flush=True)
        return 0 if all(replica.answers for replica in replicas) else 1
    except KeyboardInterrupt:
        return 130 if args.once else 0
    except BrokenPipeError:  # whoever read our table has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains once more at its end
        return 0
    finally:
        context.destroy(linger=0)


if __name__ == "__main__":
    sys.exit(main())
