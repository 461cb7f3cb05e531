"""What a load compares between ranks, and what a state dict keeps in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.assertions import assert_same_tensors
from harness.checkpoints import start
from harness.dtensors import local_tensor
from harness.network import full_state
from harness.on_ranks import on_ranks

from dmuon.dedicated.dedication import dedications


@on_ranks(2)
def test_each_saved_shard_has_memory_of_its_own(rank: int, world: int) -> None:
    run = start("1d")
    run.train(range(2))
    weights, states = run.model.state_dict(), run.optimizer.state_dict()["state"].values()
    owned = [weights[matrix.fqn] for matrix in dedications(run.model)[0].runtime.matrices()]
    for saved in [*owned, *(state["momentum_buffer"] for state in states if len(state) == 1)]:
        local = local_tensor(saved)
        assert local.untyped_storage().nbytes() == local.numel() * local.element_size()


@on_ranks(2)
def test_what_is_shown_of_a_loaded_momentum_is_what_was_shown(rank: int, world: int) -> None:
    run, other = start("1d"), start("1d", seed=rank + 7)
    run.train(range(2))
    other.train(range(1))
    shown = {id(p): state["momentum_buffer"] for p, state in other.optimizer.state.items() if len(state) == 1}
    other.optimizer.load_state_dict(run.optimizer.state_dict())
    assert shown and all(
        other.optimizer.state[p]["momentum_buffer"] is shown[id(p)] for p in other.optimizer.state if id(p) in shown
    )
    assert_same_tensors(other.momenta(), run.momenta())


@pytest.mark.pitfall("P80")
@pytest.mark.parametrize("fault", ["size", "lack"])
@on_ranks(2)
def test_keys_too_many_do_not_hide_a_fault_of_another_rank(rank: int, world: int, fault: str) -> None:
    """Of what differs a few are told; what decides who raises is among them, or one rank would wait for the others."""
    run = start("1d")
    weights = run.model.state_dict()
    if rank == 0:
        weights |= {f"surplus.{i}": torch.zeros(1) for i in range(9)}
    elif fault == "size":
        weights["embed.weight"] = torch.zeros(2, 2)
    else:
        del weights["embed.weight"]
    before = full_state(run.model)
    told = {"size": r"a tensor of shape \(2, 2\) for .* on rank 1", "lack": "missing on rank 1"}
    with pytest.raises(RuntimeError, match=f"embed.weight is as it should be on rank 0 and {told[fault]}"):
        run.model.load_state_dict(weights, strict=False)
    assert_same_tensors(full_state(run.model), before)


@on_ranks(2)
def test_a_part_of_a_model_is_refused_on_all_ranks(rank: int, world: int) -> None:
    run = start("1d")
    weights = run.model.blocks[0].state_dict()
    with pytest.raises(ValueError, match="assign=True"):
        run.model.blocks[0].load_state_dict(weights, assign=rank == 1)


@on_ranks(2)
def test_a_part_of_a_model_is_saved_by_itself_after_a_call_that_failed(rank: int, world: int) -> None:
    """What the failed call has brought is of weights that have changed since."""
    run = start("1d")
    stop = run.model.register_state_dict_post_hook(_fail)
    with pytest.raises(ZeroDivisionError):
        run.model.state_dict()
    stop.remove()
    run.train(range(2))
    block = {name: tensor.full_tensor() for name, tensor in run.model.blocks[0].state_dict().items()}
    expected = {n.removeprefix("blocks.0."): t for n, t in full_state(run.model).items() if n.startswith("blocks.0.")}
    assert_same_tensors(block, expected)


def _fail(*_: Any) -> None:
    raise ZeroDivisionError
