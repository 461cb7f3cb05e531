"""Stock checkpointing on every topology and between topologies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.assertions import assert_equal_weights, assert_same_bits, assert_same_tensors
from harness.checkpoints import (
    FROM_RANK_0,
    FULL,
    SAVED,
    SINGLE,
    TOTAL,
    Plain,
    Run,
    load,
    save,
    start,
    tensors_of,
    world_of,
)
from harness.network import full_state, is_matrix, loss_of
from harness.oracle import reference_weights
from harness.pool import RankPool
from harness.topologies import LAYOUTS
from harness.toy import LR, batch, build
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import dmuon
from dmuon.dedicated import state_dict
from dmuon.dedicated.owned_tensor import OwnedTensor

NAMES = [SINGLE, "1d", "hsdp", "ddp-2", "tp", "tp-fsdp"]


# -- between topologies --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """A checkpoint after ``SAVED`` steps: its folder, and by rank whole weights and state, which rank 0 alone holds."""

    folder: str
    whole: list[tuple[dict[str, Any], dict[str, Any]]]


def resume(rank: int, _world: int, paths: list[str], name: str, keep: bool) -> list[dict[str, Tensor]]:
    """Weights after the rest of the steps from each checkpoint, one after the other."""
    run = start(name, seed=50 + rank, keep=keep, lr=1.0)  # the saved one must come back
    run.train(range(1))  # buffers and momentum hold something to be overwritten
    resumed = []
    for path in paths:
        load(run, path)
        assert {group["lr"] for group in run.optimizer.param_groups} == {LR}
        assert all(momentum.dtype == torch.float32 for momentum in run.momenta().values())
        run.train(range(SAVED, TOTAL))
        resumed.append(full_state(run.model))
    return resumed


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Saved]:
    """The checkpoint of a topology."""

    @cache
    def checkpoint(name: str, keep: bool = False) -> Saved:
        folder = str(tmp_path_factory.mktemp(name))
        return Saved(folder, ranks(world_of(name), save, folder, name, keep))

    return checkpoint


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, Tensor]:
    return reference_weights(TOTAL)


RESHARD, KEEP = False, True
OTHERS = ("1d-4", "hsdp-two-lines", "ddp-4", "cp", "tp-ddp")
QUICK = [
    (SINGLE, RESHARD, "1d", RESHARD),
    ("hsdp", KEEP, "1d", RESHARD),
    ("tp", RESHARD, "1d", RESHARD),
    ("1d", RESHARD, "hsdp", KEEP),
    ("1d", RESHARD, "1d-1", RESHARD),
    ("1d", RESHARD, "1d-3-two-lines", RESHARD),
    ("tp", RESHARD, "ddp-2", RESHARD),
]
SLOW = (
    [
        (source, RESHARD, target, KEEP)
        for source in NAMES
        for target in NAMES
        if (source, RESHARD, target, KEEP) not in QUICK
    ]
    + [(source, RESHARD, "hsdp", RESHARD) for source in NAMES]
    + [("hsdp", KEEP, "1d", KEEP), ("hsdp", KEEP, "tp", KEEP), ("tp-fsdp", RESHARD, "ddp-2", RESHARD)]
    + [(source, RESHARD, "1d", RESHARD) for source in ("1d-1", "1d", "1d-4", "1d-4-two-lines")]
    + [("1d", KEEP, "1d-3", KEEP), ("1d-two-lines", KEEP, "1d-two-lines", KEEP), ("1d-3", KEEP, "1d-two-lines", KEEP)]
    + [("1d-two-lines", RESHARD, "1d-3-two-lines", RESHARD)]
    + [("hsdp", RESHARD, other, RESHARD) for other in ("1d-two-lines", "tp-two-lines", *OTHERS)]
)


@pytest.fixture(scope="module")
def resumed(ranks: RankPool, saved: Callable[..., Saved]) -> Callable[..., Any]:
    """By source, and whether it keeps whole weights, what a target made of it on each rank; all sources in one call."""

    @cache
    def of_target(target: str, keep: bool, cases: tuple[Any, ...]) -> dict[tuple[str, bool], list[dict[str, Tensor]]]:
        sources = [case[:2] for case in cases if case[2:] == (target, keep)]
        folders = [saved(*source).folder for source in sources]
        results = ranks(world_of(target), resume, folders, target, keep, timeout=100)
        return {source: [of_rank[i] for of_rank in results] for i, source in enumerate(sources)}

    return of_target


@pytest.mark.pitfall("P28", "P29", "P30")
@pytest.mark.parametrize(
    ("case", "cases"),
    [
        *((case, tuple(QUICK)) for case in QUICK),
        *(pytest.param(case, tuple(SLOW), marks=pytest.mark.slow) for case in SLOW),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value[0], str) else "",
)
def test_resume_on_another_topology_continues_the_uninterrupted_run(
    resumed: Callable[..., Any], uninterrupted: dict[str, Tensor], case: tuple[str, bool, str, bool], cases: Any
) -> None:
    results = resumed(*case[2:], cases)[case[:2]]
    assert_same_bits(results)
    assert_equal_weights(results[0], uninterrupted)


# -- whole state dicts ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain() -> Plain:
    return Plain(SAVED)


@pytest.mark.pitfall("P27", "P33")
@pytest.mark.parametrize(
    "name",
    [
        *(SINGLE, "1d", "tp"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("hsdp", "ddp-2", "tp-fsdp", "1d-3", "1d-3-two-lines")
        ),
    ],
)
def test_full_state_dict_is_that_of_a_single_process_and_loads_into_torch(
    saved: Callable[..., Saved], plain: Plain, uninterrupted: dict[str, Tensor], name: str
) -> None:
    (weights, state), *others = saved(name).whole
    assert all(result == ({}, {}) for result in others), "rank 0 alone holds what was moved to its CPU"
    assert list(weights) == list(plain.weights())
    assert_equal_weights(weights, plain.weights())
    assert_equal_weights(tensors_of(state), tensors_of(plain.state()))
    torch_alone = Plain(seed=3)
    torch_alone.load(weights, state)
    torch_alone.train(range(SAVED, TOTAL))
    assert_equal_weights(torch_alone.weights(), uninterrupted)


def adopt(
    rank: int, _world: int, name: str, keep: bool, weights: dict[str, Tensor], state: dict[str, Any], ways: list[bool]
) -> dict[bool, tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]]:
    """Load whole state dicts, from all ranks or from rank 0, give them back, and train on."""
    run = start(name, seed=50 + rank, keep=keep)
    run.train(range(1))
    ours = get_optimizer_state_dict(run.model, run.optimizer, options=FULL)
    given = {"state": state["state"], "param_groups": ours["param_groups"]}
    adopted = {}
    for from_rank0 in ways:
        options = FROM_RANK_0 if from_rank0 else FULL
        silent = from_rank0 and rank > 0
        model, optimizer = ({}, {}) if silent else copy.deepcopy((dict(weights), given))
        set_model_state_dict(run.model, model, options=options)
        set_optimizer_state_dict(run.model, run.optimizer, optimizer, options=options)
        found, kept = copy.deepcopy(get_state_dict(run.model, run.optimizer, options=FULL))  # AdamW's is no copy yet
        run.train(range(SAVED, TOTAL))
        adopted[from_rank0] = dict(found), tensors_of(dict(kept)), full_state(run.model)
    return adopted


ADOPTING = [
    *((name, RESHARD, from_rank0) for name in [*NAMES, "1d-two-lines"] for from_rank0 in (False, True)),
    ("hsdp", KEEP, False),
    ("hsdp", KEEP, True),
]
# torch's distribute_tensor splits no uneven bias over FSDP2 and tensor parallelism; its broadcast does.
ADOPTING[ADOPTING.index(("tp-fsdp", RESHARD, False))] = ("tp-two-lines", RESHARD, False)


@pytest.fixture(scope="module")
def adopted(ranks: RankPool, plain: Plain) -> Callable[[str, bool], list[Any]]:
    """What each rank of a topology made of whole state dicts, both ways in one call."""

    @cache
    def by_rank(name: str, keep: bool) -> list[Any]:
        ways = [way for other, kept, way in ADOPTING if (other, kept) == (name, keep)] or [True]
        return ranks(world_of(name), adopt, name, keep, plain.weights(), plain.state(), ways)

    return by_rank


@pytest.mark.pitfall("P28", "P33")
@pytest.mark.parametrize(
    ("name", "keep", "from_rank0"),
    [
        *(pytest.param(*case, marks=[] if case[0] == "1d" else pytest.mark.slow) for case in ADOPTING),
        *(pytest.param(name, KEEP, True, marks=pytest.mark.slow) for name in OTHERS),
    ],
)
def test_full_state_dicts_load(
    adopted: Any, plain: Plain, uninterrupted: dict[str, Tensor], name: str, keep: bool, from_rank0: bool
) -> None:
    weights, state = plain.weights(), plain.state()
    results = [of_rank[from_rank0] for of_rank in adopted(name, keep)]
    for found, found_state, _ in results:
        assert_same_tensors(found, weights)
        assert_same_tensors(found_state, tensors_of(state))
    trained = [after for _, _, after in results]
    assert_same_bits(trained)
    assert_equal_weights(trained[0], uninterrupted)


# -- plain state dicts of torch.optim.Muon -------------------------------------------------------------------------


def exchange_momentum(
    _rank: int, _world: int, name: str, weights: dict[str, Tensor], muon: dict[str, Any]
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """One step on from torch's momentum: weights, and momentum in torch's order."""
    run = start(name, seed=4)
    set_model_state_dict(run.model, dict(weights), options=FULL)
    matrices = [p for p in run.model.parameters() if isinstance(p, OwnedTensor)]
    optimizer = dmuon.Muon(matrices, lr=1.0)
    optimizer.load_state_dict(muon)
    run.backward(SAVED)
    optimizer.step()
    state = optimizer.state_dict()["state"]
    momenta = [state[i]["momentum_buffer"].full_tensor() for i in range(len(matrices))]
    return {n: t for n, t in full_state(run.model).items() if is_matrix(n)}, momenta


@pytest.mark.pitfall("P33")
@pytest.mark.parametrize(
    "name",
    ["tp-two-lines", "1d-3-two-lines", *(pytest.param(name, marks=pytest.mark.slow) for name in ("hsdp", "tp"))],
)
def test_momentum_of_torch_muon_loads_and_goes_back(ranks: RankPool, plain: Plain, name: str) -> None:
    stock = Plain(SAVED)
    given = copy.deepcopy((stock.weights(), stock.reference.muon.state_dict()))
    results = ranks(world_of(name), exchange_momentum, name, *given)
    stock.reference.zero_grad()
    loss_of(stock.model, *batch(SAVED)).backward()
    stock.reference.step()
    expected = {n: t for n, t in stock.weights().items() if is_matrix(n)}
    state = stock.reference.muon.state_dict()
    momenta = {str(i): values["momentum_buffer"].clone() for i, values in state["state"].items()}
    for weights, found in results:
        assert_equal_weights(weights, expected)
        assert_equal_weights({str(i): momentum for i, momentum in enumerate(found)}, momenta)
    for index, momentum in enumerate(results[0][1]):
        state["state"][index]["momentum_buffer"] = momentum
    stock.reference.muon.load_state_dict(state)
    stock.train(range(SAVED + 1, TOTAL))
    assert_equal_weights(stock.weights(), reference_weights(TOTAL))


# -- saving while training goes on ---------------------------------------------------------------------------------


def save_behind(rank: int, _world: int, path: str, name: str) -> dict[str, Tensor]:
    run = start(name)
    run.train(range(SAVED))
    weights, state = get_state_dict(run.model, run.optimizer)
    # Not the default group: its collectives would interleave with those of FSDP2 in the training thread.
    group = dist.new_group(backend="gloo")
    saving = dcp.async_save({"model": weights, "optimizer": state}, checkpoint_id=path, process_group=group)
    run.train(range(SAVED, TOTAL))
    assert not isinstance(saving, dcp.state_dict_saver.AsyncSaveResponse)
    saving.result()
    trained = full_state(run.model)
    again = start(name, seed=50 + rank)
    load(again, path)
    assert_equal_weights(full_state(again.model), reference_weights(SAVED))
    again.train(range(SAVED, TOTAL))
    assert_same_tensors(full_state(again.model), trained)
    return trained


@pytest.mark.pitfall("P29", "P30")
@pytest.mark.parametrize("name", ["1d", pytest.param("hsdp", marks=pytest.mark.slow)])
def test_async_save_holds_the_moment_of_the_call(
    ranks: RankPool, tmp_path: Path, uninterrupted: dict[str, Tensor], name: str
) -> None:
    for weights in ranks(world_of(name), save_behind, str(tmp_path), name):
        assert_equal_weights(weights, uninterrupted)


# -- mixed precision -----------------------------------------------------------------------------------------------

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def start_in_bf16(name: str, seed: int = 0) -> Run:
    run = start(name, seed=seed, mp_policy=BF16)
    run.autocast = not LAYOUTS[name].fsdp  # FSDP2 casts the inputs of blocks; nobody else does
    return run


def whole_state(run: Run) -> dict[str, Tensor]:
    weights, state = copy.deepcopy(get_state_dict(run.model, run.optimizer, options=FULL))
    return {**weights, **tensors_of(dict(state))}


def save_in_bf16(_rank: int, _world: int, path: str, name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What was saved, and the weights of the run that went on."""
    run = start_in_bf16(name)
    run.train(range(SAVED))
    weights, state = get_state_dict(run.model, run.optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
    found = whole_state(run)
    run.train(range(SAVED, TOTAL))
    return found, full_state(run.model)


def resume_in_bf16(rank: int, _world: int, path: str, name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    run = start_in_bf16(name, seed=50 + rank)
    run.train(range(1))
    load(run, path)
    found = whole_state(run)
    run.train(range(SAVED, TOTAL))
    return found, full_state(run.model)


@pytest.mark.pitfall("P23", "P32")
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("hsdp", "tp"),
        *(pytest.param(*names, marks=pytest.mark.slow) for names in (("tp", "ddp-2"), ("hsdp", "hsdp"), ("tp", "tp"))),
    ],
)
def test_masters_and_momentum_survive_mixed_precision(
    ranks: RankPool, tmp_path: Path, source: str, target: str
) -> None:
    before = ranks(world_of(source), save_in_bf16, str(tmp_path), source)
    after = ranks(world_of(target), resume_in_bf16, str(tmp_path), target)
    held = before[0][0]
    matrices = [n for n in held if is_matrix(n.removesuffix(".momentum_buffer"))]
    assert len(matrices) == 18 and all(held[name].dtype == torch.float32 for name in matrices)
    assert any(not torch.equal(held[name], held[name].bfloat16().float()) for name in matrices)
    for found, _ in after:
        assert_same_tensors(found, held)
    assert_same_bits([weights for _, weights in after])
    if source == target:
        assert_same_tensors(after[0][1], before[0][1])


# -- refusals and partial loads ------------------------------------------------------------------------------------

KEY, OTHER = "blocks.1.up.weight", "norm.weight"  # owned, and not


def given_state(run: Run, fault: str, faulty: bool) -> dict[str, Any]:
    """Even DTensors of the model itself, with one fault."""
    state = dict(get_model_state_dict(run.model))
    if faulty:
        match fault:
            case "missing":
                del state[KEY]
            case "missing, not owned":
                del state[OTHER]
            case "unexpected":
                state["blocks.7.up.weight"] = torch.zeros(3)
            case "shape":
                state[KEY] = torch.zeros(2, 3)
            case "shape, not owned":
                state[OTHER] = torch.zeros(3)
            case "kind":
                state[KEY] = torch.zeros(run.model.get_parameter(KEY).shape)
    return state


NAMED = {
    "missing": KEY, "missing, not owned": OTHER, "unexpected": "blocks.7.up.weight",
    "shape": KEY, "shape, not owned": OTHER, "kind": KEY,
}  # fmt: skip


def load_with_faults(rank: int, world: int, name: str, faults: list[str]) -> dict[tuple[str, bool], str]:
    """By fault and ``strict``, what the rank was told, or nothing."""
    run = start(name)
    told = {}
    for fault in faults:
        for strict in (True, False):
            state = given_state(run, fault, rank == world - 1)
            try:
                run.model.load_state_dict(state, strict=strict)
                told[fault, strict] = ""
            except RuntimeError as error:
                told[fault, strict] = str(error)
    return told


FAULTS_ON = {
    "hsdp": list(NAMED), "tp": ["missing", "shape, not owned"], "tp-two-lines": list(NAMED), "ddp-2": list(NAMED),
}  # fmt: skip


@pytest.fixture(scope="module")
def told(ranks: RankPool) -> Callable[[str], list[dict[tuple[str, bool], str]]]:
    """What each rank of a topology was told of all its faults, in one call."""
    return cache(lambda name: ranks(world_of(name), load_with_faults, name, FAULTS_ON[name], timeout=60.0))


@pytest.mark.pitfall("P27", "P48")
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *((name, fault) for name in ("hsdp", "tp") for fault in FAULTS_ON[name]),
        *(pytest.param(name, f, marks=pytest.mark.slow) for name in ("tp-two-lines", "ddp-2") for f in NAMED),
    ],
)
def test_fault_on_one_rank_raises_on_all(told: Callable[[str], Any], name: str, fault: str) -> None:
    for of_rank in told(name):
        assert NAMED[fault] in of_rank[fault, True]
        assert (NAMED[fault] in of_rank[fault, False]) == (fault != "unexpected"), "ranks must not load different keys"


def load_from_faulty_rank_0(rank: int, _world: int, name: str) -> dict[str, Exception | None]:
    """By fault, what was raised."""
    run = start(name)
    raised: dict[str, Exception | None] = {}
    for fault in FAULTS_OF_RANK_0:
        weights = build(seed=1).state_dict()
        match fault:
            case "missing":
                del weights[KEY]
            case "unexpected":
                weights["blocks.7.up.weight"] = torch.zeros(3)
            case "shape":
                weights[KEY] = weights[KEY][:-1]
        raised[fault] = None
        try:
            set_model_state_dict(run.model, weights if rank == 0 else {}, options=FROM_RANK_0)
        except (RuntimeError, ValueError) as error:
            raised[fault] = error
    return raised


FAULTS_OF_RANK_0 = {"missing": RuntimeError, "unexpected": RuntimeError, "shape": ValueError}


@pytest.mark.pitfall("P27", "P48")
def test_fault_of_rank_0_raises_on_all(ranks: RankPool) -> None:
    for raised in ranks(4, load_from_faulty_rank_0, "hsdp", timeout=60.0):
        for fault, kind in FAULTS_OF_RANK_0.items():
            assert isinstance(raised[fault], kind) and NAMED[fault] in str(raised[fault]), (fault, raised[fault])


WAYS = ("everywhere", "from-rank-0", "submodule")


def load_part(rank: int, _world: int, name: str, keep: bool, way: str) -> tuple[dict[str, Tensor], Tensor]:
    """Load all matrices of one block and one norm, then the very next forward."""
    run = start(name, keep=keep)
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
    return after, output


@pytest.mark.pitfall("P17", "P28")
@pytest.mark.parametrize(
    ("name", "keep", "way"),
    [
        *(("hsdp-two-lines", RESHARD, way) for way in WAYS),
        ("ddp-2", KEEP, "submodule"),
        *(pytest.param(n, KEEP, "from-rank-0", marks=pytest.mark.slow) for n in ("hsdp-two-lines", "tp")),
        # Plain tensors beside DTensors cannot be copied into what FSDP2 shards: no "submodule" there.
        *(pytest.param("hsdp", KEEP, w, marks=pytest.mark.slow) for w in WAYS[:2]),
        *(pytest.param(n, KEEP, w, marks=pytest.mark.slow) for n in ("ddp-2", "tp-two-lines") for w in WAYS),
    ],
)
def test_partial_load_changes_that_part_and_the_next_forward(ranks: RankPool, name: str, keep: bool, way: str) -> None:
    for weights, output in ranks(world_of(name), load_part, name, keep, way):
        model = build(seed=2)
        model.load_state_dict(weights)
        with torch.no_grad():
            torch.testing.assert_close(output, model(batch(1)[0]), rtol=1e-5, atol=1e-6)


def count_exchanges(rank: int, world: int) -> dict[str, int]:
    model = build(seed=rank)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
    dmuon.dedicate_params(model, init_device_mesh("cpu", (world,)), costs="flops")
    calls: list[None] = []

    def counted(*args: Any) -> list[Any]:
        calls.append(None)
        return differences(*args)

    counts = {}
    differences, state_dict.differences = state_dict.differences, counted
    try:
        for what, module in ("model", model), ("block", model.blocks[0]):
            calls.clear()
            weights = build(seed=1).state_dict()
            if module is not model:
                weights = {n.removeprefix("blocks.0."): t for n, t in weights.items() if n.startswith("blocks.0.")}
            module.load_state_dict(weights)
            counts[what] = len(calls)
    finally:
        state_dict.differences = differences
    assert_same_tensors(full_state(model), dict(build(seed=1).state_dict()))
    return counts


def test_ranks_compare_what_they_load_once(ranks: RankPool) -> None:
    """Also where wrappers rename keys; below the model every module that holds an owned matrix compares on its own."""
    assert ranks(2, count_exchanges) == [{"model": 1, "block": 3}] * 2
