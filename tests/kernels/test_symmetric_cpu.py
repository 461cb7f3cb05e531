"""Symmetric products by row blocks on CPU, and one row of the bench that measures what they bring."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from zoo import commuting, gaussian

from dmuon.kernels.symmetric_cpu import block_edges, split_product, worth_splitting

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
