"""Fits the contention of predictions to published steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from common.published import CASES, HOMES, Case, config_path
from common.results import columns
from dmuon.model.config import read_model
from dmuon.solver import CostTable, Matrix, Plan, Rank, SolveOptions, plan
from dmuon.tools.hardware import HARDWARE, Hardware, Topology, wave_costs
from dmuon.tools.simulation import EFFICIENCY, Scenario, Workload, step_s

_CONTENTION = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3)


def planned(matrices: Sequence[Matrix], machine: Hardware, world: int) -> tuple[Plan, CostTable]:
    """Owners by the greedy plan, which even thousands of ranks have at once, and modelled costs."""
    costs = wave_costs(machine.device, Counter(m.shape for m in matrices))
    ranks = [Rank(i, i // machine.gpus_per_node) for i in range(world)]
    return plan(matrices, ranks, costs, SolveOptions(method="greedy", byte_slack=0.0)), costs


# -- published steps ------------------------------------------------------------------------------------------------


def scenario_of(case: Case) -> tuple[Scenario, float]:
    """The case with as many tokens as its source says or implies, and its published seconds of ``over``."""
    machine, world = case.machine, case.grid["world"]
    topology = Topology(gpus_per_node=min(machine.gpus_per_node, world), **case.grid)
    shapes = read_model(case.path)
    model = Workload.from_config(case.path, tokens=case.sequence, sequence=case.sequence)
    stage = last_stage(model, case.pp)
    if case.tokens:
        sequences = case.tokens // case.sequence
    elif case.muon_share is not None:
        newton = sum(5 * (4 * m.rows * m.cols + 2 * min(m.rows, m.cols) ** 2) * min(m.rows, m.cols) for m in shapes)
        per_gpu = newton / (world * case.pp) / case.muon_share
        sequences = max(1, round(per_gpu / (model.flops / case.pp)))
    elif case.over_s is not None:
        reached = stage.flops / (case.over_s * machine.device.peak_flops)  # by one sequence
        sequences = max(1, round(EFFICIENCY / reached))
    else:
        sequences = 2
    more = Workload.from_config(case.path, tokens=case.sequence * sequences, sequence=case.sequence)
    stage = last_stage(more, case.pp)
    blocks = {block.name for block in stage.blocks}
    owners, costs = planned([m for m in shapes if m.block in blocks], machine, world)
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
    efficiency = EFFICIENCY
    for _ in range(4 if over_s else 0):
        step = step_s(case.over, replace(base, efficiency=efficiency))
        computes = base.workload.flops / case.machine.device.peak_flops / efficiency
        efficiency = min(1.0, efficiency * computes / max(computes + over_s - step, 0.05 * computes))
    found = replace(base, efficiency=efficiency)
    return step_s(case.program, found) / step_s(case.over, found) - 1, efficiency


def fit() -> dict[str, Any]:
    """The contention of least squares, every case as predicted by it, and the error of the cases that were fitted.

    ``left_out`` of a case is its error with the term that was fitted to all others, of which ``error`` is the root mean
    square; ``over_ms`` is the published step of ``over``, or 0.
    """
    bases = [scenario_of(case) for case in CASES]
    found = [
        [overhead(case, replace(base, contention=term), over_s) for term in _CONTENTION]
        for case, (base, over_s) in zip(CASES, bases, strict=True)
    ]
    errors = np.array([[p - case.published for p, _ in row] for case, row in zip(CASES, found, strict=True)])
    fitted = np.array([case.fitted for case in CASES])

    def best(rows: Sequence[bool]) -> int:
        return int(np.argmin((errors[rows] ** 2).sum(axis=0)))

    chosen = best(fitted)
    cases = []
    for i, case in enumerate(CASES):
        others = fitted.copy()
        others[i] = False
        predicted, efficiency = found[i][chosen]
        row = {name: getattr(case, name) for name in ("name", "program", "over", "published", "fitted", "source")}
        row |= {"predicted": predicted, "error": predicted - case.published, "efficiency": efficiency}
        row["ratio"] = (1 + predicted) / (1 + case.published)
        row["left_out"] = float(errors[i, best(others)])
        cases.append(row | {"tokens": bases[i][0].workload.tokens, "over_ms": 1e3 * (case.over_s or 0.0)})
    error = float(np.sqrt(np.mean([case["left_out"] ** 2 for case in cases if case["fitted"]])))
    return {"terms": {"contention": _CONTENTION[chosen]}, "error": error, "cases": cases, "homes": homes()}


def homes() -> list[dict[str, Any]]:
    """Optimizer steps whose matrices each rank of a domain computes, over those of owners, beside published ratios.

    Newton–Schulz alone, without what is sent. Dense matrices and experts have 16 owners each; duplicated, a rank
    computes all dense ones and, by expert parallelism, an eighth of the experts.
    """
    rows = []
    for name, model, published, source in HOMES:
        counts = Counter(
            (".experts." in m.name, (min(m.rows, m.cols), max(m.rows, m.cols))) for m in read_model(config_path(model))
        )
        costs = wave_costs(HARDWARE["gb300"].device, {shape: 64 for _, shape in counts})
        ms = {
            way: sum(1e-6 * costs.cost(shape, -(-n // shares[expert])) for (expert, shape), n in counts.items())
            for way, shares in {"duplicated_ms": (1, 8), "owners_ms": (16, 16)}.items()
        }
        predicted = ms["duplicated_ms"] / ms["owners_ms"]
        rows.append({"name": name, "published": published, "predicted": predicted, "source": source, **ms})
    return rows


def report(record: Mapping[str, Any]) -> str:
    """The fit as text for people."""
    shown = {"program": "", "over": "", "published": "+.1%", "predicted": "+.1%", "ratio": ".2f", "error": "+.1%"}
    cases = columns({case["name"]: case for case in record["cases"]}, {**shown, "left_out": "+.1%"}, "case")
    times = {"published": ".2f", "predicted": ".2f", "duplicated_ms": ".0f", "owners_ms": ".0f"}
    homes = columns({row["name"]: row for row in record["homes"]}, times, "32 GB300: duplicated over owners")
    return (
        f"{cases}\n\nratio: the predicted step over the measured one, where that of AdamW is as measured\n"
        f"contention {record['terms']['contention']:.3g}; error of a published case that was left out, root mean "
        f"square: {record['error']:.4f}\n\n{homes}"
    )
