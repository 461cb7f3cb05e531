"""``symmetric_product`` on every back end that runs here: numbers, symmetry, aliasing, refusals."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from zoo import commuting, gaussian

from dmuon.kernels import symmetric_product

BACKENDS = ("torch", "split")
LIMIT = {torch.float32: 2e-6, torch.float64: 1e-14}


@pytest.mark.pitfall("P44")
@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_and_transposed_operands(backend):
    x = gaussian(2, 80, 120)
    exact = x.double() @ x.double().mT
    wide = torch.empty(2, 80, 240)[:, :, ::2].copy_(x)
    tall = x.mT.contiguous().mT
    for operand in (wide, tall, x.expand(2, 80, 120), x.transpose(0, 1).contiguous().transpose(0, 1)):
        found = symmetric_product(operand, operand.mT, backend=backend)
        assert (found - exact).abs().max() <= 2e-6 * exact.abs().max()
    found = symmetric_product(x[0], x[0].mT, backend=backend)
    assert found.shape == (80, 80) and (found - exact[0]).abs().max() <= 2e-6 * exact.abs().max()


@pytest.mark.parametrize("backend", BACKENDS)
def test_out_may_share_memory_with_operands_and_what_is_not_read_does_not_leak(backend):
    a, b = commuting(2, 40, 40)
    c = a.clone()
    found = symmetric_product(a, b, c, alpha=1.0, beta=2.0, out=c, backend=backend)
    exact = a.double() @ b.double() + 2 * a.double()
    assert found is c and (c - exact).abs().max() <= 2e-6 * exact.abs().max()
    rubbish = torch.full((2, 40, 40), float("nan"))
    symmetric_product(a, b, rubbish, beta=0.0, out=rubbish, backend=backend)
    assert (rubbish - a.double() @ b.double()).abs().max() <= 2e-6 * exact.abs().max()
    for which in (0, 1):
        operands = commuting(2, 40, 40)
        symmetric_product(*operands, out=operands[which], backend=backend)
        assert torch.equal(operands[which], symmetric_product(a, b, backend=backend))
    meeting = torch.zeros(2, 41, 40)
    meeting[:, :40] = a
    symmetric_product(a, b, meeting[:, :40], beta=2.0, out=meeting[:, 1:], backend=backend)
    assert (meeting[:, 1:] - exact).abs().max() <= 2e-6 * exact.abs().max()


@pytest.mark.pitfall("P38", "P45")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_call_gives_the_same_bits_and_nan_stays_in_its_matrix(backend):
    x = gaussian(3, 70, 90)
    first = symmetric_product(x, x.mT, backend=backend)
    assert torch.equal(first, symmetric_product(x, x.mT, backend=backend))
    x[1, 3, 4] = float("nan")
    found = symmetric_product(x, x.mT, backend=backend)
    assert torch.equal(found[0], first[0]) and torch.equal(found[2], first[2]) and found[1].isnan().any()


@pytest.mark.pitfall("P43")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("m", "dtype"), [*((m, dtype) for m in (1, 63, 65, 129) for dtype in LIMIT), (1025, torch.float32)]
)
def test_gram_matrices_and_products_that_commute_are_symmetric_bitwise_around_the_edges_of_blocks(backend, dtype, m):
    x, (r, q) = gaussian(m, 2 * m + 3, dtype=dtype) / math.sqrt(m), commuting(m, m, dtype=dtype)
    c = r + q.mT
    assert m < 15 or not torch.equal(r @ q, (r @ q).mT), "or the test would see nothing"
    scaled = {"alpha": -0.7, "beta": 2.5, "b_symmetric": m % 2 == 0}
    for found, exact in (
        (symmetric_product(x, x.mT, backend=backend), x.double() @ x.double().mT),
        (symmetric_product(r, q, c, **scaled, backend=backend), -0.7 * r.double() @ q.double() + 2.5 * c.double()),
    ):
        assert torch.equal(found, found.mT) and found.dtype == dtype
        assert (found - exact).abs().max() <= LIMIT[dtype] * exact.abs().max().clamp(min=1)


@settings(max_examples=40, deadline=None)
@given(m=st.integers(0, 700), p=st.integers(0, 80), alpha=st.floats(-4, 4), beta=st.floats(-4, 4), with_c=st.booleans())
def test_any_sizes_and_factors(m, p, alpha, beta, with_c):
    x = torch.randn(m, p, dtype=torch.float64)
    c = torch.randn(m, m, dtype=torch.float64)
    c = c + c.mT if with_c else None
    found = symmetric_product(x, x.mT, c, alpha=alpha, beta=beta, backend="split")
    assert found.shape == (m, m) and torch.equal(found, found.mT)
    expected = alpha * (x @ x.mT) + (0 if c is None else beta * c)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("m", [70, 513])
def test_nothing_is_written_outside_of_out_nor_read_outside_of_operands(m):
    r, q = commuting(m, m, dtype=torch.float64)
    strided = torch.full((3 * m, 2 * m), math.nan, dtype=torch.float64)[: 3 * m : 3, m:].copy_(r)
    around = torch.zeros(m + 2, m + 2, dtype=torch.float64)
    for out in (around[1:-1, 1:-1], torch.empty(m, m).double().mT, torch.empty(m, 2 * m).double()[:, ::2]):
        copies = strided.clone(), q.clone()
        symmetric_product(strided, q, out=out, backend="split")
        assert torch.allclose(out, r @ q, rtol=1e-12, atol=1e-11) and torch.equal(out, out.mT)
        assert all(torch.equal(*pair) for pair in zip((strided, q), copies, strict=True))
    around[1:-1, 1:-1] = 0
    assert not around.any()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: symmetric_product(x, x.mT.double()), TypeError, "b is torch.float64, a is torch.float32"),
        (lambda x: symmetric_product(x, x), ValueError, r"b must be \(6, 4\) beside a \(4, 6\), got \(4, 6\)"),
        (lambda x: symmetric_product(x, x.mT, out=x[:1, :1].expand(4, 4)), ValueError, "overlaps itself"),
        (
            lambda x: symmetric_product(x, x.mT, backend="triton"),
            ValueError,
            "backend='triton' cannot run: .*interpreter",
        ),
    ],
)
def test_bad_input_is_refused_by_name(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.randn(4, 6))
