"""A user's own ``assign_fn``, ``gather_fn`` and ``redistribute_fn`` on ranks: every form, and every fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.assertions import assert_equal_weights
from harness.hand_laid import Cut, Weights
from harness.network import full_state
from harness.on_ranks import of_all_ranks, on_ranks, over_ranks
from harness.oracle import reference_weights
from harness.rows import State, gather_with_work, scatter_with_work, shape_now
from harness.topologies import lay, orthogonalized
from harness.toy import build
from torch import Tensor

import dmuon
from dmuon import DistributedConfig, create_dtensor_config

Functions = tuple[Callable[..., Any], Callable[..., Any]]
STEPS = 3


# -- functions of users ---------------------------------------------------------------------------------------------
# Weights are cut by rows, evenly, so that plain gathers and scatters serve (``harness/rows.py``).


def gather(update: Tensor, dst_rank: int, state: State) -> Tensor | None:
    found, work = gather_with_work(update, dst_rank, state)
    work.wait()
    return found


def scatter(update: Tensor | None, src_rank: int, state: State) -> Tensor | None:
    found, work = scatter_with_work(update, src_rank, state)
    work.wait()
    return found


def copy_from_owner(update: Tensor | None, src_rank: int, state: State) -> Tensor:
    found = torch.empty(shape_now(state)) if update is None else update
    dist.broadcast(found, src=src_rank, group=state["process_group"])
    return found


ROWS: dict[str, Functions] = {
    "with work": (gather_with_work, scatter_with_work),
    "mixed": (gather_with_work, scatter),
}


def by_index(params: list[Tensor], state: State) -> dict[int, int]:
    return {i: (i + 1) % dist.get_world_size() for i in range(len(params))}


def by_rank(params: list[Tensor], state: State) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {rank: [] for rank in range(dist.get_world_size())}
    for index, rank in by_index(params, state).items():
        found[rank].append(index)
    return found


MODES = [(True, 0), (True, 1), (True, 2), (False, 0), (False, 2)]


# -- end to end -----------------------------------------------------------------------------------------------------


class Recorded:
    """Which calls were made, in order."""

    def __init__(self, functions: Functions) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self.functions = functions

    def gather_fn(self, update: Tensor, dst_rank: int, state: State) -> Any:
        self.calls.append(("gather", state["current_param_idx"], dst_rank))
        return self.functions[0](update, dst_rank=dst_rank, state=state)

    def redistribute_fn(self, update: Tensor | None, src_rank: int, state: State) -> Any:
        self.calls.append(("redistribute", state["current_param_idx"], src_rank))
        assert (update is not None) == (state["rank"] == src_rank)
        return self.functions[1](update, src_rank=src_rank, state=state)


def stepped(
    rank: int, world: int, config: DistributedConfig, shapes: list[tuple[int, ...]], cut: bool, **options: Any
) -> list[Tensor]:
    """This rank's parts of the weights after ``STEPS``, which are those of one process."""
    config.state["shapes"] = shapes
    along = {"fsdp": 0} if cut else {}
    weights = Weights().cut([Cut(shape, **along) for shape in shapes], {"fsdp": world}, {"fsdp": rank})
    count = weights.train(weights.optimizer(config, **options), STEPS)
    matrices = sum(shape[0] if len(shape) == 3 else 1 for shape in shapes)
    assert (over_ranks(count) if world > 1 else count) == STEPS * matrices
    if options.get("nesterov", True):
        weights.check()
    return [param.detach() for param in weights.params]


def ahead_of(made: list[tuple[str, int, int]]) -> int:
    """Most gathers that were ahead of their redistribution."""
    ahead = most = 0
    for what, _, _ in made:
        ahead += 1 if what == "gather" else -1
        most = max(most, ahead)
    return most


@pytest.mark.pitfall("P25", "P26")
@pytest.mark.parametrize("name", ROWS)
@on_ranks(3)
def test_functions_of_every_form_equal_one_process(rank: int, world: int, name: str) -> None:
    """To the same bits in all modes, with the same calls on all ranks, of which ``prefetch_count`` bounds some."""
    shapes: list[tuple[int, ...]] = [(6, 4), (12, 5), (6, 4), (6, 9), (18, 3)]
    assign: Any = by_rank if name == "mixed" else by_index
    results, ahead = [], {}
    for together, prefetch in MODES:
        recorded = Recorded(ROWS[name])
        config = DistributedConfig(assign, recorded.gather_fn, recorded.redistribute_fn, {}, together, prefetch)
        results.append(stepped(rank, world, config, shapes, cut=True))
        made = recorded.calls
        assert of_all_ranks(made) == [made] * world, "ranks call in another order"
        assert len(made) == STEPS * 5 * 2
        for index in range(5):
            assert [what for what, i, _ in made if i == index] == ["gather", "redistribute"] * STEPS
        ahead[together, prefetch] = ahead_of(made)
    for mode, result in zip(MODES[1:], results[1:], strict=True):
        assert all(map(torch.equal, result, results[0])), f"{mode} differs from {MODES[0]}"
    assert ahead[False, 0] == 1 and ahead[False, 2] == 3
    assert ahead[True, 0] == world < ahead[True, 1] <= 2 * world


def identity(update: Tensor, rank: int, state: State) -> Tensor:
    return update


@pytest.mark.pitfall("P39")
@pytest.mark.parametrize("nesterov", [True, False])
def test_functions_may_write_into_what_they_are_given(nesterov: bool) -> None:
    def clearing(update: Tensor, rank: int, state: State) -> Tensor:
        whole = update.clone()
        update.zero_()
        return whole

    found = []
    for gather_fn in (identity, clearing):
        config = DistributedConfig(lambda params, state: {0: 0, 1: 0}, gather_fn, identity, {}, prefetch_count=0)
        found.append(stepped(0, 1, config, [(6, 4), (3, 5)], cut=False, nesterov=nesterov))
    assert all(map(torch.equal, found[0], found[1]))


# -- users' functions beside generated ones ---------------------------------------------------------------------------


def trained(config: DistributedConfig) -> tuple[dmuon.Muon, int]:
    laid = lay("fsdp2-3", build())
    laid.config = config
    optimizer = laid.optimizer()
    calls = orthogonalized(optimizer, laid.backward, STEPS)
    assert_equal_weights(full_state(laid.model), reference_weights(STEPS))
    return optimizer, sum(calls)


@pytest.mark.pitfall("P13")
@on_ranks(3)
def test_a_users_assignment_alone_keeps_the_pipeline(rank: int, world: int) -> None:
    """The user says who owns what; the pipeline is dmuon's, so that a step has few batches of many matrices."""

    def assign(params: list[Tensor], state: State) -> dict[int, int]:
        return {i: 0 if i < 6 else i % world for i in range(len(params))}

    config = replace(create_dtensor_config(costs="flops"), assign_fn=assign)
    optimizer, count = trained(config)
    assert optimizer.last_step.ns_batches <= 3, "by shape, not one by one"
    assert count == STEPS * (7 if rank == 0 else 1)


@on_ranks(3)
def test_fewer_ranks_than_all_take_part(rank: int, world: int) -> None:
    """Ranks 1 and 2, which ``state`` says."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return
    shapes = [(6, 4), (5, 7)]
    state = {"process_group": group, "shapes": shapes}
    config = DistributedConfig(
        lambda params, state: {1: [0], 2: [1]}, identity, copy_from_owner, state, prefetch_count=0
    )
    weights = Weights().cut([Cut(shape) for shape in shapes])
    assert weights.train(weights.optimizer(config), STEPS) == STEPS
    weights.check()


# -- faults that all ranks must see -----------------------------------------------------------------------------------


def altered(function: Callable[..., Any], change: Callable[[Any, int], Any]) -> Callable[..., Any]:
    """``change`` gets what it returns, and the rank."""
    return lambda update, rank, state: change(function(update, rank, state), state["rank"])


def raising(error: Exception) -> Callable[..., Any]:
    def function(update: Tensor, rank: int, state: State) -> Tensor:
        raise error

    return function


FAULTS: dict[str, tuple[Functions, type[Exception], str]] = {
    "nothing gathered": (
        (altered(gather, lambda whole, rank: None), scatter),
        RuntimeError,
        "gather_fn returned None for parameter",
    ),
    "not all gathered": (
        (altered(gather, lambda whole, rank: None if whole is None else whole[:-1, :-1]), scatter),
        RuntimeError,
        r"gather_fn returned a tensor of shape \(5, 3\)",
    ),
    "a short part": (
        (gather, altered(scatter, lambda part, rank: part[:-1] if rank == 1 else part)),
        RuntimeError,
        r"redistribute_fn returned a tensor of shape \(2, 4\) .* on rank 1; this rank's part is \(3, 4\)",
    ),
    "no part": (
        (gather, altered(scatter, lambda part, rank: None if rank == 0 else part)),
        RuntimeError,
        "redistribute_fn returned None .* on rank 0",
    ),
    "raising": ((raising(LookupError("no such shard")), scatter), LookupError, "^'?no such shard'?$"),
    "failing": (
        (raising(RuntimeError("no link\nwith a long stack")), scatter),
        dmuon.CollectiveError,
        r"^rank \d, step 0: gather_fn of parameter 'parameter 0 of group 0' failed: no link\. A rank was killed",
    ),
}


@pytest.mark.pitfall("P49")
@pytest.mark.parametrize(
    ("name", "together", "prefetch"), [(name, i % 2 == 0, (i + 1) % 2) for i, name in enumerate(FAULTS)]
)
@pytest.mark.filterwarnings("ignore")
@on_ranks(2, timeout=20)
def test_a_fault_of_a_function_ends_all_ranks(rank: int, world: int, name: str, together: bool, prefetch: int) -> None:
    functions, error, message = FAULTS[name]
    config = DistributedConfig(by_index, *functions, {}, together, prefetch)
    with pytest.raises(error, match=message):
        stepped(rank, world, config, [(6, 4)] * 4, cut=True)
