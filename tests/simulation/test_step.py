"""The step and its messages, against steps worked out by hand and against what must hold at any size."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dmuon.solver import CostTable, Matrix, Plan
from dmuon.tools import hardware, simulation

SECOND = 10**9


# Every collective of a kind takes as long as the next.
SLOW = {"broadcast": 3.0, "reduce": 5.0, "all_gather": 4.0, "reduce_scatter": 6.0, "all_reduce": 1.0, "all_to_all": 2.0}
FREE = dict.fromkeys(SLOW, 0.0)
REDUCING = SLOW | {"broadcast": 0.0, "reduce": 50.0, "all_reduce": 0.0}
DEVICE = replace(hardware.HARDWARE["h200"].device, peak_flops=1.0, memory_bandwidth=math.inf)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    figures = getattr(request, "param", SLOW)

    def travel(_: object, kind: str, ring: hardware.Ring, nbytes: float, calls: int = 1) -> tuple[float, float]:
        return 0.0, calls * figures[kind] if ring.size > 1 and nbytes else 0.0

    monkeypatch.setattr(simulation, "travel", travel)


def owned_by(*owners: int, world: int) -> Plan:
    """Matrix ``i`` of block ``i``, 4 × 4 at 7 s, on rank ``owners[i]``."""
    names = [f"b{i}.w" for i in range(len(owners))]
    return Plan(
        owners=dict(zip(names, owners, strict=True)),
        matrices=tuple(Matrix(name, 4, 4, name[:2]) for name in names),
        loads_ns=tuple(7 * SECOND * owners.count(rank) for rank in range(world)),
        bound_ns=1,
        stage="greedy",
        reason="by hand",
    )


def case(*owners: int, world: int = 2, **grid: int) -> simulation.Scenario:
    """Blocks of 10 s forward and 20 s backward, one matrix each; copies and AdamW take no time."""
    blocks = tuple(simulation.Block(f"b{i}", 10.0, 16, 0) for i in range(len(owners)))
    return simulation.Scenario(
        simulation.Workload(blocks, simulation.Block("ends", 0.0, 0, 0), 1),
        owned_by(*owners, world=world),
        CostTable({(4, 4): {1: 7 * SECOND}}),
        replace(hardware.HARDWARE["h200"], device=DEVICE),
        hardware.Topology(world, **grid),
        efficiency=1.0,
        contention=0.0,
    )


TWO = case(0, 1)
KEPT = replace(TWO, kept=True)


@pytest.mark.usefixtures("network")
@pytest.mark.parametrize(
    ("name", "scenario", "seconds"),
    [
        # Fill b0 3; forward 10 + 10 hides the fill of b1; refill b1 3; backward 20 + 20 hides the refill of b0 and the
        # reduction of b1; reduction of b0 5; Newton–Schulz 7.
        ("dedicated", TWO, 3 + 20 + 3 + 40 + 5 + 7),
        ("dedicated", KEPT, 3 + 20 + 40 + 5 + 7),
        # Gather b0 4; the last block is gathered anew for backward; reduce-scatter of b0 6.
        ("adamw", TWO, 4 + 20 + 4 + 40 + 6),
        ("adamw", KEPT, 4 + 20 + 40 + 6),
        ("gather", TWO, 4 + 20 + 4 + 40 + 6 + 2 * 4 + 2 * 7),
        # As AdamW; all ranks add up norms, 1; both momenta go to their owners in one all-to-all, and both updates back.
        ("exchanged", TWO, 4 + 20 + 4 + 40 + 6 + 1 + 2 + 7 + 2),
        # Full copies are not gathered; an all-reduce of gradients 1, and each owner's update goes to the other: 2 x 3.
        ("exchanged", case(0, 1, replicate=2), 60 + 1 + 7 + 2 * 3),
        # The next forward waits for the slowest owner.
        ("dedicated", case(0, 0), 3 + 20 + 3 + 40 + 5 + 2 * 7),
        # Replicas publish and reduce across and fill nothing. Publish b0 3; forward hides that of b1; reduction over
        # replicas 5; Newton–Schulz 7.
        ("dedicated", case(0, 1, replicate=2), 3 + 20 + 40 + 5 + 7),
        # Replicas of shards reduce in two stages. Publish b0 3 and fill it 3; refill b1 3; reduce b0 over shards 5,
        # over replicas 5; Newton–Schulz 7. The fill of b1 waits for its publication, hidden by b0.
        ("dedicated", case(0, 3, world=4, replicate=2), 3 + 3 + 20 + 3 + 40 + 5 + 5 + 7),
        # Tensor parallel ranks share the work.
        ("dedicated", case(0, 1, tp=2), 5 + 5 + 10 + 10 + 7),
    ],
)
def test_steps_by_hand(name: simulation.Program, scenario: simulation.Scenario, seconds: float) -> None:
    assert simulation.step_s(name, scenario) == pytest.approx(seconds)


@pytest.mark.usefixtures("network")
@pytest.mark.parametrize("network", [FREE], indirect=True)
def test_without_communication_a_step_is_its_computation() -> None:
    assert simulation.step_s("dedicated", case(0, 0, 1)) == pytest.approx(90 + 14)
    assert simulation.step_s("adamw", case(0, 0, 1)) == pytest.approx(90)


@pytest.mark.usefixtures("network")
@pytest.mark.parametrize("network", [REDUCING], indirect=True)
def test_two_reductions_may_be_on_their_way() -> None:
    # Backward ends at 50 + 20 + …: b3's reduction starts at 60, each takes 50 and they follow one another.
    assert simulation.step_s("dedicated", case(0, 1, 0, 1)) == pytest.approx(40 + 20 + 4 * 50 + 14)
