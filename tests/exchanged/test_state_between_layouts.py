"""The state of any layout in any other: as one process goes on, or refused by name before anything has changed."""

from __future__ import annotations

import copy
import itertools
import re
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.assertions import about, assert_equal_weights, assert_same_tensors
from harness.checkpoints import FROM_RANK_0, FULL, SINGLE, Run, load, start
from harness.network import full_state
from harness.on_ranks import on_ranks
from harness.oracle import reference_weights
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_model_state_dict

from dmuon.platform.torch_private import local_tensor

SAVED, TOTAL = 2, 4
ON_TWO = [SINGLE, "fsdp2-2", "ddp", "tp-alone", "1d-two-lines", "1d"]  # 1d: dmuon.fully_shard beside
ON_FOUR = [SINGLE, "fsdp2-4", "fsdp2-hsdp", "fsdp2-tp", "hsdp-two-lines", "hsdp", "tp-fsdp"]
GATHERED = r"(exp_avg|exp_avg_sq|momentum) of '.*' .*is a DTensor over ranks 0 .*pass its full_tensor\(\)"


def state_of(run: Run) -> dict[str, Tensor]:
    """What this rank holds of the optimizer's state, by name and key."""
    values = run.optimizer.state_dict()["state"]
    return {f"{i}.{key}": local_tensor(t).clone() for i, of in values.items() for key, t in of.items()}


def whole_weights(run: Run) -> dict[str, Tensor]:
    return copy.deepcopy(dict(get_model_state_dict(run.model, options=FULL)))


def trained(name: str) -> Run:
    run = start(name)
    run.train(range(SAVED))
    return run


def passes_on(source: Run, target: Run, by_dcp: str | None) -> None:
    """Let ``target`` go on where ``source`` is."""
    if by_dcp is None:
        weights = whole_weights(source)
        set_model_state_dict(target.model, {} if dist.get_rank() else weights, options=FROM_RANK_0)
        target.optimizer.load_state_dict(source.optimizer.state_dict())
        return
    weights, state = get_state_dict(source.model, source.optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=by_dcp)
    dist.barrier()
    load(target, by_dcp)


def check(pairs: list[tuple[str, str]], folder: str | None) -> None:
    expected = reference_weights(TOTAL)
    for number, (name, other) in enumerate(pairs):
        with about((name, other, folder is not None)):
            source, target = trained(name), start(other, seed=9)
            before = state_of(target)
            try:
                passes_on(source, target, folder and f"{folder}/{number}")
            except ValueError as error:
                assert other == SINGLE and folder is None and re.search(GATHERED, str(error)), error
                assert_same_tensors(state_of(target), before)
                continue
            for run in (target, source):  # they share no memory
                run.train(range(SAVED, TOTAL))
                assert_equal_weights(full_state(run.model), expected, 2e-6)


def around(names: list[str]) -> list[tuple[str, str]]:
    return list(zip(names, [*names[1:], names[0]], strict=True))


FEW = {
    2: [*around(ON_TWO), ("fsdp2-2", SINGLE), (SINGLE, "tp-alone"), (SINGLE, "1d")],
    4: [(SINGLE, "fsdp2-hsdp"), ("fsdp2-hsdp", "fsdp2-tp")],
}


@pytest.mark.pitfall("P84")
@pytest.mark.parametrize(("world", "by_dcp"), [(2, False), (2, True), (4, False)])
@on_ranks(timeout=100.0)
def test_each_layout_loads_from_another(rank: int, world: int, by_dcp: bool, tmp_path: Path) -> None:
    check(FEW[world], str(tmp_path) if by_dcp else None)


@pytest.mark.slow
@pytest.mark.pitfall("P84")
@pytest.mark.parametrize("by_dcp", [False, True])
@pytest.mark.parametrize(("world", "names"), [(2, ON_TWO), (4, ON_FOUR)])
@on_ranks(timeout=300.0)
def test_any_layout_loads_from_any(rank: int, world: int, names: list[str], by_dcp: bool, tmp_path: Path) -> None:
    check(list(itertools.product(names, names)), str(tmp_path) if by_dcp else None)
