"""The Newton–Schulz iteration itself: standard and Gram form with restarts, and blocks of squares."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .arithmetic import Arithmetic
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

    def square(self) -> Tensor | None:
        """A buffer to write to, or ``None`` for a new one."""
        return self.squares.pop() if self.squares else None

    def release(self, *squares: Tensor) -> None:
        """These are not read any more."""
        self.squares.extend(squares)


def iterate(x: Tensor, iteration: Iteration, arithmetic: Arithmetic, workspace: Workspace | None = None) -> Tensor:
    """Run ``iteration`` on normalised ``x``, ``(m, n)`` or ``(k, m, n)``, in ``arithmetic``'s carrier.

    The result is in ``x`` or in the workspace's ``spare``, and both are overwritten. Beside these two, intermediate
    matrices take four squares of the small side, or with blocks of squares as many as the longest has.
    """
    steps = iteration.coefficients
    if iteration.method == "standard" and arithmetic.is_plain and not isinstance(steps, Squares):
        return _plain_steps(x, steps, workspace)
    workspace = workspace or Workspace(torch.empty_like(x), [])
    spare = workspace.spare
    if isinstance(steps, Squares):
        for squares in steps.blocks:
            x, spare = _block_of_squares(x, squares, arithmetic, spare, workspace), x
        return x
    if iteration.method == "standard":
        for a, b, c in steps:
            r = _gram(x, arithmetic, workspace)
            z = arithmetic.symmetric(r, r, r, alpha=c, beta=b, out=workspace.square())
            x, spare = _apply(z, a, x, arithmetic, spare), x
            workspace.release(r, z)
        return x
    for start, stop in itertools.pairwise((0, *iteration.restarts, len(steps))):
        block = steps[start:stop]
        x, spare = _gram_block(x, block, arithmetic, iteration.whole_v and start > 0, spare, workspace), x
    return x


def _plain_steps(x: Tensor, steps: Coefficients, workspace: Workspace | None) -> Tensor:
    """Steps of the standard form, by torch's functions: calls take as long as small products, so that none is wrapped.

    As above, in ``x`` or the spare matrix of the workspace.
    """
    side = min(x.shape[-2:])
    wide = x.shape[-2] == side
    r = z = None
    if workspace is not None:
        r, z = workspace.square(), workspace.square()
    r = x.new_empty((*x.shape[:-2], side, side)) if r is None else r
    z = torch.empty_like(r) if z is None else z
    spare = torch.empty_like(x) if workspace is None else workspace.spare
    multiply, add = (torch.mm, torch.addmm) if x.ndim == 2 else (torch.bmm, torch.baddbmm)
    x_t, spare_t, z_t = x.mT, spare.mT, z.mT
    for a, b, c in steps:
        if wide:
            multiply(x, x_t, out=r)
            add(r, r, r, beta=b, alpha=c, out=z)
            add(x, z, x, beta=a, out=spare)
        else:
            multiply(x_t, x, out=r)
            add(r, r, r, beta=b, alpha=c, out=z)
            add(x, x, z_t, beta=a, out=spare)
        x, x_t, spare, spare_t = spare, spare_t, x, x_t
    if workspace is not None:
        workspace.release(r, z)
    return x


def _gram_block(
    x: Tensor, coefficients: Coefficients, arithmetic: Arithmetic, whole_v: bool, out: Tensor, workspace: Workspace
) -> Tensor:
    """``X`` after the steps of one restart block, in ``out``.

    A factor ``Z + aI`` is not multiplied with: the identity's share is added inside the product instead, as
    in half precision ``a`` costs the small entries of ``Z`` their last digits. The accumulated ``Q`` is kept
    whole: kept as ``Q - sI`` it cancels where ``Q`` is small, which measured ten times worse.
    """
    r = _gram(x, arithmetic, workspace)
    q: Tensor | None = None
    for index, (a, b, c) in enumerate(coefficients):
        z = arithmetic.symmetric(r, r, r, alpha=c, beta=b, out=workspace.square())
        if len(coefficients) == 1:
            workspace.release(r, z)
            return _apply(z, a, x, arithmetic, out)
        if index + 1 < len(coefficients):
            whole = whole_v and index == 0
            multiply = arithmetic.product if whole else arithmetic.symmetric
            v = multiply(r, z, r, beta=a, out=workspace.square())
            r = arithmetic.symmetric(z, v, v, beta=a, out=r, b_symmetric=not whole)
            workspace.release(v)
        if q is None:
            z.diagonal(dim1=-2, dim2=-1).add_(a)
            q = arithmetic.round_(z)
        else:
            before, q = q, arithmetic.symmetric(q, z, q, beta=a, out=workspace.square())
            workspace.release(before, z)
    assert q is not None
    workspace.release(r, q)
    return _apply(q, 0.0, x, arithmetic, out)


def _block_of_squares(
    x: Tensor, squares: Sequence[Square], arithmetic: Arithmetic, out: Tensor, workspace: Workspace
) -> Tensor:
    """``X`` after one block, in ``out``. Each ``S`` is stored once, as the next factor and a later addend."""
    stored = [_gram(x, arithmetic, workspace)]
    for square in squares[:-1]:
        stored.append(arithmetic.square(stored[-1], square, stored, out=workspace.square()))
    q = arithmetic.square(stored[-1], squares[-1], stored, out=stored[0])  # R is read there for the last time
    workspace.release(*stored)
    return _apply(q, 0.0, x, arithmetic, out)


def _gram(x: Tensor, arithmetic: Arithmetic, workspace: Workspace) -> Tensor:
    """The smaller of ``XXᵀ`` and ``XᵀX``."""
    return arithmetic.gram(x if x.shape[-2] <= x.shape[-1] else x.mT, out=workspace.square())


def _apply(q: Tensor, scale: float, x: Tensor, arithmetic: Arithmetic, out: Tensor) -> Tensor:
    """``(q + scale · I)`` times ``x`` on its small side, into ``out``; ``q`` is symmetric."""
    addend = x if scale else None
    if x.shape[-2] <= x.shape[-1]:
        return arithmetic.product(q, x, addend, beta=scale, out=out)
    return arithmetic.product(x, q.mT, addend, beta=scale, out=out)
