"""Products of equal factors by an installed quack, once a child process has tried it.

The child runs this file alone, by its path: it imports nothing of dmuon.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Of the child: it starts Python and CUDA, and compiles a kernel for each layout.
DEADLINE_SECONDS = 180.0

# Bytes that addresses and strides must be multiples of.
_ALIGNMENT = 16

# Of the largest entry, from the product in fp64: twice what rounding it once errs by.
_AGREEMENT = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}

_CHILD = "import runpy, sys; runpy.run_path(sys.argv[1])['report'](sys.argv[2])"


def quack_fault(device: torch.device, folder: Path) -> str | None:
    """Why quack's products are not used on ``device``, or ``None``.

    They have to be found right there once, in a child process, as they might hang or end this one. What came of it is
    kept in ``folder`` for this device and these versions. Two processes that try at the same time write the same.
    """
    capability = torch.cuda.get_device_capability(device)
    if capability < (9, 0):
        return f"it is tried from compute capability 9.0 on, and this is {capability[0]}.{capability[1]}"
    if importlib.util.find_spec("quack") is None:
        return "it is not installed; pip install dmuon[quack]"
    versions = [f"{name} {_version(name)}" for name in ("torch", "quack-kernels", "nvidia-cutlass-dsl")]
    key = ", ".join([torch.cuda.get_device_name(device), *versions])
    path = folder / f"quack-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    fault = _kept(path, key)
    if fault is None:
        fault = tried(device)
        if fault:
            warnings.warn(f"quack is installed, but {fault}; not used. Remove {path} to try again")
        if "OutOfMemoryError" not in fault:  # another time there may be room
            _keep(path, key, fault)
    return fault or None


def tried(device: torch.device) -> str:
    """What is wrong with quack on ``device``, as a child process finds it; empty if nothing is."""
    try:
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, __file__, str(device)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return f"a trial of it did not start ({error})"
    try:
        told, errors = child.communicate(timeout=DEADLINE_SECONDS)
    except subprocess.TimeoutExpired:
        # With its compilers. It is not waited for long: a process that hangs in a driver does not end.
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            child.wait(5.0)
        return f"a trial of it did not end within {DEADLINE_SECONDS:g} s"
    if child.returncode:
        last = errors.strip().rpartition("\n")[2]
        return f"a trial of it ended with status {child.returncode} ({last})"
    verdict = told.strip().rpartition("\n")[2]
    return "" if verdict == "right" else verdict


def report(device: str) -> None:
    """What the child says in its last line."""
    print(found_fault(torch.device(device)) or "right")


def found_fault(device: torch.device) -> str | None:
    """What is wrong with products of both halves and both layouts, with and without an addend, or ``None``.

    Their sides are multiples of what addresses must be aligned to, and of no tile.
    """
    generator = torch.Generator(device).manual_seed(0)
    for dtype in _AGREEMENT:
        x = torch.randn(2, 200, 328, device=device, generator=generator).div_(328**0.5).to(dtype)
        square = torch.randn(2, 328, 328, device=device, generator=generator).to(dtype)
        for a, c in ((x, None), (x.mT, (square + square.mT) / 2)):
            exact = 0.5 * a.double() @ a.double().mT + (0 if c is None else 2.0 * c.double())
            out = torch.full(exact.shape, torch.nan, dtype=dtype, device=device)
            _multiply(a, c, 0.5, 2.0, out)
            error = float((out.double() - exact).abs().max() / exact.abs().max())
            if not error <= _AGREEMENT[dtype]:
                return f"its product in {dtype} differs from fp64 by {error:.2g} of the largest entry"
            if not torch.equal(out, out.mT):
                return f"its product in {dtype} is not symmetric bitwise"
    return None


def equal_factors(
    a: Tensor,  # (k, m, p) or (m, p)
    c: Tensor | None = None,  # as the result
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    out: Tensor | None = None,  # (k, m, m) or (m, m)
) -> Tensor | None:
    """``alpha · a aᵀ + beta · c`` with a symmetric ``c``, bitwise symmetric; ``None`` where quack does not take these.

    Of two factors that differ its diagonal tiles would not be symmetric: they are computed whole, and rounded otherwise
    on each side. Of equal ones both sides are the same sums.
    """
    if not a.numel() or (out is not None and out is c):  # it reads addends and writes halves in an order of its own
        return None
    result = a.new_empty(*a.shape[:-1], a.shape[-2]) if out is None else out
    if not all(_is_aligned(x) for x in (a, result, c) if x is not None):
        return None
    _multiply(a, c, alpha, beta, result)
    return result


def _is_aligned(x: Tensor) -> bool:
    apart = [stride * x.element_size() for stride in x.stride() if stride != 1]
    return not any(nbytes % _ALIGNMENT for nbytes in (x.data_ptr(), *apart))


def _multiply(a: Tensor, c: Tensor | None, alpha: float, beta: float, out: Tensor) -> None:
    scale = 1.0 if c is None else float(beta)
    with torch.cuda.device(a.device) if a.is_cuda else nullcontext():  # it launches on the current one
        _installed()(a, a.mT, C=c, out=out, alpha=float(alpha), beta=scale)


def _installed() -> Callable[..., Any]:
    """Its product, ``gemm_symmetric(A, B, C, out, alpha, beta)``."""
    product: Callable[..., Any] = importlib.import_module("quack.gemm_interface").gemm_symmetric
    return product


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "of no known version"


def _kept(path: Path, key: str) -> str | None:
    """What came of an earlier trial, or ``None``: there was none, or its file is not what was written."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        fault = document["fault"] if document["key"] == key else None
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return fault if isinstance(fault, str) else None


def _keep(path: Path, key: str, fault: str) -> None:
    with suppress(OSError):  # a folder that cannot be written costs another trial
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump({"key": key, "fault": fault}, file)
        os.replace(file.name, path)
