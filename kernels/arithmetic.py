"""Matrix products in a storage dtype: full-precision accumulation, one rounding per result.

A product that is known to be symmetric needs half the operations: torch computes the whole of it, a CPU blocks of rows
of the lower triangle, a GPU its tiles.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .coefficients import Square
from .device import HALF, carrier_dtype, full_precision, kernels_of
from .variant import Backend, Products, products_on, require_backend, whole_v

Operation: TypeAlias = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How a Newton–Schulz iteration stores matrices and multiplies them; this one with torch's whole products.

    ``storage`` is the dtype whose values are kept. Where the device multiplies it fast, tensors are of that
    dtype. Elsewhere they are fp32 (``carrier``) and every result is rounded to ``storage`` once, which is what
    a product that accumulates in fp32 does. ``whole_v`` is what :func:`whole_v` says.

    Products are of matrices or batches and take the arguments of torch's ``mm`` and ``addmm``. ``out`` may be ``None``,
    and neither factor.
    """

    storage: torch.dtype
    carrier: torch.dtype
    whole_v: bool = False

    def operations(self, ndim: int) -> tuple[Operation, Operation, Operation, Operation]:
        """:meth:`multiply`, :meth:`add`, :meth:`gram` and :meth:`symmetric`, of tensors with so many dimensions.

        Where results are torch's own, these are torch's functions: a call takes as long as a small product.
        """
        if type(self) is not Arithmetic or self.storage != self.carrier:
            return self.multiply, self.add, self.gram, self.symmetric
        if ndim == 2:
            return torch.mm, torch.addmm, torch.mm, torch.addmm
        return torch.bmm, torch.baddbmm, torch.bmm, torch.baddbmm

    def round_(self, x: Tensor) -> Tensor:
        """Round ``x``, in ``carrier``, to the values that ``storage`` holds, in place."""
        return x if self.storage == self.carrier else x.copy_(x.to(self.storage))

    def multiply(self, a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
        """``a b`` of ``(..., m, p)`` and ``(..., p, n)``."""
        return self.round_(torch.matmul(a, b, out=out))

    def add(
        self, c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1.0, alpha: float = 1.0, out: Tensor | None = None
    ) -> Tensor:
        """``alpha · a b + beta · c`` with one rounding; ``c`` is ``(..., m, n)``."""
        fused = torch.addmm if a.ndim == 2 else torch.baddbmm
        return self.round_(fused(c, a, b, beta=beta, alpha=alpha, out=out))

    def gram(self, x: Tensor, x_t: Tensor, *, out: Tensor | None = None) -> Tensor:
        """``X Xᵀ`` of ``(..., m, p)`` and its transpose."""
        return self.symmetric(None, x, x_t, out=out, b_symmetric=False)

    def symmetric(
        self,
        c: Tensor | None,  # (..., m, m)
        a: Tensor,  # (..., m, p)
        b: Tensor,  # (..., p, m)
        *,
        beta: float = 1.0,
        alpha: float = 1.0,
        out: Tensor | None = None,
        b_symmetric: bool = True,
    ) -> Tensor:
        """:meth:`add` or, without ``c`` and ``alpha``, :meth:`multiply`, whose result is symmetric but for rounding.

        ``out`` may be ``c``. ``b_symmetric``: ``b`` may be read as its transpose. Not so where ``b`` is symmetric only
        up to rounding: of ``A (B A)`` that would make ``A (A B)``, which rounding takes out of range.
        """
        return self.multiply(a, b, out=out) if c is None else self.add(c, a, b, beta=beta, alpha=alpha, out=out)

    def square(
        self,
        s: Tensor,  # (..., m, m)
        square: Square,
        stored: Sequence[Tensor],  # each (..., m, m)
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """``square`` of the symmetric ``s``, with the matrices of its block so far as addends.

        ``out`` may be an addend, but not ``s``. In half precision the sum of the addends is kept in fp32: what rounding
        takes from it may be as large as the result, and is added to that.
        """
        addends = zip(stored, square.addends, strict=False)
        (first, factor), *others = sorted(addends, key=lambda addend: addend[0] is not out)  # ``out`` is overwritten
        half = self.storage in HALF
        total = first.to(torch.float32, copy=True).mul_(factor) if half else torch.mul(first, factor, out=out)
        for addend, factor in others:
            total.add_(addend, alpha=factor)
        total.diagonal(dim1=-2, dim2=-1).add_(square.identity)
        if not half:
            return self.symmetric(total, s, s, alpha=square.square, out=total)
        rounded = total.to(self.storage).to(self.carrier)
        result = self.symmetric(rounded, s, s, alpha=square.square, out=out)
        return self.round_(result.copy_(total.sub_(rounded).add_(result)))


# -- on the CPU ----------------------------------------------------------------------------------------------

# Measured on one thread, fp32 and fp64 alike. Rows of a block: fewer waste less work above the diagonal, more make a
# better GEMM; at strides that are powers of two, thin blocks lose it all.
_LARGE = 1024
_ROWS = 128
_ROWS_LARGE = 256

# Columns that one copy mirrors: it reads across so many rows, a cache line of each of which must stay cached.
_MIRROR = 64


class SplitArithmetic(Arithmetic):
    """Symmetric results by blocks of rows, of fp32 or fp64, from what is on and below the diagonal of ``c``.

    Each block is one GEMM that stops at the diagonal, so that the BLAS still sees large products.
    """

    __slots__ = ()

    def symmetric(
        self,
        c: Tensor | None,
        a: Tensor,
        b: Tensor,
        *,
        beta: float = 1.0,
        alpha: float = 1.0,
        out: Tensor | None = None,
        b_symmetric: bool = True,
    ) -> Tensor:
        result = a.new_empty(*a.shape[:-1], b.shape[-1]) if out is None else out
        if a.ndim == 3:
            for i, one in enumerate(result):
                addend = None if c is None else c[i]
                SplitArithmetic.symmetric(self, addend, a[i], b[i], beta=beta, alpha=alpha, out=one)
            return result
        for start, stop in itertools.pairwise(_block_edges(len(a))):
            added = block = result[start:stop, :stop]
            if c is None:
                beta = 0.0  # what is in the block is not read
            elif c.data_ptr() != result.data_ptr():  # else perhaps transposed, whose lower triangle is the same
                added = c[start:stop, :stop]
            torch.addmm(added, a[start:stop], b[:, :stop], beta=beta, alpha=alpha, out=block)
        _mirror(result)
        return self.round_(result)


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


# -- on GPUs -------------------------------------------------------------------------------------------------


class TritonArithmetic(Arithmetic):
    """Symmetric results by lower tiles, each stored twice."""

    __slots__ = ()

    def symmetric(
        self,
        c: Tensor | None,
        a: Tensor,
        b: Tensor,
        *,
        beta: float = 1.0,
        b_symmetric: bool = True,
        **options: Any,
    ) -> Tensor:
        addends = {} if c is None else {"addends": [c], "betas": [beta]}
        return _tiled(a, b, b_symmetric=b_symmetric, **addends, **options)

    def square(self, s: Tensor, square: Square, stored: Sequence[Tensor], *, out: Tensor | None = None) -> Tensor:
        addends = stored[: len(square.addends)]
        options = {"alpha": square.square, "betas": square.addends, "identity": square.identity}
        return _tiled(s, s, addends=addends, out=out, b_symmetric=True, **options)


class QuackArithmetic(TritonArithmetic):
    """As :class:`TritonArithmetic`, but quack multiplies equal factors, with one addend at most."""

    __slots__ = ()

    def symmetric(self, c: Tensor | None, a: Tensor, b: Tensor, *, b_symmetric: bool = True, **options: Any) -> Tensor:
        result: Tensor | None = None
        if (a is b and b_symmetric) or (a.data_ptr() == b.data_ptr() and a.mT.stride() == b.stride()):
            result = kernels_of("symmetric_quack").equal_factors(a, c, **options)
        return super().symmetric(c, a, b, b_symmetric=b_symmetric, **options) if result is None else result

    def square(self, s: Tensor, square: Square, stored: Sequence[Tensor], *, out: Tensor | None = None) -> Tensor:
        return Arithmetic.square(self, s, square, stored, out=out)  # whose sum of all addends is one


def _tiled(*factors: Tensor, **options: Any) -> Tensor:
    result: Tensor = kernels_of("symmetric_triton").symmetric_product(*factors, **options)
    return result


# -- which of them -------------------------------------------------------------------------------------------

_FORMS: Mapping[Products, type[Arithmetic]] = {
    "torch": Arithmetic,
    "split": SplitArithmetic,
    "triton": TritonArithmetic,
    "quack": QuackArithmetic,
}


@lru_cache(maxsize=64)
def make_arithmetic(backend: Products, device: torch.device, storage: torch.dtype) -> Arithmetic:
    """What multiplies on ``device`` with ``backend``."""
    return _FORMS[backend](storage, carrier_dtype(device, storage), whole_v(backend, storage))


@torch.no_grad()
def symmetric_product(
    a: Tensor,  # (m, p) or (k, m, p)
    b: Tensor,  # (p, m) or (k, p, m)
    c: Tensor | None = None,  # (m, m) or (k, m, m)
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    out: Tensor | None = None,
    b_symmetric: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """``D = alpha · A B + beta · C`` where the caller knows that ``D`` is symmetric: ``D == Dᵀ`` bitwise.

    So it is for ``X Xᵀ``, and for symmetric matrices that commute. Only the lower half is computed, and mirrored;
    fp16 and bf16 accumulate in fp32 and are rounded once.

    Args:
        a, b, c: of one floating-point dtype and device, any strides; ``c`` symmetric, not read where ``beta`` is 0.
        out: the result is copied there, and may so replace an operand.
        b_symmetric: ``b`` equals its transpose, which lets the kernel read it along rows.
        backend: ``"quack"`` (where it is installed, from Hopper on: equal factors), ``"triton"`` (CUDA), ``"split"``
            (CPU), ``"torch"``: the whole product, then mirrored; ``"auto"``: the first of these that runs here.

    Returns:
        ``(m, m)`` or ``(k, m, m)``, or ``out``.

    Raises:
        TypeError: operands that are no floating-point tensors, or of different dtypes.
        ValueError: shapes or devices that do not fit, an ``out`` that overlaps itself, or a back end that cannot run
            here.
    """
    _check(a, b, c, out)
    c = None if beta == 0 else c
    require_backend(backend, a.device, a.dtype)
    chosen = products_on(a.device, a.dtype)[0] if backend == "auto" else backend
    products = _FORMS[chosen](a.dtype, a.dtype)
    with full_precision(a.device):
        if chosen != "torch":
            found = products.symmetric(c, a, b, beta=beta, alpha=alpha, b_symmetric=b_symmetric)
        else:
            addend = a.new_empty(()).expand(*a.shape[:-1], b.shape[-1]) if c is None else c  # not read where beta is 0
            lower = products.add(addend, a, b, beta=0.0 if c is None else beta, alpha=alpha).tril()
            found = lower + lower.tril(-1).mT
    return found if out is None else out.copy_(found)


def _check(a: Tensor, b: Tensor, c: Tensor | None, out: Tensor | None) -> None:
    operands = {name: t for name, t in (("a", a), ("b", b), ("c", c), ("out", out)) if t is not None}
    for name, tensor in operands.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name} must be a floating-point tensor, got {kind}; convert it first")
        if tensor.dtype != a.dtype:
            raise TypeError(f"{name} is {tensor.dtype}, a is {a.dtype}; convert them to one dtype")
        if tensor.device != a.device:
            raise ValueError(f"{name} is on {tensor.device}, a on {a.device}; move them to one device")
    if a.ndim not in (2, 3):
        raise ValueError(f"a must be (m, p) or (k, m, p), got {tuple(a.shape)}; flatten the leading dimensions")
    rows, inner = a.shape[-2:]
    for name, shape in (("b", (inner, rows)), ("c", (rows, rows)), ("out", (rows, rows))):
        wanted = (*a.shape[:-2], *shape)
        if name in operands and operands[name].shape != wanted:
            raise ValueError(f"{name} must be {wanted} beside a {tuple(a.shape)}, got {tuple(operands[name].shape)}")
    reach = 1
    sizes = [] if out is None else [(s, n) for s, n in zip(out.stride(), out.shape, strict=True) if n > 1]
    for stride, size in sorted(sizes):
        if stride < reach:
            raise ValueError(f"out overlaps itself, with strides {[s for s, _ in sizes]}; pass out without expanding")
        reach = stride * (size - 1) + reach
