"""Stock checkpointing of models that others have sharded, and between them and dedicated ones."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from harness.assertions import assert_close, assert_equal_weights, assert_same_bits, assert_same_tensors
from harness.checkpoints import (
    FROM_RANK_0,
    FULL,
    FULL_ON_RANK_0,
    SAVED,
    SINGLE,
    TOTAL,
    Plain,
    Run,
    load,
    tensors_of,
)
from harness.dtensors import functions_of_whole_tensors
from harness.on_ranks import assert_same_over_ranks, attempt, on_ranks
from harness.oracle import Twin, reference_weights
from harness.pool import Outcome, RankPool
from harness.topologies import LAYOUTS, lay
from harness.toy import OPTIONS, build
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import dmuon
from dmuon.check.model import is_matrix
from dmuon.check.topologies import full_state
from dmuon.platform.torch_private import local_tensor

MOMENTUM = "momentum_buffer"
MATRICES = {n for n, _ in build().named_parameters() if is_matrix(n)}


# -- what is trained -----------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Two stacks and a matrix, cut alike, with gradients that only the step decides."""

    SHAPES = ((4, 6, 10), (5, 9, 4), (7, 11))

    def __init__(self, placement: Placement | None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.mesh = None if placement is None else init_device_mesh("cpu", (dist.get_world_size(),))
        self.placement = placement
        self.weights = nn.ParameterList(self.lay(1.0 + t.to(dtype)) for t in self.noise(99))

    @classmethod
    def noise(cls, seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(shape, generator=generator) for shape in cls.SHAPES]

    def lay(self, tensor: Tensor) -> Tensor:
        return tensor if self.mesh is None else distribute_tensor(tensor, self.mesh, [self.placement])


class RunOfExperts(Run):
    def backward(self, step: int) -> None:
        for weight, grad in zip(self.model.weights, self.model.noise(step), strict=True):
            weight.grad = self.model.lay(grad.to(weight.dtype))


PLACEMENTS: dict[str, tuple[int, Placement | None]] = {
    "experts alone": (1, None),
    "experts on 3": (3, Shard(0)),  # the last rank holds none of the first stack
    "rows on 2": (2, Shard(1)),
    "copies on 2": (2, Replicate()),
}


def by_functions() -> dmuon.DistributedConfig:
    def assign(params: list[Tensor], state: dict[str, Any]) -> dict[int, int]:
        return {i: i % dist.get_world_size() for i in range(len(params))}

    return dmuon.DistributedConfig(assign, *functions_of_whole_tensors(), state={}, prefetch_count=0)


def by_dtensors() -> dmuon.DistributedConfig:
    return dmuon.create_dtensor_config(costs="flops")


def world_of(name: str) -> int:
    where, _, _ = name.partition(", ")
    if where in PLACEMENTS:
        return PLACEMENTS[where][0]
    return 1 if where == SINGLE else LAYOUTS[where].world


def start(name: str, seed: int = 0) -> Run:
    """``name`` is that of a layout of the toy, or of placements of experts; behind a comma stands what is special."""
    where, _, kind = name.partition(", ")
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    if where in PLACEMENTS:
        experts = Experts(PLACEMENTS[where][1], dtype)
        config = None if experts.mesh is None else by_functions() if kind == "functions" else by_dtensors()
        groups = [{"params": list(experts.parameters()), "use_muon": True}]
        return RunOfExperts(experts, dmuon.Muon(groups, **OPTIONS, distributed_config=config), lambda part: part)
    model = build(seed=seed).to(dtype)
    if where == SINGLE:
        whole, config, mine = model, None, lambda part: part
    else:
        laid = lay(where, model)
        whole, config, mine = laid.model, laid.config, laid.mine
    given: Any = whole
    if kind == "both":  # Muon takes embedding and head, too, which FSDP2 shards where dmuon owns the blocks
        given = [
            {"params": [p for p in model.parameters() if p.ndim == 2], "use_muon": True},
            {"params": [p for p in model.parameters() if p.ndim == 1], "use_muon": False, "weight_decay": 0.0},
        ]
        config = None if where == SINGLE else by_dtensors()
    return Run(whole, dmuon.Muon(given, **OPTIONS, distributed_config=config), mine)


def inner(run: Run) -> nn.Module:
    return getattr(run.model, "module", run.model)


def momenta(run: Run) -> dict[str, Tensor]:
    """What ``optimizer.state`` shows, by name."""
    named = inner(run).named_parameters()
    return {n: run.optimizer.state[p][MOMENTUM] for n, p in named if is_matrix(n) or isinstance(run, RunOfExperts)}


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
    *((source, target) for source, target in AROUND if source in (SINGLE, "fsdp2-3", "1d", "fsdp2-2", "tp-alone")),
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


def expected_weights(name: str) -> dict[str, Tensor]:
    """Of ``torch.optim.Muon`` in one process, after all steps."""
    where, _, kind = name.partition(", ")
    if where in PLACEMENTS:
        twin = Twin([1.0 + t for t in Experts.noise(99)])
        for step in range(TOTAL):
            twin.step(Experts.noise(step))
        return {f"weights.{i}": t.reshape(Experts.SHAPES[i]) for i, t in enumerate(twin.weights())}
    return reference_weights(TOTAL, matrix=is_2d if kind == "both" else is_matrix)


def is_2d(name: str) -> bool:
    return is_matrix(name) or name in ("embed.weight", "head.weight")


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
    [*("fsdp2-3", "fsdp2-tp", "ddp"), *(pytest.param(n, marks=pytest.mark.slow) for n in ("fsdp2-hsdp", "tp-alone"))],
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
ADOPTING = {"fsdp2-3": [False, True], "fsdp2-tp": [True], "ddp": [True, False], "tp-alone": [False, True]}
ADOPTING_SLOWLY = {"fsdp2-2": [False, True], "fsdp2-hsdp": [True, False]}


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
        (4, "fsdp2-tp"),
        pytest.param(4, "fsdp2-hsdp", marks=pytest.mark.slow),
        pytest.param(2, "tp-alone", marks=pytest.mark.slow),
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
@pytest.mark.parametrize("flat", [False, True], ids=["parameters", "parameters-and-groups"])
def test_state_follows_names_when_groups_are_reordered(
    ranks: RankPool, tmp_path: Path, uninterrupted: dict[str, Tensor], flat: bool
) -> None:
    """DCP keys groups by position unless ``flatten_optimizer_state_dict`` is set; state by name always."""
    ranks(2, save_flat, str(tmp_path), "fsdp2-2", flat)
    for weights in ranks(3, resume_reordered, str(tmp_path), "fsdp2-3", flat):
        assert_equal_weights(weights, uninterrupted)


def train_growing(run: Run) -> dict[str, Tensor]:
    """Matrices that join later meet others that keep their momentum."""
    first, *others = dmuon.param_groups(run.model)
    early, late = first["params"][:5], first["params"][5:]
    config = run.optimizer._origin.config and by_dtensors()
    run.optimizer = dmuon.Muon([{**first, "params": early}, *others], **OPTIONS, distributed_config=config)
    run.train(range(2))
    before = {id(p): local_tensor(run.optimizer.state[p][MOMENTUM]).clone() for p in early}
    run.optimizer.add_param_group({"params": late, "use_muon": True})
    for param in early:
        assert torch.equal(local_tensor(run.optimizer.state[param][MOMENTUM]), before[id(param)])
    run.train(range(2, 4))
    return full_state(run.model)


@pytest.mark.pitfall("P31")
@on_ranks(2)
def test_momentum_stays_when_a_group_is_added(rank: int, world: int) -> None:
    assert_equal_weights(train_growing(start("fsdp2-2")), train_growing(start(SINGLE)))


# -- momentum edited by hand ---------------------------------------------------------------------------------------


def edit(run: Run, how: str) -> None:
    """Halve or clear all momentum."""
    for name, momentum in momenta(run).items():
        values = run.optimizer.state[inner(run).get_parameter(name)]
        match how:
            case "in place":
                momentum.mul_(0.5)
            case "same layout":
                values[MOMENTUM] = momentum * 0.5
            case "local part":
                values[MOMENTUM] = local_tensor(momentum) * 0.5
            case "whole":
                values[MOMENTUM] = (momentum.full_tensor() if isinstance(momentum, DTensor) else momentum) * 0.5
            case "other layout":
                if isinstance(momentum, DTensor):
                    mesh = momentum.device_mesh
                    momentum = distribute_tensor(momentum.full_tensor(), mesh, [Shard(1)] * mesh.ndim)
                values[MOMENTUM] = momentum * 0.5
            case "cleared":
                values.clear()
            case "zeroed":
                momentum.zero_()


def train_with_edit(name: str, how: str, saving: bool = False) -> dict[str, Tensor]:
    run = start(name)
    run.train(range(2))
    with torch.no_grad():
        edit(run, how)
    if saving:  # what is saved is what the next step would use
        state = run.optimizer.state_dict()
        config = run.optimizer._origin.config and by_dtensors()
        run = Run(run.model, dmuon.Muon(run.model, **OPTIONS, distributed_config=config), run.part)
        run.optimizer.load_state_dict(state)
    run.train(range(2, 4))
    return full_state(inner(run))


HOW = ["in place", "same layout", "local part", "whole", "other layout", "cleared"]
EDITED = [(3, "fsdp2-3", "local part", False), (3, "fsdp2-3", "other layout", False), (3, "fsdp2-3", "cleared", True)]
EDITED_SLOWLY = [(3, "fsdp2-3", how, saving) for how in HOW for saving in (False, True)]
EDITED_SLOWLY = [case for case in EDITED_SLOWLY if case not in EDITED]
EDITED_SLOWLY += [(4, "fsdp2-tp", how, False) for how in HOW]
EDITED_SLOWLY += [(2, "tp", how, False) for how in HOW if how not in ("whole", "other layout")]  # no full_tensor()


@pytest.mark.parametrize(
    ("world", "name", "how", "saving"),
    [*EDITED, *(pytest.param(*case, marks=pytest.mark.slow) for case in EDITED_SLOWLY)],
)
@on_ranks()
def test_edited_momentum_counts_in_the_next_step(rank: int, world: int, name: str, how: str, saving: bool) -> None:
    expected = train_with_edit(SINGLE, "zeroed" if how == "cleared" else "in place")
    assert_equal_weights(train_with_edit(name, how, saving), expected)


@on_ranks(2, timeout=20.0, expect=ValueError, match=r"blocks\.1\.up\.weight.*\(1, 13\)")
def test_replaced_momentum_of_another_shape_is_refused_by_name(rank: int, world: int) -> None:
    run = start("fsdp2-2")
    run.train(range(1))
    param = inner(run).get_parameter("blocks.1.up.weight")
    run.optimizer.state[param][MOMENTUM] = torch.zeros(1, 13)  # copying would broadcast it
    run.train(range(1, 2))


# -- refusals ------------------------------------------------------------------------------------------------------


def load_faulty(rank: int, world: int, name: str, fault: str, everywhere: bool) -> None:
    run = start(name)
    state = run.optimizer.state_dict()
    if everywhere or rank == world - 1:
        groups = state["param_groups"]
        match fault:
            case "fewer":
                groups[0]["params"] = groups[0]["params"][:-1]
            case "moved":  # the same count in all
                groups[1]["params"] = [groups[0]["params"].pop(), *groups[1]["params"]]
            case "route":
                groups[0]["use_muon"] = False
            case "shape":
                state["state"][4][MOMENTUM] = torch.zeros(1, 13)
            case "part":
                state["state"][4][MOMENTUM] = local_tensor(state["state"][4][MOMENTUM])[:5]
            case "no tensor":
                state["state"][4][MOMENTUM] = None if everywhere else 3.0
            case "missing":
                del state["state"][4][MOMENTUM]
            case "whole":
                state["state"][4][MOMENTUM] = torch.zeros(29, 13)
    run.optimizer.load_state_dict(state)


KEY = r"blocks\.1\.up\.weight"  # number 4
FAULTS = {
    "fewer": "parameters", "moved": "group 0", "route": "use_muon", "shape": KEY + r".*\(1, 13\)", "part": KEY,
    "no tensor": KEY, "missing": KEY + ".*absent", "whole": KEY + ".*whole",
}  # fmt: skip


FAULTS_ON = {
    ("fsdp2-2", False): list(FAULTS),
    ("fsdp2-2", True): ["part"],
    ("fsdp2-tp", False): list(FAULTS),
    ("ddp", True): [fault for fault in FAULTS if fault not in ("missing", "whole", "no tensor")],
}


@pytest.fixture(scope="module")
def told(ranks: RankPool) -> Callable[[str, bool], list[list[Outcome]]]:
    """What each rank came to with each fault, in one call."""

    @cache
    def of_layout(name: str, everywhere: bool) -> list[list[Outcome]]:
        programs = [(load_faulty, (name, fault, everywhere)) for fault in FAULTS_ON[name, everywhere]]
        return ranks(world_of(name), attempt, programs)

    return of_layout


@pytest.mark.pitfall("P27", "P31", "P48")
@pytest.mark.parametrize(
    ("name", "everywhere", "fault"),
    [
        pytest.param(*layout, fault, marks=() if layout[0] == "fsdp2-2" else pytest.mark.slow)
        for layout, faults in FAULTS_ON.items()
        for fault in faults
    ],
)
def test_faulty_state_raises_on_every_rank(
    told: Callable[[str, bool], list[list[Outcome]]], name: str, everywhere: bool, fault: str
) -> None:
    for of_rank in told(name, everywhere):
        outcome = of_rank[FAULTS_ON[name, everywhere].index(fault)]
        assert outcome.raised(ValueError) and re.search(FAULTS[fault], outcome.message), outcome


@on_ranks(2)
def test_momentum_that_no_rank_has_is_zero(rank: int, world: int) -> None:
    """As ``torch.optim.Muon`` saves what never had a gradient."""
    run = start("fsdp2-2")
    run.train(range(2))
    state = run.optimizer.state_dict()
    before = {n: local_tensor(m).clone() for n, m in momenta(run).items()}
    del state["state"][4]
    run.optimizer.load_state_dict(state)
    for name, momentum in momenta(run).items():
        expected = torch.zeros_like(before[name]) if name == "blocks.1.up.weight" else before[name]
        assert torch.equal(local_tensor(momentum), expected), name


@pytest.mark.pitfall("P48")
@on_ranks(3, expect=ValueError, match=r"momentum of .*\(3, 3\)", timeout=20.0)
def test_fault_reaches_ranks_that_share_nothing_with_the_faulty_one(rank: int, world: int) -> None:
    """Ranks 0 and 1 share one matrix, 1 and 2 another, 0 and 2 none."""
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])]
    one = torch.ones(4, 6)
    tensors = [distribute_tensor(one, m, [Shard(0)]) if rank in m.mesh.tolist() else one for m in meshes]
    optimizer = dmuon.Muon(list(map(nn.Parameter, tensors)), **OPTIONS, distributed_config=by_dtensors())
    state = optimizer.state_dict()
    if rank == 2:  # of the pairs the first has agreed by then
        state["state"][1][MOMENTUM] = torch.zeros(3, 3)
    optimizer.load_state_dict(state)


# -- stacks --------------------------------------------------------------------------------------------------------


@on_ranks(3, timeout=30.0)
def test_momentum_of_another_mesh_loads_where_a_rank_holds_nothing(rank: int, world: int) -> None:
    """Momentum from a mesh of the same ranks, cut otherwise, into stacks of which one rank holds nothing."""
    run = start("experts on 3")
    state = run.optimizer.state_dict()
    other = init_device_mesh("cpu", (3,), mesh_dim_names=("other",))
    for i, momentum in enumerate(Experts.noise(7)):
        state["state"][i][MOMENTUM] = distribute_tensor(momentum, other, [Shard(1)])
    run.optimizer.load_state_dict(state)
    for found, given in zip(momenta(run).values(), Experts.noise(7), strict=True):
        assert torch.equal(found.full_tensor(), given)


@pytest.mark.parametrize("where", ["same mesh", "other mesh"])
@on_ranks(2)
def test_momentum_follows_a_changed_layout(rank: int, world: int, where: str) -> None:
    """Weights that are laid out anew between two steps take their momentum with them."""
    run = start("rows on 2")
    run.train(range(2))
    model = run.model
    for weight in model.weights:
        weight.grad = None
        mesh = weight.device_mesh if where == "same mesh" else init_device_mesh("cpu", (2,), mesh_dim_names=("new",))
        moved = weight.detach().redistribute(placements=[Replicate()]).to_local()
        torch.utils.swap_tensors(weight, nn.Parameter(distribute_tensor(moved, mesh, [Shard(0)])))
    model.placement, model.mesh = Shard(0), model.weights[0].device_mesh
    run.train(range(2, TOTAL))
    assert all(momentum.placements == (Shard(0),) for momentum in momenta(run).values())
    assert_equal_weights(full_state(model), expected_weights("rows on 2"))
