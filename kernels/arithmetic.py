"""Matrix products in a storage dtype: full-precision accumulation, one rounding per result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .coefficients import Square
from .device import HALF, carrier_dtype, full_precision, kernels_of
from .symmetric_cpu import split_product
from .variant import Backend, Products, Variant, products_on, require_backend


class Operations(NamedTuple):
    """Functions with the arguments of torch's, ``out`` among them, which may be ``None``.

    ``multiply(a, b)``, ``add(c, a, b, beta=, alpha=)``, ``gram(x, x.mT)``, and ``symmetric``, which is ``add`` whose
    result is symmetric.
    """

    multiply: Callable[..., Tensor]
    add: Callable[..., Tensor]
    gram: Callable[..., Tensor]
    symmetric: Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How a Newton–Schulz iteration stores matrices and multiplies them; this one with torch's whole products.

    ``storage`` is the dtype whose values are kept. Where the device multiplies it fast, tensors are of that
    dtype. Elsewhere they are fp32 (``carrier``) and every result is rounded to ``storage`` once, which is what
    a product that accumulates in fp32 does.

    ``matrices`` and ``batches`` are :meth:`product`, :meth:`gram` and :meth:`symmetric` of either. Where results are
    torch's own they are torch's functions: a call takes as long as a small product.
    """

    storage: torch.dtype
    carrier: torch.dtype
    matrices: Operations = field(init=False, repr=False, compare=False)
    batches: Operations = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        plain = type(self) is Arithmetic and self.storage == self.carrier
        own = None if plain else self._operations()
        object.__setattr__(self, "matrices", own or Operations(torch.mm, torch.addmm, torch.mm, torch.addmm))
        object.__setattr__(self, "batches", own or Operations(torch.bmm, torch.baddbmm, torch.bmm, torch.baddbmm))

    def round_(self, x: Tensor) -> Tensor:
        """Round ``x``, in ``carrier``, to the values that ``storage`` holds, in place."""
        return x if self.storage == self.carrier else x.copy_(x.to(self.storage))

    def product(
        self,
        a: Tensor,  # (..., m, p)
        b: Tensor,  # (..., p, n)
        c: Tensor | None = None,  # (..., m, n)
        *,
        alpha: float = 1.0,
        beta: float = 1.0,
        out: Tensor | None = None,  # (..., m, n)
    ) -> Tensor:
        """``alpha · a b + beta · c`` with one rounding, of matrices or batches. Without ``c``: ``a b``.

        ``out`` may be neither ``a`` nor ``b``.
        """
        if c is None:
            result = torch.matmul(a, b, out=out)
        else:
            fused = torch.addmm if a.ndim == 2 else torch.baddbmm
            result = fused(c, a, b, beta=beta, alpha=alpha, out=out)
        return result if self.storage == self.carrier else self.round_(result)

    def symmetric(
        self,
        a: Tensor,  # (..., m, m)
        b: Tensor,  # (..., m, m)
        c: Tensor | None = None,  # (..., m, m)
        *,
        alpha: float = 1.0,
        beta: float = 1.0,
        out: Tensor | None = None,
        b_symmetric: bool = True,
    ) -> Tensor:
        """:meth:`product` whose result is symmetric in exact arithmetic. ``out`` may be ``c``.

        ``b_symmetric``: ``b`` may be read as its transpose. Not so where ``b`` is symmetric only up to rounding: of
        ``A (B A)`` that would make ``A (A B)``, which rounding takes out of range.
        """
        return self.product(a, b, c, alpha=alpha, beta=beta, out=out)

    def _operations(self) -> Operations:
        def multiply(a: Tensor, b: Tensor, *, out: Tensor | None) -> Tensor:
            return self.product(a, b, out=out)

        def add(c: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float = 1.0, out: Tensor | None) -> Tensor:
            return self.product(a, b, c, alpha=alpha, beta=beta, out=out)

        def gram(x: Tensor, _transposed: Tensor, *, out: Tensor | None) -> Tensor:
            return self.gram(x, out=out)

        def symmetric(
            c: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float = 1.0, out: Tensor | None
        ) -> Tensor:
            return self.symmetric(a, b, c, alpha=alpha, beta=beta, out=out)

        return Operations(multiply, add, gram, symmetric)

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
            return self.symmetric(s, s, total, alpha=square.square, out=total)
        rounded = total.to(self.storage).to(self.carrier)
        result = self.symmetric(s, s, rounded, alpha=square.square, out=out)
        return self.round_(result.copy_(total.sub_(rounded).add_(result)))

    def gram(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """``X Xᵀ`` of ``(..., m, p)``."""
        return self.symmetric(x, x.mT, out=out, b_symmetric=False)


class SplitArithmetic(Arithmetic):
    """On the CPU: symmetric results by block rows up to the diagonal."""

    __slots__ = ()

    def symmetric(
        self,
        a: Tensor,
        b: Tensor,
        c: Tensor | None = None,
        *,
        alpha: float = 1.0,
        beta: float = 1.0,
        out: Tensor | None = None,
        b_symmetric: bool = True,
    ) -> Tensor:
        result = a.new_empty(*a.shape[:-1], b.shape[-1]) if out is None else out
        if a.ndim == 2:
            return self.round_(split_product(a, b, c, alpha=alpha, beta=beta, out=result))
        for i, (left, right, row) in enumerate(zip(a, b, result, strict=True)):
            split_product(left, right, None if c is None else c[i], alpha=alpha, beta=beta, out=row)
        return self.round_(result)


class TritonArithmetic(Arithmetic):
    """On the GPU: symmetric results by lower tiles, each stored twice."""

    __slots__ = ()

    def symmetric(
        self,
        a: Tensor,
        b: Tensor,
        c: Tensor | None = None,
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

    def symmetric(
        self, a: Tensor, b: Tensor, c: Tensor | None = None, *, b_symmetric: bool = True, **options: Any
    ) -> Tensor:
        result: Tensor | None = None
        if (a is b and b_symmetric) or (a.data_ptr() == b.data_ptr() and a.mT.stride() == b.stride()):
            result = kernels_of("symmetric_quack").equal_factors(a, c, **options)
        if result is not None:
            return result
        return TritonArithmetic.symmetric(self, a, b, c, b_symmetric=b_symmetric, **options)

    def square(self, s: Tensor, square: Square, stored: Sequence[Tensor], *, out: Tensor | None = None) -> Tensor:
        return Arithmetic.square(self, s, square, stored, out=out)  # whose sum of all addends is one


def _tiled(*factors: Tensor, **options: Any) -> Tensor:
    result: Tensor = kernels_of("symmetric_triton").symmetric_product(*factors, **options)
    return result


_FORMS: Mapping[Products, type[Arithmetic]] = {
    "torch": Arithmetic,
    "split": SplitArithmetic,
    "triton": TritonArithmetic,
    "quack": QuackArithmetic,
}


@lru_cache(maxsize=64)
def _arithmetic(backend: Products, storage: torch.dtype, carrier: torch.dtype) -> Arithmetic:
    return _FORMS[backend](storage, carrier)


def make_arithmetic(variant: Variant, device: torch.device, storage: torch.dtype) -> Arithmetic:
    """What ``variant`` multiplies with."""
    return _arithmetic(variant.backend, storage, carrier_dtype(device, storage))


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
        out: receives the result; may be ``c`` itself, but share no memory with ``a`` or ``b``.
        b_symmetric: ``b`` equals its transpose, which lets the kernel read it along rows.
        backend: ``"quack"`` (where it is installed, from Hopper on: equal factors), ``"triton"`` (CUDA), ``"split"``
            (CPU), ``"torch"``: the whole product, then mirrored; ``"auto"``: the first of these that runs here.

    Returns:
        ``(m, m)`` or ``(k, m, m)``, or ``out``.

    Raises:
        TypeError: operands that are no floating-point tensors, or of different dtypes.
        ValueError: shapes or devices that do not fit, an ``out`` that shares memory with an operand or with itself, or
            a back end that cannot run here.
    """
    _check(a, b, c, out)
    c = None if beta == 0 else c
    if out is not None:
        _check_out(out, a, b, c)
    require_backend(backend, a.device, a.dtype)
    chosen = products_on(a.device, a.dtype)[0] if backend == "auto" else backend
    if chosen != "torch":
        products = _arithmetic(chosen, a.dtype, a.dtype)
        with full_precision(a.device):
            return products.symmetric(a, b, c, alpha=alpha, beta=beta, out=out, b_symmetric=b_symmetric)
    addend = a.new_empty(()).expand(*a.shape[:-1], b.shape[-1]) if c is None else c  # not read where beta is 0
    fused = torch.addmm if a.ndim == 2 else torch.baddbmm
    with full_precision(a.device):
        lower = fused(addend, a, b, alpha=alpha, beta=0.0 if c is None else beta).tril()
        return torch.add(lower, lower.tril(-1).mT, out=out)


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


def _check_out(out: Tensor, a: Tensor, b: Tensor, c: Tensor | None) -> None:
    """Raise where a kernel would write what it, or another program of it, has still to read or write."""
    reach = 1
    for stride, size in sorted((s, n) for s, n in zip(out.stride(), out.shape, strict=True) if n > 1):
        if stride < reach:
            raise ValueError(f"out has strides {out.stride()} and overlaps itself; pass out without expanding")
        reach = stride * (size - 1) + reach
    if c is not None and out.data_ptr() == c.data_ptr() and out.stride() in (c.stride(), c.mT.stride()):
        c = None  # read where it is written, and symmetric
    for name, operand in (("a", a), ("b", b), ("c", c)):
        if operand is not None and _overlap(out, operand):
            raise ValueError(f"out shares memory with {name}, which is read while out is written; pass another out")


def _overlap(x: Tensor, y: Tensor) -> bool:
    """Whether the address ranges of two tensors meet."""
    if x.numel() == 0 or y.numel() == 0 or x.device.type == "meta":
        return False
    (x0, x1), (y0, y1) = _addresses(x), _addresses(y)
    return x0 < y1 and y0 < x1


def _addresses(x: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + x.element_size() * (1 + last)
