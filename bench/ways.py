"""Ways to orthogonalize the same matrices on the same ranks: by owners, on each rank, on all together.

``large sharded``: large matrices by all ranks together, the others by owners; ``teams``: large ones by two ranks each;
``auto``: as predicted.

The matrices are sharded by rows over ``--world`` gloo ranks of one thread each. All ways live in one process tree and
take turns, so that drift of the machine hits them alike. Cases: ``small``, many small matrices; ``wide``, one large
matrix among small ones; ``two``, two of them; ``thin``, one that is larger and thinner than these.

Columns; times are medians over rounds in ms, of the slowest rank:

    step()   the optimizer, gradients being there
    pair     the median of step() over that of owners, round by round
    CPU      most processor time that a rank takes in step(), its threads of gloo included: what would be left of step()
             if each rank had a processor of its own, and sent for nothing
    MB in    received by a rank in step(), counted; of an all-reduce twice what is not its own
    seed MB  what the article about sharding Muon estimates: an all-gather for replication, two for owners, three a
             Newton-Schulz step for tensor parallelism, of which two are of the matrix
    seed NS  the part of all Newton-Schulz that it estimates for a rank
    error    largest relative difference of an update from Newton-Schulz in fp64, in the Frobenius norm

    python bench/ways.py --rounds 15
    python bench/ways.py --case wide --rows 1024 --cols 4096
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from common.clock import collect, in_turn, medians
from common.harness import Record, on_ranks, run
from common.ledger import Ledger
from common.options import TurnOptions, option
from common.ranks import over_ranks, timed
from common.results import columns
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dmuon
from dmuon.kernels import orthogonalize, update_scale

OF_LARGE = {"large sharded": "sharded", "teams": "sharded:2"}  # the small ones have owners
WAYS = ("owner", "replicated", "full_replication", "sharded", *OF_LARGE, "auto")
CASES = ("small", "wide", "two", "thin")
NS_STEPS = 5
LR = 1e-2
MB = 1e6
COLUMNS = dict.fromkeys(("step()", "pair", "CPU", "MB in", "seed MB", "seed NS"), ".2f") | {"error": ".1e"}
Shape = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Settings(TurnOptions):
    world: int = 4
    case: str = option("all", choices=("all", *CASES))
    count: int = 32
    side: int = 96
    rows: int = 768
    cols: int = 3072
    thin_rows: int = 512
    thin_cols: int = 16384
    warmup: int = option(2, least=0)


def shapes_of(case: str, settings: Settings) -> list[Shape]:
    large = settings.rows, settings.cols
    among = {"small": [], "wide": [large], "two": [large, large], "thin": [(settings.thin_rows, settings.thin_cols)]}
    return [(settings.side, settings.side)] * settings.count + among[case]


def noise(seed: int, shape: Shape) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Program:
    """Weights of zeros, sharded by rows, with gradients that stay, and their optimizer."""

    def __init__(self, way: str, shapes: Sequence[Shape], mesh: DeviceMesh, costs: str | None) -> None:
        self.way = way
        self.params = [nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, [Shard(0)])) for shape in shapes]
        config = dmuon.create_dtensor_config(costs=costs)
        kinds = ["small" if shape == shapes[0] else "large" for shape in shapes]
        named = [(f"{kind}.{i}", param) for i, (kind, param) in enumerate(zip(kinds, self.params, strict=True))]
        strategy = {"large.*": OF_LARGE[way]} if way in OF_LARGE else way
        self.muon = dmuon.Muon(named, lr=LR, weight_decay=0.0, distributed_config=config, strategy=strategy)
        for i, param in enumerate(self.params):
            param.grad = distribute_tensor(noise(i, tuple(param.shape)), mesh, [Shard(0)])

    def error(self) -> float:
        """Of the first step. Collective."""
        worst = 0.0
        for i, param in enumerate(self.params):
            shape = tuple(param.shape)
            exact = orthogonalize(noise(i, shape).double()) * -LR * update_scale("match_rms_adamw", shape)
            worst = max(worst, float((param.full_tensor().detach() - exact).norm() / exact.norm()))
        return worst


def seed_estimate(program: Program, world: int) -> tuple[float, float]:
    """MB that a rank gets, and its part of all products, as the article counts in fp32 and for large ``world``."""
    elements, here, products = 0, 0.0, 0.0
    for param, one in zip(program.params, program.muon.exchanged(), strict=True):
        numel, square, cost = param.numel(), min(param.shape) ** 2, param.numel() * min(param.shape)
        together = NS_STEPS * (2 * numel + square)
        way, _, size = one.strategy.partition(":")
        elements += {"owner": 2 * numel, "sharded": together}.get(way, numel)
        products += cost
        here += cost if "repli" in way else cost / int(size or world)
    return 4 * elements / MB, here / products


def rows_of(shapes: Sequence[Shape], mesh: DeviceMesh, settings: Settings) -> dict[str, dict[str, float]]:
    ways = [way for way in WAYS if way not in OF_LARGE or len(set(shapes)) > 1]
    programs = {way: Program(way, shapes, mesh, settings.costs) for way in ways}
    rows: dict[str, dict[str, float]] = {way: {} for way in ways}
    for way, program in programs.items():
        program.muon.step()
        rows[way]["error"] = program.error()
        with Ledger() as ledger:
            program.muon.step()
        (received,) = over_ranks([sum(ledger.received.values()) / MB])
        estimate, part = seed_estimate(program, settings.world)
        rows[way] |= {"MB in": received, "seed MB": estimate, "seed NS": part}

    def sample(index: int) -> Mapping[tuple[str, str], float]:
        took = {}
        for program in in_turn(list(programs.values()), index):
            took[program.way, "step()"], took[program.way, "CPU"] = timed(program.muon.step)
        pairs = {(way, "pair"): took[way, "step()"] / took["owner", "step()"] for way in programs}
        return took | pairs

    for (way, column), value in medians(collect(settings.warmup, settings.rounds, sample)).items():
        rows[way][column] = value
    return rows


def worker(rank: int, settings: Settings) -> Record:
    mesh = init_device_mesh("cpu", (settings.world,))
    cases = CASES if settings.case == "all" else (settings.case,)
    shapes = {case: shapes_of(case, settings) for case in cases}
    return {"cases": {case: rows_of(shapes[case], mesh, settings) for case in cases}, "shapes": shapes}


def table(record: Record) -> str:
    parts = []
    for case, rows in record["cases"].items():
        shapes = record["shapes"][case]
        world = record["settings"]["world"]
        last = "x".join(map(str, shapes[-1]))
        parts.append(
            f"{case}: {len(shapes)} matrices, the last one {last}, {world} ranks\n{columns(rows, COLUMNS, 'way')}"
        )
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.exit(run(Settings, __doc__, on_ranks(worker), table))
