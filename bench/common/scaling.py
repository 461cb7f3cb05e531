"""What is recommended for a model at every number of ranks, and what it is predicted to cost over the best AdamW."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dmuon.model.config import read_model
from dmuon.solver import Matrix, Rank, SolveOptions
from dmuon.tools.simulation.hardware import HARDWARE, Hardware, Topology
from dmuon.tools.simulation.prediction import ERROR, recommend, verdict
from dmuon.tools.simulation.scenario import Machine, Scenario, Workload, is_expert, plan_owners
from dmuon.tools.simulation.wave_model import wave_costs

_MANY_EXPERT_ELEMENTS = 10**11  # beyond these a node does not hold all experts


@dataclass(frozen=True, slots=True)
class Grid:
    """What is asked of every model."""

    hardware: str
    worlds: tuple[int, ...]
    tokens: int
    sequence: int
    recompute: bool
    efficiency: float | None = None


def scenario_of(path: Path, grid: Grid, world: int) -> Scenario:
    """A model on all ranks; experts are divided over a node, or over 64 ranks where a node cannot hold them."""
    machine: Hardware = HARDWARE[grid.hardware]
    workload = Workload.from_config(path, tokens=grid.tokens, sequence=grid.sequence, recompute=grid.recompute)
    matrices = [Matrix(m.name, m.rows, m.cols, m.block) for m in read_model(path)]
    costs = wave_costs(machine.device, Counter(m.shape for m in matrices))
    experts = sum(m.rows * m.cols for m in matrices if is_expert(m.name))
    ep = 1 if not experts else 64 if experts > _MANY_EXPERT_ELEMENTS else machine.gpus_per_node
    topology = Topology(world, machine.gpus_per_node, ep=min(ep, world))
    ranks = [Rank(i, i // machine.gpus_per_node) for i in range(world)]
    owners = plan_owners(matrices, ranks, costs, SolveOptions(method="greedy", byte_slack=0.0), topology)
    return Scenario(workload, owners, costs, Machine.from_hardware(machine, grid.efficiency), topology)


def scaling(models: Sequence[Path], grid: Grid) -> dict[str, Any]:
    """Prints a row per model and size, and returns all ways of each."""
    memory = HARDWARE[grid.hardware].device.memory
    print(
        f"{'model':<18}{'ranks':>6}{'ep':>4}{'AdamW ms':>10}{'mesh':>18} {'residency':<10}{'merge MiB':>10}  over AdamW"
    )
    rows = []
    for path in models:
        for world in grid.worlds:
            started = time.perf_counter()
            scenario = scenario_of(path, grid, world)
            found = recommend(scenario, memory)
            taken = found.taken
            result = verdict(found.overhead) if taken.fits else "does not fit"
            print(
                f"{path.stem:<18}{world:>6}{scenario.topology.ep:>4}{1e3 * found.adamw.step_s:>10.1f}{taken.place:>18} "
                f"{taken.residency:<10}{taken.merge_bytes / 2**20:>10.0f}  {result}"
                f"   ({time.perf_counter() - started:.0f} s)",
                flush=True,
            )
            rows.append(
                {
                    "model": path.stem,
                    "ranks": world,
                    "ep": scenario.topology.ep,
                    "adamw_ms": 1e3 * found.adamw.step_s,
                    "adamw_fits": found.adamw.fits,
                    "overhead": found.overhead,
                    "verdict": result,
                    "equal": len(found.equal),
                    "mesh": taken.place,
                    "residency": taken.residency,
                    "code": "\n".join(taken.code(found.blocks)),
                    "ways": [
                        {
                            "mesh": way.place,
                            "residency": way.residency,
                            "merge_bytes": way.merge_bytes,
                            "step_ms": 1e3 * way.step_s,
                            "gib": way.nbytes / 2**30,
                            "fits": way.fits,
                        }
                        for way in found.ways
                    ],
                }
            )
    return {"settings": asdict(grid), "error": ERROR, "rows": rows}
