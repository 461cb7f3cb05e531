"""What the ranks of a round did, judged: right numbers, an error with a name, or a failure of the round."""

from __future__ import annotations

import copy
import re
import signal
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn as nn
from harness.assertions import relative_errors
from harness.network import loss_of, shard
from harness.oracle import Reference
from harness.toy import batch, build
from torch import Tensor

from programs.chaos_jobs import LIMIT, Ended, RankEnd
from programs.chaos_rounds import EVALUATED_AFTER, STEPS, Round, part_of
from programs.chaos_worker import EVALUATION, MAX_NORM

TOLERANCE, LOSS_TOLERANCE = 2e-5, 1e-4
GLOO = "Is there a distributed collective mismatch in your code?"
RIGHT, NAMED, TORCHS, UNNAMED, GLOOS, FAILED = (
    "right", "named", "torch's", "unnamed", "gloo's abort", "FAILED",
)  # fmt: skip
OUTCOMES = (RIGHT, NAMED, TORCHS, UNNAMED, GLOOS, FAILED)


@dataclass(frozen=True)
class Expected:
    """What one process computes: weights at the end, and losses of all (part, parts)."""

    weights: dict[str, Tensor]
    losses: dict[tuple[int, int, int], float]  # by step, part and parts; step -1 is the evaluation


PARTS = [(part, parts) for parts in (1, 2, 3, 4) for part in range(parts)]


@cache
def expected(fault: str = "", step: int = -1, part: int = 0, parts: int = 1) -> Expected:
    """By torch alone, where one part of the batch of ``step`` may be empty or give no number."""
    model = build()
    optimizer = Reference(model)
    losses: dict[tuple[int, int, int], float] = {}
    for now in range(STEPS):
        with torch.no_grad():
            for p in PARTS:
                losses[(now, *p)] = loss_of(model, *shard(batch(now), *p)).item()
        optimizer.zero_grad()
        if now == step and fault == "empty batch":
            losses[(now, part, parts)] = 0.0
            others = [shard(batch(now), p, parts) for p in range(parts) if p != part]
            loss = sum((loss_of(model, *mine) for mine in others), torch.zeros(()))
            if others:
                (loss / parts).backward()
            else:
                (loss_of(model, *batch(now)) * 0.0).backward()
        else:
            loss = loss_of(model, *batch(now))
            (loss * float("nan") if now == step and fault == "not a number" else loss).backward()
            if now == step and fault == "not a number":
                losses[(now, part, parts)] = float("nan")
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        if now + 1 == EVALUATED_AFTER:
            with torch.no_grad():
                for p in PARTS:
                    losses[(-1, *p)] = loss_of(model, *shard(batch(EVALUATION), *p)).item()
    return Expected(copy.deepcopy(dict(model.state_dict())), losses)


def expected_of(round_: Round) -> Expected:
    if not round_.kind.own_numbers:
        return expected()
    return expected(round_.fault, round_.step, *part_of(round_.layout, round_.victim))


def wrong_losses(ended: Ended, layout: str, truth: Expected) -> str:
    """What a rank printed and should not have."""
    for rank, end in enumerate(ended.ranks):
        part = part_of(layout, rank)
        said = [(int(step), float(value)) for step, value in re.findall(r"^LOSS (\d+) (\S+)$", end.text, re.MULTILINE)]
        said += [(-1, float(value)) for value in re.findall(r"^EVALUATION (\S+)$", end.text, re.MULTILINE)]
        for step, value in said:
            right = truth.losses[(step, *part)]
            if right == right and not abs(value - right) <= LOSS_TOLERANCE * max(1.0, abs(right)):
                what = "evaluation" if step < 0 else f"loss of step {step}"
                return f"rank {rank}: {what} is {value}, right is {right}"
            if right != right and value == value:
                return f"rank {rank}: loss of step {step} is {value}, and should be no number"
    return ""


def wrong_weights(ended: Ended, out: Path, truth: Expected, bits: str | None) -> str:
    """Of a job whose ranks all came to the end; ``bits`` is the digest that it must have."""
    digests = {end.digest for end in ended.ranks}
    if len(digests) != 1:
        return f"ranks end with different weights: {digests}"
    if bits is not None and digests != {bits}:
        return f"not the bits of the run without a fault; {off_by(out, truth)}"
    return off_by(out, truth)


def off_by(out: Path, truth: Expected) -> str:
    found = torch.load(out / "weights.pt")
    for name, right in truth.weights.items():
        if not torch.equal(right.isnan(), found[name].isnan()):
            return f"{name}: other elements are no numbers than in one process"
    errors = relative_errors(
        {name: t.nan_to_num() for name, t in found.items()}, {n: t.nan_to_num() for n, t in truth.weights.items()}
    )
    worst = max(errors, key=errors.__getitem__)
    return f"{worst} is off by {errors[worst]:.1e}" if errors[worst] > TOLERANCE else ""


def outcome_of(end: RankEnd) -> tuple[str, str]:
    """How one rank ended that was not killed, stopped or told to raise."""
    raised = end.raised
    if end.hung:
        return FAILED, f"still runs {LIMIT:g} s after the fault"
    if end.after > LIMIT:
        return FAILED, f"ended {end.after:.1f} s after the fault"
    if end.code == 0 and end.digest is not None:
        return RIGHT, ""
    if end.code == -signal.SIGABRT and GLOO in end.text:
        return GLOOS, ""
    if end.code in (1, -signal.SIGINT, 130) and raised is not None:
        if raised["kind"] in ("KeyboardInterrupt", "Planted"):
            return NAMED, ""
        if raised["kind"] == "CollectiveError" or raised["from_dmuon"]:
            return NAMED, ""
        return (UNNAMED, f"{raised['kind']}: {raised['message'][:300]}") if raised["through_dmuon"] else (TORCHS, "")
    return FAILED, f"exit status {end.code}"


def judge(round_: Round, ended: Ended, out: Path, bits: str | None) -> tuple[str, str]:
    """The outcome of the job with the fault, and why."""
    if ended.left:
        return FAILED, f"processes are left: {ended.left}"
    if not ended.faults:
        return FAILED, "the fault never came"
    truth = expected_of(round_)
    found = []
    for rank, end in enumerate(ended.ranks):
        killed = rank == round_.victim and round_.fault in ("kill", "stop")
        if killed:
            if end.code != -signal.SIGKILL:
                return FAILED, f"rank {rank} was to be killed and ended with {end.code}"
            continue
        outcome, why = outcome_of(end)
        if outcome == FAILED:
            return FAILED, f"rank {rank}: {why}"
        found.append((outcome, why))
    if ended.right:
        wrong = wrong_losses(ended, round_.layout, truth) or wrong_weights(ended, out, truth, bits)
        return (FAILED, wrong) if wrong else (RIGHT, "")
    if round_.kind.harmless:
        return FAILED, "the fault is harmless, and yet ranks failed"
    if round_.fault == "pause" and round_.detail == "short":
        return FAILED, "a pause that is shorter than the timeout ended the run"
    if all(outcome == RIGHT for outcome, _ in found) and round_.fault not in ("kill", "stop"):
        return FAILED, "some ranks ended and not as they should"
    if not round_.kind.diverges and (wrong := wrong_losses(ended, round_.layout, truth)):
        return FAILED, wrong
    worst = max(found, key=lambda each: OUTCOMES.index(each[0]))
    # Ranks that begin different collectives at once may all be aborted, each with gloo's message that names the cause.
    if worst[0] == GLOOS and not round_.kind.diverges and not any(outcome in (NAMED, TORCHS) for outcome, _ in found):
        return FAILED, "gloo aborted all ranks, and nobody has a message"
    return worst
