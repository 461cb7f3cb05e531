"""Matrix products in a storage dtype: full-precision accumulation, one rounding per result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


@contextmanager
def full_accumulation(device: torch.device) -> Iterator[None]:
    """On CUDA, keep cuBLAS from reducing parts of long fp16 products in fp16, which PyTorch allows by default."""
    if device.type != "cuda":
        yield
        return
    matmul = torch.backends.cuda.matmul
    allowed = matmul.allow_fp16_reduced_precision_reduction
    matmul.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        matmul.allow_fp16_reduced_precision_reduction = allowed


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How a Newton–Schulz iteration stores matrices and multiplies them.

    ``storage`` is the dtype whose values are kept. Where the device multiplies it fast, tensors are of that
    dtype. On CPU half-precision products run 60 times slower than fp32's, so there tensors are fp32
    (``carrier``) and every result is rounded to ``storage`` once, which is what a GPU's fp32-accumulating
    product does.
    """

    storage: torch.dtype
    carrier: torch.dtype

    @classmethod
    def on(cls, device: torch.device, storage: torch.dtype) -> Arithmetic:
        emulated = device.type == "cpu" and storage in HALF
        return cls(storage, torch.float32 if emulated else storage)

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
    ) -> Tensor:
        """``alpha · a b + beta · c`` with one rounding, of matrices or batches. Without ``c``: ``a b``."""
        if c is None:
            return self.round_(a @ b)
        fused = torch.addmm if a.ndim == 2 else torch.baddbmm
        return self.round_(fused(c, a, b, beta=beta, alpha=alpha))
