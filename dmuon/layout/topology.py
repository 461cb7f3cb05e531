"""How ranks share one model: the numbers they go by, what dimensions of a mesh are for, grids, replicas of shards."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any, Literal, NewType

import torch
from torch.distributed.device_mesh import DeviceMesh

GlobalRank = NewType("GlobalRank", int)
"""A process among all of them, as ``torch.distributed.get_rank()`` counts. A type checker keeps it from a position."""

Position = NewType("Position", int)
"""A process among some ranks that are listed in ascending order: those of a group, a line, a domain or a plan."""


class Ranks(tuple[GlobalRank, ...]):
    """Some ranks in ascending order. There may be thousands: they are hashed once, and searched by bisection."""

    _hash: int

    def __hash__(self) -> int:
        if "_hash" not in self.__dict__:
            self._hash = super().__hash__()
        return self._hash

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and self._before(rank) is not None

    def index(self, rank: Any, *limits: Any) -> int:
        found = None if limits else self._before(rank)
        return super().index(rank, *limits) if found is None else found  # which raises what a tuple does

    def _before(self, rank: int) -> int | None:
        """How many ranks come before ``rank``; None if it is none of them."""
        found = bisect_left(self, rank)
        return found if found < len(self) and self[found] == rank else None


def positions(count: int) -> tuple[Position, ...]:
    """All positions among ``count`` ranks."""
    return tuple(map(Position, range(count)))


def position_in(ranks: Sequence[GlobalRank], rank: GlobalRank) -> Position:
    """Where ``rank`` stands in ``ranks``."""
    return Position(ranks.index(rank))


_LISTED = 32  # ranks that a message names


def listed(ranks: Sequence[int], between: str = ", ") -> str:
    """Ranks for a message, which a person has to read: of many the first ones, the last one, and how many."""
    if len(ranks) <= _LISTED:
        return between.join(map(str, ranks))
    first = between.join(map(str, ranks[: _LISTED // 2]))
    return f"{first}{between}…{between}{ranks[-1]} ({len(ranks)} in all)"


ROLES = ("tp", "ep", "fsdp", "dp", "cp", "pp")  # what cuts a parameter first comes first

Weights = Literal["copies", "shards", "parts", "as laid out"]


@dataclass(frozen=True, slots=True)
class MeshDim:
    """What a dimension of a mesh is for.

    Its ranks hold copies of the weights, shards of them, or parts that tensor, expert or pipeline parallelism made of
    the model. A name such as ``dp`` tells only that they see other data: then who lays the weights out decides.
    ``dedicate_params`` lays them out itself, and shards them; a plain tensor lies as its user made it, and is a copy
    unless ``shard_dims`` tells how it is cut; a DTensor tells by its placements.

    Attributes:
        role: one of ``ROLES``.
        parts: of names; the first row of the table with a part of the name decides.
    """

    role: str
    weights: Weights
    parts: tuple[str, ...]


_DIMS = (
    MeshDim("dp", "copies", ("replicate",)),
    MeshDim("dp", "as laid out", ("rep", "ddp")),  # before "ep", whose letters are in it
    MeshDim("fsdp", "shards", ("fsdp", "hsdp", "shard")),  # before "dp": "dp_shard" shards
    MeshDim("tp", "parts", ("tensor", "tp")),
    MeshDim("cp", "copies", ("context", "cp")),  # ranks of one sequence
    MeshDim("ep", "parts", ("expert", "ep")),
    MeshDim("pp", "parts", ("pipe", "pipeline", "pp")),
    MeshDim("dp", "as laid out", ("dp", "data")),
)
# Roles along which plain tensors are copies unless shard_dims tells otherwise.
COPIES = frozenset(dim.role for dim in _DIMS if dim.weights in ("copies", "as laid out"))
ShardDims = Mapping[str, int | None]  # by role, the dimension that it cuts; None where it holds copies


def mesh_dim(name: str) -> MeshDim | None:
    """What the name of a mesh's dimension says that it is for; None where it says nothing."""
    return next((dim for dim in _DIMS if any(part in name.lower() for part in dim.parts)), None)


def weights_laid_out(name: str) -> Weights:
    """What ``dedicate_params`` makes of the weights along a dimension: shards, unless the name says something else.

    A name with ``replicate`` in it says copies. Any other must say one thing alone: ``cp`` and ``context_parallel`` are
    copies, ``tp`` and ``pipeline`` are parts, whereas ``dp_cp``, ``expert_dp`` and ``step`` are shards.
    """
    dim = mesh_dim(name)
    if dim is None or dim.weights == "as laid out":
        return "shards"
    words = set(re.findall("[a-z]+", name.lower())) - {"parallel"}
    return dim.weights if "replicate" in dim.parts or words <= set(dim.parts) else "shards"


# -- grids of roles --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankGrid:
    """The ranks that the given groups join, without those of other pipeline stages.

    Attributes:
        roles: of each dimension, in the order of ``ROLES``; a mesh may have several dimensions of one role.
        sizes: extents, all above 1.
        ranks: in row-major order.
    """

    roles: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: tuple[GlobalRank, ...]

    def line(self, rank: GlobalRank, along: Iterable[int]) -> tuple[GlobalRank, ...]:
        """The ranks that differ from ``rank`` in the dimensions ``along`` only, in row-major order."""
        coordinates = list(product(*map(range, self.sizes)))
        own, free = coordinates[self.ranks.index(rank)], set(along)
        return tuple(
            member
            for member, at in zip(self.ranks, coordinates, strict=True)
            if all(i in free or at[i] == own[i] for i in range(len(own)))
        )


def grid_of_mesh(mesh: DeviceMesh, names: Sequence[str], rank: GlobalRank) -> RankGrid:
    """The grid that ``rank`` is in, of a mesh of which every dimension has a name that tells its role.

    Raises:
        ValueError: for a name that tells no role, another number of names than of dimensions, and a mesh without
            ``rank``.
    """
    if len(names) != mesh.ndim:
        raise ValueError(f"mesh has {mesh.ndim} dimensions and names {tuple(names)}; name each dimension once")
    coordinate: list[int] = (mesh.mesh == rank).nonzero().flatten().tolist()
    if not coordinate:
        raise ValueError(f"mesh holds ranks {mesh.mesh.tolist()}, without this rank, {rank}")
    roles = [_role_of(name) for name in names]
    index = [at if role == "pp" else slice(None) for role, at in zip(roles, coordinate, strict=True)]
    stage = mesh.mesh[tuple(index)]
    kept = [role for role in roles if role != "pp"]
    order = sorted(range(len(kept)), key=lambda dim: ROLES.index(kept[dim]))
    wide = [dim for dim in order if stage.shape[dim] > 1]
    return RankGrid(
        tuple(kept[dim] for dim in wide),
        tuple(stage.shape[dim] for dim in wide),
        tuple(stage.permute(order).flatten().tolist()),
    )


def _role_of(name: str) -> str:
    dim = mesh_dim(name)
    if dim is not None:
        return dim.role
    accepted = ", ".join(repr(part) for dim in _DIMS for part in dim.parts)
    raise ValueError(
        f"mesh dimension {name!r} has no known role; give it a name that contains one of {accepted} "
        "(init_device_mesh(…, mesh_dim_names=…))"
    )


# -- replicas of shards ----------------------------------------------------------------------------------------------

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

    ranks: Ranks
    coordinates: tuple[Coordinate, ...]
    replicas: int
    shards: int
    tensor: int = 1
    _ranks_at: dict[tuple[int, int, int], GlobalRank] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        pairs = zip(self.coordinates, self.ranks, strict=True)
        object.__setattr__(self, "_ranks_at", {(at.r, at.s, at.t): rank for at, rank in pairs})

    @property
    def text(self) -> str:
        """For people."""
        tensor = f" × tp {self.tensor}" if self.tensor > 1 else ""
        return f"replicate {self.replicas} × shard {self.shards}{tensor}"

    def rank_at(self, r: int, s: int, t: int = 0) -> GlobalRank:
        """The rank at a coordinate."""
        return self._ranks_at[r, s, t]

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

    def data_parallel(self, t: int) -> Ranks:
        """The ranks of tensor-parallel rank ``t``."""
        return Ranks(rank for rank, at in zip(self.ranks, self.coordinates, strict=True) if at.t == t)

    def with_tensor_parallel(self, groups: Iterable[Sequence[GlobalRank]]) -> Topology:
        """The same replicas and shards, each of whose ranks is the first of ``groups`` that holds it, in that order."""
        coordinates: dict[GlobalRank, Coordinate] = {}
        size = 1
        for group in groups:
            members = [self.of(rank) for rank in group if rank in self.ranks]
            for t, rank in enumerate(group):
                coordinates[rank] = Coordinate(members[0].r, members[0].s, t)
            size = len(group)
        ranks = Ranks(sorted(coordinates))
        return Topology(ranks, tuple(coordinates[rank] for rank in ranks), self.replicas, self.shards, size)


def topology_of(mesh: DeviceMesh) -> Topology:
    """Replicas and shards of a data-parallel mesh, by the names of its dimensions.

    A dimension whose name says that it holds copies (:class:`dmuon.layout.topology.MeshDim`) replicates; the others
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
    ranks = Ranks(sorted(coordinates))
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
