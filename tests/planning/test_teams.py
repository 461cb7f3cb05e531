"""Which matrices get several ranks, by prediction alone: no process group is needed for it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from dmuon.planning.cost_cache import NsOptions
from dmuon.planning.cost_lookup import FoundCosts
from dmuon.planning.owner_plan import OwnerPlan
from dmuon.planning.strategies import Choice, Link, choose
from dmuon.solver import CostTable, Matrix, Rank, SolveOptions
from dmuon.solver import plan as solve

LLAMA_8B = {
    "q": (4096, 4096), "k": (1024, 4096), "v": (1024, 4096), "o": (4096, 4096),
    "gate": (14336, 4096), "up": (14336, 4096), "down": (4096, 14336),
}  # fmt: skip
GREEDY = SolveOptions(method="greedy")
NVLINK = Link(1 / 370, 2e4)
NETWORK = Link(1 / 46, 4e4)


def chosen(
    matrices: Sequence[Matrix], world: int, link: Link, starts: Sequence[int] = ()
) -> tuple[dict[str, Choice], OwnerPlan | None, dict[str, float]]:
    def planned(some: Sequence[Matrix], before: Sequence[int]) -> OwnerPlan:
        table = CostTable.from_flops({matrix.shape for matrix in matrices})
        counted = table.with_transfer({m.shape: round(link.ns_per_byte * m.nbytes) for m in some})
        loads = [sum(pair) for pair in zip(before, starts or [0] * world, strict=True)]
        ranks = [Rank(i, i // 8, start_ns=load) for i, load in enumerate(loads)]
        return OwnerPlan.from_solution(solve(some, ranks, counted, GREEDY), FoundCosts(table, "estimated"), counted)

    names = {matrix.name for matrix in matrices}
    of_all = planned(matrices, [0] * world)
    device = torch.device("cpu")
    extra = {"exchange_ns": 2 * link.latency_ns, "carried_ns_per_byte": link.ns_per_byte}
    choices, rest, ranking = choose(matrices, names, (), {}, of_all, planned, link, device, NsOptions(), **extra)
    return choices, rest, dict(ranking)


def matrix(name: str, shape: tuple[int, int]) -> Matrix:
    return Matrix(name, *shape, "", shape[0] * shape[1] * 8)


@pytest.mark.parametrize("link", [NVLINK, NETWORK])
def test_ranks_that_would_own_nothing_take_part_in_large_matrices(link: Link) -> None:
    """Llama-3 8B on 256 ranks has 224 matrices, so that 32 ranks would be idle."""
    matrices = [matrix(f"{layer}.{name}", shape) for layer in range(32) for name, shape in LLAMA_8B.items()]
    choices, rest, ways = chosen(matrices, 256, link)
    assert ways["sharded"] < 0.8 * ways["owner"], ways
    teams = [choice.team for choice in choices.values()]
    assert {len(team) for team in teams} == {2}
    assert all(team[0] % 2 == 0 and team[1] == team[0] + 1 for team in teams)
    assert {name.split(".")[1] for name in choices} >= {"gate", "up", "down"}
    assert rest is not None and len(rest.matrices) + len(choices) == len(matrices)
    used = {rank for team in teams for rank in team} | set(rest.owners.values())
    assert used == set(range(256)), "none is idle"


def test_one_huge_matrix_gets_all_ranks_and_small_ones_have_owners() -> None:
    matrices = [matrix("huge", (8192, 65536)), *(matrix(f"small {i}", (512, 512)) for i in range(16))]
    choices, rest, ways = chosen(matrices, 8, NVLINK)
    assert choices.keys() == {"huge"} and choices["huge"].team == ()
    assert ways["sharded"] < 0.4 * ways["owner"]
    assert rest is not None and len(rest.matrices) == 16


def test_ranks_with_work_of_other_domains_are_in_no_team() -> None:
    huge = [matrix("huge", (4096, 14336))]
    choices, rest, _ = chosen(huge, 4, NVLINK, [5 * 10**6, 5 * 10**6, 0, 0])
    assert choices["huge"].team == (2, 3) and rest is None
