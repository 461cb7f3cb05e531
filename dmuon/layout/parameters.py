"""Which ranks hold a parameter and which elements each has, from its placements or from process groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from dmuon.layout.shards import Piece, ShardLayout, cells, flat_layout, layout_from_shapes, layout_of
from dmuon.layout.topology import COPIES, ROLES, GlobalRank, RankGrid, Ranks, ShardDims
from dmuon.model.matrix_spec import flat_of
from dmuon.platform.torch_private import local_tensor

Cuts = dict[
    int, int | None
]  # by dimension of a grid of ranks, that of a tensor which it cuts; None where it has copies


@dataclass(frozen=True, slots=True)
class ParameterLayout:
    """Where a parameter's elements lie.

    Attributes:
        ranks: ascending.
        layout: pieces in the order of ``ranks``; its shape is the global one.
        first: of a part of a stack, the number of its first matrix in the stack.
        stack: of such a part, where all of the stack lies.
    """

    ranks: Ranks
    layout: ShardLayout
    first: int = 0
    stack: ParameterLayout | None = None

    @property
    def whole(self) -> ParameterLayout:
        """Of all of the tensor."""
        return self.stack or self

    @property
    def is_part(self) -> bool:
        """Whether some of the ranks of a stack hold these matrices, and the others do not."""
        return self.stack is not None and self.ranks != self.stack.ranks


def place_dtensor(param: DTensor, name: str, rank: GlobalRank) -> ParameterLayout:
    """Where the elements of a DTensor lie, from its mesh and placements alone.

    Args:
        rank: whose local tensor ``param`` has.

    Raises:
        ValueError: for unreduced parts, a mesh without this rank or with a rank twice, and a local tensor of another
            shape than torch gives it.
    """
    mesh, placements = param.device_mesh, param.placements
    line = _line_of(mesh)

    def fault(what: str) -> ValueError:
        over = mesh.mesh.tolist() if mesh.mesh.numel() <= 32 else f"{mesh.mesh.flatten()[0]} to {mesh.mesh.max()}"
        return ValueError(f"parameter {name!r} is a DTensor with placements {placements} over ranks {over}{what}")

    if any(isinstance(placement, Partial) for placement in placements):
        raise fault(": no rank has its elements before they are reduced; redistribute it to Shard or Replicate")
    if line.twice:
        raise fault(f": ranks {list(line.twice)} are named twice; name each rank once")
    if rank not in line.ranks:
        raise fault(f", without this rank, {rank}; give each rank only the parameters that it has a part of")
    try:
        layout = layout_of(param.shape, line.sizes, placements)
    except ValueError as error:
        raise fault(f": {error}") from None
    if line.order is not None:
        layout = _reordered(layout, line.order)
    expected, shape = layout.pieces[line.ranks.index(rank)].shape, tuple(local_tensor(param).shape)
    if expected != shape:
        raise fault(
            f": the local tensor of rank {rank} has shape {shape}, torch's chunks have {expected}; "
            "make it with distribute_tensor, or pass plain shards with shard_dims=…"
        )
    return ParameterLayout(line.ranks, layout)


def place_by_itself(param: Tensor, name: str, rank: GlobalRank) -> ParameterLayout | None:
    """Where a parameter says itself that it lies, as DTensors and pieces of flat tensors do; None of any other."""
    if isinstance(param, DTensor):
        return place_dtensor(param, name, rank)
    flat = flat_of(param)
    if flat is None:
        return None
    layout = flat_layout(flat.shape, flat.begin, flat.length, len(flat.ranks[0]), len(flat.ranks))
    about = f"parameter {name!r} is a piece of a flat tensor"
    placed = _placed([GlobalRank(rank) for row in flat.ranks for rank in row], layout, about)
    expected = placed.layout.pieces[placed.ranks.index(rank)].shape[1:]
    if expected != tuple(param.shape):
        raise ValueError(
            f"{about}, of which rank {rank} has {expected}, and not {tuple(param.shape)}; build the optimizer when the "
            "model is wrapped, and leave its parameters as FSDP1 cuts them"
        )
    return placed


def part_among_holders(placed: ParameterLayout, rank: GlobalRank) -> ParameterLayout:
    """The matrices of a stack that some ranks hold among themselves, and ``rank`` with them, as a stack of these ranks.

    ``placed`` itself, on all ranks, unless every matrix belongs to such a group of several ranks, none to two, and the
    matrices of each group are neighbours: as with expert parallelism over one dimension of a mesh, and shards of the
    experts over another. A rank that holds none has a stack of none.
    """
    groups = _groups_of_holders(placed.layout)
    if not groups or len(groups[0][0]) == len(placed.ranks):
        return placed
    position = placed.ranks.index(rank)
    for members, first, layout in groups:
        if position in members:
            return ParameterLayout(Ranks(placed.ranks[i] for i in members), layout, first, placed)
    nothing = Piece(((), (), ()))
    layout = ShardLayout((0, *placed.layout.shape[1:]), (nothing,) * len(placed.ranks), placed.layout.replicas)
    return ParameterLayout(placed.ranks, layout, 0, placed)


@lru_cache(maxsize=256)
def _groups_of_holders(layout: ShardLayout) -> tuple[tuple[tuple[int, ...], int, ShardLayout], ...]:
    """The positions of each group, its first matrix and the layout of its matrices; none unless it is as above."""
    if len(layout.shape) != 3:
        return ()
    spans: dict[tuple[int, ...], tuple[int, int]] = {}
    for (begin, end), holders, _ in cells(layout):
        start, stop = spans.get(holders, (begin, begin))
        if stop != begin or len(holders) < 2:
            return ()
        spans[holders] = start, end
    if sum(map(len, spans)) != len({position for members in spans for position in members}):
        return ()
    groups = []
    for members, (start, stop) in spans.items():
        shifted = [
            Piece((tuple((a - start, b - start) for a, b in piece.runs[0]), *piece.runs[1:]))
            for piece in (layout.pieces[i] for i in members)
        ]
        numbers = {copy: number for number, copy in enumerate(sorted({layout.replicas[i] for i in members}))}
        replicas = tuple(numbers[layout.replicas[i]] for i in members)
        groups.append((members, start, ShardLayout((stop - start, *layout.shape[1:]), tuple(shifted), replicas)))
    return tuple(groups)


@dataclass(frozen=True, slots=True)
class _Line:
    """The ranks of a mesh, in their order.

    Attributes:
        sizes: extents of the mesh.
        order: of the ranks, by where they stand in the mesh; None where they ascend there.
        twice: ranks that the mesh holds more than once.
    """

    ranks: Ranks
    sizes: tuple[int, ...]
    order: tuple[int, ...] | None
    twice: tuple[int, ...]


_lines: WeakKeyDictionary[DeviceMesh, _Line] = WeakKeyDictionary()  # a mesh does not change


def _line_of(mesh: DeviceMesh) -> _Line:
    line = _lines.get(mesh)
    if line is None:
        line = _lines[mesh] = _in_line(mesh.mesh.flatten().tolist(), tuple(mesh.mesh.shape))
    return line


def ranks_of_mesh(mesh: DeviceMesh) -> Ranks:
    """The ranks of a mesh, ascending."""
    return _line_of(mesh).ranks


def _in_line(ranks: Sequence[GlobalRank], sizes: tuple[int, ...]) -> _Line:
    order = tuple(sorted(range(len(ranks)), key=ranks.__getitem__))
    ascending = Ranks(ranks[i] for i in order)
    twice = sorted({rank for rank, after in pairwise(ascending) if rank == after})
    return _Line(ascending, sizes, None if order == tuple(range(len(ranks))) else order, tuple(twice))


@lru_cache(maxsize=256)
def _reordered(layout: ShardLayout, order: tuple[int, ...]) -> ShardLayout:
    """The layout whose position ``i`` is the position ``order[i]`` of ``layout``."""
    pieces, replicas = tuple(layout.pieces[i] for i in order), tuple(layout.replicas[i] for i in order)
    return ShardLayout(layout.shape, pieces, replicas, layout.flat)


def place_replicated(param: Tensor, ranks: Sequence[GlobalRank]) -> ParameterLayout:
    """Copies of ``param`` on each of ``ranks``."""
    layout = layout_of(param.shape, [len(ranks)], [Replicate()])
    return _placed(ranks, layout, f"a replicated parameter of shape {tuple(param.shape)} over ranks {list(ranks)}")


def _placed(ranks: Sequence[GlobalRank], layout: ShardLayout, about: str) -> ParameterLayout:
    """``layout``, whose pieces lie on ``ranks`` in that order."""
    line = _in_line(ranks, (len(ranks),))
    if line.twice:
        raise ValueError(f"{about}: ranks {list(line.twice)} are named twice; name each rank once")
    return ParameterLayout(line.ranks, layout if line.order is None else _reordered(layout, line.order))


def place(
    params: Sequence[Tensor],
    names: Sequence[str],
    grid: RankGrid,
    rank: GlobalRank,
    shard_dims: ShardDims | Callable[[Tensor], ShardDims] | None,
) -> tuple[list[ParameterLayout | None], dict[int, Cuts]]:
    """Where each parameter lies, None for one that this rank has alone; and by index, what :func:`place_shards` places.

    A DTensor lies where its placements say, and what FSDP1 has cut as that says, with copies along each dimension of
    ``grid`` that its mesh does not extend along. A plain tensor is cut by each role that ``shard_dims`` gives a
    dimension of it, and copied along ``dp``, ``cp`` and the roles that ``shard_dims`` gives None. Along ``ep``, what
    nothing else is said of is independent.

    Args:
        rank: whose parameters these are; one of ``grid.ranks``.
        shard_dims: of all plain parameters, or a function that says it of one.
    """
    placed: list[ParameterLayout | None] = []
    cut: dict[int, Cuts] = {}
    for i, (param, name) in enumerate(zip(params, names, strict=True)):
        own = place_by_itself(param, name, rank)
        if own is not None:
            layout = _with_copies(own, name, grid, rank)
        else:
            dims = _dims(param, name, grid, (shard_dims(param) if callable(shard_dims) else shard_dims) or {})
            layout = place_replicated(param, grid.line(rank, dims))
            if any(dim is not None for dim in dims.values()):
                cut[i] = dims
        placed.append(layout if len(layout.ranks) > 1 else None)
    return placed, cut


def _with_copies(placed: ParameterLayout, name: str, grid: RankGrid, rank: GlobalRank) -> ParameterLayout:
    """``placed`` with the copies along the dimensions of ``grid`` that it does not extend along."""
    kind = "cut by FSDP1" if placed.layout.flat else "a DTensor"
    about = f"parameter {name!r} is {kind} over ranks {list(placed.ranks)}"
    if not set(placed.ranks) <= set(grid.ranks):
        raise ValueError(
            f"{about}, but the given process groups join ranks {sorted(grid.ranks)}; give the group of each "
            "parallelism that shards or copies it (tp_pg=…, fsdp_pg=…, dp_pg=…)"
        )
    along = [
        dim
        for dim, role in enumerate(grid.roles)
        if role != "ep" and set(grid.line(rank, [dim])).isdisjoint({*placed.ranks} - {rank})
    ]
    if not along:
        return placed
    if not set(placed.ranks) <= set(grid.line(rank, set(range(len(grid.sizes))) - set(along))):
        raise ValueError(
            f"{about}, which run across the process groups with roles {grid.roles}, extents {grid.sizes} and ranks "
            f"{list(grid.ranks)}; its mesh must be made of whole lines of them"
        )
    base = placed.layout
    lines = [grid.line(holder, along) for holder in placed.ranks]
    copies = range(len(lines[0]))
    of_copy = max(base.replicas) + 1
    layout = ShardLayout(
        base.shape,
        base.pieces * len(copies),
        tuple(copy * of_copy + replica for copy in copies for replica in base.replicas),
        base.flat,
    )
    return _placed([line[copy] for copy in copies for line in lines], layout, about)


def _dims(param: Tensor, name: str, grid: RankGrid, shard_dims: ShardDims) -> Cuts:
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
    dims: Cuts = {}
    for i, role in enumerate(grid.roles):
        if role in shard_dims:
            dims[i] = shard_dims[role]
        elif role in COPIES:
            dims[i] = None
        elif role != "ep":
            raise ValueError(
                f"{about}, and {role}_pg=… shards it along a dimension that nothing says: pass "
                f"shard_dims={{{role!r}: 0}} (None for copies), or use DTensors"
            )
    return dims


def place_shards(
    cut: Mapping[int, Cuts],
    told: Sequence[Sequence[tuple[str, Cuts, tuple[int, ...]]]],
    grid: RankGrid,
    rank: GlobalRank,
) -> dict[int, ParameterLayout]:
    """By index, where the plain parameters lie that :func:`place` has found to be cut. All ranks raise the same faults.

    Args:
        told: of each of ``grid.ranks``, in their order, names, cuts and local shapes of what is cut there.
    """
    names = [[(name, dims) for name, dims, _ in of_rank] for of_rank in told]
    for other, of_rank in zip(grid.ranks, names, strict=True):
        if of_rank != names[0]:
            raise ValueError(
                f"rank {other} has sharded parameters {of_rank} and rank {grid.ranks[0]} has {names[0]}; give all "
                "ranks of the process groups the same parameters in one order, and the same shard_dims"
            )
    found: dict[int, ParameterLayout] = {}
    for number, (index, dims) in enumerate(cut.items()):
        shape_of = {holder: of_rank[number][2] for holder, of_rank in zip(grid.ranks, told, strict=True)}
        sizes = [grid.sizes[i] for i in dims]
        apart = [i for i in range(len(grid.sizes)) if i not in dims]
        for first in grid.line(rank, apart):  # other ranks' parameters as well, so that all ranks raise the same faults
            line = grid.line(first, dims)
            about = f"parameter {names[0][number][0]!r} is a plain tensor over ranks {list(line)}"
            try:
                layout = layout_from_shapes([shape_of[holder] for holder in line], sizes, list(dims.values()))
            except ValueError as fault:
                raise ValueError(f"{about}: {fault}; give each rank its shard of one tensor, and shard_dims") from None
            placed = _placed(line, layout, about)
            if first == rank:
                found[index] = placed
    return found
