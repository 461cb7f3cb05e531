"""In the exchanged residency, too, a rank that is gone or that fails ends all others with a message."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness import gang
from harness.pool import RankPool
from harness.toy import batch, build
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dmuon
import dmuon.comm.redistribution
import dmuon.exchanged.layouts
from dmuon import DistributedConfig, create_dtensor_config
from dmuon.check.model import Network, loss_of, shard

FAULT_STEP = 2
PATIENCE = 1.0  # for what the other ranks report
LIMIT = 45.0  # for a busy machine
SHAPES = [(6, 4), (9, 5), (4, 12), (3, 3)]


def sharded(world: int) -> list[nn.Parameter]:
    """Weights over a mesh; nothing but dmuon communicates in a step."""
    mesh = init_device_mesh("cpu", (world,))
    return [nn.Parameter(distribute_tensor(torch.ones(shape), mesh, [Shard(0)])) for shape in SHAPES]


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    for i, param in enumerate(params):
        generator = torch.Generator().manual_seed(100 * step + i)
        grad = torch.randn(param.shape, generator=generator)
        if isinstance(param, DTensor):
            grad = distribute_tensor(grad, param.device_mesh, param.placements, src_data_rank=None)
        param.grad = grad


def kill(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def throw(*_: Any) -> None:
    raise LookupError("the user's own mistake")


ACTS: dict[str, Callable[..., None]] = {"killed": kill, "raising": throw}


def at_place(optimizer: dmuon.Muon, where: str, act: Callable[..., None]) -> None:
    """Do ``act`` in the next step, when the rank comes to a collective of this kind."""
    exchange = optimizer._exchange
    assert exchange is not None
    monitor = exchange.domains[0][0].monitor
    start, watch = monitor.start, monitor.watch

    def before_start(lane: Any, what: str, launch: Any) -> Any:
        if where in what:
            act()
        return start(lane, what, launch)

    def before_watch(what: str) -> Any:
        if where in what:
            act()
        return watch(what)

    monitor.start, monitor.watch = before_start, before_watch  # type: ignore[method-assign]


def be_impatient(optimizer: dmuon.Muon) -> None:
    """Wait for what the other ranks report for as short as this file's limits on time assume."""
    assert optimizer._exchange is not None
    for domain, _ in optimizer._exchange.domains:
        domain.monitor.patience = PATIENCE


def steps_of_generated(rank: int, world: int, where: str, act: str, victim: int, options: dict[str, Any]) -> None:
    params = sharded(world)
    config = create_dtensor_config(costs="flops", small_param_numel_threshold=0, **options)
    optimizer = dmuon.Muon(params, distributed_config=config)
    be_impatient(optimizer)
    for step in range(FAULT_STEP + 2):
        if rank == victim and step == FAULT_STEP:
            at_place(optimizer, where, ACTS[act])
        give_gradients(params, step)
        optimizer.step()
        print(f"finished {step}", flush=True)


def check_survivors(ended: dict[int, gang.Ended], victim: int, act: str, named: str) -> None:
    """Each has ended with a message of its own that names rank, step and what failed, after that many steps."""
    everything = "\n".join(f"--- rank {rank}: {end.code}\n{end.text}" for rank, end in ended.items())
    for rank, end in ended.items():
        assert f"finished {FAULT_STEP - 1}" in end.text and f"finished {FAULT_STEP + 1}" not in end.text, everything
        if rank == victim:
            assert end.code == (1 if act == "raising" else -signal.SIGKILL), everything
            continue
        assert end.code == 1, everything
        pattern = rf"CollectiveError: rank {rank}, step {FAULT_STEP}: ({named}) failed: \S"
        assert re.search(pattern, end.text), f"{pattern}\n{everything}"
    said = [f"Silent: rank {victim} (killed" in end.text for rank, end in ended.items() if rank != victim]
    assert any(said), everything


ROUND = r"(gather|scatter) of round \d of group 0: \d matrices|vote before step\(\)"


@pytest.mark.pitfall("P49")
@pytest.mark.parametrize(
    ("world", "where", "act", "victim", "options"),
    [
        (3, "gather of round 0", "killed", 1, {}),
        (2, "scatter of round 1", "killed", 1, {}),
        (2, "vote before step", "killed", 1, {}),
        pytest.param(2, "gather of round 1", "raising", 0, {"async_gpu_parallelism": False}, marks=pytest.mark.slow),
        pytest.param(2, "gather of round 1", "killed", 1, {"prefetch_count": 0}, marks=pytest.mark.slow),
        pytest.param(3, "scatter of round 0", "killed", 0, {"prefetch_count": 3}, marks=pytest.mark.slow),
        pytest.param(4, "scatter of round 0", "raising", 3, {"async_gpu_parallelism": False}, marks=pytest.mark.slow),
        pytest.param(4, "vote before step", "killed", 0, {}, marks=pytest.mark.slow),
    ],
)
def test_the_others_end_with_a_message(world: int, where: str, act: str, victim: int, options: dict[str, Any]) -> None:
    victims = (victim,) if act == "killed" else ()
    arguments = (where, act, victim, options)
    ended = gang.run(world, steps_of_generated, *arguments, limit=LIMIT, timeout=60, victims=victims)
    check_survivors(ended, victim, act, ROUND)


# -- a user's functions -----------------------------------------------------------------------------------------------


class Users:
    """Functions for weights that are cut by rows into equal parts; rank ``victim`` fails in one, once."""

    def __init__(self, rank: int, world: int, where: str, act: str, victim: int) -> None:
        self.step = 0
        self._world = world
        self._where = where if rank == victim else ""
        self._act = act

    def gather(self, update: Tensor, dst_rank: int, state: dict[str, Any]) -> Any:
        whole = torch.empty(update.shape[0] * self._world, update.shape[1])
        if self._fails("gather"):
            ACTS[self._act]()
        parts = list(whole.chunk(self._world)) if state["rank"] == dst_rank else None
        work = dist.gather(update, parts, dst=dst_rank, async_op=True)
        if self._fails("shape") and state["rank"] == dst_rank:
            whole = whole[:-1, :-1]
        return (whole if parts is not None else None), work

    def redistribute(self, update: Tensor | None, src_rank: int, state: dict[str, Any]) -> Any:
        if self._fails("redistribute"):
            ACTS[self._act]()
        part = torch.empty(state["parts"][state["current_param_idx"]])
        parts = None if update is None else list(update.chunk(self._world))
        return part, dist.scatter(part, parts, src=src_rank, async_op=True)

    def _fails(self, where: str) -> bool:
        return self.step == FAULT_STEP and where == self._where


def steps_of_users(rank: int, world: int, where: str, act: str, victim: int) -> None:
    users = Users(rank, world, where, act, victim)
    params = [nn.Parameter(torch.ones(2, 4 + i)) for i in range(3)]
    config = DistributedConfig(
        lambda params, state: {i: i % world for i in range(len(params))},
        users.gather,
        users.redistribute,
        {"parts": [p.shape for p in params]},
    )
    optimizer = dmuon.Muon(params, distributed_config=config)
    be_impatient(optimizer)
    for step in range(FAULT_STEP + 2):
        users.step = step
        give_gradients(params, step)
        optimizer.step()
        print(f"finished {step}", flush=True)


USERS = r"(gather_fn|redistribute_fn) of parameter 'parameter \d of group 0'|vote before step\(\)"


@pytest.mark.pitfall("P49")
@pytest.mark.parametrize(
    ("world", "where", "act", "victim"),
    [
        pytest.param(3, "gather", "killed", 1, marks=pytest.mark.slow),
        (2, "redistribute", "killed", 1),
        pytest.param(2, "gather", "raising", 0, marks=pytest.mark.slow),
        (2, "shape", "raising", 0),
        pytest.param(3, "redistribute", "raising", 2, marks=pytest.mark.slow),
        pytest.param(3, "shape", "raising", 1, marks=pytest.mark.slow),
    ],
)
def test_what_fails_in_a_users_function_is_named(world: int, where: str, act: str, victim: int) -> None:
    victims = (victim,) if act == "killed" else ()
    ended = gang.run(world, steps_of_users, where, act, victim, limit=LIMIT, timeout=60, victims=victims)
    check_survivors(ended, victim, act, USERS)
    if act == "raising":
        said = "gather_fn returned a tensor of shape" if where == "shape" else "the user's own mistake"
        assert said in ended[victim].text


# -- nothing is tried again -------------------------------------------------------------------------------------------


def launches(rank: int, world: int) -> None:
    """A collective that fails on all ranks is issued once; the weights stay, and no later step does anything."""
    params = sharded(world)
    config = create_dtensor_config(costs="flops", prefetch_count=0)
    optimizer = dmuon.Muon(params, distributed_config=config)
    be_impatient(optimizer)
    give_gradients(params, 0)
    optimizer.step()
    assert optimizer._exchange is not None
    monitor = optimizer._exchange.domains[0][0].monitor
    start, tried = monitor.start, []

    def failing(lane: Any, what: str, launch: Any) -> Any:
        def fail() -> Any:
            tried.append(what)
            raise RuntimeError("Connection reset by peer\nwith a stack")

        return start(lane, what, fail)

    monitor.start = failing  # type: ignore[method-assign]
    before = [p.to_local().clone() for p in params]  # type: ignore[attr-defined]
    message = rf"^rank {rank}, step 1: gather of round 0 of group 0: \d matrices failed: Connection reset by peer\. The"
    with pytest.raises(dmuon.CollectiveError, match=message):
        optimizer.step()
    monitor.start = start  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(dmuon.CollectiveError, match=r"vote before step.* was not started, because an earlier"):
            optimizer.step()
    assert len(tried) == 1
    for param, old in zip(params, before, strict=True):
        assert torch.equal(param.to_local(), old)  # type: ignore[attr-defined]


@pytest.mark.pitfall("P49")
def test_nothing_is_tried_again_or_done_alone(ranks: RankPool) -> None:
    ranks(2, launches)


def silent_rank(rank: int, world: int) -> str:
    """Rank 1 takes no step: rank 0 ends when its own group times out."""
    make = dmuon.comm.domain.make_domain

    def impatient(ranks: Any, device: torch.device) -> Any:
        return make(ranks, device, dmuon.CommOptions(timeout=timedelta(seconds=3)))

    dmuon.exchanged.layouts.make_domain = impatient  # type: ignore[attr-defined]
    try:
        params = sharded(world)
        optimizer = dmuon.Muon(params, distributed_config=create_dtensor_config(costs="flops"))
        be_impatient(optimizer)
    finally:
        dmuon.exchanged.layouts.make_domain = make  # type: ignore[attr-defined]
    give_gradients(params, 0)
    optimizer.step()
    if rank == 1:
        return ""
    with pytest.raises(dmuon.CollectiveError) as caught:
        optimizer.step()
    return str(caught.value)


@pytest.mark.pitfall("P48", "P49")
@pytest.mark.slow
def test_a_rank_that_takes_no_step_is_found_silent(ranks: RankPool) -> None:
    said, _ = ranks(2, silent_rank)
    assert said.startswith("rank 0, step 1: vote before step() failed: ") and "Silent: rank 1 (killed" in said


# -- ranks that do not do the same ------------------------------------------------------------------------------------


def other_layouts(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    dim = 1 if rank == 1 else 0
    params = [nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(d)], src_data_rank=None)) for d in (0, dim)]
    dmuon.Muon(params, distributed_config=create_dtensor_config(costs="flops"))


@pytest.mark.pitfall("P21")
def test_layouts_that_differ_end_all_ranks_by_name(ranks: RankPool) -> None:
    match = r"parameter '1 of those that ranks 0 1 hold together' is .* on rank 1 and .* on rank 0"
    ranks(2, other_layouts, expect=ValueError, match=match)


def other_order(rank: int, world: int) -> None:
    """Rank 1 has another plan than rank 0: an owner was changed after they agreed."""
    params = sharded(world)
    config = create_dtensor_config(costs="flops")
    assign = config.assign_fn

    def tampered(params: list[Tensor], state: dict[str, Any]) -> dict[int, int]:
        owners: Any = assign(params, state)
        return {i: 1 - owner if rank == 1 and i == 2 else owner for i, owner in owners.items()}

    config.assign_fn = tampered
    dmuon.Muon(params, distributed_config=config)


@pytest.mark.pitfall("P21")
def test_owners_that_differ_end_all_ranks_by_name(ranks: RankPool) -> None:
    match = r"owner of parameter '2 of those that ranks 0 1 hold together' is \d on rank 1 and \d on rank 0"
    ranks(2, other_order, expect=ValueError, match=match)


def other_schedule(rank: int, world: int) -> None:
    params = sharded(world)
    config = create_dtensor_config(costs="flops", prefetch_count=1 + rank, small_param_numel_threshold=0)
    optimizer = dmuon.Muon(params, distributed_config=config)
    give_gradients(params, 0)
    before = [p.to_local().clone() for p in params]  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        for param, old in zip(params, before, strict=True):
            assert torch.equal(param.to_local(), old), "nothing travels before the schedules are compared"  # type: ignore[attr-defined]


@pytest.mark.pitfall("P10", "P21")
def test_schedules_that_differ_end_all_ranks_before_anything_travels(ranks: RankPool) -> None:
    ranks(2, other_schedule, expect=dmuon.CollectiveError, match="prefetch_count=[12]")


def change_on_one_rank(rank: int, world: int) -> None:
    params = sharded(world)
    optimizer = dmuon.Muon(params[:3], distributed_config=create_dtensor_config(costs="flops"))
    give_gradients(params, 0)
    optimizer.step()
    if rank == 1:
        optimizer.param_groups[0]["params"].append(params[3])
    optimizer.step()


@pytest.mark.pitfall("P21")
def test_groups_that_change_on_one_rank_end_all_ranks(ranks: RankPool) -> None:
    ranks(2, change_on_one_rank, expect=RuntimeError, match="have changed on (this|another) rank.*change them on all")


def gradients_on_one_rank(rank: int, world: int) -> None:
    """A rank without gradients takes part in the step; what nobody has stays as it was."""
    params = sharded(world)
    optimizer = dmuon.Muon(params, distributed_config=create_dtensor_config(costs="flops"), weight_decay=0.0)
    give_gradients(params, 0)
    params[3].grad = None
    if rank == 0:
        params[0].grad = None
    if rank == 1:
        for param in params[1:]:
            param.grad = None
    before = [p.full_tensor().clone() for p in params]  # type: ignore[attr-defined]
    optimizer.step()
    count = torch.tensor(optimizer.last_step.ns_matrices)
    dist.all_reduce(count)
    assert count == 3
    for i, (param, old) in enumerate(zip(params, before, strict=True)):
        assert torch.equal(param.full_tensor(), old) == (i == 3)  # type: ignore[attr-defined]


@pytest.mark.pitfall("P48")
def test_a_rank_without_gradients_takes_part(ranks: RankPool) -> None:
    ranks(2, gradients_on_one_rank, timeout=20)


def beside_fsdp(rank: int, world: int, victim: int) -> None:
    """A rank is killed in the scatter of a step of a whole training loop."""
    model: Network = build()
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = dmuon.Muon(model, distributed_config=create_dtensor_config(costs="flops"))
    be_impatient(optimizer)
    for step in range(FAULT_STEP + 2):
        if rank == victim and step == FAULT_STEP:
            at_place(optimizer, "scatter of round", kill)
        optimizer.zero_grad()
        loss_of(model, *shard(batch(step), rank, world)).backward()
        optimizer.step()
        print(f"finished {step}", flush=True)


@pytest.mark.slow
@pytest.mark.pitfall("P49")
def test_the_others_end_beside_fsdp() -> None:
    ended = gang.run(3, beside_fsdp, 1, limit=LIMIT, timeout=60, victims=(1,))
    check_survivors(ended, 1, "killed", ROUND)


def change_in_one_domain(rank: int, world: int) -> None:
    """Ranks 0 and 1 find a fault in what they share; rank 2 shares with rank 1 only."""
    params = []
    for pair in ([0, 1], [1, 2]):
        mesh = DeviceMesh("cpu", pair)
        if rank in pair:
            params.append(nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)], src_data_rank=None)))
    optimizer = dmuon.Muon(params, distributed_config=create_dtensor_config(costs="flops"))
    give_gradients(params, 0)
    optimizer.step()
    if rank == 0:
        optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(2, 2)))
    optimizer.step()


@pytest.mark.pitfall("P21", "P49")
def test_a_fault_of_one_vote_reaches_the_next_domain(ranks: RankPool) -> None:
    ends = ranks.outcomes(3, change_in_one_domain, timeout=20)
    for end in ends[:2]:
        assert end.raised(RuntimeError) and "have changed on" in end.message, end
    assert ends[2].raised(RuntimeError), ends[2]
    assert "rank 2: rank 1, one of ranks 1 2, found a fault among other ranks" in ends[2].message
