"""Symmetric products by row blocks on CPU, and one row of the bench that measures what they bring."""

from __future__ import annotations

import importlib
import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from zoo import commuting, gaussian

from dmuon.kernels.symmetric_cpu import block_edges, split_product, worth_splitting

BENCH = Path(__file__).parents[2] / "bench"
SIZES = (1, 15, 63, 64, 65, 129, 300, 513, 1100)
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-14}


def symmetric(m: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    x = gaussian(m, m, dtype=dtype, seed=seed)
    return (x + x.mT) / 2


def assert_is(found: Tensor, expected: Tensor, case: object = None) -> None:
    assert torch.equal(found, found.mT), f"{case}: not symmetric bitwise"
    limit = TOLERANCE[found.dtype] * max(1.0, expected.abs().max().item())
    assert (found.double() - expected).abs().max().item() <= limit, case


@pytest.mark.parametrize("m", SIZES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_product_of_newton_schulz_equals_fp64(m, dtype):
    x = torch.randn(m, 2 * m + 3, dtype=dtype) / math.sqrt(m)
    r, q = commuting(m, m, dtype=dtype)
    c = symmetric(m, dtype, 1)
    assert_is(split_product(x, x.mT), x.double() @ x.double().mT, "XX'")
    assert_is(split_product(r, q), r.double() @ q.double(), "RQ")
    expected = -0.7 * r.double() @ q.double() + 2.5 * c.double()
    assert_is(split_product(r, q, c, alpha=-0.7, beta=2.5), expected, "RQ and C")


@settings(max_examples=40, deadline=None)
@given(m=st.integers(0, 700), p=st.integers(0, 80), alpha=st.floats(-4, 4), beta=st.floats(-4, 4), with_c=st.booleans())
def test_any_sizes_and_factors(m, p, alpha, beta, with_c):
    x = torch.randn(m, p, dtype=torch.float64)
    c = symmetric(m, torch.float64) if with_c else None
    found = split_product(x, x.mT, c, alpha=alpha, beta=beta)
    assert found.shape == (m, m)
    assert torch.equal(found, found.mT)
    expected = alpha * (x @ x.mT) + (0 if c is None else beta * c)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("m", [70, 513])
def test_result_may_replace_c(m):
    r, q = commuting(m, m)
    c = symmetric(m, torch.float32, 1)
    expected = split_product(r, q, c, alpha=1.5, beta=0.5)
    for target in (c.clone(), torch.stack([c, c])[1]):
        same = target.view(m, m)  # another tensor of the same memory
        assert split_product(r, q, same, alpha=1.5, beta=0.5, out=target) is target
        assert torch.equal(target, expected)


@pytest.mark.parametrize("m", [70, 513])
def test_strides_do_not_matter_and_input_is_not_modified(m):
    r, q = commuting(m, m, dtype=torch.float64)
    c = symmetric(m, torch.float64, 1)
    expected = r @ q + 0.5 * c
    big = torch.full((3 * m, 2 * m), math.nan, dtype=torch.float64)
    strided = big[: 3 * m : 3, m:].copy_(r)
    for a, b, addend in ((strided, q, c), (r.mT, strided.mT, c.mT), (q, strided, c), (q.mT, r, c.mT.contiguous())):
        copies = [t.clone() for t in (a, b, addend)]
        assert_is(split_product(a, b, addend, beta=0.5), a @ b + 0.5 * c, (a.stride(), b.stride()))
        assert all(torch.equal(t, copy) for t, copy in zip((a, b, addend), copies, strict=True))
    for out in (torch.empty(m, m, dtype=torch.float64).mT, torch.empty(m, 2 * m, dtype=torch.float64)[:, ::2]):
        assert_is(split_product(r, q, c, beta=0.5, out=out), expected, out.stride())
    around = torch.zeros(m + 2, m + 2, dtype=torch.float64)
    split_product(r, q, out=around[1:-1, 1:-1])
    edge = around.clone()
    edge[1:-1, 1:-1] = 0
    assert not edge.any(), "written outside of out"


def test_what_is_in_out_or_above_the_diagonal_of_c_is_not_read():
    m = 513
    r, q = commuting(m, m)
    c = symmetric(m, torch.float32, 1)
    expected = split_product(r, q, c, beta=0.5)
    half = torch.where(torch.ones(m, m, dtype=torch.bool).tril(), c, math.nan)
    assert torch.equal(split_product(r, q, half, beta=0.5), expected)
    assert torch.equal(split_product(r, q, out=torch.full((m, m), math.nan)), split_product(r, q))


def test_nan_reaches_only_its_row_and_column():
    m, bad = 300, 137
    x = torch.randn(m, 40)
    clean = split_product(x, x.mT)
    x[bad, 7] = math.nan
    found = split_product(x, x.mT)
    touched = torch.zeros(m, m, dtype=torch.bool)
    touched[bad], touched[:, bad] = True, True
    assert torch.equal(found.isnan(), touched)
    assert torch.equal(found[~touched], clean[~touched])


def test_more_threads_change_nothing_that_matters():
    x = torch.randn(700, 900, dtype=torch.float64)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert_is(split_product(x, x.mT), x @ x.mT, threads)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("m", [0, 1, 127, 128, 640, 1023, 1024, 1100, 4096])
def test_blocks_cover_every_row_once(m):
    edges = block_edges(m)
    assert edges[0] == 0 and edges[-1] == m
    assert all(start < stop for start, stop in itertools.pairwise(edges)) or m == 0
    assert len(edges) - 1 == max(1, m // (128 if m < 1024 else 256))


def test_large_products_are_split_and_small_ones_are_not():
    assert not worth_splitting(256, 256)
    assert not worth_splitting(256, 4096)
    assert worth_splitting(1024, 1024)
    # A long inner dimension amortizes mirroring: whatever is split when short, is split when long.
    assert all(worth_splitting(m, 4 * m) or not worth_splitting(m, m) for m in range(1, 2048))


@pytest.mark.parametrize(
    "shapes",
    [
        ((4, 3), (4, 3), None, None),
        ((4, 3), (3, 5), None, None),
        ((4, 3), (3, 4), (4, 5), None),
        ((4, 3), (3, 4), None, (5, 5)),
        ((4, 3), (3, 4), (4,), None),  # addmm would broadcast it
        ((2, 4, 3), (2, 3, 4), None, None),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes):
    a, b, c, out = (None if s is None else torch.zeros(s) for s in shapes)
    with pytest.raises(ValueError, match="do not fit"):
        split_product(a, b, c, out=out)


def test_bench_reports_rows_and_judges_targets(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the bench sets a default
    monkeypatch.syspath_prepend(str(BENCH))
    bench = importlib.import_module("newton_schulz")
    row = bench.measure(24, 96, 2, rounds=2, seconds=0.1)
    assert row.rounds == 2 and set(row.ms) == set(bench.PROGRAMS)
    assert all(ms > 0 for ms in row.ms.values()), row
    assert all(row.error[name] < 5e-4 for name in ("standard", "gram", "ours")), row
    assert 1e-4 < row.error["torch"] < 0.2, row
    assert bench.line(row).count("|") == bench.HEADER.splitlines()[0].count("|")

    row = bench.Row(1024, 4096, 1, 3, {"standard": 3.0, "gram": 1.9, "torch": 1.0, "ours": 2.0}, row.error)
    assert row.speedup("standard") == 1.5 and row.speedup("best plain") == 0.95
    assert bench.Target("standard", 1.5, 4.0, 1024).verdict([row])[0]
    assert not bench.Target("standard", 1.6, 4.0, 1024).verdict([row])[0]
    assert not bench.Target("best plain", 0.97, 1.0, 256).verdict([row])[0]
    assert not bench.Target("standard", 1.5, 5.0, 1024).verdict([row])[0], "nothing measured must not pass"
