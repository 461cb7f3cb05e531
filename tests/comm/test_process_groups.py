"""dmuon's own process groups: how many there are, since each costs connections and memory, and how long they wait."""

from __future__ import annotations

import time
from collections import Counter
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness.assertions import assert_equal_weights
from harness.checkpoints import start
from harness.inside import group_names, limit_of
from harness.network import full_state, shard_blocks
from harness.on_ranks import on_ranks
from harness.oracle import reference_weights
from harness.topologies import lay
from harness.toy import OPTIONS, build, train
from harness.worker import COLLECTIVE_SECONDS
from torch.distributed.device_mesh import init_device_mesh

import dmuon
from dmuon.comm import process_groups
from dmuon.comm.domain import make_domain
from dmuon.dedicated.dedication import dedications

LINE = {"weights_along_s": 1, "gradients_along_s": 1}
COLUMN = {"weights_along_r": 1, "gradients_along_r": 1}
OWN = {"group": 1, "average": 1}
TENSOR = {"control": 1, "tensor": 1}

# By layout, as docs/communication.md says it: what is made when a model is dedicated, and nothing later.
MADE: dict[str, dict[str, int]] = {
    "1d": {**OWN, **LINE},
    "ddp-2": {**OWN, **COLUMN},
    "hsdp-two-lines": {**OWN, **LINE, **COLUMN},
    "tp-two-lines": {"group": 1, **TENSOR, **LINE},  # averages go over "group", votes over "control"
    "fsdp2-2": {"exchange": 1},
    "fsdp2-hsdp": {"exchange": 1, "copies": 1},
    "ddp": {"exchange": 1},  # all ranks have a copy: these are the domain
}


def purposes(names: set[str]) -> dict[str, int]:
    return dict(Counter(name.removeprefix("dmuon_").rsplit("_", 2)[0] for name in names if name.startswith("dmuon_")))


@pytest.mark.parametrize(
    "layout", ["1d", "fsdp2-2", *(pytest.param(n, marks=pytest.mark.slow) for n in MADE if n not in ("1d", "fsdp2-2"))]
)
@on_ranks("layout")
def test_no_more_groups_than_purposes(rank: int, world: int, layout: str) -> None:
    before = group_names()
    run = start(layout)
    run.optimizer.state_dict()
    laid = group_names()
    assert purposes(laid - before) == MADE[layout]
    run.train(range(4))
    assert group_names() <= laid


@on_ranks(4)
def test_a_default_group_that_is_bound_to_a_device_is_not_split(rank: int, world: int) -> None:
    """As by ``init_process_group(device_id=…)``: all its ranks would have to come to each group of some of them."""
    stages = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "shard"))["shard"]
    default, device = dist.group.WORLD, torch.device("cuda", 0)
    assert default is not None
    bound = []

    def split(group: dist.ProcessGroup) -> None:
        bound.append(group.bound_device_id)

    default.bound_device_id = device
    try:
        with mock.patch.object(dist.distributed_c10d, "_get_split_source", split):  # which gloo does not support
            model = build()
            if rank < 2:
                dmuon.dedicate_params(model, stages, costs="flops")
            else:
                shard_blocks(model, mesh=stages)
            train(model, dmuon.Muon(model, **OPTIONS), range(2), rank % 2, 2)
        assert bound == [] and default.bound_device_id == device
    finally:
        default.bound_device_id = None
    assert_equal_weights(full_state(model), reference_weights(2))


# -- as long as the user has said --------------------------------------------------------------------------------------


CPU = torch.device("cpu")


@on_ranks(2)
def test_groups_have_the_limit_of_the_default_group_unless_told(rank: int, world: int) -> None:
    for timeout, seconds in ((None, COLLECTIVE_SECONDS), (timedelta(seconds=7), 7.0)):
        comm = dedications(lay("1d", build(), comm=dmuon.CommOptions(timeout=timeout)).model)[0].runtime.comm
        assert comm.row is not None
        domain = make_domain(range(world), CPU, timeout)
        for group in (comm.control, comm.averages, comm.row.weights.group, domain.group):
            assert limit_of(group).total_seconds() == seconds


@pytest.mark.pitfall("P49")
@on_ranks(1)
def test_a_group_that_cannot_be_made_is_named_in_time(rank: int, world: int) -> None:
    """gloo waits for ever where the host of the store has stopped."""
    begin = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_groups, "new_named_group", lambda *_: time.sleep(60))
        patch.setattr(process_groups, "_SLACK_SECONDS", 0.2)
        with pytest.raises(dmuon.CollectiveError, match=r"process group .* was not made within 0.5 s"):
            make_domain([0], CPU, timedelta(seconds=0.3))
    assert time.monotonic() - begin < 20
