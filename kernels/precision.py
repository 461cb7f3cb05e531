"""Products as their dtypes promise, whatever the user allows torch in the rest of the process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch


def full_precision(device: torch.device) -> AbstractContextManager[None]:
    """Products on ``device`` are exact but for rounding their results: fp32 is not rounded to TF32 or bf16 before,
    halves accumulate in fp32 wholly, and autocast is off.

    PyTorch's settings may say otherwise, some by default. All but autocast are of the whole process, so other threads
    have them too while any thread is inside; when the last one leaves, what the user had set is back.
    """
    kind = device.type
    if _has_autocast(kind) and torch.is_autocast_enabled(kind):
        return _without_autocast(device)
    return _FP32_AND_HALVES if kind == "cuda" else _FP32


@contextmanager
def _without_autocast(device: torch.device) -> Iterator[None]:
    with torch.autocast(device.type, enabled=False), full_precision(device):
        yield


class _Shared(AbstractContextManager[None]):
    """A setting of the process that is changed as long as any thread is inside.

    Args:
        change: changes it, and returns what changes it back.
    """

    def __init__(self, change: Callable[[], Callable[[], None]]) -> None:
        self._change = change
        self._lock = threading.Lock()
        self._inside = 0
        self._restore: Callable[[], None] = _nothing

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._restore = self._change()
            self._inside += 1

    def __exit__(self, *_raised: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._restore()


class _Both(AbstractContextManager[None]):
    """Of two settings; holds no state, so that threads may share it."""

    def __init__(self, first: _Shared, second: _Shared) -> None:
        self._first, self._second = first, second

    def __enter__(self) -> None:
        self._first.__enter__()
        try:
            self._second.__enter__()
        except BaseException:
            self._first.__exit__()
            raise

    def __exit__(self, *_raised: object) -> None:
        try:
            self._second.__exit__()
        finally:
            self._first.__exit__()


def _nothing() -> None: ...


_has_autocast = cache(torch.amp.is_autocast_available)


def _ieee_fp32() -> Callable[[], None]:
    """PyTorch has two ways to allow less, and refuses to read one where the user took the other."""
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:
        return _ieee_fp32_by_back_end()
    if precision == "highest":
        return _nothing
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
_FP32_AND_HALVES = _Both(_FP32, _HALVES)
