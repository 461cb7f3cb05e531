"""The Newton–Schulz iteration itself: standard and Gram form with restarts, and blocks of squares."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .arithmetic import Arithmetic, Operations
from .coefficients import Coefficients, Polynomial
from .squares import Square, Squares
from .variant import Variant, whole_v


@dataclass(frozen=True, slots=True)
class Iteration:
    """What a Newton–Schulz run computes; ``restarts`` are the Gram form's, ``dtype`` is storage.

    ``whole_v``: the first ``V`` after a restart is computed whole, not as a symmetric product. Blocks of squares are
    the same in both forms.
    """

    coefficients: Polynomial
    method: Literal["standard", "gram"]
    restarts: tuple[int, ...]
    dtype: torch.dtype
    whole_v: bool = False


def make_iteration(variant: Variant, coefficients: Polynomial, storage: torch.dtype) -> Iteration:
    """What ``variant`` computes."""
    return Iteration(coefficients, variant.method, variant.restarts, storage, whole_v=whole_v(variant.backend, storage))


@dataclass(frozen=True, slots=True)
class Workspace:
    """Buffers that are written again and again: fresh memory costs the CPU more than a product of small matrices.

    ``spare`` is of the shape of the matrices, ``squares`` of their small side, those that hold nothing any more.
    """

    spare: Tensor
    squares: list[Tensor]


def iterate(x: Tensor, iteration: Iteration, arithmetic: Arithmetic, workspace: Workspace | None = None) -> Tensor:
    """Run ``iteration`` on normalised ``x``, ``(m, n)`` or ``(k, m, n)``, in ``arithmetic``'s carrier.

    The result is in ``x`` or in the workspace's ``spare``, and both are overwritten. Beside these two, intermediate
    matrices take four squares of the small side, or with blocks of squares as many as the longest has.
    """
    steps = iteration.coefficients
    spare = torch.empty_like(x) if workspace is None else workspace.spare
    free: list[Tensor] = [] if workspace is None else workspace.squares
    if isinstance(steps, Squares):
        for squares in steps.blocks:
            x, spare = _block_of_squares(x, squares, arithmetic, spare, free), x
        return x
    if iteration.method == "standard":
        return _standard_steps(x, steps, arithmetic.operations(x.ndim), spare, free)
    for start, stop in itertools.pairwise((0, *iteration.restarts, len(steps))):
        block = steps[start:stop]
        x, spare = _gram_block(x, block, arithmetic, iteration.whole_v and start > 0, spare, free), x
    return x


# Below, ``free`` are squares of a workspace to write to. Where there is none, ``out=None`` makes a new one.


def _standard_steps(
    x: Tensor, steps: Coefficients, operations: Operations, spare: Tensor, free: list[Tensor]
) -> Tensor:
    """Steps of the standard form; the result is in ``x`` or ``spare``."""
    _, add, gram, symmetric = operations
    wide = x.shape[-2] <= x.shape[-1]
    x_t, spare_t = x.mT, spare.mT
    r, z = free.pop() if free else None, free.pop() if free else None
    for a, b, c in steps:
        r = gram(x, x_t, out=r) if wide else gram(x_t, x, out=r)
        z = symmetric(r, r, r, alpha=c, beta=b, out=z)
        if wide:
            add(x, z, x, beta=a, out=spare)
        else:
            add(x, x, z.mT, beta=a, out=spare)
        x, x_t, spare, spare_t = spare, spare_t, x, x_t
    free += () if r is None or z is None else (r, z)  # without a step there are none
    return x


def _gram_block(
    x: Tensor, coefficients: Coefficients, arithmetic: Arithmetic, whole_v: bool, out: Tensor, free: list[Tensor]
) -> Tensor:
    """``X`` after the steps of one restart block, in ``out``.

    A factor ``Z + aI`` is not multiplied with: the identity's share is added inside the product instead, as
    in half precision ``a`` costs the small entries of ``Z`` their last digits. The accumulated ``Q`` is kept
    whole: kept as ``Q - sI`` it cancels where ``Q`` is small, which measured ten times worse.
    """
    if len(coefficients) == 1:
        _standard_steps(x, coefficients, arithmetic.operations(x.ndim), out, free)
        return out
    multiply, _, gram, symmetric = arithmetic.operations(x.ndim)
    wide = x.shape[-2] <= x.shape[-1]
    last = len(coefficients) - 1
    r = gram(x, x.mT, out=free.pop() if free else None) if wide else gram(x.mT, x, out=free.pop() if free else None)
    q: Tensor | None = None
    for index, (a, b, c) in enumerate(coefficients):
        z = symmetric(r, r, r, alpha=c, beta=b, out=free.pop() if free else None)
        if index < last:
            if whole_v and index == 0:
                v = arithmetic.product(r, z, r, beta=a, out=free.pop() if free else None)
                r = arithmetic.symmetric(z, v, v, beta=a, out=r, b_symmetric=False)
            else:
                v = symmetric(r, r, z, beta=a, out=free.pop() if free else None)
                r = symmetric(v, z, v, beta=a, out=r)
            free.append(v)
        if q is None:
            z.diagonal(dim1=-2, dim2=-1).add_(a)
            q = arithmetic.round_(z)
        else:
            before, q = q, symmetric(q, q, z, beta=a, out=free.pop() if free else None)
            free += (before, z)
    assert q is not None
    free += (r, q)
    return multiply(q, x, out=out) if wide else multiply(x, q.mT, out=out)


def _block_of_squares(
    x: Tensor, squares: Sequence[Square], arithmetic: Arithmetic, out: Tensor, free: list[Tensor]
) -> Tensor:
    """``X`` after one block, in ``out``. Each ``S`` is stored once, as the next factor and a later addend."""
    wide = x.shape[-2] <= x.shape[-1]
    stored = [arithmetic.gram(x if wide else x.mT, out=free.pop() if free else None)]
    for square in squares[:-1]:
        stored.append(arithmetic.square(stored[-1], square, stored, out=free.pop() if free else None))
    q = arithmetic.square(stored[-1], squares[-1], stored, out=stored[0])  # R is read there for the last time
    free += stored
    return arithmetic.product(q, x, out=out) if wide else arithmetic.product(x, q.mT, out=out)
