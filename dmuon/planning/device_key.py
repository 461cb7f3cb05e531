"""What a measured cost depends on: device, versions, dtype and the code that computes."""

from __future__ import annotations

import ast
import hashlib
import platform
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import torch

from dmuon.kernels import Polynomial, check_storage, coefficient_sequence, newton_schulz_flops, storage_dtype
from dmuon.planning.cost_cache import CacheKey
from dmuon.solver import Shape

NS_DEFAULTS: Mapping[str, Any] = {"ns_coefficients": "polar_express", "ns_steps": 5, "ns_dtype": None}


@dataclass(frozen=True, slots=True)
class NsOptions:
    """The Newton–Schulz run that is timed; arguments as of ``dmuon.kernels.orthogonalize``."""

    coefficients: str | tuple[float, ...] | tuple[tuple[float, ...], ...] = "polar_express"
    steps: int = 5
    dtype: torch.dtype | None = None

    @classmethod
    def named(cls, given: Mapping[str, Any]) -> NsOptions:
        """Those that users write, and defaults for what is None or left out."""
        return cls(*(value if given.get(name) is None else given[name] for name, value in NS_DEFAULTS.items()))

    def check(self, device: torch.device) -> tuple[Polynomial, torch.dtype]:
        """The coefficients of each step, and the dtype of products on ``device``."""
        coefficients = coefficient_sequence(self.coefficients, self.steps)
        storage = storage_dtype(torch.float32, device, self.dtype)
        check_storage(coefficients, storage)
        return coefficients, storage

    def flops(self, shape: Shape, device: torch.device) -> int:
        """Operations of one run on one matrix of ``shape``."""
        return int(newton_schulz_flops(shape, self.coefficients, self.steps, self.dtype, device))


def device_key(device: torch.device, options: NsOptions) -> CacheKey:
    """What timings on ``device`` with ``options`` are valid for."""
    coefficients, storage = options.check(device)
    named = isinstance(options.coefficients, str)
    name, sm_count, cuda, driver, compilers = _cpu_name(), 0, "", "", ""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, sm_count = properties.name, properties.multi_processor_count
        cuda, driver = torch.version.cuda or torch.version.hip or "", _driver_version()
        compilers = _compilers()
    elif device.type != "cpu":
        name = f"{device.type} {torch.get_device_module(device.type).get_device_name(device)}"
    return CacheKey(
        device=name,
        sm_count=sm_count,
        driver=driver,
        torch=torch.__version__,
        cuda=cuda,
        dtype=str(storage).removeprefix("torch."),
        kernels=_kernel_digest(),
        coefficients=str(options.coefficients) if named else repr(coefficients),
        steps=options.steps,
        compilers=compilers,
        threads=torch.get_num_threads() if device.type == "cpu" else 1,
    )


def _cpu_name() -> str:
    try:
        model = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        model = None
    name = model[1].strip() if model else platform.processor() or platform.machine() or "CPU"
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def _driver_version() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    version = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return version[1] if version else "unknown"


@lru_cache(maxsize=1)
def _compilers() -> str:
    """Installed packages that make kernels, with versions: ``"triton 3.6.0, quack-kernels 0.6.5"``."""
    found = []
    for name in ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-windows", "quack-kernels"):
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    return ", ".join(found)


@lru_cache(maxsize=1)
def _kernel_digest() -> str:
    """Digest of the code that is timed."""
    items = resources.files("dmuon.kernels").iterdir()
    return code_digest(item.read_text(encoding="utf-8") for item in items if item.name.endswith(".py"))


def code_digest(sources: Iterable[str]) -> str:
    """Digest of what the modules with these ``sources`` compute, alike in all versions of Python.

    Comments, layout, docstrings and the order of the modules are no part of it. Nor are ``__all__`` and imports of one
    module by another, which follow the names of files.
    """
    forms = sorted(ascii(_form(ast.parse(source))) for source in sources)
    return hashlib.sha256("\n".join(forms).encode()).hexdigest()[:16]


def _form(node: object) -> object:
    """A syntax tree as nested lists. ``ast.dump`` writes fields that only some versions of Python have."""
    if isinstance(node, list):
        return [_form(item) for item in node if not _is_for_readers(item)]
    if not isinstance(node, ast.AST):
        return node
    fields = sorted((name, value) for name, value in vars(node).items() if name in node._fields)
    return [type(node).__name__, *((name, _form(value)) for name, value in fields if value not in (None, []))]


def _is_for_readers(statement: object) -> bool:
    """Whether ``statement`` is a docstring, an import from a file beside it, or a list of exports."""
    match statement:
        case ast.Expr(ast.Constant(str())) | ast.Assign([ast.Name("__all__")]):
            return True
        case ast.ImportFrom(level=int(level)):
            return level > 0
    return False
