"""A pool of teachers on a cluster of several raylets on this machine, with nodes and actors that are killed."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from conftest import CHILD_ENV, ROOT, wait_until

from opd.client import TeacherClient
from opd.errors import ConfigError
from opd.pool.placement import Node, Size, check_fit, gpus_per_replica
from opd.scoring.oracle import oracle_logprobs

SMALL = Size(gpus=0, cpus=1.0)


def node(name: str, *, gpus: float = 0, cpus: float = 8, free_gpus: float | None = None) -> Node:
    return Node(name, f"10.0.0.{name}", gpus, cpus, gpus if free_gpus is None else free_gpus, cpus)


def test_a_replica_larger_than_every_node_is_refused_with_the_nodes_and_what_is_free() -> None:
    """Two nodes of 4 GPUs are not one of 8."""
    with pytest.raises(ConfigError, match=r"one node.*10\.0\.0\.1.*4 GPUs \(1 free\).*10\.0\.0\.2.*--gpus-per-replica"):
        check_fit([node("1", gpus=4, free_gpus=1), node("2", gpus=4)], 1, Size(gpus=8, cpus=1))


def test_replicas_are_counted_on_each_node_by_itself() -> None:
    """3 free GPUs on each of two nodes hold two replicas of 2, not three."""
    nodes = [node("1", gpus=4, free_gpus=3), node("2", gpus=4, free_gpus=3)]
    check_fit(nodes, 2, Size(gpus=2, cpus=1))
    with pytest.raises(ConfigError, match=r"3 replicas of 2 GPUs and 1 CPUs .* room for 2"):
        check_fit(nodes, 3, Size(gpus=2, cpus=1))


def test_cpu_replicas_are_counted_by_cpus() -> None:
    """Parts of a CPU add up without rounding errors."""
    check_fit([node("1", cpus=1)], 10, Size(gpus=0, cpus=0.1))
    with pytest.raises(ConfigError, match="room for 10"):
        check_fit([node("1", cpus=1)], 11, Size(gpus=0, cpus=0.1))


def test_the_parallel_sizes_have_to_make_up_the_gpus_of_a_replica() -> None:
    """Tensor x pipeline x data parallel size is the default, and what is given has to agree with it."""
    assert gpus_per_replica(None, tensor=2, pipeline=2, data=2) == 8
    assert gpus_per_replica(None, tensor=1, pipeline=1, data=1) == 0
    assert gpus_per_replica(4, tensor=1, pipeline=1, data=1) == 4
    with pytest.raises(ConfigError, match="tensor 2 x pipeline 2 x data 1 = 4"):
        gpus_per_replica(2, tensor=2, pipeline=2, data=1)


class Cluster:
    """A head without CPUs, where drivers connect, and two nodes of two CPUs."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster as RayCluster

        self.ray = RayCluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self.nodes = [self.add_node(), self.add_node()]

    def add_node(self) -> Any:
        return self.ray.add_node(num_cpus=2)


class PoolProcess:
    """`python -m opd.teacher_pool` with an oracle, on ports that are free now."""

    def __init__(
        self, folder: Path, *args: str, replicas: int = 2, model: str = "oracle", cluster: Cluster | None = None
    ):
        self.base_port = free_ports(replicas)
        self.log, self.address_file = folder / "pool.log", folder / "addresses"
        command = [sys.executable, "-m", "opd.teacher_pool", "--replicas", str(replicas)]
        command += ["--base-port", str(self.base_port), "--backend", "oracle", "--model", model]
        command += ["--address-file", str(self.address_file), "--silent-s", "5", *args]
        env = {name: value for name, value in CHILD_ENV.items() if name != "RAY_ADDRESS"}
        if cluster is not None:
            env["RAY_ADDRESS"] = cluster.ray.address
        with self.log.open("wb") as out:
            self.popen = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env, cwd=ROOT)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, pattern: str, count: int = 1, timeout_s: float = 60.0) -> list[str]:
        def found() -> bool:
            assert self.popen.poll() is None, f"the pool ended:\n{self.text()}"
            return len(re.findall(pattern, self.text())) >= count

        try:
            wait_until(found, timeout_s, f"{count} times {pattern!r}")
        except AssertionError:
            print(self.text())
            raise
        return re.findall(pattern, self.text())

    def addresses(self) -> list[str]:
        return self.wait_for(r"(?m)^TEACHER_ADDR=(\S+)$")[-1].split(",")

    def places(self) -> list[tuple[str, str, str]]:
        """Replica, node and pid of the actor, of every start so far."""
        return re.findall(r"replica (\d+): node (\w+) \(\S+\), actor (\d+)", self.text())

    def servers(self) -> list[psutil.Process]:
        """The server processes of this pool that live, and their workers."""
        return [p for p in psutil.process_iter(["cmdline"]) if self._is_mine(p.info["cmdline"] or [])]

    def _is_mine(self, command: list[str]) -> bool:
        ports = {f"tcp://127.0.0.1:{self.base_port + index}" for index in range(8)}
        return "opd.pool.child" in command and not ports.isdisjoint(command)

    def end(self) -> None:
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(20)
                return
            self.popen.kill()
            self.popen.wait()


def free_ports(count: int) -> int:
    """The first of `count` ports in a row that nobody has now, below those that the system gives to clients."""
    rng = np.random.default_rng()
    while True:
        first = int(rng.integers(20_000, 32_000))
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    before = os.environ.get("RAY_TMPDIR")
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # short: it becomes a part of socket names
    os.environ["RAY_TMPDIR"] = folder  # Ray notes the newest cluster there, and other tests must not find this one
    cluster = Cluster()
    yield cluster
    cluster.ray.shutdown()
    os.environ.pop("RAY_TMPDIR") if before is None else os.environ.update(RAY_TMPDIR=before)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def start_pool(tmp_path: Path) -> Iterator[Callable[..., PoolProcess]]:
    pools: list[PoolProcess] = []

    def start(*args: str, **options: Any) -> PoolProcess:
        pools.append(PoolProcess(tmp_path, *args, **options))
        return pools[-1]

    yield start
    for pool in pools:
        pool.end()


def score_while(client: TeacherClient, disturb: Callable[[], None], *, seed: int) -> None:
    """Score a batch of some seconds, disturb it in the middle, and compare every value.

    Another seed for each call: a batch that a replica has seen before comes from its cache at once.
    """
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, 1000, 100).astype(np.int32) for _ in range(80)]
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(client.score(rows, [20] * len(rows), timeout_s=60.0)))
    thread.start()
    time.sleep(1.0)
    disturb()
    thread.join(70.0)
    assert found, "the call did not end with values"
    assert found[0].stats.retries, "nothing was under way on what was killed"
    for row, values in zip(rows, found[0].logprobs, strict=True):
        np.testing.assert_allclose(values, oracle_logprobs(row, 20), atol=1e-5)


def test_replicas_survive_the_loss_of_an_actor_and_of_a_node(
    cluster: Cluster, start_pool: Callable[..., PoolProcess]
) -> None:
    """They start on different nodes; a call under way is answered all the same, and both replicas are there again."""
    metrics = free_ports(2)
    pool = start_pool("--metrics-port", str(metrics), model="oracle:us_per_token=1000", cluster=cluster)
    addresses = pool.addresses()
    for port in (metrics, metrics + 1):
        assert urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=10).status == 200
    assert addresses == [f"tcp://127.0.0.1:{pool.base_port + index}" for index in range(2)]
    assert pool.address_file.read_text().strip() == ",".join(addresses)
    places = {replica: (name, int(pid)) for replica, name, pid in pool.places()}
    assert len({name for name, _ in places.values()}) == 2, f"both replicas on one node: {places}"
    with TeacherClient(addresses, max_tokens_per_request=1000) as client:
        client.wait_until_ready(30.0)
        score_while(client, lambda: os.kill(places["0"][1], signal.SIGKILL), seed=0)
        pool.wait_for("replica 0 is ready", 2)
        client.wait_until_ready(30.0)

        lost = next(node for node in cluster.nodes if node.node_id.startswith(places["1"][0]))
        score_while(client, lambda: cluster.ray.remove_node(lost, allow_graceful=False), seed=1)
        pool.wait_for("replica 1 is ready", 2)
        assert pool.places()[-1][1] != places["1"][0]
        client.wait_until_ready(30.0)
    cluster.nodes.remove(lost)
    cluster.nodes.append(cluster.add_node())

    pool.popen.send_signal(signal.SIGTERM)
    assert pool.popen.wait(30) == 0
    assert not pool.servers()
    assert not pool.address_file.exists()


def test_a_replica_that_fits_on_no_node_is_an_error_and_nothing_starts(
    cluster: Cluster, start_pool: Callable[..., PoolProcess]
) -> None:
    """The exit code is 2 and the message lists the nodes."""
    pool = start_pool("--gpus-per-replica", "4", cluster=cluster)
    assert pool.popen.wait(60) == 2
    assert re.search(r"4 GPUs .* one node.*0 GPUs \(0 free\), 2 CPUs", pool.text())


def test_a_model_that_cannot_be_loaded_ends_the_pool_with_the_servers_sentence(
    cluster: Cluster, start_pool: Callable[..., PoolProcess]
) -> None:
    """Starting it again could not help."""
    pool = start_pool(model="oracle:vocabulary=5", cluster=cluster)
    assert pool.popen.wait(90) == 2
    assert re.search(r"teacher_pool: error: replica \d: .* exit code 2: .*vocabulary", pool.text())
    assert not pool.servers()


def test_ctrl_c_leaves_no_process_of_a_local_cluster(start_pool: Callable[..., PoolProcess]) -> None:
    """The pool starts Ray on this machine, and both are gone after Ctrl-C."""
    pool = start_pool("--cpus-per-replica", "0.5", replicas=1)
    pool.addresses()
    family = psutil.Process(pool.popen.pid).children(recursive=True) + pool.servers()
    assert pool.servers(), "no server process was found"
    pool.popen.send_signal(signal.SIGINT)
    assert pool.popen.wait(40) == 130
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive, f"left behind: {alive}"
    assert not pool.address_file.exists()
