"""The symmetric-product kernel: its results in Triton's interpreter; run by ``test_interpreted.py``.

Close to fp64, symmetric and repeatable bitwise, inputs untouched, and what else a test claims.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from zoo import commuting, gaussian

from dmuon.kernels.symmetric_tiles import TileConfig
from dmuon.kernels.symmetric_triton import lower_tile, triangular_root
from dmuon.kernels.symmetric_triton import symmetric_product as launched

POINTERS = TileConfig(32, 16, 4, 2)
WIDE = TileConfig(32, 16, 4, 2, wide=True)
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3}


@triton.jit
def _decode(rows, cols, side, GROUP: tl.constexpr, COUNT: tl.constexpr):
    index = tl.minimum(tl.arange(0, COUNT), side * (side + 1) // 2 - 1)
    row, col = lower_tile(index, side, GROUP)
    tl.store(rows + tl.arange(0, COUNT), row)
    tl.store(cols + tl.arange(0, COUNT), col)


@triton.jit
def _root(indices, roots, COUNT: tl.constexpr):
    offsets = tl.arange(0, COUNT)
    tl.store(roots + offsets, triangular_root(tl.load(indices + offsets)))


pytestmark = pytest.mark.pitfall("P43", "P44", "P45")


@pytest.fixture(
    params=[
        pytest.param((POINTERS, torch.float16), id="pointers"),
        pytest.param((WIDE, torch.float16), id="wide"),
    ]
)
def case(request):
    return request.param


@pytest.fixture
def config(case):
    return case[0]


@pytest.fixture
def dtype(case):
    return case[1]


def symmetric_product(a: Tensor, b: Tensor, c: Tensor | None = None, *, beta: float = 0.0, **options) -> Tensor:
    """One addend, or none."""
    return launched(a, b, **options, **({} if c is None or not beta else {"addends": [c], "betas": [beta]}))


def laid_out(x: Tensor, layout: str) -> Tensor:
    """Contiguous ("n"), or the transpose of a contiguous matrix ("t")."""
    return x.contiguous() if layout == "n" else x.mT.contiguous().mT


def close(found: Tensor, exact: Tensor) -> bool:
    return ((found.double() - exact).abs().max() / exact.abs().max()).item() <= TOLERANCE[found.dtype]


def check(a: Tensor, b: Tensor, c: Tensor | None = None, **options) -> Tensor:
    """The product, run twice, against fp64."""
    copies = [None if x is None else x.clone() for x in (a, b, c)]
    alpha, beta, out = options.get("alpha", 1.0), options.get("beta", 0.0), options.get("out")
    exact = alpha * (a.double() @ b.double())
    if c is not None and beta:
        exact += beta * c.double()
    first = symmetric_product(a, b, c, **options).clone()
    second = symmetric_product(a, b, c, **options)
    assert close(second, exact)
    assert torch.equal(second, second.mT)
    assert torch.equal(first, second)
    for copy, x in zip(copies, (a, b, c), strict=True):
        assert x is None or x is out or torch.equal(copy.nan_to_num(7), x.nan_to_num(7)), "an input was modified"
    assert out is None or second is out
    return second


@pytest.mark.parametrize("layouts", ["nn", "tt"])
def test_a_layout(config, dtype, layouts):
    x = gaussian(1, 48, 64).to(dtype)
    check(laid_out(x, layouts[0]), laid_out(x.mT, layouts[1]), config=config)


@pytest.mark.parametrize("shape", [(48, 24), (2, 37, 29), (2, 8, 8)], ids=str)
def test_sizes(config, dtype, shape):
    """No batch, ragged tiles, less than a tile."""
    if config.wide and shape[-1] % 8:
        pytest.skip("descriptors need strides of 16 bytes")
    x = gaussian(*shape).to(dtype)
    check(x, laid_out(x.mT, "t"), config=config)


@pytest.mark.parametrize("b_symmetric", [False, True])
def test_commuting_factors_and_a_symmetric_one_read_as_its_transpose(config, dtype, b_symmetric):
    check(*commuting(2, 64, 64, dtype=dtype), config=config, b_symmetric=b_symmetric)


@pytest.mark.parametrize(("layout", "alpha", "beta"), [("n", 0.75, -1.5), ("t", 1.0, 2.0)])
def test_a_scaled_addend(config, dtype, layout, alpha, beta):
    a, b = commuting(2, 48, 48, dtype=dtype)
    check(a, b, laid_out(a, layout), alpha=alpha, beta=beta, config=config)


def test_the_lower_triangle_is_mirrored(config, dtype):
    """The product is not symmetric at all: exactly its lower triangle must come out, twice."""
    a, b = gaussian(64, 32, seed=1).to(dtype), gaussian(32, 64, seed=2).to(dtype)
    result = symmetric_product(a, b, config=config)
    exact = (a.double() @ b.double()).tril()
    assert close(result, exact + exact.tril(-1).mT)
    assert torch.equal(result, result.mT)


def test_out_is_the_addend(config, dtype):
    a, b = commuting(2, 64, 64, dtype=dtype)
    c = a + b
    apart = symmetric_product(a, b, c, alpha=0.5, beta=1.5, config=config)
    for transposed in (False, True):  # symmetric, so its transpose is the same matrix
        target = c.clone()
        addend = target.mT if transposed else target
        assert symmetric_product(a, b, addend, alpha=0.5, beta=1.5, out=target, config=config) is target
        assert torch.equal(target, apart)


def test_several_addends_and_the_identity(config, dtype):
    """Their sum is not rounded: so close to fp64 as with one. Any of them may be overwritten."""
    s, _ = commuting(2, 40, 40, dtype=dtype)
    addends = [commuting(2, 40, 40, dtype=dtype, seed=i)[1] for i in range(4)]
    betas, eye = (1.5, -0.75, 0.25, -2.0), torch.eye(40, dtype=torch.float64)
    exact = -0.5 * s.double() @ s.double() + 0.3 * eye
    exact += sum(beta * c.double() for beta, c in zip(betas, addends, strict=True))
    options = {
        "addends": addends,
        "betas": betas,
        "alpha": -0.5,
        "identity": 0.3,
        "b_symmetric": True,
        "config": config,
    }
    found = launched(s, s, **options)
    assert close(found, exact) and torch.equal(found, found.mT)
    for target in (addends[0], addends[-1]):
        kept = target.clone()
        assert torch.equal(launched(s, s, **options, out=target), found)
        target.copy_(kept)


@pytest.mark.parametrize("rows", [64, 72])
def test_wide_tiles(rows):
    """Even and odd numbers of tile rows, and ragged ones."""
    x = gaussian(2, rows, 40).half()
    check(x, x.mT, config=WIDE)


def test_out_is_column_major_and_an_unread_addend_is_nan(config, dtype):
    x = gaussian(2, 48, 32).to(dtype)
    c = torch.full((2, 48, 48), torch.nan, dtype=dtype)
    check(x, x.mT, out=c.clone().mT, config=config)
    check(x, x.mT, c, beta=0.0, out=c.clone(), config=config)
    check(x, x.mT, c, beta=0.0, out=c, config=config)


def test_a_batch_of_rows_in_a_buffer(config, dtype):
    """Batch strides larger than a matrix, for operands and result."""
    a = torch.zeros(3, 5000, dtype=dtype)[:, : 48 * 32].view(3, 48, 32)
    a.copy_(gaussian(3, 48, 32))
    out = torch.full((3, 4096), torch.nan, dtype=dtype)[:, : 48 * 48].view(3, 48, 48)
    check(a, a.mT, out=out, config=config)


def test_nan_stays_in_its_matrix(config, dtype):
    x = gaussian(2, 48, 32).to(dtype)
    x[0, 5, 7] = torch.nan
    result = symmetric_product(x, x.mT, config=config)
    assert result[0, 5].isnan().all()
    assert torch.equal(result[1], symmetric_product(x[1], x[1].mT, config=config))


SUM = gaussian(2, 80, 80) + gaussian(2, 80, 80).mT
LYING = {  # in ways that descriptors do not take: a factor, an addend or none, and options
    "without a unit stride": (gaussian(2, 80, 60)[:, ::2, ::3], SUM[:, ::2, ::2], {"beta": 0.5}),
    "the batch last": (gaussian(40, 24, 3).permute(2, 0, 1), None, {"out": torch.empty(40, 40, 3).permute(2, 0, 1)}),
    "an expanded batch": (
        gaussian(1, 40, 24).half().expand(3, 40, 24),
        torch.eye(40, dtype=torch.float16).expand(3, 40, 40),
        {"beta": 2.0},
    ),
    "an unaligned address": (gaussian(48 * 32 + 1).half()[1:].view(48, 32), None, {}),
    "by the default, which takes descriptors elsewhere": (gaussian(20, 12).half()[:, 1:8], None, {"config": None}),
    "one by one": (gaussian(3, 1, 5), None, {}),
}


@pytest.mark.parametrize("name", LYING)
def test_whatever_way_operands_lie(name):
    x, c, options = LYING[name]
    check(x, x.mT, c, **{"config": POINTERS, **options})


def test_every_lower_tile_is_computed_once():
    group = 8
    for side in (*range(1, 18), 33, 64, 65, 257, 700):
        tiles = side * (side + 1) // 2
        count = triton.next_power_of_2(tiles)
        rows, cols = torch.empty(2, count, dtype=torch.int32).unbind()
        _decode[(1,)](rows, cols, side, GROUP=group, COUNT=count)
        rows, cols = rows[:tiles].long(), cols[:tiles].long()
        assert ((cols >= 0) & (cols <= rows) & (rows < side)).all(), side
        assert (rows.div(group, rounding_mode="floor").diff() >= 0).all(), side
        assert (rows * side + cols).unique().numel() == tiles, side


def test_roots_are_exact_at_every_edge():
    """At each triangular number, and one below it, as far as an index goes."""
    roots = torch.arange(1, 23169, dtype=torch.int64)
    edges = roots * (roots + 1) // 2
    indices = torch.cat([edges, edges - 1])
    count = triton.next_power_of_2(indices.numel())
    padded = torch.zeros(count, dtype=torch.int32)
    padded[: indices.numel()] = indices
    result = torch.empty_like(padded)
    _root[(1,)](padded, result, COUNT=count)
    assert torch.equal(result[: indices.numel()].long(), torch.cat([roots, roots - 1]))
    assert indices.max() == 23168 * 23169 // 2


X, ODD = gaussian(2, 32, 32), torch.zeros(31, 31)
LONG = torch.zeros(1, 1).expand(1_000_000, 0)
REFUSED = {
    "an odd address": ((torch.zeros(1025)[1:].view(32, 32), X[0]), WIDE, "has tensor descriptors"),
    "an odd stride": ((ODD, ODD), WIDE, "pass a config without them"),
    "an expanded batch": ((X[:1].expand(2, 32, 32), X), WIDE, "has tensor descriptors"),
    "strided": ((X[:, :, ::2], X[:, ::2]), WIDE, "a contiguous dimension"),
    "too many tiles": ((LONG, LONG.mT), POINTERS, "split the batch"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_launch(name):
    factors, config, message = REFUSED[name]
    out = X[0, :1, :1].expand(10**6, 10**6) if factors[0] is LONG else None
    with pytest.raises(ValueError, match=message):
        symmetric_product(*factors, config=config, out=out)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((2, 16, 16), (2**32, 16, 1)),  # a stride that alone takes 64 bits
        ((4, 16, 16), (2**30, 16, 1)),  # batch · stride
        ((32, 16), (2**27, 1)),  # row · stride
        ((16, 32), (1, 2**27)),  # inner · stride, and its step through the loop
    ],
)
def test_far_rows_and_batches(shape, strides):
    """Offsets beyond 2**31 elements; the memory between is reserved, and never touched."""
    storage = torch.empty(2**32 + 2**20, dtype=torch.float16)
    x = storage.as_strided(shape, strides)
    x.copy_(gaussian(*shape))
    check(x, x.mT, config=TileConfig(16, 16, 4, 2))


@pytest.mark.parametrize(("shape", "strides"), [((4, 16, 16), (2**30, 16, 1)), ((32, 32), (2**27, 1))])
def test_far_rows_and_batches_of_the_result(shape, strides):
    out = torch.empty(2**32 + 2**20, dtype=torch.float16).as_strided(shape, strides)
    x = gaussian(*shape[:-1], 16).half()
    check(x, x.mT, out=out, config=TileConfig(16, 16, 4, 2))
    check(x, x.mT, out, beta=0.5, config=TileConfig(16, 16, 4, 2))
