"""Which ranks hold a parameter and which elements each has, from its placements or from process groups."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import prod
from typing import TypeVar, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from dmuon._torch import local_tensor
from dmuon.shard_layout import ShardLayout, layout_from_shapes, layout_of

__all__ = [
    "ROLES",
    "Placed",
    "RankGrid",
    "ShardDims",
    "grid_of_groups",
    "grid_of_mesh",
    "place",
    "place_dtensor",
    "place_replicated",
]

_T = TypeVar("_T")

ROLES = ("tp", "ep", "fsdp", "dp", "cp", "pp")  # what cuts a parameter first comes first

_COPIES = ("dp", "cp")  # ranks that hold copies unless told otherwise

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
class Placed:
    """Where a parameter's elements lie.

    Attributes:
        ranks: global, ascending.
        layout: pieces in the order of ``ranks``; its shape is the global one.
    """

    ranks: tuple[int, ...]
    layout: ShardLayout


@dataclass(frozen=True, slots=True)
class RankGrid:
    """The ranks that the given groups join, without those of other pipeline stages.

    Attributes:
        roles: of each dimension, in the order of ``ROLES``; a mesh may have several dimensions of one role.
        sizes: extents, all above 1.
        ranks: global, in row-major order.
    """

    roles: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]

    def line(self, rank: int, along: Iterable[int]) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` in the dimensions ``along`` only, in row-major order."""
        here = self._coordinate(rank)
        free = set(along)
        at = product(*(range(size) if i in free else (here[i],) for i, size in enumerate(self.sizes)))
        return tuple(self.ranks[self._position(coordinate)] for coordinate in at)

    def _coordinate(self, rank: int) -> tuple[int, ...]:
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


# -- tensors --------------------------------------------------------------------------------------------------------


def place_dtensor(param: DTensor, name: str) -> Placed:
    """Where the elements of a DTensor lie, from its mesh and placements alone.

    Raises:
        ValueError: for unreduced parts, a mesh without this rank or with a rank twice, and a local tensor of another
            shape than torch gives it.
    """
    mesh, placements = param.device_mesh, param.placements
    about = f"parameter {name!r} is a DTensor with placements {placements} over ranks {mesh.mesh.tolist()}"
    if any(isinstance(placement, Partial) for placement in placements):
        raise ValueError(
            f"{about}: no rank has its elements before they are reduced; redistribute it to Shard or Replicate"
        )
    here = mesh.get_coordinate()
    if here is None:
        raise ValueError(
            f"{about}, without this rank, {dist.get_rank()}; give each rank only the parameters that it has a part of"
        )
    wide = [dim for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    sizes = [mesh.size(dim) for dim in wide]
    try:
        layout = layout_of(param.shape, sizes, [placements[dim] for dim in wide])
    except ValueError as fault:
        raise ValueError(f"{about}: {fault}") from None
    position = 0
    for dim in wide:
        position = position * mesh.size(dim) + here[dim]
    expected, found = layout.pieces[position].shape, tuple(local_tensor(param).shape)
    if expected != found:
        raise ValueError(
            f"{about}: the local tensor of rank {dist.get_rank()} has shape {found}, torch's chunks have {expected}; "
            "make it with distribute_tensor, or pass plain shards with shard_dims=…"
        )
    return _placed(mesh.mesh.flatten().tolist(), layout, about)


def place_replicated(param: Tensor, ranks: Sequence[int]) -> Placed:
    """Copies of ``param`` on each of ``ranks``.

    Raises:
        ValueError: for a rank that is named twice.
    """
    layout = layout_of(param.shape, [len(ranks)], [Replicate()])
    return _placed(ranks, layout, f"a replicated parameter of shape {tuple(param.shape)} over ranks {list(ranks)}")


def _placed(ranks: Sequence[int], layout: ShardLayout, about: str) -> Placed:
    """``layout``, whose pieces lie on ``ranks`` in that order."""
    if len(set(ranks)) < len(ranks):
        twice = sorted({rank for rank in ranks if list(ranks).count(rank) > 1})
        raise ValueError(f"{about}: ranks {twice} are named twice; name each rank once")
    order = sorted(range(len(ranks)), key=ranks.__getitem__)
    if order != list(range(len(ranks))):
        layout = layout.reordered(order)
    return Placed(tuple(ranks[i] for i in order), layout)


# -- grids ----------------------------------------------------------------------------------------------------------


def grid_of_groups(groups: Mapping[str, dist.ProcessGroup | None]) -> RankGrid:
    """The grid whose lines are process groups; collective over every group given.

    Args:
        groups: by role. Groups that are None or have one rank are left out. Stages of a pipeline, ``"pp"``, are
            independent and no part of the grid.

    Raises:
        TypeError, ValueError: before anything communicates, for something else than a group, an unknown role, and a
            group without this rank.
        ValueError: on all ranks alike, for groups that are not the lines of a grid.
    """
    given = _checked(groups)
    along = {role: group for role, group in given.items() if role != "pp"}
    lines = {role: tuple(dist.get_process_group_ranks(group)) for role, group in given.items()}
    sizes = tuple(len(lines[role]) for role in along)
    seen: list[tuple[int, str]] = _gathered((dist.get_rank(), _overlap(lines)), along.values())
    grid = RankGrid(tuple(along), sizes, tuple(rank for rank, _ in seen))
    # A rank whose view all ranks in it share has seen all that the groups join. So either all of them share one view
    # or none finds that they do, and what one raises they all raise.
    views = _gathered(hashlib.sha256(repr((grid, seen)).encode()).hexdigest(), along.values())
    fault = next((found for _, found in seen if found), "")
    if not fault and (len(set(grid.ranks)) < prod(sizes) or len(set(views)) > 1):
        fault = (
            f"{_named(lines)} are not lines of one grid: {len(set(grid.ranks))} ranks {sorted(set(grid.ranks))} where "
            f"extents {sizes} make {prod(sizes)}, or ranks with other groups"
        )
    if "pp" in given:
        of_stages = _gathered(fault, [given["pp"]])
        fault = next((found for found in [fault, *of_stages] if found), "")
    if fault:
        raise ValueError(f"{fault}; any two groups of a rank must share that rank only, as those of a DeviceMesh do")
    return grid


def _checked(groups: Mapping[str, dist.ProcessGroup | None]) -> dict[str, dist.ProcessGroup]:
    """The groups of several ranks in the order of ``ROLES``."""
    for role, group in groups.items():
        if role not in ROLES:
            raise ValueError(f"role {role!r} of a process group is none of {', '.join(ROLES)}")
        if group is None:
            continue
        member: object = group
        if member == dist.GroupMember.NON_GROUP_MEMBER or (
            isinstance(member, dist.ProcessGroup) and dist.get_rank(member) < 0
        ):
            raise ValueError(
                f"{role}_pg does not contain this rank, {dist.get_rank()}; give each rank the group that it is in"
            )
        if not isinstance(member, dist.ProcessGroup):
            raise TypeError(f"{role}_pg must be a torch.distributed ProcessGroup, got {type(member).__name__}")
    found = {role: groups.get(role) for role in ROLES}
    return {role: group for role, group in found.items() if group is not None and group.size() > 1}


def _overlap(lines: Mapping[str, tuple[int, ...]]) -> str:
    """What is wrong where two groups share another rank than this one; empty if nothing is."""
    for (role, line), (other, of_other) in combinations(lines.items(), 2):
        shared = sorted(set(line) & set(of_other))
        if len(shared) > 1:
            return (
                f"{role}_pg holds ranks {list(line)} and {other}_pg ranks {list(of_other)} on rank {dist.get_rank()}: "
                f"both hold {shared}"
            )
    return ""


def _named(lines: Mapping[str, tuple[int, ...]]) -> str:
    return " and ".join(f"{role}_pg with ranks {list(line)}" for role, line in lines.items())


def _gathered(value: _T, groups: Iterable[dist.ProcessGroup]) -> list[_T]:
    """``value`` of each rank of a grid, in row-major order; ``groups`` from the outermost dimension inwards."""
    held = [value]
    for group in reversed(list(groups)):
        found: list[list[_T]] = [[] for _ in range(group.size())]
        dist.all_gather_object(found, held, group=group)
        held = [one for of_rank in found for one in of_rank]
    return held


def grid_of_mesh(mesh: DeviceMesh, names: Sequence[str]) -> RankGrid:
    """The grid of a mesh of which every dimension has a name that tells its role.

    Raises:
        ValueError: for a name that tells no role, another number of names than of dimensions, and a mesh without this
            rank.
    """
    if len(names) != mesh.ndim:
        raise ValueError(f"mesh has {mesh.ndim} dimensions and names {tuple(names)}; name each dimension once")
    here = mesh.get_coordinate()
    if here is None:
        raise ValueError(f"mesh holds ranks {mesh.mesh.tolist()}, without this rank, {dist.get_rank()}")
    roles = [_role_of(name) for name in names]
    index: list[int | slice] = [at if role == "pp" else slice(None) for role, at in zip(roles, here, strict=True)]
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


# -- parameters -----------------------------------------------------------------------------------------------------


def place(
    params: Sequence[Tensor],
    names: Sequence[str],
    grid: RankGrid,
    shard_dims: ShardDims | Callable[[Tensor], ShardDims] | None,
    share: Callable[[object], list[object]],
) -> list[Placed | None]:
    """Where each parameter lies; None for one that only this rank holds.

    A DTensor lies where its placements say, with copies along each dimension of ``grid`` that its mesh does not extend
    along. A plain tensor is cut by each role that ``shard_dims`` gives a dimension of it, and copied along ``dp``,
    ``cp`` and the roles that ``shard_dims`` gives None. Along ``ep``, what nothing else is said of is independent.

    Args:
        shard_dims: of all plain parameters, or a function that says it of one.
        share: gathers one object from each of ``grid.ranks``, in their order; called once, and only where a plain
            parameter is cut.

    Raises:
        ValueError: by the name of the parameter.
    """
    placed: list[Placed | None] = []
    cut: dict[int, dict[int, int | None]] = {}
    for i, (param, name) in enumerate(zip(params, names, strict=True)):
        if isinstance(param, DTensor):
            found = _with_copies(place_dtensor(param, name), name, grid)
        else:
            dims = _dims(param, name, grid, (shard_dims(param) if callable(shard_dims) else shard_dims) or {})
            found = place_replicated(param, grid.line(dist.get_rank(), dims))
            if any(dim is not None for dim in dims.values()):
                cut[i] = dims
        placed.append(found if len(found.ranks) > 1 else None)
    if cut:
        shapes = _shared_shapes([(names[i], tuple(params[i].shape)) for i in cut], grid, share)
        for (i, dims), of_param in zip(cut.items(), shapes, strict=True):
            placed[i] = _place_shards(names[i], of_param, grid, dims)
    return placed


def _with_copies(placed: Placed, name: str, grid: RankGrid) -> Placed:
    """``placed`` with the copies along the dimensions of ``grid`` that it does not extend along."""
    about = f"parameter {name!r} is a DTensor over ranks {list(placed.ranks)}"
    if not set(placed.ranks) <= set(grid.ranks):
        raise ValueError(
            f"{about}, but the given process groups join ranks {sorted(grid.ranks)}; give the group of each "
            "parallelism that shards or copies it (tp_pg=…, fsdp_pg=…, dp_pg=…)"
        )
    here = dist.get_rank()
    along = [
        dim
        for dim, role in enumerate(grid.roles)
        if role != "ep" and set(grid.line(here, [dim])).isdisjoint({*placed.ranks} - {here})
    ]
    if not along:
        return placed
    if not set(placed.ranks) <= set(grid.line(here, set(range(len(grid.sizes))) - set(along))):
        raise ValueError(
            f"{about}, which run across the process groups with roles {grid.roles}, extents {grid.sizes} and ranks "
            f"{list(grid.ranks)}; its mesh must be made of whole lines of them"
        )
    base = placed.layout
    lines = [grid.line(rank, along) for rank in placed.ranks]
    copies = range(len(lines[0]))
    of_copy = max(base.replicas) + 1
    layout = ShardLayout(
        base.shape,
        base.pieces * len(copies),
        tuple(copy * of_copy + replica for copy in copies for replica in base.replicas),
    )
    return _placed([line[copy] for copy in copies for line in lines], layout, about)


def _dims(param: Tensor, name: str, grid: RankGrid, shard_dims: ShardDims) -> dict[int, int | None]:
    """The dimension of a plain tensor that each dimension of ``grid`` cuts, None for copies; no entry: independent."""
    about = f"parameter {name!r} is a plain tensor"
    for role, dim in shard_dims.items():
        if role not in ROLES or role == "pp":
            raise ValueError(f"shard_dims names {role!r}, which is none of {', '.join(ROLES[:-1])}")
        if dim is not None and not -param.ndim <= dim < param.ndim:
            raise ValueError(
                f"{about} of shape {tuple(param.shape)}, which shard_dims={{{role!r}: {dim}}} cuts along a dimension "
                f"that it lacks; give one of its {param.ndim}, or a function of the parameter"
            )
    dims: dict[int, int | None] = {}
    for i, role in enumerate(grid.roles):
        if role in shard_dims:
            dims[i] = shard_dims[role]
        elif role in _COPIES:
            dims[i] = None
        elif role != "ep":
            raise ValueError(
                f"{about}, and {role}_pg=… shards it along a dimension that nothing says: pass "
                f"shard_dims={{{role!r}: 0}} (None for copies), or use DTensors"
            )
    return dims


def _shared_shapes(
    mine: list[tuple[str, tuple[int, ...]]], grid: RankGrid, share: Callable[[object], list[object]]
) -> list[list[tuple[int, ...]]]:
    """By parameter, the local shapes on all of ``grid.ranks``."""
    shared = cast(list[list[tuple[str, tuple[int, ...]]]], share(mine))
    names = [[name for name, _ in of_rank] for of_rank in shared]
    for rank, of_rank in zip(grid.ranks, names, strict=True):
        if of_rank != names[0]:
            raise ValueError(
                f"rank {rank} has sharded parameters {of_rank} and rank {grid.ranks[0]} has {names[0]}; give all "
                "ranks the same parameters in one order, and the same shard_dims"
            )
    return [[of_rank[i][1] for of_rank in shared] for i in range(len(mine))]


def _place_shards(
    name: str, shapes: Sequence[tuple[int, ...]], grid: RankGrid, dims: Mapping[int, int | None]
) -> Placed:
    """Where the shards of a plain tensor lie, from the local shapes on all of ``grid.ranks``."""
    here = dist.get_rank()
    shape_of = dict(zip(grid.ranks, shapes, strict=True))
    sizes = [grid.sizes[i] for i in dims]
    apart = [i for i in range(len(grid.sizes)) if i not in dims]
    found: dict[int, Placed] = {}
    for first in grid.line(here, apart):  # those that are none of this rank's as well: all ranks find the same faults
        line = grid.line(first, dims)
        about = f"parameter {name!r} is a plain tensor over ranks {list(line)}"
        try:
            layout = layout_from_shapes([shape_of[rank] for rank in line], sizes, list(dims.values()))
        except ValueError as fault:
            raise ValueError(f"{about}: {fault}; give each rank its shard of one tensor, and shard_dims") from None
        found[first] = _placed(line, layout, about)
    return found[here]
