"""A fault on one rank ends all ranks with a message; nothing goes on with data of unlike collectives."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness.assertions import assert_equal_weights
from harness.jobs import Ended, kill, run_ranks, stop, throw
from harness.limits import PROGRAM_SECONDS
from harness.network import Network, full_state, loss_of
from harness.on_ranks import on_ranks
from harness.oracle import reference_weights
from harness.topologies import LAYOUTS, lay
from harness.toy import OPTIONS, SIZE, batch, build

import dmuon
from dmuon.dedicated.dedication import dedications

FAULT_STEP = 2
TIMEOUT = 6.0  # of process groups
SLACK = 12.0  # for a busy machine


RAISING = ("raising", "destroying")  # an error of the user's; after the latter ranks destroy their groups in a finally
ACTS = {"killed": kill, "stopped": stop, **dict.fromkeys(RAISING, throw)}


def arm(model: nn.Module, where: str, act: Callable[[], None]) -> None:
    """Do ``act`` at one place of the step FAULT_STEP."""
    runtime = dedications(model)[0].runtime

    def hook(*_: Any) -> None:
        if runtime.comm.monitor.step == FAULT_STEP:
            act()

    match where:
        case "forward":
            model.blocks[1].mix.register_forward_pre_hook(hook)
        case "backward":
            model.blocks[1].mix.register_full_backward_hook(hook)
        case "step":
            begin = runtime.publications.begin
            runtime.publications.begin = lambda *args: (begin(*args), hook())


def train(rank: int, world: int, layout: str, where: str, act: str, victim: int) -> None:
    model = build()
    laid = lay(layout, model, comm=dmuon.CommOptions(timeout=timedelta(seconds=TIMEOUT)))
    optimizer = dmuon.Muon(model, **OPTIONS)
    if rank == victim:
        arm(model, where, ACTS[act])
    try:
        laid.train(optimizer, range(FAULT_STEP + 3))
    finally:
        if act == "destroying":
            optimizer.zero_grad()
            dist.destroy_process_group()


# What a message names: rank, step, and a collective of a block or a parameter, or one of the whole model.
NAMED = re.compile(
    r"CollectiveError: rank (?P<rank>\d), step (?P<step>\d): ((fill|reduce|publish) of block 'blocks\.\d'.*?|"
    r"average of \d+ replicated gradients.*?|vote on unused parameters|gather of round \d+ of group \d+: \d+ matrices|"
    r"scatter of 'blocks\.\d\.\w+\.weight' .*?) failed: "
)

CASES = [  # rank 0 hosts the store if it is the victim
    ("1d-3-two-lines", "backward", "killed", 1),
    ("1d-3-two-lines", "forward", "killed", 0),
    pytest.param("ddp-2", "step", "raising", 1, marks=pytest.mark.slow),
    pytest.param("1d-two-lines", "forward", "destroying", 1, marks=pytest.mark.slow),
    pytest.param("1d-3-two-lines", "backward", "stopped", 1, marks=pytest.mark.slow),
]


def check_survivors(ended: dict[int, Ended], victim: int, act: str) -> None:
    """Each has ended with its own message."""
    for rank, end in ended.items():
        if rank == victim:
            assert end.code == (1 if act in RAISING else -signal.SIGKILL), end.text
            continue
        assert end.code == 1, end.text
        found = NAMED.search(end.text)
        assert found, end.text
        assert int(found["rank"]) == rank and FAULT_STEP <= int(found["step"]) <= FAULT_STEP + 1, found[0]


@pytest.mark.pitfall("P26", "P49")
@pytest.mark.parametrize(("layout", "where", "act", "victim"), CASES)
def test_the_others_end_with_a_message(layout: str, where: str, act: str, victim: int) -> None:
    limit = (TIMEOUT if act == "stopped" else 0) + SLACK + 15.0
    victims = () if act in RAISING else (victim,)
    program = train, layout, where, act, victim
    hosts = victim == 0
    ended = run_ranks(LAYOUTS[layout].world, *program, limit=limit, victims=victims, rank_0_hosts_store=hosts)
    check_survivors(ended, victim, act)
    times = [end.seconds for rank, end in ended.items() if rank != victim]
    assert max(times) - min(times) < TIMEOUT + SLACK
    if act in RAISING:
        assert "LookupError: the user's own mistake" in ended[victim].text


# -- ranks that do not do the same --------------------------------------------------------------------------------


class Ordered(Network):
    """Blocks in the order ``order``."""

    order: tuple[int, ...] = (0, 1, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for i in self.order:
            x = self.blocks[i](x)
        return self.head(self.norm(x))


UNLIKE = {"swapped blocks": (1, 0, 2), "skipped block": (0, 2)}


def out_of_step(rank: int, world: int, layout: str, keep: bool, what: str, transport: str) -> None:
    """Rank 1 does something else at FAULT_STEP; nobody may take the step after it."""
    torch.manual_seed(0)
    model = Ordered(SIZE)
    options = dmuon.CommOptions(timeout=timedelta(seconds=TIMEOUT), transport=transport)  # type: ignore[arg-type]
    laid = lay(layout, model, keep=keep, comm=options)
    optimizer = dmuon.Muon(model, **OPTIONS)
    for step in range(FAULT_STEP + 3):
        other = rank == 1 and step == FAULT_STEP
        optimizer.zero_grad()
        model.order = UNLIKE.get(what, Ordered.order) if other else Ordered.order
        loss_of(model, *laid.mine(batch(step))).backward()
        if other and what == "extra step":
            optimizer.step()
        if not (other and what == "missing step"):
            optimizer.step()
        print(f"finished {step}", flush=True)


# A vote tells the difference, if the ranks come to it. Where they wait for each other, each names what it waits for.
TOLD = re.compile(
    r"issued different collectives: .+ on rank \d where rank \d has .+; run|failed: .+ see the logs of the"
)
ORDERS = [
    ("1d-two-lines", False, "swapped blocks", "broadcast"),
    pytest.param("1d-two-lines", False, "skipped block", "single", marks=pytest.mark.slow),
    pytest.param("1d-two-lines", False, "missing step", "broadcast", marks=pytest.mark.slow),
    pytest.param("ddp-2", True, "extra step", "single", marks=pytest.mark.slow),
]


@pytest.mark.pitfall("P25", "P48", "P49")
@pytest.mark.parametrize(("layout", "keep", "what", "transport"), ORDERS)
def test_ranks_out_of_step_end_with_a_name(layout: str, keep: bool, what: str, transport: str) -> None:
    ended = run_ranks(2, out_of_step, layout, keep, what, transport, limit=60)
    everything = "\n".join(f"--- rank {r}\n{end.text}" for r, end in ended.items())
    aborted = [rank for rank, end in ended.items() if end.code == -signal.SIGABRT]
    for rank, end in ended.items():
        assert f"finished {FAULT_STEP + 1}" not in end.text, everything
        if rank in aborted:
            # Messages of unlike sizes have met: gloo ends the process itself, from a thread of its own.
            assert transport == "broadcast" and "Is there a distributed collective mismatch in your code?" in end.text
            continue
        assert end.code == 1, everything
        assert re.search(r"CollectiveError: rank \d, step \d: ", end.text), everything
        assert TOLD.search(end.text), everything


# -- after a failure ----------------------------------------------------------------------------------------------


class Failing:
    """A work that ends and then raises, as one whose peer is gone does."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def wait(self) -> None:
        self.work.wait()
        raise RuntimeError("Connection closed by peer\nstack of the back end")

    def is_completed(self) -> bool:
        return True


@pytest.mark.pitfall("P26", "P49")
@pytest.mark.parametrize(
    ("layout", "kind", "when"),
    [("1d", "reduce", "wait"), ("ddp-2", "publish", "launch")],
)
@on_ranks(2, timeout=45)
def test_a_failure_names_its_block_and_ends_everything_after_it(
    rank: int, world: int, layout: str, kind: str, when: str
) -> None:
    """The second block's fill, publication or reduction fails on all ranks; what follows raises at once."""
    model = build()
    laid = lay(layout, model)
    optimizer = dmuon.Muon(model, **OPTIONS)
    loss_of(model, *laid.mine(batch(0))).backward()
    optimizer.step()
    runtime = dedications(model)[0].runtime
    monitor = runtime.comm.monitor
    start = monitor.start

    def sabotaged(lane: str, what: str, launch: Any) -> Any:
        if lane != kind or "blocks.1" not in what:
            return start(lane, what, launch)
        if when == "launch":

            def failing() -> Any:
                raise RuntimeError("Connection closed by peer")

            return start(lane, what, failing)
        return start(lane, what, lambda: [Failing(work) for work in launch()])

    monitor.start = sabotaged
    with pytest.raises(dmuon.CollectiveError) as caught:
        for step in range(2):
            loss_of(model, *laid.mine(batch(step))).backward()
            optimizer.step()
    message = str(caught.value)
    what = rf"rank {rank}, step \d: {kind}.* of block 'blocks\.1'( along the row)? failed: Connection closed by"
    assert re.match(what, message) and "stack" not in message, message
    assert message.endswith("A rank was killed, raised elsewhere, or is late: see the logs of the others"), message
    monitor.start = start
    for action in (
        lambda: loss_of(model, *laid.mine(batch(0))).backward(),
        lambda: loss_of(model, *laid.mine(batch(0))).backward(),
        model.state_dict,
    ):
        with pytest.raises(dmuon.CollectiveError, match=r"was not started, because an earlier .*blocks\.1|Before that"):
            action()
    optimizer.zero_grad()
    assert not runtime.backwards and not any(block.phase.name != "REST" for block in runtime.blocks)
    assert all(b._fill is None and b._publication is None for b in runtime.buffers if not b.keep)


# An exception in the middle of a backward leaves gradients behind in FSDP2 itself.
@pytest.mark.pitfall("P17")
@pytest.mark.parametrize(
    ("layout", "where"),
    [("1d-two-lines", "fill"), ("ddp-2", "reduce")],
)
@on_ranks(2, timeout=45)
def test_ranks_that_catch_the_same_exception_go_on_exactly(rank: int, world: int, layout: str, where: str) -> None:
    """Every rank runs out of memory at one place, and takes the batch again."""
    model = build()
    laid = lay(layout, model)
    optimizer = dmuon.Muon(model, **OPTIONS)
    runtime = dedications(model)[0].runtime
    monitor = runtime.comm.monitor
    start = monitor.start
    armed: list[str] = []

    def exhausted(*_: Any, **__: Any) -> Any:
        armed.clear()
        raise torch.OutOfMemoryError("no memory left")

    def guarded(lane: str, what: str, launch: Any) -> Any:
        return start(lane, what, exhausted if armed and lane in armed and "blocks.1" in what else launch)

    monitor.start = guarded
    for step in range(4):
        optimizer.zero_grad()
        if step == FAULT_STEP:
            armed.append(where)
            with pytest.raises(torch.OutOfMemoryError):
                loss_of(model, *laid.mine(batch(step))).backward()
            optimizer.zero_grad()
        loss_of(model, *laid.mine(batch(step))).backward()
        optimizer.step()
    assert_equal_weights(full_state(model), reference_weights(4))


# -- whole programs -----------------------------------------------------------------------------------------------

PROGRAMS = Path(__file__).parents[1] / "programs"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONFAULTHANDLER": "1"}


@pytest.mark.slow
@pytest.mark.pitfall("P68")
def test_runs_that_end_well_do_not_abort_at_exit(tmp_path: Path) -> None:
    """Without ``let_threads_rest`` 7 of 40 such processes did."""
    command = [sys.executable, str(PROGRAMS / "exits.py"), "10", "forward", str(tmp_path)]
    environment = {**ENVIRONMENT, "XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PROGRAM_SECONDS)
    assert run.stdout.strip() == "{0: 20}", run.stdout + run.stderr
