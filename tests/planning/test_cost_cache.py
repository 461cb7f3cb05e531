"""The cost cache file: what it accepts, what it refuses, and that writers never harm each other."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmuon.planning.cost_cache import (
    CacheKey,
    CostCache,
    CostCacheError,
    Timing,
    discard_invalid,
    shipped_profiles,
    user_cache_directory,
    user_cache_files,
    user_cache_path,
)
from dmuon.planning.cost_lookup import cached_entries, store

KEY = CacheKey("Device X", 132, "550.1", "2.13.0", "12.8", "float16", "abc123", "polar_express", 5)


def steady(ns):
    return Timing(ns, ns, ns, 9)


CACHE = CostCache(
    KEY,
    {
        (64, 256): {1: Timing(100, 99, 103, 9, "gram r2 torch by4"), 2: Timing(150, 150, 151, 9)},
        (512, 512): {1: Timing(900, 800, 950, 7)},
    },
)


@st.composite
def plausible_entries(draw):
    """Timings of some device: launch time plus operations at one rate, with noise."""
    launch, per_operation = draw(st.integers(1, 10**6)), 10.0 ** draw(st.integers(-6, -2))
    noise = st.integers(-20, 20).map(lambda i: 1.05**i)
    sides = st.tuples(*[st.integers(1, 1 << 13)] * 2).map(lambda s: (min(s), max(s)))
    result = {}
    for m, n in draw(st.sets(sides, max_size=4)):
        for k in draw(st.sets(st.integers(1, 64), min_size=1, max_size=3)):
            middle = int((launch + per_operation * k * m * m * n) * draw(noise)) + 1
            low, high = draw(st.integers(1, middle)), draw(st.integers(middle, 2 * middle))
            result.setdefault((m, n), {})[k] = Timing(middle, low, high, draw(st.integers(1, 10**9)))
    return result


keys = st.builds(
    CacheKey,
    **{
        name: st.text()
        for name in ("device", "driver", "torch", "cuda", "dtype", "kernels", "coefficients", "compilers")
    },
    sm_count=st.integers(0, 1000),
    steps=st.integers(1, 20),
)
small_timings = st.integers(1, 5).map(steady)
same_key = st.builds(
    CostCache,
    st.just(KEY),
    st.dictionaries(
        st.sampled_from([(1, 1), (1, 2), (2, 2)]),
        st.dictionaries(st.integers(1, 3), small_timings, min_size=1),
    ),
)


@settings(deadline=None, max_examples=30)
@given(st.builds(CostCache, keys, plausible_entries()))
def test_what_is_written_is_read(cache):
    assert CostCache.parse(cache.to_json().encode(), "x") == cache


@settings(deadline=None, max_examples=30)
@given(same_key, same_key, same_key)
def test_merging_is_associative_and_idempotent_and_the_later_wins(a, b, c):
    assert a.merge(b).merge(c) == a.merge(b.merge(c))
    assert a.merge(a) == a
    merged = a.merge(b)
    assert merged.merge(b) == merged
    pairs = {(shape, k): t for cache in (a, b) for shape, batches in cache.entries.items() for k, t in batches.items()}
    assert {(shape, k): t for shape, batches in merged.entries.items() for k, t in batches.items()} == pairs
    assert CostCache.parse(merged.to_json().encode(), "x") == merged


def assert_refused_by_name_or_still_valid(data):
    try:
        cache = CostCache.parse(data, "the/file")
    except CostCacheError as error:
        assert "the/file" in str(error) and "dmuon-profile" in str(error)
    else:  # a digit or a letter changed into another: still a consistent cache
        assert CostCache.parse(cache.to_json().encode(), "x") == cache


@pytest.mark.pitfall("P50")
@settings(max_examples=50, deadline=None)
@given(st.data())
def test_corrupted_bytes_are_refused_by_name_or_still_valid(data):
    good = bytearray(CACHE.to_json().encode())
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del good[data.draw(st.integers(0, len(good))) :]
    assert_refused_by_name_or_still_valid(bytes(good))


def found(document, path):
    """The object that holds the last field of ``path``, and that field's name."""
    for parent in path[:-1]:
        document = document[parent]
    return document, path[-1]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)


def broken(path: str, value: object) -> bytes:
    document = json.loads(CACHE.to_json())
    node, last = found(document, path.split("/"))
    if value is ...:
        del node[last]
    else:
        node[last] = value
    return json.dumps(document).encode()


T = "entries/64x256/1"


@pytest.mark.pitfall("P50")
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (broken(f"{T}/variant", "fast"), r"field 'entries.64x256.1': 'fast' is no .* variant"),
        (broken("schema", 99), r"field 'schema' is 99, this version reads 2"),
        (broken("schema", ...), r"field 'schema' is None"),
        (broken("extra", 1), r"field 'extra' is unknown"),
        (broken("key/device", ...), r"field 'key': field 'device' is missing"),
        (broken("key/sm_count", -1), r"field 'key': sm_count is -1"),
        (broken("entries/64x256", []), r"field 'entries.64x256' is no object"),
        (broken("entries/256x64", {}), r"shape '256x64' must be small side x large side"),
        (broken("entries/0x64", {}), r"field 'entries': '0x64' is not like '1024x4096'"),
        (broken("entries/64x256/0", {}), r"field 'entries.64x256': '0' is not like a positive integer"),
        (broken(T, 5), r"field 'entries.64x256.1' is no object"),
        (broken(f"{T}/median_ns", -100), r"field 'entries.64x256.1': median_ns -100"),
        (broken(f"{T}/median_ns", 0), r"median_ns 0, .* must be at least 1"),
        (broken(f"{T}/median_ns", float("nan")), r"median_ns' is nan, not an integer"),
        (broken(f"{T}/median_ns", 98), r"p10 99, median 98, p90 103 not in order"),
        (b'{"schema": 1, "schema": 1}', r"field 'schema' appears twice"),
        (b"[" * 100_000, r"corrupt or truncated JSON"),
    ],
)
def test_an_invalid_file_is_refused_naming_file_field_and_remedy(tmp_path, data, message):
    path = tmp_path / "costs.json"
    path.write_bytes(data)
    with pytest.raises(CostCacheError, match=message) as caught:
        CostCache.load(path)
    assert str(path) in str(caught.value) and "dmuon-profile" in str(caught.value)


def test_saving_merges_and_the_newer_entry_wins(tmp_path):
    path = tmp_path / "deep" / "costs.json"
    CACHE.save(path)
    newer = CostCache(KEY, {(64, 256): {2: steady(140), 4: steady(200)}})
    newer.save(path)
    merged = CostCache.load(path)
    assert merged == CACHE.merge(newer)
    assert {k: t.median_ns for k, t in merged.entries[64, 256].items()} == {1: 100, 2: 140, 4: 200}
    assert (512, 512) in merged.entries
    assert sorted(p.name for p in path.parent.iterdir()) == ["costs.json"]


@pytest.mark.pitfall("P50")
def test_saving_over_anything_else_is_refused_and_leaves_it(tmp_path):
    path = tmp_path / "costs.json"
    for content in (b"precious", replace(CACHE, key=replace(KEY, device="Device Y")).to_json().encode()):
        path.write_bytes(content)
        with pytest.raises(CostCacheError, match=r"costs.json"):
            CACHE.save(path)
        assert path.read_bytes() == content


def write_many(path: str, writer: int, rounds: int) -> None:
    for i in range(rounds):
        ns = writer * 1000 + i + 1
        CostCache(KEY, {(writer + 1, 64 + i): {1: steady(ns)}}).save(path)


@pytest.mark.pitfall("P50")
def test_concurrent_writers_and_readers_never_see_half_a_file(tmp_path):
    path, writers, rounds = tmp_path / "costs.json", 3, 12
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=write_many, args=(str(path), w, rounds)) for w in range(writers)]
    for process in processes:
        process.start()
    reads = 0
    while any(process.is_alive() for process in processes):
        if path.exists():
            CostCache.load(path)
            reads += 1
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert reads > 0 and [p.name for p in tmp_path.iterdir()] == ["costs.json"]
    written = {(w + 1, 64 + i) for w in range(writers) for i in range(rounds)}
    assert set() < set(CostCache.load(path).entries) <= written


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "exact"),
        ({"driver": "560"}, "compatible"),
        ({"torch": "2.14", "cuda": "13.0"}, "compatible"),
        ({"compilers": "triton 3.9.0"}, "compatible"),
        ({"device": "Device Y"}, "no"),
        ({"sm_count": 114}, "no"),
        ({"dtype": "bfloat16"}, "no"),
        ({"kernels": "other"}, "no"),
        ({"steps": 6}, "no"),
        ({"coefficients": "you", "driver": "560"}, "no"),
    ],
)
@pytest.mark.pitfall("P50")
def test_matching(changes, expected):
    other = replace(KEY, **changes)
    assert CACHE.matches(other) == expected
    same_folder = user_cache_path(other).name.rpartition("-")[0] == user_cache_path(KEY).name.rpartition("-")[0]
    assert same_folder == (expected != "no")
    assert (user_cache_path(other) == user_cache_path(KEY)) == (expected == "exact")


QUACK, TRITON = "gram r2 quack by4", "gram r2 triton by4"


def test_quack_is_not_named_where_another_one_is_installed():
    """Its products were tried with the first one; the time stays, and so does what other compilers make as well."""
    key = replace(KEY, compilers="triton 3.6.0")
    timings = {k: Timing(100 * k, 99, 900, 9, name) for k, name in enumerate((QUACK, "gram quack by4", TRITON, ""), 1)}
    cache = CostCache(key, {(64, 256): timings})
    assert cache.entries_for(key) == cache.entries_for(replace(key, driver="560", torch="2.14")) == cache.entries
    for other in (KEY, replace(key, compilers="triton 3.6.0, quack-kernels 0.6.5")):
        found = cache.entries_for(other)[64, 256]
        assert {k: t.variant for k, t in found.items()} == {1: "", 2: "", 3: TRITON, 4: ""}
        assert [replace(t, variant="") for t in found.values()] == [replace(t, variant="") for t in timings.values()]


def test_a_file_of_a_version_without_compilers_is_read_as_one_without_any():
    document = json.loads(CACHE.to_json())
    assert document["key"].pop("compilers") == ""
    assert CostCache.parse(json.dumps(document).encode(), "x") == CACHE
    document["key"]["compilers"] = 3
    with pytest.raises(CostCacheError, match=r"x: field 'key\.compilers' is 3, not a string"):
        CostCache.parse(json.dumps(document).encode(), "x")


@pytest.mark.pitfall("P93")
def test_whether_a_search_was_cut_short_is_kept_and_was_not_said_by_earlier_versions():
    cache = CostCache(KEY, {(64, 256): {1: Timing(100, 99, 103, 9, "gram r2 torch by4", unfinished=True)}})
    document = json.loads(cache.to_json())
    entry = document["entries"]["64x256"]["1"]
    assert CostCache.parse(cache.to_json().encode(), "x") == cache
    entry["unfinished"] = 1
    with pytest.raises(CostCacheError, match=r"field 'entries\.64x256\.1\.unfinished' is 1, not true or false"):
        CostCache.parse(json.dumps(document).encode(), "x")
    del entry["unfinished"]
    assert not CostCache.parse(json.dumps(document).encode(), "x").entries[64, 256][1].unfinished


def test_the_users_files_of_a_key_are_those_of_other_versions_and_last_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache_files(KEY) == []
    others = [replace(KEY, torch=f"2.{i}") for i in range(3)]
    for key in (KEY, *others, replace(KEY, device="Device Y")):
        CostCache(key, {}).save(user_cache_path(key))
    assert user_cache_files(KEY) == [*sorted(map(user_cache_path, others)), user_cache_path(KEY)]


def test_the_user_cache_follows_the_xdg_convention(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache_directory() == tmp_path / "dmuon"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert user_cache_directory() == tmp_path / "home" / ".cache" / "dmuon"


def test_discard_invalid_removes_only_what_is_invalid(tmp_path):
    path = tmp_path / "costs.json"
    discard_invalid(path)
    CACHE.save(path)
    discard_invalid(path)
    assert CostCache.load(path) == CACHE
    path.write_text("{")
    discard_invalid(path)
    assert not path.exists()


def test_shipped_profiles_are_valid():
    for name, data in shipped_profiles():
        assert CostCache.parse(data, name).entries


@pytest.mark.pitfall("P71", "P72")
@pytest.mark.timeout(60)
def test_a_pipe_in_the_users_cache_is_named_left_and_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = user_cache_path(KEY)
    path.parent.mkdir()
    os.mkfifo(path)
    with pytest.warns(UserWarning, match=f"cost cache {path}: not a file; .*; measuring anew"):
        assert cached_entries(KEY) == ({}, "")
    with pytest.warns(UserWarning, match="cannot be written .*is no regular file"):
        assert store(CostCache(KEY, {})) is None
    assert stat.S_ISFIFO(os.lstat(path).st_mode)
    path.unlink()
    path.write_bytes(b"junk")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store(CostCache(KEY, {})) == str(path)
    assert CostCache.load(path) == CostCache(KEY, {})
