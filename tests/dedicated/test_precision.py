"""Low precision in forward and communication; fp32 in masters, momentum, gradients and updates."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn as nn
from harness.assertions import assert_equal_weights, relative_errors
from harness.dtensors import local_tensor
from harness.network import full_state, is_matrix, loss_of, shard
from harness.on_ranks import on_ranks
from harness.oracle import Reference, reference_weights
from harness.topologies import lay
from harness.toy import OPTIONS, batch, build, train
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import dmuon
from dmuon.dedicated.owned_tensor import OwnedTensor

BF16 = torch.bfloat16


def only_matrices(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t for n, t in weights.items() if is_matrix(n)}


# -- a mixed-precision policy --------------------------------------------------------------------------------------


def mixed_run(
    world: int, reduce_dtype: torch.dtype | None, keep: bool
) -> tuple[dict[str, Tensor], set[torch.dtype], set[torch.dtype]]:
    """Weights after a step, and the dtypes of weights in forward and of everything at rest."""
    model = build()
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype)
    laid = lay({1: "1d-1", 2: "1d", 3: "1d-3"}[world], model, keep=keep, mp_policy=policy)
    optimizer = laid.optimizer()
    inside: set[torch.dtype] = set()
    for block in model.blocks:
        block.up.register_forward_pre_hook(lambda m, _: inside.add(m.weight.dtype))
    at_rest: set[torch.dtype] = set()
    laid.backward(0)
    for param in model.parameters():
        if isinstance(param, OwnedTensor):
            at_rest |= {param.dtype, local_tensor(param).dtype, param.grad.dtype, local_tensor(param.grad).dtype}
    optimizer.step()
    at_rest |= {local_tensor(optimizer.state[p]["momentum_buffer"]).dtype for p in dmuon.owned_parameters(model)}
    return full_state(model), inside, at_rest


def emulated(shares: int, reduce_dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """One process: forward and backward on a bf16 copy of fp32 masters, per rank's share of the batch."""
    masters = build()
    optimizer = Reference(masters)
    grads: list[list[Tensor]] = []
    for share in range(shares):
        low = copy.deepcopy(masters).to(BF16)
        loss_of(low, *shard(batch(0), share, shares)).backward()
        grads.append([p.grad.to(reduce_dtype) for p in low.parameters()])  # type: ignore[union-attr]
    for param, *parts in zip(masters.parameters(), *grads, strict=True):
        param.grad = (sum(parts[1:], parts[0]) / shares).float()
    optimizer.step()
    return dict(masters.state_dict())


@pytest.mark.pitfall("P23", "P42")
@pytest.mark.parametrize(("world", "keep"), [(1, False), (2, False), (2, True), (3, False)])
@on_ranks()
def test_first_bf16_step_equals_emulation(rank: int, world: int, keep: bool) -> None:
    """Same roundings in the same places: only the order of an fp32 sum may differ."""
    weights, inside, at_rest = mixed_run(world, torch.float32, keep)
    assert inside == {BF16} and at_rest == {torch.float32}
    assert_equal_weights(weights, emulated(world))


@on_ranks(2)
def test_owned_gradients_are_reduced_in_fp32_by_default(rank: int, world: int) -> None:
    """FSDP2's default is ``param_dtype``, so only the matrices are compared."""
    weights, _, _ = mixed_run(world, None, False)
    assert_equal_weights(only_matrices(weights), only_matrices(emulated(world)), 1e-6)


@on_ranks(2)
def test_reduction_in_bf16_equals_emulation(rank: int, world: int) -> None:
    start = build().state_dict()
    weights, _, at_rest = mixed_run(world, BF16, False)
    assert at_rest == {torch.float32}
    found, expected, exact = (
        only_matrices({n: t - start[n] for n, t in of_run.items()})
        for of_run in (weights, emulated(world, BF16), emulated(world))
    )
    assert_equal_weights(found, expected, 1e-4)
    assert max(relative_errors(found, exact).values()) > 1e-3, "reduce_dtype must change something"


# -- a model in bf16 -----------------------------------------------------------------------------------------------

TINY = 1e-5


@pytest.mark.pitfall("P42")
@on_ranks(2)
def test_fp32_masters_accumulate_updates_that_bf16_loses(rank: int, world: int) -> None:
    """Every element moves by about 1e-6 a step; half a unit in the last place of bf16 is 4e-4 at 0.2."""
    steps = 20
    start = only_matrices(build().to(BF16).state_dict())
    model = build().to(BF16)
    dmuon.dedicate_params(model, init_device_mesh("cpu", (world,)), costs="flops")
    optimizer = dmuon.Muon(model, lr=TINY, weight_decay=0.0, ns_coefficients="classic", adamw_lr=0.0)
    inside: set[torch.dtype] = set()
    model.blocks[0].mix.register_forward_pre_hook(lambda m, _: inside.add(m.weight.dtype))
    train(model, optimizer, range(steps), rank, world)
    assert inside == {BF16}

    lost = build().to(BF16)
    matrices = [p for n, p in lost.named_parameters() if is_matrix(n)]
    stock = torch.optim.Muon(matrices, lr=TINY, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    masters = build().to(BF16).float()
    reference = Reference(masters, lr=TINY, adamw_lr=0.0, decay=0.0)
    for step in range(steps):
        lost.zero_grad()
        loss_of(lost, *batch(step)).backward()
        stock.step()
        low = copy.deepcopy(masters).to(BF16)
        low.zero_grad()
        for share in range(2):
            (loss_of(low, *shard(batch(step), share, 2)) / 2).backward()
        for param, half in zip(masters.parameters(), low.parameters(), strict=True):
            param.grad = half.grad.float()  # type: ignore[union-attr]
        reference.step()
    unmoved = sum(int((dict(lost.named_parameters())[n] == t).sum()) for n, t in start.items())
    assert unmoved > 0.9 * sum(t.numel() for t in start.values())

    weights = only_matrices(full_state(model))
    expected = {n: t - start[n].float() for n, t in only_matrices(masters.state_dict()).items()}
    found = {n: t - start[n].float() for n, t in weights.items()}
    for name, moved in found.items():
        assert weights[name].dtype == torch.float32
        # Aligned updates add up to lr · 0.2 √max(m, n) per singular direction and step.
        assert float((moved != 0).float().mean()) == 1.0, name
    assert max(relative_errors(found, expected).values()) < 5e-2  # gradients are added up in bf16 by the emulation


# -- the optimizer and what it is given ----------------------------------------------------------------------------


def alike(count: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    params = [nn.Parameter(torch.randn(6, 4, generator=generator).to(dtype)) for _ in range(count)]
    for param in params:
        param.grad = torch.randn(6, 4, generator=generator).to(dtype)
    return params


@pytest.mark.pitfall("P38")
@on_ranks(2)
def test_nan_gradient_of_one_owner_spares_every_other_matrix(rank: int, world: int) -> None:
    """One NaN in the gradient that the owner received, after the reduction."""
    model = build()
    dmuon.dedicate_params(model, init_device_mesh("cpu", (world,)), costs="flops")
    optimizer = dmuon.Muon(model, **OPTIONS)
    loss_of(model, *shard(batch(0), rank, world)).backward()
    grad = local_tensor(model.blocks[1].mix.weight.grad)
    if grad.numel():
        grad[0, 0] = math.nan
    optimizer.step()
    weights, expected = full_state(model), reference_weights(1)
    assert weights.pop("blocks.1.mix.weight").isnan().any()
    assert_equal_weights(weights, {n: expected[n] for n in weights})


@pytest.mark.pitfall("P23", "P39")
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float64], ids=str)
def test_momentum_is_fp32_or_wider_and_never_the_gradient(dtype: torch.dtype, nesterov: bool) -> None:
    params = alike(2, dtype)
    optimizer = dmuon.Muon(params, **OPTIONS, nesterov=nesterov)
    expected = [torch.zeros(6, 4, dtype=torch.float64) for _ in params]
    for step in range(3):
        for param, momentum in zip(params, expected, strict=True):
            param.grad = (param.grad * (step + 1)).to(dtype)  # type: ignore[operator]
            momentum.mul_(0.95).add_(param.grad.double(), alpha=0.05)
        before = [p.grad.clone() for p in params]  # type: ignore[union-attr]
        optimizer.step()
        assert all(torch.equal(p.grad, b) for p, b in zip(params, before, strict=True))  # type: ignore[arg-type]
    for param, momentum in zip(params, expected, strict=True):
        found = optimizer.state[param]["momentum_buffer"]
        assert found.dtype == torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(found.double(), momentum, rtol=1e-6, atol=1e-7)
