"""Random faults at random moments: every round ends in bounded time, with right numbers or an error on every rank.

A round trains a toy on two to four ranks, with checkpoints, one load and an evaluation on its way, and one fault
(:data:`FAULTS`). Then

- no rank hangs or aborts; those that come to the end have the numbers of one process, and every other rank says what
  is wrong; losses that were printed before are right too;
- checkpoints that were whole before are unchanged; the next job goes on from the last one, and so does a job on
  another layout, and both end with the numbers of one process.

``python tests/programs/chaos.py --rounds 500 --seed 0`` prints each round and a table of faults and outcomes. A round
is drawn from the seed and its number alone: ``--first N --rounds 1`` runs it again, ``--only FAULT`` every round with
that fault. Logs of rounds that failed stay in ``--folder``.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
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
from harness.forks import CONTEXT
from harness.network import Network, Size, full_state, loss_of, shard
from harness.oracle import Reference
from harness.topologies import LAYOUTS, lay
from harness.toy import HIDDEN, OPTIONS, SIZE, batch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import dmuon

STEPS, SAVED_AFTER, EVALUATED_AFTER = 4, (2, 4), 3  # steps; the first checkpoint is loaded again at once
EVALUATION = 50  # the batch
MAX_NORM, TOLERANCE, LOSS_TOLERANCE = 0.5, 2e-5, 1e-4
TIMEOUT = 15.0  # of process groups, in seconds
PAUSE = 0.5  # which is shorter
LIMIT = 60.0  # from the fault to the end of the last rank
WHOLE = 240.0  # of a job that comes to no fault
ROOM = 2048  # bytes that a file may have on a full disk
GLOO = "Is there a distributed collective mismatch in your code?"  # gloo aborts a rank that gets another's message
RIGHT, ERROR, ABORT, FAILED = "right", "error", "gloo's abort", "FAILED"

# dmuon's matrices have one name for each parameter in these: a checkpoint of one can be loaded on any other.
ROOMS = [name for name, grid in LAYOUTS.items() if 2 <= grid.world <= 4 and name != "ddp-inside"]
VARIANTS = ("", "keep", "single", "overlap")  # of dedicated layouts: how they communicate
ANYWHERE = ("construct", "forward", "backward", "clip", "step", "evaluate", "save", "load")
OTHER_OPTIONS = {"lr": 3e-3, "momentum": 0.9, "ns_steps": 4, "weight_decay": 0.0}


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        weight: how often it comes.
        phases: where it may come.
        details: one of them is drawn.
        dedicated: only where dmuon owns the matrices; elsewhere torch's own collectives would go wrong.
        harmless: the run ends with its numbers.
        diverges: ranks compute something else until they are told, which is before gradients are used.
    """

    weight: int
    phases: tuple[str, ...]
    details: tuple[str, ...] = ("",)
    dedicated: bool = False
    harmless: bool = False
    diverges: bool = False


FAULTS = {
    "kill": Fault(12, (*ANYWHERE, "step", "save")),
    "stop": Fault(4, ANYWHERE),
    "pause": Fault(3, ANYWHERE, harmless=True),
    "raise": Fault(8, ("forward", "backward", "step", "save")),
    "interrupt one": Fault(8, ANYWHERE),
    "interrupt all": Fault(6, ANYWHERE),
    "full disk": Fault(4, ("save",)),
    "torn checkpoint": Fault(4, ("load",), ("truncated", "missing", "metadata")),
    "skips the step": Fault(3, ("step",), diverges=True),
    "skips a batch": Fault(3, ("forward",), diverges=True),
    "extra forward": Fault(2, ("forward",), dedicated=True, diverges=True),
    "other order": Fault(3, ("forward",), ("1 0 2", "0 2"), dedicated=True, diverges=True),
    "other order in evaluation": Fault(3, ("evaluate",), ("1 0 2",), dedicated=True, diverges=True),
    "other rate": Fault(2, ("step",), ("lr", "weight_decay"), diverges=True),
    "other options": Fault(2, ("construct",), tuple(OTHER_OPTIONS), diverges=True),
    "other model": Fault(2, ("construct",), diverges=True),
    "frozen": Fault(2, ("forward",), dedicated=True, diverges=True),
    # What no product does: tests see that it is found.
    "planted wrong number": Fault(0, ("step",), harmless=True),
    "planted hang": Fault(0, ("forward",)),
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
    detail: str
    victim: int
    phase: str
    step: int
    calls: int
    other: str

    @property
    def world(self) -> int:
        return LAYOUTS[self.layout].world

    @property
    def kind(self) -> Fault:
        return FAULTS[self.fault]

    def __str__(self) -> str:
        what = f"{self.fault} {self.detail}".strip()
        where = f"{self.phase} of step {self.step}, {self.calls} calls into it"
        return f"{self.layout} {self.variant}: {what} on rank {self.victim}, {where} (--first {self.number})"


def steps_of(phase: str) -> tuple[int, ...]:
    """At which steps a phase comes."""
    at = {"construct": (0,), "save": tuple(n - 1 for n in SAVED_AFTER), "load": (1,), "evaluate": (2,)}
    return at.get(phase, tuple(range(STEPS)))


def draw(seed: int, number: int, only: str | None = None) -> Round:
    """The round ``number``, with the fault ``only`` if that is given."""
    dice = random.Random(f"{seed}/{number}")
    fault = only or dice.choices(list(FAULTS), [kind.weight for kind in FAULTS.values()])[0]
    kind = FAULTS[fault]
    layout = dice.choice([name for name in ROOMS if LAYOUTS[name].dedicated or not kind.dedicated])
    phase = dice.choice(kind.phases)
    return Round(
        seed,
        number,
        layout,
        dice.choice(VARIANTS) if LAYOUTS[layout].dedicated else "",
        fault,
        dice.choice(kind.details),
        dice.randrange(LAYOUTS[layout].world),
        phase,
        dice.choice(steps_of(phase)),
        int(10 ** dice.uniform(0, 3.5)),
        dice.choice([name for name in ROOMS if LAYOUTS[name].world != LAYOUTS[layout].world])
        if dice.random() < 0.4
        else "",
    )


# -- a rank -----------------------------------------------------------------------------------------------------------


class Planted(Exception):
    pass


class Ordered(Network):
    """Blocks in the order ``order``."""

    order: tuple[int, ...] = (0, 1, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for i in self.order:
            x = self.blocks[i](x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build(hidden: int = HIDDEN) -> Ordered:
    torch.manual_seed(0)
    return Ordered(Size(SIZE.width, hidden, SIZE.layers, SIZE.vocabulary))


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
        self.network = build(HIDDEN + 2 if self.has("other model") else HIDDEN)
        with self.phase("construct", 0):
            options: dict[str, Any] = {}
            if is_dedicated:
                transport = {"transport": "single"} if variant == "single" else {}
                options["comm"] = dmuon.CommOptions(timeout=timedelta(seconds=TIMEOUT), **transport)
            self.laid = lay(self.round.layout, self.network, keep=variant == "keep", **options)
            other = {self.round.detail: OTHER_OPTIONS[self.round.detail]} if self.has("other options") else {}
            self.optimizer = self.laid.optimizer(**{**OPTIONS, **other}, overlap_backward=variant == "overlap")
        self.step = 0
        last = max(self.checkpoints.glob("step-*"), default=None)  # what is not whole has another name
        if last is not None:
            self.load(last)

    def train_step(self) -> None:
        self.optimizer.zero_grad()
        if self.has("skips a batch", "forward"):
            return
        if self.has("extra forward", "forward"):
            with torch.no_grad():
                self.laid.loss(self.step)
        if self.has("other order", "forward"):
            self.network.order = tuple(map(int, self.round.detail.split()))
        if self.has("frozen", "forward"):
            self.network.blocks[1].up.weight.requires_grad_(False)
        if self.has("planted hang", "forward"):
            time.sleep(1000)
        with self.phase("forward", self.step):
            loss = self.laid.loss(self.step)
        print(f"LOSS {self.step} {loss.item()!r}", flush=True)
        with self.phase("backward", self.step):
            loss.backward()
            self.laid.reduce()
        with self.phase("clip", self.step):
            dmuon.clip_grad_norm_(self.laid.model.parameters(), MAX_NORM)
        if self.has("skips the step", "step"):
            return
        if self.has("planted wrong number", "step"):
            with torch.no_grad():
                next(self.network.embed.parameters()).mul_(1.01)
        if self.has("other rate", "step"):
            for group in self.optimizer.param_groups:
                group[self.round.detail] = OTHER_OPTIONS[self.round.detail]
        with self.phase("step", self.step):
            self.optimizer.step()

    def evaluate(self) -> None:
        kept = self.network.order
        if self.has("other order in evaluation", "evaluate", self.step - 1):
            self.network.order = (1, 0, 2)
        with torch.no_grad(), self.phase("evaluate", self.step - 1):
            loss = self.laid.loss(EVALUATION)
        if kept == self.network.order:
            print(f"LOSS -1 {loss.item()!r}", flush=True)
        self.network.order = kept

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
            (self.out / f"digest-{final.name}").write_text(digest_of(temporary))
            temporary.rename(final)
        dist.barrier()

    # -- its fault

    def has(self, fault: str, phase: str = "", step: int | None = None) -> bool:
        """Whether this rank has this fault here; then it comes now."""
        here = self.faulty and self.round.fault == fault
        if phase:
            here = here and (self.round.phase, self.round.step) == (phase, self.step if step is None else step)
        if here:
            self.stamp()
        return here

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
            "pause": signal.SIGSTOP,
            "interrupt one": signal.SIGINT,
            "interrupt all": signal.SIGINT,
        }
        if self.round.fault in signals:
            self.stamp()
            os.kill(os.getpid(), signals[self.round.fault])
        elif self.round.fault == "raise":
            sys.setprofile(None)
            self.stamp()
            raise Planted("the user's own mistake")


def digest_of(folder: Path) -> str:
    """Of all files of a checkpoint."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def run_rank(round_: Round, rank: int, port: int, out: Path, checkpoints: Path, faulty: bool) -> None:
    """One rank of a job, in a process of its own."""
    with (out / f"{rank}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background does not inherit
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    torch.set_num_threads(1)
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
        traceback.print_exc()
        print(f"END {type(error).__name__}", flush=True)
        sys.exit(1)


# -- a job ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its exit status, None if it still ran; how many seconds after the fault; what it printed."""

    code: int | None
    after: float
    text: str

    @property
    def digest(self) -> str | None:
        found = re.findall(r"^DIGEST (\w+)$", self.text, re.MULTILINE)
        return found[-1] if self.code == 0 and found else None

    @property
    def losses(self) -> list[tuple[int, float]]:
        found = re.findall(r"^LOSS (-?\d+) (\S+)$", self.text, re.MULTILINE)
        return [(int(step), float(loss)) for step, loss in found]


def run_job(round_: Round, out: Path, checkpoints: Path, limit: float, fault: bool = True) -> list[Ended]:
    """Run one job; nothing of it is left afterwards."""
    out.mkdir()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        CONTEXT.Process(
            target=run_rank, args=(round_, rank, store.port, out, checkpoints, fault and rank == round_.victim)
        )
        for rank in range(round_.world)
    ]
    begin = time.monotonic()
    ends: dict[int, float] = {}
    for process in processes:
        process.start()
    stamp, signalled = out / f"fault-{round_.victim}", False
    victim = processes[round_.victim]
    try:
        while len(ends) < round_.world:
            time.sleep(0.02)
            now = time.monotonic()
            ends |= {r: now for r, p in enumerate(processes) if r not in ends and p.exitcode is not None}
            came = float(stamp.read_text() or now) if stamp.exists() else None
            if came is not None and not signalled and now > came + (PAUSE if round_.fault == "pause" else 0):
                signalled = True
                for process in processes:
                    with suppress(ProcessLookupError):
                        if round_.fault == "pause" and process is victim:
                            os.kill(process.pid, signal.SIGCONT)
                        if round_.fault == "interrupt all" and process is not victim:
                            os.kill(process.pid, signal.SIGINT)
            if round_.fault == "stop" and signalled and set(range(round_.world)) - ends.keys() == {round_.victim}:
                break
            if now > (begin + WHOLE if came is None else came + limit):
                for r in set(range(round_.world)) - ends.keys():
                    os.kill(processes[r].pid, signal.SIGUSR1)  # prints where it is
                time.sleep(0.5)
                break
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    fault_time = float(stamp.read_text()) if stamp.exists() else begin
    texts = [(out / f"{rank}.log").read_text(errors="replace") for rank in range(round_.world)]
    return [
        Ended(code, ends.get(rank, float("inf")) - fault_time, text)
        for rank, (code, text) in enumerate(zip(codes, texts, strict=True))
    ]


# -- what is right ----------------------------------------------------------------------------------------------------


@cache
def expected() -> tuple[dict[str, Tensor], Callable[[int, int, int], float]]:
    """By torch alone: weights at the end, and the loss of a part of a batch at a step; step -1 is the evaluation."""
    model = build()
    optimizer = Reference(model)
    losses: dict[tuple[int, int, int], float] = {}
    parts = [(part, parts) for parts in (1, 2, 3, 4) for part in range(parts)]

    def note(step: int, number: int) -> None:
        with torch.no_grad():
            losses.update({(step, *p): loss_of(model, *shard(batch(number), *p)).item() for p in parts})

    for step in range(STEPS):
        note(step, step)
        optimizer.zero_grad()
        loss_of(model, *batch(step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        if step + 1 == EVALUATED_AFTER:
            note(-1, EVALUATION)
    return dict(model.state_dict()), lambda *key: losses[key]


def part_of(layout: str, rank: int) -> tuple[int, int]:
    """Which part of a batch a rank gets, of how many."""
    part, parts, below = 0, 1, LAYOUTS[layout].world
    for name, extent in LAYOUTS[layout].dims:
        below //= extent
        if name != "tp":
            part, parts = part * extent + rank // below % extent, parts * extent
    return part, parts


def wrong_losses(layout: str, ranks: list[Ended]) -> str:
    """What a rank printed and should not have."""
    for rank, end in enumerate(ranks):
        for step, loss in end.losses:
            right = expected()[1](step, *part_of(layout, rank))
            if not abs(loss - right) <= LOSS_TOLERANCE * max(1.0, abs(right)):
                return f"rank {rank}: loss of step {step} is {loss}, right is {right}"
    return ""


def wrong_end(layout: str, ranks: list[Ended], out: Path) -> str:
    """Of a job in which all ranks must come to the end."""
    digests = {end.digest for end in ranks}
    if None in digests:
        return f"exit statuses {[end.code for end in ranks]}"
    if len(digests) != 1:
        return "ranks end with different weights"
    errors = relative_errors(torch.load(out / "weights.pt"), expected()[0])
    worst = max(errors, key=lambda name: float("inf") if errors[name] != errors[name] else errors[name])
    return wrong_losses(layout, ranks) or (
        "" if errors[worst] <= TOLERANCE else f"{worst} is off by {errors[worst]:.1e}"
    )


def judge(round_: Round, ranks: list[Ended], out: Path) -> tuple[str, str]:
    """The outcome of the job with the fault, and why."""
    if not (out / f"fault-{round_.victim}").exists():
        return FAILED, "the fault never came"
    found = set()
    for rank, end in enumerate(ranks):
        if rank == round_.victim and round_.fault in ("kill", "stop"):
            continue
        if end.code is None:
            return FAILED, f"rank {rank} still runs {end.after} s after the fault"
        if end.digest is not None:
            found.add(RIGHT)
        elif end.code == 1 and "\nEND " in end.text:
            found.add(ERROR)
        elif end.code == -signal.SIGABRT and GLOO in end.text:
            found.add(ABORT)
        else:
            return FAILED, f"rank {rank}: exit status {end.code}, {end.text[-300:]}"
    if round_.kind.harmless or found == {RIGHT}:
        wrong = wrong_end(round_.layout, ranks, out) if round_.fault not in ("kill", "stop") else ""
        return (FAILED, wrong) if wrong else (RIGHT, "")
    # Ranks that begin different collectives at once may all be aborted, each with gloo's message that names the cause.
    if ABORT in found and not round_.kind.diverges and ERROR not in found:
        return FAILED, "gloo aborted all ranks, and nobody has a message"
    wrong = "" if round_.kind.diverges else wrong_losses(round_.layout, ranks)
    return (FAILED, wrong) if wrong else (max(found), "")


# -- all of it --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """Of one round; ``why`` says what is wrong."""

    round: Round
    outcome: str
    why: str
    log: str


@dataclass
class Chaos:
    """Runs rounds.

    Attributes:
        tamper: called with the folder when the first job has ended; tests plant wrongs there.
        limit: seconds from a fault to the end of all ranks.
    """

    folder: Path
    tamper: Callable[[Path], None] = field(default=lambda _folder: None)
    limit: float = LIMIT

    def run(self, round_: Round) -> Verdict:
        """One round, all of its jobs."""
        folder = self.folder / f"round-{round_.number}"
        shutil.rmtree(folder, ignore_errors=True)
        checkpoints = folder / "checkpoints"
        checkpoints.mkdir(parents=True)
        logs: list[str] = []

        def job(name: str, round_: Round, fault: bool = True) -> list[Ended]:
            ranks = run_job(round_, folder / name, checkpoints, self.limit, fault)
            logs.extend(f"--- {name}, rank {n}: {e.code} after {e.after:.1f} s\n{e.text}" for n, e in enumerate(ranks))
            return ranks

        outcome, why = self.first(round_, folder, job)
        if outcome != FAILED:
            self.tamper(folder)
            for path in checkpoints.glob("step-*"):
                if (folder / "first" / f"digest-{path.name}").read_text() != digest_of(path):
                    outcome, why = FAILED, f"{path.name} was whole, and is another"
        later = {"again": round_.layout} if outcome != RIGHT else {}
        later |= {"other": round_.other} if round_.other else {}
        for name, layout in later.items():
            if outcome != FAILED:
                if name == "other" and (checkpoints / "step-2").exists():
                    shutil.rmtree(checkpoints / "step-4", ignore_errors=True)  # so that something is left to be trained
                moved = replace(round_, layout=layout, variant="", fault="", victim=0)
                if wrong := wrong_end(layout, job(name, moved, fault=False), folder / name):
                    outcome, why = FAILED, f"the next job, on {layout}: {wrong}"
        if outcome != FAILED:
            shutil.rmtree(folder)
        return Verdict(round_, outcome, why, "\n".join(logs))

    def first(self, round_: Round, folder: Path, job: Callable[..., list[Ended]]) -> tuple[str, str]:
        """The job with the fault."""
        if round_.fault != "torn checkpoint":
            return judge(round_, job("first", round_), folder / "first")
        if wrong := wrong_end(round_.layout, job("first", round_, fault=False), folder / "first"):
            return FAILED, f"without a fault: {wrong}"
        torn, whole = folder / "checkpoints" / "step-4", folder / "whole"
        shutil.copytree(torn, whole)
        tear(torn, round_.detail)
        ranks = job("torn", replace(round_, fault=""), fault=False)
        shutil.rmtree(torn)
        whole.rename(torn)
        if any(end.code != 1 for end in ranks):
            return FAILED, f"exit statuses {[end.code for end in ranks]} with a torn checkpoint"
        return ERROR, ""


def tear(checkpoint: Path, how: str) -> None:
    piece = max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)
    match how:
        case "truncated":
            os.truncate(piece, piece.stat().st_size // 3)
        case "missing":
            piece.unlink()
        case "metadata":
            os.truncate(checkpoint / ".metadata", (checkpoint / ".metadata").stat().st_size // 2)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Random faults at random moments.")
    parser.add_argument("--rounds", type=int, default=500, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    parser.add_argument("--only", choices=list(FAULTS), help="every round with this fault")
    parser.add_argument("--folder", type=Path, help="for logs of rounds that failed (default: a temporary one)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    chaos = Chaos(options.folder or Path(tempfile.mkdtemp(prefix="dmuon-chaos-")))
    counts: Counter[tuple[str, str]] = Counter()
    for number in range(options.first, options.first + options.rounds):
        verdict = chaos.run(draw(options.seed, number, options.only))
        counts[verdict.round.fault, verdict.outcome] += 1
        print(f"{verdict.outcome:<12} {verdict.round} {verdict.why}", flush=True)
        if verdict.outcome == FAILED:
            print(verdict.log, flush=True)
    print(json.dumps({f"{fault}, {outcome}": count for (fault, outcome), count in sorted(counts.items())}, indent=1))
    return any(outcome == FAILED for _, outcome in counts)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
