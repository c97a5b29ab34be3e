"""Several teachers on a Ray cluster: `python -m opd.teacher_pool --model DIR --replicas 4 --gpus-per-replica 2`.

Starts N teacher servers as actors in a placement group, on an existing cluster (--ray-address or RAY_ADDRESS) or on
this machine, spread over the nodes; starts those again that are lost; and says where they are: once all are ready, the
line `TEACHER_ADDR=tcp://...,tcp://...` on stdout and, if asked for, a file that follows a replica to another node.
All other options go to opd.teacher_server as they are. Model folder and this package have to be at the same path on
every node. SIGTERM or Ctrl-C drains and stops everything, a second one stops it at once.

Exit codes: 0 drained after SIGTERM; 130 after Ctrl-C; 143 after a second SIGTERM; 2 a setting cannot work (does not
fit, address taken, no such model).
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import queue
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from opd import teacher_server
from opd.errors import ConfigError
from opd.pool.placement import Node, Size, check_fit, gpus_per_replica
from opd.pool.replica import Event, Plan, Replica

logger = logging.getLogger(__name__)

PLACE_TIMEOUT_S = 60.0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m opd.teacher_pool",
        description=(__doc__ or "").split("\n\n")[1],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,  # what is not ours is the server's
    )
    add = parser.add_argument
    add("--replicas", type=_positive, default=1, help="teacher servers to keep running")
    add("--gpus-per-replica", type=_not_negative, default=None, help="0: on CPUs; default: product of the sizes below")
    add("--cpus-per-replica", type=float, default=1.0, help="CPUs that Ray sets aside for a replica")
    add("--tensor-parallel-size", type=_positive, default=1, help="for backends that can; passed on when above 1")
    add("--pipeline-parallel-size", type=_positive, default=1, help="as above")
    add("--data-parallel-size", type=_positive, default=1, help="as above")
    add("--ray-address", default=os.environ.get("RAY_ADDRESS", ""), help="cluster to use; empty: one on this machine")
    add("--base-port", type=_positive, default=15_555, help="replica i serves on this port + i, on whatever node it is")
    add(
        "--insecure", action="store_true", help="serve on the nodes' addresses: no keys, no encryption, closed networks"
    )
    add("--metrics-port", type=_positive, default=None, help="replica i answers /metrics on this port + i; None: off")
    add("--address-file", type=Path, default=None, help="file with the addresses, rewritten when one changes")
    add("--silent-s", type=float, default=30.0, help="a server that answers nothing for so long is started again")
    add("--log-level", default="info", choices=("debug", "info", "warning", "error"), help="what is logged to stderr")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args, server_arguments = build_parser().parse_known_args(argv)
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        size = _size(args)
        server_arguments = _server_arguments(args, server_arguments)
        drain_s = teacher_server.build_parser().parse_args(server_arguments).drain_s
        signals = Signals()
        with _cluster(args, size) as loopback, _group(args.replicas, size) as group:
            signals.install()  # once more: Ray has its own handler
            plan = Plan(
                group=group,
                size=size,
                server_arguments=server_arguments,
                base_port=args.base_port,
                metrics_port=args.metrics_port,
                loopback=loopback,
                silent_s=args.silent_s,
                grace_s=drain_s + 2.0,
            )
            Pool(plan, args.replicas, args.address_file).run(signals)
        return signals.exit_code()
    except ConfigError as e:
        print(f"teacher_pool: error: {e}", file=sys.stderr, flush=True)
        return 2


class Pool:
    """All replicas, and where they are."""

    def __init__(self, plan: Plan, count: int, address_file: Path | None):
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._replicas = [Replica(index, plan, self._events) for index in range(count)]
        self._address_file = address_file
        self._addresses: dict[int, str] = {}
        self._model = ""
        self._published = ""

    def run(self, signals: Signals) -> None:
        """Until a signal comes.

        Raises:
            ConfigError: a replica cannot work, or serves another model than the others.
        """
        for replica in self._replicas:
            replica.start()
        try:
            while signals.first is None:
                try:
                    event = self._events.get(timeout=0.2)
                except queue.Empty:
                    continue
                self._on(event)
        finally:
            logger.info("stopping %d replicas", len(self._replicas))
            for replica in self._replicas:
                replica.stop()
            while any(replica.is_alive() for replica in self._replicas) and not signals.again.is_set():
                time.sleep(0.05)
            if self._published and self._address_file is not None:
                self._address_file.unlink(missing_ok=True)

    def _on(self, event: Event) -> None:
        if event.kind == "wrong":
            raise ConfigError(f"replica {event.replica}: {event.text}")
        if event.kind == "lost":
            logger.warning("replica %d is lost: %s", event.replica, event.text)
            return
        if self._model not in ("", event.model):
            raise ConfigError(
                f"replica {event.replica} at {event.text} serves another model or tokenizer than the others: "
                "the folder has to hold the same files on every node"
            )
        self._model = event.model
        self._addresses[event.replica] = event.text
        logger.info("replica %d is ready at %s", event.replica, event.text)
        if len(self._addresses) == len(self._replicas):
            self._publish(",".join(self._addresses[index] for index in sorted(self._addresses)))

    def _publish(self, addresses: str) -> None:
        if addresses == self._published:
            return
        if self._address_file is not None:
            _write(self._address_file, addresses + "\n")
        with contextlib.suppress(OSError):  # nobody listens, which is no reason to stop
            print(f"TEACHER_ADDR={addresses}", flush=True)
        self._published = addresses


def _write(path: Path, text: str) -> None:
    """Whoever reads the file sees all of it, the old or the new."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)


def _size(args: argparse.Namespace) -> Size:
    gpus = gpus_per_replica(
        args.gpus_per_replica,
        tensor=args.tensor_parallel_size,
        pipeline=args.pipeline_parallel_size,
        data=args.data_parallel_size,
    )
    if not args.cpus_per_replica > 0:
        raise ConfigError(
            f"--cpus-per-replica {args.cpus_per_replica:g} is not above 0; a part of a CPU, like 0.5, is fine"
        )
    return Size(gpus, args.cpus_per_replica)


def _server_arguments(args: argparse.Namespace, rest: list[str]) -> list[str]:
    """What every server gets, besides its address; the server's own parser sees it first, so that a typo ends here."""
    if any(argument.split("=")[0] == "--bind" for argument in rest):
        raise ConfigError("--bind is the pool's to choose; give --base-port, and --insecure for the nodes' addresses")
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    for name in sizes:
        if getattr(args, name) > 1:
            rest += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    rest += ["--log-level", args.log_level]
    return rest + (["--insecure"] if args.insecure else [])


@contextlib.contextmanager
def _cluster(args: argparse.Namespace, size: Size) -> Iterator[bool]:
    """Connect, and see that everything fits; gives whether the servers stay on this machine's loopback."""
    options: dict[str, Any] = {} if args.ray_address else {"include_dashboard": False}
    try:
        ray.init(args.ray_address or "local", namespace="opd", logging_level=logging.WARNING, **options)
    except (ConnectionError, ValueError, RuntimeError) as e:
        raise ConfigError(f"no Ray cluster at {args.ray_address or 'this machine'}: {e}") from None
    try:
        nodes = _nodes()
        check_fit(nodes, args.replicas, size)
        yield _is_local(nodes, insecure=args.insecure)
    finally:
        ray.shutdown()


def _nodes() -> list[Node]:
    free = ray._private.state.available_resources_per_node()
    nodes = []
    for node in ray.nodes():
        if node["Alive"]:
            have, left = node["Resources"], free.get(node["NodeID"], {})
            amounts = (have.get("GPU", 0), have.get("CPU", 0), left.get("GPU", 0), left.get("CPU", 0))
            nodes.append(Node(node["NodeID"], node["NodeManagerAddress"], *amounts))
    return nodes


def _is_local(nodes: Sequence[Node], *, insecure: bool) -> bool:
    """Whether to serve on loopback: all nodes are this machine and nobody asked for more.

    Raises:
        ConfigError: other machines take part, and --insecure was not given.
    """
    if insecure:
        return False
    others = sorted({node.ip for node in nodes} - {ray.util.get_node_ip_address()})
    if others:
        raise ConfigError(
            f"the cluster has other machines ({', '.join(others)}), so the servers have to listen on the nodes' "
            "addresses, and there are neither keys nor encryption: anyone who reaches them could use the teacher. "
            "Add --insecure if the network is closed"
        )
    return True


@contextlib.contextmanager
def _group(replicas: int, size: Size) -> Iterator[PlacementGroup]:
    """A bundle for each replica, spread over the nodes as far as they go."""
    bundle = {"CPU": size.cpus} | ({"GPU": float(size.gpus)} if size.gpus else {})
    group = placement_group([bundle] * replicas, strategy="SPREAD")
    try:
        if not group.wait(PLACE_TIMEOUT_S):
            listing = "; ".join(node.describe() for node in _nodes())
            raise ConfigError(f"Ray did not place the replicas in {PLACE_TIMEOUT_S:g} s. Nodes: {listing}")
        yield group
    finally:
        remove_placement_group(group)


class Signals:
    """Which signal came first, and whether another one followed."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.again = threading.Event()
        self.install()

    def install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.first is None:
            self.first = number
        else:
            self.again.set()

    def exit_code(self) -> int:
        at_once = self.again.is_set() or self.first == signal.SIGINT
        return 128 + self.first if self.first is not None and at_once else 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not above 0")
    return value


def _not_negative(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is below 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
