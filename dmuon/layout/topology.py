"""How the ranks of a mesh share one model: replicas of shards, each perhaps split again by tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from dmuon.layout.rank_grid import Weights, mesh_dim, weights_laid_out
from dmuon.layout.ranks import GlobalRank

__all__ = ["Coordinate", "Topology", "topology_of"]

_PARALLELISM = {"tp": "tensor", "pp": "pipeline", "ep": "expert"}


@dataclass(frozen=True, slots=True, order=True)
class Coordinate:
    """Where a rank stands: replica ``r``, shard ``s`` within it, tensor-parallel rank ``t``."""

    r: int
    s: int
    t: int = 0


@dataclass(frozen=True, slots=True)
class Topology:
    """Every rank that takes part, and its coordinate.

    Attributes:
        ranks: in ascending order; plans number the ranks by their positions in it.
        coordinates: of each.
        replicas, shards, tensor: extents; weights are sharded over ``shards`` ranks, and ``replicas`` hold copies.
    """

    ranks: tuple[GlobalRank, ...]
    coordinates: tuple[Coordinate, ...]
    replicas: int
    shards: int
    tensor: int = 1

    def rank_at(self, r: int, s: int, t: int = 0) -> GlobalRank:
        """The rank at a coordinate."""
        return self.ranks[self.coordinates.index(Coordinate(r, s, t))]

    def of(self, rank: GlobalRank) -> Coordinate:
        """The coordinate of a rank."""
        return self.coordinates[self.ranks.index(rank)]

    def partition(self, along: Literal["r", "s", "t", "rs"]) -> list[tuple[GlobalRank, ...]]:
        """All groups of ranks that differ in the named coordinates only, each in their order."""
        groups: dict[tuple[int, ...], list[tuple[Coordinate, GlobalRank]]] = {}
        for rank, at in zip(self.ranks, self.coordinates, strict=True):
            rest = tuple(getattr(at, name) for name in ("r", "s", "t") if name not in along)
            groups.setdefault(rest, []).append((at, rank))
        return [tuple(rank for _, rank in sorted(group)) for group in groups.values()]

    def data_parallel(self, t: int) -> tuple[GlobalRank, ...]:
        """The ranks of tensor-parallel rank ``t``, ascending."""
        return tuple(rank for rank, at in zip(self.ranks, self.coordinates, strict=True) if at.t == t)

    def with_tensor_parallel(self, groups: Iterable[Sequence[GlobalRank]]) -> Topology:
        """The same replicas and shards, each of whose ranks is the first of ``groups`` that holds it, in that order."""
        coordinates: dict[GlobalRank, Coordinate] = {}
        size = 1
        for group in groups:
            members = [self.of(rank) for rank in group if rank in self.ranks]
            for t, rank in enumerate(group):
                coordinates[rank] = Coordinate(members[0].r, members[0].s, t)
            size = len(group)
        ranks = tuple(sorted(coordinates))
        return Topology(ranks, tuple(coordinates[rank] for rank in ranks), self.replicas, self.shards, size)


def topology_of(mesh: DeviceMesh) -> Topology:
    """Replicas and shards of a data-parallel mesh, by the names of its dimensions.

    A dimension whose name says that it holds copies (:class:`dmuon.layout.rank_grid.MeshDim`) replicates; the others
    shard, ``dp`` among them. Without names a 1-D mesh shards and a 2-D one is ``(replicate, shard)``.

    Raises:
        ValueError: a dimension of another kind of parallelism, or more than two without names.
    """
    weights = _weights(mesh)
    dims = sorted(range(mesh.ndim), key=lambda i: weights[i] == "shards")  # replicas first, the rest in order
    replicas = prod(mesh.size(i) for i in range(mesh.ndim) if weights[i] == "copies")
    grid: torch.Tensor = mesh.mesh.permute(dims).reshape(replicas, -1)
    coordinates = {
        GlobalRank(rank): Coordinate(r, s) for r, row in enumerate(grid.tolist()) for s, rank in enumerate(row)
    }
    ranks = tuple(sorted(coordinates))
    if any(list(line) != sorted(line) for line in [*grid.tolist(), *grid.T.tolist()]):
        raise ValueError(f"mesh holds ranks {mesh.mesh.tolist()}, which do not ascend along every dimension; sort them")
    return Topology(ranks, tuple(coordinates[rank] for rank in ranks), replicas, grid.shape[1])


def _weights(mesh: DeviceMesh) -> list[Weights]:
    """What the ranks along each dimension are to hold."""
    names = mesh.mesh_dim_names
    if names is None:
        if mesh.ndim > 2:
            raise ValueError(
                f"mesh has {mesh.ndim} dimensions without names; name them: those that contain 'replicate' replicate, "
                "the others shard"
            )
        unnamed: list[Weights] = ["copies", "shards"]
        return unnamed[-mesh.ndim :]
    for name in names:
        dim = mesh_dim(name)
        if dim is not None and weights_laid_out(name) == "parts":
            raise ValueError(
                f"mesh dimension {name!r} is one of {_PARALLELISM[dim.role]} parallelism; pass the data-parallel "
                "dimensions only, for example mesh['replicate', 'shard'] (tensor parallelism is read off the "
                "parameters; pipeline stages and expert groups are dedicated on their own)"
            )
    return [weights_laid_out(name) for name in names]
