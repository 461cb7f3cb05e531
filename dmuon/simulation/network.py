"""Which ranks communicate with which, over what links, and how long a collective takes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from dmuon.platform.options import is_integer
from dmuon.simulation.hardware import Hardware, Link

Collective = Literal["broadcast", "reduce", "all_gather", "reduce_scatter", "all_reduce"]


@dataclass(frozen=True, slots=True)
class Ring:
    """The members of one process group: how many, and over how many nodes."""

    size: int
    nodes: int

    @property
    def link(self) -> Literal["intra", "inter"]:
        """The class of link that bounds it."""
        return "intra" if self.nodes == 1 else "inter"


@dataclass(frozen=True, slots=True)
class Topology:
    """A grid of ranks, ``replicate × shard × tp``; tensor parallelism lies innermost.

    Attributes:
        world: number of ranks.
        gpus_per_node: ranks of one node.
        replicate: HSDP replicas; ``replicate = world / tp`` is DDP.
        tp: tensor-parallel ranks.

    Raises:
        ValueError: a count below 1, or one that does not divide what it must.
    """

    world: int
    gpus_per_node: int = 8
    replicate: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for name in ("world", "gpus_per_node", "replicate", "tp"):
            value = getattr(self, name)
            if not is_integer(value, 1):
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
        if self.world % (self.replicate * self.tp):
            raise ValueError(
                f"replicate={self.replicate} × tp={self.tp} does not divide world={self.world}; change one of the three"
            )
        if self.world > self.gpus_per_node and self.world % self.gpus_per_node:
            raise ValueError(f"gpus_per_node={self.gpus_per_node} does not divide world={self.world}; give whole nodes")
        if self.gpus_per_node % self.tp and self.tp % self.gpus_per_node:
            raise ValueError(
                f"tp={self.tp} and gpus_per_node={self.gpus_per_node}: one must divide the other; change tp"
            )

    @property
    def shard(self) -> int:
        """Ranks over which FSDP2 shards, and over which owners broadcast."""
        return self.world // (self.replicate * self.tp)

    @property
    def nodes(self) -> int:
        return -(-self.world // self.gpus_per_node)

    def coordinates(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Replica, shard and tensor-parallel index of every rank."""
        ranks = np.arange(self.world)
        data = ranks // self.tp
        return data // self.shard, data % self.shard, ranks % self.tp

    def group_ids(self) -> dict[str, NDArray[np.int64]]:
        """Per kind of group, the group of every rank.

        ``"shard"``: those that share a replica and a tensor-parallel index; ``"replicate"``: those that hold the same
        shard; ``"data"``: those that differ in their data only.
        """
        replica, shard, tp = self.coordinates()
        return {"shard": replica * self.tp + tp, "replicate": shard * self.tp + tp, "data": tp}

    def ring(self, ids: NDArray[np.int64]) -> Ring:
        """The shape of the groups ``ids``: of the one over most nodes, where they differ."""
        node = np.arange(self.world) // self.gpus_per_node
        pairs = np.unique(np.stack((ids, node)), axis=1)
        return Ring(int(np.bincount(ids).max()), int(np.bincount(pairs[0]).max()))


class Network(Protocol):
    """How long collectives take."""

    def seconds(self, kind: Collective, ring: Ring, nbytes: float, calls: int = 1) -> float:
        """Seconds of ``calls`` collectives of one kind on one stream, over ``nbytes`` together.

        ``nbytes`` counts whole tensors: what every rank holds after an all-gather or before a reduce-scatter.
        """
        ...


@dataclass(frozen=True, slots=True)
class AlphaBeta:
    """``α · hops + bytes / bandwidth`` per link class, collectives as pipelined rings.

    A ring visits each node once: ``nodes - 1`` hops are between nodes, the others inside. It leaves a node over as many
    network adapters as it has members there. Broadcast and reduce move every byte over each link once, all-gather and
    reduce-scatter ``(n - 1) / n`` of them, all-reduce twice that. The hops of an all-reduce are those of a ring or of a
    tree (a chain inside each node, a binary tree over nodes), whichever is shorter.

    Broadcasts from several owners follow one another along the ring, because a buffer holds a block in the order of its
    owners. Each starts once the one before has passed. Together they go around at most twice, and each start costs one
    more hop. Reductions do the same. All-gathers have no such order: each goes all the way around.
    """

    intra: Link
    inter: Link

    @classmethod
    def of(cls, hardware: Hardware) -> AlphaBeta:
        return cls(hardware.intra, hardware.inter)

    def seconds(self, kind: Collective, ring: Ring, nbytes: float, calls: int = 1) -> float:
        if ring.size == 1 or calls == 0:
            return 0.0
        bandwidth = self.intra.bandwidth
        if ring.nodes > 1:
            bandwidth = min(bandwidth, ring.size / ring.nodes * self.inter.bandwidth)
        around = (ring.nodes - 1) * self.inter.latency_s + (ring.size - ring.nodes) * self.intra.latency_s
        part = (ring.size - 1) / ring.size
        match kind:
            case "broadcast" | "reduce":
                laps = 2 - 1 / calls  # owners spread evenly: the last starts (calls - 1) / calls of a lap behind
                return laps * around + (calls - 1) * self.intra.latency_s + nbytes / bandwidth
            case "all_gather" | "reduce_scatter":
                return calls * around + part * nbytes / bandwidth
            case "all_reduce":
                levels = math.ceil(math.log2(ring.nodes))
                chain = -(-ring.size // ring.nodes) - 1
                tree = levels * self.inter.latency_s + chain * self.intra.latency_s
                return 2 * (calls * min(around, tree) + part * nbytes / bandwidth)
