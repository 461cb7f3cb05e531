"""The dtype that Newton–Schulz keeps its matrices in, and the dtype of the tensors that hold them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

HALF = (torch.float16, torch.bfloat16)
_STORAGE = (*HALF, torch.float32, torch.float64)


def storage_dtype(x_dtype: torch.dtype, device: torch.device, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype to store intermediate matrices in; ``None`` is the default for input of ``x_dtype`` on ``device``."""
    if dtype is None:
        if x_dtype == torch.float64:
            return torch.float64
        return torch.float32 if device.type == "cpu" else torch.float16
    if dtype not in _STORAGE:
        raise TypeError(f"dtype={dtype!r} is not supported; use None or one of {', '.join(map(str, _STORAGE))}")
    return dtype


def carrier_dtype(device: torch.device, storage: torch.dtype) -> torch.dtype:
    """The dtype of tensors that hold values of ``storage`` on ``device``.

    On a CPU products of halves run 60 times slower than fp32's, unless it multiplies bf16 itself: there tensors are
    fp32 and their values are rounded.
    """
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
