"""The shape of a weight matrix and the block that it belongs to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MatrixShape:
    """One matrix inside a block.

    Attributes:
        name: canonical name of the parameter.
        rows, cols: sides of the matrix, as ``nn.Linear`` stores it: (out features, in features).
        block: canonical name of its block.
    """

    name: str
    rows: int
    cols: int
    block: str
