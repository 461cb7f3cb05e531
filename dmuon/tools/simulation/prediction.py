"""Predicted steps of all programs in one table, how far predictions are off, and which way to train to take."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from dmuon.tools.simulation.hardware import Topology
from dmuon.tools.simulation.step import Program, Scenario, newton_schulz_s, owned_elements, step_s

# Of an overhead: root mean square over published cases, each predicted by terms that are fitted to the others.
ERROR = 0.037
_NAMES: dict[Program, str] = {
    "dedicated": "dedicate_params",
    "exchanged": "dmuon.Muon alone",
    "gather": "Muon, gathered everywhere",
    "adamw": "AdamW",
}
_KEPT = ", no reshard"
_ROWS: tuple[tuple[Program, bool], ...] = (
    ("exchanged", False), ("exchanged", True), ("dedicated", False), ("dedicated", True), ("gather", False),
    ("adamw", False), ("adamw", True),
)  # fmt: skip
_LEGEND = (
    "dmuon.Muon alone: on what FSDP2 sharded. dedicate_params: dmuon places whole matrices on owners.",
    "no reshard: whole weights stay from forward to backward (reshard_after_forward=False).",
)


def verdict(overhead: float) -> str:
    """An overhead with its error, and whether it is equal to none within that.

    Args:
        overhead: of one predicted step over another, less 1.
    """
    return f"{overhead:+.1%} ± {ERROR:.1%}" + (" (equal)" if abs(overhead) < ERROR else "")


def report(scenario: Scenario) -> str:
    """Where the step of each program goes, as text for people."""
    topology, costs, device = scenario.topology, scenario.costs, scenario.hardware.device
    shapes = {m.shape for m in scenario.plan.matrices}
    guessed = len(shapes & set(costs.estimated))
    lines = [
        f"one step on {topology.world} × {device.name}, {_plural(topology.nodes, 'node')} "
        f"(replicate {topology.replicate} × shard {topology.shard} × tp {topology.tp}), predicted:",
        f"{scenario.workload.tokens:,} tokens per rank; forward and backward at {scenario.efficiency:.0%} of the peak",
        "Newton–Schulz costs "
        + (f"estimated for {guessed} of {_plural(len(shapes), 'shape')}" if guessed else "measured"),
        "",
        f"{'':<28}{'step ms':>9}{'fwd+bwd':>9}{'NS':>10}{'exposed':>9}{'over AdamW':>23}{'gathered':>10}",
    ]
    adamw = min(step_s("adamw", replace(scenario, kept=kept)) for kept in (False, True))
    gather = step_s("gather", scenario)
    computes = scenario.workload.flops / scenario.flops_per_s
    for program, kept in _ROWS:
        step, ns = step_s(program, replace(scenario, kept=kept)), newton_schulz_s(program, scenario)
        overhead = "" if program == "adamw" else verdict(step / adamw - 1)
        lines.append(
            f"{_NAMES[program] + _KEPT * kept:<28}{1e3 * step:>9.2f}{1e3 * computes:>9.2f}{1e3 * ns:>10.2f}"
            f"{1e3 * (step - computes - ns):>9.2f}{overhead:>23}{gather / step:>9.2f}×"
        )
    lines += ["", *_LEGEND]
    lines.append("NS: Newton–Schulz of the slowest rank. exposed: the rest of the step, mostly communication.")
    lines.append("gathered: the step of Muon that gathers every matrix on every rank, over this one.")
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
    def mesh(self) -> str:
        return f"{self.topology.replicate} × {self.topology.shard}"

    @property
    def name(self) -> str:
        return _NAMES[self.residency] + _KEPT * self.kept

    def code(self, blocks: Iterable[str] = ()) -> list[str]:
        """Lines to paste.

        Args:
            blocks: names of the model's blocks, such as ``model.layers.0``.
        """
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
        lines, shard = [f"mesh = {mesh}"], "fully_shard"
        if self.residency == "dedicated":
            lines.append(f"dmuon.dedicate_params(model, mesh{kept})")
            shard = "dmuon.fully_shard"
        for stack in _stacks(blocks):
            lines += [f"for block in model.{stack}:", f"    {shard}(block, mesh=mesh{kept})"]
        lines += [f"{shard}(model, mesh=mesh{kept})"]
        return [*lines, "optimizer = dmuon.Muon(model, lr=3e-4)  # the learning rate of your AdamW"]


def _stacks(blocks: Iterable[str]) -> list[str]:
    """Attributes of a model that hold its blocks; ``blocks`` where names are no attributes."""
    found = dict.fromkeys(re.sub(r"\.\d+$", "", block) for block in blocks)
    named = [stack for stack in found if all(part.isidentifier() for part in stack.split("."))]
    return named if named and len(named) == len(found) else ["blocks"]


@dataclass(frozen=True, slots=True)
class Recommendation:
    """All ways, those that fit first and then the fastest, of which the first is the one to take.

    Attributes:
        adamw: AdamW on the mesh that suits it best, of those that fit.
        blocks: names of the model's blocks.
    """

    ways: tuple[Way, ...]
    adamw: Way
    blocks: tuple[str, ...]

    def answer(self) -> list[str]:
        """What to take, what it holds, what a step takes, and lines to paste."""
        taken, adamw = self.ways[0], self.adamw
        if not taken.fits:
            return ["none of them fits into the memory of a device: add ranks or --tp"]
        overhead = verdict(taken.step_s / adamw.step_s - 1)
        lines = [
            f"take:  {taken.name}, on a mesh of {taken.mesh} ranks (replicas × shards)",
            f"holds: {taken.nbytes / _GIB:.1f} GiB a rank, against {adamw.nbytes / _GIB:.1f} of AdamW"
            f"{_KEPT * adamw.kept}, on {adamw.mesh}" + ("" if adamw.fits else ", which does not fit"),
            f"step:  {1e3 * taken.step_s:.1f} ms, {overhead} over AdamW's {1e3 * adamw.step_s:.1f}",
        ]
        equal = [way for way in self.ways if way.fits and way.step_s / taken.step_s - 1 < ERROR]
        least = min(equal, key=lambda way: way.nbytes)
        if least.nbytes < taken.nbytes:
            lines.append(
                f"       (equal within the error, with least memory: {least.name}, on {least.mesh}, "
                f"{least.nbytes / _GIB:.1f} GiB)"
            )
        return [*lines, "", *(f"    {line}" for line in taken.code(self.blocks))]

    def table(self) -> list[str]:
        """All ways, as text for people."""
        lines = [
            "all ways, fastest first, over the best AdamW of all meshes; < is taken:",
            "",
            f"{'mesh':>10}  {'':<28} {'step ms':>9} {'over AdamW':>23} {'GiB':>6}",
        ]
        for way in self.ways:
            mark = " no fit" if not way.fits else " <" if way is self.ways[0] else ""
            lines.append(
                f"{way.mesh:>10}  {way.name:<28} {1e3 * way.step_s:>9.1f} "
                f"{verdict(way.step_s / self.adamw.step_s - 1):>23} {way.nbytes / _GIB:>6.1f}{mark}"
            )
        return [
            *lines,
            "",
            *_LEGEND,
            "GiB: weights, gradients, optimizer state and buffers of a rank, without activations.",
        ]


def recommend(scenario: Scenario, tried: Sequence[Topology]) -> Recommendation:
    """Predict all residencies on some meshes, with weights kept or not.

    Args:
        scenario: on any mesh; its plan is kept, for it does not depend on the mesh.
    """
    ways: list[Way] = []
    residencies: tuple[Residency, ...] = ("dedicated", "exchanged", "adamw")
    for topology, kept, residency in product(tried, (False, True), residencies):
        one = replace(scenario, topology=topology, kept=kept)
        nbytes = held_bytes(residency, one)
        fits = nbytes <= _ROOM * scenario.hardware.device.memory
        ways.append(Way(topology, residency, kept, step_s(residency, one), nbytes, fits))
    ways.sort(key=lambda way: (not way.fits, way.step_s))
    adamw = next(way for way in ways if way.residency == "adamw")
    muon = tuple(way for way in ways if way.residency != "adamw")
    return Recommendation(muon, adamw, tuple(block.name for block in scenario.workload.blocks))


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
