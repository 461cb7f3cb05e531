"""One digest from run to run."""

from __future__ import annotations

import warnings

import pytest
from instances import BATCHED, LLAMA_8B, STEEP, Case, decoder, linear_costs, make_matrices, wave_costs

from dmuon.solver import SolveOptions, plan

LLAMA = decoder(40, *LLAMA_8B)
CASES: dict[str, Case] = {
    "heuristic": (make_matrices([9, 7, 5]), 4, linear_costs(70, 110, 130)),
    "column generation": (LLAMA, 64, wave_costs(LLAMA)),
    "batched": (make_matrices([23, 17, 11], blocks=6), 7, BATCHED),
    "many ranks": (make_matrices([93, 71, 55], blocks=30), 40, BATCHED),
}


@pytest.mark.pitfall("P21")
@pytest.mark.parametrize("name", CASES)
def test_all_runs_give_one_digest(name: str) -> None:
    matrices, ranks, costs = CASES[name]
    assert len({plan(matrices, ranks, costs).digest for _ in range(3)}) == 1


@pytest.mark.pitfall("P51")
def test_small_milps_never_run_to_the_time_limit() -> None:
    """Told to take one thread, CBC waited for it until the limit in one of five solves of this very model."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for _ in range(8):
            assert plan(make_matrices([7, 5, 3], blocks=3), 3, STEEP).gap <= 0.01


def test_a_forced_time_out_still_gives_a_whole_plan() -> None:
    matrices, ranks, costs = CASES["many ranks"]
    with pytest.warns(UserWarning, match="best so far"):
        result = plan(matrices, ranks, costs, SolveOptions(gap_target=0.0, time_limit_s=1e-9))
    assert len(result.owners) == len(matrices)
