"""Stock checkpointing of dedicated models: what a state dict holds, what a load brings back, and what it refuses."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from harness.assertions import about, assert_equal_weights, assert_same_tensors
from harness.checkpoints import SAVED, TOTAL, save, start
from harness.dedicated_toy import dedicated
from harness.dtensors import local_tensor
from harness.network import Block, Network, Size, full_state, is_matrix, loss_of, shard
from harness.on_ranks import on_ranks
from harness.oracle import reference_weights
from harness.pool import RankPool
from harness.topologies import lay
from harness.toy import LR, OPTIONS, batch, build
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

import dmuon
from dmuon.dedicated.dedication import dedications
from dmuon.dedicated.owned_tensor import OwnedTensor


class BufferedBlock(Block):
    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.register_buffer("cache", torch.zeros(2), persistent=False)


# -- resume; on other layouts in tests/parity/test_checkpoints.py --------------------------------------------------


@pytest.mark.pitfall("P23")
@on_ranks(2)
def test_muon_beside_another_optimizer_resumes(rank: int, world: int, tmp_path: Path) -> None:
    def fresh(seed: int) -> tuple[Network, list[torch.optim.Optimizer]]:
        model = lay("1d", build(seed + rank)).network
        owned = dmuon.owned_parameters(model)
        rest = [p for p in model.parameters() if p not in owned]
        groups = [
            {"params": [p for p in rest if p.ndim >= 2], "weight_decay": OPTIONS["weight_decay"]},
            {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
        ]
        adamw = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
        return model, [dmuon.Muon(owned, **OPTIONS), adamw]

    def steps(model: Network, optimizers: list[torch.optim.Optimizer], which: range) -> None:
        for step in which:
            model.zero_grad()
            loss_of(model, *shard(batch(step), rank, world)).backward()
            for optimizer in optimizers:
                optimizer.step()

    model, optimizers = fresh(0)
    steps(model, optimizers, range(SAVED))
    weights, state = get_state_dict(model, optimizers)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
    model, optimizers = fresh(50)
    weights, state = get_state_dict(model, optimizers)
    loaded = {"model": weights, "optimizer": state}
    dcp.load(loaded, checkpoint_id=tmp_path)
    set_state_dict(model, optimizers, model_state_dict=weights, optim_state_dict=loaded["optimizer"])
    steps(model, optimizers, range(SAVED, TOTAL))
    assert_equal_weights(full_state(model), reference_weights(TOTAL))


# -- what a state dict holds ---------------------------------------------------------------------------------------


def contents(rank: int, world: int, name: str, keep: bool) -> dict[str, Any]:
    run = start(name, keep=keep, model=build(rank, tied=True, block=BufferedBlock))  # rank 0's weights count
    model: Any = run.model
    optimizer = run.optimizer
    initial = full_state(model)
    run.train(range(1))  # buffers are filled ahead, or kept
    weights, state = model.state_dict(), optimizer.state_dict()
    _, named = get_state_dict(model, optimizer)
    part = model.blocks[1].state_dict(prefix="part.")
    for tensor in tree_leaves([weights, state, named, part]):
        if isinstance(tensor, DTensor):
            tensor.full_tensor()
            if isinstance(tensor, OwnedTensor):
                assert local_tensor(tensor).shape == (tensor.shape if tensor.owner == rank else (0, tensor.shape[1]))
    parameters = dict(model.named_parameters())
    return {
        "initial": initial,
        "shapes": {n: t.shape for n, t in weights.items()},
        "part": sorted(part),
        "alias": weights["head.weight"] is weights["embed.weight"]
        or torch.equal(local_tensor(weights["head.weight"]), local_tensor(weights["embed.weight"])),
        "momentum": {n: v["momentum_buffer"].shape for n, v in named["state"].items() if "momentum_buffer" in v},
        "owned": {n for n, p in parameters.items() if isinstance(p, OwnedTensor)},
        "order": list(state["state"]),
        "named order": list(named["state"]),
    }


@pytest.mark.pitfall("P27")
@pytest.mark.parametrize(
    ("name", "keep"), [("1d-3", False), ("1d-3-two-lines", True), pytest.param("1d-3", True, marks=pytest.mark.slow)]
)
def test_state_dict_is_what_a_plain_model_has(ranks: RankPool, name: str, keep: bool) -> None:
    plain = build(tied=True, block=BufferedBlock)
    expected = plain.state_dict()
    found = ranks(3, contents, name, keep)
    for result in found:
        assert result["shapes"] == {n: t.shape for n, t in expected.items()}
        assert result["part"] == sorted("part." + n for n in plain.blocks[1].state_dict())
        assert result["owned"] == {n for n in expected if is_matrix(n)}
        assert result["momentum"] == {n: t.shape for n, t in expected.items() if is_matrix(n)}
        assert result["alias"]
        assert_same_tensors(result["initial"], expected)
        # Whoever gathers a state dict walks it in its own order, collectively.
        assert result["order"] == found[0]["order"] == sorted(result["order"])
        assert result["named order"] == found[0]["named order"]


# -- plain checkpoints in and out ----------------------------------------------------------------------------------


def save_trained(_rank: int, _world: int, path: str) -> None:
    run = start("1d")
    run.train(range(SAVED))
    save(run, path)


@pytest.mark.pitfall("P33")
def test_checkpoint_converts_to_one_plain_file(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, save_trained, str(tmp_path / "sharded"))
    dcp_to_torch_save(tmp_path / "sharded", tmp_path / "plain.pt")
    state = torch.load(tmp_path / "plain.pt", weights_only=False)
    model = build(seed=3)
    model.load_state_dict(state["model"])
    assert_equal_weights(dict(model.state_dict()), reference_weights(SAVED))


# -- loading -------------------------------------------------------------------------------------------------------


def reload_momentum(_rank: int, _world: int, dtype: torch.dtype) -> float:
    run = start("1d")
    run.train(range(2))
    before = run.momenta()
    state = run.optimizer.state_dict()
    for values in state["state"].values():
        if "momentum_buffer" in values:
            values["momentum_buffer"] = values["momentum_buffer"].to(dtype)
    run.optimizer.load_state_dict(state)
    after = run.momenta()
    assert all(momentum.dtype == torch.float32 for momentum in after.values())
    assert_same_tensors(after, {name: momentum.to(dtype).float() for name, momentum in before.items()})
    run.train(range(2, 3))
    assert all(m.dtype == torch.float32 and m.isfinite().all() for m in run.momenta().values())
    return max(float((after[n] - m).abs().max()) for n, m in before.items() if m.numel())


@pytest.mark.pitfall("P23", "P32")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_momentum_is_fp32_whatever_dtype_was_saved(ranks: RankPool, dtype: torch.dtype) -> None:
    worst = max(ranks(2, reload_momentum, dtype))
    assert (worst == 0.0) == (dtype == torch.float64)


@on_ranks(3)
def test_copies_of_resting_parameters_load(rank: int, world: int) -> None:
    model, other = (lay("1d-3-two-lines", build(seed + rank)).model for seed in (2, 7))
    expected = full_state(other)
    kept = {n: p.detach().clone() for n, p in other.named_parameters()}  # what an average of weights would hold
    model.load_state_dict(kept)
    assert_same_tensors(full_state(model), expected)


# -- refusals; of weights in test_checkpoint_topologies.py ---------------------------------------------------------

FAULTS: dict[str, tuple[Any, str]] = {  # what a fault makes of the state dict, and what is said
    "fewer": (lambda state: state["param_groups"][0]["params"].pop(), "parameters"),
    "moved": (
        lambda state: state["param_groups"][1]["params"].insert(0, state["param_groups"][0]["params"].pop()),
        "group 0",  # the same count in all
    ),
    "shape": (lambda state: state["state"][0].update(momentum_buffer=torch.zeros(3, 3)), r"blocks\.0\.mix\.weight"),
    "route": (lambda state: state["param_groups"][0].update(use_muon=False), "use_muon"),
}


@pytest.mark.pitfall("P31", "P48")
@pytest.mark.parametrize("everywhere", [True, False], ids=["all-ranks", "one-rank"])
@on_ranks(2)
def test_faulty_optimizer_state_raises_on_every_rank(rank: int, world: int, everywhere: bool) -> None:
    optimizer = dmuon.Muon(lay("1d-two-lines", build()).model, **OPTIONS)
    for fault, (change, says) in FAULTS.items():
        state = copy.deepcopy(optimizer.state_dict())
        if everywhere or rank == 1:
            change(state)
        with about(fault), pytest.raises(ValueError, match=says):
            optimizer.load_state_dict(state)


# -- what a load compares between ranks, and what a state dict keeps in memory -----------------------------------------


@on_ranks(2)
def test_each_saved_shard_has_memory_of_its_own(rank: int, world: int) -> None:
    run = start("1d")
    run.train(range(2))
    weights, states = run.model.state_dict(), run.optimizer.state_dict()["state"].values()
    owned = [weights[matrix.fqn] for matrix in dedications(run.model)[0].runtime.matrices()]
    for saved in [*owned, *(state["momentum_buffer"] for state in states if len(state) == 1)]:
        local = local_tensor(saved)
        assert local.untyped_storage().nbytes() == local.numel() * local.element_size()


@on_ranks(2)
def test_what_is_shown_of_a_loaded_momentum_is_what_was_shown(rank: int, world: int) -> None:
    run, other = start("1d"), start("1d", seed=rank + 7)
    run.train(range(2))
    other.train(range(1))
    shown = {id(p): state["momentum_buffer"] for p, state in other.optimizer.state.items() if len(state) == 1}
    other.optimizer.load_state_dict(run.optimizer.state_dict())
    assert shown and all(
        other.optimizer.state[p]["momentum_buffer"] is shown[id(p)] for p in other.optimizer.state if id(p) in shown
    )
    assert_same_tensors(other.momenta(), run.momenta())


@pytest.mark.pitfall("P80")
@pytest.mark.parametrize("fault", ["size", "lack"])
@on_ranks(2)
def test_keys_too_many_do_not_hide_a_fault_of_another_rank(rank: int, world: int, fault: str) -> None:
    """Of what differs a few are told; what decides who raises is among them, or one rank would wait for the others."""
    run = start("1d")
    weights = run.model.state_dict()
    if rank == 0:
        weights |= {f"surplus.{i}": torch.zeros(1) for i in range(9)}
    elif fault == "size":
        weights["embed.weight"] = torch.zeros(2, 2)
    else:
        del weights["embed.weight"]
    before = full_state(run.model)
    told = {"size": r"a tensor of shape \(2, 2\) on rank 1", "lack": "missing on rank 1"}
    with pytest.raises(RuntimeError, match=rf"embed.weight is a \w+ of shape .* on rank 0 and {told[fault]}"):
        run.model.load_state_dict(weights, strict=False)
    assert_same_tensors(full_state(run.model), before)


@on_ranks(2)
def test_assign_is_refused_on_all_ranks(rank: int, world: int) -> None:
    """Of a model, and of a part of it on one rank alone."""
    run = start("1d")
    for part, assign in ((run.model, True), (run.model.blocks[0], rank == 1)):
        with pytest.raises(ValueError, match="assign=False" if part is run.model else "assign=True"):
            part.load_state_dict(part.state_dict(), assign=assign)


@on_ranks(2)
def test_a_part_of_a_model_is_saved_by_itself_after_a_call_that_failed(rank: int, world: int) -> None:
    """What the failed call has brought is of weights that have changed since."""
    run = start("1d")
    stop = run.model.register_state_dict_post_hook(_fail)
    with pytest.raises(ZeroDivisionError):
        run.model.state_dict()
    stop.remove()
    run.train(range(2))
    block = {name: tensor.full_tensor() for name, tensor in run.model.blocks[0].state_dict().items()}
    expected = {n.removeprefix("blocks.0."): t for n, t in full_state(run.model).items() if n.startswith("blocks.0.")}
    assert_same_tensors(block, expected)


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


# -- even shards that checkpointing writes into what to_local() of an owned parameter gives ----------------------------


def owned(model: nn.Module) -> dict[str, Tensor]:
    found = dmuon.owned_parameters(model)
    return {name: param for name, param in model.named_parameters() if param in found}


@on_ranks(2)
def test_written_even_shards_become_the_weights_without_gathering_objects(rank: int, world: int) -> None:
    model = dedicated()
    torch.manual_seed(7)
    with mock.patch.object(dist, "all_gather_object", side_effect=AssertionError("an object for each matrix")):
        expected = {}
        for name, param in owned(model).items():
            expected[name] = torch.randn(param.shape)
            param.to_local().copy_(expected[name].chunk(world)[rank])
        assert len(expected) == 9
    with dmuon.summon_full_params(model, writeback=False):
        for name, param in model.named_parameters():
            if name in expected:
                assert torch.equal(param, expected[name])


@on_ranks(2)
def test_an_even_shard_of_another_shape_is_refused_on_all_ranks(rank: int, world: int) -> None:
    model = dedicated()
    name, param = next(iter(owned(model).items()))
    shard = torch.zeros(param.shape).chunk(world)[rank]
    with pytest.raises(ValueError, match=f"{name}: some rank writes an even shard of another shape"):
        param.to_local().copy_(shard[1:] if rank else shard)
    param.to_local().copy_(shard)
    with dmuon.summon_full_params(model, writeback=False):
        assert not dict(model.named_parameters())[name].any()


@on_ranks(2)
def test_a_write_that_one_rank_cannot_make_is_refused_on_all_ranks(rank: int, world: int) -> None:
    """Weights that are kept are not gathered for a second forward, so that one rank can be inside one alone."""
    model = dedicated(reshard_after_forward=False)
    name, param = next(iter(owned(model).items()))
    shard = torch.zeros(param.shape).chunk(world)[rank]
    x, _ = batch(0)
    with torch.no_grad():
        model(x)

    def write(*_: object) -> None:
        param.to_local().copy_(shard)

    before = full_state(model)
    hook = model.get_submodule(name.rpartition(".")[0]).register_forward_hook(write)
    told = r"a write to to_local\(\) while block" if rank else "some rank .* cannot write one now"
    with torch.no_grad(), pytest.raises((RuntimeError, ValueError), match=told):
        model(x) if rank else write()
    hook.remove()
    assert_equal_weights(full_state(model), before)
