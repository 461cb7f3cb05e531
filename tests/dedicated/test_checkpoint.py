"""Stock checkpointing of dedicated models: what a state dict holds, what a load brings back, and what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness.assertions import Raised, assert_equal_weights, assert_same_tensors, raised_by
from harness.checkpoints import SAVED, TOTAL, save, start
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
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

import dmuon
from dmuon.dedicated.owned_tensor import OwnedTensor


class BufferedBlock(Block):
    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.register_buffer("cache", torch.zeros(2), persistent=False)


def leaves(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from leaves(value)


# -- resume; on other layouts in tests/parity/test_checkpoints.py --------------------------------------------------


def two_optimizers(rank: int, world: int, path: str) -> dict[str, Tensor]:
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
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
    model, optimizers = fresh(50)
    weights, state = get_state_dict(model, optimizers)
    loaded = {"model": weights, "optimizer": state}
    dcp.load(loaded, checkpoint_id=path)
    set_state_dict(model, optimizers, model_state_dict=weights, optim_state_dict=loaded["optimizer"])
    steps(model, optimizers, range(SAVED, TOTAL))
    return full_state(model)


@pytest.mark.pitfall("P23")
def test_muon_beside_another_optimizer_resumes(ranks: RankPool, tmp_path: Path) -> None:
    for weights in ranks(2, two_optimizers, str(tmp_path)):
        assert_equal_weights(weights, reference_weights(TOTAL))


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
    for tensor in leaves([weights, state, named, part]):
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


def forwards_after_loads(_rank: int, _world: int, name: str, keep: bool) -> list[Tensor]:
    outputs = []
    for stepped in (False, True):
        source = start(name, seed=1)
        run = start(name, seed=20, keep=keep)
        run.model(batch(0)[0])  # fills buffers
        if stepped:
            run.train(range(1))  # and fills the first ones ahead
        set_model_state_dict(run.model, get_model_state_dict(source.model))
        with torch.no_grad():
            outputs.append(run.model(batch(1)[0]))
    return outputs


@pytest.mark.pitfall("P17", "P28")
@pytest.mark.parametrize("keep", [False, True], ids=["reshard", "keep"])
@pytest.mark.parametrize("name", ["1d", "1d-two-lines"])
def test_forward_after_load_uses_loaded_weights(ranks: RankPool, name: str, keep: bool) -> None:
    with torch.no_grad():
        expected = build(seed=1)(batch(1)[0])
    for outputs in ranks(2, forwards_after_loads, name, keep):
        for output in outputs:
            torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)


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


# -- refusals; of one rank's faulty DTensors in test_checkpoint_topologies.py --------------------------------------

KEY = "blocks.1.up.weight"
MODEL_FAULTS: dict[str, Any] = {  # what the fault makes of the state dict
    "missing": lambda state: state.pop(KEY),
    "shape": lambda state: state.update({KEY: state[KEY][:-1]}),
    "none": lambda state: state.update({KEY: None}),
}
OPTIMIZER_FAULTS: dict[str, tuple[Any, str]] = {  # and what is said
    "fewer": (lambda state: state["param_groups"][0]["params"].pop(), "parameters"),
    "moved": (
        lambda state: state["param_groups"][1]["params"].insert(0, state["param_groups"][0]["params"].pop()),
        "group 0",  # the same count in all
    ),
    "shape": (lambda state: state["state"][0].update(momentum_buffer=torch.zeros(3, 3)), r"blocks\.0\.mix\.weight"),
    "route": (lambda state: state["param_groups"][0].update(use_muon=False), "use_muon"),
}


def load_faulty(rank: int, _world: int) -> dict[tuple[str, str, bool], Raised]:
    """What a rank is told when all ranks, or rank 1 alone, load what is wrong."""
    model = lay("1d-two-lines", build()).model
    optimizer = dmuon.Muon(model, **OPTIONS)
    told = {}
    for everywhere in (True, False):
        for fault, change in MODEL_FAULTS.items():
            weights = dict(build(seed=1).state_dict())
            if everywhere or rank == 1:
                change(weights)
            told["model", fault, everywhere] = raised_by(partial(model.load_state_dict, weights))
        for fault, (change, _) in OPTIMIZER_FAULTS.items():
            state = copy.deepcopy(optimizer.state_dict())
            if everywhere or rank == 1:
                change(state)
            told["optimizer", fault, everywhere] = raised_by(partial(optimizer.load_state_dict, state))
    return told


@pytest.fixture(scope="module")
def told(ranks: RankPool) -> list[dict[tuple[str, str, bool], Raised]]:
    return ranks(2, load_faulty, timeout=60.0)


@pytest.mark.pitfall("P27", "P48")
@pytest.mark.parametrize("everywhere", [True, False], ids=["all-ranks", "one-rank"])
@pytest.mark.parametrize("fault", MODEL_FAULTS)
def test_faulty_weights_raise_on_every_rank(told: list[Any], fault: str, everywhere: bool) -> None:
    for of_rank in told:
        assert of_rank["model", fault, everywhere].matches(RuntimeError, KEY.replace(".", r"\."))


@pytest.mark.pitfall("P31", "P48")
@pytest.mark.parametrize("everywhere", [True, False], ids=["all-ranks", "one-rank"])
@pytest.mark.parametrize("fault", OPTIMIZER_FAULTS)
def test_faulty_optimizer_state_raises_on_every_rank(told: list[Any], fault: str, everywhere: bool) -> None:
    for of_rank in told:
        assert of_rank["optimizer", fault, everywhere].matches(ValueError, OPTIMIZER_FAULTS[fault][1])


@on_ranks(2, expect=ValueError, match="assign=False")
def test_assign_is_refused(rank: int, world: int) -> None:
    lay("1d-two-lines", build()).model.load_state_dict(build().state_dict(), assign=True)
