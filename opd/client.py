"""The trainer's side of the wire: a batch of token ids in, the teacher's log-probs out, or a typed error.

One call of `score` cuts the batch into requests, keeps a few under way on every replica, sends again what a replica
lost, checks every reply (opd/delivery.py), and puts the values back into the caller's order (opd/call.py). The caller
sees one deadline. A row without a value is None, never a number.

Nothing runs between calls: no thread, no timer. A client belongs to the process that made it; its calls may come from
several threads and then follow one another.

Shapes: B = rows, N_i = scored positions of row i, K = topk, C = candidates per position.

Not covered: what the rows mean (opd/align.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from opd.addresses import parse_addresses
from opd.call import Call, Scores, check_batch
from opd.call import Stats as Stats
from opd.deadline import Deadline, check_seconds
from opd.delivery import Delivery
from opd.errors import ConfigError, OPDError, RequestRefused, RowsFailed, TeacherMismatch, TeacherUnavailable
from opd.fingerprint import vocabulary_fingerprint
from opd.replica import Order, Timing
from opd.replicas import Replicas, refuse_stranger
from opd.wire import ModelInfo, ServerInfo, SleepRequest, State, VocabRequest, WakeRequest, clip

logger = logging.getLogger(__name__)


class TeacherClient:
    """Scores token ids with one teacher or several replicas of it. Use it as a context manager, or call `close`.

    Args:
        addresses: `tcp://host:port` of each replica; a string may hold several, separated by commas.
        max_tokens_per_request: prompt and response ids in one request. A row longer than that goes alone.
        requests_in_flight: per replica; the next ones wait here, so that they can still go to another.
        client_name: how the teacher's logs and its fairness call this client. Has to be unique; the default is.
        timing: how patient it is with one replica. The caller's own patience is `timeout_s` of each call.
        seed: of the random pauses, for tests.

    Raises:
        ConfigError: no address, one twice, or one that no socket can connect to.
    """

    def __init__(
        self,
        addresses: Sequence[str] | str,
        *,
        max_tokens_per_request: int = 65_536,
        requests_in_flight: int = 3,
        client_name: str = "",
        timing: Timing | None = None,
        seed: int | None = None,
    ):
        if max_tokens_per_request < 1 or not 1 <= requests_in_flight <= 8:
            raise ConfigError(
                f"max_tokens_per_request={max_tokens_per_request} must be positive and "
                f"requests_in_flight={requests_in_flight} within [1, 8]"
            )
        self._max_tokens = max_tokens_per_request
        self._depth = requests_in_flight
        self._timing = timing or Timing()
        self._name = clip(client_name or f"{socket.gethostname()}-{os.getpid()}-{os.urandom(3).hex()}")
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._replicas = Replicas(parse_addresses(addresses), client_name=self._name, timing=self._timing, seed=seed)
        # A context that is collected waits for ever for sockets that are open. So whoever forgets close() is let go,
        # for which the replicas may not refer back to this client.
        weakref.finalize(self, _let_go, self._replicas, self._pid).atexit = False

    # ------------------------------------------------------------------------------------------------ public calls

    def wait_until_ready(self, timeout_s: float = 600.0) -> ModelInfo:
        """Wait until every replica has loaded the same model, and pin its fingerprints for all calls to come.

        Raises:
            TeacherUnavailable: not all ready in time, or one of them says that it has failed; names each and its state.
            TeacherMismatch: two replicas, or a replica and the pins, differ in model or tokenizer.
            ConfigError: an address where no teacher listens, or none that talks to us.
        """
        with self._exclusively(timeout_s) as deadline:
            heard_before = {replica: replica.generation for replica in self._replicas}
            for replica in self._replicas:
                replica.ask_again()
            log_at = self._timing.log_every_s
            while True:
                self._replicas.turn(deadline)
                if all(replica.up for replica in self._replicas):
                    return self._replicas[0].model
                for replica, before in heard_before.items():
                    refuse_stranger(replica)
                    news = replica.info if replica.generation > before else None
                    if news is not None and news.state == "failed":
                        raise TeacherUnavailable(f"the teacher at {replica.address} failed: {news.detail}")
                if deadline.passed:
                    raise TeacherUnavailable(
                        f"no teacher ready after {deadline.timeout_s:.1f} s: {self._replicas.describe()}; "
                        "start it first, or raise teacher.ready_timeout_s"
                    )
                if deadline.elapsed_s >= log_at:
                    log_at += self._timing.log_every_s
                    logger.info(
                        "waiting for the teacher: %.0f s, %.0f s more at most; %s",
                        deadline.elapsed_s,
                        deadline.left_s,
                        self._replicas.describe(),
                    )

    def info(self, address: str | None = None, *, timeout_s: float = 10.0) -> ServerInfo:
        """Ask one replica, the first by default, how it is, whatever its state.

        Raises:
            TeacherUnavailable: no answer in time.
            TeacherMismatch: as wait_until_ready.
        """
        with self._exclusively(timeout_s) as deadline:
            by_address = {replica.address: replica for replica in self._replicas}
            if address is not None and address not in by_address:
                raise ConfigError(f"{address!r} is not among the teacher's addresses: {', '.join(by_address)}")
            replica = by_address[address] if address is not None else self._replicas[0]
            before = replica.generation
            replica.ask_again()
            while replica.generation == before or replica.info is None:
                if deadline.passed:
                    raise TeacherUnavailable(f"no answer to info in {timeout_s:.1f} s: {replica.describe()}")
                self._replicas.turn(deadline)
            return replica.info

    def score(
        self,
        rows: Sequence[np.ndarray],
        starts: Sequence[int] | np.ndarray,
        *,
        topk: int = 0,
        candidates: Sequence[np.ndarray] | None = None,
        temperature: float = 1.0,
        timeout_s: float = 600.0,
        return_row_errors: bool = False,
        prefetched: bool = False,
    ) -> Scores:
        """Score a batch: log p(row[i] | row[:i]) for every i >= start of every row.

        Args:
            rows: integer ids [L_i], prompt and response; equal prompts are found and kept together.
            starts: first scored position of each row, 1 <= start <= L_i. A row whose start is L_i has no value to get.
            topk: also the K most probable ids at each position, and their log-probs.
            candidates: integer ids [N_i, C] for each row, the same C for all: also the log-probs of exactly these. An
                id may come twice at one position, and has its value twice then.
            temperature: the teacher's logits are divided by it.
            timeout_s: for the whole call, through retries, restarts and waiting for another thread.
            return_row_errors: give rows that the teacher cannot score as None, listed in `row_errors`.
            prefetched: ask for each row where a `prefetch`, of any process, sends it, unless that replica is down;
                otherwise a row goes to the replica that has the least to do.

        Returns:
            Values that passed every check. The arrays are read-only views of the replies.

        Raises:
            RowsFailed: rows without a value, unless return_row_errors; all of them are in its `row_errors`.
            TeacherUnavailable: not everything was answered in time.
            TeacherMismatch: another model or tokenizer answered than the pinned one.
            BadReply: a request got replies that fail a check, several times.
            RequestRefused: the teacher says that the request cannot be answered, or cannot give such a top-k,
                candidates or temperature.
            ValueError: rows, starts or candidates that are not what is said above; the message names the row.
        """
        with self._delivery(timeout_s, rows, starts, topk, temperature, candidates) as delivery:
            delivery.score(by_home=prefetched)
            call = delivery.call
            if call.row_errors and not return_row_errors:
                raise RowsFailed(call.row_errors, call.batch.num_rows)
            return call.scores()

    def prefetch(
        self,
        rows: Sequence[np.ndarray],
        starts: Sequence[int] | np.ndarray,
        *,
        topk: int = 0,
        candidates: Sequence[np.ndarray] | None = None,
        temperature: float = 1.0,
        timeout_s: float = 2.0,
        keep_s: float = 600.0,
    ) -> int:
        """Ask the teacher to score rows when nobody waits, so that a `score` of the same rows later costs nothing.

        A prompt's rows go to one replica, where a `score` with `prefetched=True` asks for them, also in another
        process. Best effort: a teacher that cannot be reached or has no room is no error, and rows that were not
        prefetched are scored when they are asked for.

        Args:
            rows, starts, topk, candidates, temperature: as in the `score` to come; another value of any is another
                question.
            timeout_s: how long to wait for teachers to say that they will try, which they do at once.
            keep_s: how long they may still begin with it.

        Returns:
            How many rows the teachers took.

        Raises:
            TeacherMismatch: another model or tokenizer answered than the pinned one.
            ValueError: as score.
        """
        check_seconds("keep_s", keep_s)
        try:
            with self._delivery(timeout_s, rows, starts, topk, temperature, candidates) as delivery:
                return delivery.prefetch(keep_s)
        except TeacherUnavailable as e:
            logger.info("nothing was prefetched: %s", e)
            return 0

    def sleep(self, *, timeout_s: float = 600.0) -> None:
        """Let every replica answer what it holds and then free its accelerator's memory; wait until that is done.

        Until `wake`, no replica scores: requests of all clients are told to come back later.

        Raises:
            TeacherUnavailable: not all asleep in time; names each and its state.
            RequestRefused: a backend that cannot sleep.
            TeacherMismatch: as wait_until_ready.
        """
        self._order(SleepRequest, "sleeping", timeout_s)

    def wake(self, timeout_s: float = 600.0) -> None:
        """Bring every replica's model back, and wait until all can score; one that is awake stays so.

        Raises:
            TeacherUnavailable, TeacherMismatch: as wait_until_ready.
        """
        self._order(WakeRequest, "ready", timeout_s)

    def vocabulary(self, timeout_s: float = 60.0) -> bytes:
        """Which token each id is: what the pinned tokenizer fingerprint is a hash of (opd/fingerprint.py).

        Raises:
            TeacherUnavailable: not all replicas answered in time.
            RequestRefused: a teacher that does not know.
            TeacherMismatch: as wait_until_ready, or an answer that is not what was pinned.
        """
        self._order(VocabRequest, "ready", timeout_s)
        assert self._replicas.pinned is not None
        vocabulary = self._replicas[0].vocabulary
        found = vocabulary_fingerprint(vocabulary)
        if found != self._replicas.pinned.tokenizer:
            raise TeacherMismatch(
                f"the vocabulary of {self._replicas[0].address} has the fingerprint {found}, "
                f"pinned is {self._replicas.pinned.tokenizer!r}"
            )
        return vocabulary

    def close(self) -> None:
        """Close every connection at once; a call under way in another thread ends with an error."""
        self._replicas.closing = True
        if os.getpid() != self._pid:
            return  # a forked child: the sockets are the parent's
        if not self._lock.acquire(timeout=5.0):
            raise OPDError("a call under way in another thread does not end; the client stays open")
        try:
            self._replicas.close()
        finally:
            self._lock.release()

    def __enter__(self) -> TeacherClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("a TeacherClient cannot be sent to another process; make one there from the addresses")

    # ------------------------------------------------------------------------------------------------ one call

    @contextlib.contextmanager
    def _delivery(
        self,
        timeout_s: float,
        rows: Sequence[np.ndarray],
        starts: Sequence[int] | np.ndarray,
        topk: int,
        temperature: float,
        candidates: Sequence[np.ndarray] | None,
    ) -> Iterator[Delivery]:
        """A call about rows, with its arguments checked before anything is waited for."""
        batch = check_batch(rows, starts, topk, temperature, candidates)
        with self._exclusively(timeout_s) as deadline:
            yield Delivery(
                Call(batch, deadline),
                self._replicas,
                client_name=self._name,
                max_tokens=self._max_tokens,
                depth=self._depth,
            )

    @contextlib.contextmanager
    def _exclusively(self, timeout_s: float) -> Iterator[Deadline]:
        """One call at a time, in the process that made the client, with one deadline."""
        deadline = Deadline(timeout_s)
        if os.getpid() != self._pid:
            # sends on the parent's sockets seem to work and are never answered
            raise OPDError(
                f"this TeacherClient belongs to process {self._pid} and was forked into {os.getpid()}; make one here"
            )
        if not self._lock.acquire(timeout=deadline.left_s):
            raise TeacherUnavailable(f"another thread has been using this client for {timeout_s:.1f} s")
        try:
            if self._replicas.closing:
                raise OPDError("this TeacherClient is closed")
            self._replicas.begin()
            yield deadline
        except OPDError:
            raise
        except BaseException:
            # Ctrl-C may have come between two frames of a message: the rest of it must not meet the next one
            self._replicas.reset()
            raise
        finally:
            self._replicas.forget()
            self._lock.release()

    def _order(self, order: Order, state: State, timeout_s: float) -> None:
        """Send an order to every replica, and wait until all are in the state that it leads to."""
        with self._exclusively(timeout_s) as deadline:
            for replica in self._replicas:
                replica.order, replica.order_refused = order, ("", "")
                replica.ask_again()
            try:
                while True:
                    self._replicas.turn(deadline)
                    for replica in self._replicas:
                        refuse_stranger(replica)
                        code, message = replica.order_refused
                        if code:
                            raise RequestRefused(code, f"{replica.address}: {message}")
                    done = [
                        replica.order is None and replica.info is not None and replica.info.state == state
                        for replica in self._replicas
                    ]
                    if all(done):
                        return
                    if deadline.passed:
                        raise TeacherUnavailable(
                            f"not all {state} after {timeout_s:.1f} s: {self._replicas.describe()}"
                        )
            finally:
                for replica in self._replicas:
                    replica.order = None


def _let_go(replicas: Replicas, pid: int) -> None:
    """Close what a client left open, in the process that opened it."""
    if os.getpid() == pid:
        replicas.close()
