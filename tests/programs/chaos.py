"""Random faults at random moments: every job ends in bounded time, with right numbers or an error on every rank.

A round trains a toy on two to four ranks, with checkpoints, one load and an evaluation on its way, and one fault
(:data:`FAULTS`). Ranks that stand still, and what they do otherwise than each other, are in
``tests/dedicated/test_faults.py``. Then

- no rank hangs or aborts; those that come to the end have the numbers of one process, and every other rank says what
  is wrong;
- the next job goes on from the last whole checkpoint, and so does a job on another layout, and both end with the
  numbers of one process.

``python tests/programs/chaos.py --rounds 500 --seed 0`` runs rounds at length. A round is drawn from the seed and its
number alone: ``--first N --rounds 1`` runs it again.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from harness.assertions import assert_equal_weights
from harness.checkpoints import Run, load, save, start
from harness.jobs import Ended, run_ranks
from harness.network import full_state, loss_of
from harness.oracle import reference_weights
from harness.topologies import LAYOUTS
from harness.toy import batch

import dmuon

STEPS, SAVED_AFTER, EVALUATED_AFTER = 4, (2, 3), 3  # steps; the first checkpoint is loaded again at once
EVALUATION = 50  # the batch
MAX_NORM, TOLERANCE = 0.5, 2e-5
TIMEOUT = 15.0  # of process groups, in seconds
LIMIT = 120.0  # of a job
ROOM = 2048  # bytes that a file may have on a full disk
GLOO = "Is there a distributed collective mismatch in your code?"  # gloo aborts a rank that gets another's message

# dmuon's matrices have one name for each parameter in these: a checkpoint of one can be loaded on any other.
ROOMS = [n for n, grid in LAYOUTS.items() if 2 <= grid.world <= 4 and n not in ("ddp-inside", "cp-groups", "cp-mesh")]
VARIANTS: dict[str, dict[str, Any]] = {  # of dedicated layouts: how they communicate
    "": {},
    "keep": {"keep": True},
    "single": {"comm": dmuon.CommOptions(transport="single")},
    "overlap": {"member": {"overlap_backward": True}},
}
ANYWHERE = ("construct", "forward", "backward", "clip", "step", "evaluate", "save", "load")
# How often each comes, and in which phases.
FAULTS = {
    "kill": (12, (*ANYWHERE, "step", "save")),
    "raise": (8, ("forward", "backward", "step", "save")),
    "interrupt one": (8, ANYWHERE),
    "interrupt all": (6, ANYWHERE),
    "full disk": (4, ("save",)),
}


@dataclass(frozen=True)
class Round:
    """One of them.

    Attributes:
        step: at which the fault comes.
        calls: how many calls of Python functions into the phase; at its end if there are fewer.
        other: a layout on which the checkpoint is loaded afterwards; empty for none.
    """

    number: int
    layout: str
    variant: str
    fault: str
    victim: int
    phase: str
    step: int
    calls: int
    other: str

    @property
    def world(self) -> int:
        return LAYOUTS[self.layout].world


def steps_of(phase: str) -> tuple[int, ...]:
    """At which steps a phase comes."""
    at = {"construct": (0,), "save": tuple(n - 1 for n in SAVED_AFTER), "load": (1,), "evaluate": (2,)}
    return at.get(phase, tuple(range(STEPS)))


def draw(seed: int, number: int) -> Round:
    dice = random.Random(f"{seed}/{number}")
    fault = dice.choices(list(FAULTS), [weight for weight, _ in FAULTS.values()])[0]
    layout = dice.choice(ROOMS)
    phase = dice.choice(FAULTS[fault][1])
    others = [name for name in ROOMS if LAYOUTS[name].world != LAYOUTS[layout].world]
    return Round(
        number,
        layout,
        dice.choice(list(VARIANTS)) if LAYOUTS[layout].dedicated else "",
        fault,
        dice.randrange(LAYOUTS[layout].world),
        phase,
        dice.choice(steps_of(phase)),
        int(10 ** dice.uniform(0, 3.5)),
        dice.choice(others) if dice.random() < 0.4 else "",
    )


# -- a rank -----------------------------------------------------------------------------------------------------------


@dataclass
class Fault:
    """That of a round, on a rank that has it. Every phase of a program is a place for it."""

    round: Round
    is_here: bool
    came: bool = False

    @contextmanager
    def during(self, phase: str, step: int) -> Iterator[None]:
        """Act at the call that was drawn, or at the end where there are fewer."""
        if not self.is_here or (phase, step) != (self.round.phase, self.round.step):
            yield
            return
        left = self.round.calls
        if self.round.fault == "full disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, resource.RLIM_INFINITY))

        def count(_frame: Any, event: str, _: Any) -> None:
            nonlocal left
            left -= event == "call"
            if left == 0:
                self.act()

        sys.setprofile(count)
        try:
            yield
        finally:
            sys.setprofile(None)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        if left > 0:
            self.act()

    def act(self) -> None:
        sys.setprofile(None)
        self.came = True
        match self.round.fault:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "interrupt one" | "interrupt all":
                os.kill(os.getpid(), signal.SIGINT)
            case "raise":
                raise ArithmeticError("the user's own mistake")


def train(rank: int, world: int, round_: Round, checkpoints: Path) -> None:
    """A user's program, which goes on from the last checkpoint."""
    fault = Fault(round_, round_.fault == "interrupt all" or (round_.fault != "" and rank == round_.victim))
    # Every group has the same short timeout; torch's meshes have no option for it.
    dist.distributed_c10d.default_pg_timeout = timedelta(seconds=TIMEOUT)
    with fault.during("construct", 0):
        run = start(round_.layout, **VARIANTS[round_.variant])
    last = max(checkpoints.glob("step-*"), default=None)  # what is not whole has another name
    if last is not None:
        load(run, str(last))
    for step in range(0 if last is None else int(last.name.removeprefix("step-")), STEPS):
        train_step(run, fault, step)
        if step + 1 == EVALUATED_AFTER:
            with torch.no_grad(), fault.during("evaluate", step):
                loss_of(run.model, *run.part(batch(EVALUATION)))
        if step + 1 in SAVED_AFTER:
            with fault.during("save", step):
                save_whole(run, checkpoints, step + 1)
            if step + 1 == SAVED_AFTER[0]:
                with fault.during("load", step):
                    load(run, str(checkpoints / f"step-{step + 1}"))
    assert fault.came == fault.is_here, "the fault never came"
    assert_equal_weights(full_state(run.inner), reference_weights(STEPS, clip=MAX_NORM), TOLERANCE)
    dist.barrier()
    dist.destroy_process_group()


def train_step(run: Run, fault: Fault, step: int) -> None:
    run.optimizer.zero_grad()
    with fault.during("forward", step):
        loss = loss_of(run.model, *run.part(batch(step)))
    with fault.during("backward", step):
        loss.backward()
    with fault.during("clip", step):
        dmuon.clip_grad_norm_(run.model.parameters(), MAX_NORM)
    with fault.during("step", step):
        run.optimizer.step()


def save_whole(run: Run, checkpoints: Path, step: int) -> None:
    """It gets its name when all of it is written."""
    temporary = checkpoints / f"tmp-{step}"
    if dist.get_rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
    dist.barrier()
    save(run, str(temporary))
    if dist.get_rank() == 0:
        temporary.rename(checkpoints / f"step-{step}")
    dist.barrier()


# -- all of it --------------------------------------------------------------------------------------------------------


def run(round_: Round, folder: Path) -> bool:
    """One round, all of its jobs; whether ranks came to the end in spite of the fault.

    Raises:
        AssertionError: a rank hangs, aborts or ends with wrong numbers, or a later job does not end well.
    """
    checkpoints = folder / f"round-{round_.number}"
    checkpoints.mkdir(parents=True)
    victims = (round_.victim,) if round_.fault == "kill" else ()
    ended = run_ranks(round_.world, train, round_, checkpoints, limit=LIMIT, victims=victims)
    said = "\n".join(f"--- rank {rank}: {end.code}\n{end.text}" for rank, end in ended.items())
    others = {rank: end for rank, end in ended.items() if rank not in victims}
    assert all(map(ends_in_order, others.values())), f"{round_}\n{said}"
    assert {end.code for end in others.values()} != {-signal.SIGABRT}, f"nobody has a message: {round_}\n{said}"
    right = all(end.code == 0 for end in ended.values())
    for layout in (*([] if right else [round_.layout]), *([round_.other] if round_.other else [])):
        later = replace(round_, layout=layout, variant="", fault="")
        for rank, end in run_ranks(later.world, train, later, checkpoints, limit=LIMIT).items():
            assert end.code == 0, f"the next job of {round_}, on {layout}, rank {rank}:\n{end.text}\n{said}"
    shutil.rmtree(checkpoints)
    return right


def ends_in_order(end: Ended) -> bool:
    """Whether a rank has right numbers, or says what is wrong, as gloo does where it aborts."""
    if end.code == 1:
        return "Traceback" in end.text and "AssertionError" not in end.text
    return end.code == 0 or (end.code == -signal.SIGABRT and GLOO in end.text)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Random faults at random moments; ends at the first that is wrong.")
    parser.add_argument("--rounds", type=int, default=500, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="dmuon-chaos-") as folder:
        for number in range(options.first, options.first + options.rounds):
            round_ = draw(options.seed, number)
            print("right" if run(round_, Path(folder)) else "error", round_, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
