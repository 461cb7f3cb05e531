"""What a step is asked to orthogonalize."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from dmuon.comm.domain import Domain
from dmuon.layout.parcels import Parcel

__all__ = ["Shared", "Task", "unplanned_batch_size"]

_UNPLANNED_ELEMENTS = 2**25  # bounds the workspace where no plan sets a batch size


@dataclass(frozen=True, slots=True)
class Shared:
    """Which ranks hold matrices together, where the pieces lie, and who orthogonalizes them."""

    domain: Domain
    parcel: Parcel


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """One matrix to orthogonalize, or neighbouring matrices of a stack, as this rank sees them.

    Attributes:
        param: the matrix ``(m, n)``, or the stack ``(e, m, n)``.
        position: tasks of one residency are batched, and updated unless it says otherwise, in ascending order.
        shape: ``(m, n)`` of each whole matrix.
        batch_size: how many matrices are orthogonalized at once, at most.
        variants: how Newton-Schulz runs, by batch size, as planned; empty leaves it to a rule.
        span: which matrices of the local stack these are; empty if this rank has no part of them. A matrix counts as a
            stack of one.
        first: number of the first matrix in the whole stack.
        shared: with which ranks; None if this rank has the matrices alone.
    """

    param: Tensor
    position: int
    shape: tuple[int, int]
    batch_size: int
    variants: Mapping[int, str]
    span: slice
    first: int = 0
    shared: Shared | None = None

    @property
    def count(self) -> int:
        """Matrices, on whichever ranks they lie."""
        return self.span.stop - self.span.start if self.shared is None else self.shared.parcel.count


def unplanned_batch_size(shape: tuple[int, int]) -> int:
    """How many matrices of ``shape`` to orthogonalize at once if no plan says so."""
    return max(1, _UNPLANNED_ELEMENTS // max(1, shape[0] * shape[1]))
