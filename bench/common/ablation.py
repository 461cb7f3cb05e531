"""What each part of the design saves: owners, then the Gram form by halves, then the planner, then batches and tuning.

The baseline gathers every matrix on every rank and orthogonalizes one after the other by the textbook's loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import inf, log
from pathlib import Path
from typing import Any, Literal

from dmuon import OwnerPlan
from dmuon.kernels import orthogonalize
from dmuon.model.config import read_model
from dmuon.solver import CostTable, Matrix, Plan, plan
from dmuon.tools.hardware import HARDWARE, Device, Product, product_s, wave_costs

SEQUENTIAL = "sequential everywhere"
OWNERS, GRAM, PLANNER, TUNED = "owners", "+ Gram, symmetric", "+ planner", "+ batches, tuning"
LEVELS = (OWNERS, GRAM, PLANNER, TUNED)
TEXTBOOK = partial(orthogonalize, method="standard", backend="torch")
STEPS = 5
PREDICTED = ("qwen2.5-7b", "a800", 128)  # a model, GPUs and ranks of the published ablation
PUBLISHED = {OWNERS: "32%, with planner", GRAM: "48%", TUNED: "16%"}  # of the step's speedup


def baseline(rule: Literal["round-robin", "lpt"], matrices: Sequence[Matrix], ranks: int, costs: CostTable) -> Plan:
    """Matrices dealt out in the order of their names; or the longest next, to the rank with the least work.

    By the cost of one matrix alone: neither knows of batches.
    """
    ordered = sorted(matrices, key=lambda m: m.name)
    if rule == "round-robin":
        owners = {m.name: i % ranks for i, m in enumerate(ordered)}
    else:
        owners, work = {}, [(0, 0, rank) for rank in range(ranks)]  # nanoseconds and elements
        for m in sorted(ordered, key=lambda m: (-costs.cost(m.shape, 1), m.key)):
            ns, elements, rank = min(work)
            owners[m.name], work[rank] = rank, (ns + costs.cost(m.shape, 1), elements + m.rows * m.cols, rank)
    loads = [0] * ranks
    for (rank, key), count in Counter((owners[m.name], m.key) for m in ordered).items():
        loads[rank] += costs.cost((min(key[:2]), max(key[:2])), count)
    named = {m.name: owners[m.name] for m in ordered}
    return Plan(named, tuple(ordered), tuple(loads), bound_ns=1, stage=rule, reason="a baseline")


def single(costs: CostTable) -> CostTable:
    """Of one matrix after the other."""
    return CostTable({shape: {1: sizes[1]} for shape, sizes in costs.costs.items()})


def ablated(level: str, found: OwnerPlan) -> OwnerPlan:
    """``found`` as it is without what comes after ``level``."""
    if level == TUNED:
        return found
    assert found.costs is not None
    costs, matrices = single(found.costs), found.solution.matrices
    solution = (
        plan(matrices, found.world, costs)
        if level == PLANNER
        else baseline("round-robin", matrices, found.world, costs)
    )
    return replace(found, solution=solution, chunks=dict.fromkeys(found.chunks, 1), costs=costs)


def predicted() -> dict[str, float]:
    """Milliseconds of the slowest rank's Newton–Schulz, by level, after the shipped model of products."""
    model, machine, world = PREDICTED
    folder = Path(__file__).parents[2] / "examples" / "models"
    matrices = read_model(folder / f"{model}.json")
    device, counts = HARDWARE[machine].device, Counter(m.shape for m in matrices)
    tuned = wave_costs(device, counts)
    textbook = CostTable({shape: {1: _standard_ns(device, *shape)} for shape in counts})
    found = {
        SEQUENTIAL: sum(count * textbook.cost(shape, 1) for shape, count in counts.items()),
        OWNERS: baseline("round-robin", matrices, world, textbook).makespan_ns,
        GRAM: baseline("round-robin", matrices, world, single(tuned)).makespan_ns,
        PLANNER: plan(matrices, world, single(tuned)).makespan_ns,
        TUNED: plan(matrices, world, tuned).makespan_ns,
    }
    return {name: ns / 1e6 for name, ns in found.items()}


def _standard_ns(device: Device, m: int, n: int) -> int:
    """``R = XX'; Z = bR + cRR; X = aX + ZX``, whole products."""
    products = Product(m, n, m), Product(m, m, m, addends=1), Product(m, m, n, addends=1)
    return round(1e9 * STEPS * sum(product_s(device, one, 1) + device.launch_s for one in products))


def shares(ms: dict[str, float]) -> dict[str, dict[str, Any]]:
    """Of every level: times faster than the baseline, and its part of all of that, in time and in its logarithm."""
    names = [SEQUENTIAL, *LEVELS]
    ms = {name: max(value, 1e-3) for name, value in ms.items()}  # a difference of times may be noise
    first, last = ms[names[0]], ms[names[-1]]
    time, factor = first - last or inf, log(first / last) or inf
    rows: dict[str, dict[str, Any]] = {SEQUENTIAL: {"ms": first, "times": 1.0}}
    for before, name in pairwise(names):
        rows[name] = {"ms": ms[name], "times": first / ms[name], "published": PUBLISHED.get(name, "")}
        rows[name]["of the time"] = (ms[before] - ms[name]) / time
        rows[name]["of the factor"] = log(ms[before] / ms[name]) / factor
    return rows
