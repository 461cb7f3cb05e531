"""Which mesh, residency and merging to take: all of them predicted beside the best AdamW, and one line to paste."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import numpy as np

from dmuon.planning.merging import LineTimes, merge_bytes
from dmuon.simulation.network import AlphaBeta, Topology
from dmuon.simulation.programs import ProgramName, simulate
from dmuon.simulation.scenario import Scenario, merged, owned_elements
from dmuon.simulation.terms import ERROR, verdict

Residency = Literal["dedicated", "exchanged"]

_TIE = 0.1  # of the error: for so much less nobody should set an option
_MOST_TOKENS = 64  # times as many as were asked for
_PRECISION = 0.02  # of tokens that are found
_ROOM = 0.6  # of a device's memory: the rest is for activations, workspaces and fragments
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train.

    Attributes:
        stages: of a pipeline, each on a mesh like this.
        hierarchical: rows communicate in two levels.
        kept: whole weights stay from forward to backward (``reshard_after_forward=False``).
        step_s: predicted.
        adamw_s: of AdamW on the same mesh, kept likewise.
        nbytes: of weights, gradients, optimizer state and buffers on the rank that holds most.
        fits: leaves room on the device.
    """

    topology: Topology
    stages: int
    residency: Residency
    merge_bytes: int
    hierarchical: bool
    kept: bool
    step_s: float
    adamw_s: float
    nbytes: float
    fits: bool

    @property
    def mesh(self) -> str:
        return f"{self.topology.replicate} × {self.topology.shard}"

    @property
    def place(self) -> str:
        """The mesh, and whether weights are kept."""
        return f"{self.mesh}, kept" if self.kept else self.mesh

    def code(self) -> str:
        """What to write."""
        t = self.topology
        named = [(size, name) for size, name in ((t.replicate, "replicate"), (t.shard, "shard")) if size > 1]
        named = named or [(1, "shard")]
        stages, tp = ([(size, name)] if size > 1 else [] for size, name in ((self.stages, "pp"), (t.tp, "tp")))
        dims = [*stages, *named, *tp]
        if dims == [(t.shard, "shard")]:
            mesh = f'init_device_mesh("cuda", ({t.shard},))'
        else:
            sizes, names = zip(*dims, strict=True)
            mesh = f'init_device_mesh("cuda", {sizes}, mesh_dim_names={names})'.replace("'", '"')
            if dims != named:
                data = ", ".join(f'"{name}"' for _, name in named)
                mesh = f"{mesh}[{data}]"
        kept = ", reshard_after_forward=False" if self.kept else ""
        if self.residency == "exchanged":
            sharded = f"[fully_shard(part, mesh=mesh{kept}) for part in (*model.blocks, model)]"
            return f"mesh = {mesh}; {sharded}; optimizer = dmuon.Muon(model)"
        options = [f"merge_bytes={self.merge_bytes}"] if self.merge_bytes else []
        options += ["hierarchical=True"] if self.hierarchical else []
        comm = f", comm=dmuon.CommOptions({', '.join(options)})" if options else ""
        return f"mesh = {mesh}; dmuon.dedicate_params(model, mesh{kept}{comm})"


@dataclass(frozen=True, slots=True)
class Recommendation:
    """All ways, fastest first, and the one to take.

    Attributes:
        adamw_s: AdamW on the mesh that suits it best, of those that fit; on that of ``taken`` if none fits.
        adamw_fits: whether any does.
        equal: ways that fit and whose predicted steps cannot be told from the fastest.
        taken: the first of these; or one of a tenth of the error more whose rows have one level, or blocks are not
            merged. Nobody can tell it from the others; it is compared with an AdamW chosen likewise.
        error: of predicted overheads.
        enough_tokens: per rank, from which on ``taken`` and AdamW cannot be told apart; None where they cannot now, or
            up to 64 times as many do not suffice.
    """

    ways: tuple[Way, ...]
    adamw_s: float
    adamw_fits: bool
    equal: tuple[Way, ...]
    taken: Way
    error: float
    enough_tokens: int | None = None

    @property
    def overhead(self) -> float:
        """Of the way that is taken, over AdamW."""
        return self.taken.step_s / self.adamw_s - 1

    def report(self) -> str:
        """The table of alternatives, and the line to paste, as text for people."""
        what = "ways to train the stage" if self.taken.stages > 1 else "ways to train"
        which = "the best AdamW" if self.adamw_fits else f"AdamW on {self.taken.place}, as none of it fits"
        lines = [
            f"{what}, predicted; over {which} ({1e3 * self.adamw_s:.1f} ms), ± {self.error:.1%}:",
            f"{'mesh':>12} {'residency':<10} {'kept':<4} {'levels':>6} {'merge MiB':>9} {'step ms':>9} "
            f"{'of AdamW here':>14} {'over AdamW':>16} {'GiB':>7}",
        ]
        for way in self.ways:
            mark = " <" if way is self.taken else "" if way.fits else "  does not fit"
            over = verdict(way.step_s / self.adamw_s - 1, self.error)
            lines.append(
                f"{way.mesh:>12} {way.residency:<10} {'yes' if way.kept else '':<4} "
                f"{'2' if way.hierarchical else '':>6} {way.merge_bytes / 2**20:>9.0f} "
                f"{1e3 * way.step_s:>9.1f} {way.step_s / way.adamw_s:>14.3f} {over:>16} {way.nbytes / _GIB:>7.1f}{mark}"
            )
        if not self.taken.fits:
            return "\n".join([*lines, "none of them fits into the memory of a device: add ranks, --tp, --ep or --pp"])
        why = "it is the fastest that fits"
        if len(self.equal) > 1:
            least = min(self.equal, key=lambda way: way.nbytes)
            why = (
                f"it fits, and {len(self.equal) - 1} more are equal to it within the error of the prediction; of all "
                f"these {least.residency} {least.place} holds least"
            )
        if self.enough_tokens is not None:
            lines.append(f"it costs more than AdamW, and is equal from {self.enough_tokens:,} tokens per rank on")
        lines += [f"recommended, because {why}:", f"    {self.taken.code()}"]
        if self.taken.topology.ep > 1:
            flat = ", without hierarchical" if self.taken.hierarchical else ""
            before = "before it " if self.taken.residency == "dedicated" else ""
            lines.append(
                f"    # {before}experts likewise{flat}, over the ranks that hold the same ones: a mesh of their own"
            )
        return "\n".join(lines)


def recommend(scenario: Scenario, memory: float, error: float = ERROR) -> Recommendation:
    """Predict every mesh of whole nodes, both residencies, merging by the latency of a lap, and rows of two levels.

    Args:
        scenario: on any mesh; its plan is kept, for it does not depend on the mesh.
        memory: bytes of a device.
        error: steps that differ by less are equal.
    """
    ways: list[Way] = []
    of_way: dict[Way, tuple[ProgramName, Scenario]] = {}
    best: list[tuple[bool, float, Scenario]] = []
    for topology, kept in product(meshes(scenario.topology), sorted({scenario.gathers_once, True})):
        here = replace(scenario, topology=topology, gathers_once=kept, merge_bytes=0)
        together = replace(here, merge_bytes=suited_merge_bytes(here))
        both = [here, together] if together.merge_bytes else [here]
        of_dedicated = list(both)
        if topology.rails:
            levels = replace(here, hierarchical=True)
            together = replace(levels, merge_bytes=suited_merge_bytes(levels))
            of_dedicated += [levels, together] if together.merge_bytes else [levels]
        adamw, adamw_here = min(
            ((simulate("adamw", merged(one)).step_s, merged(one)) for one in both), key=lambda found: found[0]
        )
        best.append((_adamw_bytes(here) <= _ROOM * memory, adamw, adamw_here))
        for residency, of_residency, held in _RESIDENCIES:
            for one in of_dedicated if residency == "dedicated" else [here]:
                nbytes, step = held(one), simulate(of_residency, one).step_s
                fits = nbytes <= _ROOM * memory
                options = one.merge_bytes, one.hierarchical, kept
                way = Way(topology, one.stages, residency, *options, step, adamw, nbytes, fits)
                ways.append(way)
                of_way[way] = of_residency, one
    ways.sort(key=lambda way: (not way.fits, way.step_s))
    fitting = [way for way in ways if way.fits] or ways
    equal = tuple(_within(error, fitting))
    taken = min(_within(error * _TIE, fitting), key=lambda way: (way.hierarchical, way.merge_bytes > 0))
    of_adamw = sorted(((step, one) for fits, step, one in best if fits), key=lambda found: found[0])
    adamw_s = of_adamw[0][0] if of_adamw else taken.adamw_s
    enough = None
    if taken.fits and of_adamw and taken.step_s / adamw_s - 1 >= error:
        enough = _enough_tokens(*of_way[taken], of_adamw[0][1], error)
    return Recommendation(tuple(ways), adamw_s, bool(of_adamw), equal, taken, error, enough)


def _enough_tokens(program: ProgramName, scenario: Scenario, adamw: Scenario, error: float) -> int | None:
    """Per rank, the fewest of ``scenario``'s or more with which ``program`` is within ``error`` of AdamW, about."""

    def over(factor: float) -> float:
        steps = [
            simulate(name, replace(one, workload=one.workload.scaled(factor))).step_s
            for name, one in ((program, scenario), ("adamw", adamw))
        ]
        return steps[0] / steps[1] - 1

    factor = 2
    while over(factor) >= error:
        factor *= 2
        if factor > _MOST_TOKENS:
            return None
    below, above = factor / 2, float(factor)
    while above / below > 1 + _PRECISION:
        middle = math.sqrt(below * above)
        below, above = (below, middle) if over(middle) < error else (middle, above)
    return math.ceil(above * scenario.workload.tokens)


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


def suited_merge_bytes(scenario: Scenario) -> int:
    """``merge_bytes`` by the blocks in the middle of the model: by how their weights pass rows, or rails and nodes, and
    the columns, side by side.
    """
    network, topology, workload = scenario.machine.network, scenario.topology, scenario.workload
    if not isinstance(network, AlphaBeta):
        return 0
    block = sorted(workload.blocks, key=lambda b: b.matrix_elements)[len(workload.blocks) // 2]
    nbytes = block.matrix_elements * workload.param_bytes // topology.tp
    compute = block.forward_flops / topology.tp / scenario.machine.flops_per_s
    # Of each line its groups, one behind the other, and the part of a block's bytes that passes each.
    row = [("rail", 1 / topology.rails), ("node", 1.0)] if scenario.hierarchical else [("shard", 1.0)]
    lines, groups = [], topology.group_ids()
    for line in (row, [("replicate", 1 / topology.shard)]):
        rings = [(topology.ring(groups[name]), part) for name, part in line]
        if any(ring.size > 1 for ring, _ in rings):
            lap = sum(network.lap(ring) for ring, _ in rings)
            lines.append(LineTimes(lap, sum(part * nbytes / network.bandwidth(ring) for ring, part in rings)))
    return merge_bytes(nbytes, lines, compute)


# -- memory -----------------------------------------------------------------------------------------------------------


def _whole(scenario: Scenario) -> float:
    """Elements of whole weights on one rank while a block computes: two of the largest, or all that are kept."""
    experts = 1 - 1 / scenario.topology.ep
    blocks = [b.matrix_elements - experts * b.expert_elements for b in merged(scenario).workload.blocks]
    return (sum(blocks) if scenario.gathers_once else 2 * max(blocks)) / scenario.topology.tp


def _sharded(scenario: Scenario) -> tuple[float, float]:
    """Elements of one rank's shards: of matrices, and of everything else."""
    topology, workload = scenario.topology, scenario.workload
    blocks = (*workload.blocks, workload.ends)
    return (
        sum(b.matrix_elements for b in blocks) / topology.shard / topology.tp,
        sum(b.other_elements for b in blocks) / topology.shard,
    )


def _adamw_bytes(scenario: Scenario) -> float:
    """fp32 weight, gradient and two moments, and whole weights in what travels."""
    matrices, others = _sharded(scenario)
    return 16 * (matrices + others) + scenario.workload.param_bytes * _whole(scenario)


def _exchanged_bytes(scenario: Scenario) -> float:
    """As AdamW, with one moment for matrices."""
    matrices, others = _sharded(scenario)
    return 12 * matrices + 16 * others + scenario.workload.param_bytes * _whole(scenario)


def _dedicated_bytes(scenario: Scenario) -> float:
    """Masters, gradients and momentum; stand-ins; buffers of weights, and two of gradients.

    As docs/communication.md says, with AdamW's state of the rest.
    """
    topology, workload = scenario.topology, scenario.workload
    held = np.sum([grid for experts in (False, True) for grid in owned_elements(scenario, experts)], axis=0)
    owned, column = float(held.max()), float(held.sum(axis=0).max())
    standins = workload.param_bytes * column if topology.replicate > 1 and not scenario.gathers_once else 0.0
    buffers = workload.param_bytes * _whole(scenario)
    reductions = workload.reduce_bytes * _whole(replace(scenario, gathers_once=False))
    _, others = _sharded(scenario)
    return 12 * owned + standins + 16 * others + buffers + reductions


_RESIDENCIES: tuple[tuple[Residency, ProgramName, Callable[[Scenario], float]], ...] = (
    ("dedicated", "dedicated", _dedicated_bytes),
    ("exchanged", "exchanged", _exchanged_bytes),
)
