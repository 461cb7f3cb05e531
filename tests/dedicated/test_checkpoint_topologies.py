"""Stock checkpointing on every topology: of parts of a model, and what one rank alone has wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from harness.assertions import assert_same_tensors
from harness.checkpoints import (
    FROM_RANK_0,
    FULL,
    Run,
    start,
    world_of,
)
from harness.network import full_state
from harness.on_ranks import on_ranks
from harness.pool import RankPool
from harness.toy import batch, build
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

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
FAULTS_OF_RANK_0 = {"missing": RuntimeError, "unexpected": RuntimeError, "shape": ValueError}


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


@pytest.mark.pitfall("P27", "P48")
@on_ranks(4, timeout=60.0)
def test_fault_of_rank_0_raises_on_all(rank: int, world: int) -> None:
    run = start("hsdp")
    for fault, kind in FAULTS_OF_RANK_0.items():
        weights = build(seed=1).state_dict()
        match fault:
            case "missing":
                del weights[KEY]
            case "unexpected":
                weights["blocks.7.up.weight"] = torch.zeros(3)
            case "shape":
                weights[KEY] = weights[KEY][:-1]
        with pytest.raises(kind, match=NAMED[fault].replace(".", r"\.")):
            set_model_state_dict(run.model, weights if rank == 0 else {}, options=FROM_RANK_0)


RESHARD, KEEP = False, True
WAYS = ("everywhere", "from-rank-0", "submodule")


@pytest.mark.pitfall("P17", "P28")
@pytest.mark.parametrize(
    ("layout", "keep", "way"),
    [
        *(("hsdp-two-lines", RESHARD, way) for way in WAYS),
        ("ddp-2", KEEP, "submodule"),
        ("1d", RESHARD, "everywhere"),
        ("1d-two-lines", KEEP, "everywhere"),
        *(pytest.param(n, KEEP, "from-rank-0", marks=pytest.mark.slow) for n in ("hsdp-two-lines", "tp")),
        # Plain tensors beside DTensors cannot be copied into what FSDP2 shards: no "submodule" there.
        pytest.param("hsdp", KEEP, "everywhere", marks=pytest.mark.slow),
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
