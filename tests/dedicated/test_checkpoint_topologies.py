"""Stock checkpointing on every topology: of parts of a model, and what one rank alone has wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from harness.assertions import about, assert_same_tensors
from harness.checkpoints import FROM_RANK_0, FULL, start
from harness.network import full_state
from harness.on_ranks import on_ranks
from harness.toy import batch, build
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

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
        ("tp", False, ["missing", "shape, not owned"]),
        ("1d-two-lines", True, OF_PLAIN),
        *(pytest.param(name, False, OF_DTENSORS, marks=pytest.mark.slow) for name in ("tp-two-lines", "ddp-2")),
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
@on_ranks(4, timeout=60.0)
def test_fault_of_rank_0_raises_on_all(rank: int, world: int) -> None:
    run = start("hsdp")
    for fault, kind in {"missing": RuntimeError, "unexpected": RuntimeError, "shape": ValueError}.items():
        weights = build(seed=1).state_dict()
        told, change = FAULTS[fault]
        change(weights)
        with pytest.raises(kind, match=re.escape(told)):
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
