"""Stock checkpointing of dedicated models: what a state dict holds, what a load brings back, and what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from harness.assertions import Raised, assert_equal_weights, assert_same_bits, assert_same_tensors, raised_by
from harness.checkpoints import SAVED, TOTAL, Run, save, start
from harness.dtensors import local_tensor
from harness.network import Block, Network, Size, full_state, is_matrix, loss_of, shard
from harness.oracle import Reference, reference_weights
from harness.pool import RankPool
from harness.topologies import lay
from harness.toy import LR, OPTIONS, batch, build
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

import dmuon
from dmuon.dedicated.owned_tensor import OwnedTensor

CLASSIC = (3.4445, -4.7750, 2.0315)


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


def scheduled(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def start_scheduled(seed: int) -> tuple[Run, torch.optim.lr_scheduler.LambdaLR]:
    run = start("1d-two-lines", seed=seed)
    run.optimizer = dmuon.Muon(run.model, **OPTIONS, adamw_lr=5e-4)
    return run, scheduled(run.optimizer)


def scheduler_round_trip(_rank: int, _world: int) -> tuple[dict[str, Tensor], list[list[float]]]:
    run, scheduler = start_scheduled(seed=0)
    seen: list[list[float]] = []
    for step in range(4):
        if step == 2:
            states = run.model.state_dict(), run.optimizer.state_dict(), scheduler.state_dict()
            run, scheduler = start_scheduled(seed=9)
            for part, state in zip((run.model, run.optimizer, scheduler), states, strict=True):
                part.load_state_dict(state)
        seen.append([g["lr"] for g in run.optimizer.param_groups])
        run.train(range(step, step + 1))
        scheduler.step()
    return full_state(run.model), seen


def test_scheduler_resumes_with_the_optimizer(ranks: RankPool) -> None:
    model = build()
    reference = Reference(model, adamw_lr=5e-4)
    schedulers = [scheduled(reference.muon), scheduled(reference.adamw)]
    for step in range(4):
        reference.zero_grad()
        loss_of(model, *batch(step)).backward()
        reference.step()
        for scheduler in schedulers:
            scheduler.step()
    for weights, seen in ranks(2, scheduler_round_trip):
        assert seen == [pytest.approx([r / (1 + s) for r in (2e-3, 5e-4, 5e-4)]) for s in range(4)]
        assert_equal_weights(weights, dict(model.state_dict()))


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


@pytest.mark.pitfall("P33")
def test_state_of_torch_muon_with_default_options_loads() -> None:
    """torch says None for its default factor, and knows no ``use_muon`` or ``ns_dtype``."""
    weight, other = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(5, 3))
    stock, ours = torch.optim.Muon([weight]), dmuon.Muon([other], ns_dtype=torch.float64)
    weight.grad = torch.randn(5, 3)
    stock.step()
    ours.load_state_dict(stock.state_dict())
    group = ours.param_groups[0]
    assert group["use_muon"] is True and group["ns_dtype"] is torch.float64
    assert (group["lr"], group["ns_coefficients"], group["eps"]) == (1e-3, CLASSIC, 1e-7)
    assert group["adjust_lr_fn"] is None
    other.grad = torch.randn(5, 3)
    ours.step()
    assert ours.last_step.ns_matrices == 1


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


@pytest.mark.pitfall("P23")
def test_momentum_of_bf16_parameters_survives_a_round_trip_exactly() -> None:
    """``torch.optim.Optimizer.load_state_dict`` casts state to the parameter's dtype."""
    model = build().to(torch.bfloat16)
    run = start("single", model=model)
    run.train(range(2))
    again = start("single", model=model)
    again.optimizer.load_state_dict(run.optimizer.state_dict())
    assert len(run.momenta()) == 9 and {m.dtype for m in again.momenta().values()} == {torch.float32}
    assert_same_tensors(again.momenta(), run.momenta())


def load_own_parameters(rank: int, _world: int) -> None:
    model, other = (lay("1d-3-two-lines", build(seed + rank)).model for seed in (2, 7))
    expected = full_state(other)
    kept = {n: p.detach().clone() for n, p in other.named_parameters()}  # what an average of weights would hold
    model.load_state_dict(kept)
    assert_same_tensors(full_state(model), expected)


def test_copies_of_resting_parameters_load(ranks: RankPool) -> None:
    ranks(3, load_own_parameters)


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


def load_missing_from_dcp(_rank: int, _world: int) -> None:
    model = lay("1d", build()).model
    state = get_model_state_dict(model)
    del state[KEY]
    set_model_state_dict(model, state)


def test_missing_key_raises_through_stock_api(ranks: RankPool) -> None:
    ranks(2, load_missing_from_dcp, timeout=20.0, expect=RuntimeError, match=KEY.replace(".", r"\."))


def test_faulty_optimizer_state_raises_in_one_process() -> None:
    model = build()
    optimizer = dmuon.Muon(model, **OPTIONS)
    state = optimizer.state_dict()
    state["state"][0]["momentum_buffer"] = torch.zeros(1, 13)  # copying would broadcast it
    with pytest.raises(ValueError, match=r"momentum.*\(1, 13\)"):
        optimizer.load_state_dict(state)
    smaller = dmuon.Muon(build(layers=2), **OPTIONS)
    with pytest.raises(ValueError, match="parameters"):
        optimizer.load_state_dict(smaller.state_dict())


def load_full(rank: int, _world: int, name: str) -> list[dict[str, Tensor]]:
    """With state dicts on all ranks or on the first one, and whole weights summoned or not."""
    found = []
    for from_rank0 in (False, True):
        for summon in (False, True):
            model = lay(name, build(rank), keep=True).model
            state = build(seed=1).state_dict() if rank == 0 or not from_rank0 else {}
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank0)
            with dmuon.summon_full_params(model) if summon else nullcontext():
                set_model_state_dict(model, state, options=options)
                if summon:
                    assert torch.equal(model.state_dict()[KEY], build(seed=1).state_dict()[KEY])
            found.append(full_state(model))
    return found


@pytest.mark.pitfall("P33")
@pytest.mark.parametrize("name", ["1d", "1d-two-lines"])
def test_full_weights_load(ranks: RankPool, name: str) -> None:
    for found in ranks(2, load_full, name):
        assert_same_bits([dict(build(seed=1).state_dict()), *found])


def load_assign(_rank: int, _world: int) -> None:
    lay("1d-two-lines", build()).model.load_state_dict(build().state_dict(), assign=True)


def test_assign_is_refused(ranks: RankPool) -> None:
    ranks(2, load_assign, expect=ValueError, match="assign=False")
