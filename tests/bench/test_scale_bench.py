"""What one rank does hardly grows with the number of ranks: counted, in a pretended process group, at small sizes."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import pytest

MODULE = "scale"
RANKS, MATRICES, MORE = (8, 512), 64, 160
# Exponents of calls of functions, with ranks. Some lists of all ranks are made once for all matrices that lie alike, or
# in the first step, in which it is worked out what travels between them.
MOST = {"build": 0.35, "save optimizer": 0.45, "load optimizer": 0.5, "save model": 0.2, "load model": 0.35}
MOST |= {"first step": 0.2, "mismatched build": 0.3, "mismatched load model": 0.5, "mismatched load optimizer": 0.75}
MOST_OF_ANY_OTHER = 0.05
MOST_OF_ONE_MORE = {  # calls of functions for each further matrix, torch's own among them
    "dedicated": {"step": 20, "save optimizer": 90, "load optimizer": 215, "save model": 90, "load model": 290}
    | {"mismatched build": 1000, "mismatched load model": 260, "mismatched load optimizer": 160},
    "exchanged": {"step": 40, "save optimizer": 80, "load optimizer": 195}
    | {"mismatched build": 900, "mismatched load optimizer": 125},
}
MOST_OF_EXPERTS = {"load optimizer": 0.6}  # digests of all ranks, beside little else


@cache
def counted(bench: ModuleType, residency: str, ranks: int, matrices: int) -> dict[str, dict[str, float]]:
    """By phase, in a process of its own."""
    found: dict[str, dict[str, float]] = bench.run(residency, ranks, matrices, True)
    return found


@pytest.mark.slow
@pytest.mark.pitfall("P79")
@pytest.mark.parametrize("residency", ["dedicated", "exchanged", "experts"])
def test_calls_of_one_rank_hardly_grow_with_ranks(bench: ModuleType, residency: str) -> None:
    sizes = [counted(bench, residency, ranks, MATRICES) for ranks in RANKS]
    for phase in sizes[0]:
        few, many = (size[phase] for size in sizes)
        grown = bench.exponent(RANKS, [few["work"], many["work"]])
        most = MOST | MOST_OF_EXPERTS if residency == bench.EXPERTS else MOST
        assert grown <= most.get(phase, MOST_OF_ANY_OTHER), f"{phase}: {few} to {many}"
        if "save" in phase or "load" in phase:
            assert many["collectives"] <= (6 if "mismatched" in phase else 4), f"{phase}: {many}"
        if phase != "build":
            assert many["collectives"] <= max(few["collectives"], 2 * MATRICES + 1), phase


@pytest.mark.slow
@pytest.mark.parametrize("residency", MOST_OF_ONE_MORE)
def test_a_further_matrix_costs_few_calls(bench: ModuleType, residency: str) -> None:
    few, many = (counted(bench, residency, RANKS[0], matrices) for matrices in (MATRICES, MORE))
    for phase, most in MOST_OF_ONE_MORE[residency].items():
        more = (many[phase]["work"] - few[phase]["work"]) / (MORE - MATRICES)
        assert more <= most, f"{phase}: {more:.0f} calls for each further matrix"
