"""Momentum between two steps: edited by hand, beside new groups, and of weights that are laid out anew."""

from __future__ import annotations

import pytest
import torch
from harness.assertions import assert_equal_weights
from harness.checkpoints import MOMENTUM, SINGLE, Run, start
from harness.dtensors import local_tensor
from harness.network import full_state
from harness.on_ranks import on_ranks
from harness.toy import OPTIONS
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dmuon


def edit(run: Run, how: str) -> None:
    """Halve or clear all momentum."""
    for name, momentum in run.shown().items():
        values = run.optimizer.state[run.inner.get_parameter(name)]
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
        run.optimizer = dmuon.Muon(run.model, **OPTIONS, distributed_config=run.config)
        run.optimizer.load_state_dict(state)
    run.train(range(2, 4))
    return full_state(run.inner)


HOW = ["in place", "same layout", "local part", "whole", "other layout", "cleared"]
EDITED = [(3, "fsdp2-3", "local part", False), (3, "fsdp2-3", "other layout", False), (3, "fsdp2-3", "cleared", True)]
EDITED_SLOWLY = [(3, "fsdp2-3", how, i % 2 == 0) for i, how in enumerate(HOW)]
EDITED_SLOWLY += [(4, "fsdp2-tp", how, False) for how in ("local part", "whole", "other layout")]
EDITED_SLOWLY += [(2, "tp", how, False) for how in ("in place", "cleared")]


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
    param = run.inner.get_parameter("blocks.1.up.weight")
    run.optimizer.state[param][MOMENTUM] = torch.zeros(1, 13)  # copying would broadcast it
    run.train(range(1, 2))


def whole_momentum(run: Run, name: str) -> Tensor:
    """Through a state dict, which adopts what users put into the state. Collective."""
    params = [param for group in run.optimizer.param_groups for param in group["params"]]
    number = next(i for i, param in enumerate(params) if param is run.model.get_parameter(name))
    saved = run.optimizer.state_dict()["state"][number][MOMENTUM]
    whole: Tensor = saved.full_tensor() if isinstance(saved, DTensor) else saved.clone()
    return whole


@pytest.mark.parametrize("layout", ["1d", "fsdp2-2"])
@on_ranks(2)
def test_momenta_that_change_places_are_both_kept(rank: int, world: int, layout: str) -> None:
    """What the state shows lies in stacks, into which what takes its place is written."""
    run = start(layout)
    run.train(range(2))
    state, params = run.optimizer.state, dict(run.model.named_parameters())
    names = [f"blocks.{i}.mix.weight" for i in range(3)]
    kept = [whole_momentum(run, name) for name in names]
    shown = [state[params[name]][MOMENTUM] for name in names]
    for name, value in zip(names, [shown[1], shown[0], None], strict=True):
        state[params[name]][MOMENTUM] = value
    expected = [kept[1], kept[0], torch.zeros_like(kept[2])]
    for name, momentum in zip(names, expected, strict=True):
        assert torch.equal(whole_momentum(run, name), momentum), name
