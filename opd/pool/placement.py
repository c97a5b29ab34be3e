"""Whether the replicas fit on the nodes of a cluster: plain arithmetic, and a sentence when they do not.

A replica lives on one node: its processes share memory and the links between the node's GPUs.

Not covered: replicas that span nodes, and which GPU of a node a replica gets; Ray decides that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from opd.errors import ConfigError


@dataclass(frozen=True)
class Node:
    """A node of the cluster that is alive."""

    id: str
    ip: str
    gpus: float  # all of them
    cpus: float
    free_gpus: float  # what Ray has not given away
    free_cpus: float

    def describe(self) -> str:
        gpus = f"{self.gpus:g} GPUs ({self.free_gpus:g} free)"
        return f"{self.ip} [{self.id[:8]}]: {gpus}, {self.cpus:g} CPUs ({self.free_cpus:g} free)"


@dataclass(frozen=True)
class Size:
    """What one replica takes."""

    gpus: int
    cpus: float

    def describe(self) -> str:
        return f"{self.gpus} GPUs and {self.cpus:g} CPUs"


def gpus_per_replica(asked: int | None, *, tensor: int, pipeline: int, data: int) -> int:
    """GPUs of a replica: the product of its parallel sizes, which has to be what was asked for if both are given.

    Raises:
        ConfigError: they contradict each other.
    """
    product = tensor * pipeline * data
    if asked is None:
        return product if product > 1 else 0
    if product > 1 and asked != product:
        raise ConfigError(
            f"--gpus-per-replica {asked} does not fit tensor {tensor} x pipeline {pipeline} x data {data} = {product} "
            f"parallel parts; a part needs a GPU: give --gpus-per-replica {product}, or leave it out"
        )
    return asked


def check_fit(nodes: Sequence[Node], replicas: int, size: Size) -> None:
    """See that every replica has a node.

    Raises:
        ConfigError: names what is missing, and every node with what is free on it.
    """
    listing = "; ".join(node.describe() for node in nodes) or "none"
    if not any(size.gpus <= node.gpus and size.cpus <= node.cpus for node in nodes):
        raise ConfigError(
            f"a replica of {size.describe()} has to fit into one node, and no node is that large. Nodes: {listing}. "
            f"Lower --gpus-per-replica (tensor x pipeline x data parallel size) or --cpus-per-replica"
        )
    room = sum(_room(node, size, replicas) for node in nodes)
    if room < replicas:
        raise ConfigError(
            f"{replicas} replicas of {size.describe()} do not fit into what is free: there is room for {room}. "
            f"Nodes: {listing}. Lower --replicas, or wait until something else ends"
        )


def _room(node: Node, size: Size, most: int) -> int:
    room = float(most)
    for need, free in ((size.gpus, node.free_gpus), (size.cpus, node.free_cpus)):
        if need:
            room = min(room, math.floor(free / need + 1e-6))  # Ray counts in steps of 1e-4
    return int(room)
