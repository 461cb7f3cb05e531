"""Which ranks communicate with which, over what links, and how long a collective takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from dmuon.platform.options import is_integer
from dmuon.simulation.engine import Times
from dmuon.simulation.hardware import Hardware, Link

Collective = Literal["broadcast", "reduce", "all_gather", "reduce_scatter", "all_reduce", "all_to_all"]

_MESSAGE_S = 1.25e-6  # of one peer in an all-to-all: NCCL-tests issue 78 has 0.32 ms for the smallest over 256 ranks


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
        ep: neighbours among the shards of one replica that hold other experts each; what holds the same ones shards
            these.

    Raises:
        ValueError: a count below 1, or one that does not divide what it must.
    """

    world: int
    gpus_per_node: int = 8
    replicate: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in ("world", "gpus_per_node", "replicate", "tp", "ep"):
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
        if self.shard % self.ep:
            raise ValueError(
                f"ep={self.ep} does not divide the {self.shard} shards of a replica; change ep or replicate"
            )

    @property
    def shard(self) -> int:
        """Ranks over which FSDP2 shards, and over which owners broadcast."""
        return self.world // (self.replicate * self.tp)

    @property
    def nodes(self) -> int:
        return -(-self.world // self.gpus_per_node)

    @property
    def rails(self) -> int:
        """Ranks of a row in each of its nodes, where it can communicate in two levels; 0 where it cannot."""
        in_node = self.gpus_per_node // self.tp
        return in_node if in_node > 1 and self.shard > in_node and self.shard % in_node == 0 else 0

    def coordinates(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Replica, shard and tensor-parallel index of every rank."""
        ranks = np.arange(self.world)
        data = ranks // self.tp
        return data // self.shard, data % self.shard, ranks % self.tp

    def group_ids(self) -> dict[str, NDArray[np.int64]]:
        """Per kind of group, the group of every rank.

        ``"shard"``: those that share a replica and a tensor-parallel index; ``"replicate"``: those that hold the same
        shard; ``"data"``: those that differ in their data only; ``"all"``: everybody. ``"expert shard"``: those of
        ``"shard"`` that shard the same experts; ``"experts"``: those of it that hold all experts together, and send
        each other tokens. Where a row can communicate in two levels, ``"rail"``: those of ``"shard"`` with the same
        place in their nodes; ``"node"``: those of it in one node.
        """
        replica, shard, tp = self.coordinates()
        row = replica * self.tp + tp
        rails = self.rails
        levels = (
            {"rail": row * rails + shard % rails, "node": row * (self.shard // rails) + shard // rails} if rails else {}
        )
        return levels | {
            "shard": row,
            "replicate": shard * self.tp + tp,
            "data": tp,
            "all": np.zeros_like(tp),
            "expert shard": row * self.ep + shard % self.ep,
            "experts": row * (self.shard // self.ep) + shard // self.ep,
        }

    def ring(self, ids: NDArray[np.int64]) -> Ring:
        """The shape of the groups ``ids``: of the one over most nodes, where they differ."""
        node = np.arange(self.world) // self.gpus_per_node
        pairs = np.unique(np.stack((ids, node)), axis=1)
        return Ring(int(np.bincount(ids).max()), int(np.bincount(pairs[0]).max()))


@dataclass(frozen=True, slots=True)
class Travel:
    """How long something is on its way, in seconds; of each rank where they differ.

    Attributes:
        latency: while it passes, links carry what other streams send.
        busy: for which a link carries the bytes.
    """

    latency: float | Times
    busy: float | Times

    @property
    def seconds(self) -> float | Times:
        return self.latency + self.busy

    def __bool__(self) -> bool:
        return bool(np.any(self.seconds))


NOTHING = Travel(0.0, 0.0)


def of_ranks(travels: Sequence[Travel], index: NDArray[np.int64]) -> Travel:
    """For each rank, the travel that ``index`` says."""
    latency, busy = (np.array([getattr(t, name) for t in travels], dtype=float) for name in ("latency", "busy"))
    return Travel(latency[index], busy[index])


class Network(Protocol):
    """How long collectives take."""

    def travel(self, kind: Collective, ring: Ring, nbytes: float, calls: int = 1) -> Travel:
        """``calls`` collectives of one kind in one launch, over ``nbytes`` together.

        ``nbytes`` counts whole tensors: what every rank holds after an all-gather or before a reduce-scatter. Of an
        all-to-all it is the most that a rank sends or receives, and ``calls`` the most ranks that it exchanges with.
        """
        ...


@dataclass(frozen=True, slots=True)
class AlphaBeta:
    """``α · hops + bytes / bandwidth`` per link class, collectives as pipelined rings.

    A ring visits each node once: ``nodes - 1`` hops are between nodes, the others inside. It leaves a node over as many
    network adapters as it has members there. Broadcast and reduce move every byte over each link once, all-gather and
    reduce-scatter ``(n - 1) / n`` of them, all-reduce twice that. The hops of an all-reduce are those of a ring or of a
    tree (a chain inside each node, a binary tree over nodes), whichever is shorter.

    Broadcasts from several owners leave in one launch, and go around at the same time: one lap, and a hop more for the
    start of each further one. Reductions do the same. All-gathers that are called one after the other each go around.
    A rank of an all-to-all starts one message after the other, ``message_s`` each.
    """

    intra: Link
    inter: Link
    message_s: float = _MESSAGE_S

    @classmethod
    def of(cls, hardware: Hardware) -> AlphaBeta:
        return cls(hardware.intra, hardware.inter)

    def lap(self, ring: Ring) -> float:
        """Seconds in which a message of no length goes around."""
        return (ring.nodes - 1) * self.inter.latency_s + (ring.size - ring.nodes) * self.intra.latency_s

    def bandwidth(self, ring: Ring) -> float:
        """Bytes per second that pass each link of a ring."""
        if ring.nodes == 1:
            return self.intra.bandwidth
        return min(self.intra.bandwidth, ring.size / ring.nodes * self.inter.bandwidth)

    def travel(self, kind: Collective, ring: Ring, nbytes: float, calls: int = 1) -> Travel:
        if ring.size == 1 or calls == 0:
            return NOTHING
        around, busy = self.lap(ring), nbytes / self.bandwidth(ring)
        part = (ring.size - 1) / ring.size
        match kind:
            case "broadcast" | "reduce":
                return Travel(around + (calls - 1) * self.intra.latency_s, busy)
            case "all_gather" | "reduce_scatter":
                return Travel(calls * around, part * busy)
            case "all_reduce":
                levels = math.ceil(math.log2(ring.nodes))
                chain = -(-ring.size // ring.nodes) - 1
                tree = levels * self.inter.latency_s + chain * self.intra.latency_s
                return Travel(2 * calls * min(around, tree), 2 * part * busy)
            case "all_to_all":
                link = self.intra if ring.nodes == 1 else self.inter
                return Travel(link.latency_s + calls * self.message_s, nbytes / link.bandwidth)
