"""``dmuon-plan``: who would own what, how long would the slowest take, and what would a step cost, without a GPU."""

from __future__ import annotations

import argparse
import math
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch

from dmuon.model.config import read_model
from dmuon.planning.cost_cache import CostCache, NsOptions
from dmuon.planning.cost_lookup import FoundCosts, cost_table
from dmuon.planning.owner_plan import OwnerPlan
from dmuon.solver import CostTable, Matrix, Rank, Shape, plan
from dmuon.tools.cli import BadArgument, Parser, count, fitted, removed, require_target
from dmuon.tools.hardware import HARDWARE, Hardware, Topology, wave_costs
from dmuon.tools.simulation import (
    ERROR,
    NS_ERROR,
    Program,
    Scenario,
    Workload,
    held_bytes,
    is_expert,
    newton_schulz_s,
    step_s,
)

_DEFAULT_DEVICE = "h200"
_SOLVER = "leave it out; plans for a run take it in dedicate_params(solve=dmuon.solver.SolveOptions(…))"
_STAGE = "plan one stage: a config.json of its layers, and --world of its ranks"
_REMOVED = {  # and what to write instead
    "--backend": "the CBC that PuLP brings is the only solver, so leave it out",
    "--spread-cap": "every block is spread as far as the makespan allows, so leave it out",
    "--ep": "plan the experts of one rank as a model of its own, or all of them without it",
    "--pp": _STAGE,
    "--micro-batches": _STAGE,
    "--speed": "a step of alike ranks is predicted; give dedicate_params ranks=[1.0, 0.8, …] for others",
    "--memory-gib": "give dedicate_params solve=SolveOptions(byte_slack=0.1, gap_target=0.1), which evens bytes",
    **dict.fromkeys(("--method", "--gap", "--time-limit", "--byte-slack"), _SOLVER),
    "--recompute": "leave it out; it makes all steps longer alike, by a third of what forward and backward take",
    "--efficiency": "write bench/simulate.py --table MODEL.json --efficiency X, which has it",
    "--target": "try other --tokens or --replicate, or --recommend",
    "--set": "write --device with the preset that is nearest, and --costs with what dmuon-profile measured",
    "--compare": "write --verbose, which says what is proven; bench/planner_gaps.py compares plans with others",
    "--owners": "write --json PATH, where each matrix has its owner",
    "--png": "write --verbose, which has the load of each rank",
}
_UNPREDICTED = (
    "no step time is predicted: the costs are another device's than any preset; pass --device to combine them"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan for a model's ``config.json`` at a world size; the exit status of invalid input is 2."""
    return _parser().run(argv, _run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.json is not None:
        require_target("--json", arguments.json)
    machine = HARDWARE[arguments.device or _DEFAULT_DEVICE]
    topology = _topology(arguments, machine)
    matrices = [replace(m, nbytes=2 * m.rows * m.cols) for m in read_model(arguments.model)]  # bf16 travels
    workload = Workload.from_config(arguments.model, tokens=arguments.tokens, sequence=arguments.sequence)
    costs = _costs(arguments.costs, machine, matrices)
    exchanged_costs = costs.table
    if topology.tp > 1:
        table = costs.table.with_transfer({shape: _gather_ns(shape, machine, topology) for shape in costs.table.costs})
        source = f"{costs.source}, gather and scatter over {topology.tp} tensor-parallel ranks added"
        costs = FoundCosts(table, source)
    ranks = [Rank(i, node=i // topology.gpus_per_node) for i in range(topology.world)]
    started = time.perf_counter()
    result = plan(matrices, ranks, costs.table)
    seconds = time.perf_counter() - started
    predicts = arguments.costs == "wave" or arguments.device is not None
    lines: list[str] = []
    if predicts:
        scenario = Scenario(workload, result, exchanged_costs, machine, topology)
        ways = predict(scenario, meshes(topology) if arguments.recommend else [topology])
        lines += [*_answer(ways), "", *_table(ways)]
    else:
        lines += [_UNPREDICTED]
    if arguments.verbose or not predicts:
        lines += ["", f"costs: {costs.source}", result.report()]
        lines += [f"planned in {seconds:.2f} s"]
    # Before anything is written: a full disk must not cost the report.
    print(fitted("\n".join(lines).strip("\n")), flush=True)
    if arguments.json is not None:
        OwnerPlan.from_solution(result, costs).save(arguments.json)
        print(f"wrote {arguments.json}")
    return 0


def _parser() -> Parser:
    parser = Parser("dmuon-plan", __doc__ or "")
    parser.add_argument("model", metavar="MODEL.json", help="a model's config.json, or the folder that holds it")
    grid = parser.add_argument_group("ranks")
    grid.add_argument("--world", type=count, required=True, metavar="N", help="number of ranks")
    grid.add_argument("--nodes", type=count, metavar="N", help="machines (default: as many as the device's nodes fill)")
    grid.add_argument("--replicate", type=count, default=1, metavar="N", help="HSDP replicas (default: 1)")
    grid.add_argument("--tp", type=count, default=1, metavar="N", help="tensor-parallel ranks (default: 1)")
    costs = parser.add_argument_group("costs")
    costs.add_argument("--device", choices=sorted(HARDWARE), help=f"preset (default: {_DEFAULT_DEVICE})")
    costs.add_argument(
        "--costs", default="wave", metavar="wave|flops|PATH", help="the device's wave model, FLOPs, or a cost cache"
    )
    step = parser.add_argument_group("predicted step")
    step.add_argument("--tokens", type=count, default=16384, metavar="N", help="per rank and step (default: 16384)")
    step.add_argument("--sequence", type=count, default=4096, metavar="N", help="tokens per sequence (default: 4096)")
    out = parser.add_argument_group("output")
    out.add_argument("--recommend", action="store_true", help="also try other meshes, and compare all")
    out.add_argument("--json", type=Path, metavar="PATH", help="write the plan, as dedicate_params(plan=PATH) reads it")
    out.add_argument("--verbose", action="store_true", help="the solver's report too: loads and proof")
    for flag, instead in _REMOVED.items():
        parser.add_argument(flag, nargs="?", const="", type=removed(instead), help=argparse.SUPPRESS)
    return parser


def _topology(arguments: argparse.Namespace, machine: Hardware) -> Topology:
    per_node = min(machine.gpus_per_node, arguments.world)
    if arguments.nodes is not None:
        if arguments.world % arguments.nodes:
            raise BadArgument(
                f"--nodes {arguments.nodes} does not divide --world {arguments.world}; change one of them"
            )
        per_node = arguments.world // arguments.nodes
    return Topology(arguments.world, gpus_per_node=per_node, replicate=arguments.replicate, tp=arguments.tp)


def _costs(source: str, machine: Hardware, matrices: Sequence[Matrix]) -> FoundCosts:
    counts: Counter[Shape] = Counter(m.shape for m in matrices)
    if source == "wave":
        return FoundCosts(wave_costs(machine.device, counts), f"estimated: wave model of {machine.device.name}")
    if source == "flops":
        return FoundCosts(CostTable.from_flops(counts), "estimated from FLOPs")
    cache = CostCache.load(source)
    device = torch.device("cuda" if cache.key.sm_count else "cpu")
    table = cost_table(counts, cache.entries, NsOptions(), device)
    return FoundCosts(table, f"measured on {cache.key.device}, cost cache {os.fspath(source)}")


def _gather_ns(shape: Shape, machine: Hardware, topology: Topology) -> int:
    """Nanoseconds to gather one fp32 momentum over the tensor-parallel ranks, and to scatter its update back."""
    link = machine.intra if topology.tp <= topology.gpus_per_node else machine.inter
    nbytes = 4 * shape[0] * shape[1] * (topology.tp - 1) / topology.tp
    return math.ceil(2e9 * ((topology.tp - 1) * link.latency_s + nbytes / link.bandwidth))


# -- what a step would cost, by every way to train --------------------------------------------------------------------

_ROOM = 0.6  # of a device's memory: the rest is for activations, workspaces and fragments
OWN: tuple[Program, ...] = ("dedicated", "exchanged")
_NAMES: dict[Program, str] = {
    "dedicated": "dedicate_params",
    "exchanged": "dmuon.Muon alone",
    "gather": "Muon, gathered everywhere",
    "adamw": "AdamW",
}
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
    """One way to train: a program on the mesh of a scenario, with weights kept or not as that says.

    Attributes:
        step_s, newton_s: predicted, of the step and of Newton–Schulz in it.
        nbytes: of weights, gradients, optimizer state and buffers on the rank that holds most.
    """

    program: Program
    scenario: Scenario
    step_s: float
    newton_s: float
    nbytes: float

    @property
    def fits(self) -> bool:
        """Whether it leaves room on the device."""
        return self.nbytes <= _ROOM * self.scenario.hardware.device.memory

    @property
    def mesh(self) -> str:
        return f"{self.scenario.topology.replicate} × {self.scenario.topology.shard}"

    @property
    def name(self) -> str:
        return _NAMES[self.program] + ", no reshard" * self.scenario.kept

    @property
    def gib(self) -> str:
        return f"{self.nbytes / 2**30:.1f}"

    def over(self, other: Way) -> str:
        """What its step adds to another's, with the error, and whether it is equal to that within the error."""
        overhead = self.step_s / other.step_s - 1
        error = math.hypot(ERROR, (NS_ERROR - 1) * self.newton_s / other.step_s)
        return f"{overhead:+.1%} ± {error:.1%}" + (" (equal)" if abs(overhead) < error else "")

    def code(self) -> list[str]:
        """Lines to paste, with the names of the model's own blocks where these are attributes."""
        t = self.scenario.topology
        dims = {"replicate": t.replicate, "shard": t.shard, "tp": t.tp}
        names = tuple(name for name, size in dims.items() if size > 1 or (name == "shard" and t.replicate == 1))
        sizes = tuple(dims[name] for name in names)
        mesh = f'init_device_mesh("cuda", {sizes}, mesh_dim_names={names})'
        if t.tp > 1:
            mesh += f"[{', '.join(map(repr, names[:-1]))}]"
        mesh = mesh.replace("'", '"')
        kept = ", reshard_after_forward=False" if self.scenario.kept else ""
        lines, shard = [f"mesh = {mesh}"], "fully_shard"
        if self.program == "dedicated":
            lines.append(f"dmuon.dedicate_params(model, mesh{kept})")
            shard = "dmuon.fully_shard"
        stacks = dict.fromkeys(re.sub(r"\.\d+$", "", block.name) for block in self.scenario.workload.blocks)
        if not all(part.isidentifier() for stack in stacks for part in stack.split(".")):
            stacks = {"blocks": None}
        for stack in stacks:
            lines += [f"for block in model.{stack}:", f"    {shard}(block, mesh=mesh{kept})"]
        lines += [f"{shard}(model, mesh=mesh{kept})"]
        return [*lines, "optimizer = dmuon.Muon(model, lr=3e-4)  # the learning rate of your AdamW"]


def predict(scenario: Scenario, tried: Iterable[Topology]) -> list[Way]:
    """All ways on some meshes, with weights kept or not: those that fit first, and then the fastest.

    Args:
        scenario: on any mesh; its plan is kept, for it does not depend on the mesh.
    """
    ways = []
    for topology, kept, program in product(tried, (False, True), _NAMES):
        if program == "gather" and kept:  # what it computes is too long for this to matter
            continue
        one = replace(scenario, topology=topology, kept=kept)
        ways.append(Way(program, one, step_s(program, one), newton_schulz_s(program, one), held_bytes(program, one)))
    return sorted(ways, key=lambda way: (not way.fits, way.step_s))


def best(ways: Iterable[Way], *programs: Program) -> Way:
    """The first way of AdamW or, without ``programs``, of dmuon."""
    return next(way for way in ways if way.program in (programs or OWN))


def meshes(given: Topology) -> Iterator[Topology]:
    """Sharded over all ranks, and replicas that are sharded over 1, 2, 4, … nodes' ranks, or parts of a node."""
    data = given.world // given.tp
    per_node = max(1, given.gpus_per_node // given.tp)
    for shard in sorted({data, *(per_node * 2**i for i in range(16))}):
        if shard <= data and data % shard == 0:
            yield replace(given, replicate=data // shard)


def _answer(ways: Sequence[Way]) -> list[str]:
    """What to take, what it holds, what a step takes, and lines to paste."""
    taken, adamw = best(ways), best(ways, "adamw")
    if not taken.fits:
        return ["none of them fits into the memory of a device: add ranks or --tp"]
    lines = [
        f"take:  {taken.name}, on a mesh of {taken.mesh} ranks (replicas × shards)",
        f"holds: {taken.gib} GiB a rank, against {adamw.gib} of {adamw.name}, on {adamw.mesh}"
        + ("" if adamw.fits else ", which does not fit"),
        f"step:  {1e3 * taken.step_s:.1f} ms, {taken.over(adamw)} over AdamW's {1e3 * adamw.step_s:.1f}",
    ]
    own = [way for way in ways if way.program in OWN and way.fits]
    least = min((way for way in own if way.step_s / taken.step_s - 1 < ERROR), key=lambda way: way.nbytes)
    if least.nbytes < taken.nbytes:
        equal = "equal within the error, with least memory"
        lines.append(f"       ({equal}: {least.name}, on {least.mesh}, {least.gib} GiB)")
    return [*lines, "", *(f"    {line}" for line in taken.code())]


def _table(ways: Sequence[Way]) -> list[str]:
    """Where the step of each way goes, and what it holds."""
    taken, adamw, scenario = best(ways), best(ways, "adamw"), ways[0].scenario
    topology, costs, device = scenario.topology, scenario.costs, scenario.hardware.device
    computes = scenario.workload.flops / scenario.flops_per_s
    shapes = {m.shape for m in scenario.plan.matrices}
    guessed, nodes = len(shapes & set(costs.estimated)), f"{topology.nodes} node" + "s" * (topology.nodes > 1)
    lines = [
        f"predicted: one step on {topology.world} × {device.name}, {nodes}, tp {topology.tp}",
        f"{scenario.workload.tokens:,} tokens per rank; forward and backward take {1e3 * computes:.2f} ms, at "
        f"{scenario.efficiency:.0%} of the peak",
        "Newton–Schulz costs "
        + (f"estimated for {guessed} of {len(shapes)} shape{'s' * (len(shapes) > 1)}" if guessed else "measured"),
        "replicas × shards, fastest first, over the best AdamW; < is taken:",
        "",
        f"{'':<28}{'mesh':>10}{'step ms':>10}{'NS':>9}{'exposed':>9} {'over AdamW':>24}{'GiB':>7}",
    ]
    for way in ways:
        over = "" if way.program == "adamw" else way.over(adamw)
        exposed = way.step_s - computes - way.newton_s
        lines.append(
            f"{way.name:<28}{way.mesh:>10}{1e3 * way.step_s:>10.2f}{1e3 * way.newton_s:>9.2f}{1e3 * exposed:>9.2f} "
            f"{over:>24}{way.gib:>7}" + (" !" if not way.fits else " <" if way is taken else "")
        )
    lines += ["", *_LEGEND]
    if topology.tp > 1:
        lines.append("left out are activations on their way by tensor parallelism: all steps take longer")
    if any(is_expert(m) for m in scenario.plan.matrices):
        lines.append("experts are sharded and gathered like other weights: expert parallelism is not predicted")
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
