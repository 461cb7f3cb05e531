"""The step and its messages, against steps worked out by hand and against what must hold at any size."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from dmuon.solver import CostTable, Matrix, Plan, Rank, SolveOptions
from dmuon.tools.simulation import hardware, scenario, step

SECOND = 10**9


class Fixed(hardware.Network):
    """Every collective of a kind takes as long as the next."""

    def __init__(self, figures: dict[hardware.Collective, float]) -> None:
        super().__init__(hardware.Link(0.0, 1.0), hardware.Link(0.0, 1.0))
        object.__setattr__(self, "figures", figures)

    def travel(self, kind: hardware.Collective, ring: hardware.Ring, nbytes: float, calls: int = 1) -> hardware.Travel:
        return hardware.Travel(0.0, calls * self.figures[kind] if ring.size > 1 and nbytes else 0.0)


SLOW = Fixed(
    {"broadcast": 3.0, "reduce": 5.0, "all_gather": 4.0, "reduce_scatter": 6.0, "all_reduce": 1.0, "all_to_all": 2.0}
)
FREE = Fixed(dict.fromkeys(SLOW.figures, 0.0))


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


def case(*owners: int, world: int = 2, network: Fixed = SLOW, **grid: int) -> scenario.Scenario:
    """Blocks of 10 s forward and 20 s backward, one matrix each; copies and AdamW take no time."""
    blocks = tuple(scenario.Block(f"b{i}", 10.0, 20.0, 16, 0) for i in range(len(owners)))
    return scenario.Scenario(
        scenario.Workload(blocks, scenario.Block("ends", 0.0, 0.0, 0, 0), 1),
        owned_by(*owners, world=world),
        CostTable({(4, 4): {1: 7 * SECOND}}),
        scenario.Machine(1.0, math.inf, math.inf, network),
        hardware.Topology(world, **grid),
    )


TWO = case(0, 1)
COMPUTING = replace(TWO, machine=replace(TWO.machine, communication_computes=True))
KEPT = replace(TWO, kept=True)
HALVED = replace(TWO, machine=replace(TWO.machine, ns_bytes=2))
REDUCING = Fixed(SLOW.figures | {"broadcast": 0.0, "reduce": 50.0, "all_reduce": 0.0})


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
        # As AdamW; both momenta go to their owners in one all-to-all with one other rank, and both updates back.
        ("exchanged", TWO, 4 + 20 + 4 + 40 + 6 + 2 + 7 + 2),
        # In half precision all ranks add up norms before that: 1.
        ("exchanged", HALVED, 4 + 20 + 4 + 40 + 6 + 1 + 2 + 7 + 2),
        # Full copies are not gathered; an all-reduce of gradients 1, and each owner's update goes to the other: 2 x 3.
        ("exchanged", case(0, 1, replicate=2), 60 + 1 + 7 + 2 * 3),
        # The next forward waits for the slowest owner.
        ("dedicated", case(0, 0), 3 + 20 + 3 + 40 + 5 + 2 * 7),
        # Two reductions may be on their way. Backward ends at 50 + 20 + …: b3's reduction starts at 60, each takes 50
        # and they follow one another.
        ("dedicated", case(0, 1, 0, 1, network=REDUCING), 40 + 20 + 4 * 50 + 14),
        # Replicas publish and reduce across and fill nothing. Publish b0 3; forward hides that of b1; reduction over
        # replicas 5; Newton–Schulz 7.
        ("dedicated", case(0, 1, replicate=2), 3 + 20 + 40 + 5 + 7),
        # Replicas of shards reduce in two stages. Publish b0 3 and fill it 3; refill b1 3; reduce b0 over shards 5,
        # over replicas 5; Newton–Schulz 7. The fill of b1 waits for its publication, hidden by b0.
        ("dedicated", case(0, 3, world=4, replicate=2), 3 + 3 + 20 + 3 + 40 + 5 + 5 + 7),
        # Tensor parallel ranks share the work.
        ("dedicated", case(0, 1, tp=2), 5 + 5 + 10 + 10 + 7),
        # All wait for a rank of half the speed.
        ("adamw", replace(TWO, speed=0.5), 4 + 40 + 4 + 80 + 6),
        # Communication that computes hides nothing.
        ("dedicated", COMPUTING, 4 * 3 + 60 + 2 * 5 + 7),
        ("adamw", COMPUTING, 4 * 4 + 60 + 2 * 6),
        # Without communication a step is its computation.
        ("dedicated", case(0, 0, 1, network=FREE), 90 + 14),
        ("adamw", case(0, 0, 1, network=FREE), 90),
    ],
)
def test_steps_by_hand(name: step.Program, scenario: scenario.Scenario, seconds: float) -> None:
    assert step.step_s(name, scenario) == pytest.approx(seconds)


def test_merged_blocks_communicate_as_one() -> None:
    # Of two owners in one launch: twice 3 and twice 5. Nothing hides the fill and the refill.
    assert step.step_s("dedicated", TWO.merged(2)) == pytest.approx(2 * 3 + 20 + 40 + 2 * 3 + 2 * 5 + 7)
    assert step.step_s("dedicated", TWO.merged(1)) == step.step_s("dedicated", TWO)


def test_the_table_of_messages_by_hand() -> None:
    """Two blocks of a matrix of 16 elements, on ranks 0 and 3 of two replicas of two shards."""
    found = step.messages("dedicated", case(0, 3, world=4, replicate=2))
    assert found == [
        step.Message(purpose, i, group, kind, 16.0 * itemsize)
        for i in (0, 1)
        for purpose, group, kind, itemsize in (
            ("fill", "shard", "broadcast", 2),
            ("reduce", "shard", "reduce", 4),
            ("replicas", "replicate", "reduce", 4),
            ("publish", "replicate", "broadcast", 2),
        )
    ]
    exchanged = [message for message in step.messages("exchanged", TWO) if message.block is None]
    assert exchanged == [
        step.Message("parts", None, "replica", "all_to_all", 16.0 * 4),
        step.Message("updates", None, "replica", "all_to_all", 16.0 * 4),
        step.Message("norms", None, "replica", "all_reduce", 2 * 8),
    ]


def experts(world: int, ep: int, **grid: int) -> scenario.Scenario:
    """One block: a 4 × 4 matrix and eight experts in one tensor, which ranks divide; tokens take 2 s each way."""
    names = ["b0.w", *(f"b0.mlp.experts.up[{i}]" for i in range(8))]
    matrices = tuple(Matrix(name, 4, 4, "b0") for name in sorted(names))
    costs = CostTable({(4, 4): {1: 7 * SECOND}})
    topology = hardware.Topology(world, ep=ep, **grid)
    owners = scenario.plan_owners(matrices, [Rank(i) for i in range(world)], costs, SolveOptions(), topology)
    block = scenario.Block("b0", 10.0, 20.0, 9 * 16, 0, 8 * 16, 64.0)
    workload = scenario.Workload((block,), scenario.Block("ends", 0.0, 0.0, 0, 0), 1)
    return scenario.Scenario(workload, owners, costs, scenario.Machine(1.0, math.inf, math.inf, SLOW), topology)


@pytest.mark.parametrize(
    ("name", "ep", "seconds"),
    [
        # Tokens there and back before forward and backward, 2 s each; each rank has two experts for
        # itself. Gather and reduce-scatter the shared matrix: 4 forward, 4 backward, 6.
        ("adamw", 4, 4 + (4 + 10) + 4 + (4 + 20) + 6),
        # One rank owns the shared matrix beside two experts: 3 broadcast, 5 reduced, three batches.
        ("dedicated", 4, 3 + (4 + 10) + 3 + (4 + 20) + 5 + 3 * 7),
        # Every rank orthogonalizes the shared matrix and its own experts.
        ("gather", 4, 4 + (4 + 10) + 4 + (4 + 20) + 6 + 4 + 3 * 7),
        # Two ranks share four experts: another gather beside the first, by the same link.
        ("adamw", 2, 2 * 4 + (4 + 10) + 2 * 4 + (4 + 20) + 2 * 6),
    ],
)
def test_experts_by_hand(name: step.Program, ep: int, seconds: float) -> None:
    scenario = experts(4, ep)
    assert step.step_s(name, scenario) == pytest.approx(seconds)
    assert step.newton_schulz_s("gather", scenario) == 7 + 56 / ep


def test_experts_that_a_rank_has_whole_are_not_exchanged() -> None:
    assert {m.group for m in step.messages("exchanged", experts(4, 4)) if m.block is None} == {"replica"}
    assert {m.group for m in step.messages("exchanged", experts(4, 2)) if m.block is None} == {
        "replica",
        "expert shard",
    }


def test_contention_is_of_owners_alone() -> None:
    slowed = replace(TWO, machine=replace(TWO.machine, contention=0.1))
    assert step.step_s("adamw", slowed) == step.step_s("adamw", TWO)
    # Beside 3 s of b1's fill, 3 of b0's refill and 5 of b1's reduction behind that.
    assert step.step_s("dedicated", slowed) == pytest.approx(step.step_s("dedicated", TWO) + 0.1 * (3 + 3 + 5))


def test_what_does_not_belong_together_is_named() -> None:
    def fails(message: str, **changes: Any) -> None:
        with pytest.raises(ValueError, match=message):
            replace(TWO, **changes)

    fails("plan is for 2 ranks, topology for 16", topology=hardware.Topology(16))
    fails("block 'b0' has 0 matrix elements", workload=replace(TWO.workload, blocks=TWO.workload.blocks[1:]))
    fails("no cost for shape", costs=CostTable.from_flops([(8, 8)]))
