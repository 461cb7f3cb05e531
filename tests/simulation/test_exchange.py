"""What is exchanged in a step, against closed forms and docs/communication.md."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmuon.simulation.exchange import Schedule, schedule
from dmuon.simulation.hardware import HARDWARE
from dmuon.simulation.network import AlphaBeta, Topology
from dmuon.simulation.pools import plan_pools, pooled
from dmuon.simulation.scenario import Machine, Scenario
from dmuon.simulation.workload import Block, Workload
from dmuon.solver import CostTable, Matrix, Rank, SolveOptions, plan

SECOND = 10**9
HALF = 2  # bytes of an element


def planned(
    matrices: list[Matrix], topology: Topology, ns_bytes: int = HALF, copy_bytes_per_s: float = math.inf
) -> Schedule:
    costs = CostTable({m.shape: {1: SECOND} for m in matrices})
    elements = sum(m.rows * m.cols for m in matrices)
    workload = Workload((Block("b", 1.0, 2.0, elements, 0),), Block("ends", 0.0, 0.0, 0, 0), 1)
    machine = Machine(1.0, copy_bytes_per_s, math.inf, AlphaBeta.of(HARDWARE["h200"]), ns_bytes=ns_bytes)
    owners = plan(matrices, topology.world, costs, SolveOptions(method="greedy"))
    return schedule(Scenario(workload, owners, costs, machine, topology))


def total(found: Schedule, way: str, side: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Bytes of all rounds by rank, within nodes and between them."""
    return np.sum([getattr(getattr(round_, way), side) for round_ in found.rounds], axis=0)


@settings(max_examples=20, deadline=None)
@given(
    world=st.sampled_from([2, 4, 8, 16]),
    each=st.integers(1, 4),
    scale=st.integers(1, 3),
    itemsize=st.sampled_from([2, 4]),
)
def test_even_shards_send_what_the_formula_says(world: int, each: int, scale: int, itemsize: int) -> None:
    """``(W - 1) / W²`` of all elements each way, on every rank; docs/communication.md."""
    matrices = [Matrix(f"b.{i:03}", 16 * scale, 32, "b") for i in range(each * world)]
    found = planned(matrices, Topology(world), itemsize)
    elements = len(matrices) * 16 * scale * 32
    for way in ("gather", "scatter"):
        for side in ("sent", "received"):
            sums = total(found, way, side).sum(axis=0)
            assert sums == pytest.approx([(world - 1) / world**2 * elements * itemsize] * world)
    assert found.matrices == len(matrices)
    assert sum(float(round_.ns.sum()) for round_ in found.rounds) == pytest.approx(len(matrices))
    assert max(round_.gather.messages for round_ in found.rounds) == world - 1


def test_what_leaves_a_node_is_counted_apart() -> None:
    found = planned([Matrix("b.w", 16, 16, "b")], Topology(4, gpus_per_node=2))
    near, far = total(found, "gather", "received")
    assert (near.max(), far.max()) == (64 * HALF, 128 * HALF)  # from one neighbour, and from two others


@pytest.mark.parametrize("itemsize", [2, 4])
def test_an_owner_pays_no_pass_that_all_ranks_run_over_their_parts(itemsize: int) -> None:
    """Of an update, which takes a second, 32 bytes an element pass; the owner joins parts, and lays them out again."""
    for ranks, seconds in ((4, 1 - (32 - 4 * itemsize) * 256e-6), (1, 1.0)):
        found = planned([Matrix("b.w", 16, 16, "b")], Topology(ranks), itemsize, 1e6)
        times = found.alone + sum(round_.ns for round_ in found.rounds)
        assert times.max() == pytest.approx(seconds), f"{ranks} ranks"


def test_replicas_gather_from_one_copy_which_passes_the_update_on() -> None:
    found = planned([Matrix("b.w", 16, 16, "b")], Topology(4, replicate=2))
    assert total(found, "gather", "received").sum() == 128 * HALF
    assert total(found, "scatter", "sent").sum() == 128 * HALF
    assert [round_.copied for round_ in found.rounds] == [(128 * HALF, 1)]


def test_full_copies_are_not_scattered() -> None:
    found = planned([Matrix(f"b.{i}", 16, 16, "b") for i in range(4)], Topology(4, replicate=4))
    assert not total(found, "gather", "received").any() and not total(found, "scatter", "received").any()
    assert [round_.copied for round_ in found.rounds] == [(4 * 256 * HALF, 4)]  # of each owner one


def test_a_stack_that_is_cut_along_its_experts_needs_no_exchange() -> None:
    stack = [Matrix(f"b.mlp.experts.up[{i}]", 16, 16, "b") for i in range(8)]
    found = planned(stack, Topology(4))
    assert not found.rounds and found.alone.tolist() == [2.0] * 4
    assert planned(stack, Topology(4, ep=2)).alone.tolist() == [2.0] * 4


def test_more_ranks_than_experts_exchange_among_those_that_hold_them() -> None:
    stack = [Matrix(f"b.mlp.experts.up[{i}]", 16, 16, "b") for i in range(4)]
    found = planned(stack, Topology(8, ep=4))
    # Two ranks hold an expert, one of them owns it, half of it travels.
    assert sum(r.gather.received.sum() for r in found.rounds) == 4 * 128 * HALF
    assert max(r.gather.messages for r in found.rounds) == 1
    assert sum(float(r.ns.sum()) for r in found.rounds) == 4.0


def test_fused_experts_are_as_many_matrices() -> None:
    fused = [Matrix(f"b.mlp.experts.gate_up[{i}]", 16, 16, "b") for i in range(16)]
    down = [Matrix(f"b.mlp.experts.down[{i}]", 16, 16, "b") for i in range(8)]
    assert planned([*fused, *down], Topology(4)).alone.tolist() == [6.0] * 4


@pytest.mark.parametrize("ep", [2, 4, 8])
def test_pools_own_within_their_ranks_and_nothing_is_lost(ep: int) -> None:
    topology = Topology(8, ep=ep)
    matrices = [Matrix("b.w", 8, 8, "b"), *(Matrix(f"b.mlp.experts.{i}.up.weight", 8, 8, "b") for i in range(16))]
    costs = CostTable({(8, 8): {1: SECOND}})
    found = plan_pools(*pooled(matrices, [Rank(i) for i in range(8)], topology), costs, SolveOptions())
    for i in range(16):
        assert found.owners[f"b.mlp.experts.{i}.up.weight"] % ep == i * ep // 16
    assert sum(found.loads_ns) == 17 * SECOND
    assert list(found.loads_ns) == [SECOND * list(found.owners.values()).count(rank) for rank in range(8)]
