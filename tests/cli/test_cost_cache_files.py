"""Cost cache files: what is refused, and that writers never harm others."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dmuon.planning.cost_cache import CostCache, CostCacheError

ROOT = Path(__file__).resolve().parents[2]
KEY = {
    "device": "Device X", "sm_count": 132, "driver": "550.1", "torch": "2.13.0", "cuda": "12.8", "dtype": "float16",
    "kernels": "abc123", "coefficients": "polar_express", "steps": 5, "compilers": "triton 3.6.0", "threads": 1,
}  # fmt: skip
T = "entries/64x256/1"


def timing(ns: int, low: int | None = None, high: int | None = None, n: int = 9) -> dict[str, Any]:
    ordered = {"median_ns": ns, "p10_ns": low or ns, "p90_ns": high or ns}
    return {**ordered, "n": n}


ENTRIES = {
    "512x512": {"1": timing(900, 800, 950, 7)},
    "64x256": {"1": timing(100, 99, 103, 9), "2": timing(150, 150, 151)},
}


def document(entries: object = ENTRIES, **key: object) -> dict[str, Any]:
    return {"schema": 3, "key": KEY | key, "entries": entries}


def write(path: Path, content: object) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


@pytest.fixture
def merged(tmp_path: Path) -> Callable[..., Any]:
    """Why a file with this content is refused, and what saving its cache elsewhere leaves there."""

    def merge(content: object, into: str = "out.json") -> tuple[str, Any]:
        out = tmp_path / into
        try:
            CostCache.load(write(tmp_path / "given.json", content)).save(out)
        except CostCacheError as error:
            return str(error), None
        return "", json.loads(out.read_bytes())

    return merge


@st.composite
def entries(draw: st.DrawFn) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for m, n in draw(st.sets(st.tuples(*[st.integers(1, 1 << 13)] * 2), max_size=4)):
        for k in draw(st.sets(st.integers(1, 64), min_size=1, max_size=3)):
            low, middle, high = sorted(draw(st.lists(st.integers(1, 10**12), min_size=3, max_size=3)))
            named = timing(middle, low, high, draw(st.integers(1, 10**9)))
            found.setdefault(f"{min(m, n)}x{max(m, n)}", {})[str(k)] = named
    return found


texts = [name for name, value in KEY.items() if isinstance(value, str)]
in_one_folder = settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


@in_one_folder
@given(entries(), st.fixed_dictionaries({name: st.text() for name in texts}), st.integers(1, 20))
def test_what_is_read_is_written(
    merged: Callable[..., Any], tmp_path: Path, some: dict[str, Any], key: dict[str, str], steps: int
) -> None:
    (tmp_path / "out.json").unlink(missing_ok=True)
    given = document(some, **key, steps=steps)
    _, found = merged(given)
    assert found == given


@pytest.mark.pitfall("P50")
@in_one_folder
@given(st.data())
def test_corrupted_bytes_are_refused_by_name_or_still_valid(
    merged: Callable[..., Any], tmp_path: Path, data: st.DataObject
) -> None:
    good = bytearray(json.dumps(document()).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del good[data.draw(st.integers(0, len(good))) :]
    for name in ("out.json", "again.json"):  # of an earlier draw, whose key may be another one
        (tmp_path / name).unlink(missing_ok=True)
    refused, found = merged(bytes(good))
    if found is None:
        assert "given.json" in refused and "dmuon-profile" in refused
    else:  # a digit or a letter changed into another: still a consistent cache
        _, same = merged(found, into="again.json")
        assert same == found


def broken(path: str, value: object) -> bytes:
    changed = json.loads(json.dumps(document()))
    *parents, last = path.split("/")
    node = changed
    for parent in parents:
        node = node[parent]
    if value is ...:
        del node[last]
    else:
        node[last] = value
    return json.dumps(changed).encode()


@pytest.mark.pitfall("P50")
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (broken("schema", 99), "field 'schema' is 99, this version reads 3"),
        (broken("extra", 1), "field 'extra' is unknown"),
        (broken("key/device", ...), "field 'key': field 'device' is missing"),
        (broken("entries/256x64", {}), "shape '256x64' must be small side x large side"),
        (broken(f"{T}/median_ns", -100), "field 'entries.64x256.1': median_ns -100"),
        (broken(f"{T}/median_ns", float("nan")), "median_ns' is nan, not an integer"),
        (broken(f"{T}/median_ns", 98), "p10 99, median 98, p90 103 not in order"),
        (b"[" * 100_000, "corrupt or truncated JSON"),
    ],
)
def test_an_invalid_file_is_refused_naming_file_field_and_remedy(
    merged: Callable[..., Any], tmp_path: Path, data: bytes, message: str
) -> None:
    refused, found = merged(data)
    assert found is None and message in refused
    assert str(tmp_path / "given.json") in refused and "dmuon-profile" in refused


@pytest.mark.pitfall("P50")
def test_writing_over_anything_else_is_refused_and_leaves_it(merged: Callable[..., Any], tmp_path: Path) -> None:
    for content in (b"precious", json.dumps(document(device="Device Y")).encode()):
        path = write(tmp_path / "out.json", content)
        refused, found = merged(document())
        assert found is None and "out.json" in refused and path.read_bytes() == content


def merge_many(folder: Path, writer: int, rounds: int) -> None:
    for i in range(rounds):
        given = write(folder / f"{writer}.json", document({f"{writer + 1}x{64 + i}": {"1": timing(i + 1)}}))
        CostCache.load(given).save(folder / "costs" / "all.json")


@pytest.mark.pitfall("P50")
def test_concurrent_writers_and_readers_never_see_half_a_file(tmp_path: Path) -> None:
    writers, rounds, folder = 3, 12, tmp_path / "costs"
    folder.mkdir()
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=merge_many, args=(tmp_path, w, rounds)) for w in range(writers)]
    for process in processes:
        process.start()
    reads = 0
    while any(process.is_alive() for process in processes):
        if (folder / "all.json").exists():
            json.loads((folder / "all.json").read_bytes())
            reads += 1
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert reads > 0 and [p.name for p in folder.iterdir()] == ["all.json"]
    written = {f"{w + 1}x{64 + i}" for w in range(writers) for i in range(rounds)}
    assert set() < set(json.loads((folder / "all.json").read_bytes())["entries"]) <= written


@pytest.mark.parametrize("path", sorted((ROOT / "profiles").glob("*.json")), ids=lambda path: path.name)
def test_shipped_profiles_are_valid(path: Path) -> None:
    assert CostCache.load(path).entries
