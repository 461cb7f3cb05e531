"""Things that users do to gradients, momentum and modules, which must count as in a single process."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from harness.assertions import assert_equal_weights
from harness.oracle import Reference
from harness.pool import RankPool
from harness.topologies import LAYOUTS, lay
from harness.toy import OPTIONS, SIZE, batch, build
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import dmuon
from dmuon.check.model import Network, loss_of, shard
from dmuon.check.topologies import full_state


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.state_dict().items()}


# -- gradients that wait -------------------------------------------------------------------------------------------


def drop_by_zeroing(_rank: int, _world: int) -> dict[str, Tensor]:
    laid = lay("1d-two-lines", build())
    optimizer = dmuon.Muon(laid.model, **OPTIONS)
    for step in range(2):
        with dmuon.no_sync(laid.model):
            loss_of(laid.model, *laid.mine(batch(50 + step))).backward()
        laid.model.zero_grad(set_to_none=False)
        laid.loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_state(laid.model)


@pytest.mark.pitfall("P16")
def test_gradients_that_wait_can_be_dropped_by_zeroing(ranks: RankPool) -> None:
    model = build()
    optimizer = Reference(model)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, *batch(step)).backward()
        optimizer.step()
    for found in ranks(2, drop_by_zeroing):
        assert_equal_weights(found, weights(model))


class SkipsABlock(Network):
    skip = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            if not (self.skip and i == 1):
                x = block(x)
        return self.head(self.norm(x))


def layer_drop(_rank: int, _world: int, name: str, sync: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    laid = lay(name, SkipsABlock(SIZE))
    optimizer = dmuon.Muon(laid.model, **OPTIONS)
    for step in range(2):
        for i, part in enumerate((batch(step), batch(20 + step))):
            last = i == 1
            dmuon.set_requires_gradient_sync(laid.model, last or sync != "no_sync")
            dmuon.set_requires_all_reduce(laid.model, last or sync != "no_all_reduce")
            laid.model.skip = last
            loss_of(laid.model, *laid.mine(part)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_state(laid.model)


@pytest.mark.pitfall("P12", "P19")
@pytest.mark.parametrize(
    ("name", "sync"), [("1d-two-lines", "no_sync"), ("hsdp-two-lines", "no_all_reduce"), ("ddp-2", "no_sync")]
)
def test_a_block_that_the_last_micro_batch_skips_keeps_its_gradient(ranks: RankPool, name: str, sync: str) -> None:
    torch.manual_seed(0)
    model = SkipsABlock(SIZE)
    optimizer = Reference(model)
    for step in range(2):
        optimizer.zero_grad()
        for i, part in enumerate((batch(step), batch(20 + step))):
            model.skip = i == 1
            loss_of(model, *part).backward()
        optimizer.step()
    for found in ranks(LAYOUTS[name].world, layer_drop, name, sync):
        assert_equal_weights(found, weights(model))


def gradient_storage(_rank: int, _world: int, name: str) -> tuple[int, int]:
    laid = lay(name, build())
    laid.loss(0).backward()
    grads = [p.grad._local_tensor for p in dmuon.owned_parameters(laid.model)]
    kept = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in grads if g.numel()}
    return sum(kept.values()), sum(-(-g.nbytes // 256) * 256 for g in grads)


@pytest.mark.pitfall("P59")
@pytest.mark.parametrize("name", ["1d-two-lines", "hsdp", "ddp-4", "tp"])
def test_gradients_keep_no_memory_of_what_others_own(ranks: RankPool, name: str) -> None:
    for kept, owned in ranks(LAYOUTS[name].world, gradient_storage, name):
        assert kept <= owned, f"{kept} bytes of storage for {owned} bytes of gradients"


# -- momentum ------------------------------------------------------------------------------------------------------


def reset_momentum(_rank: int, _world: int, how: str) -> dict[str, Tensor]:
    laid = lay("1d-two-lines", build())
    optimizer = dmuon.Muon(laid.model, **OPTIONS)
    for step in range(3):
        if step == 2:
            for param in dmuon.owned_parameters(laid.model):
                state = optimizer.state[param]
                if how == "replaced":
                    state["momentum_buffer"] = torch.zeros_like(state["momentum_buffer"])
                elif how == "cleared":
                    state.clear()
                else:
                    state["momentum_buffer"].zero_()
        laid.loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_state(laid.model)


@pytest.mark.pitfall("P10")
@pytest.mark.parametrize("how", ["replaced", "cleared", "zeroed"])
def test_momentum_can_be_reset(ranks: RankPool, how: str) -> None:
    model = build()
    optimizer = Reference(model)
    for step in range(3):
        if step == 2:
            for state in optimizer.muon.state.values():
                state["momentum_buffer"].zero_()
        optimizer.zero_grad()
        loss_of(model, *batch(step)).backward()
        optimizer.step()
    for found in ranks(2, reset_momentum, how):
        assert_equal_weights(found, weights(model))


# -- several dedicated modules -------------------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = build(0), build(1)


def two_models(rank: int, world: int) -> tuple[dict[str, Tensor], list[str]]:
    pair = Pair()
    mesh = init_device_mesh("cpu", (world,))
    for model in (pair.a, pair.b):
        dmuon.dedicate_params(model, mesh, costs="flops")
    owned = dmuon.owned_parameters(pair)
    rest = [p for p in pair.parameters() if p not in owned]
    muon = dmuon.Muon(owned, **OPTIONS)
    adamw = torch.optim.AdamW(rest, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(3):
        for model in (pair.a, pair.b):
            loss_of(model, *shard(batch(step), rank, world)).backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
    muon.state_dict()  # collective, in one order
    return full_state(pair), [p.fqn for p in muon.param_groups[0]["params"]]


def test_several_dedicated_models_share_an_optimizer(ranks: RankPool) -> None:
    pair = Pair()
    muon = dmuon.Muon([p for n, p in pair.named_parameters() if ".blocks." in n and p.ndim == 2], **OPTIONS)
    matrices = {id(p) for group in muon.param_groups for p in group["params"]}
    rest = [p for p in pair.parameters() if id(p) not in matrices]
    adamw = torch.optim.AdamW(rest, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(3):
        for model in (pair.a, pair.b):
            loss_of(model, *batch(step)).backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
    results = ranks(2, two_models)
    for found, order in results:
        assert_equal_weights(found, weights(pair))
        assert order == results[0][1]
