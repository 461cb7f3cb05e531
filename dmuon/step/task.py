"""What a step is asked to orthogonalize."""

from __future__ import annotations

from dataclasses import dataclass

from dmuon.comm.domain import Domain
from dmuon.layout.parcels import Parcel

__all__ = ["Task"]


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """Who orthogonalizes a parameter, or some of the matrices of a stack, and where the pieces lie.

    Attributes:
        parcel: of one matrix, or of ``stop - start`` of a stack.
        start, stop: which matrices of a stack, counted over all ranks.
        offset: position of ``start`` in the local stack, on a rank that holds them.
        nbytes: most bytes of whole matrices in one batch.
    """

    domain: Domain
    parcel: Parcel
    start: int = 0
    stop: int = 1
    offset: int = 0
    nbytes: int = 2**62
