"""Measured costs of the Muon update on one device, in a JSON file that concurrent writers share safely."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeAlias

from dmuon.kernels import Variant
from dmuon.platform.files import UnreadableFile, check_target, parse_json, read_json, write_bytes
from dmuon.platform.locks import hold_lock
from dmuon.platform.options import is_integer
from dmuon.solver import CostTable, Shape

SCHEMA = 2

_REMEDY = "delete the file or measure anew with dmuon-profile"
_LOCK_SECONDS = 10.0  # a writer takes milliseconds
_MAX_SIDE = 1 << 24
_MAX_BATCH = 1 << 20
_MAX_NS = 3600 * 10**9  # an hour for one batch is no measurement
_MAX_SAMPLES = 10**9
_MAX_OPS_PER_NS = 10**9  # no device does an exaFLOP in a second
_PASSES = 100  # multiply-adds per element that reading and writing it a dozen times is worth
_MAX_CONTRADICTION = 1000  # launch times, caches and odd sizes stay below; milliseconds for nanoseconds do not


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
        compilers: names and versions of what makes kernels for a GPU; no part of files of earlier versions.
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
    compilers: str = ""

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
    """Distribution of the time of one batch over ``n`` samples, in whole nanoseconds.

    Attributes:
        variant: how Newton–Schulz ran, the fastest that was tried; empty where nothing else was tried than the rule.
        unfinished: time was up before all was tried that might be faster; no part of files of earlier versions.
    """

    median_ns: int
    p10_ns: int
    p90_ns: int
    n: int
    variant: str = ""
    unfinished: bool = False


Entries: TypeAlias = Mapping[Shape, Mapping[int, Timing]]  # shape → matrices per batch → timing


@dataclass(frozen=True, slots=True)
class CostCache:
    """Timings per shape and batch size, and the key that they are valid for."""

    key: CacheKey
    entries: Entries

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CostCache:
        """Read and validate a file.

        Raises:
            CostCacheError: missing, unreadable, or invalid; names file, field and remedy.
        """
        path = Path(path)
        try:
            return _document(read_json(path))
        except UnreadableFile as error:
            raise CostCacheError(
                f"cost cache {path}: {error}; write it with dmuon-profile --out {path}, or check the path"
            ) from error
        except ValueError as error:
            raise CostCacheError(f"cost cache {path}: {error}; {_REMEDY}") from None

    @classmethod
    def parse(cls, data: bytes, name: str) -> CostCache:
        """Validate the bytes of a file called ``name``; raises as :meth:`load` does."""
        try:
            return _document(parse_json(data))
        except ValueError as error:
            raise CostCacheError(f"cost cache {name}: {error}; {_REMEDY}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Merge into the file at ``path``, atomically; entries here win over those in the file.

        Raises:
            CostCacheError: the file there is invalid, holds another key or contradicts these entries; it is left as
                it is.
            OSError: the folder cannot be written, or another process holds the lock beside the file.
        """
        path = Path(path)
        with _locked(path):
            merged = CostCache.load(path).merge(self, f"cost cache {path}") if path.exists() else self
            data = merged.to_json().encode()
            CostCache.parse(data, str(path))  # what could not be read must not be written
            write_bytes(path, data)

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
        """Both, entries of ``other`` winning.

        Raises:
            CostCacheError: the keys differ.
        """
        differences = self.key.differences(other.key)
        if differences:
            field, (value, other_value) = next(iter(differences.items()))
            raise CostCacheError(
                f"{name}: key field {field!r} is {value!r}, not {other_value!r}; write to another file"
            )
        return CostCache(self.key, merge_entries(self.entries, other.entries))

    def matches(self, key: CacheKey) -> Literal["exact", "compatible", "no"]:
        """Whether the costs hold for ``key``: ``"compatible"`` has other versions, to be warned about."""
        if self.key == key:
            return "exact"
        return "compatible" if self.key.strict == key.strict else "no"

    def entries_for(self, key: CacheKey) -> Entries:
        """The timings; with other compilers than ``key``'s, without naming kernels that were tried with these only.

        The times stay, as near ones. These are the kernels of quack, which changes fast.
        """
        if self.key.compilers == key.compilers:
            return self.entries
        return {
            shape: {k: replace(t, variant="") if " quack " in t.variant else t for k, t in batches.items()}
            for shape, batches in self.entries.items()
        }

    def table(self, shapes: Iterable[Shape]) -> CostTable:
        """The planner's costs for ``shapes``.

        Raises:
            CostCacheError: a shape without a timing of one matrix.
        """
        wanted = sorted(set(shapes))
        for m, n in wanted:
            if 1 not in self.entries.get((m, n), {}):
                raise CostCacheError(
                    f"cost cache: no timing for one {m}x{n} matrix; run dmuon-profile --shapes {m}x{n}"
                )
        return CostTable({shape: {k: t.median_ns for k, t in self.entries[shape].items()} for shape in wanted})


def parse_shape(text: str) -> Shape:
    """The two sides that ``text`` names, such as ``"1024x4096"``, in its order.

    Raises:
        ValueError: ``text`` is something else.
    """
    match = re.fullmatch(r"([1-9][0-9]{0,8})x([1-9][0-9]{0,8})", text)
    if match is None:
        raise ValueError(f"shape {text!r} is not like '1024x4096'")
    return int(match[1]), int(match[2])


def merge_entries(base: Entries, over: Entries) -> dict[Shape, dict[int, Timing]]:
    """Both, those of ``over`` winning."""
    shapes = sorted(base.keys() | over.keys())
    return {shape: dict(sorted({**base.get(shape, {}), **over.get(shape, {})}.items())) for shape in shapes}


def user_cache_directory() -> Path:
    """``dmuon`` in the user's cache folder (XDG base directories)."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "dmuon"


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


def shipped_profiles() -> Iterator[tuple[str, bytes]]:
    """Name and bytes of every profile that dmuon ships."""
    for item in sorted(resources.files("dmuon.profiles").iterdir(), key=lambda item: item.name):
        if item.name.endswith(".json"):
            yield f"dmuon.profiles/{item.name}", item.read_bytes()


def discard_invalid(path: Path) -> None:
    """Remove the file at ``path`` if it is no valid cost cache, so that a new one can be written there.

    Raises:
        OSError: it is no file, or cannot be removed.
    """
    with _locked(path):
        try:
            CostCache.load(path)
        except CostCacheError:
            check_target(path).unlink(missing_ok=True)


def _digest(key: CacheKey) -> str:
    return hashlib.sha256(json.dumps(asdict(key), sort_keys=True).encode()).hexdigest()[:12]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock beside the file that ``path`` leads to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    target = check_target(path)
    with hold_lock(target.with_name(f".{target.name}.lock"), _LOCK_SECONDS):
        yield


def _document(document: object) -> CostCache:
    """The cache that ``document`` holds; ValueError names the field that is wrong."""
    top = _object(document, "the file", ("schema", "key", "entries"))
    if top["schema"] != SCHEMA or isinstance(top["schema"], bool):
        raise ValueError(f"field 'schema' is {top['schema']!r}, this version reads {SCHEMA}")
    raw = {"compilers": "", **top["key"]} if isinstance(top["key"], dict) else top["key"]
    key = _object(raw, "field 'key'", tuple(f.name for f in fields(CacheKey)))
    for name, value in key.items():
        if name in ("sm_count", "steps"):
            _integer(value, f"field 'key.{name}'", 0 if name == "sm_count" else 1, 10**6)
        elif not isinstance(value, str):
            raise ValueError(f"field 'key.{name}' is {value!r}, not a string")
    if not isinstance(top["entries"], dict):
        raise ValueError("field 'entries' is no object")
    entries = {_shape(name): _batches(name, value) for name, value in top["entries"].items()}
    _refuse_absurd(entries)
    return CostCache(CacheKey(**key), entries)


def _refuse_absurd(entries: Entries) -> None:
    """Refuse times that no device could have, most likely for a mistaken unit.

    Time grows with work, and no faster than work: a batch that takes far less time than a smaller one, or far more
    per operation, contradicts it.
    """
    times = sorted(
        (k * m * n * (m + _PASSES), t.median_ns, f"entries.{m}x{n}.{k}.median_ns", k * m * m * n)
        for (m, n), batches in entries.items()
        for k, t in batches.items()
    )
    if not times:
        return
    longest = densest = times[0]  # so far: of most time, of least time per work
    for item in times:
        work, ns, name, operations = item
        if operations > _MAX_OPS_PER_NS * ns:
            raise ValueError(f"field {name!r} is absurd: {ns} ns for {operations} multiply-adds and more")
        for other in (longest, densest):
            faster = ns * _MAX_CONTRADICTION < other[1]
            if faster or ns * other[0] > _MAX_CONTRADICTION * other[1] * work:
                raise ValueError(
                    f"field {name!r} or {other[2]!r} is absurd: {ns} ns and {other[1]} ns, for {work / other[0]:.3g} "
                    "times the work; times are in nanoseconds"
                )
        longest = max(longest, item, key=lambda other: other[1])
        densest = min(densest, item, key=lambda other: other[1] / other[0])


def _shape(text: str) -> Shape:
    try:
        small, large = parse_shape(text)
    except ValueError as error:
        raise ValueError(f"field 'entries': {error}") from None
    if not small <= large <= _MAX_SIDE:
        raise ValueError(f"field 'entries': shape {text!r} must be small side x large side, at most {_MAX_SIDE}")
    return small, large


def _batches(shape: str, value: object) -> dict[int, Timing]:
    if not isinstance(value, dict) or not value:
        raise ValueError(f"field 'entries.{shape}' is no object of batch sizes")
    return {_batch_size(shape, text): _timing(f"entries.{shape}.{text}", timing) for text, timing in value.items()}


def _batch_size(shape: str, text: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,6}", text) or int(text) > _MAX_BATCH:
        raise ValueError(f"field 'entries.{shape}': batch size {text!r} is no integer from 1 to {_MAX_BATCH}")
    return int(text)


def _timing(name: str, value: object) -> Timing:
    given = {"unfinished": False, **value} if isinstance(value, dict) else value
    raw = _object(given, f"field {name!r}", tuple(f.name for f in fields(Timing)))
    variant, unfinished = raw.pop("variant"), raw.pop("unfinished")
    if not isinstance(unfinished, bool):
        raise ValueError(f"field '{name}.unfinished' is {unfinished!r}, not true or false")
    if not isinstance(variant, str):
        raise ValueError(f"field '{name}.variant' is {variant!r}, not a string")
    if variant:
        try:
            Variant.parse(variant)
        except ValueError as error:
            raise ValueError(f"field '{name}.variant': {error}") from None
    for field, number in raw.items():
        _integer(number, f"field '{name}.{field}'", 1, _MAX_SAMPLES if field == "n" else _MAX_NS)
    timing = Timing(**raw, variant=variant, unfinished=unfinished)
    if not timing.p10_ns <= timing.median_ns <= timing.p90_ns:
        raise ValueError(
            f"field {name!r}: p10 {timing.p10_ns}, median {timing.median_ns}, p90 {timing.p90_ns} not in order"
        )
    return timing


def _object(value: object, name: str, names: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is no object")
    for field in names:
        if field not in value:
            raise ValueError(f"{name}: field {field!r} is missing")
    for field in value:
        if field not in names:
            raise ValueError(f"{name}: field {field!r} is unknown")
    return value


def _integer(value: object, name: str, least: int, most: int) -> None:
    if not is_integer(value, least, most):
        raise ValueError(f"{name} is {value!r}, not an integer from {least} to {most}")
