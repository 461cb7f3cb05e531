"""What a batch of matrices costs its owner, as it is run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from .inputs import Shape, is_int

_NEAR_BEST = (103, 100)  # a chunk may cost this ratio of the best average: longer chunks publish later
_NOMINAL_FLOPS_PER_NS = 400_000  # 400 TFLOP/s; only ratios between shapes matter to a plan
_MOST_BATCH = 2**16
_SOURCES = ("measured", "estimated")
_UNMEASURED_ELEMENTS = 2**25  # bounds the workspace of a batch where nothing says what size is best


def unmeasured_batch(shape: tuple[int, int]) -> int:
    """How many matrices of ``shape``, in either order, to orthogonalize at once if no size was measured."""
    return max(1, _UNMEASURED_ELEMENTS // max(1, shape[0] * shape[1]))


@dataclass(frozen=True, slots=True)
class CostTable:
    """Cost of Newton–Schulz per shape and batch size.

    Attributes:
        costs: ``costs[shape][k]`` is the time, in whole nanoseconds, of one batch of ``k`` matrices of ``shape``
            (small side, large side). Every shape needs an entry for ``k = 1``.
        sources: ``"measured"`` or ``"estimated"`` per shape; a shape left out counts as measured.

    Raises:
        ValueError: a cost, batch size, shape or source that cannot be, named together with the remedy.
    """

    costs: Mapping[Shape, Mapping[int, int]]
    sources: Mapping[Shape, str] = field(default_factory=dict)
    _batches: Mapping[Shape, tuple[int, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.costs, Mapping):
            raise ValueError(f"costs must map shapes to batch sizes to nanoseconds, got {type(self.costs).__name__}")
        for shape, entries in self.costs.items():
            _check_entries(shape, entries)
        costs = {shape: dict(sorted(entries.items())) for shape, entries in sorted(self.costs.items())}
        for shape, source in self.sources.items():
            if shape not in costs:
                raise ValueError(f"sources: shape {shape} has no costs; drop it or add its costs")
            if source not in _SOURCES:
                raise ValueError(f"sources: shape {shape} is {source!r}; use one of {', '.join(_SOURCES)}")
        sources = {shape: self.sources.get(shape, "measured") for shape in costs}
        object.__setattr__(self, "costs", costs)
        object.__setattr__(self, "sources", sources)
        object.__setattr__(self, "_batches", {shape: _one_chunk(entries) for shape, entries in costs.items()})

    @classmethod
    def from_flops(cls, shapes: Iterable[Shape]) -> CostTable:
        """Estimates from the FLOPs of Gram Newton–Schulz, five steps, symmetric half products.

        For an ``(m, n)`` matrix, ``m <= n``: the cheaper of ``6 m²n + 17 m³`` (one restart, full final product) and
        ``9 m²n + 11 m³`` (two restarts), at a nominal rate. A batch is as dear as its matrices one by one.
        """
        unique = sorted(set(shapes))
        costs = {}
        for m, n in unique:
            flops = m * m * min(6 * n + 17 * m, 9 * n + 11 * m)
            costs[m, n] = {1: max(1, flops // _NOMINAL_FLOPS_PER_NS)}
        return cls(costs, dict.fromkeys(unique, "estimated"))

    def with_transfer(self, per_matrix: Mapping[Shape, int]) -> CostTable:
        """The same costs with ``per_matrix[shape]`` nanoseconds more for each matrix, such as to gather its shards.

        Raises:
            ValueError: a shape without costs, or a time that is no whole number of at least 0.
        """
        costs = {shape: dict(entries) for shape, entries in self.costs.items()}
        for shape, extra in per_matrix.items():
            if shape not in costs or not is_int(extra) or extra < 0:
                raise ValueError(
                    f"per_matrix: shape {shape}: {extra!r} must be whole nanoseconds for a shape with costs"
                )
            costs[shape] = {k: cost + k * extra for k, cost in costs[shape].items()}
        return CostTable(costs, self.sources)

    @property
    def estimated(self) -> tuple[Shape, ...]:
        """The shapes whose costs are estimates, not measurements."""
        return tuple(shape for shape, source in self.sources.items() if source == "estimated")

    def chunk(self, shape: Shape) -> int:
        """Matrices per batch: the smallest measured ``k`` whose ``T(k) / k`` is within 3 % of the best.

        Raises:
            ValueError: no costs for ``shape``.
        """
        return len(self._table(shape)) - 1

    def batch_size(self, shape: Shape) -> int:
        """Matrices that are best orthogonalized at once: :meth:`chunk`, unless an estimate says nothing of batches.

        Raises:
            ValueError: no costs for ``shape``.
        """
        chunk = self.chunk(shape)
        guessed = self.sources[shape] == "estimated" and len(self.costs[shape]) == 1
        return unmeasured_batch(shape) if guessed else chunk

    def cost(self, shape: Shape, n: int) -> int:
        """Nanoseconds for an owner of ``n`` matrices of ``shape``: whole chunks, then one batch of the remainder.

        Isotonic in ``n``; linear between measured batch sizes.

        Raises:
            ValueError: no costs for ``shape``, or a negative ``n``.
        """
        table = self._table(shape)
        if n < 0:
            raise ValueError(f"an owner cannot hold {n} matrices of shape {shape}")
        chunks, rest = divmod(n, len(table) - 1)
        return chunks * table[-1] + table[rest]

    def costs_up_to(self, shape: Shape, n: int) -> NDArray[np.int64]:
        """``cost(shape, k)`` for ``k = 0 … n``, shape ``(n + 1,)``."""
        table = np.array(self._table(shape), dtype=np.int64)
        chunks, rest = np.divmod(np.arange(n + 1, dtype=np.int64), len(table) - 1)
        return np.asarray(chunks * table[-1] + table[rest], dtype=np.int64)

    def _table(self, shape: Shape) -> tuple[int, ...]:
        try:
            return self._batches[shape]
        except KeyError:
            raise ValueError(
                f"no cost for shape {shape}; measure it with dmuon-profile, or estimate it with CostTable.from_flops"
            ) from None


def _check_entries(shape: Shape, entries: Mapping[int, int]) -> None:
    if not (isinstance(shape, tuple) and len(shape) == 2 and all(is_int(side) and side > 0 for side in shape)):
        raise ValueError(f"costs: shape {shape!r} must be two positive integers (small side, large side)")
    if shape[0] > shape[1]:
        raise ValueError(f"costs: shape {shape} must be (small side, large side); write {shape[::-1]}")
    if not isinstance(entries, Mapping):
        raise ValueError(f"costs: shape {shape}: {entries!r} must map batch sizes to nanoseconds; measure it")
    for k, cost in entries.items():
        if not is_int(k) or k < 1:
            raise ValueError(f"costs: shape {shape}: batch size {k!r} must be an integer of at least 1; remove it")
        if k > _MOST_BATCH:
            raise ValueError(f"costs: shape {shape}: batch size {k} is more than {_MOST_BATCH}; remove it")
        if not is_int(cost) or cost < 1:
            raise ValueError(
                f"costs: shape {shape}, batch size {k}: {cost!r} must be a positive whole number of nanoseconds; "
                "measure it again"
            )
    if 1 not in entries:
        raise ValueError(f"costs: shape {shape} has no entry for batch size 1; measure it")


def _one_chunk(entries: Mapping[int, int]) -> tuple[int, ...]:
    """``T(0) … T(chunk)``, isotonic and interpolated. ``entries`` are sorted by batch size."""
    sizes = list(entries)
    # A larger batch never costs less; noise that says so would make an owner's cost fall as it takes on work.
    times = list(accumulate(entries.values(), max))
    best = min(range(len(sizes)), key=lambda i: times[i] / sizes[i])
    above, of = _NEAR_BEST
    chunk = next(i for i in range(len(sizes)) if times[i] * sizes[best] * of <= times[best] * sizes[i] * above)
    table = [0, times[0]]
    points = list(zip(sizes, times, strict=True))[: chunk + 1]
    for (low, t_low), (high, t_high) in pairwise(points):
        table += [t_low + (t_high - t_low) * (k - low) // (high - low) for k in range(low + 1, high + 1)]
    return tuple(table)
