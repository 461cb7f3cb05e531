"""Ranks as a grid whose dimensions have roles: data, tensor, expert, context or pipeline parallelism."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from torch.distributed.device_mesh import DeviceMesh

from dmuon.layout.ranks import GlobalRank

__all__ = [
    "COPIES",
    "ROLES",
    "MeshDim",
    "RankGrid",
    "ShardDims",
    "Weights",
    "grid_of_mesh",
    "mesh_dim",
    "weights_laid_out",
]

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
        coordinate = self._coordinate(rank)
        free = set(along)
        line = product(*(range(size) if i in free else (coordinate[i],) for i, size in enumerate(self.sizes)))
        return tuple(self.ranks[self._position(member)] for member in line)

    def _coordinate(self, rank: GlobalRank) -> tuple[int, ...]:
        rest = self.ranks.index(rank)
        coordinate = []
        for size in reversed(self.sizes):
            rest, index = divmod(rest, size)
            coordinate.append(index)
        return tuple(reversed(coordinate))

    def _position(self, coordinate: Sequence[int]) -> int:
        position = 0
        for size, index in zip(self.sizes, coordinate, strict=True):
            position = position * size + index
        return position


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


def _role_of(name: str) -> str:
    dim = mesh_dim(name)
    if dim is not None:
        return dim.role
    accepted = ", ".join(repr(part) for dim in _DIMS for part in dim.parts)
    raise ValueError(
        f"mesh dimension {name!r} has no known role; give it a name that contains one of {accepted} "
        "(init_device_mesh(…, mesh_dim_names=…))"
    )
