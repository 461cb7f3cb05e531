"""A user's communication functions are called as documented, and what they return is checked."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from dmuon.exchanged.config import DistributedConfig, owners_from
from dmuon.exchanged.user_functions import Result, UserFunctions, check_gathered, check_part
from dmuon.platform.torch_private import owned_spec


def config(**fields: Any) -> DistributedConfig:
    """A valid configuration of rank 0 that warns of nothing, but for ``fields``."""
    valid: dict[str, Any] = {
        "assign_fn": lambda params, state: {},
        "gather_fn": lambda update, dst_rank, state: update,
        "redistribute_fn": lambda update, src_rank, state: update,
        "state": {"rank": 0},
        "prefetch_count": 0,
    }
    return DistributedConfig(**(valid | fields))


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
        return self.as_subclass(Tensor) + 1


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        *[(name, None, TypeError) for name in ("assign_fn", "gather_fn", "redistribute_fn")],
        ("gather_fn", "gather", TypeError),
        ("state", None, TypeError),
        ("async_gpu_parallelism", 1, TypeError),
        ("prefetch_count", True, TypeError),
        ("prefetch_count", -1, ValueError),
    ],
)
def test_a_wrong_field_is_named(field: str, value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"^{field} must be .*{re.escape(repr(value))}$"):
        config(**{field: value})


def test_defaults_are_those_of_the_reference() -> None:
    made = DistributedConfig(assign_fn=dict, gather_fn=torch.add, redistribute_fn=torch.add, state={})
    assert (made.async_gpu_parallelism, made.prefetch_count) == (True, 1)
    assert config(async_gpu_parallelism=False, prefetch_count=3).prefetch_count == 3


@pytest.mark.parametrize(
    ("assigned", "owners"),
    [
        ({0: 1, 1: 0, 2: 1}, (1, 0, 1)),
        ({2: 1, 0: 1, 1: 0}, (1, 0, 1)),
        ({1: [0, 2], 0: [1]}, (1, 0, 1)),
        ({np.int64(0): np.int64(1), 1: 0, 2: np.int32(1)}, (1, 0, 1)),
        ({}, ()),
    ],
)
def test_both_forms_of_an_assignment_give_the_owners(assigned: object, owners: tuple[int, ...]) -> None:
    found = owners_from(assigned, len(owners), 2)
    assert found == owners
    assert all(type(owner) is int for owner in found)


FORM = r"^assign_fn must return \{index: rank\}.*; got "


@pytest.mark.parametrize(
    ("assigned", "error", "message"),
    [
        ({1: 0}, ValueError, "left out 0, 2 of 3 parameters"),
        ({0: 0, 1: 0, 2: 0, 3: 1}, ValueError, "parameter 3 to rank 1, but there are 3 parameters"),
        ({0: [0, 1], 1: [1, 2]}, ValueError, "parameter 1 twice, to rank 0 and rank 1"),
        ({0: 0, 1: 0, 2: 7}, ValueError, "Invalid rank 7 for parameter 2: ranks are 0 … 1"),
        ({-1: [0, 1, 2]}, ValueError, "Invalid rank -1 for parameter 0: ranks are 0 … 1"),
        ([0, 1, 0], TypeError, FORM + "list$"),
        ({"layer": 0}, TypeError, FORM + "the key 'layer'$"),
        ({0: 0, 1: [1, 2]}, TypeError, FORM + "values of type int, list$"),
        ({0: 1.0}, TypeError, FORM + "values of type float$"),
        ({0: [0, "1"]}, TypeError, FORM + "the index '1' for rank 0$"),
    ],
)
def test_another_assignment_is_refused(assigned: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        owners_from(assigned, 3, 2)


class Callee:
    def __call__(self, tensor: Tensor, to: int, metadata: dict[str, int]) -> Tensor:
        return tensor + to + metadata["add"]


@pytest.mark.parametrize(
    "gather",
    [
        lambda u, r, s: u + r + s["add"],
        lambda update, dst_rank, state: update + dst_rank + state["add"],
        lambda update, rank, state: update + rank + state["add"],
        lambda update, state, dst_rank: update + dst_rank + state["add"],
        lambda update, state, rank: update + rank + state["add"],
        lambda update, *, dst_rank, state: update + dst_rank + state["add"],
        lambda update, where, *, rank: update + rank + where["add"],
        lambda update, where, *, dst_rank: update + dst_rank + where["add"],
        lambda update, to, *, state: update + to + state["add"],
        lambda update, **keywords: update + keywords["dst_rank"] + keywords["state"]["add"],
        lambda *arguments, **keywords: arguments[0] + arguments[1] + arguments[2]["add"],
        lambda update, dst_rank, own=0, *, state: update + dst_rank + own + state["add"],
        Callee(),
    ],
)
def test_gather_fn_gets_rank_and_state_as_it_names_them(gather: Callable[..., Tensor]) -> None:
    functions = UserFunctions(config(gather_fn=gather, state={"rank": 0, "add": 10}))
    whole = functions.gather(0, torch.ones(2), 3).wait()
    assert whole is not None and whole.tolist() == [14.0, 14.0]


@pytest.mark.parametrize(
    "redistribute",
    [
        lambda u, r, s: torch.tensor([r, s["add"], int(u is None)]),
        lambda update, *, src_rank, state: torch.tensor([src_rank, state["add"], int(update is None)]),
        lambda update, *, rank, state: torch.tensor([rank, state["add"], int(update is None)]),
    ],
)
def test_redistribute_fn_gets_none_away_from_the_owner(redistribute: Callable[..., Tensor]) -> None:
    functions = UserFunctions(config(redistribute_fn=redistribute, state={"rank": 0, "add": 10}))
    part = functions.redistribute(0, None, 1).wait()
    assert part is not None and part.tolist() == [1, 10, 1]
    part = functions.redistribute(0, torch.ones(2), 0).wait()
    assert part is not None and part.tolist() == [0, 10, 0]


@pytest.mark.parametrize("name", ["gather_fn", "redistribute_fn"])
def test_a_function_that_cannot_be_called_is_named_at_once(name: str) -> None:
    def too_few(update: Tensor, state: dict[str, Any]) -> Tensor:
        raise AssertionError("called")

    with pytest.raises(TypeError, match=rf"^{name} must be callable as {name}\(update, .*_rank, state\)"):
        UserFunctions(config(**{name: too_few}))


def test_the_index_is_set_before_every_call() -> None:
    seen: list[tuple[str, int, int]] = []

    def gather(update: Tensor, dst_rank: int, state: dict[str, Any]) -> Tensor:
        seen.append(("gather", state["current_param_idx"], dst_rank))
        return update

    def redistribute(update: Tensor | None, src_rank: int, state: dict[str, Any]) -> Tensor | None:
        seen.append(("redistribute", state["current_param_idx"], src_rank))
        return update

    made = config(gather_fn=gather, redistribute_fn=redistribute)
    functions = UserFunctions(made)
    functions.gather(4, torch.ones(1), 0)
    functions.gather(5, torch.ones(1), 1)  # ahead
    functions.redistribute(4, torch.ones(1), 0)
    functions.redistribute(5, None, 1)
    assert seen == [("gather", 4, 0), ("gather", 5, 1), ("redistribute", 4, 0), ("redistribute", 5, 1)]
    assert made.state == {"rank": 0, "current_param_idx": 5}


@pytest.mark.parametrize("value", [torch.ones(2), None])
@pytest.mark.parametrize("form", ["alone", "pair without work", "pair", "waitable"])
def test_a_result_is_waited_for_once_if_at_all(value: Tensor | None, form: str) -> None:
    later = Later(value if form == "waitable" else True)
    forms = {"alone": value, "pair without work": (value, None), "pair": (value, later), "waitable": later}
    result = Result("gather_fn", forms[form])
    asynchronous = form in ("pair", "waitable")
    assert result.asynchronous == asynchronous and later.waits == 0
    for _ in range(2):
        assert result.wait() is value
        assert result.asynchronous == asynchronous and later.waits == int(asynchronous)


def test_a_tensor_with_a_wait_is_waited_for() -> None:
    result = Result("gather_fn", torch.zeros(2).as_subclass(WaitableTensor))
    assert result.asynchronous
    tensor = result.wait()
    assert type(tensor) is Tensor and tensor.tolist() == [1.0, 1.0]


def test_a_wait_that_gives_no_tensor_is_refused() -> None:
    result = Result("redistribute_fn", Later(True))
    with pytest.raises(TypeError, match=r"^redistribute_fn returned a Later whose wait\(\) gave True, not a tensor"):
        result.wait()


@pytest.mark.parametrize("name", ["gather_fn", "redistribute_fn"])
@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (dist.Work(), r"returned a dist.Work alone.*return \(tensor, work\)"),
        (3, r"must return .* got 3"),
        ((torch.ones(1),), r"returned a tuple \(Tensor\)"),
        ((Later(), torch.ones(1)), r"returned a tuple \(Later, Tensor\): .*\(tensor or None, work or None\)"),
        ((torch.ones(1), Later(), Later()), r"returned a tuple \(Tensor, Later, Later\)"),
    ],
)
def test_other_returns_are_refused(name: str, returned: object, message: str) -> None:
    functions = UserFunctions(config(**{name: lambda update, rank, state: returned}))
    call: Any = functions.gather if name == "gather_fn" else functions.redistribute
    for owner in (0, 1):
        with pytest.raises(TypeError, match=f"^{name} {message}"):
            call(0, torch.ones(1), owner)


def warnings_of(functions: UserFunctions, owner: int, calls: int = 3) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for index in range(calls):
            functions.gather(index, torch.ones(1), owner)
            functions.redistribute(index, torch.ones(1), owner)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("prefetch_count", "returned", "warned"),
    [
        (1, lambda update: update, 1),
        (0, lambda update: update, 0),
        (1, lambda update: (update, Later(True)), 0),
        (1, lambda update: update.as_subclass(WaitableTensor), 0),
        (1, lambda update: None, 0),  # refused by check_gathered
    ],
)
def test_a_prefetch_warns_only_of_ready_tensors(
    prefetch_count: int, returned: Callable[[Tensor], object], warned: int
) -> None:
    made = config(prefetch_count=prefetch_count, gather_fn=lambda update, dst_rank, state: returned(update))
    assert len(warnings_of(UserFunctions(made), 0)) == warned


def gathered(whole: object, rank: int = 0, global_shape: tuple[int, ...] | None = (6, 5)) -> Tensor | None:
    return check_gathered(whole, name="x", owner=0, rank=rank, local_shape=(3, 5), global_shape=global_shape)


NO_TENSORS = [(None, "None"), (True, "a bool"), ([torch.ones(6, 5)], "a list")]


@pytest.mark.parametrize(
    ("whole", "shape", "message"),
    [
        *(
            (torch.ones(s), (6, 5), f"a tensor of shape {s} {{}}; the whole matrix is (6, 5): join the parts")
            for s in [(3, 5), (5, 6), (6, 5, 1), (30,), (7, 5)]
        ),
        *(
            (torch.ones(s), None, f"a tensor of shape {s} {{}}; this rank's part alone is (3, 5): ")
            for s in [(2, 5), (6, 4), (6, 5, 1), (6,), ()]
        ),
        *((whole, shape, f"{said} {{}}, which owns") for shape in [(6, 5), None] for whole, said in NO_TENSORS),
    ],
)
def test_the_owner_must_get_the_whole(whole: object, shape: tuple[int, ...] | None, message: str) -> None:
    expected = "gather_fn returned " + message.format("for parameter 'x' on rank 0")
    with pytest.raises(RuntimeError, match=f"^{re.escape(expected)}"):
        gathered(whole, global_shape=shape)


@pytest.mark.parametrize(
    ("part", "given_"),
    [
        (None, "None"),
        (True, "a bool"),
        (torch.ones(6, 5), "a tensor of shape (6, 5)"),
        (torch.ones(0, 5), "a tensor of shape (0, 5)"),
    ],
)
def test_another_part_is_refused(part: object, given_: str) -> None:
    message = f"redistribute_fn returned {given_} for parameter 'x' on rank 1; this rank's part is (3, 5): "
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}"):
        check_part(part, name="x", rank=1, local_shape=(3, 5))


def test_a_dtensor_counts_by_its_local_tensor() -> None:
    mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=0)
    half, whole = torch.ones(3, 5), torch.ones(6, 5)
    sharded = DTensor(half, owned_spec(mesh, [Shard(0)], whole.shape, whole.dtype), requires_grad=False)
    replicated = DTensor(whole, owned_spec(mesh, [Replicate()], whole.shape, whole.dtype), requires_grad=False)

    assert check_part(sharded, name="x", rank=0, local_shape=(3, 5)) is half
    with pytest.raises(RuntimeError, match=re.escape("returned a tensor of shape (6, 5)")):
        check_part(replicated, name="x", rank=0, local_shape=(3, 5))
    assert gathered(replicated) is whole
    with pytest.raises(RuntimeError, match=re.escape("returned a tensor of shape (3, 5)")):
        gathered(sharded)
