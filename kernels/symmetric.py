"""The batched product with a symmetric result, on every device."""

from __future__ import annotations

import torch
from torch import Tensor

from .precision import full_precision
from .symmetric_cpu import split_product
from .symmetric_triton import symmetric_product as tiled
from .variant import Backend, backend_fault, require_backend


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
        backend: ``"triton"`` (CUDA), ``"split"`` (CPU), ``"torch"``: the whole product, then mirrored; ``"auto"``:
            the first of these that runs here.

    Returns:
        ``(m, m)`` or ``(k, m, m)``, or ``out``.

    Raises:
        TypeError: operands that are no floating-point tensors, or of different dtypes.
        ValueError: shapes or devices that do not fit, an ``out`` that shares memory with an operand, or a back end
            that cannot run here.
    """
    _check(a, b, c, out)
    if backend == "auto":
        backend = next(name for name in ("triton", "split", "torch") if backend_fault(name, a.device, a.dtype) is None)
    require_backend(backend, a.device, a.dtype)
    if beta == 0:
        c = None
    if backend == "triton":
        return tiled(a, b, c, alpha=alpha, beta=beta, out=out, b_symmetric=b_symmetric)
    result = a.new_empty(*a.shape[:-1], b.shape[-1]) if out is None else out
    with full_precision(a.device):
        if backend == "torch":
            fused = torch.addmm if a.ndim == 2 else torch.baddbmm
            addend = a.new_empty(()).expand(result.shape) if c is None else c  # not read where beta is 0
            lower = fused(addend, a, b, alpha=alpha, beta=beta).tril()
            return torch.add(lower, lower.tril(-1).mT, out=result)
        if a.ndim == 2:
            return split_product(a, b, c, alpha=alpha, beta=beta, out=result)
        for index, (left, right, target) in enumerate(zip(a, b, result, strict=True)):
            split_product(left, right, None if c is None else c[index], alpha=alpha, beta=beta, out=target)
    return result


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
    if out is not None:
        for name in ("a", "b"):
            if _overlap(out, operands[name]):
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
