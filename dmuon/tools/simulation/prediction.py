"""Predicted steps of all programs in one table, how far predictions are off, and which way to train to take."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from dmuon.tools.simulation.hardware import Topology
from dmuon.tools.simulation.scenario import Scenario
from dmuon.tools.simulation.step import Program, newton_schulz_s, owned_elements, step_s

# Of an overhead: root mean square over published cases, each predicted by terms that are fitted to the others.
ERROR = 0.034
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
        f"one step on {topology.world} × {device}, {_plural(topology.nodes, 'node')} "
        f"(replicate {topology.replicate} × shard {topology.shard} × tp {topology.tp}{experts}), predicted:",
        f"{scenario.workload.tokens:,} tokens per rank; forward and backward at "
        f"{scenario.machine.flops_per_s / peak_flops:.0%} of the peak",
        "Newton–Schulz costs "
        + (f"estimated for {guessed} of {_plural(len(shapes), 'shape')}" if guessed else "measured"),
        "",
        f"{'':<28}{'step ms':>9}{'fwd+bwd':>9}{'NS':>8}{'exposed':>9}{'over AdamW':>23}{'gathered':>10}",
    ]
    adamw = min(step_s("adamw", replace(scenario, kept=kept)) for kept in (False, True))
    gather = step_s("gather", scenario)
    computes = scenario.workload.flops / scenario.flops_per_s
    for program, kept in _ROWS:
        step, ns = step_s(program, replace(scenario, kept=kept)), newton_schulz_s(program, scenario)
        overhead = "" if program == "adamw" else verdict(step / adamw - 1)
        lines.append(
            f"{_NAMES[program] + _KEPT * kept:<28}{1e3 * step:>9.2f}{1e3 * computes:>9.2f}{1e3 * ns:>8.2f}"
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

_TIE = 0.1  # of the error: for so much less nobody should set an option
_MERGED = (2, 4, 8)  # neighbouring blocks that may travel together
_ROOM = 0.6  # of a device's memory: the rest is for activations, workspaces and fragments
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train.

    Attributes:
        merge_bytes: as in ``CommOptions``; 0 merges nothing.
        kept: whole weights stay from forward to backward (``reshard_after_forward=False``).
        step_s: predicted.
        nbytes: of weights, gradients, optimizer state and buffers on the rank that holds most.
        fits: leaves room on the device.
    """

    topology: Topology
    residency: Literal["dedicated", "exchanged", "adamw"]
    merge_bytes: int
    kept: bool
    step_s: float
    nbytes: float
    fits: bool

    @property
    def mesh(self) -> str:
        return f"{self.topology.replicate} × {self.topology.shard}"

    @property
    def place(self) -> str:
        """The mesh, and whether weights are kept."""
        return self.mesh + (", kept" if self.kept else "")

    @property
    def name(self) -> str:
        return _NAMES[self.residency] + _KEPT * self.kept

    def code(self, blocks: Iterable[str] = ()) -> list[str]:
        """Lines to paste.

        Args:
            blocks: names of the model's blocks, such as ``model.layers.0``.
        """
        t = self.topology
        named = [(size, name) for size, name in ((t.replicate, "replicate"), (t.shard, "shard")) if size > 1]
        named = named or [(1, "shard")]
        dims = [*named, (t.tp, "tp")] if t.tp > 1 else named
        if dims == [(t.shard, "shard")]:
            mesh = f'init_device_mesh("cuda", ({t.shard},))'
        else:
            sizes, names = zip(*dims, strict=True)
            mesh = f'init_device_mesh("cuda", {sizes}, mesh_dim_names={names})'.replace("'", '"')
            if dims != named:
                data = ", ".join(f'"{name}"' for _, name in named)
                mesh = f"{mesh}[{data}]"
        kept = ", reshard_after_forward=False" if self.kept else ""
        lines, shard = [f"mesh = {mesh}"], "fully_shard"
        if self.residency == "dedicated":
            comm = f", comm=dmuon.CommOptions(merge_bytes={self.merge_bytes})" if self.merge_bytes else ""
            lines.append(f"dmuon.dedicate_params(model, mesh{kept}{comm})")
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
    """All ways, fastest first, and the one to take.

    Attributes:
        adamw: AdamW on the mesh that suits it best, of those that fit.
        equal: ways that fit and whose predicted steps cannot be told from the fastest.
        taken: the first of these; or one of a tenth of the error more whose blocks are not merged.
        blocks: names of the model's blocks.
    """

    ways: tuple[Way, ...]
    adamw: Way
    equal: tuple[Way, ...]
    taken: Way
    blocks: tuple[str, ...]

    @property
    def overhead(self) -> float:
        """Of the way that is taken, over AdamW."""
        return self.taken.step_s / self.adamw.step_s - 1

    def answer(self) -> list[str]:
        """What to take, what it holds, what a step takes, and lines to paste."""
        taken, adamw = self.taken, self.adamw
        if not taken.fits:
            return ["none of them fits into the memory of a device: add ranks, --tp or --ep"]
        least = min(self.equal, key=lambda way: way.nbytes)
        merged = f", blocks merged to {taken.merge_bytes / 2**20:.0f} MiB" if taken.merge_bytes else ""
        lines = [
            f"take:  {taken.name}{merged}, on a mesh of {taken.mesh} ranks (replicas × shards)",
            f"holds: {taken.nbytes / _GIB:.1f} GiB a rank, against {adamw.nbytes / _GIB:.1f} of AdamW"
            f"{_KEPT * adamw.kept}, on {adamw.mesh}" + ("" if adamw.fits else ", which does not fit"),
            f"step:  {1e3 * taken.step_s:.1f} ms, {verdict(self.overhead)} over AdamW's {1e3 * adamw.step_s:.1f}",
        ]
        if least.nbytes < taken.nbytes:
            lines.append(
                f"       (equal within the error, with least memory: {least.name}, on {least.mesh}, "
                f"{least.nbytes / _GIB:.1f} GiB)"
            )
        lines += ["", *(f"    {line}" for line in taken.code(self.blocks))]
        if taken.topology.ep > 1:
            before = "before it " if taken.residency == "dedicated" else ""
            lines.append(f"    # {before}experts likewise, over the ranks that hold the same ones: a mesh of their own")
        return lines

    def table(self) -> list[str]:
        """All ways, as text for people."""
        lines = [
            "all ways, fastest first; < is taken:",
            "",
            f"{'mesh':>10}  {'':<28} {'merged MiB':>10} {'step ms':>9} {'over AdamW':>23} {'GiB':>6}",
        ]
        for way in self.ways:
            mark = " <" if way is self.taken else "" if way.fits else " no fit"
            merged = f"{way.merge_bytes / 2**20:.0f}" if way.merge_bytes else "-"
            lines.append(
                f"{way.mesh:>10}  {way.name:<28} {merged:>10} {1e3 * way.step_s:>9.1f} "
                f"{verdict(way.step_s / self.adamw.step_s - 1):>23} {way.nbytes / _GIB:>6.1f}{mark}"
            )
        return [
            *lines,
            "",
            *_LEGEND,
            "merged MiB: CommOptions(merge_bytes=), which sends neighbouring blocks together.",
            "GiB: weights, gradients, optimizer state and buffers of a rank, without activations.",
        ]


def recommend(scenario: Scenario, memory: float) -> Recommendation:
    """Predict every mesh of whole nodes, both residencies, weights kept or not, and merged blocks.

    Args:
        scenario: on any mesh; its plan is kept, for it does not depend on the mesh.
        memory: bytes of a device.
    """
    return compare(scenario, memory, tuple(meshes(scenario.topology)), (1, *_MERGED))


def compare(
    scenario: Scenario, memory: float, tried: Sequence[Topology] = (), together: Sequence[int] = (1,)
) -> Recommendation:
    """The same of some meshes only, of which AdamW gets one too.

    Args:
        tried: meshes; none: that of the scenario.
        together: how many neighbouring blocks are merged.
    """
    ways: list[Way] = []
    largest = max(b.matrix_elements for b in scenario.workload.blocks) * scenario.workload.param_bytes
    for merged in together:
        for topology, kept in product(tried or (scenario.topology,), (False, True)):
            one = replace(scenario.merged(merged), topology=topology, kept=kept)
            for residency in ("dedicated", "exchanged", "adamw"):
                if merged > 1 and residency == "exchanged":
                    continue
                nbytes = held_bytes(residency, one)
                merge_bytes = merged * largest // topology.tp if merged > 1 else 0
                fits = nbytes <= _ROOM * memory
                ways.append(Way(topology, residency, merge_bytes, kept, step_s(residency, one), nbytes, fits))
    ways.sort(key=lambda way: (not way.fits, way.step_s))
    adamw = next(way for way in ways if way.residency == "adamw")
    muon = [way for way in ways if way.residency != "adamw"]
    # Of merging, what is faster than without by more than nobody should care for.
    plain = {(way.topology, way.kept, way.residency): way.step_s for way in muon if not way.merge_bytes}
    muon = [
        way
        for way in muon
        if not way.merge_bytes or way.step_s < (1 - _TIE * ERROR) * plain[way.topology, way.kept, way.residency]
    ]
    fitting = [way for way in muon if way.fits] or muon
    equal = tuple(_within(ERROR, fitting))
    taken = min(_within(ERROR * _TIE, fitting), key=lambda way: way.merge_bytes > 0)
    return Recommendation(tuple(muon), adamw, equal, taken, tuple(b.name for b in scenario.workload.blocks))


def _within(error: float, ways: Sequence[Way]) -> list[Way]:
    """The first, which is the fastest, and those that take less than ``error`` longer."""
    return [way for way in ways if way is ways[0] or way.step_s / ways[0].step_s - 1 < error]


def meshes(given: Topology) -> Iterator[Topology]:
    """Sharded over all ranks, and replicas that are sharded over 1, 2, 4, … nodes' ranks, or parts of a node."""
    data = given.world // given.tp
    per_node = max(1, given.gpus_per_node // given.tp)
    shards = {data, *(per_node * 2**i for i in range(16))}
    for shard in sorted(shards):
        if shard <= data and data % shard == 0 and shard % given.ep == 0:
            yield replace(given, replicate=data // shard)


def held_bytes(residency: Literal["dedicated", "exchanged", "adamw"], scenario: Scenario) -> float:
    """Weights, gradients, optimizer state and buffers of the rank that holds most.

    fp32 weight, gradient and one moment of a matrix, two of everything else, and whole weights in what travels: two of
    the largest block, or all that are kept. Dedicated owners hold what they own and stand in for, and two buffers of
    gradients, as docs/communication.md says.
    """
    topology, workload = scenario.topology, scenario.workload
    blocks = (*workload.blocks, workload.ends)
    whole = [b.matrix_elements - (1 - 1 / topology.ep) * b.expert_elements for b in workload.blocks]
    two, every = 2 * max(whole) / topology.tp, sum(whole) / topology.tp
    matrices = sum(b.matrix_elements for b in blocks) / topology.shard / topology.tp
    others = 16 * sum(b.other_elements for b in blocks) / topology.shard
    buffers = workload.param_bytes * (every if scenario.kept else two)
    if residency != "dedicated":
        return (12 if residency == "exchanged" else 16) * matrices + others + buffers
    held = owned_elements(scenario).sum(axis=(0, 1))
    standins = 0.0
    if topology.replicate > 1 and not scenario.kept:
        standins = workload.param_bytes * float(held.sum(axis=0).max())
    return 12 * float(held.max()) + standins + others + buffers + workload.reduce_bytes * two
