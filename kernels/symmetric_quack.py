"""Products of equal factors by an installed quack, which is imported and checked where it is first used."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .storage import HALF, Storage
from .streams import is_capturing
from .symmetric_tiles import DESCRIPTOR_ALIGNMENT

_CAPABILITIES = (8, 9, 10, 11, 12)  # that it has kernels for

# Of the largest entry, between two products that are each rounded once.
_AGREEMENT = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

# What came of the check of a kind of product. Of several threads one more may check.
_checked: dict[tuple[object, ...], bool] = {}


def quack_absence(device: torch.device, dtype: Storage) -> str | None:
    """Why quack has no products for ``device`` and ``dtype``, or ``None``; does not import it."""
    if dtype not in HALF:
        return f"it multiplies half precision, not {dtype}"
    if device.type != "cuda" or torch.version.hip is not None:
        return "it needs an NVIDIA GPU"
    major, minor = torch.cuda.get_device_capability(device)
    if major not in _CAPABILITIES:
        return f"it has no kernel for compute capability {major}.{minor}"
    return None if importlib.util.find_spec("quack") is not None else "it is not installed"


@lru_cache(maxsize=64)
def quack_fault(device: torch.device, dtype: Storage) -> str | None:
    """Why quack's products cannot run on ``device`` in ``dtype``, or ``None``; imports it, to see if that works."""
    absence = quack_absence(device, dtype)
    if absence is not None:
        return absence
    try:
        _installed()
    except Exception as error:  # whatever its imports may raise
        told = f"it does not import ({type(error).__name__}: {error})"
        warnings.warn(f"quack is installed, but {told}; not used")
        return told
    return None


def equal_factors(
    a: Tensor,  # (k, m, p) or (m, p)
    c: Tensor | None = None,  # as the result
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    out: Tensor | None = None,  # (k, m, m) or (m, m)
) -> Tensor | None:
    """``alpha · a aᵀ + beta · c`` with a symmetric ``c``, bitwise symmetric; ``None`` where quack is not to be used.

    Of two factors that differ the diagonal tiles would not be symmetric: they are computed whole, and rounded otherwise
    on each side. Of equal ones both sides are the same sums. The first product of a kind (shapes, strides, dtype) is
    checked, on random matrices, against torch's and for symmetry; the host waits for it. One that fails is not used
    again in this process, with a warning that says why. A graph that is captured before has none. How many matrices
    there are is not part of the kind: one of them is checked.
    """
    if out is not None and out is c:
        return None  # it reads addends and writes both halves in an order of its own
    if a.ndim == 2:
        whole = equal_factors(
            a[None], c if c is None else c[None], alpha=alpha, beta=beta, out=out if out is None else out[None]
        )
        return whole if whole is None else whole[0]
    result = a.new_empty(len(a), a.shape[1], a.shape[1]) if out is None else out
    used = (a, result) if c is None else (a, result, c)
    if not a.numel() or not all(map(_is_aligned, used)):
        return None
    kind = (a.device, a.dtype, *((x.shape[1:], x.stride()[1:]) for x in used), alpha == 1, beta == 1)
    if kind not in _checked:
        if is_capturing(a.device):
            return None
        try:
            _checked[kind] = _checks(a[:1], None if c is None else c[:1], alpha, beta)
        except torch.OutOfMemoryError:
            return None  # another time there may be room
    if not _checked[kind]:
        return None
    _multiply(a, c, alpha, beta, result)
    return result if out is None else out


def _is_aligned(x: Tensor) -> bool:
    """Whether its address, and that of each row or column, is one that descriptors take."""
    apart = [stride * x.element_size() for stride in x.stride() if stride != 1]
    return not any(nbytes % DESCRIPTOR_ALIGNMENT for nbytes in (x.data_ptr(), *apart))


def _checks(a: Tensor, c: Tensor | None, alpha: float, beta: float) -> bool:
    """Whether a product like this one is right and symmetric; warns if not."""
    try:
        fault = _fault(a, c, alpha, beta)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a compiler or a driver may raise
        fault = f"failed ({type(error).__name__}: {error})"
    if fault is not None:
        warnings.warn(f"quack's product of {tuple(a.shape)} in {a.dtype} {fault}; not used")
    return fault is None


def _fault(a: Tensor, c: Tensor | None, alpha: float, beta: float) -> str | None:
    generator = torch.Generator(a.device).manual_seed(0)
    x, found = (
        torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=a.device),
        a.new_full((len(a), a.shape[1], a.shape[1]), torch.nan),
    )
    x.normal_(std=a.shape[2] ** -0.5, generator=generator)
    addend = None
    if c is not None:
        addend = torch.empty_strided(c.shape, c.stride(), dtype=c.dtype, device=c.device).normal_(generator=generator)
        addend.copy_(addend + addend.mT)
    _multiply(x, addend, alpha, beta, found)
    expected = torch.bmm(x, x.mT).mul_(alpha) if addend is None else torch.baddbmm(
        addend, x, x.mT, alpha=alpha, beta=beta
    )  # fmt: skip
    error = float((found - expected).abs().max() / expected.abs().max())
    if not error <= _AGREEMENT[a.dtype]:
        return f"differs from torch's by {error:.2g} of the largest entry"
    return None if torch.equal(found, found.mT) else "is not symmetric bitwise"


def _multiply(a: Tensor, c: Tensor | None, alpha: float, beta: float, out: Tensor) -> None:
    scale = 1.0 if c is None else float(beta)
    with torch.cuda.device(a.device) if a.is_cuda else nullcontext():  # it launches on the current one
        _installed()(a, a.mT, C=c, out=out, alpha=float(alpha), beta=scale)


@lru_cache(maxsize=1)
def _installed() -> Callable[..., Any]:
    """Its product, ``gemm_symmetric(A, B, C, out, alpha, beta)``."""
    product: Callable[..., Any] = importlib.import_module("quack.gemm_interface").gemm_symmetric
    return product
