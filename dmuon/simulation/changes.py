"""What would have to change for dedicated owners to cost as little as AdamW, one quantity at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from dmuon.simulation.network import AlphaBeta
from dmuon.simulation.programs import simulate
from dmuon.simulation.scenario import Scenario
from dmuon.solver import SolveOptions
from dmuon.solver import plan as solve_plan

__all__ = ["Change", "Quantity", "find_changes", "overhead"]

Quantity = Literal["tokens per rank", "Newton–Schulz speed", "link bandwidth", "link latency", "ranks", "replicas"]

_FACTORS = (2, 4, 8, 16, 32, 64)
_PRECISION = 0.01  # of a factor that is found
_MOST_RANKS = 1024


@dataclass(frozen=True, slots=True)
class Change:
    """The least change of one quantity, all else as it is, that brings the overhead below the target.

    Attributes:
        factor: on the quantity; latency is divided by it. ``None`` where no factor in ``range`` does.
        overhead: of dedicated over AdamW at that factor, or the least of those tried.
        tried: the factors that were tried, for people.
        value: what the quantity becomes, for people.
    """

    quantity: Quantity
    factor: float | None
    overhead: float
    tried: str
    value: str = ""

    def __str__(self) -> str:
        if self.factor is None:
            return f"{self.quantity:<20} not reachable by this alone ({self.tried}: {self.overhead:+.1%} at best)"
        sign = "÷" if self.quantity == "link latency" else "×"
        return f"{self.quantity:<20} {sign} {self.factor:.2f}" + (f"  ({self.value})" if self.value else "")


def overhead(scenario: Scenario) -> float:
    """Dedicated step over AdamW's, less 1."""
    return simulate("dedicated", scenario).step_s / simulate("adamw", scenario).step_s - 1


def find_changes(scenario: Scenario, target: float) -> tuple[Change, ...]:
    """For each quantity the least change that brings :func:`overhead` below ``target``.

    Continuous quantities go up to a factor of 64. Ranks double up to 1024 at the same tokens per rank, planned anew
    without the MILP and without limits on memory or spread: more replicas where there are several, otherwise more
    shards. Replicas double down to one node each, which costs every rank the memory of a larger shard. Both leave the
    quantity out where it cannot grow, and ranks also where they differ in speed.

    Raises:
        ValueError: a network that is not :class:`dmuon.simulation.network.AlphaBeta`.
    """
    network = scenario.machine.network
    if not isinstance(network, AlphaBeta):
        raise ValueError(f"network is {type(network).__name__}; links can be changed in an AlphaBeta only")

    def tokens(factor: float) -> Scenario:
        return replace(scenario, workload=scenario.workload.scaled(factor))

    def ns_speed(factor: float) -> Scenario:
        machine = scenario.machine
        return replace(scenario, machine=replace(machine, ns_scale=machine.ns_scale / factor))

    def bandwidth(factor: float) -> Scenario:
        intra, inter = (replace(k, bandwidth=k.bandwidth * factor) for k in (network.intra, network.inter))
        return replace(scenario, machine=replace(scenario.machine, network=AlphaBeta(intra, inter)))

    def latency(factor: float) -> Scenario:
        intra, inter = (replace(k, latency_s=k.latency_s / factor) for k in (network.intra, network.inter))
        return replace(scenario, machine=replace(scenario.machine, network=AlphaBeta(intra, inter)))

    changes = [
        _least_factor("tokens per rank", tokens, target, lambda s: f"{s.workload.tokens:,}"),
        _least_factor("Newton–Schulz speed", ns_speed, target),
        _least_factor("link bandwidth", bandwidth, target),
        _least_factor("link latency", latency, target),
        _first("ranks", _more_ranks(scenario), target, lambda s: f"{s.topology.world}, same tokens per rank"),
        _first("replicas", _more_replicas(scenario), target, lambda s: f"{s.topology.replicate} × {s.topology.shard}"),
    ]
    return tuple(change for change in changes if change is not None)


def _least_factor(
    quantity: Quantity,
    changed: Callable[[float], Scenario],
    target: float,
    value: Callable[[Scenario], str] = lambda _: "",
) -> Change:
    """Powers of two until one reaches the target, then bisection of the interval below it."""
    tried = f"up to × {_FACTORS[-1]}"
    least, below = overhead(changed(1.0)), 1.0
    for factor in _FACTORS:
        reached = overhead(changed(factor))
        least = min(least, reached)
        if reached >= target:
            below = factor
            continue
        above = float(factor)
        while above / below > 1 + _PRECISION:
            middle = math.sqrt(below * above)
            now = overhead(changed(middle))
            if now < target:
                above, reached = middle, now
            else:
                below = middle
        return Change(quantity, above, reached, tried, value(changed(above)))
    return Change(quantity, None, least, tried)


def _first(
    quantity: Quantity, scenarios: dict[int, Callable[[], Scenario]], target: float, value: Callable[[Scenario], str]
) -> Change | None:
    """The first of a few scenarios, by factor, that reaches the target."""
    if not scenarios:
        return None
    tried = f"up to × {max(scenarios)}"
    least = math.inf
    for factor, build in scenarios.items():
        scenario = build()
        reached = overhead(scenario)
        if reached < target:
            return Change(quantity, factor, reached, tried, value(scenario))
        least = min(least, reached)
    return Change(quantity, None, least, tried)


def _more_ranks(scenario: Scenario) -> dict[int, Callable[[], Scenario]]:
    old = scenario.topology
    if scenario.speeds:
        return {}  # what the further ranks would be like is anybody's guess

    def build(factor: int) -> Scenario:
        world = old.world * factor
        topology = replace(old, world=world, replicate=old.replicate * (factor if old.replicate > 1 else 1))
        owners = solve_plan(scenario.plan.matrices, world, scenario.costs, SolveOptions(method="greedy"))
        return replace(scenario, plan=owners, topology=topology)

    return _doubled(build, lambda world: world <= _MOST_RANKS and _is_whole_nodes(world, old.gpus_per_node), old.world)


def _more_replicas(scenario: Scenario) -> dict[int, Callable[[], Scenario]]:
    old = scenario.topology

    def build(factor: int) -> Scenario:
        return replace(scenario, topology=replace(old, replicate=old.replicate * factor))

    return _doubled(
        build, lambda replicate: replicate <= old.nodes and old.world % (replicate * old.tp) == 0, old.replicate
    )


def _is_whole_nodes(world: int, gpus_per_node: int) -> bool:
    return world <= gpus_per_node or world % gpus_per_node == 0


def _doubled(
    build: Callable[[int], Scenario], allowed: Callable[[int], bool], count: int
) -> dict[int, Callable[[], Scenario]]:
    """``build`` at every power of two at which ``allowed`` holds for the multiplied ``count``, up to the first not."""
    result: dict[int, Callable[[], Scenario]] = {}
    factor = 2
    while allowed(count * factor):
        result[factor] = partial(build, factor)
        factor *= 2
    return result
