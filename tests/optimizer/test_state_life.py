"""State of an optimizer: for what trains, where the parameter is, and of no parameter that no group holds any more."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch.nn as nn
from harness.assertions import assert_equal_weights
from harness.checkpoints import SINGLE, start
from harness.dtensors import local_tensor
from harness.network import full_state, shard_blocks
from harness.on_ranks import on_ranks
from harness.oracle import is_matrix, reference_weights
from harness.toy import OPTIONS, build, train
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh

import dmuon


def shard_under(optimizer: dmuon.Muon, model: nn.Module, world: int) -> None:
    """What accelerate does with FSDP2: the model is sharded, and its new parameters are put into the groups."""
    names = {id(p): name for name, p in model.named_parameters()}
    held = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    shard_blocks(model, init_device_mesh("cpu", (world,)))
    params = dict(model.named_parameters())
    for group, of_group in zip(optimizer.param_groups, held, strict=True):
        group["params"] = [params[name] for name in of_group]


@pytest.mark.parametrize("steps", [0, 1])
@on_ranks(2)
def test_parameters_that_are_replaced_are_followed(rank: int, world: int, steps: int) -> None:
    model = build()
    optimizer = dmuon.Muon(model, **OPTIONS)
    train(model, optimizer, range(steps))  # every rank the whole batch
    old = weakref.ref(optimizer.param_groups[0]["params"][0])
    shard_under(optimizer, model, world)
    state = get_optimizer_state_dict(model, optimizer)["state"]
    assert set(state) == {name for name, _ in model.named_parameters()}
    assert set(optimizer.state) <= {p for group in optimizer.param_groups for p in group["params"]}
    gc.collect()
    assert steps or old() is None, "neither state nor layouts hold what no group holds, only the last step's figures"
    assert {e.name for e in optimizer.exchanged()} == set(filter(is_matrix, state))
    if not steps:
        train(model, optimizer, range(5), rank, world)
        assert_equal_weights(full_state(model), reference_weights())
        assert optimizer.last_step.ns_matrices < 9, "others orthogonalize the rest"


@pytest.mark.pitfall("P31")
@pytest.mark.parametrize("layout", [SINGLE, "ddp", "fsdp2-2", "1d"])
@on_ranks("layout")
def test_parameters_that_change_groups_begin_anew(rank: int, world: int, layout: str) -> None:
    """From Muon to AdamW and back; what dmuon owns is Muon's for ever, so there a head goes the other way and back."""
    run = start(layout)
    name = "head.weight" if layout == "1d" else "blocks.1.up.weight"
    param = getattr(run.model, "module", run.model).get_parameter(name)
    run.train(range(1))
    for step in range(1, 3):
        group = next(g for g in run.optimizer.param_groups if any(p is param for p in g["params"]))
        group["params"] = [p for p in group["params"] if p is not param]
        run.optimizer.add_param_group({"params": [param], "use_muon": not group["use_muon"]})
        keys = {"exp_avg", "exp_avg_sq", "step"} if group["use_muon"] else {"momentum_buffer"}
        state = run.optimizer.state[param]
        assert set(state) == keys and not any(local_tensor(t).any() for t in state.values())
        run.train(range(step, step + 1))
        assert set(run.optimizer.state[param]) == keys
