"""Measured costs of the Muon update on one device: a JSON file that is always found whole, and what they depend on."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import platform
import re
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from importlib import metadata, resources
from pathlib import Path
from typing import Any, TypeAlias

import torch

from dmuon.kernels import (
    Polynomial,
    check_storage,
    coefficient_sequence,
    newton_schulz_flops,
    storage_dtype,
    user_cache_directory,
)
from dmuon.platform.files import UnreadableFile, read_json, write_bytes
from dmuon.solver import Shape

SCHEMA = 3
_COUNT = "[1-9][0-9]{0,8}"
_SHAPE = f"{_COUNT}x{_COUNT}"


class CostCacheError(ValueError):
    """A cost cache that cannot be used; the message names file, field and remedy."""


@dataclass(frozen=True, slots=True)
class CacheKey:
    """What a measurement is valid for.

    Attributes:
        device: device name; on the CPU its model and instruction set.
        sm_count: streaming multiprocessors, 0 on the CPU.
        driver, torch, cuda, compilers: versions, empty where there is none; costs carry over to others, with a warning.
        dtype: storage dtype of Newton–Schulz.
        kernels: digest of what the kernels compute; comments, docstrings and file names do not change it.
        coefficients, steps: the Newton–Schulz run.
        compilers: names and versions of what makes kernels for a GPU.
        threads: of the CPU that compute together; 1 on a GPU.
    """

    device: str
    sm_count: int
    driver: str
    torch: str
    cuda: str
    dtype: str
    kernels: str
    coefficients: str
    steps: int
    compilers: str
    threads: int

    def __post_init__(self) -> None:
        for name, least in (("sm_count", 0), ("steps", 1), ("threads", 1)):
            if (value := getattr(self, name)) < least:
                raise ValueError(f"{name} is {value}, less than {least}")

    @property
    def strict(self) -> CacheKey:
        """The key without the versions that costs carry over between."""
        return replace(self, driver="", torch="", cuda="", compilers="")

    def differences(self, other: CacheKey) -> dict[str, tuple[object, object]]:
        """Field name to both values, where they differ."""
        left, right = asdict(self), asdict(other)
        return {name: (left[name], right[name]) for name in left if left[name] != right[name]}


@dataclass(frozen=True, slots=True)
class Timing:
    """Distribution of the time of one batch over ``n`` samples, in whole nanoseconds."""

    median_ns: int
    p10_ns: int
    p90_ns: int
    n: int

    def __post_init__(self) -> None:
        low, middle, high = self.p10_ns, self.median_ns, self.p90_ns
        if min(low, middle, high, self.n) < 1:
            raise ValueError(f"median_ns {middle}, p10_ns {low}, p90_ns {high} and n {self.n} must be at least 1")
        if not low <= middle <= high:
            raise ValueError(f"p10 {low}, median {middle}, p90 {high} not in order")


Entries: TypeAlias = Mapping[Shape, Mapping[int, Timing]]  # shape → matrices per batch → timing


@dataclass(frozen=True, slots=True)
class CostCache:
    """Timings per shape and batch size, and the key that they are valid for."""

    key: CacheKey
    entries: Entries

    def __post_init__(self) -> None:
        for small, large in self.entries:
            if small > large:
                raise ValueError(f"entries: shape '{small}x{large}' must be small side x large side")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CostCache:
        """Read and validate a file.

        Raises:
            CostCacheError: missing, unreadable, or invalid; names file, field and remedy.
        """
        path = Path(path)
        try:
            document = read_json(path)
            if not isinstance(document, dict):
                raise ValueError("the file is no object")
            schema = document.pop("schema", None)
            if schema != SCHEMA:
                raise ValueError(f"field 'schema' is {schema!r}, this version reads {SCHEMA}")
            return _read(document)
        except UnreadableFile as error:
            raise CostCacheError(
                f"cost cache {path}: {error}; write it with dmuon-profile --out {path}, or check the path"
            ) from error
        except ValueError as error:
            raise CostCacheError(
                f"cost cache {path}: {error}; delete the file or measure anew with dmuon-profile"
            ) from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Merge into the file at ``path``, atomically; entries here win over those in the file.

        Of two processes that save at the same time, one may lose what it measured, which is measured again then.

        Raises:
            CostCacheError: the file there is invalid, or holds another key; it is left as it is.
            OSError: the folder cannot be written.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        merged = CostCache.load(path).merge(self, f"cost cache {path}") if path.exists() else self
        write_bytes(path, merged.to_json().encode())

    def to_json(self) -> str:
        """The document, as :meth:`load` reads it."""
        document = {
            "schema": SCHEMA,
            "key": asdict(self.key),
            "entries": {
                f"{shape[0]}x{shape[1]}": {str(k): asdict(timing) for k, timing in sorted(batches.items())}
                for shape, batches in sorted(self.entries.items())
            },
        }
        return json.dumps(document, indent=1) + "\n"

    def merge(self, other: CostCache, name: str = "cost cache") -> CostCache:
        """Both, entries of ``other`` winning."""
        differences = self.key.differences(other.key)
        if differences:
            field, (value, other_value) = next(iter(differences.items()))
            raise CostCacheError(
                f"{name}: key field {field!r} is {value!r}, not {other_value!r}; write to another file"
            )
        return CostCache(self.key, merge_entries(self.entries, other.entries))

    def entries_for(self, key: CacheKey, name: str) -> Entries:
        """The timings, if they hold for ``key``; with a warning where other versions measured them.

        Raises:
            CostCacheError: they are another device's, or of another run or code of Newton–Schulz.
        """
        differences, strictly = self.key.differences(key), self.key.strict.differences(key.strict)
        if strictly:
            field, (recorded, own) = next(iter(strictly.items()))
            setting = f"OMP_NUM_THREADS={own} " if field == "threads" else ""
            raise CostCacheError(
                f"{name}: key field {field!r} is {recorded!r}, this run's is {own!r}; "
                f"measure on this device with {setting}dmuon-profile"
            )
        if differences:
            changes = ", ".join(f"{field} {old} → {new}" for field, (old, new) in differences.items())
            warnings.warn(f"{name} was measured with other versions ({changes}); run dmuon-profile to renew it")
        return self.entries


def _read(document: dict[str, Any]) -> CostCache:
    """What a file holds beside its schema.

    Raises:
        ValueError: names the field that is missing, unknown, ill-typed, or refused by its dataclass.
    """
    for name in ("key", "entries"):
        if name not in document:
            raise ValueError(f"field {name!r} is missing")
    for name in document.keys() - {"key", "entries"}:
        raise ValueError(f"field {name!r} is unknown")
    entries: dict[Shape, dict[int, Timing]] = {}
    for shape, batches in _object(document["entries"], "entries").items():
        name = f"entries.{shape}"
        if not re.fullmatch(_SHAPE, shape):
            raise ValueError(f"field 'entries': {shape!r} is not like '1024x4096'")
        of_shape = entries.setdefault(parse_shape(shape), {})
        for size, timing in _object(batches, name).items():
            if not re.fullmatch(_COUNT, size):
                raise ValueError(f"field {name!r}: {size!r} is not like a positive integer")
            of_shape[int(size)] = _flat(Timing, timing, f"{name}.{size}")
    return CostCache(_flat(CacheKey, document["key"], "key"), entries)


def _flat(kind: type[Any], data: object, name: str) -> Any:
    """A dataclass of strings and integers."""
    given = _object(data, name)
    for field in fields(kind):
        if field.name not in given:
            raise ValueError(f"field {name!r}: field {field.name!r} is missing")
        value, is_text = given[field.name], field.type == "str"
        if type(value) is not (str if is_text else int):
            noun = "a string" if is_text else "an integer"
            raise ValueError(f"field '{name}.{field.name}' is {value!r}, not {noun}")
    for unknown in given.keys() - {field.name for field in fields(kind)}:
        raise ValueError(f"field {name!r}: field {unknown!r} is unknown")
    try:
        return kind(**given)
    except ValueError as error:
        raise ValueError(f"field {name!r}: {error}") from None


def _object(data: object, name: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ValueError(f"field {name!r} is no object")
    return data


def parse_shape(text: str) -> Shape:
    """The two sides that ``text`` names, such as ``"1024x4096"``, in its order."""
    if not re.fullmatch(_SHAPE, text):
        raise ValueError(f"shape {text!r} is not like '1024x4096'")
    first, second = map(int, text.split("x"))
    return first, second


def merge_entries(base: Entries, newer: Entries) -> dict[Shape, dict[int, Timing]]:
    """Both, those of ``newer`` winning."""
    shapes = sorted(base.keys() | newer.keys())
    return {shape: dict(sorted({**base.get(shape, {}), **newer.get(shape, {})}.items())) for shape in shapes}


def user_cache_path(key: CacheKey) -> Path:
    """The user's file for ``key``; files of compatible keys share the name up to the last dash."""
    device = re.sub(r"[^a-z0-9]+", "-", key.device.lower()).strip("-")[:40]
    return user_cache_directory() / f"{device}-{_digest(key.strict)}-{_digest(key)}.json"


def user_cache_files(key: CacheKey) -> list[Path]:
    """The user's files whose keys may hold for ``key``, the exact one last."""
    path = user_cache_path(key)
    try:
        others = sorted(path.parent.glob(f"{path.name.rpartition('-')[0]}-*.json")) if path.parent.is_dir() else []
    except OSError:  # not ours to read
        others = []
    return sorted(others, key=lambda other: other == path)


def shipped_profiles() -> list[Path]:
    """Every profile that dmuon ships."""
    items = resources.files("dmuon.profiles").iterdir()
    return [Path(str(item)) for item in sorted(items, key=lambda item: item.name) if item.name.endswith(".json")]


def _digest(key: CacheKey) -> str:
    return hashlib.sha256(json.dumps(asdict(key), sort_keys=True).encode()).hexdigest()[:12]


# -- what costs depend on: device, versions, dtype and the code that computes ----------------------------------------

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
