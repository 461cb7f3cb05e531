"""Predicted steps of all ways to train in one table, how far predictions are off, and which way to take."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from dmuon.tools.simulation.hardware import Topology
from dmuon.tools.simulation.step import (
    MASTER_BYTES,
    PARAM_BYTES,
    REDUCE_BYTES,
    Program,
    Scenario,
    newton_schulz_s,
    owned_elements,
    step_s,
    stored_shapes,
)

# Of an overhead: root mean square over published cases, each predicted by terms that are fitted to the others.
ERROR = 0.035
# Of Newton–Schulz, a factor: root mean square over published products from 2048 on (bench/simulate.py --products).
NS_ERROR = 1.3
_ROOM = 0.6  # of a device's memory: the rest is for activations, workspaces and fragments
_GIB = 2**30
_NAMES: dict[Program, str] = {
    "dedicated": "dedicate_params",
    "exchanged": "dmuon.Muon alone",
    "gather": "Muon, gathered everywhere",
    "adamw": "AdamW",
}
_KEPT = ", no reshard"
_LEGEND = (
    "dmuon.Muon alone: on what FSDP2 sharded. dedicate_params: dmuon places whole matrices on owners.",
    "no reshard: whole weights stay from forward to backward (reshard_after_forward=False).",
    "NS: Newton–Schulz of the slowest rank. exposed: the rest of the step, mostly communication.",
    "GiB: weights, gradients, optimizer state and buffers of a rank, without activations; ! does not fit.",
    f"± {ERROR:.1%} is how far predictions were off from steps that others published; less is equal.",
    f"It is more where NS is long: products that others published were off by a factor of {NS_ERROR}.",
)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train.

    Attributes:
        kept: whole weights stay from forward to backward (``reshard_after_forward=False``).
        step_s, newton_s: predicted, of the step and of Newton–Schulz in it.
        nbytes: of weights, gradients, optimizer state and buffers on the rank that holds most.
        fits: leaves room on the device.
    """

    topology: Topology
    program: Program
    kept: bool
    step_s: float
    newton_s: float
    nbytes: float
    fits: bool

    @property
    def mesh(self) -> str:
        return f"{self.topology.replicate} × {self.topology.shard}"

    @property
    def name(self) -> str:
        return _NAMES[self.program] + _KEPT * self.kept

    def over(self, other: Way) -> str:
        """What its step adds to another's, with the error, and whether it is equal to that within the error."""
        overhead = self.step_s / other.step_s - 1
        error = math.hypot(ERROR, (NS_ERROR - 1) * self.newton_s / other.step_s)
        return f"{overhead:+.1%} ± {error:.1%}" + (" (equal)" if abs(overhead) < error else "")

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
        if self.program == "dedicated":
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
    """All ways, those that fit first and then the fastest.

    Attributes:
        ways: of dmuon, of which the first is the one to take.
        adamw: on the mesh that suits it best, of those that fit.
        table: text for people.
        blocks: names of the model's blocks.
    """

    ways: tuple[Way, ...]
    adamw: Way
    table: str
    blocks: tuple[str, ...]

    def answer(self) -> list[str]:
        """What to take, what it holds, what a step takes, and lines to paste."""
        taken, adamw = self.ways[0], self.adamw
        if not taken.fits:
            return ["none of them fits into the memory of a device: add ranks or --tp"]
        overhead = taken.over(adamw)
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


def recommend(scenario: Scenario, tried: Sequence[Topology]) -> Recommendation:
    """Predict all programs on some meshes, with weights kept or not.

    Args:
        scenario: on any mesh; its plan is kept, for it does not depend on the mesh.
    """
    ways: list[Way] = []
    for topology, kept, program in product(tried, (False, True), _NAMES):
        if program == "gather" and kept:  # what it computes is too long for this to matter
            continue
        one = replace(scenario, topology=topology, kept=kept)
        nbytes = held_bytes(program, one)
        fits = nbytes <= _ROOM * scenario.hardware.device.memory
        ways.append(Way(topology, program, kept, step_s(program, one), newton_schulz_s(program, one), nbytes, fits))
    ways.sort(key=lambda way: (not way.fits, way.step_s))
    adamw = next(way for way in ways if way.program == "adamw")
    own = tuple(way for way in ways if way.program in ("dedicated", "exchanged"))
    return Recommendation(
        own, adamw, _table(scenario, ways, own[0], adamw), tuple(block.name for block in scenario.workload.blocks)
    )


def _table(scenario: Scenario, ways: Iterable[Way], taken: Way, adamw: Way) -> str:
    """Where the step of each way goes, and what it holds."""
    topology, costs, device = scenario.topology, scenario.costs, scenario.hardware.device
    computes = scenario.workload.flops / scenario.flops_per_s
    shapes = {m.shape for m in scenario.plan.matrices}
    guessed = len(shapes & set(costs.estimated))
    lines = [
        f"predicted: one step on {topology.world} × {device.name}, {_plural(topology.nodes, 'node')}, tp {topology.tp}",
        f"{scenario.workload.tokens:,} tokens per rank; forward and backward take {1e3 * computes:.2f} ms, at "
        f"{scenario.efficiency:.0%} of the peak",
        "Newton–Schulz costs "
        + (f"estimated for {guessed} of {_plural(len(shapes), 'shape')}" if guessed else "measured"),
        "replicas × shards, fastest first, over the best AdamW; < is taken:",
        "",
        f"{'':<28}{'mesh':>10}{'step ms':>10}{'NS':>9}{'exposed':>9} {'over AdamW':>24}{'GiB':>7}",
    ]
    for way in ways:
        over = "" if way.program == "adamw" else way.over(adamw)
        lines.append(
            f"{way.name:<28}{way.mesh:>10}{1e3 * way.step_s:>10.2f}{1e3 * way.newton_s:>9.2f}"
            f"{1e3 * (way.step_s - computes - way.newton_s):>9.2f} {over:>24}{way.nbytes / _GIB:>7.1f}"
            + (" !" if not way.fits else " <" if way is taken else "")
        )
    lines += ["", *_LEGEND]
    if topology.tp > 1:
        lines.append("left out are activations on their way by tensor parallelism: all steps take longer")
    return "\n".join(lines)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("s" if count != 1 else "")


def meshes(given: Topology) -> Iterator[Topology]:
    """Sharded over all ranks, and replicas that are sharded over 1, 2, 4, … nodes' ranks, or parts of a node."""
    data = given.world // given.tp
    per_node = max(1, given.gpus_per_node // given.tp)
    for shard in sorted({data, *(per_node * 2**i for i in range(16))}):
        if shard <= data and data % shard == 0:
            yield replace(given, replicate=data // shard)


def held_bytes(program: Program, scenario: Scenario) -> float:
    """Weights, gradients, optimizer state and buffers of the rank that holds most.

    fp32 weight, gradient and one moment of a matrix, two of everything else, and whole weights in what travels: two of
    the largest block, or all that are kept. Dedicated owners hold what they own and stand in for, and two buffers of
    gradients, as docs/communication.md says. Who gathers everywhere holds the momentum of a shape.
    """
    topology, workload = scenario.topology, scenario.workload
    whole = [block.matrix_elements / topology.tp for block in workload.blocks]
    others = 16 * sum(b.other_elements for b in (*workload.blocks, workload.ends)) / topology.shard
    buffers = PARAM_BYTES * (sum(whole) if scenario.kept else 2 * max(whole))
    if program != "dedicated":
        together = [rows * cols * count / topology.tp for (rows, cols), count in stored_shapes(scenario).items()]
        gathered = MASTER_BYTES * max(together) if program == "gather" else 0.0
        return (16 if program == "adamw" else 12) * sum(whole) / topology.shard + others + buffers + gathered
    held = owned_elements(scenario).sum(axis=0)
    standins = 0.0 if scenario.kept or topology.replicate == 1 else PARAM_BYTES * float(held.sum(axis=0).max())
    return 12 * float(held.max()) + standins + others + buffers + REDUCE_BYTES * 2 * max(whole)
