"""Predicted step times of all programs in one table, and how far predictions are off."""

from __future__ import annotations

from dataclasses import replace

from dmuon.simulation.messages import Program
from dmuon.simulation.scenario import Scenario
from dmuon.simulation.step import newton_schulz_s, step_s

# Of an overhead: root mean square over published cases, each predicted by terms that are fitted to the others.
ERROR = 0.034
_ROWS: tuple[tuple[str, Program, bool], ...] = (
    ("dedicated", "dedicated", False),
    ("dedicated keep", "dedicated", True),
    ("exchanged", "exchanged", False),
    ("gather", "gather", False),
    ("adamw", "adamw", False),
)


def verdict(overhead: float) -> str:
    """An overhead with its error, or that there is none which could be told from 0.

    Args:
        overhead: of one predicted step over another, less 1.
    """
    return "equal" if abs(overhead) < ERROR else f"{overhead:+.1%} ± {ERROR:.1%}"


def report(scenario: Scenario, device: str, peak_flops: float) -> str:
    """Where the step of each program goes, as text for people.

    Args:
        device, peak_flops: of a GPU.
    """
    topology, costs = scenario.topology, scenario.costs
    shapes = {m.shape for m in scenario.plan.matrices}
    guessed = len(shapes & set(costs.estimated))
    experts = f", experts over {topology.ep}" if topology.ep > 1 else ""
    lines = [
        f"predicted step, {topology.world} × {device}, {_plural(topology.nodes, 'node')} "
        f"(replicate {topology.replicate} × shard {topology.shard} × tp {topology.tp}{experts}), "
        f"{scenario.workload.tokens:,} tokens per rank, forward and backward at "
        f"{scenario.machine.flops_per_s / peak_flops:.0%} of the peak; Newton–Schulz costs "
        + (f"estimated for {guessed} of {_plural(len(shapes), 'shape')}" if guessed else "measured"),
        f"{'program':<16}{'step ms':>10}{'fwd+bwd':>10}{'NS':>9}{'exposed':>9}{'vs AdamW':>16}{'vs gather':>11}",
    ]
    adamw, gather = step_s("adamw", scenario), step_s("gather", scenario)
    computes = scenario.workload.flops / scenario.flops_per_s
    for name, program, kept in _ROWS:
        step, ns = step_s(program, replace(scenario, kept=kept)), newton_schulz_s(program, scenario)
        over = "" if program == "adamw" else verdict(step / adamw - 1)
        lines.append(
            f"{name:<16}{1e3 * step:>10.2f}{1e3 * computes:>10.2f}{1e3 * ns:>9.2f}{1e3 * (step - computes - ns):>9.2f}"
            f"{over:>16}{gather / step:>10.2f}×"
        )
    lines.append(f"± {ERROR:.1%} is how far predictions were off from steps that others published; less is equal")
    if topology.tp > 1:
        lines.append("left out are activations on their way by tensor parallelism: all steps take longer")
    return "\n".join(lines)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("s" if count != 1 else "")
