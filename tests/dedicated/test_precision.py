"""Low precision in forward and communication; fp32 in masters, momentum, gradients and updates."""

from __future__ import annotations

import copy

import pytest
import torch
from harness.assertions import assert_equal_weights, relative_errors
from harness.dedicated_toy import dedicate
from harness.dtensors import local_tensor
from harness.network import full_state, is_matrix, loss_of, shard
from harness.on_ranks import on_ranks
from harness.oracle import Reference
from harness.topologies import lay
from harness.toy import batch, build, train
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

import dmuon
from dmuon.dedicated.owned_tensor import OwnedTensor

BF16 = torch.bfloat16
OTHER = {None: BF16, BF16: torch.float32}  # than a policy's dtype of reductions


def only_matrices(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t for n, t in weights.items() if is_matrix(n)}


# -- a mixed-precision policy --------------------------------------------------------------------------------------


def mixed_run(
    world: int, reduce_dtype: torch.dtype | None, keep: bool
) -> tuple[dict[str, Tensor], set[torch.dtype], set[torch.dtype]]:
    """Weights after a step, and the dtypes of weights in forward and of everything at rest."""
    model = build()
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype)
    laid = lay({2: "1d", 3: "1d-3"}[world], model, keep=keep, mp_policy=policy)
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
@pytest.mark.parametrize(("world", "keep"), [(2, True), (3, False)])
@on_ranks()
def test_first_bf16_step_equals_emulation(rank: int, world: int, keep: bool) -> None:
    """Same roundings in the same places: only the order of an fp32 sum may differ."""
    weights, inside, at_rest = mixed_run(world, torch.float32, keep)
    assert inside == {BF16} and at_rest == {torch.float32}
    assert_equal_weights(weights, emulated(world))


@pytest.mark.parametrize("reduce_dtype", [None, BF16])
@on_ranks(2)
def test_owned_gradients_are_reduced_in_fp32_unless_the_policy_says_otherwise(
    rank: int, world: int, reduce_dtype: torch.dtype | None
) -> None:
    """FSDP2's default is ``param_dtype``, so only the matrices are compared."""
    start = build().state_dict()
    weights, _, at_rest = mixed_run(world, reduce_dtype, False)
    assert at_rest == {torch.float32}
    found, expected, other = (
        only_matrices({n: t - start[n] for n, t in of_run.items()})
        for of_run in (weights, emulated(world, reduce_dtype or torch.float32), emulated(world, OTHER[reduce_dtype]))
    )
    assert_equal_weights(found, expected, 1e-4)
    assert max(relative_errors(found, other).values()) > 1e-3, "reduce_dtype must change something"


@on_ranks(2)
def test_micro_batches_inside_no_sync_are_added_up_in_fp32(rank: int, world: int) -> None:
    """As those outside of it are: by bf16 the last of many would be rounded off."""
    norms = []
    for synchronizes in (True, False):
        laid = lay("1d", build(), mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
        for step in range(16):
            dmuon.set_requires_gradient_sync(laid.model, synchronizes or step == 15)
            laid.backward(step % 4)
        params = sorted(dmuon.owned_parameters(laid.model), key=lambda param: param.fqn)
        norms.append(torch.stack([param.grad.norm() for param in params]))
    torch.testing.assert_close(norms[1], norms[0], rtol=1e-4, atol=0.0)


# -- a model in bf16 -----------------------------------------------------------------------------------------------

TINY = 1e-5


@pytest.mark.pitfall("P42")
@on_ranks(2)
def test_fp32_masters_accumulate_updates_that_bf16_loses(rank: int, world: int) -> None:
    """Every element moves by about 1e-6 a step; half a unit in the last place of bf16 is 4e-4 at 0.2."""
    steps = 20
    start = only_matrices(build().to(BF16).state_dict())
    model = dedicate(build().to(BF16))
    optimizer = dmuon.Muon(model, lr=TINY, weight_decay=0.0, ns_coefficients="classic", adamw_lr=0.0)
    inside: set[torch.dtype] = set()
    model.blocks[0].mix.register_forward_pre_hook(lambda m, _: inside.add(m.weight.dtype))
    train(model, optimizer, range(steps), rank, world)
    assert inside == {BF16}

    masters = build().to(BF16).float()
    reference = Reference(masters, lr=TINY, adamw_lr=0.0, decay=0.0)
    for step in range(steps):
        low = copy.deepcopy(masters).to(BF16)
        low.zero_grad()
        for share in range(2):
            (loss_of(low, *shard(batch(step), share, 2)) / 2).backward()
        for param, half in zip(masters.parameters(), low.parameters(), strict=True):
            param.grad = half.grad.float()  # type: ignore[union-attr]
        reference.step()
    weights = only_matrices(full_state(model))
    expected = {n: t - start[n].float() for n, t in only_matrices(masters.state_dict()).items()}
    found = {n: t - start[n].float() for n, t in weights.items()}
    for name, moved in found.items():
        assert weights[name].dtype == torch.float32
        # Aligned updates add up to lr · 0.2 √max(m, n) per singular direction and step.
        assert float((moved != 0).float().mean()) == 1.0, name
    assert max(relative_errors(found, expected).values()) < 5e-2  # gradients are added up in bf16 by the emulation
