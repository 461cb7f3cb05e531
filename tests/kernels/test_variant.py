"""Which way Newton–Schulz runs: the rule, what is refused, and what a step replays."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dmuon.kernels import (
    Variant,
    backend_fault,
    choose_variant,
    coefficient_sequence,
    orthogonalize,
    products_on,
    step_variant,
)

variant_module = importlib.import_module("dmuon.kernels.variant")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
POLAR = coefficient_sequence("polar_express", 5)


def rule(shape, k=1, dtype=torch.float32, device=CPU, **options) -> Variant:
    return choose_variant(shape, k, POLAR, dtype, device, **options)


@pytest.fixture
def ampere(monkeypatch) -> Iterator[SimpleNamespace]:
    """A GPU on which Triton runs, unless it has a ``fault``."""
    machine = SimpleNamespace(fault=None, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: machine)
    monkeypatch.setattr(variant_module, "triton_fault", lambda device, dtype: machine.fault)
    monkeypatch.setattr(variant_module, "replays_right", lambda device: True)
    forget()
    yield machine
    forget()


def forget() -> None:
    for remembered in (backend_fault, products_on, choose_variant, step_variant):
        remembered.cache_clear()


@pytest.mark.parametrize(
    ("capability", "hip", "dtype", "reason"),
    [
        ((7, 5), None, torch.float16, "compute capability 7.5 is below 8.0"),
        ((8, 0), "6.4", torch.float16, "it is untested on HIP"),
        ((8, 0), None, torch.float64, "torch.float64 is none of fp16, bf16 and fp32"),
        ((12, 0), None, torch.float32, "the kernel does not build ("),
    ],
)
def test_why_the_triton_kernel_cannot_run(monkeypatch, capability, hip, dtype, reason):
    """Here it does not build on a device that has all: as in a container without a C compiler."""
    forget()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert (backend_fault("triton", CUDA, dtype) or "").startswith(reason)
    assert rule((4096, 14336), 8, dtype, CUDA).backend == "torch"
    monkeypatch.setattr(variant_module.importlib.util, "find_spec", lambda name: None)
    forget()
    without = "Triton is not installed" if dtype != torch.float64 else reason
    assert backend_fault("triton", CUDA, dtype) == without
    forget()


def test_the_rule_on_cpu():
    assert rule((64, 64)).method == "standard" and rule((64, 256)).method == "gram"
    assert rule((64, 256)).restarts == (2,)
    assert rule((16, 64)).method == "standard", "more calls take longer than the products that they spare"
    assert rule((16, 64), 64).method == "gram", "a batch has as many calls as one matrix"
    assert rule((16, 1024), 64).method == "gram"
    assert rule((64, 64), 100).piece == 16, "as many as stay in the cache"
    assert rule((64, 256)).backend == "torch" and rule((1024, 4096)).backend == "split"
    assert rule((1024, 1024)).method == "standard" and rule((1024, 1408)).method == "gram"
    assert rule((1024, 4096), dtype=torch.bfloat16).method == "standard"


def test_the_rule_on_cuda(ampere):
    many = rule((4096, 14336), 8, torch.float16, CUDA)
    assert (many.method, many.backend) == ("gram", "triton")
    assert rule((1024, 4096), 1, torch.float16, CUDA).backend == "torch", "36 tiles do not fill 132 processors"
    assert rule((1024, 4096), 8, torch.float16, CUDA).backend == "triton"
    assert rule((512, 2048), 64, torch.float16, CUDA).backend == "torch", "too small"
    assert rule((4096, 4096), 8, torch.float32, CUDA).backend == "torch", "fp32 has no matrix instruction"
    bf16 = rule((4096, 14336), 8, torch.bfloat16, CUDA)
    assert (bf16.method, bf16.backend) == ("standard", "triton")
    ampere.fault = "no"
    forget()
    assert rule((4096, 14336), 8, torch.float16, CUDA).backend == "torch"


def test_a_batch_on_cuda_is_cut_where_its_workspace_is_bounded():
    large = rule((8192, 28672), 64, torch.float16, CUDA, backend="torch").piece
    small = rule((512, 512), 64, torch.float16, CUDA, backend="torch").piece
    assert 1 <= large < 8 and small >= 64
    workspace = 2 * large * (2 * 8192 * 28672 + 4 * 8192**2)
    assert workspace <= 2**32


@pytest.mark.parametrize("backend", ["triton", "split"])
def test_an_explicit_back_end_that_cannot_run_is_an_error(backend):
    device = CPU if backend == "triton" else torch.device("meta")
    with pytest.raises(ValueError, match=rf"backend='{backend}' cannot run: .*; use backend='auto' or 'torch'"):
        orthogonalize(torch.ones(4, 4, device=device), backend=backend, dtype=torch.float32)


def test_a_given_variant_excludes_options_and_must_be_able_to_run():
    x = torch.randn(8, 16)
    with pytest.raises(ValueError, match="excludes method, restarts and backend"):
        orthogonalize(x, variant=rule((8, 16)), method="gram")
    with pytest.raises(ValueError, match="variant='gram r2 triton by1' cannot run"):
        orthogonalize(x, variant=Variant("gram", (2,), "triton", 1))


@pytest.mark.pitfall("P47")
@pytest.mark.parametrize("backend", ["torch", "split"])
def test_the_named_back_end_is_what_multiplies(backend, monkeypatch):
    products = importlib.import_module("dmuon.kernels.arithmetic")
    calls = []
    real = products._mirror
    monkeypatch.setattr(products, "_mirror", lambda result: calls.append(1) or real(result))
    x = torch.randn(3, 24, 64)
    found = orthogonalize(x, variant=Variant("gram", (2,), backend, 2))
    # r2: two XXᵀ and fourteen squares for each of three matrices.
    assert len(calls) == (3 * 16 if backend == "split" else 0)
    exact = orthogonalize(x.double(), method="standard")
    assert (found - exact).norm() / exact.norm() < 5e-5


@pytest.mark.parametrize("shape", [(3, 40, 40), (3, 40, 100), (3, 100, 40), (1, 16, 48)])
@pytest.mark.parametrize("backend", ["torch", "split"])
@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("piece", [1, 2, 8])
def test_all_variants_compute_the_same(shape, backend, method, piece):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    kept = x.clone()
    exact = orthogonalize(x.double(), method="standard", backend="torch")
    found = orthogonalize(x, variant=Variant(method, (2,) if method == "gram" else (), backend, piece))
    assert (found - exact).norm() / exact.norm() < 5e-5
    assert torch.equal(x, kept)


def test_a_given_variant_is_refused_where_its_restarts_are_not_safe():
    x, given = torch.randn(64, 256), Variant("gram", (2,), "split", 3)
    assert torch.equal(orthogonalize(x, variant=given), orthogonalize(x, method="gram", backend="split"))
    with pytest.raises(ValueError, match="is unsafe for these coefficients"):
        orthogonalize(x, variant=given, dtype=torch.float16, coefficients=((8.0, -20.0, 13.0),) * 5)
    with pytest.raises(ValueError, match="must be step indices from 1 to 1"):
        orthogonalize(x, variant=given, steps=2)


@pytest.mark.parametrize(("k", "replay"), [(1, True), (8, False)])
def test_a_step_replays_what_is_small_on_cuda_and_nothing_else(ampere, k, replay):
    shape = (512, 2048)
    found = step_variant(shape, k, POLAR, torch.float16, CUDA)
    assert found == replace(rule(shape, k, torch.float16, CUDA), replay=replay)
    assert step_variant(shape, k, POLAR, torch.float32, CPU) == rule(shape, k)
