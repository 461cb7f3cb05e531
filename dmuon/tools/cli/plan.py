"""``dmuon-plan``: who would own what, how long would the slowest take, and what would a step cost, without a GPU."""

from __future__ import annotations

import argparse
import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from dmuon.model.config import read_model
from dmuon.planning.cost_cache import CostCache, NsOptions
from dmuon.planning.cost_lookup import FoundCosts, cost_table
from dmuon.planning.owner_plan import OwnerPlan
from dmuon.solver import CostTable, Matrix, Rank, Shape, plan
from dmuon.tools.cli import BadArgument, Parser, count, fitted, removed, require_target
from dmuon.tools.simulation.hardware import HARDWARE, Hardware, Topology, wave_costs
from dmuon.tools.simulation.prediction import meshes, recommend
from dmuon.tools.simulation.step import Scenario, Workload

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
        found = recommend(scenario, [*meshes(topology)] if arguments.recommend else [topology])
        lines += [*found.answer(), "", found.table]
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


if __name__ == "__main__":
    raise SystemExit(main())
