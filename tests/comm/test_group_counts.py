"""Each process group costs connections and, on an accelerator, memory: how many dmuon makes on each topology."""

from __future__ import annotations

from collections import Counter

import pytest
from harness.checkpoints import start
from harness.inside import group_names
from harness.on_ranks import on_ranks
from harness.topologies import lay
from harness.toy import build

from dmuon.comm import context, process_groups

LINE = {"weights_along_s": 1, "gradients_along_s": 1}
COLUMN = {"weights_along_r": 1, "gradients_along_r": 1}
OWN = {"average": 1}  # where dmuon averages what nobody shards
TENSOR = {"control": 1, "tensor": 1}

# By layout, as docs/communication.md says it: what is made when a model is dedicated, and by the first backward.
MADE: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "1d": ({"group": 1, **LINE}, {}),
    "1d-two-lines": ({"group": 1, **LINE}, OWN),
    "ddp-2": ({"group": 1, **COLUMN}, OWN),
    "hsdp": ({"group": 1, **LINE, **COLUMN}, {}),
    "hsdp-two-lines": ({"group": 1, **LINE, **COLUMN}, OWN),
    "tp-fsdp": ({"group": 1, **TENSOR, **LINE}, {}),
    "tp-two-lines": ({"group": 1, **TENSOR, **LINE}, {}),  # averages go over "group", votes over "control"
    "fsdp2-2": ({"exchange": 1}, {}),
    "fsdp2-hsdp": ({"exchange": 1, "copies": 1}, {}),
    "ddp": ({"exchange": 1}, {}),  # all ranks have a copy: these are the domain
}


def purposes(names: set[str]) -> dict[str, int]:
    return dict(Counter(name.removeprefix("dmuon_").rsplit("_", 2)[0] for name in names if name.startswith("dmuon_")))


def count(layout: str) -> None:
    before = group_names()
    run = start(layout)
    run.optimizer.state_dict()
    laid = group_names()
    run.train(range(1))
    first = group_names()
    run.train(range(1, 4))
    dedicated, later = MADE[layout]
    assert (purposes(laid - before), purposes(first - laid)) == (dedicated, later)
    assert group_names() <= first


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


@pytest.mark.slow
@pytest.mark.parametrize("bound", [False, True])
@on_ranks(2)
def test_averages_have_a_group_from_the_start_where_it_is_split_off_another(rank: int, world: int, bound: bool) -> None:
    """Splitting a communicator while something may be under way over it is nothing for mid-training."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (context, process_groups):
            patch.setattr(module, "default_group_is_bound", lambda: bound)
        laid = lay("1d-two-lines", build())
        before = group_names()
        laid.backward(0)
    assert len(group_names() - before) == (0 if bound else 1)
