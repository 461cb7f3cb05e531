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
    def place(self) -> str:
        """The mesh, and whether weights are kept."""
        return f"{self.topology.replicate} × {self.topology.shard}" + (", kept" if self.kept else "")

    def code(self) -> str:
        """What to write."""
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
        if self.residency == "exchanged":
            sharded = f"[fully_shard(part, mesh=mesh{kept}) for part in (*model.blocks, model)]"
            return f"mesh = {mesh}; {sharded}; optimizer = dmuon.Muon(model)"
        comm = f", comm=dmuon.CommOptions(merge_bytes={self.merge_bytes})" if self.merge_bytes else ""
        return f"mesh = {mesh}; dmuon.dedicate_params(model, mesh{kept}{comm})"


@dataclass(frozen=True, slots=True)
class Recommendation:
    """All ways, fastest first, and the one to take.

    Attributes:
        adamw: AdamW on the mesh that suits it best, of those that fit.
        equal: ways that fit and whose predicted steps cannot be told from the fastest.
        taken: the first of these; or one of a tenth of the error more whose blocks are not merged.
    """

    ways: tuple[Way, ...]
    adamw: Way
    equal: tuple[Way, ...]
    taken: Way

    @property
    def overhead(self) -> float:
        """Of the way that is taken, over AdamW."""
        return self.taken.step_s / self.adamw.step_s - 1

    def report(self) -> str:
        """The table of alternatives, and the line to paste, as text for people."""
        best = "the best AdamW" if self.adamw.fits else "AdamW, as none of it fits,"
        step = f"{self.adamw.place}: {1e3 * self.adamw.step_s:.1f} ms"
        lines = [
            f"ways to train, predicted; over {best} ({step}), ± {ERROR:.1%}:",
            f"{'mesh':>18} {'residency':<10} {'merge MiB':>9} {'step ms':>9} {'over AdamW':>16} {'GiB':>7}",
        ]
        for way in self.ways:
            mark = " <" if way is self.taken else "" if way.fits else "  does not fit"
            lines.append(
                f"{way.place:>18} {way.residency:<10} {way.merge_bytes / 2**20:>9.0f} {1e3 * way.step_s:>9.1f} "
                f"{verdict(way.step_s / self.adamw.step_s - 1):>16} {way.nbytes / _GIB:>7.1f}{mark}"
            )
        if not self.taken.fits:
            return "\n".join([*lines, "none of them fits into the memory of a device: add ranks, --tp or --ep"])
        why = "it is the fastest that fits"
        if len(self.equal) > 1:
            least = min(self.equal, key=lambda way: way.nbytes)
            why = (
                f"it fits, and {len(self.equal) - 1} more are equal to it within the error of the prediction; of all "
                f"these {least.residency} {least.place} holds least"
            )
        lines += [f"recommended, because {why}:", f"    {self.taken.code()}"]
        if self.taken.topology.ep > 1:
            before = "before it " if self.taken.residency == "dedicated" else ""
            lines.append(f"    # {before}experts likewise, over the ranks that hold the same ones: a mesh of their own")
        return "\n".join(lines)


def recommend(scenario: Scenario, memory: float) -> Recommendation:
    """Predict every mesh of whole nodes, both residencies, weights kept or not, and merged blocks.

    Args:
        scenario: on any mesh; its plan is kept, for it does not depend on the mesh.
        memory: bytes of a device.
    """
    ways: list[Way] = []
    largest = max(b.matrix_elements for b in scenario.workload.blocks) * scenario.workload.param_bytes
    for merged in (1, *_MERGED):
        together = scenario.merged(merged)
        for topology, kept in product(meshes(scenario.topology), (False, True)):
            one = replace(together, topology=topology, kept=kept)
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
    return Recommendation(tuple(muon), adamw, equal, taken)


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
