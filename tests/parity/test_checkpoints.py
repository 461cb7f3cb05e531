"""What is saved on one layout goes on on any other, in both residencies, as one process does that was never stopped."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.assertions import about, assert_equal_weights, assert_same_bits, assert_same_tensors
from harness.checkpoints import (
    FROM_RANK_0,
    FULL,
    FULL_ON_RANK_0,
    MATRICES,
    MOMENTUM,
    PLACEMENTS,
    SAVED,
    SINGLE,
    TOTAL,
    Plain,
    Run,
    expected_weights,
    is_exchanged,
    load,
    save,
    save_after_steps,
    start,
    tensors_of,
    world_of,
)
from harness.dtensors import local_tensor
from harness.network import full_state, is_matrix
from harness.on_ranks import assert_same_over_ranks, on_ranks
from harness.oracle import reference_weights
from harness.pool import RankPool
from harness.toy import LR, OPTIONS
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

import dmuon

# -- from each layout to others ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """After ``SAVED`` steps: folder of a checkpoint, whole weights and state, and weights of the run that went on."""

    folder: str
    weights: dict[str, Tensor]
    state: dict[str, Any]
    went_on: dict[str, Tensor]


def momenta_of(state: dict[str, Any]) -> dict[str, Tensor]:
    return {n: values[MOMENTUM] for n, values in state["state"].items() if MOMENTUM in values}


def assert_saving_changes_nothing(run: Run) -> None:
    def options() -> list[dict[str, Any]]:
        return [{k: v for k, v in group.items() if k != "params"} for group in run.optimizer.param_groups]

    before, given = run.local_tensors(), options()
    run.model.state_dict()
    run.optimizer.state_dict()
    get_state_dict(run.model, run.optimizer)
    get_state_dict(run.model, run.optimizer, options=FULL)
    assert_same_tensors(run.local_tensors(), before)
    assert options() == given


def train_and_save(rank: int, _world: int, path: str, name: str) -> Saved:
    """Whole weights and state are given to rank 0 alone."""
    run = start(name)
    assert_saving_changes_nothing(run)  # no dummy step creates state
    run.train(range(SAVED - 1))
    run.backward(SAVED - 1)
    assert_saving_changes_nothing(run)
    run.optimizer.step()
    before = run.local_tensors()
    for fqn, momentum in run.shown().items():
        assert momentum.dtype == local_tensor(momentum).dtype == torch.float32
        assert (
            not is_exchanged(name) or local_tensor(momentum).shape == local_tensor(run.inner.get_parameter(fqn)).shape
        )
    save(run, path)
    weights, state = copy.deepcopy(get_state_dict(run.model, run.optimizer, options=FULL_ON_RANK_0))
    assert rank == 0 or (weights, state) == ({}, {})
    assert any(key.endswith(".grad") for key in before)
    assert_same_tensors(run.local_tensors(), before)
    run.train(range(SAVED, TOTAL))
    return Saved(path, dict(weights), dict(state), full_state(run.inner))


def ranks_differ(name: str) -> bool:
    """Whether ranks that begin with other values than each other must not train before they have loaded some.

    Nobody makes those alike that tensor parallelism alone does not split.
    """
    return is_exchanged(name) and "tp" in name


def resume(rank: int, _world: int, paths: list[str], name: str) -> list[tuple[dict[str, Tensor], ...]]:
    """From each checkpoint, one after the other: momentum that was loaded, and weights after the rest of the steps."""
    run = start(name, seed=50 + rank, lr=1.0)  # the saved one must come back
    if not ranks_differ(name):
        run.train(range(1))  # buffers and momentum hold something to be overwritten
    resumed = []
    for path in paths:
        load(run, path)
        assert {group["lr"] for group in run.optimizer.param_groups} == {LR}
        assert all(m.dtype == torch.float32 for m in run.momenta().values())
        held = copy.deepcopy(momenta_of(get_optimizer_state_dict(run.model, run.optimizer, options=FULL)))
        run.train(range(SAVED, TOTAL))
        assert all(m.dtype == torch.float32 and m.isfinite().all() for m in run.momenta().values())
        resumed.append((held, full_state(run.inner)))
    return resumed


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    return cache(lambda name: ranks(world_of(name), train_and_save, str(tmp_path_factory.mktemp("saved")), name)[0])


# Residencies and layouts take turns; each is left and reached by another.
ROUND = [
    *(SINGLE, "fsdp2-3", "1d", "fsdp2-tp", "hsdp, keep", "ddp", "tp", "fsdp2-hsdp", "1d-3-two-lines"),
    *("tp-fsdp", "tp-alone", "cp", "1d-two-lines, keep"),
]
QUICK = [
    (SINGLE, "1d"),
    ("fsdp2-3", "1d"),
    ("tp", "ddp-2"),
    ("1d", "fsdp2-3"),
    ("1d, bf16", "fsdp2-3, bf16"),
    ("experts on 3", "rows on 2"),
    ("experts on 3, bf16", "experts on 3, bf16"),  # ranks without any expert know that momentum is fp32
    ("single, both", "hsdp, both"),
]
SLOW = [
    *pairwise([*ROUND, ROUND[0]]),
    ("hsdp, keep", "hsdp, keep"),
    ("copies on 2", "experts on 3, functions"),
    ("experts on 3, functions", "experts alone"),
    ("fsdp2-3, bf16", "1d, bf16"),
    ("tp-alone, bf16", "single, bf16"),
]


@pytest.fixture(scope="module")
def resumed(ranks: RankPool, saved: Callable[[str], Saved]) -> Callable[..., Any]:
    """By source, what each rank of a target made of it; all sources in one call."""

    @cache
    def of_target(target: str, slow: bool) -> dict[str, list[tuple[dict[str, Tensor], ...]]]:
        sources = [source for source, other in (SLOW if slow else QUICK) if other == target]
        folders = [saved(source).folder for source in sources]
        results = ranks(world_of(target), resume, folders, target, timeout=100)
        return {source: [of_rank[i] for of_rank in results] for i, source in enumerate(sources)}

    return of_target


@pytest.mark.pitfall("P23", "P28", "P29", "P30", "P32")
@pytest.mark.parametrize(
    ("source", "target", "slow"),
    [
        *((*case, False) for case in QUICK),
        *(pytest.param(*case, True, marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_a_checkpoint_goes_on_as_the_uninterrupted_run(
    saved: Callable[[str], Saved], resumed: Callable[..., Any], source: str, target: str, slow: bool
) -> None:
    before, after = saved(source), resumed(target, slow)[source]
    held = momenta_of(before.state)
    bf16 = source.endswith("bf16")
    assert not bf16 or any(not torch.equal(m, m.bfloat16().float()) for m in held.values())
    assert held.keys() >= MATRICES or source.partition(", ")[0] in PLACEMENTS
    for found, _ in after:
        assert_same_tensors(found, held)
    assert_same_bits([weights for _, weights in after])
    if source == target:
        assert_same_tensors(after[0][1], before.went_on)
    if not bf16:
        expected = expected_weights(source)
        assert_equal_weights(before.went_on, expected)
        assert_equal_weights(after[0][1], expected)


# -- whole state dicts, and those of torch.optim.Muon -----------------------------------------------------------------


def layouts(quick: list[str], slow: list[str]) -> Any:
    """For tests that ask for ``world`` and ``name``."""
    params = [(world_of(name), name) for name in quick]
    late = [pytest.param(world_of(name), name, marks=pytest.mark.slow) for name in slow]
    return pytest.mark.parametrize(("world", "name"), [*params, *late])


@pytest.mark.pitfall("P27", "P33")
@layouts(["1d", "fsdp2-3"], [SINGLE, "ddp", "hsdp, keep", "tp-fsdp", "fsdp2-tp"])
def test_full_state_dict_is_that_of_a_single_process_and_loads_into_torch(
    saved: Callable[[str], Saved], tmp_path: Path, world: int, name: str
) -> None:
    """And the checkpoint converts to one plain file."""
    weights, state, plain = saved(name).weights, saved(name).state, Plain(SAVED)
    dcp_to_torch_save(saved(name).folder, tmp_path / "plain.pt")
    assert_same_tensors(torch.load(tmp_path / "plain.pt", weights_only=False)["model"], weights)
    assert list(weights) == list(plain.weights())
    assert_equal_weights(weights, plain.weights())
    assert_equal_weights(tensors_of(state), tensors_of(plain.state()))
    torch_alone = Plain(seed=3)
    torch_alone.load(weights, state)
    torch_alone.train(range(SAVED, TOTAL))
    assert_equal_weights(torch_alone.weights(), reference_weights(TOTAL))


# torch's distribute_tensor splits no uneven bias over FSDP2 and tensor parallelism; its broadcast does.
FROM_RANK_0_ALONE = ("tp-fsdp", "fsdp2-tp")


@pytest.mark.pitfall("P28", "P33")
@layouts(["1d", "fsdp2-3"], [SINGLE, "hsdp, keep", "tp-fsdp", "fsdp2-tp"])
@on_ranks()
def test_full_state_dicts_load(rank: int, world: int, name: str) -> None:
    """From all ranks or from rank 0; they are given back, and training goes on."""
    plain = Plain(SAVED)
    run = start(name, seed=50 + rank)
    if not ranks_differ(name):
        run.train(range(1))
    groups = get_optimizer_state_dict(run.model, run.optimizer, options=FULL)["param_groups"]
    for from_rank0 in (True,) if name in FROM_RANK_0_ALONE else (False, True):
        options = FROM_RANK_0 if from_rank0 else FULL
        silent = from_rank0 and rank > 0
        given = {"state": plain.state()["state"], "param_groups": groups}
        set_model_state_dict(run.model, {} if silent else plain.weights(), options=options)
        set_optimizer_state_dict(run.model, run.optimizer, {} if silent else copy.deepcopy(given), options=options)
        weights, state = copy.deepcopy(get_state_dict(run.model, run.optimizer, options=FULL))
        assert_same_tensors(dict(weights), plain.weights())
        assert_same_tensors(tensors_of(dict(state)), tensors_of(plain.state()))
        run.train(range(SAVED, TOTAL))
        trained = full_state(run.inner)
        assert_same_over_ranks(trained)
        assert_equal_weights(trained, reference_weights(TOTAL))


# -- what a state dict holds, and saving ------------------------------------------------------------------------------


@pytest.mark.pitfall("P27")
@layouts(["fsdp2-3"], ["fsdp2-tp"])
@on_ranks()
def test_momentum_lies_as_its_parameter(rank: int, world: int, name: str) -> None:
    """Where others shard; also before the first step."""
    run = start(name)
    for stepped in (False, True):
        if stepped:
            run.train(range(1))
        copied = copy.deepcopy(run.optimizer.state_dict())
        _, named = get_state_dict(run.model, run.optimizer)
        assert {n for n, values in named["state"].items() if MOMENTUM in values} == MATRICES
        for i, n in enumerate(n for n, _ in run.inner.named_parameters() if is_matrix(n)):
            param = run.inner.get_parameter(n)
            for value in (copied["state"][i][MOMENTUM], named["state"][n][MOMENTUM]):
                assert isinstance(value, DTensor) == isinstance(param, DTensor)
                assert value.shape == param.shape and value.dtype == torch.float32
                if isinstance(param, DTensor):
                    assert (value.device_mesh, value.placements) == (param.device_mesh, param.placements)
                mine = local_tensor(value)
                assert mine.shape == local_tensor(param).shape
                assert torch.equal(mine, local_tensor(run.optimizer.state[param][MOMENTUM]))
                assert bool(mine.any()) == (stepped and mine.numel() > 0)
                assert mine.untyped_storage().nbytes() == 4 * mine.numel(), "not all of the stack"


@pytest.mark.pitfall("P29", "P30")
@layouts(["1d"], ["fsdp2-2"])
@on_ranks()
def test_async_save_holds_the_moment_of_the_call(rank: int, world: int, name: str, tmp_path: Path) -> None:
    run = start(name)
    run.train(range(SAVED))
    weights, state = get_state_dict(run.model, run.optimizer)
    # Not the default group: its collectives would interleave with those of FSDP2 in the training thread.
    group = dist.new_group(backend="gloo")
    saving = dcp.async_save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path, process_group=group)
    run.train(range(SAVED, TOTAL))
    assert not isinstance(saving, dcp.state_dict_saver.AsyncSaveResponse)
    saving.result()
    trained = full_state(run.model)
    assert_equal_weights(trained, reference_weights(TOTAL))
    again = start(name, seed=50 + rank)
    load(again, str(tmp_path))
    assert_equal_weights(full_state(again.model), reference_weights(SAVED))
    again.train(range(SAVED, TOTAL))
    assert_same_tensors(full_state(again.model), trained)


# -- groups in another order ------------------------------------------------------------------------------------------


def resume_reordered(rank: int, _world: int, path: str, name: str) -> dict[str, Tensor]:
    run = start(name, seed=50 + rank)
    groups: list[dict[str, Any]] = dmuon.param_groups(run.model)
    groups = [{**g, "params": g["params"][::-1]} for g in groups[::-1]]
    run.optimizer = dmuon.Muon(groups, **{**OPTIONS, "lr": 1.0}, distributed_config=run.config)
    run.train(range(1))
    load(run, path, flat=True)
    assert {g["lr"] for g in run.optimizer.param_groups} == {LR}
    assert all(m.dtype == torch.float32 for m in run.momenta().values())
    run.train(range(SAVED, TOTAL))
    return full_state(run.model)


@pytest.mark.pitfall("P31")
def test_state_follows_names_when_groups_are_reordered(ranks: RankPool, tmp_path: Path) -> None:
    """DCP keys groups by position unless ``flatten_optimizer_state_dict`` is set; state by name always."""
    ranks(2, save_after_steps, str(tmp_path), "1d", True)
    for weights in ranks(3, resume_reordered, str(tmp_path), "1d-3"):
        assert_equal_weights(weights, reference_weights(TOTAL))


# -- from optimizer to optimizer, without files -----------------------------------------------------------------------

GATHERED = r"(exp_avg|exp_avg_sq|momentum) of '.*' .*is a DTensor over ranks 0 .*pass its full_tensor\(\)"
PAIRS = {
    2: [("fsdp2-2", "tp-alone"), ("ddp", "1d-two-lines"), ("1d", SINGLE)],
    4: [("fsdp2-hsdp", "fsdp2-tp"), ("tp-fsdp", "hsdp")],
}


def held_state(run: Run) -> dict[str, Tensor]:
    """What this rank holds of the optimizer's state, by number and key."""
    values = run.optimizer.state_dict()["state"]
    return {f"{i}.{key}": local_tensor(t).clone() for i, of in values.items() for key, t in of.items()}


@pytest.mark.pitfall("P84")
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@on_ranks(timeout=100.0)
def test_the_state_dict_of_one_layout_loads_in_another_or_is_refused_by_name(rank: int, world: int) -> None:
    """Before anything has changed."""
    for name, other in PAIRS[world]:
        with about((name, other)):
            source, target = start(name), start(other, seed=9)
            source.train(range(SAVED))
            before = held_state(target)
            weights = copy.deepcopy(dict(get_model_state_dict(source.model, options=FULL)))
            # torch 2.12 broadcasts what is not contiguous in another order
            weights = {key: weight.contiguous() for key, weight in weights.items()}
            set_model_state_dict(target.model, {} if rank else weights, options=FROM_RANK_0)
            try:
                target.optimizer.load_state_dict(source.optimizer.state_dict())
            except ValueError as error:
                assert other == SINGLE and re.search(GATHERED, str(error)), error
                assert_same_tensors(held_state(target), before)
                continue
            for run in (target, source):  # they share no memory
                run.train(range(SAVED, TOTAL))
                assert_equal_weights(full_state(run.model), reference_weights(TOTAL), 2e-6)
