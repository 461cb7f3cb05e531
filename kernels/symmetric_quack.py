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
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

# Of the child: it starts Python and CUDA, and compiles a kernel for each layout.
DEADLINE_SECONDS = 180.0

# Bytes that addresses and strides must be multiples of.
_ALIGNMENT = 16

# Of the largest entry, from the product in fp64: twice what rounding it once errs by.
_AGREEMENT = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}

# What another time may be otherwise, and so is not kept.
_NOT_STARTED, _NO_ROOM = "a trial of it did not start", "out of memory"
_PASSES = (_NOT_STARTED, _NO_ROOM)

_CHILD = "import runpy, sys; runpy.run_path(sys.argv[1])['report'](sys.argv[2])"
_SAYS = "trial: "  # before what the child has found, whatever else it and its compilers print


def quack_fault(device: torch.device, folder: Path | None) -> str | None:
    """Why quack's products are not used on ``device``, or ``None``.

    They have to be found right there once, in a child process, as they might hang or end this one. What came of it is
    kept in ``folder`` for this device and these versions. Two processes that try at the same time write the same.
    Without a folder each process tries it.
    """
    capability = torch.cuda.get_device_capability(device)
    if capability < (9, 0):
        return f"it is tried from compute capability 9.0 on, and this is {capability[0]}.{capability[1]}"
    if importlib.util.find_spec("quack") is None:
        return "it is not installed; pip install dmuon[quack]"
    versions = [f"{name} {_version(name)}" for name in ("torch", "quack-kernels", "nvidia-cutlass-dsl")]
    trial = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    key = ", ".join([torch.cuda.get_device_name(device), f"cuda {torch.version.cuda}", *versions, f"trial {trial}"])
    path = None if folder is None else folder / f"quack-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    fault = None if path is None else _kept(path, key)
    if fault is None:
        fault = tried(device)
        passes = any(sign in fault for sign in _PASSES)
        if fault:
            again = "" if path is None or passes else f". Remove {path} to try again"
            warnings.warn(f"quack is installed, but {fault}; not used{again}")
        if path is not None and not passes:
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
        return f"{_NOT_STARTED} ({error})"
    try:
        told, errors = child.communicate(timeout=DEADLINE_SECONDS)
    except BaseException as error:  # an interrupt, too, must not leave it behind
        # With its compilers. It is not waited for long: a process that hangs in a driver does not end.
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            child.wait(5.0)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return f"a trial of it did not end within {DEADLINE_SECONDS:g} s"
    if child.returncode:
        last = _NO_ROOM if _NO_ROOM in errors.lower() else errors.strip().rpartition("\n")[2]
        return f"a trial of it ended with status {child.returncode} ({last})"
    found = [line.removeprefix(_SAYS) for line in told.splitlines() if line.startswith(_SAYS)]
    if not found:
        return "a trial of it ended and told nothing"
    return "" if found == ["right"] else found[0]


def report(device: str) -> None:
    """What the child does. It ends by itself, too, should nobody be left who waits for it."""
    if hasattr(signal, "alarm"):
        signal.alarm(int(DEADLINE_SECONDS) + 10)
    print(f"{_SAYS}{found_fault(torch.device(device)) or 'right'}", flush=True)


def found_fault(device: torch.device) -> str | None:
    """What is wrong with its products, or ``None``.

    quack compiles a kernel for each layout, for factors that are one and others, with and without an addend: all that
    Newton–Schulz asks for are tried, in both halves. Sides are multiples of what addresses must be aligned to, and of
    no tile.
    """
    generator = torch.Generator(device).manual_seed(0)
    for dtype in _AGREEMENT:
        x = torch.randn(2, 200, 328, device=device, generator=generator).div_(328**0.5).to(dtype)
        square = torch.randn(2, 328, 328, device=device, generator=generator).div_(328**0.5)
        square = (square + square.mT).to(dtype)
        kinds = ((x, None, 1.0, 1.0), (x.mT, None, 1.0, 1.0), (x.mT, square, 0.5, 2.0))
        addends = ((square, square, alpha, beta) for alpha, beta in ((0.5, 2.0), (1.0, 2.0), (0.5, 1.0)))
        for a, c, alpha, beta in (*kinds, *addends):
            exact = alpha * a.double() @ a.double().mT + (0 if c is None else beta * c.double())
            out = torch.full(exact.shape, torch.nan, dtype=dtype, device=device)
            _multiply(a, c, alpha, beta, out)
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
    # It reads addends and writes halves in an order of its own.
    if not a.numel() or (out is not None and c is not None and out.data_ptr() == c.data_ptr()):
        return None
    result = a.new_empty(*a.shape[:-1], a.shape[-2]) if out is None else out
    if not all(_is_aligned(x) for x in (a, result, c) if x is not None):
        return None
    _multiply(a, c, alpha, beta, result)
    return result


def _is_aligned(x: Tensor) -> bool:
    contiguous, outer = sorted(x.stride()[-2:])
    apart = [x.data_ptr(), *(stride * x.element_size() for stride in (outer, *x.stride()[:-2]))]
    return contiguous == 1 and not any(nbytes < 1 or nbytes % _ALIGNMENT for nbytes in apart)


def _multiply(a: Tensor, c: Tensor | None, alpha: float, beta: float, out: Tensor) -> None:
    product = importlib.import_module("quack.gemm_interface").gemm_symmetric
    with torch.cuda.device_of(a):  # it launches on the current one
        product(a, a.mT, C=c, out=out, alpha=float(alpha), beta=1.0 if c is None else float(beta))


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
