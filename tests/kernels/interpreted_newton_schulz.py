"""Newton–Schulz and the Muon update as they run on a GPU, all kernels together; run by ``test_interpreted.py``."""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType

import pytest
import torch
import zoo
from zoo import gaussian, relative

from dmuon.kernels import (
    Variant,
    coefficient_sequence,
    iterate,
    momentum_norms,
    momentum_update,
    muon_update_,
    normalized,
    normalized_momentum,
    normalized_update,
    orthogonalize,
    run,
    symmetric_triton,
    update_triton,
)
from dmuon.kernels.arithmetic import TritonArithmetic
from dmuon.kernels.symmetric_tiles import TileConfig

TILES = TileConfig(32, 32, 4, 2), TileConfig(32, 32, 4, 2, wide=True)
HALF, SINGLE = (torch.float16, 2e-2), (torch.float32, 5e-5)
POLAR = coefficient_sequence("polar_express", 5)
PASSES = ["momentum_norms", "normalized_update", "apply_update", "momentum_update"]


@pytest.fixture
def launches(monkeypatch):
    """Names of the kernels that were launched, in their order."""
    names: list[str] = []

    def counted(name, function):
        def call(*arguments, **options):
            names.append(name)
            return function(*arguments, **options)

        return call

    product = counted("symmetric", symmetric_triton.symmetric_product)
    monkeypatch.setattr(symmetric_triton, "symmetric_product", product)
    for name in PASSES:
        monkeypatch.setattr(update_triton, name, counted(name, getattr(update_triton, name)))
    return names


@pytest.fixture
def tiled(monkeypatch):
    """Lets all symmetric products take one config."""

    def take(tile):
        taken = partial(symmetric_triton.symmetric_product, config=tile)
        monkeypatch.setattr(symmetric_triton, "symmetric_product", taken)

    return take


def products(method: str, restarts: tuple[int, ...], dtype: torch.dtype) -> int:
    """Symmetric products of five steps: XXᵀ and R² a step, or per block as NUMERICS counts them."""
    if method == "standard":
        return 10
    blocks = len(restarts) + 1
    whole = 1 if dtype == torch.float16 else 0
    return blocks + 5 + 3 * (5 - blocks) - whole


@pytest.mark.pitfall("P39", "P45", "P47")
@pytest.mark.parametrize(
    ("tile", "dtype", "limit", "method", "restarts", "shape"),
    [
        (TILES[0], *SINGLE, "gram", (2,), (1, 24, 40)),
        (TILES[1], *HALF, "gram", (2,), (1, 24, 40)),
        (TILES[1], *SINGLE, "standard", (), (1, 32, 32)),
    ],
    ids=str,
)
def test_whole_runs_equal_fp64_and_launch_the_kernel_for_every_symmetric_product(
    launches, tiled, tile, dtype, limit, method, restarts, shape
):
    tiled(tile)
    x = gaussian(*shape)
    kept = x.clone()
    variant = Variant(method, restarts, "triton", 8)
    ours = orthogonalize(x, variant=variant, dtype=dtype)
    assert len(launches) == products(method, restarts, dtype)
    assert relative(ours, orthogonalize(x.double(), method="standard", backend="torch")) <= limit
    assert torch.equal(x, kept)
    assert torch.equal(ours, orthogonalize(x, variant=variant, dtype=dtype))


@pytest.mark.parametrize(
    ("tile", "dtype", "limit", "shape"),
    [(TILES[0], *SINGLE, (2, 24, 40)), (TILES[1], *HALF, (1, 40, 24))],
    ids=str,
)
def test_blocks_of_squares_equal_fp64_in_eleven_launches(launches, tiled, shape, dtype, limit, tile):
    """Nine squares, sums included, and two Gram matrices."""
    tiled(tile)
    x = gaussian(*shape)
    ours = orthogonalize(x, coefficients="squares", variant=Variant("gram", (1,), "triton", 8), dtype=dtype)
    assert launches == ["symmetric"] * 11
    assert relative(ours, orthogonalize(x.double(), coefficients="squares", backend="torch")) <= limit


@pytest.mark.parametrize(
    ("method", "sequence", "by_quack", "by_triton"),
    [
        ("standard", POLAR, 10, 0),
        ("gram", POLAR, 7, 8),
        ("gram", coefficient_sequence("squares", 5), 11, 0),
    ],
)
def test_quack_computes_products_of_equal_factors_and_triton_the_others(
    launches, monkeypatch, method, sequence, by_quack, by_triton
):
    """Squares with all their addends among them; a fake one stands for it."""

    def product(a, b, *, C, out, alpha, beta):
        launches.append("quack")
        assert torch.equal(b, a.mT)
        exact = alpha * a.double() @ b.double() + (0 if C is None else beta * C.double())
        out.copy_((exact + exact.mT) / 2)

    fake = ModuleType("quack.gemm_interface")
    fake.gemm_symmetric = product
    monkeypatch.setitem(sys.modules, "quack", ModuleType("quack"))
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", fake)
    x = gaussian(2, 24, 40)
    x /= torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    restarts = () if method == "standard" else (2,) if sequence is POLAR else (1,)
    found = run(x.half().float(), Variant(method, restarts, "quack", 8), sequence, torch.float16)
    assert (launches.count("quack"), launches.count("symmetric")) == (by_quack, by_triton)
    exact = run(x.double(), Variant(method, restarts, "torch", 8), sequence, torch.float64)
    assert relative(found, exact) <= 2e-2


@pytest.mark.pitfall("P61")
def test_in_fp16_singular_values_of_nearly_singular_matrices_stay_in_range(tiled):
    """Rounding keeps the factors of a product from commuting there, so it matters which of them is read transposed."""
    tiled(TILES[1])
    m, n = 96, 224
    x = zoo.with_spectrum(m, n, torch.tensor([1.0, 0.0]).repeat_interleave(m // 2), 9)[None]
    x /= torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    variant = Variant("gram", (2,), "triton", 1)
    on_a_gpu = TritonArithmetic(torch.float16, torch.float16, whole_v=True)
    ours = iterate(x.half(), variant, POLAR, on_a_gpu)
    assert (torch.linalg.matrix_norm(ours.double(), 2) <= 1.1236 + 0.06).all()


@pytest.mark.pitfall("P47")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_what_is_exchanged_takes_a_pass_before_and_two_after(launches, dtype):
    """On each rank its part of the momentum, and on the owner the gathered matrices: the bits of one that has all."""
    grads, momentum, whole = list(gaussian(2, 24, 40)), gaussian(2, 24, 40, seed=1), gaussian(2, 24, 40, seed=1)
    update = momentum_update(grads, momentum, beta=0.95, nesterov=True)
    x, norms = normalized(update, storage=dtype)
    assert launches == ["momentum_update", "momentum_norms", "normalized_update"]
    expected, of_whole = normalized_momentum(grads, whole, beta=0.95, nesterov=True, storage=dtype)
    assert torch.equal(x, expected) and torch.equal(norms, of_whole) and torch.equal(momentum, whole)
    launches.clear()
    parts = gaussian(2, 24, 40, seed=1)
    norms = momentum_norms(grads, parts, beta=0.95, nesterov=True)
    half = normalized_update(grads, parts, norms, beta=0.95, nesterov=True, storage=dtype)
    assert launches == ["momentum_norms", "normalized_update"]
    assert torch.equal(norms, of_whole) and torch.equal(half, expected.to(dtype)), "rounded once"
    launches.clear()
    double, _ = normalized(update.double(), storage=torch.float64)
    assert not launches, "other dtypes go torch's way"
    assert relative(double, update / norms[:, None, None]) <= 1e-6


@pytest.mark.pitfall("P38", "P47")
def test_the_update_takes_three_fused_passes_and_keeps_nan_in_its_matrix(launches):
    k, m, n = 3, 24, 40
    grads = [gaussian(m, n, seed=i) for i in range(k)]
    grads[1][2, 3] = float("nan")
    momentum, params = gaussian(k, m, n, seed=7), [gaussian(m, n, seed=10 + i) for i in range(k)]
    average = torch.lerp(momentum.double(), torch.stack(grads).double(), 0.05)
    update = torch.lerp(torch.stack(grads).double(), average, 0.95)
    exact = orthogonalize(update, method="standard", backend="torch")
    wanted = [p.double() * (1 - 0.02 * 0.1) - 0.02 * 0.5 * o for p, o in zip(params, exact, strict=True)]
    options = {"lr": 0.02, "weight_decay": 0.1, "beta": 0.95, "nesterov": True, "scale": 0.5, "dtype": torch.float16}
    muon_update_(params, grads, momentum, **options, variant=Variant("gram", (2,), "triton", 8))
    assert [name for name in launches if name != "symmetric"] == PASSES[:3]
    assert max(relative(params[i], wanted[i]) for i in (0, 2)) <= 1e-4
    assert params[1].isnan().all()
