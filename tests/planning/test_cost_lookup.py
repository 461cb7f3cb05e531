"""Where the planner's costs come from: cache, shipped profile, measurement divided among ranks, estimate."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from dmuon.planning import cost_lookup as costs
from dmuon.solver import CostTable

CPU = torch.device("cpu")
COUNTS = {(16, 16): 6, (16, 48): 3, (24, 24): 1}


def timing(ns):
    return costs.Timing(ns, ns, ns, 5)


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """An empty user cache, no shipped profile, and a process that has measured nothing."""
    monkeypatch.setattr(costs, "shipped_profiles", list)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget()


@pytest.fixture
def measurements(monkeypatch):
    """Every (shape, k) that is measured; timings are 1000 ns a matrix."""
    seen = []

    def fake(work, *, device, options, budget_s):
        seen.extend((shape, k) for shape, sizes in work.items() for k in sizes)
        return {shape: {k: timing(1000 * k * shape[0]) for k in sizes} for shape, sizes in work.items()}

    monkeypatch.setattr(costs, "measure", fake)
    monkeypatch.setattr(costs, "build_kernels", lambda work, **_: None)
    return seen


def forget():
    """As a new process would start."""
    costs._measured.clear()


@pytest.fixture
def key():
    return costs.device_key(CPU, costs.NsOptions())


@pytest.fixture
def keep(key):
    """``keep(medians, **changes)``: a cache of single timings, in the file of the user's for the changed key."""

    def save(medians, path=None, **changes):
        other = replace(key, **changes)
        cache = costs.CostCache(
            other, {s: {k: timing(t) for k, t in batches.items()} for s, batches in medians.items()}
        )
        path = path or costs.user_cache_path(other)
        cache.save(path)
        return path

    return save


ALL = {shape: {1: 7, 2: 9, 4: 11} for shape in COUNTS}  # every batch that is asked for


def alone(counts=COUNTS, **options):
    found = costs.find_costs(counts, world=1, rank=0, device=CPU, **options)
    return found.table, found.source


RANK = threading.local()  # that a thread stands for


def together(world, counts=COUNTS, **options):
    """``find_costs`` on ``world`` ranks, as threads; each rank's result or exception."""
    barrier, items = threading.Barrier(world, timeout=30), [None] * world

    def share(work):
        items[RANK.index] = work()
        barrier.wait()
        answer = list(items)
        barrier.wait()
        return answer

    def run(rank):
        RANK.index = rank
        try:
            found = costs.find_costs(counts, world=world, rank=rank, device=CPU, share=share, **options)
            return found.table, found.source
        except Exception as error:
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(run, range(world)))


def test_a_first_call_measures_for_real_and_caches(key):
    table, source = alone(budget_s=60.0)  # no more than needed is taken
    path = costs.user_cache_path(key)
    assert set(table.costs) == set(COUNTS) and table.estimated == ()
    assert source == f"6 measured now on {key.device}, kept in user cache {path}"
    assert alone()[1] == f"user cache {path}"
    medians = {s: {k: t.median_ns for k, t in sizes.items()} for s, sizes in costs.CostCache.load(path).entries.items()}
    assert CostTable(medians) == table


def test_nothing_is_measured_twice(measurements):
    first = alone()
    measurements.clear()
    again = alone()  # same process
    forget()
    warm = alone()  # same cache
    assert measurements == []
    assert first[0] == again[0] == warm[0]
    alone({**COUNTS, (32, 32): 1})
    assert measurements == [((32, 32), 1)]


def test_what_the_budget_does_not_reach_is_scaled_from_its_neighbour_and_flagged(monkeypatch):
    monkeypatch.setattr(
        costs, "measure", lambda work, **_: {(16, 16): {1: timing(1000)}, (64, 64): {1: timing(64_000)}}
    )
    table, _ = alone({(16, 16): 1, (32, 32): 1, (48, 48): 1, (64, 64): 1})
    assert table.estimated == ((32, 32), (48, 48))
    assert table.costs[32, 32] == {1: 8000}  # 2³ times the nearer in FLOPs
    assert table.costs[48, 48] == {1: 27_000}  # (3/4)³ of the nearer
    assert table.sources[16, 16] == "measured"


@pytest.mark.pitfall("P50")
@pytest.mark.parametrize("content", ["{", '{"schema": 9}'])
def test_a_corrupt_user_cache_is_named_and_measured_anew(measurements, key, content):
    alone()
    path = costs.user_cache_path(key)
    path.write_text(content)
    forget()
    measurements.clear()
    with pytest.warns(UserWarning, match=f"{path.name}.*; not used"):
        alone()
    assert len(measurements) == 6
    assert set(costs.CostCache.load(path).entries) == set(COUNTS)


@pytest.mark.pitfall("P93")
def test_all_ranks_build_their_kernels_before_any_measures(measurements, monkeypatch):
    order = []
    monkeypatch.setattr(costs, "build_kernels", lambda work, **_: (time.sleep(0.1 * RANK.index), order.append("built")))
    fake = costs.measure
    monkeypatch.setattr(costs, "measure", lambda work, **options: (order.append("timed"), fake(work, **options))[1])
    together(3)
    assert order == ["built"] * 3 + ["timed"] * 3


@pytest.mark.pitfall("P50")
@pytest.mark.parametrize("other", [{"device": "Another device"}, {"threads": 2}], ids=str)
def test_another_devices_costs_are_not_used(measurements, monkeypatch, keep, tmp_path, other):
    """Neither of the user's nor shipped."""
    keep(ALL, **other)
    shipped = keep(ALL, tmp_path / "shipped.json", **other)
    monkeypatch.setattr(costs, "shipped_profiles", lambda: [shipped])
    assert alone()[0].costs[16, 16][1] == 16_000
    assert len(measurements) == 6


@pytest.mark.pitfall("P50")
def test_another_torchs_costs_are_used_with_a_warning(measurements, keep):
    keep(ALL, torch="2.11.0")
    with pytest.warns(UserWarning, match=r"other versions \(torch 2.11.0 → .*run dmuon-profile"):
        table, _ = alone()
    assert table.costs[16, 16][1] == 7 and measurements == []


def test_a_shipped_profile_is_used_after_the_users_cache(measurements, monkeypatch, keep, tmp_path):
    shipped = keep(ALL, tmp_path / "shipped.json")
    monkeypatch.setattr(costs, "shipped_profiles", lambda: [shipped])
    table, source = alone()
    assert (
        table.costs[24, 24][1] == 7 and source == "shipped profile dmuon.profiles/shipped.json" and measurements == []
    )
    path = keep({(24, 24): {1: 5}})
    table, source = alone()
    assert table.costs[24, 24][1] == 5 and table.costs[16, 16][1] == 7
    assert source == f"user cache {path}, shipped profile dmuon.profiles/shipped.json"


def test_an_explicit_path_is_used_as_it_is(measurements, keep, tmp_path):
    path = keep({(16, 16): {1: 10}, (24, 24): {1: 30}}, tmp_path / "mine.json")
    table, source = alone({(16, 16): 5, (24, 24): 1}, costs=path)
    assert table.costs == {(16, 16): {1: 10}, (24, 24): {1: 30}} and str(path) in source
    with pytest.warns(UserWarning, match=r"no timing for 16x48, estimated.*dmuon-profile --shapes 16x48"):
        table, _ = alone(costs=path)
    assert table.estimated == ((16, 48),)
    assert measurements == []


@pytest.mark.pitfall("P50")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("alien.json", "key field 'device' is 'Another device'"),
        (
            "threads.json",
            "key field 'threads' is 2, this run's is 1; measure on this device with OMP_NUM_THREADS=1 dmuon",
        ),
        ("bad.json", "corrupt or truncated"),
    ],
)
def test_an_unusable_path_is_the_same_error_on_every_rank(measurements, keep, tmp_path, name, message):
    keep({(16, 16): {1: 10}}, tmp_path / "alien.json", device="Another device")
    keep({(16, 16): {1: 10}}, tmp_path / "threads.json", threads=2)
    (tmp_path / "bad.json").write_text("{")
    errors = together(3, costs=str(tmp_path / name))
    assert all(isinstance(e, costs.CostCacheError) and name in str(e) and message in str(e) for e in errors)
    assert len(set(map(str, errors))) == 1
    assert measurements == []


def test_ranks_divide_the_work_and_agree(measurements, key):
    counts = {(16 + 8 * i, 64): 8 for i in range(5)}
    results = together(3, counts)
    assert len({str(r) for r in results if isinstance(r, Exception)}) == 0
    assert all(r[0] == results[0][0] for r in results)
    assert len(measurements) == len(set(measurements)) == 20  # k = 1, 2, 4, 8 of each shape, once
    assert set(costs.CostCache.load(costs.user_cache_path(key)).entries) == set(counts)
    measurements.clear()
    assert together(3, counts)[0][0] == results[0][0]
    assert measurements == []


def test_ranks_on_another_device_do_not_measure(measurements, monkeypatch, key):
    monkeypatch.setattr(costs, "device_key", lambda *_: replace(key, device=f"Device {RANK.index}"))
    with pytest.warns(UserWarning, match="has another device than rank 0"):
        results = together(2)
    assert results[0][0] == results[1][0]


def test_a_failing_measurement_is_the_same_error_on_every_rank(monkeypatch):
    def fail(work, **_):
        raise RuntimeError("illegal instruction")

    monkeypatch.setattr(costs, "measure", fail)
    errors = together(2)
    assert len(set(map(str, errors))) == 1
    assert all(isinstance(e, RuntimeError) for e in errors)
    assert "rank 0: measuring" in str(errors[0]) and "costs='flops'" in str(errors[0])


@pytest.mark.pitfall("P10")
def test_options_have_their_own_costs(measurements):
    alone()
    measurements.clear()
    alone(options=costs.NsOptions(steps=3))
    assert len(measurements) == 6
    with pytest.raises(ValueError, match="coefficients="):
        alone(options=costs.NsOptions("nonsense"))
