"""Stock checkpointing of models that others have sharded, and between them and dedicated ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_checkpoint_topologies as dedicated
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from harness.assertions import assert_equal_weights
from harness.oracle import reference_weights
from harness.pool import RankPool
from harness.topologies import lay
from harness.toy import batch, build
from test_checkpoint_topologies import (
    FROM_RANK_0,
    FULL,
    FULL_ON_RANK_0,
    OPTIONS,
    SAVED,
    SINGLE,
    TOTAL,
    Plain,
    Run,
    assert_same_on_all_ranks,
    assert_same_tensors,
    load,
    tensors_of,
)
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
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import dmuon
from dmuon.check.model import is_matrix, loss_of, shard
from dmuon.check.topologies import full_state, tensor_parallel
from dmuon.platform.torch_private import local_tensor

MOMENTUM = "momentum_buffer"
# Laid out by torch alone: ranks, and extents of data-parallel dimensions.
EXCHANGED: dict[str, tuple[int, tuple[int, ...]]] = {
    "fsdp2-2": (2, (2,)),
    "fsdp2-3": (3, (3,)),
    "fsdp2-hsdp": (4, (2, 2)),
    "tp-alone": (2, ()),
    "fsdp2-tp": (4, (2,)),
    "ddp": (2, (2,)),
}
DEDICATED = ["1d", "hsdp", "tp"]
NAMES = [SINGLE, *DEDICATED, *EXCHANGED]


def world_of(name: str) -> int:
    return EXCHANGED[name][0] if name in EXCHANGED else dedicated.world_of(name)


def lay_by_torch(name: str, model: nn.Module) -> tuple[nn.Module, int, int]:
    """The model as torch shards it, and this rank's part in data parallelism."""
    world, data = EXCHANGED[name]
    rank = dist.get_rank()
    if name == "ddp":
        return nn.parallel.DistributedDataParallel(model), rank, world
    extents = (*data, 2) if "tp" in name else data
    names = ("replicate", "shard", "tp")[2 - len(data) :][: len(extents)]
    mesh = init_device_mesh("cpu", extents, mesh_dim_names=names)
    if "tp" in name:
        tensor_parallel(model, mesh["tp"])
        rank, world = rank // 2, world // 2
    if data:
        along = mesh["shard"] if "tp" in name else mesh
        for block in model.blocks:
            fully_shard(block, mesh=along)
        fully_shard(model, mesh=along)
    return model, rank, world


def start(name: str, seed: int = 0, **options: Any) -> Run:
    if name not in EXCHANGED:
        return dedicated.start(name, seed=seed)
    model, rank, world = lay_by_torch(name, build(seed=seed))
    config = None if name == "ddp" else dmuon.create_dtensor_config(costs="flops")
    optimizer = dmuon.Muon(model, **OPTIONS, **options, distributed_config=config)
    return Run(model, optimizer, lambda tensors: shard(tensors, rank, world))


def momenta(run: Run) -> dict[str, Tensor]:
    """What ``optimizer.state`` shows, by name."""
    return {n: run.optimizer.state[p][MOMENTUM] for n, p in inner(run).named_parameters() if is_matrix(n)}


def inner(run: Run) -> nn.Module:
    module: nn.Module = run.model.module if hasattr(run.model, "module") else run.model
    return module


# -- between topologies and residencies ----------------------------------------------------------------------------


def save(_rank: int, _world: int, path: str, name: str) -> dict[str, Tensor]:
    run = start(name)
    run.train(range(SAVED))
    weights, state = get_state_dict(run.model, run.optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
    run.train(range(SAVED, TOTAL))
    return full_state(inner(run))


def resume(rank: int, _world: int, path: str, name: str, stepped: bool) -> dict[str, Tensor]:
    run = start(name, seed=50 + rank)
    if stepped:
        run.train(range(1))  # momentum holds something to be overwritten
    load(run, path)
    assert all(m.dtype == torch.float32 for m in momenta(run).values())
    run.train(range(SAVED, TOTAL))
    return full_state(inner(run))


Saved = Callable[[str], tuple[str, dict[str, Tensor]]]


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The folder of a checkpoint after ``SAVED`` steps, and the weights of the run that went on."""
    found: dict[str, tuple[str, dict[str, Tensor]]] = {}

    def checkpoint(name: str) -> tuple[str, dict[str, Tensor]]:
        if name not in found:
            folder = str(tmp_path_factory.mktemp(name))
            found[name] = folder, ranks(world_of(name), save, folder, name)[0]
        return found[name]

    return checkpoint


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, Tensor]:
    return reference_weights(TOTAL)


# Each is left once and reached once, residencies taking turns.
ROUND = [SINGLE, "fsdp2-3", "1d", "fsdp2-tp", "hsdp", "ddp", "tp", "fsdp2-hsdp", "fsdp2-2", "tp-alone"]
QUICK = list(zip(ROUND, [*ROUND[1:], SINGLE], strict=True))
SLOW = [(a, ROUND[(i + step) % len(ROUND)]) for step in (3, 6) for i, a in enumerate(ROUND)]


@pytest.mark.pitfall("P23", "P28", "P29")
@pytest.mark.parametrize(
    ("source", "target"), [*QUICK, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW)]
)
def test_resume_continues_the_uninterrupted_run(
    ranks: RankPool, saved: Saved, uninterrupted: dict[str, Tensor], source: str, target: str
) -> None:
    folder, went_on = saved(source)
    results = ranks(world_of(target), resume, folder, target, ROUND.index(target) % 2 == 0)
    assert_same_on_all_ranks(results)
    assert_equal_weights(results[0], uninterrupted)
    if source == target:
        assert_same_tensors(results[0], went_on)


# -- whole state dicts ---------------------------------------------------------------------------------------------


def export(_rank: int, _world: int, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    run = start(name)
    run.train(range(SAVED))
    weights, state = get_state_dict(run.model, run.optimizer, options=FULL_ON_RANK_0)
    return dict(weights), dict(state)


@pytest.fixture(scope="module")
def plain() -> Plain:
    return Plain(SAVED)


@pytest.mark.pitfall("P27", "P33")
@pytest.mark.parametrize(
    "name",
    [*("fsdp2-3", "fsdp2-tp", "ddp"), *(pytest.param(n, marks=pytest.mark.slow) for n in ("fsdp2-hsdp", "tp-alone"))],
)
def test_full_state_dict_is_that_of_a_single_process_and_loads_into_torch(
    ranks: RankPool, plain: Plain, uninterrupted: dict[str, Tensor], name: str
) -> None:
    weights, state = ranks(world_of(name), export, name)[0]
    assert list(weights) == list(plain.weights())
    assert_equal_weights(weights, plain.weights())
    assert_equal_weights(tensors_of(state), tensors_of(plain.state()))
    torch_alone = Plain(seed=3)
    torch_alone.load(weights, state)
    torch_alone.train(range(SAVED, TOTAL))
    assert_equal_weights(torch_alone.weights(), uninterrupted)


def adopt(
    rank: int, _world: int, name: str, weights: dict[str, Tensor], state: dict[str, Any], from_rank0: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Load whole state dicts, give them back, and train on."""
    run = start(name, seed=50 + rank)
    ours = get_optimizer_state_dict(run.model, run.optimizer, options=FULL)
    given = {"state": state["state"], "param_groups": ours["param_groups"]}
    options = FROM_RANK_0 if from_rank0 else FULL
    silent = from_rank0 and rank > 0
    set_model_state_dict(run.model, {} if silent else dict(weights), options=options)
    set_optimizer_state_dict(run.model, run.optimizer, {} if silent else given, options=options)
    found, kept = copy.deepcopy(get_state_dict(run.model, run.optimizer, options=FULL))
    run.train(range(SAVED, TOTAL))
    return dict(found), tensors_of(dict(kept)), full_state(inner(run))


# torch's distribute_tensor splits no uneven bias over FSDP2 and tensor parallelism; its broadcast does.
ADOPTING = [(n, b) for n in EXCHANGED for b in (False, True) if (n, b) != ("fsdp2-tp", False)]
QUICKLY = [("fsdp2-3", False), ("fsdp2-3", True), ("fsdp2-tp", True), ("ddp", True), ("tp-alone", False)]


@pytest.mark.pitfall("P28", "P33")
@pytest.mark.parametrize(
    ("name", "from_rank0"),
    [*QUICKLY, *(pytest.param(*case, marks=pytest.mark.slow) for case in ADOPTING if case not in QUICKLY)],
)
def test_full_state_dicts_load(
    ranks: RankPool, plain: Plain, uninterrupted: dict[str, Tensor], name: str, from_rank0: bool
) -> None:
    weights, state = plain.weights(), plain.state()
    results = ranks(world_of(name), adopt, name, weights, state, from_rank0)
    for found, found_state, _ in results:
        assert_same_tensors(found, weights)
        assert_same_tensors(found_state, tensors_of(state))
    trained = [after for _, _, after in results]
    assert_same_on_all_ranks(trained)
    assert_equal_weights(trained[0], uninterrupted)


# -- plain state dicts of torch.optim.Muon -------------------------------------------------------------------------


def exchange_momentum(
    rank: int, _world: int, name: str, weights: dict[str, Tensor], muon: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One step on from torch's momentum, whole tensors on every rank: weights, and momentum in torch's order."""
    run = start(name, seed=4)
    set_model_state_dict(run.model, weights if rank == 0 else {}, options=FROM_RANK_0)
    matrices = [p for n, p in inner(run).named_parameters() if is_matrix(n)]
    config = run.optimizer._config and dmuon.create_dtensor_config(costs="flops")
    optimizer = dmuon.Muon(matrices, lr=1.0, distributed_config=config)
    optimizer.load_state_dict(muon)
    given = {i: values[MOMENTUM] for i, values in muon["state"].items()}
    for i, values in optimizer.state_dict()["state"].items():
        assert torch.equal(values[MOMENTUM].full_tensor(), given[i])
    run.backward(SAVED)
    optimizer.step()
    state = optimizer.state_dict()["state"]
    found = {str(i): state[i][MOMENTUM].full_tensor() for i in range(len(matrices))}
    return {n: t for n, t in full_state(run.model).items() if is_matrix(n)}, found


@pytest.mark.pitfall("P33")
@pytest.mark.parametrize(
    "name", ["fsdp2-3", "fsdp2-tp", *(pytest.param(n, marks=pytest.mark.slow) for n in ("fsdp2-hsdp", "tp-alone"))]
)
def test_momentum_of_torch_muon_loads_and_goes_back(ranks: RankPool, name: str) -> None:
    stock = Plain(SAVED)
    given = copy.deepcopy((stock.weights(), stock.reference.muon.state_dict()))
    results = ranks(world_of(name), exchange_momentum, name, *given)
    stock.train(range(SAVED, SAVED + 1))
    expected = {n: t for n, t in stock.weights().items() if is_matrix(n)}
    state = stock.reference.muon.state_dict()
    kept = {str(i): values[MOMENTUM].clone() for i, values in state["state"].items()}
    for weights, found in results:
        assert_equal_weights(weights, expected)
        assert_equal_weights(found, kept)
    for index in state["state"]:
        state["state"][index][MOMENTUM] = results[0][1][str(index)]
    stock.reference.muon.load_state_dict(state)
    stock.train(range(SAVED + 1, TOTAL))
    assert_equal_weights(stock.weights(), reference_weights(TOTAL))


# -- what a state dict holds, and saving ---------------------------------------------------------------------------


def contents(_rank: int, _world: int, name: str) -> dict[str, torch.Size]:
    run = start(name)
    for stepped in (False, True):
        if stepped:
            run.train(range(1))
        copied = copy.deepcopy(run.optimizer.state_dict())
        _, named = get_state_dict(run.model, run.optimizer)
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
    return {n: v[MOMENTUM].shape for n, v in named["state"].items() if MOMENTUM in v}


@pytest.mark.pitfall("P27")
@pytest.mark.parametrize("name", ["fsdp2-3", "fsdp2-tp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_momentum_lies_as_its_parameter(ranks: RankPool, name: str) -> None:
    """Also before the first step."""
    expected = {n: p.shape for n, p in build().named_parameters() if is_matrix(n)}
    assert ranks(world_of(name), contents, name) == [expected] * world_of(name)


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
def test_saving_changes_nothing(ranks: RankPool, saved: Saved, name: str) -> None:
    for weights in ranks(world_of(name), save_and_compare, name):
        assert_same_tensors(weights, saved(name)[1])


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
    config = dmuon.create_dtensor_config(costs="flops")
    run.optimizer = dmuon.Muon(groups, **{**OPTIONS, "lr": 1.0}, distributed_config=config)  # the saved lr comes back
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


def add_group(_rank: int, _world: int) -> dict[str, Tensor]:
    """Matrices that join later meet others that keep their momentum."""
    run = start("fsdp2-2")
    first, *others = dmuon.param_groups(run.model)
    early, late = first["params"][:5], first["params"][5:]
    config = dmuon.create_dtensor_config(costs="flops")
    run.optimizer = dmuon.Muon([{**first, "params": early}, *others], **OPTIONS, distributed_config=config)
    run.train(range(2))
    before = {id(p): local_tensor(run.optimizer.state[p][MOMENTUM]).clone() for p in early}
    run.optimizer.add_param_group({"params": late, "use_muon": True})
    for param in early:
        assert torch.equal(local_tensor(run.optimizer.state[param][MOMENTUM]), before[id(param)])
    run.train(range(2, 4))
    return full_state(run.model)


@pytest.mark.pitfall("P31")
def test_momentum_stays_when_a_group_is_added(ranks: RankPool) -> None:
    model = build()
    first, *others = dmuon.param_groups(model)
    optimizer = dmuon.Muon([{**first, "params": first["params"][:5]}, *others], **OPTIONS)
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": first["params"][5:], "use_muon": True})
        optimizer.zero_grad()
        loss_of(model, *batch(step)).backward()
        optimizer.step()
    for weights in ranks(2, add_group):
        assert_equal_weights(weights, dict(model.state_dict()))


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


def train_with_edit(_rank: int, _world: int, name: str, how: str, saving: bool) -> dict[str, Tensor]:
    run = start(name)
    run.train(range(2))
    with torch.no_grad():
        edit(run, how)
    if saving:  # what is saved is what the next step would use
        state = run.optimizer.state_dict()
        config = run.optimizer._config and dmuon.create_dtensor_config(costs="flops")
        run = Run(run.model, dmuon.Muon(run.model, **OPTIONS, distributed_config=config), run.part)
        run.optimizer.load_state_dict(state)
    run.train(range(2, 4))
    return full_state(inner(run))


HOW = ["in place", "same layout", "local part", "whole", "other layout", "cleared"]


@pytest.fixture(scope="module")
def edited() -> Callable[[bool], dict[str, Tensor]]:
    def weights(cleared: bool) -> dict[str, Tensor]:
        run = start(SINGLE)
        run.train(range(2))
        for momentum in momenta(run).values():
            momentum.mul_(0.0 if cleared else 0.5)
        run.train(range(2, 4))
        return {n: p.detach().clone() for n, p in run.model.state_dict().items()}

    return weights


@pytest.mark.parametrize(
    ("how", "saving"),
    [
        *((how, False) for how in HOW),
        *(pytest.param(how, True, marks=() if how in ("whole", "cleared") else pytest.mark.slow) for how in HOW),
    ],
)
def test_edited_momentum_counts_in_the_next_step(
    ranks: RankPool, edited: Callable[[bool], dict[str, Tensor]], how: str, saving: bool
) -> None:
    for weights in ranks(3, train_with_edit, "fsdp2-3", how, saving):
        assert_equal_weights(weights, edited(how == "cleared"))


# Owned momentum has no full_tensor().
EDITED = [("fsdp2-tp", how) for how in HOW]
EDITED += [("tp", how) for how in HOW if how not in ("whole", "other layout")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "how"), EDITED)
def test_edited_momentum_counts_on_every_topology(
    ranks: RankPool, edited: Callable[[bool], dict[str, Tensor]], name: str, how: str
) -> None:
    for weights in ranks(world_of(name), train_with_edit, name, how, False):
        assert_equal_weights(weights, edited(how == "cleared"))


def replace_badly(_rank: int, _world: int) -> None:
    run = start("fsdp2-2")
    run.train(range(1))
    param = inner(run).get_parameter("blocks.1.up.weight")
    run.optimizer.state[param][MOMENTUM] = torch.zeros(1, 13)  # copying would broadcast it
    run.train(range(1, 2))


def test_replaced_momentum_of_another_shape_is_refused_by_name(ranks: RankPool) -> None:
    match = r"blocks\.1\.up\.weight.*\(1, 13\)"
    ranks(2, replace_badly, expect=ValueError, match=match, timeout=20.0)


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


@pytest.mark.pitfall("P27", "P31", "P48")
@pytest.mark.parametrize(
    ("name", "fault", "everywhere"),
    [
        *(("fsdp2-2", fault, False) for fault in FAULTS),
        ("fsdp2-2", "part", True),
        *(
            pytest.param(n, fault, b, marks=pytest.mark.slow)
            for n, b in (("fsdp2-tp", False), ("ddp", True))
            for fault in FAULTS
            if not (b and fault in ("missing", "whole", "no tensor"))
        ),
    ],
)
def test_faulty_state_raises_on_every_rank(ranks: RankPool, name: str, fault: str, everywhere: bool) -> None:
    ranks(world_of(name), load_faulty, name, fault, everywhere, timeout=20.0, expect=ValueError, match=FAULTS[fault])


def absent_everywhere(_rank: int, _world: int) -> None:
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


def test_momentum_that_no_rank_has_is_zero(ranks: RankPool) -> None:
    ranks(2, absent_everywhere)


def load_faulty_chain(rank: int, _world: int) -> None:
    """Ranks 0 and 1 share one matrix, 1 and 2 another, 0 and 2 none."""
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])]
    one = torch.ones(4, 6)
    tensors = [distribute_tensor(one, m, [Shard(0)]) if rank in m.mesh.tolist() else one for m in meshes]
    params = [nn.Parameter(tensor) for tensor in tensors]
    optimizer = dmuon.Muon(params, **OPTIONS, distributed_config=dmuon.create_dtensor_config(costs="flops"))
    state = optimizer.state_dict()
    if rank == 2:  # of the pairs the first has agreed by then
        state["state"][1][MOMENTUM] = torch.zeros(3, 3)
    optimizer.load_state_dict(state)


@pytest.mark.pitfall("P48")
def test_fault_reaches_ranks_that_share_nothing_with_the_faulty_one(ranks: RankPool) -> None:
    ranks(3, load_faulty_chain, expect=ValueError, match=r"momentum of .*\(3, 3\)", timeout=20.0)


# -- precision -----------------------------------------------------------------------------------------------------


def start_in_bf16(name: str, seed: int) -> Run:
    model = build(seed=seed).to(torch.bfloat16)
    if name == SINGLE:
        return Run(model, dmuon.Muon(model, **OPTIONS), lambda tensors: tensors)
    if name in EXCHANGED:
        model, rank, world = lay_by_torch(name, model)
        config = dmuon.create_dtensor_config(costs="flops")
        return Run(model, dmuon.Muon(model, **OPTIONS, distributed_config=config), lambda t: shard(t, rank, world))
    laid = lay(name, model)
    return Run(laid.model, dmuon.Muon(laid.model, **OPTIONS), laid.mine)


def whole_momenta(run: Run) -> dict[str, Tensor]:
    _, state = get_state_dict(run.model, run.optimizer, options=FULL)
    return copy.deepcopy({n: values[MOMENTUM] for n, values in state["state"].items() if MOMENTUM in values})


def save_bf16(_rank: int, _world: int, path: str, name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    run = start_in_bf16(name, 0)
    run.train(range(SAVED))
    weights, state = get_state_dict(run.model, run.optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
    found = whole_momenta(run)
    run.train(range(SAVED, TOTAL))
    return found, full_state(run.model)


def resume_bf16(_rank: int, _world: int, path: str, name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    run = start_in_bf16(name, 50)
    load(run, path)
    found = whole_momenta(run)
    run.train(range(SAVED, TOTAL))
    assert all(m.dtype == torch.float32 and local_tensor(m).isfinite().all() for m in momenta(run).values())
    return found, full_state(run.model)


@pytest.mark.pitfall("P23", "P32")
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("fsdp2-2", "fsdp2-2"),
        ("1d", "fsdp2-3"),
        ("fsdp2-3", "1d"),
        pytest.param("fsdp2-hsdp", "tp-alone", marks=pytest.mark.slow),
        pytest.param("tp-alone", SINGLE, marks=pytest.mark.slow),
    ],
)
def test_momentum_of_bf16_parameters_stays_in_fp32(ranks: RankPool, tmp_path: Path, source: str, target: str) -> None:
    held, went_on = ranks(world_of(source), save_bf16, str(tmp_path), source)[0]
    assert held.keys() == {n for n, _ in build().named_parameters() if is_matrix(n)}
    assert any(not torch.equal(m, m.bfloat16().float()) for m in held.values())
    for found, weights in ranks(world_of(target), resume_bf16, str(tmp_path), target):
        assert_same_tensors(found, held)
        if source == target:
            assert_same_tensors(weights, went_on)


# -- stacks, and functions of users --------------------------------------------------------------------------------


class Experts(nn.Module):
    """Two stacks and a matrix, cut alike, with gradients that only the step decides."""

    SHAPES = ((4, 6, 10), (5, 9, 4), (7, 11))

    def __init__(self, placement: Placement | None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.mesh = None if placement is None else init_device_mesh("cpu", (dist.get_world_size(),))
        self.placement = placement
        self.weights = nn.ParameterList(self.lay(1.0 + t.to(dtype)) for t in self.noise(99))

    def noise(self, seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(shape, generator=generator) for shape in self.SHAPES]

    def lay(self, tensor: Tensor) -> Tensor:
        return tensor if self.mesh is None else distribute_tensor(tensor, self.mesh, [self.placement])

    def train(self, optimizer: Any, steps: range) -> None:  # type: ignore[override]
        for step in steps:
            for weight, grad in zip(self.weights, self.noise(step), strict=True):
                weight.grad = self.lay(grad.to(weight.dtype))
            optimizer.step()


PLACEMENTS: dict[str, tuple[int, Placement | None]] = {
    "single": (1, None),
    "experts on 3": (3, Shard(0)),  # the last rank holds none of the first stack
    "rows on 2": (2, Shard(1)),
    "copies on 2": (2, Replicate()),
}


def start_experts(name: str, functions: bool, dtype: torch.dtype) -> tuple[Experts, dmuon.Muon]:
    model = Experts(PLACEMENTS[name][1], dtype)
    config = None
    if name != "single":
        config = whole_tensors() if functions else dmuon.create_dtensor_config(costs="flops")
    groups = [{"params": list(model.parameters()), "use_muon": True}]
    return model, dmuon.Muon(groups, **OPTIONS, distributed_config=config)


def whole_tensors() -> dmuon.DistributedConfig:
    """The simplest functions that a user may write."""

    def assign(params: list[Tensor], state: dict[str, Any]) -> dict[int, int]:
        return {i: i % dist.get_world_size() for i in range(len(params))}

    def gather(update: DTensor, dst_rank: int, state: dict[str, Any]) -> Tensor | None:
        state["laid"] = {**state.get("laid", {}), state["current_param_idx"]: (update.device_mesh, update.placements)}
        whole = update.full_tensor()
        return whole if dist.get_rank() == dst_rank else None

    def redistribute(update: Tensor | None, src_rank: int, state: dict[str, Any]) -> Tensor:
        shape = Experts.SHAPES[state["current_param_idx"]]
        whole = torch.empty(shape) if update is None else update.contiguous()
        dist.broadcast(whole, src_rank)
        mesh, placements = state["laid"][state["current_param_idx"]]
        return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()

    return dmuon.DistributedConfig(assign, gather, redistribute, state={}, prefetch_count=0)


def whole(tensors: list[Tensor]) -> dict[str, Tensor]:
    found = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
    return {str(i): t.detach().clone() for i, t in enumerate(found)}


def save_experts(
    _rank: int, _world: int, path: str, name: str, functions: bool, dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, optimizer = start_experts(name, functions, dtype)
    model.train(optimizer, range(SAVED))
    for weight in model.weights:
        momentum = optimizer.state[weight][MOMENTUM]
        assert momentum.dtype == local_tensor(momentum).dtype == torch.float32
        assert local_tensor(momentum).shape == local_tensor(weight).shape
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
    held = whole([optimizer.state[w][MOMENTUM] for w in model.weights])
    model.train(optimizer, range(SAVED, TOTAL))
    return whole(list(model.weights)), held


def resume_experts(
    _rank: int, _world: int, path: str, name: str, functions: bool, dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, optimizer = start_experts(name, functions, dtype)
    weights, state = get_state_dict(model, optimizer)
    loaded = {"model": weights, "optimizer": state}
    dcp.load(loaded, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=loaded["optimizer"])
    held = whole([optimizer.state[w][MOMENTUM] for w in model.weights])
    model.train(optimizer, range(SAVED, TOTAL))
    return whole(list(model.weights)), held


@pytest.mark.pitfall("P23", "P29")
@pytest.mark.parametrize(
    ("source", "target", "functions"),
    [
        ("single", "experts on 3", ""),
        ("experts on 3", "rows on 2", ""),
        ("rows on 2", "copies on 2", "source"),
        ("copies on 2", "experts on 3", "target"),
        ("experts on 3", "single", "source"),
        pytest.param("experts on 3", "experts on 3", "", marks=pytest.mark.slow),
        pytest.param("rows on 2", "rows on 2", "target", marks=pytest.mark.slow),
    ],
)
def test_stacks_resume_on_other_placements(
    ranks: RankPool, tmp_path: Path, source: str, target: str, functions: str
) -> None:
    single = Experts(None)
    optimizer = dmuon.Muon([{"params": list(single.parameters()), "use_muon": True}], **OPTIONS)
    single.train(optimizer, range(TOTAL))
    expected = whole(list(single.weights))
    fp32 = torch.float32
    before = ranks(PLACEMENTS[source][0], save_experts, str(tmp_path), source, functions == "source", fp32)
    after = ranks(PLACEMENTS[target][0], resume_experts, str(tmp_path), target, functions == "target", fp32)
    for weights, held in [*before, *after]:
        assert_equal_weights(weights, expected)
        assert_same_tensors(held, before[0][1])


@pytest.mark.pitfall("P23", "P32")
def test_ranks_without_any_expert_know_that_momentum_is_fp32(ranks: RankPool, tmp_path: Path) -> None:
    before = ranks(3, save_experts, str(tmp_path), "experts on 3", False, torch.bfloat16)
    after = ranks(3, resume_experts, str(tmp_path), "experts on 3", False, torch.bfloat16)
    for weights, held in after:
        assert_same_tensors(held, before[0][1])
        assert_same_tensors(weights, before[0][0])


def load_foreign(_rank: int, _world: int) -> None:
    """Momentum from a mesh of the same ranks, cut otherwise, into stacks of which one rank holds nothing."""
    model, optimizer = start_experts("experts on 3", False, torch.float32)
    state = optimizer.state_dict()
    given = model.noise(7)
    other = init_device_mesh("cpu", (3,), mesh_dim_names=("other",))
    for i, momentum in enumerate(given):
        state["state"][i][MOMENTUM] = distribute_tensor(momentum, other, [Shard(1)])
    optimizer.load_state_dict(state)
    found = whole([optimizer.state[w][MOMENTUM] for w in model.weights])
    assert_same_tensors(found, {str(i): momentum for i, momentum in enumerate(given)})


def test_momentum_of_another_mesh_loads_where_a_rank_holds_nothing(ranks: RankPool) -> None:
    ranks(3, load_foreign, timeout=30.0)


def change_layout(_rank: int, _world: int, where: str) -> dict[str, Tensor]:
    """Weights that are laid out anew between two steps take their momentum with them."""
    model, optimizer = start_experts("rows on 2", False, torch.float32)
    model.train(optimizer, range(2))
    for weight in model.weights:
        weight.grad = None
        mesh = weight.device_mesh if where == "same mesh" else init_device_mesh("cpu", (2,), mesh_dim_names=("new",))
        moved = weight.detach().redistribute(placements=[Replicate()]).to_local()
        torch.utils.swap_tensors(weight, nn.Parameter(distribute_tensor(moved, mesh, [Shard(0)])))
    model.placement, model.mesh = Shard(0), model.weights[0].device_mesh
    model.train(optimizer, range(2, 4))
    assert all(optimizer.state[w][MOMENTUM].placements == (Shard(0),) for w in model.weights)
    return whole(list(model.weights))


@pytest.mark.parametrize("where", ["same mesh", "other mesh"])
def test_momentum_follows_a_changed_layout(ranks: RankPool, where: str) -> None:
    single = Experts(None)
    optimizer = dmuon.Muon([{"params": list(single.parameters()), "use_muon": True}], **OPTIONS)
    single.train(optimizer, range(4))
    for weights in ranks(2, change_layout, where):
        assert_equal_weights(weights, whole(list(single.weights)))


# -- both residencies in one optimizer -----------------------------------------------------------------------------


def start_mixed(name: str, seed: int) -> Run:
    """The matrices of blocks are owned, embedding and head are sharded by FSDP2; Muon takes all of them."""
    model = build(seed=seed)
    part = lambda tensors: tensors  # noqa: E731
    if name != SINGLE:
        laid = lay(name, model)
        part = laid.mine
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.ndim == 2], "use_muon": True},
        {"params": [p for p in params if p.ndim == 1], "use_muon": False, "weight_decay": 0.0},
    ]
    config = None if name == SINGLE else dmuon.create_dtensor_config(costs="flops")
    return Run(model, dmuon.Muon(groups, **OPTIONS, distributed_config=config), part)


def save_mixed(_rank: int, _world: int, path: str, name: str) -> dict[str, Tensor]:
    run = start_mixed(name, 0)
    run.train(range(SAVED))
    weights, state = get_state_dict(run.model, run.optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
    run.train(range(SAVED, TOTAL))
    return full_state(run.model)


def resume_mixed(_rank: int, _world: int, path: str, name: str) -> dict[str, Tensor]:
    run = start_mixed(name, 50)
    load(run, path)
    run.train(range(SAVED, TOTAL))
    return full_state(run.model)


@pytest.mark.pitfall("P29")
@pytest.mark.parametrize(("source", "target"), [(SINGLE, "hsdp"), pytest.param("hsdp", "1d", marks=pytest.mark.slow)])
def test_owned_and_exchanged_matrices_resume_together(
    ranks: RankPool, tmp_path: Path, source: str, target: str
) -> None:
    saved = ranks(world_of(source), save_mixed, str(tmp_path), source)[0]
    for weights in ranks(world_of(target), resume_mixed, str(tmp_path), target):
        assert_equal_weights(weights, saved)
