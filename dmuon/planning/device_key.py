"""What a measured cost depends on: device, versions, dtype and the code that computes."""

from __future__ import annotations

import ast
import hashlib
import platform
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path

import torch

from dmuon.kernels import coefficient_sequence
from dmuon.planning.cost_cache import CacheKey, CostCacheError

__all__ = ["NsOptions", "device_key", "options_of"]


@dataclass(frozen=True, slots=True)
class NsOptions:
    """The Newton–Schulz run that is timed; arguments as of ``dmuon.kernels.orthogonalize``."""

    coefficients: str | tuple[float, ...] | tuple[tuple[float, ...], ...] = "polar_express"
    steps: int = 5
    dtype: torch.dtype | None = None


def device_key(device: torch.device, options: NsOptions) -> CacheKey:
    """What timings on ``device`` with ``options`` are valid for."""
    coefficients = coefficient_sequence(options.coefficients, options.steps)  # validates both
    named = isinstance(options.coefficients, str)
    name, sm_count, cuda, driver = _cpu_name(), 0, "", ""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, sm_count = properties.name, properties.multi_processor_count
        cuda, driver = torch.version.cuda or torch.version.hip or "", _driver_version()
    elif device.type != "cpu":
        name = f"{device.type} {torch.get_device_module(device.type).get_device_name(device)}"
    default = torch.float32 if device.type == "cpu" else torch.float16
    return CacheKey(
        device=name,
        sm_count=sm_count,
        driver=driver,
        torch=torch.__version__,
        cuda=cuda,
        dtype=str(options.dtype or default).removeprefix("torch."),
        kernels=_kernel_digest(),
        coefficients=str(options.coefficients) if named else repr(coefficients),
        steps=options.steps,
    )


def options_of(key: CacheKey, name: str) -> NsOptions:
    """The run that a cache called ``name`` was measured with.

    Raises:
        CostCacheError: the key describes no run that this version can time; names file, field and remedy.
    """
    remedy = "measure anew with dmuon-profile"
    dtype = getattr(torch, key.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CostCacheError(f"cost cache {name}: field 'key.dtype' is {key.dtype!r}, no dtype of torch; {remedy}")
    try:
        coefficients = ast.literal_eval(key.coefficients) if key.coefficients.startswith("(") else key.coefficients
        coefficient_sequence(coefficients, key.steps)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise CostCacheError(f"cost cache {name}: field 'key.coefficients' or 'key.steps': {error}; {remedy}") from None
    return NsOptions(coefficients, key.steps, dtype)


def _cpu_name() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    name = found[1].strip() if found else platform.processor() or platform.machine() or "CPU"
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def _driver_version() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found[1] if found else "unknown"


@lru_cache(maxsize=1)
def _kernel_digest() -> str:
    """Digest of the kernels' code, without blank lines and comment lines."""
    digest = hashlib.sha256()
    for item in sorted(resources.files("dmuon.kernels").iterdir(), key=lambda item: item.name):
        if item.name.endswith(".py"):
            lines = (line.rstrip() for line in item.read_text(encoding="utf-8").splitlines())
            digest.update(item.name.encode())
            digest.update("\n".join(line for line in lines if line and not line.lstrip().startswith("#")).encode())
    return digest.hexdigest()[:16]
