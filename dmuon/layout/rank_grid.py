"""Ranks as a grid whose dimensions have roles: data, tensor, expert, context or pipeline parallelism."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from torch.distributed.device_mesh import DeviceMesh

from dmuon.layout.ranks import GlobalRank

__all__ = ["COPIES", "ROLES", "RankGrid", "ShardDims", "grid_of_mesh"]

ROLES = ("tp", "ep", "fsdp", "dp", "cp", "pp")  # what cuts a parameter first comes first
COPIES = ("dp", "cp")  # ranks that hold copies unless told otherwise
# The first row with a part of the name decides: "dp_shard" is fsdp, and "replicate" holds the letters of "ep".
_NAMES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("dp", ("rep", "ddp")),
    ("fsdp", ("fsdp", "hsdp", "shard")),
    ("tp", ("tensor", "tp")),
    ("cp", ("context", "cp")),
    ("ep", ("expert", "ep")),
    ("pp", ("pipe", "pp")),
    ("dp", ("dp", "data")),
)
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


def _role_of(name: str) -> str:
    for role, parts in _NAMES:
        if any(part in name.lower() for part in parts):
            return role
    accepted = ", ".join(repr(part) for _, parts in _NAMES for part in parts)
    raise ValueError(
        f"mesh dimension {name!r} has no known role; give it a name that contains one of {accepted} "
        "(init_device_mesh(…, mesh_dim_names=…))"
    )
