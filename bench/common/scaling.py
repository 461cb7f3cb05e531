"""What is recommended for a model at every number of ranks, and what it is predicted to cost over the best AdamW."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dmuon.model.config import read_model
from dmuon.solver import Matrix, Rank, SolveOptions, plan
from dmuon.tools.simulation.hardware import HARDWARE, Hardware, Topology
from dmuon.tools.simulation.prediction import ERROR, Way, meshes, recommend
from dmuon.tools.simulation.step import EFFICIENCY, Scenario, Workload
from dmuon.tools.simulation.wave_model import wave_costs


@dataclass(frozen=True, slots=True)
class Grid:
    """What is asked of every model."""

    hardware: str
    worlds: tuple[int, ...]
    tokens: int
    sequence: int
    recompute: bool
    efficiency: float = EFFICIENCY


def scenario_of(path: Path, grid: Grid, world: int) -> Scenario:
    """A model on all ranks."""
    machine: Hardware = HARDWARE[grid.hardware]
    workload = Workload.from_config(path, tokens=grid.tokens, sequence=grid.sequence, recompute=grid.recompute)
    matrices = [Matrix(m.name, m.rows, m.cols, m.block) for m in read_model(path)]
    costs = wave_costs(machine.device, Counter(m.shape for m in matrices))
    topology = Topology(world, machine.gpus_per_node)
    ranks = [Rank(i, i // machine.gpus_per_node) for i in range(world)]
    owners = plan(matrices, ranks, costs, SolveOptions(method="greedy", byte_slack=0.0))
    return Scenario(workload, owners, costs, machine, topology, efficiency=grid.efficiency)


def _place(way: Way) -> str:
    """The mesh, and whether weights are kept."""
    return way.mesh + (", kept" if way.kept else "")


def scaling(models: Sequence[Path], grid: Grid) -> dict[str, Any]:
    """Prints a row per model and size, and returns all ways of each."""
    print(f"{'model':<18}{'ranks':>6}{'AdamW ms':>10}{'mesh':>18} {'residency':<10}  over AdamW")
    rows = []
    for path in models:
        for world in grid.worlds:
            started = time.perf_counter()
            scenario = scenario_of(path, grid, world)
            found = recommend(scenario, [*meshes(scenario.topology)])
            adamw, taken = found.adamw, found.ways[0]
            overhead = taken.step_s / adamw.step_s - 1
            result = taken.over(adamw) if taken.fits else "does not fit"
            print(
                f"{path.stem:<18}{world:>6}{1e3 * adamw.step_s:>10.1f}{_place(taken):>18} "
                f"{taken.residency:<10}  {result}"
                f"   ({time.perf_counter() - started:.0f} s)",
                flush=True,
            )
            rows.append(
                {
                    "model": path.stem,
                    "ranks": world,
                    "adamw_ms": 1e3 * adamw.step_s,
                    "adamw_fits": adamw.fits,
                    "overhead": overhead,
                    "verdict": result,
                    "mesh": _place(taken),
                    "residency": taken.residency,
                    "code": "\n".join(taken.code(found.blocks)),
                    "ways": [
                        {
                            "mesh": _place(way),
                            "residency": way.residency,
                            "step_ms": 1e3 * way.step_s,
                            "gib": way.nbytes / 2**30,
                            "fits": way.fits,
                        }
                        for way in found.ways
                    ],
                }
            )
    return {"settings": asdict(grid), "error": ERROR, "rows": rows}
