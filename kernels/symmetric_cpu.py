"""Symmetric matrix products on CPU: blocks of rows of the lower triangle, then mirrored.

A product that is known to be symmetric needs half the operations. Each block of rows is one GEMM that stops at the
diagonal, so that the BLAS still sees large products.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

# Measured by `python bench/newton_schulz.py --products`, one thread, fp32 and fp64 alike. Rows of a block: fewer waste
# less work above the diagonal, more make a better GEMM; at strides that are powers of two, thin blocks lose it all.
_LARGE = 1024
_ROWS = 128
_ROWS_LARGE = 256

# The same command: the smallest m at which every kind of product gains, and at which those with a long p do.
_GAIN = 768
_GAIN_LONG = 512

# Columns that one copy mirrors: it reads across so many rows, a cache line of each of which must stay cached.
_MIRROR = 64


def worth_splitting(m: int, p: int) -> bool:
    """Whether :func:`split_product` of ``(m, p)`` by ``(p, m)`` takes less time than the full product."""
    return m >= (_GAIN_LONG if p >= 2 * m else _GAIN)


@torch.no_grad()
def split_product(
    a: Tensor,  # (m, p)
    b: Tensor,  # (p, m)
    c: Tensor | None = None,  # (m, m)
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    out: Tensor,  # (m, m)
) -> Tensor:  # (m, m)
    """``alpha · a b + beta · c``, which must be symmetric, from its lower triangle; ``D == Dᵀ`` bitwise.

    Of ``c`` only the lower triangle is read. Whether ``a b`` and ``c`` are symmetric is not checked.

    Operands are fp32 or fp64 with any strides; ``out`` may be ``c``, and may not overlap ``a`` or ``b``.
    """
    in_place = (
        c is None or c.data_ptr() == out.data_ptr()
    )  # perhaps transposed, of which the lower triangle is the same
    for start, stop in itertools.pairwise(_block_edges(len(a))):
        rows, columns, block = a[start:stop], b[:, :stop], out[start:stop, :stop]
        if in_place:  # with beta = 0, addmm does not read what is in the block
            block.addmm_(rows, columns, alpha=alpha, beta=0.0 if c is None else beta)
        else:
            torch.addmm(c[start:stop, :stop], rows, columns, alpha=alpha, beta=beta, out=block)  # type: ignore[index]
    _mirror(out)
    return out


def _block_edges(m: int) -> list[int]:
    """Where the blocks of rows begin, and ``m``: even heights, in whole cache lines."""
    count = max(1, m // (_ROWS if m < _LARGE else _ROWS_LARGE))
    return [m * index // count // 16 * 16 for index in range(count)] + [m]


def _mirror(x: Tensor) -> None:
    """Copy the lower triangle of ``x`` onto the upper one: stripes of columns, then the squares on the diagonal."""
    m = x.shape[0]
    for start in range(_MIRROR, m, _MIRROR):
        stop = min(start + _MIRROR, m)
        x[:start, start:stop].copy_(x[start:stop, :start].mT)
    whole = m - m % _MIRROR
    grid = x[:whole, :whole].unflatten(0, (-1, _MIRROR)).unflatten(2, (-1, _MIRROR))
    for squares in (grid.diagonal(dim1=0, dim2=2).movedim(-1, 0), x[None, whole:, whole:]):
        lower = torch.ones(squares.shape[1:], dtype=torch.bool, device=x.device).tril()
        squares.copy_(torch.where(lower, squares, squares.mT))
