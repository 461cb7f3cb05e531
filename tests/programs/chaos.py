"""Random faults at random moments: every round ends in bounded time, with right numbers or an error on every rank.

A round trains a toy on two to four ranks, with checkpoints, one load and an evaluation on its way, and one fault
(:data:`FAULTS`). What ranks do otherwise than each other stands in ``tests/dedicated/test_faults.py``. Then

- no rank hangs or aborts; those that come to the end have the numbers of one process, and every other rank says what
  is wrong;
- the next job goes on from the last whole checkpoint, and so does a job on another layout, and both end with the
  numbers of one process.

``python tests/programs/chaos.py --rounds 500 --seed 0`` prints each round and a table of faults and outcomes. A round
is drawn from the seed and its number alone: ``--first N --rounds 1`` runs it again.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from harness.assertions import relative_errors
from harness.jobs import Ended, hosted_store, run_job
from harness.network import full_state, loss_of
from harness.oracle import Reference
from harness.topologies import LAYOUTS, lay
from harness.toy import batch, build
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import dmuon

STEPS, SAVED_AFTER, EVALUATED_AFTER = 4, (2, 4), 3  # steps; the first checkpoint is loaded again at once
EVALUATION = 50  # the batch
MAX_NORM, TOLERANCE = 0.5, 2e-5
TIMEOUT = 15.0  # of process groups, in seconds
LIMIT = 60.0  # from the fault to the end of the last rank
WHOLE = 240.0  # of a job that comes to no fault
ROOM = 2048  # bytes that a file may have on a full disk
GLOO = "Is there a distributed collective mismatch in your code?"  # gloo aborts a rank that gets another's message
RIGHT, ERROR, ABORT, FAILED = "right", "error", "gloo's abort", "FAILED"

# dmuon's matrices have one name for each parameter in these: a checkpoint of one can be loaded on any other.
ROOMS = [name for name, grid in LAYOUTS.items() if 2 <= grid.world <= 4 and name != "ddp-inside"]
VARIANTS = ("", "keep", "single", "overlap")  # of dedicated layouts: how they communicate
ANYWHERE = ("construct", "forward", "backward", "clip", "step", "evaluate", "save", "load")


# How often each comes, and in which phases.
FAULTS = {
    "kill": (12, (*ANYWHERE, "step", "save")),
    "stop": (4, ANYWHERE),
    "raise": (8, ("forward", "backward", "step", "save")),
    "interrupt one": (8, ANYWHERE),
    "interrupt all": (6, ANYWHERE),
    "full disk": (4, ("save",)),
    # What no product does: tests see that it is found.
    "planted wrong number": (0, ("step",)),
    "planted hang": (0, ("forward",)),
}


# -- a round ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Round:
    """One of them.

    Attributes:
        step: at which the fault comes.
        calls: how many calls of Python functions into the phase; at its end if there are fewer.
        other: a layout on which the checkpoint is loaded afterwards; empty for none.
    """

    seed: int
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

    def __str__(self) -> str:
        where = f"{self.phase} of step {self.step}, {self.calls} calls into it"
        return f"{self.layout} {self.variant}: {self.fault} on rank {self.victim}, {where} (--first {self.number})"


def steps_of(phase: str) -> tuple[int, ...]:
    """At which steps a phase comes."""
    at = {"construct": (0,), "save": tuple(n - 1 for n in SAVED_AFTER), "load": (1,), "evaluate": (2,)}
    return at.get(phase, tuple(range(STEPS)))


def draw(seed: int, number: int) -> Round:
    dice = random.Random(f"{seed}/{number}")
    fault = dice.choices(list(FAULTS), [weight for weight, _ in FAULTS.values()])[0]
    layout = dice.choice(ROOMS)
    phase = dice.choice(FAULTS[fault][1])
    return Round(
        seed,
        number,
        layout,
        dice.choice(VARIANTS) if LAYOUTS[layout].dedicated else "",
        fault,
        dice.randrange(LAYOUTS[layout].world),
        phase,
        dice.choice(steps_of(phase)),
        int(10 ** dice.uniform(0, 3.5)),
        dice.choice([name for name in ROOMS if LAYOUTS[name].world != LAYOUTS[layout].world])
        if dice.random() < 0.4
        else "",
    )


# -- a rank -----------------------------------------------------------------------------------------------------------


@dataclass
class Rank:
    """What a user's program holds. Every phase of it is a place for a fault."""

    round: Round
    rank: int
    out: Path
    checkpoints: Path
    faulty: bool  # whether this rank has the fault
    came: bool = False

    def train(self) -> None:
        self.construct()
        while self.step < STEPS:
            self.train_step()
            self.step += 1
            if self.step == EVALUATED_AFTER:
                self.evaluate()
            if self.step in SAVED_AFTER:
                with self.phase("save", self.step - 1):
                    self.save()
                if self.step == SAVED_AFTER[0]:
                    with self.phase("load", self.step - 1):
                        self.load(self.checkpoints / f"step-{self.step}")

    def construct(self) -> None:
        is_dedicated, variant = LAYOUTS[self.round.layout].dedicated, self.round.variant
        self.network = build()
        with self.phase("construct", 0):
            options: dict[str, Any] = {}
            if is_dedicated:
                transport = {"transport": "single"} if variant == "single" else {}
                options["comm"] = dmuon.CommOptions(timeout=timedelta(seconds=TIMEOUT), **transport)
            self.laid = lay(self.round.layout, self.network, keep=variant == "keep", **options)
            self.optimizer = self.laid.optimizer(overlap_backward=variant == "overlap")
        self.step = 0
        last = max(self.checkpoints.glob("step-*"), default=None)  # what is not whole has another name
        if last is not None:
            self.load(last)

    def train_step(self) -> None:
        self.optimizer.zero_grad()
        with self.phase("forward", self.step):
            loss = self.laid.loss(self.step)
        with self.phase("backward", self.step):
            loss.backward()
            self.laid.reduce()
        with self.phase("clip", self.step):
            dmuon.clip_grad_norm_(self.laid.model.parameters(), MAX_NORM)
        with self.phase("step", self.step):
            self.optimizer.step()

    def evaluate(self) -> None:
        with torch.no_grad(), self.phase("evaluate", self.step - 1):
            self.laid.loss(EVALUATION)

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.laid.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.laid.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        self.step = state["step"]

    def load(self, folder: Path) -> None:
        dcp.load({"trainer": self}, storage_reader=dcp.FileSystemReader(folder))
        assert folder.name == f"step-{self.step}", (folder, self.step)

    def save(self) -> None:
        temporary, final = self.checkpoints / f"tmp-{self.step}", self.checkpoints / f"step-{self.step}"
        if self.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        dist.barrier()
        dcp.save({"trainer": self}, storage_writer=dcp.FileSystemWriter(temporary))
        if self.rank == 0:
            temporary.rename(final)
        dist.barrier()

    # -- its fault

    def stamp(self) -> None:
        """Tell whoever watches."""
        self.came = True
        (self.out / f"fault-{self.rank}").write_text(str(time.monotonic()))

    @contextmanager
    def phase(self, name: str, step: int) -> Iterator[None]:
        """Act at the call that was drawn, or at the end where there are fewer."""
        if not self.faulty or (name, step) != (self.round.phase, self.round.step):
            yield
            return
        left = self.round.calls
        if self.round.fault == "full disk":
            self.stamp()
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
        signals = {
            "kill": signal.SIGKILL,
            "stop": signal.SIGSTOP,
            "interrupt one": signal.SIGINT,
            "interrupt all": signal.SIGINT,
        }
        if self.round.fault in signals:
            self.stamp()
            os.kill(os.getpid(), signals[self.round.fault])
            return
        sys.setprofile(None)
        if self.round.fault == "full disk":
            return  # it was full from the beginning of the phase
        self.stamp()
        match self.round.fault:
            case "raise":
                raise ArithmeticError("the user's own mistake")
            case "planted hang":
                time.sleep(1000)
            case "planted wrong number":
                with torch.no_grad():
                    next(self.network.embed.parameters()).mul_(1.01)


def run_rank(rank: int, round_: Round, port: int, out: Path, checkpoints: Path, fault: bool) -> None:
    """One rank of a job, in a process of its own."""
    faulty = fault and rank == round_.victim
    # Every group has the same short timeout; torch's meshes have no option for it.
    limit = dist.distributed_c10d.default_pg_timeout = timedelta(seconds=TIMEOUT)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=round_.world, timeout=limit)
        program = Rank(round_, rank, out, checkpoints, faulty)
        program.train()
        assert program.came == faulty, "the fault never came"
        whole = full_state(program.laid.model)
        if rank == 0:
            torch.save(whole, out / "weights.pt")
        parts = [name.encode() + whole[name].contiguous().numpy().tobytes() for name in sorted(whole)]
        print(f"DIGEST {hashlib.sha256(b''.join(parts)).hexdigest()}", flush=True)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it has ended; an interrupt of all may come later here
        traceback.print_exc()
        print(f"END {type(error).__name__}", flush=True)
        sys.exit(1)


# -- a job ------------------------------------------------------------------------------------------------------------


def digest_in(end: Ended) -> str | None:
    """Of the weights with which a rank came to its end."""
    found = re.findall(r"^DIGEST (\w+)$", end.text, re.MULTILINE)
    return found[-1] if end.code == 0 and found else None


def run_round(round_: Round, out: Path, checkpoints: Path, limit: float, fault: bool = True) -> list[Ended]:
    """Run one job; nothing of it is left afterwards."""
    out.mkdir()
    store = hosted_store()
    stamp, signalled = out / f"fault-{round_.victim}", False

    def watch(processes: list[Any], ended: Mapping[int, float]) -> bool:
        """Send the signals of the fault; whether there is nothing more to wait for."""
        nonlocal signalled
        now = time.monotonic()
        came = float(stamp.read_text() or now) if stamp.exists() else None
        if came is not None and not signalled:
            signalled = True
            for process in processes if round_.fault == "interrupt all" else ():
                with suppress(ProcessLookupError):
                    if process is not processes[round_.victim]:
                        os.kill(process.pid, signal.SIGINT)
        left = set(range(round_.world)) - ended.keys()
        if round_.fault == "stop" and signalled and left == {round_.victim}:
            return True
        return came is not None and now > came + limit

    return run_job(
        *(round_.world, run_rank, round_, store.port, out, checkpoints, fault), folder=out, limit=WHOLE, watch=watch
    )


# -- what is right ----------------------------------------------------------------------------------------------------


@cache
def expected() -> dict[str, Tensor]:
    """Weights at the end, by torch alone."""
    model = build()
    optimizer = Reference(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, *batch(step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return dict(model.state_dict())


def wrong_end(ranks: list[Ended], out: Path) -> str:
    """Of a job in which all ranks must come to the end."""
    digests = set(map(digest_in, ranks))
    if None in digests:
        return f"exit statuses {[end.code for end in ranks]}"
    if len(digests) != 1:
        return "ranks end with different weights"
    errors = relative_errors(torch.load(out / "weights.pt"), expected())
    worst = max(errors, key=lambda name: float("inf") if errors[name] != errors[name] else errors[name])
    return "" if errors[worst] <= TOLERANCE else f"{worst} is off by {errors[worst]:.1e}"


def judge(round_: Round, ranks: list[Ended], out: Path) -> tuple[str, str]:
    """The outcome of the job with the fault, and why."""
    if not (out / f"fault-{round_.victim}").exists():
        return FAILED, "the fault never came"
    found = set()
    for rank, end in enumerate(ranks):
        if rank == round_.victim and round_.fault in ("kill", "stop"):
            continue
        if end.code is None:
            return FAILED, f"rank {rank} still runs"
        if digest_in(end) is not None:
            found.add(RIGHT)
        elif end.code == 1 and "\nEND " in end.text:
            found.add(ERROR)
        elif end.code == -signal.SIGABRT and GLOO in end.text:
            found.add(ABORT)
        else:
            return FAILED, f"rank {rank}: exit status {end.code}, {end.text[-300:]}"
    if round_.fault == "planted wrong number" or found == {RIGHT}:
        wrong = wrong_end(ranks, out) if round_.fault not in ("kill", "stop") else ""
        return (FAILED, wrong) if wrong else (RIGHT, "")
    if ABORT in found and ERROR not in found:
        return FAILED, "gloo aborted all ranks, and nobody has a message"
    return max(found), ""


# -- all of it --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """Of one round; ``why`` says what is wrong."""

    round: Round
    outcome: str
    why: str
    log: str


def run(round_: Round, folder: Path, limit: float = LIMIT) -> Verdict:
    """One round, all of its jobs; ``limit``: seconds from a fault to the end of all ranks."""
    folder = folder / f"round-{round_.number}"
    shutil.rmtree(folder, ignore_errors=True)
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(parents=True)
    logs: list[str] = []

    def job(name: str, round_: Round, fault: bool = True) -> list[Ended]:
        ranks = run_round(round_, folder / name, checkpoints, limit, fault)
        logs.extend(f"--- {name}, rank {n}: {e.code} after {e.seconds:.1f} s\n{e.text}" for n, e in enumerate(ranks))
        return ranks

    outcome, why = judge(round_, job("first", round_), folder / "first")
    later = {"again": round_.layout} if outcome != RIGHT else {}
    later |= {"other": round_.other} if round_.other else {}
    for name, layout in later.items():
        if outcome != FAILED:
            if name == "other" and (checkpoints / "step-2").exists():
                shutil.rmtree(checkpoints / "step-4", ignore_errors=True)  # so that something is left to be trained
            moved = replace(round_, layout=layout, variant="", fault="", victim=0)
            if wrong := wrong_end(job(name, moved, fault=False), folder / name):
                outcome, why = FAILED, f"the next job, on {layout}: {wrong}"
    if outcome != FAILED:
        shutil.rmtree(folder)
    return Verdict(round_, outcome, why, "\n".join(logs))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Random faults at random moments.")
    parser.add_argument("--rounds", type=int, default=500, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="dmuon-chaos-"))
    counts: Counter[tuple[str, str]] = Counter()
    for number in range(options.first, options.first + options.rounds):
        verdict = run(draw(options.seed, number), folder)
        counts[verdict.round.fault, verdict.outcome] += 1
        print(f"{verdict.outcome:<12} {verdict.round} {verdict.why}", flush=True)
        if verdict.outcome == FAILED:
            print(verdict.log, flush=True)
    print(*(f"{count:4} {fault}, {outcome}" for (fault, outcome), count in sorted(counts.items())), sep="\n")
    return any(outcome == FAILED for _, outcome in counts)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
