"""Stock checkpointing of dedicated models: what a state dict holds, what a load brings back, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness.assertions import about, assert_equal_weights, assert_same_tensors
from harness.checkpoints import FROM_RANK_0, FULL, SAVED, TOTAL, Run, load, save, start
from harness.dedicated_toy import dedicated
from harness.dtensors import local_tensor
from harness.network import Block, Size, full_state, is_matrix, loss_of, shard
from harness.on_ranks import of_all_ranks, on_ranks
from harness.oracle import reference_weights
from harness.topologies import lay
from harness.toy import LR, OPTIONS, batch, build
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

import dmuon
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
    def fresh(seed: int) -> Run:
        model = lay("1d", build(seed + rank)).network
        owned = dmuon.owned_parameters(model)
        rest = [p for p in model.parameters() if p not in owned]
        groups = [
            {"params": [p for p in rest if p.ndim >= 2], "weight_decay": OPTIONS["weight_decay"]},
            {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
        ]
        adamw = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
        return Run(model, [dmuon.Muon(owned, **OPTIONS), adamw], lambda part: part)  # type: ignore[arg-type]

    def steps(run: Run, which: range) -> None:
        for step in which:
            run.model.zero_grad()
            loss_of(run.model, *shard(batch(step), rank, world)).backward()
            for optimizer in run.optimizer:  # type: ignore[attr-defined]
                optimizer.step()

    run, again = fresh(0), fresh(50)
    steps(run, range(SAVED))
    save(run, str(tmp_path))
    load(again, str(tmp_path))
    steps(again, range(SAVED, TOTAL))
    assert_equal_weights(full_state(again.model), reference_weights(TOTAL))


# -- what a state dict holds ---------------------------------------------------------------------------------------


@pytest.mark.pitfall("P27")
@pytest.mark.parametrize(("name", "keep"), [("1d-3", False)])
@on_ranks(3)
def test_state_dict_is_what_a_plain_model_has(rank: int, world: int, name: str, keep: bool) -> None:
    plain = build(tied=True, block=BufferedBlock)
    expected = plain.state_dict()
    run = start(name, keep=keep, model=build(rank, tied=True, block=BufferedBlock))  # rank 0's weights count
    model: Any = run.model
    assert_same_tensors(full_state(model), expected)
    run.train(range(1))  # buffers are filled ahead, or kept
    weights, state = model.state_dict(), run.optimizer.state_dict()
    _, named = get_state_dict(model, run.optimizer)
    part = model.blocks[1].state_dict(prefix="part.")
    for tensor in tree_leaves([weights, state, named, part]):
        if isinstance(tensor, DTensor):
            tensor.full_tensor()
            if isinstance(tensor, OwnedTensor):
                local = local_tensor(tensor)
                assert local.shape == (tensor.shape if tensor.owner == rank else (0, tensor.shape[1]))
                assert local.untyped_storage().nbytes() == local.numel() * local.element_size(), "memory of its own"
    assert {n: t.shape for n, t in weights.items()} == {n: t.shape for n, t in expected.items()}
    assert sorted(part) == sorted("part." + n for n in plain.blocks[1].state_dict())
    assert torch.equal(local_tensor(weights["head.weight"]), local_tensor(weights["embed.weight"])), "tied"
    momenta = {n: v["momentum_buffer"].shape for n, v in named["state"].items() if "momentum_buffer" in v}
    assert momenta == {n: t.shape for n, t in expected.items() if is_matrix(n)}
    assert {n for n, p in model.named_parameters() if isinstance(p, OwnedTensor)} == momenta.keys()
    # Whoever gathers a state dict walks it in its own order, collectively.
    orders = of_all_ranks((list(state["state"]), list(named["state"])))
    assert orders.count(orders[0]) == world and orders[0][0] == sorted(orders[0][0])


# -- what a load compares between ranks, and what a state dict of a part holds ----------------------------------------


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
    told = {"size": r"a tensor of shape \(2, 2\) for .* on rank 1", "lack": "missing on rank 1"}
    with pytest.raises(RuntimeError, match=f"embed.weight is as it should be on rank 0 and {told[fault]}"):
        run.model.load_state_dict(weights, strict=False)
    assert_same_tensors(full_state(run.model), before)


@on_ranks(2)
def test_a_part_of_a_model_is_saved_by_itself_and_not_assigned(rank: int, world: int) -> None:
    """After a call that failed, too: what that has brought is of weights that have changed since."""
    run = start("1d")
    stop = run.model.register_state_dict_post_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.model.state_dict()
    stop.remove()
    run.train(range(2))
    block = {name: tensor.full_tensor() for name, tensor in run.model.blocks[0].state_dict().items()}
    expected = {n.removeprefix("blocks.0."): t for n, t in full_state(run.model).items() if n.startswith("blocks.0.")}
    assert_same_tensors(block, expected)
    before = [*map(id, run.model.parameters())]
    for part, assign in ((run.model, True), (run.model.blocks[0], rank == 1)):
        with pytest.raises(ValueError, match="assign=False" if part is run.model else "assign=True"):
            part.load_state_dict(part.state_dict(), assign=assign)
        assert [*map(id, run.model.parameters())] == before, "nothing was replaced"


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
def test_a_write_that_one_rank_cannot_make_is_refused_on_all_ranks(rank: int, world: int) -> None:
    """Of another shape; or while one rank is inside a second forward, for which weights that are kept do not travel."""
    model = dedicated(reshard_after_forward=False)
    name, param = next(iter(owned(model).items()))
    shard = torch.zeros(param.shape).chunk(world)[rank]
    x, _ = batch(0)
    with torch.no_grad():
        model(x)

    def write(*_: object) -> None:
        param.to_local().copy_(shard)

    before = full_state(model)
    with pytest.raises(ValueError, match=f"{name}: rank 1 writes an even shard of another shape"):
        param.to_local().copy_(shard[1:] if rank else shard)
    hook = model.get_submodule(name.rpartition(".")[0]).register_forward_hook(write)
    told = r"a write to to_local\(\) while block" if rank else "rank 1 writes .* or cannot write one now"
    with torch.no_grad(), pytest.raises((RuntimeError, ValueError), match=told):
        model(x) if rank else write()
    hook.remove()
    assert_equal_weights(full_state(model), before)
    write()
    assert not full_state(model)[name].any()


# -- refusals and partial loads ------------------------------------------------------------------------------------

KEY, OTHER, NONE = "blocks.1.up.weight", "norm.weight", "blocks.7.up.weight"  # owned, not owned, of no module
State = dict[str, Any]
FAULTS: dict[str, tuple[str, Callable[[State], Any]]] = {  # what is told of, and what a fault makes of a state dict
    "missing": (KEY, lambda state: state.pop(KEY)),
    "missing, not owned": (OTHER, lambda state: state.pop(OTHER)),
    "unexpected": (NONE, lambda state: state.update({NONE: torch.zeros(3)})),
    "shape": (KEY, lambda state: state.update({KEY: torch.zeros(2, 3)})),
    "shape, not owned": (OTHER, lambda state: state.update({OTHER: torch.zeros(3)})),
    "kind": (KEY, lambda state: state.update({KEY: torch.zeros(state[KEY].shape)})),
    "none": (KEY, lambda state: state.update({KEY: None})),
}
OF_DTENSORS = ["missing", "missing, not owned", "unexpected", "shape", "shape, not owned", "kind"]
OF_PLAIN = ["missing", "shape", "none"]


@pytest.mark.pitfall("P27", "P48")
@pytest.mark.parametrize(
    ("layout", "plain", "faults"),
    [
        ("hsdp", False, OF_DTENSORS),
        ("1d-two-lines", True, OF_PLAIN),
    ],
)
@on_ranks("layout", timeout=60.0)
def test_fault_on_one_rank_or_on_all_raises_on_all(
    rank: int, world: int, layout: str, plain: bool, faults: list[str]
) -> None:
    """Of whole plain tensors, or of even DTensors of the model itself."""
    model = start(layout).model
    for fault, everywhere, strict in product(faults, (False, True), (True, False)):
        state = dict(build(seed=1).state_dict() if plain else get_model_state_dict(model))
        told, change = FAULTS[fault]
        if everywhere or rank == world - 1:
            change(state)
        may_lack = not strict and (fault == "unexpected" or (everywhere and fault.startswith("missing")))
        with about((fault, everywhere, strict)):
            if may_lack or (everywhere and fault == "kind"):  # what all ranks leave out, or give whole
                model.load_state_dict(state, strict=strict)
            else:
                with pytest.raises(RuntimeError, match=re.escape(told)):
                    model.load_state_dict(state, strict=strict)


@pytest.mark.pitfall("P27", "P48")
@on_ranks(2)
def test_fault_of_rank_0_raises_on_all(rank: int, world: int) -> None:
    run = start("1d")
    for fault, kind in {"missing": RuntimeError, "unexpected": RuntimeError, "shape": ValueError}.items():
        weights = build(seed=1).state_dict()
        told, change = FAULTS[fault]
        change(weights)
        with pytest.raises(kind, match=re.escape(told)):
            set_model_state_dict(run.model, weights if rank == 0 else {}, options=FROM_RANK_0)


RESHARD, KEEP = False, True


@pytest.mark.pitfall("P17", "P28")
@pytest.mark.parametrize(
    ("layout", "keep", "way"),
    [
        ("hsdp-two-lines", RESHARD, "from-rank-0"),
        ("1d-two-lines", RESHARD, "submodule"),
        # Plain tensors beside DTensors cannot be copied into what FSDP2 shards: no "submodule" there.
        pytest.param("tp-two-lines", KEEP, "submodule", marks=pytest.mark.slow),
    ],
)
@on_ranks("layout")
def test_partial_load_changes_that_part_and_the_next_forward(
    rank: int, world: int, layout: str, keep: bool, way: str
) -> None:
    """Load all matrices of one block and one norm, then the very next forward."""
    run = start(layout, keep=keep)
    run.train(range(1))
    with torch.no_grad():
        run.model(batch(0)[0])  # buffers hold the old weights
    source = build(seed=1).state_dict()
    part = {n: t for n, t in source.items() if n.startswith("blocks.1.") or n == OTHER}
    expected = {**full_state(run.model), **part}
    if way == "submodule":
        block = {n.removeprefix("blocks.1."): t for n, t in source.items() if n.startswith("blocks.1.")}
        set_model_state_dict(run.model.blocks[1], block, options=FULL)
        run.model.load_state_dict({**get_model_state_dict(run.model), OTHER: part[OTHER]})
    else:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=way == "from-rank-0", strict=False)
        set_model_state_dict(run.model, part if way == "everywhere" or rank == 0 else {}, options=options)
    with torch.no_grad():
        output = run.model(batch(1)[0])
    after = full_state(run.model)
    assert_same_tensors(after, expected)
    alone = build(seed=2)
    alone.load_state_dict(after)
    with torch.no_grad():
        torch.testing.assert_close(output, alone(batch(1)[0]), rtol=1e-5, atol=1e-6)
