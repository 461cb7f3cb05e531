"""A user's communication functions are called as documented, and what they return is checked; in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

import dmuon
from dmuon import DistributedConfig


def config(**fields: Any) -> DistributedConfig:
    """Of one process that owns everything, but for ``fields``."""
    valid: dict[str, Any] = {
        "assign_fn": lambda params, state: {0: list(range(len(params)))},
        "gather_fn": lambda update, dst_rank, state: update,
        "redistribute_fn": lambda update, src_rank, state: update,
        "state": {},
        "prefetch_count": 0,
    }
    return DistributedConfig(**(valid | fields))


def stepped(count: int = 1, **fields: Any) -> list[Tensor]:
    """Weights after a step on gradients of one; of no ``fields`` those of plain Muon."""
    params = [nn.Parameter(torch.zeros(3, 2)) for _ in range(count)]
    optimizer = dmuon.Muon([{"params": params, "use_muon": True}], lr=0.1, distributed_config=config(**fields))
    for i, param in enumerate(params):
        param.grad = torch.arange(6.0).view(3, 2) - i
    optimizer.step()
    return [param.detach() for param in params]


PLAIN = stepped()[0]


class Later:
    """Something to wait for, which counts the waits."""

    def __init__(self, value: object = None) -> None:
        self.value = value
        self.waits = 0

    def wait(self) -> object:
        self.waits += 1
        return self.value


class WaitableTensor(Tensor):
    """A tensor with a wait(), as functional collectives return."""

    def wait(self) -> Tensor:
        return self.as_subclass(Tensor)


@pytest.mark.parametrize(
    "assigned",
    [{0: 0, 1: 0, 2: 0}, {2: 0, 0: 0, 1: 0}, {0: [0, 2, 1]}, {np.int64(0): np.int64(0), 1: 0, 2: np.int32(0)}],
)
def test_both_forms_of_an_assignment_give_the_owners(assigned: object) -> None:
    assert torch.equal(stepped(3, assign_fn=lambda params, state: assigned)[0], PLAIN)


FORM = r"assign_fn must return \{index: rank\}.*; got "


@pytest.mark.parametrize(
    ("assigned", "error", "message"),
    [
        ({0: [1]}, ValueError, "left out 0, 2 of 3 parameters"),
        ({0: [0, 1, 1, 2]}, ValueError, "parameter 1 twice, to rank 0 and rank 0"),
        ({0: 0, 1: 0, 2: 7}, ValueError, "Invalid rank 7 for parameter 2"),
        ([0, 1, 0], TypeError, FORM + "list"),
        ({0: 0, 1: [1, 2]}, TypeError, FORM + r"the index 1 with the rank \[1, 2\]"),
    ],
)
def test_another_assignment_is_refused(assigned: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        stepped(3, assign_fn=lambda params, state: assigned)


class Callee:
    def __call__(self, tensor: Tensor, to: int, metadata: dict[str, Any]) -> Tensor:
        return tensor + to + metadata["add"]


@pytest.mark.parametrize(
    "gather",
    [
        lambda u, r, s: u + r + s["add"],
        lambda update, state, rank: update + rank + state["add"],
        lambda update, *, dst_rank, state: update + dst_rank + state["add"],
        lambda *arguments, **keywords: arguments[0] + arguments[1] + arguments[2]["add"],
        Callee(),
    ],
)
def test_gather_fn_gets_rank_and_state_as_it_names_them(gather: Callable[..., Tensor]) -> None:
    assert torch.equal(stepped(gather_fn=gather, state={"add": 0})[0], PLAIN)
    assert not torch.equal(stepped(gather_fn=gather, state={"add": 10})[0], PLAIN)


@pytest.mark.parametrize("name", ["gather_fn", "redistribute_fn"])
def test_a_function_that_cannot_be_called_is_named_at_once(name: str) -> None:
    def too_few(update: Tensor, state: dict[str, Any]) -> Tensor:
        raise AssertionError("called")

    def half_named(update: Tensor, to: int, *, state: dict[str, Any]) -> Tensor:
        raise AssertionError("called")

    for function in (too_few, half_named):
        with pytest.raises(TypeError, match=rf"{name} must be callable as {name}\(update, .*_rank, state\)"):
            stepped(**{name: function})


@pytest.mark.parametrize("form", ["alone", "pair without work", "pair", "waitable", "a tensor that waits"])
def test_a_result_is_waited_for_once_if_at_all(form: str) -> None:
    later = Later()

    def gather(update: Tensor, dst_rank: int, state: dict[str, Any]) -> object:
        later.value = update
        forms = {"alone": update, "pair without work": (update, None), "pair": (update, later), "waitable": later}
        return forms.get(form, update.as_subclass(WaitableTensor))

    assert torch.equal(stepped(gather_fn=gather)[0], PLAIN)
    assert later.waits == (form in ("pair", "waitable"))


@pytest.mark.parametrize("name", ["gather_fn", "redistribute_fn"])
@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (dist.Work(), r"returned a dist.Work alone.*return \(tensor, work\)"),
        (3, r"must return .* got 3"),
        ((Later(), torch.ones(1)), r"returned a tuple \(Later, Tensor\): .*\(tensor or None, work or None\)"),
        (Later(True), r"returned a Later whose wait\(\) gave True, not a tensor"),
    ],
)
def test_other_returns_are_refused(name: str, returned: object, message: str) -> None:
    with pytest.raises(TypeError, match=f"{name} {message}"):
        stepped(**{name: lambda update, rank, state: returned})
