"""What is frozen has the route of its place: unfreezing is all that it takes to train it, whoever shards the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
from harness.assertions import about, assert_equal_weights
from harness.network import Block, Network, full_state, is_matrix, loss_of, shard, shard_blocks
from harness.on_ranks import assert_same_over_ranks, on_ranks, slowly
from harness.oracle import Reference
from harness.topologies import Laid, lay
from harness.toy import DECAY, LR, OPTIONS, batch, build, take_steps, train
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import dmuon

FROZEN: dict[str, Callable[[str], bool]] = {
    "the first block": lambda name: name.startswith("blocks.0"),
    "everything": lambda name: True,
}
BEFORE, AFTER = range(1), range(1, 3)  # steps


def freeze(model: nn.Module, frozen: Callable[[str], bool]) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_(not frozen(name))


def train_and_thaw(
    model: nn.Module, optimizer: Any, loss: Callable[[int], Tensor], thawed: Callable[[], Any] = lambda: None
) -> None:
    if any(p.requires_grad for p in model.parameters()):
        take_steps(optimizer, loss, BEFORE)
    model.requires_grad_(True)
    thawed()
    take_steps(optimizer, loss, AFTER)


def reference(frozen: Callable[[str], bool]) -> dict[str, Tensor]:
    model = build()
    optimizer = Reference(model)
    freeze(model, frozen)
    train_and_thaw(model, optimizer, lambda step: loss_of(model, *batch(step)))
    return dict(model.state_dict())


def wrap_again(laid: Laid) -> None:
    """DistributedDataParallel averages what was trained when it was made."""
    if isinstance(laid.model, DistributedDataParallel):
        laid.model = laid.network
        laid.model = DistributedDataParallel(laid.network)


@pytest.mark.pitfall("P87", "P19")
@pytest.mark.parametrize("layout", ["fsdp2-2", "1d-two-lines", *slowly("ddp")])
@on_ranks(2, timeout=180.0)
def test_what_is_unfrozen_trains_as_in_one_process(rank: int, world: int, layout: str) -> None:
    for what, frozen in FROZEN.items():
        if layout == "ddp" and what == "everything":
            continue  # torch refuses it
        with about(f"{what} in {layout}"):
            model = build()
            freeze(model, frozen)
            laid = lay(layout, model)
            optimizer = laid.optimizer()
            names = {id(p): n for n, p in laid.network.named_parameters()}
            taken = {names[id(p)] for g in optimizer.param_groups if g["use_muon"] for p in g["params"]}
            assert taken == {n for n in names.values() if is_matrix(n)}, "by place"
            assert {names[id(p)] for p in optimizer.state} == {n for n in names.values() if not frozen(n)}
            train_and_thaw(laid.network, optimizer, laid.loss, partial(wrap_again, laid))
            weights = full_state(laid.network)
            assert_equal_weights(weights, reference(frozen))
            assert_same_over_ranks(weights)
            table = dmuon.explain(laid.network, optimizer)
            assert "frozen" not in table and "put there by" not in table


@pytest.mark.pitfall("P87", "P05")
@pytest.mark.parametrize("swapped", [False, True])
def test_a_frozen_matrix_that_cannot_train_is_refused_by_name_before_anything_changes(swapped: bool) -> None:
    """Also behind a move of the model, as torch moves DTensors."""
    model = build()
    for block in model.blocks:
        block.qkv = nn.Linear(13, 39, bias=False).requires_grad_(False)
    optimizer = dmuon.Muon(model, **OPTIONS)
    train(model, optimizer, BEFORE)
    for block in model.blocks if swapped else ():
        torch.utils.swap_tensors(block.qkv.weight, nn.Parameter(block.qkv.weight.detach().clone()))
    model.requires_grad_(True)
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):
        with pytest.raises(ValueError, match=r"'blocks\.0\.qkv\.weight' .* fused .*select="):
            train(model, optimizer, [2])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for block in model.blocks:
        block.qkv.requires_grad_(False)
    train(model, optimizer, [2])


# -- models without a matrix for Muon ----------------------------------------------------------------------------


def stage_of(blocks: bool) -> Network:
    """As a stage of a pipeline may be: without blocks, or with some that nobody trains."""
    model = build(layers=3 if blocks else 0)
    model.blocks.requires_grad_(False)
    return model


def train_stage(model: nn.Module, optimizer: Any, rank: int = 0, world: int = 1) -> None:
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, *shard(batch(step), rank, world)).backward()
        dmuon.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()


def laid_stage(kind: str, blocks: bool, world: int) -> nn.Module:
    stage, mesh = stage_of(blocks), init_device_mesh("cpu", (world,))
    if kind == "ddp":
        return DistributedDataParallel(stage)
    plan = dmuon.dedicate_params(stage, mesh)
    assert plan.owners == {} and "0 matrices" in plan.summary() and plan.report()
    shard_blocks(stage, mesh, dmuon.fully_shard)
    return stage


@pytest.mark.pitfall("P90", "P87")
@pytest.mark.parametrize("kind", ["dedicated, fsdp", "ddp"])
@on_ranks(2, timeout=120.0)
def test_a_stage_without_a_matrix_that_trains_is_adamw_s(rank: int, world: int, kind: str) -> None:
    for blocks in (False, True):
        expected = stage_of(blocks)
        trained = [p for p in expected.parameters() if p.requires_grad]
        by_adamw = [
            {"params": [p for p in trained if p.ndim > 1]},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        train_stage(expected, torch.optim.AdamW(by_adamw, lr=LR, betas=(0.9, 0.95), weight_decay=DECAY))
        stage = laid_stage(kind, blocks, world)
        optimizer = dmuon.Muon(stage, **OPTIONS)
        train_stage(stage, optimizer, rank, world)
        inner = stage.module if isinstance(stage, DistributedDataParallel) else stage
        weights = full_state(inner)
        assert_equal_weights(weights, dict(expected.state_dict()))
        assert_same_over_ranks(weights)
        state = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(state)
        assert "Muon: 0 matrices" in dmuon.explain(stage, optimizer)


# -- bare matrices -----------------------------------------------------------------------------------------------


class Bare(Block):
    """Its matrices are parameters of its own, two of them in a bank whose name looks fused."""

    def __init__(self, size: Any) -> None:
        super().__init__(size)
        self.qkvo_w = nn.Parameter(torch.stack([self.mix.weight.detach(), self.mix.weight.detach().T]))
        self.c_fc = nn.Parameter(self.up.weight.detach().clone())
        self.c_proj = nn.Parameter(self.down.weight.detach().clone())
        del self.mix, self.up, self.down

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = torch.nn.functional.gelu(y @ self.qkvo_w[0].T @ self.c_fc.T) @ self.c_proj.T
        return x + y + y @ self.qkvo_w[1].T


@pytest.mark.pitfall("P87", "P06")
@on_ranks(2, timeout=120.0)
def test_bare_matrices_train_alike_by_line_by_groups_and_where_they_are_sharded(rank: int, world: int) -> None:
    model = build(block=Bare)
    for use in (lambda: dmuon.Muon(model), lambda: dmuon.explain(model)):
        with pytest.raises(ValueError, match=r"what is hidden are 9 bare parameters .*'blocks.0.qkvo_w'") as caught:
            use()
    select = eval(str(caught.value).partition("select=")[2])
    optimizer = dmuon.Muon(model, select=select, **OPTIONS)
    train(model, optimizer, range(3))
    assert optimizer.last_step.ns_matrices == 3 * 4
    expected = dict(model.state_dict())

    by_groups = build(block=Bare)
    hidden = [p for p in by_groups.blocks.parameters() if p.ndim > 1]
    ids = set(map(id, hidden))
    rest = [p for p in by_groups.parameters() if id(p) not in ids]
    groups = [
        {"params": hidden, "use_muon": True},
        {"params": [p for p in rest if p.ndim > 1], "use_muon": False},
        {"params": [p for p in rest if p.ndim < 2], "use_muon": False, "weight_decay": 0.0},
    ]
    train(by_groups, dmuon.Muon(groups, **OPTIONS), range(3))
    assert_equal_weights(dict(by_groups.state_dict()), expected, 1e-6)

    mesh = init_device_mesh("cpu", (world,))
    for dedicated in (True, False):
        laid = build(block=Bare)
        if dedicated:
            plan = dmuon.dedicate_params(laid, mesh, select=select, costs="flops")
            assert len(plan.owners) == 12 and {m.block for m in plan.matrices} == {f"blocks.{i}" for i in range(3)}
        else:
            shard_blocks(laid, mesh)
        optimizer = dmuon.Muon(laid, **({} if dedicated else {"select": select}), **OPTIONS)
        train(laid, optimizer, range(3), rank, world)
        assert_equal_weights(full_state(laid), expected)
