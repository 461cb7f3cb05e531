"""What relabelling ranks gains in the simulated step, on HSDP grids of one replica per node.

One assignment, three labellings: as the solver leaves it, by the XOR rule over node x GPU, and by ``relabel``. Printed
is the step of the dedicated program in milliseconds, also with as many blocks merged as ``dmuon-plan --recommend``
takes, and the cost that ``relabel`` minimises relative to the first.

    python bench/labels.py config.json ... [--hardware h200] [--nodes 8 32 128]
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dmuon.model.config import read_model
from dmuon.simulation.hardware import HARDWARE
from dmuon.simulation.network import Topology
from dmuon.simulation.programs import simulate
from dmuon.simulation.recommendation import suited_merge_bytes
from dmuon.simulation.scenario import Machine, Scenario
from dmuon.simulation.wave_model import wave_costs
from dmuon.simulation.workload import Workload
from dmuon.solver import CostTable, Matrix, Plan, Rank, SolveOptions, plan
from dmuon.solver.planner import count_table
from dmuon.solver.problem import build_problem
from dmuon.solver.relabel import link_cost, relabel, xor_labels


def labelled(result: Plan, owners: Mapping[str, int], ranks: Sequence[Rank], costs: CostTable) -> Plan:
    problem = build_problem(result.matrices, ranks, costs)
    loads = problem.loads(count_table(problem, result.matrices, owners))
    return replace(result, owners=dict(owners), loads_ns=tuple(loads.tolist()))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL.json")
    parser.add_argument("--hardware", choices=sorted(HARDWARE), default="h200")
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--tokens", type=int, default=4096, help="per rank and step (default 4096)")
    args = parser.parse_args(argv)
    hardware = HARDWARE[args.hardware]
    machine = Machine.of(hardware)
    print(
        f"{'model':<16}{'nodes':>6}{'as solved':>12}{'XOR':>10}{'relabel':>10}"
        f"   merged:{'MiB':>6}{'as solved':>12}{'XOR':>10}{'relabel':>10}   link cost: XOR, relabel"
    )
    for path in args.models:
        workload = Workload.from_config(path, tokens=args.tokens, sequence=min(args.tokens, 4096))
        matrices = [Matrix(m.name, m.rows, m.cols, m.block, 2 * m.rows * m.cols) for m in read_model(path)]
        costs = wave_costs(hardware.device, Counter(m.shape for m in matrices))
        for nodes in args.nodes:
            per_node = hardware.gpus_per_node
            ranks = [Rank(i, node=i // per_node) for i in range(nodes * per_node)]
            # On one node there is nothing to relabel for: these are the solver's own labels.
            solved = plan(matrices, len(ranks), costs, SolveOptions(method="greedy"))
            topology = Topology(len(ranks), per_node, replicate=nodes)
            steps: list[float] = []
            of_merged: list[float] = []
            link: list[int] = []
            for owners in (
                solved.owners,
                xor_labels(solved.owners, ranks),
                relabel(solved.matrices, solved.owners, ranks),
            ):
                scenario = Scenario(workload, labelled(solved, owners, ranks, costs), costs, machine, topology)
                together = suited_merge_bytes(scenario)
                steps.append(1e3 * simulate("dedicated", scenario).step_s)
                merged = simulate("dedicated", replace(scenario, merge_bytes=together)) if together else None
                of_merged.append(1e3 * merged.step_s if merged else steps[-1])
                link.append(link_cost(solved.matrices, owners, ranks))
            print(
                f"{path.stem:<16}{nodes:>6}{steps[0]:>12.2f}{steps[1]:>10.2f}{steps[2]:>10.2f}"
                f"          {together >> 20:>6}{of_merged[0]:>12.2f}{of_merged[1]:>10.2f}{of_merged[2]:>10.2f}"
                f"   {link[1] / link[0]:.3f}, {link[2] / link[0]:.3f}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
