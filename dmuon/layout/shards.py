"""Where the elements of a sharded tensor lie: the indices that each rank holds, derived without communication."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise, product
from math import prod

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dmuon.layout.topology import Position

Run = tuple[int, int]  # half-open [start, stop) of global indices
Runs = tuple[Run, ...]
Cut = tuple[int, int]  # a dimension of the tensor, and into how many chunks it is cut before each of them is shared out


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank holds of a tensor.

    Attributes:
        runs: per dimension the runs of global indices, in the order in which the local tensor has them; no run is
            empty, and none continues the one before it.
    """

    runs: tuple[Runs, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the local tensor."""
        return _extents(self.runs)[0]

    @property
    def numel(self) -> int:
        """Elements in the local tensor."""
        return _extents(self.runs)[1]

    def blocks(self) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """The local and the global slices of each contiguous block; none when the piece is empty."""
        blocks = product(*(_slices(runs) for runs in self.runs))
        return [(tuple(local for local, _ in block), tuple(whole for _, whole in block)) for block in blocks]

    def covers(self, shape: Sequence[int]) -> bool:
        """Whether this is all of a tensor of ``shape``."""
        return self.shape == tuple(shape) and self == Piece.whole(shape)

    def meet(self, other: Piece) -> Piece:
        """What both have; along each dimension one of them has at most one run."""
        return Piece(tuple(_common(*both) for both in zip(self.runs, other.runs, strict=True)))

    def seen_from(self, other: Piece) -> Piece:
        """These elements by index in the local tensor of a rank that has ``other``, which has them all."""
        return Piece(tuple(within(held, runs)[1] for held, runs in zip(other.runs, self.runs, strict=True)))

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Piece:
        """All of a tensor of ``shape``."""
        return cls(tuple(_whole(length) for length in shape))


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Where the elements of a tensor lie.

    Attributes:
        shape: global.
        pieces: by position among the ranks that hold the tensor.
        replicas: by position, the number of the copy that the piece belongs to. The pieces of one copy are disjoint
            and make up the whole.
        flat: pieces are those of the tensor as one row, ``(1, numel)``, of which each is a run.
        split_dim: the one dimension that is cut, where each piece is a single run of it and all of the others: the
            whole is then the concatenation of pieces by first index. None if nothing is cut or not in this way.
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    replicas: tuple[int, ...]
    flat: bool = False
    split_dim: int | None = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "split_dim", 1 if self.flat else split_dim(self.shape, self.pieces))
        object.__setattr__(self, "_hash", hash((self.shape, self.pieces, self.replicas)))

    def __hash__(self) -> int:
        """Of thousands of pieces, once: layouts are keys wherever parameters lie alike."""
        return self._hash


def layout_of(shape: Sequence[int], sizes: Sequence[int], placements: Sequence[Placement]) -> ShardLayout:
    """The layout of a DTensor of global ``shape`` over a mesh of extents ``sizes``.

    Positions count the coordinates of the mesh in row-major order. Placements apply in the order of the mesh's
    dimensions, each to what the ones before it left; chunks are those of ``torch.chunk``, the last ones perhaps empty.

    Raises:
        ValueError: for a placement other than Replicate, Shard and the strided shard of FSDP over tensor parallelism,
            a dimension that the tensor lacks, or a number of placements that is not that of mesh dimensions.
    """
    if len(sizes) != len(placements):
        raise ValueError(f"{len(placements)} placements {tuple(placements)} for a mesh of extents {tuple(sizes)}")
    cuts = tuple(_cut(placement, len(shape)) for placement in placements)
    return _layout(tuple(shape), tuple(sizes), cuts)


def layout_from_shapes(
    shapes: Sequence[tuple[int, ...]], sizes: Sequence[int], dims: Sequence[int | None]
) -> ShardLayout:
    """The layout of a tensor of which every position holds one block of any length, from the blocks' shapes.

    Args:
        shapes: local, by position in row-major order over the grid.
        sizes: extents of the grid.
        dims: per dimension of the grid the dimension of the tensor that it cuts, or None where it holds copies. Where
            several cut one dimension, the first of them is the outermost.
    """
    if len(sizes) != len(dims) or prod(sizes) != len(shapes):
        raise ValueError(f"{len(shapes)} local shapes and dims {tuple(dims)} for a grid of extents {tuple(sizes)}")
    return _layout_from_shapes(tuple(tuple(shape) for shape in shapes), tuple(sizes), tuple(dims))


@lru_cache(maxsize=1024)
def flat_layout(shape: tuple[int, ...], begin: int, length: int, shards: int, copies: int = 1) -> ShardLayout:
    """The layout of a tensor that begins at element ``begin`` of a flat one, which is cut into shards of ``length``.

    Positions count the shards of one copy after the other.
    """
    bounds = [min(max(shard * length - begin, 0), prod(shape)) for shard in range(shards + 1)]
    pieces = tuple(flat_piece(joined([run] if run[0] < run[1] else [])) for run in pairwise(bounds))
    replicas = tuple(copy for copy in range(copies) for _ in pieces)
    return ShardLayout(shape, pieces * copies, replicas, flat=True)


def flat_piece(runs: Runs) -> Piece:
    """Elements of a tensor as one row."""
    return Piece((((0, 1),), runs))


Cell = tuple[Run, tuple[Position, ...], ShardLayout]  # of a stack: matrices, who holds them alike, layout of one


def cells(layout: ShardLayout) -> list[Cell]:
    """The runs of matrices of a stack ``(E, m, n)`` that have equal holders, in ascending order.

    Holders are ascending positions, by which the layout of one matrix has its pieces. A rank whose share of the rows
    or columns is empty holds the matrices that it has a share of, all the same.
    """
    if len(layout.shape) != 3:
        raise ValueError(f"a stack of matrices has 3 dimensions, the layout is of a tensor of shape {layout.shape}")
    of_matrix = [Piece(piece.runs[1:]) for piece in layout.pieces]
    bounds = sorted({bound for piece in layout.pieces for run in piece.runs[0] for bound in run})
    index = {bound: i for i, bound in enumerate(bounds)}
    holders: list[list[Position]] = [[] for _ in bounds[1:]]
    for position, piece in enumerate(layout.pieces):
        for start, stop in piece.runs[0]:
            for i in range(index[start], index[stop]):
                holders[i].append(Position(position))
    layouts: dict[tuple[tuple[Piece, ...], tuple[int, ...]], ShardLayout] = {}
    of_stack: list[Cell] = []  # at each bound a run begins or ends, so that no two neighbours have equal holders
    for (start, stop), of_cell in zip(pairwise(bounds), map(tuple, holders), strict=True):
        pieces = tuple(of_matrix[i] for i in of_cell)
        replicas = tuple(layout.replicas[i] for i in of_cell)  # all of them: every copy has every matrix
        if (pieces, replicas) not in layouts:
            layouts[pieces, replicas] = ShardLayout(layout.shape[1:], pieces, replicas)
        of_stack.append(((start, stop), of_cell, layouts[pieces, replicas]))
    return of_stack


# -- runs -----------------------------------------------------------------------------------------------------------


def _length(runs: Runs) -> int:
    return sum(stop - start for start, stop in runs)


@lru_cache(maxsize=4096)
def _extents(runs: tuple[Runs, ...]) -> tuple[tuple[int, ...], int]:
    """Shape and number of elements; each step asks for those of some pieces."""
    shape = tuple(map(_length, runs))
    return shape, prod(shape)


def _whole(length: int) -> Runs:
    return ((0, length),) if length else ()


def _slices(runs: Runs) -> list[tuple[slice, slice]]:
    """The local and the global slice of each run."""
    ends = accumulate(stop - start for start, stop in runs)
    return [
        (slice(end - (stop - start), end), slice(start, stop)) for end, (start, stop) in zip(ends, runs, strict=True)
    ]


def _part(runs: Runs, start: int, stop: int) -> Iterator[Run]:
    """What ``[start, stop)`` of a local tensor holds, if the local tensor holds ``runs``."""
    for first, last in runs:
        left, right = first + max(start, 0), min(first + stop, last)
        if left < right:
            yield left, right
        start, stop = start - (last - first), stop - (last - first)


def joined(runs: Iterable[Run]) -> Runs:
    """``runs`` with each that continues the one before it made part of it."""
    joined: list[Run] = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return tuple(joined)


@lru_cache(maxsize=4096)
def within(held: Runs, wanted: Runs) -> tuple[Runs, Runs]:
    """What of the indices ``wanted`` a rank has that holds ``held``: counted among them, and in its local tensor."""
    among: list[Run] = []
    local: list[Run] = []
    offset = 0
    for first, last in held:
        before = 0
        for start, stop in wanted:
            left, right = max(first, start), min(last, stop)
            if left < right:
                among.append((before + left - start, before + right - start))
                local.append((offset + left - first, offset + right - first))
            before += stop - start
        offset += last - first
    return joined(among), joined(local)


def _common(some: Runs, others: Runs) -> Runs:
    """Indices in both, in the order of the one that has several runs."""
    pairs = ((max(a, c), min(b, d)) for a, b in some for c, d in others)
    return joined((start, stop) for start, stop in pairs if start < stop)


def _chunks(start: int, stop: int, count: int) -> list[Run]:
    """``[start, stop)`` in ``count`` chunks as ``torch.chunk`` cuts them, the last ones perhaps empty."""
    size = -(-(stop - start) // count)
    return [(min(start + i * size, stop), min(start + (i + 1) * size, stop)) for i in range(count)]


def _shares(runs: Runs, factor: int, count: int) -> list[Runs]:
    """What each of ``count`` ranks gets of ``runs``: its chunk of each of the ``factor`` chunks that come first."""
    dealt = [_chunks(start, stop, count) for start, stop in _chunks(0, _length(runs), factor)]
    return [joined(run for chunks in dealt for run in _part(runs, *chunks[i])) for i in range(count)]


# -- layouts --------------------------------------------------------------------------------------------------------


def _cut(placement: Placement, ndim: int) -> Cut | None:
    """What a placement cuts; None for copies."""
    if isinstance(placement, Replicate):
        return None
    if isinstance(placement, _StridedShard):  # first: older versions derive it from Shard
        dim, factor = placement.dim, int(placement.split_factor)
    elif isinstance(placement, Shard):
        dim, factor = placement.dim, 1
    else:
        raise ValueError(
            f"placement {placement} leaves no rank with elements of the tensor; only Replicate and Shard do: "
            "redistribute it first"
        )
    return _dimension(dim, ndim), factor


def _dimension(dim: int, ndim: int) -> int:
    """``dim`` counted from the front."""
    if not -ndim <= dim < ndim:
        raise ValueError(f"dimension {dim} is cut, but the tensor has {ndim}")
    return dim % ndim


@lru_cache(maxsize=256)
def _layout(shape: tuple[int, ...], sizes: tuple[int, ...], cuts: tuple[Cut | None, ...]) -> ShardLayout:
    dims = tuple(None if cut is None else cut[0] for cut in cuts)
    lines: list[dict[tuple[int, ...], Runs]] = []
    for dim, length in enumerate(shape):
        line: dict[tuple[int, ...], Runs] = {(): _whole(length)}
        for size, cut in zip(sizes, cuts, strict=True):
            if cut is not None and cut[0] == dim:
                line = {
                    (*at, i): share for at, runs in line.items() for i, share in enumerate(_shares(runs, cut[1], size))
                }
        lines.append(line)
    return _assembled(shape, sizes, dims, lines)


@lru_cache(maxsize=256)
def _layout_from_shapes(
    shapes: tuple[tuple[int, ...], ...], sizes: tuple[int, ...], dims: tuple[int | None, ...]
) -> ShardLayout:
    ndim = len(shapes[0])
    for position, shape in enumerate(shapes):
        if len(shape) != ndim:
            raise ValueError(
                f"the local tensor has shape {shape} at position {position} and {shapes[0]} at position 0; both must "
                f"have {ndim} dimensions, also where a part is empty"
            )
    dims = tuple(None if dim is None else _dimension(dim, ndim) for dim in dims)
    coordinates = list(product(*map(range, sizes)))
    lines: list[dict[tuple[int, ...], Runs]] = []
    for dim in range(ndim):
        first: dict[tuple[int, ...], int] = {}  # the first position with a coordinate
        for position, at in enumerate(coordinates):
            other = first.setdefault(_along(at, dims, dim), position)
            if shapes[other][dim] != shapes[position][dim]:
                raise ValueError(
                    f"the local tensor has shape {shapes[other]} at position {other} and {shapes[position]} at "
                    f"position {position}; dimension {dim} must have one length there, because it is not cut between "
                    "them"
                )
        keys = sorted(first)
        ends = [0, *accumulate(shapes[first[key]][dim] for key in keys)]
        lines.append({key: (run,) if run[0] < run[1] else () for key, run in zip(keys, pairwise(ends), strict=True)})
    shape = tuple(sum(map(_length, line.values())) for line in lines)
    return _assembled(shape, sizes, dims, lines)


def _along(at: tuple[int, ...], dims: tuple[int | None, ...], dim: int | None) -> tuple[int, ...]:
    """The coordinates of a position in those dimensions of the grid that cut ``dim``, or that hold copies."""
    return tuple(coordinate for coordinate, of in zip(at, dims, strict=True) if of == dim)


def _assembled(
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    dims: tuple[int | None, ...],
    lines: Sequence[dict[tuple[int, ...], Runs]],
) -> ShardLayout:
    """The layout over a grid, from the runs of each dimension by the coordinates that cut it."""
    copies = [size for size, dim in zip(sizes, dims, strict=True) if dim is None]
    number = {at: i for i, at in enumerate(product(*map(range, copies)))}
    distinct: dict[tuple[tuple[int, ...], ...], Piece] = {}
    pieces, replicas = [], []
    for at in product(*map(range, sizes)):
        key = tuple(_along(at, dims, dim) for dim in range(len(shape)))
        if key not in distinct:
            distinct[key] = Piece(tuple(line[part] for line, part in zip(lines, key, strict=True)))
        pieces.append(distinct[key])
        replicas.append(number[_along(at, dims, None)])
    return ShardLayout(shape, tuple(pieces), tuple(replicas))


def split_dim(shape: tuple[int, ...], pieces: tuple[Piece, ...]) -> int | None:
    """The dimension along which ``pieces``, in their order, are concatenated to what has ``shape``; None if none is."""
    wholes = [_whole(length) for length in shape]
    different = {id(piece): piece for piece in pieces}.values()
    cut = [dim for dim, whole in enumerate(wholes) if any(piece.runs[dim] != whole for piece in different)]
    if len(cut) != 1 or any(len(piece.runs[cut[0]]) > 1 for piece in different):
        return None
    return cut[0]
