"""A plan as text for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .result import Plan

__all__ = ["format_plan"]

_MOST_ROWS = 32
_BAR = 24


def format_plan(plan: Plan) -> str:
    """Makespan, bound, gap, stage, and a row per rank; of many ranks, the most and the least loaded."""
    lines = [
        f"{len(plan.matrices)} matrices in {len(plan.block_balance)} blocks over {plan.world} ranks",
        f"makespan  {_ms(plan.makespan_ns)}",
        f"bound     {_ms(plan.bound_ns)}  (gap {plan.gap:.2%})",
        f"stage     {plan.stage}: {plan.reason}",
        f"costs     {_sources(plan)}",
        f"blocks    {_blocks(plan)}",
        f"digest    {plan.digest}",
        "",
        f"{'rank':>6} {'load':>12} {'of makespan':>12}  {'':<{_BAR}} {'matrices':>8} {'MiB':>10}",
    ]
    nbytes, held = plan.rank_bytes, plan.rank_matrices
    rows = [
        f"{rank:>6} {_ms(plan.loads_ns[rank]):>12} {plan.loads_ns[rank] / plan.makespan_ns:>12.1%}  "
        f"{'#' * round(_BAR * plan.loads_ns[rank] / plan.makespan_ns):<{_BAR}} {held[rank]:>8} "
        f"{nbytes[rank] / 2**20:>10.1f}"
        for rank in range(plan.world)
    ]
    return "\n".join(lines + _shorten(rows, plan.loads_ns))


def _shorten(rows: Sequence[str], loads: Sequence[int]) -> list[str]:
    if len(rows) <= _MOST_ROWS:
        return list(rows)
    order = sorted(range(len(rows)), key=lambda rank: (-loads[rank], rank))
    half = _MOST_ROWS // 2
    middle = order[half:-half]
    between = f"   … {len(middle)} more ranks, {_ms(loads[middle[0]])} to {_ms(loads[middle[-1]])} …"
    return [rows[r] for r in order[:half]] + [between] + [rows[r] for r in order[-half:]]


def _blocks(plan: Plan) -> str:
    largest = sum(most for most, _ in plan.block_balance.values())
    least = sum(least for _, least in plan.block_balance.values())
    return (
        f"largest owner {largest / len(plan.block_balance) / 2**20:.1f} MiB on average, "
        f"{largest / least:.2f} times the least possible"
    )


def _sources(plan: Plan) -> str:
    shapes = {m.shape for m in plan.matrices}
    if not plan.estimated:
        return "measured"
    return f"estimated for {len(plan.estimated)} of {len(shapes)} shapes"


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.3f} ms"
