"""Each process group costs connections and, on an accelerator, memory: how many dmuon makes on each topology."""

from __future__ import annotations

from collections import Counter

import pytest
from harness.checkpoints import start
from harness.inside import group_names
from harness.on_ranks import on_ranks

LINE = {"weights_along_s": 1, "gradients_along_s": 1}
COLUMN = {"weights_along_r": 1, "gradients_along_r": 1}
OWN = {"group": 1, "average": 1}
TENSOR = {"control": 1, "tensor": 1}

# By layout, as docs/communication.md says it: what is made when a model is dedicated, and nothing later.
MADE: dict[str, dict[str, int]] = {
    "1d": {**OWN, **LINE},
    "1d-two-lines": {**OWN, **LINE},
    "ddp-2": {**OWN, **COLUMN},
    "hsdp": {**OWN, **LINE, **COLUMN},
    "hsdp-two-lines": {**OWN, **LINE, **COLUMN},
    "tp-fsdp": {"group": 1, **TENSOR, **LINE},
    "tp-two-lines": {"group": 1, **TENSOR, **LINE},  # averages go over "group", votes over "control"
    "fsdp2-2": {"exchange": 1},
    "fsdp2-hsdp": {"exchange": 1, "copies": 1},
    "ddp": {"exchange": 1},  # all ranks have a copy: these are the domain
}


def purposes(names: set[str]) -> dict[str, int]:
    return dict(Counter(name.removeprefix("dmuon_").rsplit("_", 2)[0] for name in names if name.startswith("dmuon_")))


def count(layout: str) -> None:
    before = group_names()
    run = start(layout)
    run.optimizer.state_dict()
    laid = group_names()
    assert purposes(laid - before) == MADE[layout]
    run.train(range(4))
    assert group_names() <= laid


def slowly(layout: str) -> object:
    return pytest.param(layout, marks=pytest.mark.slow)


@pytest.mark.parametrize("layout", ["1d", slowly("1d-two-lines"), slowly("ddp-2"), "fsdp2-2", slowly("ddp")])
@on_ranks(2)
def test_no_more_groups_than_purposes_on_two_ranks(rank: int, world: int, layout: str) -> None:
    count(layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["hsdp", "hsdp-two-lines", "tp-fsdp", "tp-two-lines", "fsdp2-hsdp"])
@on_ranks(4)
def test_no_more_groups_than_purposes_on_four_ranks(rank: int, world: int, layout: str) -> None:
    count(layout)
