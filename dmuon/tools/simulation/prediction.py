"""Predicted steps of all programs in one table, how far predictions are off, and which way to train to take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from dmuon.tools.simulation.hardware import Topology
from dmuon.tools.simulation.scenario import Scenario
from dmuon.tools.simulation.step import Program, newton_schulz_s, owned_elements, step_s

# Of an overhead: root mean square over published cases, each predicted by terms that are fitted to the others.
ERROR = 0.037
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


def report(scenario: Scenario) -> str:
    """Where the step of each program goes, as text for people."""
    topology, costs = scenario.topology, scenario.costs
    shapes = {m.shape for m in scenario.plan.matrices}
    guessed = len(shapes & set(costs.estimated))
    lines = [
        f"predicted step, {topology.world} × {scenario.hardware.device.name}, {_plural(topology.nodes, 'node')} "
        f"(replicate {topology.replicate} × shard {topology.shard} × tp {topology.tp}), "
        f"{scenario.workload.tokens:,} tokens per rank, forward and backward at "
        f"{scenario.efficiency:.0%} of the peak; Newton–Schulz costs "
        + (f"estimated for {guessed} of {_plural(len(shapes), 'shape')}" if guessed else "measured"),
        f"{'program':<16}{'step ms':>10}{'fwd+bwd':>10}{'NS':>9}{'exposed':>9}{'vs AdamW':>16}{'vs gather':>11}",
    ]
    adamw, gather = step_s("adamw", scenario), step_s("gather", scenario)
    computes = scenario.workload.flops / scenario.flops_per_s
    for name, program, kept in _ROWS:
        step, ns = step_s(program, replace(scenario, kept=kept)), newton_schulz_s(program, scenario)
        overhead = "" if program == "adamw" else verdict(step / adamw - 1)
        lines.append(
            f"{name:<16}{1e3 * step:>10.2f}{1e3 * computes:>10.2f}{1e3 * ns:>9.2f}{1e3 * (step - computes - ns):>9.2f}"
            f"{overhead:>16}{gather / step:>10.2f}×"
        )
    lines.append(f"± {ERROR:.1%} is how far predictions were off from steps that others published; less is equal")
    if topology.tp > 1:
        lines.append("left out are activations on their way by tensor parallelism: all steps take longer")
    return "\n".join(lines)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("s" if count != 1 else "")


# -- which way to take ----------------------------------------------------------------------------------------------

_ROOM = 0.6  # of a device's memory: the rest is for activations, workspaces and fragments
_GIB = 2**30
Residency = Literal["dedicated", "exchanged", "adamw"]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train.

    Attributes:
        kept: whole weights stay from forward to backward (``reshard_after_forward=False``).
        step_s: predicted.
        nbytes: of weights, gradients, optimizer state and buffers on the rank that holds most.
        fits: leaves room on the device.
    """

    topology: Topology
    residency: Residency
    kept: bool
    step_s: float
    nbytes: float
    fits: bool

    @property
    def place(self) -> str:
        """The mesh, and whether weights are kept."""
        return f"{self.topology.replicate} × {self.topology.shard}" + (", kept" if self.kept else "")

    def code(self) -> str:
        """What to write."""
        t = self.topology
        named = {"replicate": t.replicate, "shard": t.shard}
        data = tuple(name for name, size in named.items() if size > 1) or ("shard",)
        names = (*data, "tp") if t.tp > 1 else data
        sizes = tuple({**named, "tp": t.tp}[name] for name in names)
        mesh = f'init_device_mesh("cuda", {sizes}, mesh_dim_names={names})'
        if names != data:
            mesh += f"[{', '.join(map(repr, data))}]"
        mesh = mesh.replace("'", '"')
        kept = ", reshard_after_forward=False" if self.kept else ""
        if self.residency == "exchanged":
            sharded = f"[fully_shard(part, mesh=mesh{kept}) for part in (*model.blocks, model)]"
            return f"mesh = {mesh}; {sharded}; optimizer = dmuon.Muon(model)"
        return f"mesh = {mesh}; dmuon.dedicate_params(model, mesh{kept})"


def recommend(scenario: Scenario) -> list[Way]:
    """Predict every mesh of whole nodes, all residencies, and weights kept or not: what fits first, and the fastest.

    Args:
        scenario: on any mesh; its plan is kept, for it does not depend on the mesh.
    """
    ways: list[Way] = []
    residencies: tuple[Residency, ...] = ("dedicated", "exchanged", "adamw")
    for topology, kept, residency in product(meshes(scenario.topology), (False, True), residencies):
        one = replace(scenario, topology=topology, kept=kept)
        nbytes = held_bytes(residency, one)
        fits = nbytes <= _ROOM * scenario.hardware.device.memory
        ways.append(Way(topology, residency, kept, step_s(residency, one), nbytes, fits))
    return sorted(ways, key=lambda way: (not way.fits, way.step_s))


def recommendation(ways: Sequence[Way]) -> str:
    """The table of alternatives over the best AdamW, why the first is taken, and the line to paste, for people."""
    adamw = next(way for way in ways if way.residency == "adamw")
    muon = [way for way in ways if way.residency != "adamw"]
    taken = muon[0]
    best = "the best AdamW" if adamw.fits else "AdamW, as none of it fits,"
    lines = [
        f"ways to train, predicted; over {best} ({adamw.place}: {1e3 * adamw.step_s:.1f} ms), ± {ERROR:.1%}:",
        f"{'mesh':>18} {'residency':<10} {'step ms':>9} {'over AdamW':>16} {'GiB':>7}",
    ]
    for way in muon:
        mark = " <" if way is taken else "" if way.fits else "  does not fit"
        lines.append(
            f"{way.place:>18} {way.residency:<10} {1e3 * way.step_s:>9.1f} "
            f"{verdict(way.step_s / adamw.step_s - 1):>16} {way.nbytes / _GIB:>7.1f}{mark}"
        )
    if not taken.fits:
        return "\n".join([*lines, "none of them fits into the memory of a device: add ranks or --tp"])
    equal = [way for way in muon if way.fits and way.step_s / taken.step_s - 1 < ERROR]
    least = min(equal, key=lambda way: way.nbytes)
    why = (
        f"it fits, and {len(equal) - 1} more are equal to it within the error of the prediction; of all these "
        f"{least.residency} {least.place} holds least"
    )
    why = why if len(equal) > 1 else "it is the fastest that fits"
    return "\n".join([*lines, f"recommended, because {why}:", f"    {taken.code()}"])


def meshes(given: Topology) -> Iterator[Topology]:
    """Sharded over all ranks, and replicas that are sharded over 1, 2, 4, … nodes' ranks, or parts of a node."""
    data = given.world // given.tp
    per_node = max(1, given.gpus_per_node // given.tp)
    for shard in sorted({data, *(per_node * 2**i for i in range(16))}):
        if shard <= data and data % shard == 0:
            yield replace(given, replicate=data // shard)


def held_bytes(residency: Residency, scenario: Scenario) -> float:
    """Weights, gradients, optimizer state and buffers of the rank that holds most.

    fp32 weight, gradient and one moment of a matrix, two of everything else, and whole weights in what travels: two of
    the largest block, or all that are kept. Dedicated owners hold what they own and stand in for, and two buffers of
    gradients, as docs/communication.md says.
    """
    topology, workload = scenario.topology, scenario.workload
    whole = [block.matrix_elements / topology.tp for block in workload.blocks]
    others = 16 * sum(b.other_elements for b in (*workload.blocks, workload.ends)) / topology.shard
    buffers = workload.param_bytes * (sum(whole) if scenario.kept else 2 * max(whole))
    if residency != "dedicated":
        return (12 if residency == "exchanged" else 16) * sum(whole) / topology.shard + others + buffers
    held = owned_elements(scenario).sum(axis=0)
    standins = 0.0 if scenario.kept or topology.replicate == 1 else workload.param_bytes * float(held.sum(axis=0).max())
    return 12 * float(held.max()) + standins + others + buffers + workload.reduce_bytes * 2 * max(whole)
