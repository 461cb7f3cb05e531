"""The Muon update of one batch: momentum, scale, weight decay; parity with torch.optim.Muon."""

from __future__ import annotations

import math

import pytest
import torch

from dmuon.kernels import (
    apply_update_,
    momentum_norms,
    momentum_update,
    normalized_momentum,
    normalized_update,
    update_scale,
)


@pytest.mark.pitfall("P39")
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 3])
def test_momentum_is_a_lerp_and_nothing_else_changes(nesterov, grad_dtype, k):
    grads = [torch.randn(4, 6).to(grad_dtype) for _ in range(k)]
    kept = [g.clone() for g in grads]
    start = torch.randn(k, 4, 6)
    momentum = start.clone()
    update = momentum_update(grads, momentum, beta=0.9, nesterov=nesterov)
    stacked = torch.stack(grads).float()
    expected = start.lerp(stacked, 1 - 0.9)
    assert torch.equal(momentum, expected)
    assert torch.equal(update, stacked.lerp(expected, 0.9) if nesterov else expected)
    assert all(torch.equal(g, k_) for g, k_ in zip(grads, kept, strict=True))
    assert update.dtype == torch.float32
    update.fill_(7)  # aliasing would reach momentum or a gradient
    assert torch.equal(momentum, expected)
    assert all(torch.equal(g, k_) for g, k_ in zip(grads, kept, strict=True))


@pytest.mark.pitfall("P23")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_momentum_is_refused(dtype):
    with pytest.raises(ValueError, match="momentum must be fp32"):
        momentum_update([torch.randn(2, 3)], torch.zeros(1, 2, 3, dtype=dtype), beta=0.9, nesterov=True)


def test_weight_decay_takes_the_base_lr():
    weight, update = torch.randn(3, 5, dtype=torch.float64), torch.randn(1, 3, 5, dtype=torch.float64)
    ours = weight.clone()
    apply_update_([ours], update, lr=0.5, weight_decay=0.1, scale=3.0)
    assert torch.allclose(ours, weight * (1 - 0.05) - 1.5 * update[0], rtol=1e-14)


@pytest.mark.pitfall("P42")
def test_bf16_parameters_and_strided_views_are_updated_in_place():
    base = torch.ones(5, 6, dtype=torch.bfloat16)
    view = base.T[1:4]
    apply_update_([view], torch.ones(1, 3, 5), lr=0.25, weight_decay=0.0, scale=1.0)
    assert torch.equal(base[:, 1:4], torch.full((5, 3), 0.75, dtype=torch.bfloat16))
    assert torch.equal(base[:, :1], torch.ones(5, 1, dtype=torch.bfloat16))


@pytest.mark.pitfall("P07")
@pytest.mark.parametrize("shape", [(64, 16), (16, 64), (32, 32)])
def test_update_scale(shape):
    m, n = shape
    assert update_scale("original", shape) == math.sqrt(max(1, m / n))
    assert update_scale("match_rms_adamw", shape) == pytest.approx(0.2 * math.sqrt(64 if m != n else 32))
    assert update_scale("spectral", shape) == math.sqrt(m / n)
    assert update_scale(lambda s: s[0] + 0.5, shape) == m + 0.5
    assert update_scale(0.3, shape) == pytest.approx(0.3 * max(shape) ** 0.5)


@pytest.mark.parametrize(
    ("fn", "shape", "message"),
    [
        ("adam", (2, 3), "adjust_lr_fn='adam' is unknown"),
        (-0.2, (2, 3), "adjust_lr_fn=-0.2 is unknown"),
        (lambda s: float("nan"), (2, 3), "returned nan"),
        ("original", (2, 3, 4), "two positive dimensions"),
    ],
)
def test_a_bad_scale_is_refused_by_name(fn, shape, message):
    with pytest.raises(ValueError, match=message):
        update_scale(fn, shape)


def test_mismatched_batches_are_refused_before_anything_changes():
    momentum = torch.ones(2, 3, 4)
    with pytest.raises(ValueError, match="gradient 1 is"):
        momentum_update([torch.ones(3, 4), torch.ones(1, 4)], momentum, beta=0.5, nesterov=True)
    with pytest.raises(ValueError, match="for 1 gradients"):
        momentum_update([torch.ones(3, 4)], momentum, beta=0.5, nesterov=True)
    assert torch.equal(momentum, torch.ones(2, 3, 4))
    weights = [torch.ones(3, 4), torch.ones(4, 3)]
    with pytest.raises(ValueError, match="parameter 1 is"):
        apply_update_(weights, torch.ones(2, 3, 4), lr=0.1, weight_decay=0.1, scale=1.0)
    with pytest.raises(ValueError, match="for 2 parameters"):
        apply_update_(weights, torch.ones(3, 3, 4), lr=0.1, weight_decay=0.1, scale=1.0)
    assert torch.equal(weights[0], torch.ones(3, 4))
    apply_update_([], torch.empty(0, 3, 4), lr=0.1, weight_decay=0.1, scale=1.0)


@pytest.mark.pitfall("P35", "P38")
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e30])
@pytest.mark.parametrize(("storage", "rounding"), [(torch.float16, 2.0**-10), (torch.bfloat16, 2.0**-7)])
@pytest.mark.parametrize("nesterov", [True, False])
def test_parts_over_the_norms_of_the_whole_are_what_the_whole_gives(nesterov, storage, rounding, scale):
    """Cut into unlike parts, squares of which are added up; zeros stay zeros, and NaN in its matrix."""
    torch.manual_seed(3)
    grads, start = torch.randn(4, 24, 20) * scale, torch.randn(4, 24, 20) * scale
    grads[2], start[2] = 0, 0
    grads[3, 20, 4] = torch.nan
    options = {"beta": 0.9, "nesterov": nesterov}
    whole = start.clone()
    expected, of_whole = normalized_momentum(list(grads), whole, storage=storage, **options)
    cuts = [slice(0, 5), slice(5, 6), slice(6, 24)]
    momenta = [start[:, cut].contiguous() for cut in cuts]
    of_parts = [[g[cut] for g in grads] for cut in cuts]
    squares = [momentum_norms(g, m, **options).square() for g, m in zip(of_parts, momenta, strict=True)]
    norms = torch.stack(squares).sum(0).sqrt()
    torch.testing.assert_close(norms, of_whole.double(), rtol=1e-6, atol=0, equal_nan=True)
    assert torch.equal(torch.cat(momenta, 1).nan_to_num(0.0), whole.nan_to_num(0.0))
    parts = [normalized_update(g, m, norms, storage=storage, **options) for g, m in zip(of_parts, momenta, strict=True)]
    found = torch.cat(parts, 1)
    assert found.dtype == storage and not found[2].any() and found[3].isnan().all()
    tiny = torch.finfo(storage).smallest_normal * rounding
    torch.testing.assert_close(found[:2].float(), expected[:2].float(), rtol=rounding, atol=2 * tiny)
