"""Matrix products in a storage dtype: full-precision accumulation, one rounding per result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .squares import Square
from .storage import HALF, carrier_dtype
from .symmetric_cpu import split_product, split_sum
from .symmetric_quack import equal_factors
from .symmetric_triton import symmetric_product
from .variant import TILED, Variant


class Operations(NamedTuple):
    """Functions with the arguments of torch's, ``out`` among them, which may be ``None``.

    ``multiply(a, b)``, ``add(c, a, b, beta=, alpha=)``, ``gram(x, x.mT)``, and ``symmetric``, which is ``add`` whose
    result is symmetric.
    """

    multiply: Callable[..., Tensor]
    add: Callable[..., Tensor]
    gram: Callable[..., Tensor]
    symmetric: Callable[..., Tensor]


_TORCH_OF_MATRICES = Operations(torch.mm, torch.addmm, torch.mm, torch.addmm)
_TORCH_OF_BATCHES = Operations(torch.bmm, torch.baddbmm, torch.bmm, torch.baddbmm)


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How a Newton–Schulz iteration stores matrices and multiplies them; this one with torch's whole products.

    ``storage`` is the dtype whose values are kept. Where the device multiplies it fast, tensors are of that
    dtype. Elsewhere they are fp32 (``carrier``) and every result is rounded to ``storage`` once, which is what
    a product that accumulates in fp32 does.
    """

    storage: torch.dtype
    carrier: torch.dtype

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

    def operations(self, ndim: int) -> Operations:
        """:meth:`product`, :meth:`gram` and :meth:`symmetric` of matrices, or with ``ndim`` 3 of batches.

        Where results are torch's own they are torch's functions: a call takes as long as a small product.
        """
        if type(self) is Arithmetic and self.storage == self.carrier:
            return _TORCH_OF_MATRICES if ndim == 2 else _TORCH_OF_BATCHES

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
        return self.product(x, x.mT, out=out)


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
        result = torch.empty_like(a) if out is None else out
        if a.ndim == 2:
            return self.round_(split_product(a, b, c, alpha=alpha, beta=beta, out=result))
        for i, (left, right, row) in enumerate(zip(a, b, result, strict=True)):
            split_product(left, right, None if c is None else c[i], alpha=alpha, beta=beta, out=row)
        return self.round_(result)

    def square(self, s: Tensor, square: Square, stored: Sequence[Tensor], *, out: Tensor | None = None) -> Tensor:
        result = torch.empty_like(s) if out is None else out
        matrices = zip(s, result, strict=True) if s.ndim == 3 else ((s, result),)
        for i, (matrix, row) in enumerate(matrices):
            addends = [x[i] if x.ndim == 3 else x for x, _ in zip(stored, square.addends, strict=False)]
            split_sum(matrix, addends, square.addends, alpha=square.square, identity=square.identity, out=row)
        return self.round_(result)

    def gram(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        result = x.new_empty(*x.shape[:-1], x.shape[-2]) if out is None else out
        for matrix, row in zip([x] if x.ndim == 2 else x, [result] if x.ndim == 2 else result, strict=True):
            split_product(matrix, matrix.mT, out=row)
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
        alpha: float = 1.0,
        beta: float = 1.0,
        out: Tensor | None = None,
        b_symmetric: bool = True,
    ) -> Tensor:
        beta = beta if c is not None else 0.0
        return symmetric_product(a, b, c, alpha=alpha, beta=beta, out=out, b_symmetric=b_symmetric)

    def square(self, s: Tensor, square: Square, stored: Sequence[Tensor], *, out: Tensor | None = None) -> Tensor:
        return symmetric_product(
            s,
            s,
            stored[: len(square.addends)],
            alpha=square.square,
            beta=square.addends,
            identity=square.identity,
            out=out,
            b_symmetric=True,
        )

    def gram(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return symmetric_product(x, x.mT, out=out)


class QuackArithmetic(TritonArithmetic):
    """As :class:`TritonArithmetic`, but quack multiplies equal factors, with one addend at most."""

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
        if a is b and b_symmetric:
            result = equal_factors(a, c, alpha=alpha, beta=beta, out=out)
            if result is not None:
                return result
        return TritonArithmetic.symmetric(self, a, b, c, alpha=alpha, beta=beta, out=out, b_symmetric=b_symmetric)

    def gram(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        result = equal_factors(x, out=out)
        return TritonArithmetic.gram(self, x, out=out) if result is None else result


def make_arithmetic(variant: Variant, device: torch.device, storage: torch.dtype) -> Arithmetic:
    """What ``variant`` multiplies with."""
    carrier = carrier_dtype(device, storage)
    if variant.backend in TILED:
        form = TritonArithmetic if variant.backend == "triton" else QuackArithmetic
        return form(storage, carrier)
    return (SplitArithmetic if variant.backend == "split" else Arithmetic)(storage, carrier)
