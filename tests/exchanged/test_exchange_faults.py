"""In the exchanged residency, too, a rank that is gone or that fails ends all others with a message."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
from harness.dtensors import give, noise, parameter
from harness.inside import exchange_of
from harness.jobs import Ended, kill, run_ranks, throw
from harness.on_ranks import on_ranks
from harness.rows import State, gather_with_work, scatter_with_work
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import dmuon
from dmuon import DistributedConfig, create_dtensor_config

FAULT_STEP = 2
LIMIT = 45.0  # for a busy machine
SHAPES = [(6, 4), (9, 5), (4, 12), (3, 3)]


def sharded(world: int) -> list[nn.Parameter]:
    """Weights over a mesh; nothing but dmuon communicates in a step."""
    mesh = init_device_mesh("cpu", (world,))
    return [parameter(torch.ones(shape), mesh, [Shard(0)]) for shape in SHAPES]


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    for i, param in enumerate(params):
        give(param, noise(100 * step + i, *param.shape))


ACTS: dict[str, Callable[..., None]] = {"killed": kill, "raising": throw}


def at_place(optimizer: dmuon.Muon, where: str, act: Callable[..., None]) -> None:
    """Do ``act`` in the next step, when the rank comes to a collective of this kind."""
    monitor = exchange_of(optimizer).domains[0][0].monitor

    def before(call: Callable[..., Any], *args: Any) -> Any:
        if any(where in what for what in args if isinstance(what, str)):
            act()
        return call(*args)

    for name in ("start", "watch"):
        setattr(monitor, name, partial(before, getattr(monitor, name)))


def train(optimizer: dmuon.Muon, before_step: Callable[[int], None]) -> None:
    for step in range(FAULT_STEP + 2):
        before_step(step)
        optimizer.step()
        print(f"finished {step}", flush=True)


def steps_of_generated(rank: int, world: int, where: str, act: str, victim: int, options: dict[str, Any]) -> None:
    params = sharded(world)
    config = create_dtensor_config(costs="flops", small_param_numel_threshold=0, **options)
    optimizer = dmuon.Muon(params, distributed_config=config)

    def before_step(step: int) -> None:
        if rank == victim and step == FAULT_STEP:
            at_place(optimizer, where, ACTS[act])
        give_gradients(params, step)

    train(optimizer, before_step)


def check_survivors(ended: dict[int, Ended], victim: int, act: str, named: str) -> None:
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


# -- a user's functions -----------------------------------------------------------------------------------------------


def steps_of_users(rank: int, world: int, where: str, act: str, victim: int) -> None:
    """Rank ``victim`` fails in one of the functions, once."""
    step_now = 0

    def failing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(update: Tensor | None, rank_of: int, state: State) -> Any:
            if (rank, name, step_now) == (victim, where, FAULT_STEP):
                ACTS[act]()
            return function(update, rank_of, state)

        return run

    params = [nn.Parameter(torch.ones(2, 4 + i)) for i in range(3)]
    config = DistributedConfig(
        lambda params, state: {i: i % world for i in range(len(params))},
        failing("gather", gather_with_work),
        failing("redistribute", scatter_with_work),
        {"shapes": [(2 * world, 4 + i) for i in range(3)]},
    )

    def before_step(step: int) -> None:
        nonlocal step_now
        step_now = step
        give_gradients(params, step)

    train(dmuon.Muon(params, distributed_config=config), before_step)


# -- each of them -----------------------------------------------------------------------------------------------------

GENERATED, USERS = steps_of_generated, steps_of_users
VOTE = r"vote before step\(\)"
ROUND = rf"(gather|scatter) of round \d of group 0: \d matrices|{VOTE}"
FUNCTION = rf"(gather_fn|redistribute_fn) of parameter 'parameter \d of group 0'|{VOTE}"
QUICK: list[tuple[Any, ...]] = [
    (3, GENERATED, "gather of round 0", "killed", 1, {}),
    (2, USERS, "redistribute", "killed", 1),
]
SLOW: list[tuple[Any, ...]] = [
    (4, GENERATED, "scatter of round 0", "raising", 3, {"async_gpu_parallelism": False}),
    (3, USERS, "gather", "raising", 1),
]


@pytest.mark.pitfall("P49")
@pytest.mark.parametrize(
    "case",
    [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)],
    ids=[f"{case[1].__name__}-{case[0]}-{'-'.join(map(str, case[2:]))}" for case in QUICK + SLOW],
)
def test_the_others_end_with_a_message(case: tuple[Any, ...]) -> None:
    world, program, *arguments = case
    _, act, victim = arguments[:3]
    victims = (victim,) if act == "killed" else ()
    ended = run_ranks(world, program, *arguments, limit=LIMIT, victims=victims)
    check_survivors(ended, victim, act, FUNCTION if program is USERS else ROUND)
    assert act == "killed" or "LookupError: the user's own mistake" in ended[victim].text


# -- nothing is tried again -------------------------------------------------------------------------------------------


@pytest.mark.pitfall("P49")
@on_ranks(2)
def test_nothing_is_tried_again_or_done_alone(rank: int, world: int) -> None:
    """A collective that fails on all ranks is issued once; the weights stay, and no later step does anything."""
    params = sharded(world)
    config = create_dtensor_config(costs="flops", prefetch_count=0)
    optimizer = dmuon.Muon(params, distributed_config=config)
    give_gradients(params, 0)
    optimizer.step()
    monitor = exchange_of(optimizer).domains[0][0].monitor
    start, tried = monitor.start, []

    def failing(lane: Any, what: str, launch: Any) -> Any:
        def fail() -> Any:
            tried.append(what)
            raise RuntimeError("Connection reset by peer\nwith a stack")

        return start(lane, what, fail if what.startswith("gather") else launch)

    monitor.start = failing  # type: ignore[method-assign]
    before = [p.to_local().clone() for p in params]  # type: ignore[attr-defined]
    message = rf"^rank {rank}, step 1: gather of round 0 of group 0: \d matrices failed: Connection reset by peer\. A "
    with pytest.raises(dmuon.CollectiveError, match=message):
        optimizer.step()
    monitor.start = start  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(dmuon.CollectiveError, match=r"vote before step.* was not started, because an earlier"):
            optimizer.step()
    assert len(tried) == 1
    for param, old in zip(params, before, strict=True):
        assert torch.equal(param.to_local(), old)  # type: ignore[attr-defined]
