"""Fits the contention of predictions to published steps."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from common.published import CASES, HOMES, Case
from dmuon.model.config import read_model
from dmuon.solver import Matrix, Rank, SolveOptions, plan
from dmuon.tools.simulation.hardware import Topology, hardware
from dmuon.tools.simulation.step import Scenario, Workload, step_s
from dmuon.tools.simulation.wave_model import wave_costs

_CONTENTION = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
_HALF = 0.5  # of the peak, which AdamW's step should be near to


@dataclass(frozen=True, slots=True)
class Outcome:
    """A case as predicted.

    Attributes:
        error: predicted less published.
        left_out: the error with terms that were fitted to all the others.
        over_ms: published step of ``over``; 0 where no time is.
    """

    name: str
    program: str
    over: str
    published: float
    predicted: float
    error: float
    left_out: float
    fitted: bool
    source: str
    tokens: int = 0
    efficiency: float = 0.0
    over_ms: float = 0.0


# -- published steps ------------------------------------------------------------------------------------------------


def scenario_of(case: Case) -> tuple[Scenario, float]:
    """The case with as many tokens as its source says or implies, and its published seconds of ``over``."""
    machine = case.machine
    topology = Topology(gpus_per_node=min(machine.gpus_per_node, case.grid["world"]), **case.grid)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(case.config))
        shapes = read_model(path)
        model = Workload.from_config(path, tokens=case.sequence, sequence=case.sequence)
        stage = last_stage(model, case.pp)
        peak = machine.device.peak_flops
        if case.tokens:
            sequences = case.tokens // case.sequence
        elif case.muon_share is not None:
            newton = sum(5 * (4 * m.rows * m.cols + 2 * min(m.rows, m.cols) ** 2) * min(m.rows, m.cols) for m in shapes)
            per_gpu = newton / (topology.world * case.pp) / case.muon_share
            sequences = max(1, round(per_gpu / (model.flops / case.pp)))
        elif case.over_s is not None:
            reached = stage.flops / (case.over_s * peak)  # by one sequence
            sequences = max(1, round(_HALF / reached))
        else:
            sequences = 2
        more = Workload.from_config(path, tokens=case.sequence * sequences, sequence=case.sequence)
    stage = last_stage(more, case.pp)
    blocks = {block.name for block in stage.blocks}
    matrices = [Matrix(m.name, m.rows, m.cols, m.block) for m in shapes if m.block in blocks]
    costs = wave_costs(machine.device, Counter(m.shape for m in matrices))
    ranks = [Rank(i, i // topology.gpus_per_node) for i in range(topology.world)]
    owners = plan(matrices, ranks, costs, SolveOptions(method="greedy", byte_slack=0.0))
    base = Scenario(stage, owners, costs, machine, topology, kept=case.once)
    if case.over_flops is not None:
        return base, sequences * model.flops / case.pp / case.over_flops
    return base, case.over_s or 0.0


def last_stage(model: Workload, count: int) -> Workload:
    """The pipeline stage that computes longest: the last of even shares of the blocks, with half of the ends."""
    if count == 1:
        return model
    first = (count - 1) * len(model.blocks) // count
    ends = replace(model.ends, other_elements=model.ends.other_elements // 2)
    return replace(model, blocks=model.blocks[first:], ends=ends)


def overhead(case: Case, base: Scenario, over_s: float) -> tuple[float, float]:
    """Predicted ``program`` over ``over``, less 1, at the efficiency by which ``over`` takes as long as published."""
    efficiency = _HALF
    for _ in range(4 if over_s else 0):
        step = step_s(case.over, replace(base, efficiency=efficiency))
        computes = base.workload.flops / case.machine.device.peak_flops / efficiency
        efficiency = min(1.0, efficiency * computes / max(computes + over_s - step, 0.05 * computes))
    found = replace(base, efficiency=efficiency)
    return step_s(case.program, found) / step_s(case.over, found) - 1, efficiency


def fit_published() -> tuple[float, float, list[Outcome]]:
    """The contention of least squares, the error of what was left out, and every case."""
    found: list[list[tuple[float, float]]] = []
    bases = []
    for case in CASES:
        base, over_s = scenario_of(case)
        bases.append(base)
        found.append([overhead(case, replace(base, contention=term), over_s) for term in _CONTENTION])
        print(
            f"{case.name}: {base.workload.tokens:,} tokens, {found[-1][0][0]:+.1%} … {found[-1][-1][0]:+.1%}",
            flush=True,
        )
    errors = np.array([[p - case.published for p, _ in row] for case, row in zip(CASES, found, strict=True)])
    fitted = np.array([case.fitted for case in CASES])

    def best(rows: Sequence[bool]) -> int:
        return int(np.argmin((errors[rows] ** 2).sum(axis=0)))

    chosen = best(fitted)
    outcomes = []
    for i, case in enumerate(CASES):
        others = fitted.copy()
        others[i] = False
        predicted, efficiency = found[i][chosen]
        outcomes.append(
            Outcome(
                case.name, case.program, case.over, case.published, predicted, predicted - case.published,
                float(errors[i, best(others)]), case.fitted, case.source, bases[i].workload.tokens, efficiency,
                1e3 * (case.over_s or 0.0),
            )
        )  # fmt: skip
    left_out = [o.left_out for o in outcomes if o.fitted]
    return _CONTENTION[chosen], float(np.sqrt(np.mean(np.square(left_out)))), outcomes


def homes() -> list[dict[str, Any]]:
    """Optimizer steps whose matrices each rank of a domain computes, over those of owners, beside published ratios.

    Newton–Schulz alone, without what is sent. Dense matrices and experts have 16 owners each; duplicated, a rank
    computes all dense ones and, by expert parallelism, an eighth of the experts.
    """
    rows = []
    for name, config, published, source in HOMES:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(config))
            counts = Counter(
                ((".experts." in m.name), (min(m.rows, m.cols), max(m.rows, m.cols))) for m in read_model(path)
            )
        costs = wave_costs(hardware("gb300").device, {shape: 64 for _, shape in counts})
        ms = {
            way: sum(1e-6 * costs.cost(shape, -(-n // shares[expert])) for (expert, shape), n in counts.items())
            for way, shares in {"duplicated_ms": (1, 8), "owners_ms": (16, 16)}.items()
        }
        predicted = ms["duplicated_ms"] / ms["owners_ms"]
        rows.append({"name": name, "published": published, "predicted": predicted, "source": source, **ms})
    return rows


# -- all ------------------------------------------------------------------------------------------------------------


def fit() -> dict[str, Any]:
    """Terms, error, and every case."""
    contention, error, published = fit_published()
    cases = [asdict(outcome) for outcome in published]
    return {"terms": {"contention": contention}, "error": error, "cases": cases, "homes": homes()}


def report(result: dict[str, Any]) -> str:
    """The fit as text for people."""
    lines = [
        f"{'case':<40}{'program':<16}{'over':<8}{'measured':>9}{'predicted':>10}{'ratio':>7}{'error':>8}{'left out':>9}"
    ]
    for case in result["cases"]:
        ratio = (1 + case["predicted"]) / (1 + case["published"])
        lines.append(
            f"{case['name']:<40}{case['program']:<16}{case['over']:<8}{case['published']:>+9.1%}"
            f"{case['predicted']:>+10.1%}{ratio:>7.2f}{case['error']:>+8.1%}{case['left_out']:>+9.1%}"
        )
    lines.append("ratio: the predicted step over the measured one, where that of AdamW is as measured")
    lines += [
        f"{row['name']}, 32 GB300: optimizer step duplicated over owners {row['published']:.2f}, predicted "
        f"{row['predicted']:.2f} ({row['duplicated_ms']:.0f} over {row['owners_ms']:.0f} ms)"
        for row in result["homes"]
    ]
    terms = ", ".join(f"{name}={value:.3g}" for name, value in result["terms"].items())
    lines += [
        "",
        f"terms: {terms}",
        f"error of a published case that was left out, root mean square: {result['error']:.4f}",
    ]
    return "\n".join(lines)
