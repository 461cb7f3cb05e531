"""The dtype that Newton–Schulz keeps its matrices in, step by step, and the dtype of the tensors that hold them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, TypeAlias

import torch

# ``"mixed"``: the first steps in fp32, the others in bf16. Steps stretch small singular values most while these are
# few units of rounding in size, so that which steps are rounded matters more than how far.
Storage: TypeAlias = "torch.dtype | Literal['mixed']"

HALF = (torch.float16, torch.bfloat16)
MIXED: Literal["mixed"] = "mixed"
_MIXED_FULL = 2  # steps in fp32
_STORAGE = (*HALF, torch.float32, torch.float64)


def storage_dtype(x_dtype: torch.dtype, device: torch.device, dtype: Storage | None) -> Storage:
    """What to store intermediate matrices in; ``None`` is the default for input of ``x_dtype`` on ``device``.

    Raises:
        TypeError: no supported dtype.
        ValueError: ``"mixed"`` elsewhere than on a CPU.
    """
    if dtype is None:
        if x_dtype == torch.float64:
            return torch.float64
        return torch.float32 if device.type == "cpu" else torch.float16
    if dtype == MIXED and device.type != "cpu":
        raise ValueError(
            f"dtype={MIXED!r} is for CPUs, and the matrices are on {device.type}, where its steps in fp32 would take "
            "longer than all five in fp16; use torch.float16, or None, which is that"
        )
    if dtype != MIXED and dtype not in _STORAGE:
        raise TypeError(
            f"dtype={dtype!r} is not supported; use None, {MIXED!r} or one of {', '.join(map(str, _STORAGE))}"
        )
    return dtype


def storage_spans(storage: Storage, steps: int) -> tuple[tuple[torch.dtype, int, int], ...]:
    """Which steps are stored in which dtype: ``(dtype, start, stop)`` in their order."""
    if isinstance(storage, torch.dtype):
        return ((storage, 0, steps),)
    full = min(_MIXED_FULL, steps)
    spans = ((torch.float32, 0, full), (torch.bfloat16, full, steps))
    return tuple(span for span in spans if span[1] < span[2])


def first_dtype(storage: Storage) -> torch.dtype:
    """The dtype that a matrix is rounded to before the first step."""
    return storage if isinstance(storage, torch.dtype) else torch.float32


def carrier_dtype(device: torch.device, storage: Storage) -> torch.dtype:
    """The dtype of tensors that begin, and end, as matrices of ``storage`` on ``device``.

    On a CPU products of halves run 60 times slower than fp32's, unless it multiplies bf16 itself: there tensors are
    fp32 and their values are rounded.
    """
    storage = first_dtype(storage)
    if device.type != "cpu" or storage not in HALF:
        return storage
    return torch.bfloat16 if storage == torch.bfloat16 and cpu_multiplies_bf16() else torch.float32


@cache
def cpu_multiplies_bf16() -> bool:
    """Whether this process's CPU has instructions that multiply bf16 matrices, and torch the library that uses them.

    On others the library takes bf16 too, but converts it, which gains nothing.
    """
    mkldnn: Any = torch.backends.mkldnn
    if not (mkldnn.is_available() and mkldnn.enabled):
        return False
    capabilities: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()  # not in every version
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
