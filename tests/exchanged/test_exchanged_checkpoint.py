"""Stock checkpointing of models that others have sharded, and between them and dedicated ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness.assertions import assert_close, assert_equal_weights, assert_same_bits, assert_same_tensors
from harness.checkpoints import FROM_RANK_0, FULL, FULL_ON_RANK_0, SAVED, SINGLE, TOTAL, Plain, load, tensors_of
from harness.exchanged_runs import (
    MATRICES,
    MOMENTUM,
    PLACEMENTS,
    by_dtensors,
    expected_weights,
    inner,
    momenta,
    start,
    world_of,
)
from harness.network import full_state, is_matrix
from harness.on_ranks import assert_same_over_ranks, on_ranks
from harness.oracle import reference_weights
from harness.pool import RankPool
from harness.toy import OPTIONS
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

import dmuon
from dmuon.platform.torch_private import local_tensor

# -- between topologies and residencies ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """After ``SAVED`` steps: folder of a checkpoint, whole weights and state, and weights of the run that went on."""

    folder: str
    weights: dict[str, Tensor]
    state: dict[str, Any]
    went_on: dict[str, Tensor]

    def momenta(self) -> dict[str, Tensor]:
        return momenta_of(self.state)


def momenta_of(state: dict[str, Any]) -> dict[str, Tensor]:
    return {n: values[MOMENTUM] for n, values in state["state"].items() if MOMENTUM in values}


def save(_rank: int, _world: int, path: str, name: str) -> Saved:
    run = start(name)
    run.train(range(SAVED))
    for fqn, momentum in momenta(run).items():
        assert momentum.dtype == local_tensor(momentum).dtype == torch.float32
        assert local_tensor(momentum).shape == local_tensor(inner(run).get_parameter(fqn)).shape or name in DEDICATED
    weights, state = get_state_dict(run.model, run.optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
    weights, state = copy.deepcopy(get_state_dict(run.model, run.optimizer, options=FULL_ON_RANK_0))
    run.train(range(SAVED, TOTAL))
    return Saved(path, dict(weights), dict(state), full_state(inner(run)))


def resume(rank: int, _world: int, paths: list[str], name: str, stepped: bool) -> list[tuple[dict[str, Tensor], ...]]:
    """From each checkpoint, one after the other: momentum that was loaded, and weights after the rest of the steps."""
    run = start(name, seed=50 + rank)
    if stepped:
        run.train(range(1))  # momentum holds something to be overwritten
    resumed = []
    for path in paths:
        load(run, path)
        assert all(m.dtype == torch.float32 for m in momenta(run).values())
        held = copy.deepcopy(momenta_of(get_optimizer_state_dict(run.model, run.optimizer, options=FULL)))
        run.train(range(SAVED, TOTAL))
        assert all(m.dtype == torch.float32 and local_tensor(m).isfinite().all() for m in momenta(run).values())
        resumed.append((held, full_state(inner(run))))
    return resumed


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    return cache(lambda name: ranks(world_of(name), save, str(tmp_path_factory.mktemp("saved")), name)[0])


DEDICATED = ["1d", "hsdp", "tp"]
# Each is left once and reached once, residencies taking turns.
ROUND = [SINGLE, "fsdp2-3", "1d", "fsdp2-tp", "hsdp", "ddp", "tp", "fsdp2-hsdp", "fsdp2-2", "tp-alone"]
AROUND = list(zip(ROUND, [*ROUND[1:], SINGLE], strict=True))
QUICK = [
    *((source, target) for source, target in AROUND if source in (SINGLE, "fsdp2-3", "fsdp2-2", "tp-alone")),
    ("1d, bf16", "fsdp2-3, bf16"),
    ("experts alone", "experts on 3"),
    ("experts on 3", "rows on 2"),
    ("rows on 2, functions", "copies on 2"),
    ("copies on 2", "experts on 3, functions"),
    ("experts on 3, functions", "experts alone"),
    ("experts on 3, bf16", "experts on 3, bf16"),  # ranks without any expert know that momentum is fp32
    ("single, both", "hsdp, both"),
]
SLOW = [
    *(pair for pair in AROUND if pair not in QUICK),
    *((source, ROUND[(i + step) % len(ROUND)]) for step in (3, 6) for i, source in enumerate(ROUND)),
    ("fsdp2-2, bf16", "fsdp2-2, bf16"),
    ("fsdp2-3, bf16", "1d, bf16"),
    ("fsdp2-hsdp, bf16", "tp-alone, bf16"),
    ("tp-alone, bf16", "single, bf16"),
    ("experts on 3", "experts on 3"),
    ("rows on 2", "rows on 2, functions"),
    ("hsdp, both", "1d, both"),
]


@pytest.fixture(scope="module")
def resumed(ranks: RankPool, saved: Callable[[str], Saved]) -> Callable[..., Any]:
    """By source, what each rank of a target made of it; all sources in one call."""

    @cache
    def of_target(target: str, slow: bool) -> dict[str, list[tuple[dict[str, Tensor], ...]]]:
        sources = [source for source, other in (SLOW if slow else QUICK) if other == target]
        stepped = target in ROUND and ROUND.index(target) % 2 == 0
        folders = [saved(source).folder for source in sources]
        results = ranks(world_of(target), resume, folders, target, stepped, timeout=100)
        return {source: [of_rank[i] for of_rank in results] for i, source in enumerate(sources)}

    return of_target


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, Tensor]:
    return reference_weights(TOTAL)


@pytest.mark.pitfall("P23", "P28", "P29", "P32")
@pytest.mark.parametrize(
    ("source", "target", "slow"),
    [
        *((*case, False) for case in QUICK),
        *(pytest.param(*case, True, marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_resume_continues_the_uninterrupted_run(
    saved: Callable[[str], Saved], resumed: Callable[..., Any], source: str, target: str, slow: bool
) -> None:
    before, after = saved(source), resumed(target, slow)[source]
    held = before.momenta()
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


# -- whole state dicts ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain() -> Plain:
    return Plain(SAVED)


@pytest.mark.pitfall("P27", "P33")
@pytest.mark.parametrize(
    "name",
    ["fsdp2-3", "ddp", *(pytest.param(n, marks=pytest.mark.slow) for n in ("fsdp2-tp", "fsdp2-hsdp", "tp-alone"))],
)
def test_full_state_dict_is_that_of_a_single_process_and_loads_into_torch(
    saved: Callable[[str], Saved], plain: Plain, uninterrupted: dict[str, Tensor], name: str
) -> None:
    weights, state = saved(name).weights, saved(name).state
    assert list(weights) == list(plain.weights())
    assert_equal_weights(weights, plain.weights())
    assert_equal_weights(tensors_of(state), tensors_of(plain.state()))
    torch_alone = Plain(seed=3)
    torch_alone.load(weights, state)
    torch_alone.train(range(SAVED, TOTAL))
    assert_equal_weights(torch_alone.weights(), uninterrupted)


# torch's distribute_tensor splits no uneven bias over FSDP2 and tensor parallelism; its broadcast does.
ADOPTING = {"fsdp2-3": [False, True], "ddp": [True, False]}
ADOPTING_SLOWLY = {"fsdp2-tp": [True], "fsdp2-hsdp": [True, False], "tp-alone": [False, True]}


@pytest.mark.pitfall("P28", "P33")
@pytest.mark.parametrize(
    ("world", "name", "ways"),
    [
        *((world_of(name), name, ways) for name, ways in ADOPTING.items()),
        *(pytest.param(world_of(n), n, ways, marks=pytest.mark.slow) for n, ways in ADOPTING_SLOWLY.items()),
    ],
)
@on_ranks()
def test_full_state_dicts_load(rank: int, world: int, name: str, ways: list[bool]) -> None:
    """From all ranks or from rank 0; they are given back, and training goes on."""
    plain = Plain(SAVED)
    run = start(name, seed=50 + rank)
    groups = get_optimizer_state_dict(run.model, run.optimizer, options=FULL)["param_groups"]
    for from_rank0 in ways:
        options = FROM_RANK_0 if from_rank0 else FULL
        silent = from_rank0 and rank > 0
        given = {"state": plain.state()["state"], "param_groups": groups}
        set_model_state_dict(run.model, {} if silent else plain.weights(), options=options)
        set_optimizer_state_dict(run.model, run.optimizer, {} if silent else copy.deepcopy(given), options=options)
        weights, state = copy.deepcopy(get_state_dict(run.model, run.optimizer, options=FULL))
        assert_same_tensors(dict(weights), plain.weights())
        assert_same_tensors(tensors_of(dict(state)), tensors_of(plain.state()))
        run.train(range(SAVED, TOTAL))
        trained = full_state(inner(run))
        assert_same_over_ranks(trained)
        assert_equal_weights(trained, reference_weights(TOTAL))


# -- plain state dicts of torch.optim.Muon -------------------------------------------------------------------------


@pytest.mark.pitfall("P33")
@pytest.mark.parametrize(
    ("world", "name"),
    [
        (3, "fsdp2-3"),
        *(pytest.param(world_of(n), n, marks=pytest.mark.slow) for n in ("fsdp2-tp", "fsdp2-hsdp", "tp-alone")),
    ],
)
@on_ranks()
def test_momentum_of_torch_muon_loads_and_goes_back(rank: int, world: int, name: str) -> None:
    """As whole tensors on every rank, for one step."""
    stock = Plain(SAVED)
    run = start(name, seed=4)
    set_model_state_dict(run.model, stock.weights() if rank == 0 else {}, options=FROM_RANK_0)
    matrices = [p for n, p in inner(run).named_parameters() if is_matrix(n)]
    optimizer = dmuon.Muon(matrices, lr=1.0, distributed_config=run.optimizer._origin.config and by_dtensors())
    given = copy.deepcopy(stock.reference.muon.state_dict())
    optimizer.load_state_dict(given)
    for i, values in optimizer.state_dict()["state"].items():
        assert torch.equal(values[MOMENTUM].full_tensor(), given["state"][i][MOMENTUM])
    run.backward(SAVED)
    optimizer.step()
    stock.train(range(SAVED, SAVED + 1))
    expected = {n: t for n, t in stock.weights().items() if is_matrix(n)}
    assert_equal_weights({n: t for n, t in full_state(run.model).items() if is_matrix(n)}, expected)
    state = stock.reference.muon.state_dict()
    for i, values in optimizer.state_dict()["state"].items():
        momentum = values[MOMENTUM].full_tensor()
        assert_close(momentum, state["state"][i][MOMENTUM], i)
        state["state"][i][MOMENTUM] = momentum
    stock.reference.muon.load_state_dict(state)
    stock.train(range(SAVED + 1, TOTAL))
    assert_equal_weights(stock.weights(), reference_weights(TOTAL))


# -- what a state dict holds, and saving ---------------------------------------------------------------------------


@pytest.mark.pitfall("P27")
@pytest.mark.parametrize(
    ("world", "name"), [(3, "fsdp2-3"), (4, "fsdp2-tp"), pytest.param(2, "ddp", marks=pytest.mark.slow)]
)
@on_ranks()
def test_momentum_lies_as_its_parameter(rank: int, world: int, name: str) -> None:
    """Also before the first step."""
    run = start(name)
    for stepped in (False, True):
        if stepped:
            run.train(range(1))
        copied = copy.deepcopy(run.optimizer.state_dict())
        _, named = get_state_dict(run.model, run.optimizer)
        assert {n for n, values in named["state"].items() if MOMENTUM in values} == MATRICES
        for i, n in enumerate(n for n, _ in inner(run).named_parameters() if is_matrix(n)):
            param = inner(run).get_parameter(n)
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


def save_and_compare(_rank: int, _world: int, name: str) -> dict[str, Tensor]:
    run = start(name)

    def unchanged() -> None:
        before = run.local_tensors()
        options = [{k: v for k, v in g.items() if k != "params"} for g in run.optimizer.param_groups]
        run.optimizer.state_dict()
        get_state_dict(run.model, run.optimizer)
        get_state_dict(run.model, run.optimizer, options=FULL)
        assert_same_tensors(run.local_tensors(), before)
        assert options == [{k: v for k, v in g.items() if k != "params"} for g in run.optimizer.param_groups]

    unchanged()  # no dummy step creates state
    for step in range(TOTAL):
        run.backward(step)
        if step == 2:
            assert all(p.grad is not None for p in run.model.parameters())
            unchanged()
        run.optimizer.step()
        if step == 3:
            unchanged()
    return full_state(inner(run))


@pytest.mark.pitfall("P30")
@pytest.mark.parametrize("name", ["fsdp2-2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("fsdp2-tp", "ddp"))])
def test_saving_changes_nothing(ranks: RankPool, saved: Callable[[str], Saved], name: str) -> None:
    for weights in ranks(world_of(name), save_and_compare, name):
        assert_same_tensors(weights, saved(name).went_on)


# -- groups --------------------------------------------------------------------------------------------------------


def save_flat(_rank: int, _world: int, path: str, name: str, flat: bool) -> None:
    run = start(name)
    run.train(range(SAVED))
    weights, state = get_state_dict(
        run.model, run.optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat)
    )
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)


def resume_reordered(_rank: int, _world: int, path: str, name: str, flat: bool) -> dict[str, Tensor]:
    run = start(name, seed=50)
    groups = dmuon.param_groups(run.model)
    groups = [{**g, "params": g["params"][::-1]} for g in (groups[::-1] if flat else groups)]
    options = {**OPTIONS, "lr": 1.0, "distributed_config": by_dtensors()}
    run.optimizer = dmuon.Muon(groups, **options)  # the saved lr comes back
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, state = get_state_dict(run.model, run.optimizer, options=options)
    loaded = {"model": weights, "optimizer": state}
    dcp.load(loaded, checkpoint_id=path)
    set_state_dict(
        run.model, run.optimizer, model_state_dict=weights, optim_state_dict=loaded["optimizer"], options=options
    )
    assert {g["lr"] for g in run.optimizer.param_groups} == {OPTIONS["lr"]}
    run.train(range(SAVED, TOTAL))
    return full_state(run.model)


@pytest.mark.pitfall("P31")
@pytest.mark.parametrize(
    "flat", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["parameters", "parameters-and-groups"]
)
def test_state_follows_names_when_groups_are_reordered(
    ranks: RankPool, tmp_path: Path, uninterrupted: dict[str, Tensor], flat: bool
) -> None:
    """DCP keys groups by position unless ``flatten_optimizer_state_dict`` is set; state by name always."""
    ranks(2, save_flat, str(tmp_path), "fsdp2-2", flat)
    for weights in ranks(3, resume_reordered, str(tmp_path), "fsdp2-3", flat):
        assert_equal_weights(weights, uninterrupted)
