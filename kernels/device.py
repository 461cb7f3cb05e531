"""What a device computes in: dtypes, streams, and products as exact as their dtypes promise, whatever the user allows.

Modules that need Triton or quack are loaded here too, where a device has a use for them.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, lru_cache
from typing import Any, Literal

import torch

# -- dtypes --------------------------------------------------------------------------------------------------

HALF = (torch.float16, torch.bfloat16)
_STORAGE = (*HALF, torch.float32, torch.float64)


def storage_dtype(x_dtype: torch.dtype, device: torch.device, dtype: torch.dtype | None) -> torch.dtype:
    """What to store intermediate matrices in; ``None`` is the default for input of ``x_dtype`` on ``device``.

    Raises:
        TypeError: no supported dtype.
    """
    if dtype is None:
        if x_dtype == torch.float64:
            return torch.float64
        return torch.float32 if device.type == "cpu" else torch.float16
    if dtype not in _STORAGE:
        raise TypeError(f"dtype={dtype!r} is not supported; use None or one of {', '.join(map(str, _STORAGE))}")
    return dtype


@lru_cache(maxsize=64)
def carrier_dtype(device: torch.device, storage: torch.dtype) -> torch.dtype:
    """The dtype of tensors that hold matrices of ``storage`` on ``device``.

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


# -- kernels -------------------------------------------------------------------------------------------------

# Triton decides as it decorates kernels whether CPU tensors may be given to them, in an interpreter for tests.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@cache
def kernels_of(module: Literal["symmetric_quack", "symmetric_triton", "update_triton"]) -> Any:
    """A module of this package that ``import dmuon`` does not load, since Triton or quack is of use on GPUs only."""
    return importlib.import_module(f".{module}", __package__)


# -- streams -------------------------------------------------------------------------------------------------


def streams_of(device: torch.device) -> Any:
    """The module with the streams and events of ``device``, as ``torch.cuda`` is.

    None where everything runs in turn and has ended when the call returns. Whoever waits, or need not wait, asks here.
    """
    if device.type == "cpu":
        return None
    return torch.get_device_module(device.type)


def is_capturing(device: torch.device) -> bool:
    """Whether what is queued on the current stream of ``device`` goes into a CUDA graph, and does not run."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


# -- precision -----------------------------------------------------------------------------------------------


def full_precision(device: torch.device) -> AbstractContextManager[None]:
    """Products on ``device`` are exact but for rounding their results: fp32 is not rounded to TF32 or bf16 before,
    halves accumulate in fp32 wholly, and autocast is off.

    PyTorch's settings may say otherwise, some by default. All but autocast are of the whole process, so other threads
    have them too while any thread is inside; when the last one leaves, what the user had set is back.
    """
    kind = device.type
    autocast = _has_autocast(kind) and torch.is_autocast_enabled(kind)
    return _whole(kind, autocast) if autocast or kind == "cuda" else _FP32


@contextmanager
def _whole(kind: str, autocast: bool) -> Iterator[None]:
    without = torch.autocast(kind, enabled=False) if autocast else nullcontext()
    with without, _FP32, _HALVES if kind == "cuda" else nullcontext():
        yield


class _Shared(AbstractContextManager[None]):
    """A setting of the process that is changed as long as any thread is inside.

    Args:
        change: changes it, and returns what changes it back; None where it was so already.
    """

    def __init__(self, change: Callable[[], Callable[[], None] | None]) -> None:
        self._change = change
        self._lock = threading.Lock()
        self._inside = 0
        self._restore: Callable[[], None] | None = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._restore = self._change()
            self._inside += 1

    def __exit__(self, *_raised: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._restore is not None:
                self._restore()


_has_autocast = cache(torch.amp.is_autocast_available)


def _ieee_fp32() -> Callable[[], None] | None:
    """PyTorch has two ways to allow less, and refuses to read one where the user took the other."""
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:
        return _ieee_fp32_by_back_end()
    if precision == "highest":
        return None
    torch.set_float32_matmul_precision("highest")
    return lambda: torch.set_float32_matmul_precision(precision)


def _ieee_fp32_by_back_end() -> Callable[[], None]:
    mkldnn: Any = torch.backends.mkldnn  # whose module says nothing of what it has
    backends = (torch.backends.cuda.matmul, mkldnn.matmul)
    kept = [backend.fp32_precision for backend in backends]
    for backend in backends:
        backend.fp32_precision = "ieee"

    def restore() -> None:
        for backend, value in zip(backends, kept, strict=True):
            backend.fp32_precision = "none"  # as what stands above them says; perhaps it was so before
            if backend.fp32_precision != value:
                backend.fp32_precision = value

    return restore


def _whole_halves() -> Callable[[], None]:
    """cuBLAS may reduce parts of long products of halves in half precision."""
    matmul = torch.backends.cuda.matmul
    flags = [f"allow_{half}_reduced_precision_reduction" for half in ("fp16", "bf16")]
    kept = {flag: (getattr(matmul, flag), getattr(matmul, f"{flag}_split_k")) for flag in flags}
    kept["allow_fp16_accumulation"] = matmul.allow_fp16_accumulation
    for flag, value in kept.items():
        setattr(matmul, flag, (False, value[1]) if isinstance(value, tuple) else False)

    def restore() -> None:
        for flag, value in kept.items():
            setattr(matmul, flag, value)

    return restore


_FP32 = _Shared(_ieee_fp32)
_HALVES = _Shared(_whole_halves)
