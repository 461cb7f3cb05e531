"""The engine and the network model, against small cases worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dmuon.simulation.engine import COMPUTE, Groups, Noise, Simulation
from dmuon.simulation.hardware import Link
from dmuon.simulation.network import AlphaBeta, Collective, Ring, Topology

ALL = Groups(np.zeros(2, dtype=np.int64))


def test_operations_of_one_stream_follow_one_another() -> None:
    sim = Simulation(2)
    sim.compute("a", 1.0)
    assert sim.compute("b", np.array([2.0, 3.0])).tolist() == [3.0, 4.0]


def test_streams_overlap_and_dependencies_do_not() -> None:
    sim = Simulation(1)
    first = sim.compute("a", 2.0)
    beside = sim.run(("fill",), "f", 1.0)
    behind = sim.run(("fill",), "g", 1.0, after=(first,))
    assert (beside[0], behind[0]) == (1.0, 3.0)
    sim.wait(COMPUTE, behind)
    assert sim.compute("b", 1.0)[0] == 4.0


def test_a_collective_waits_for_its_slowest_member_and_no_other_group() -> None:
    sim = Simulation(4)
    ready = sim.compute("a", np.array([1.0, 5.0, 2.0, 3.0]))
    pairs = Groups(np.array([0, 1, 0, 1]))
    assert sim.run(("reduce",), "r", 1.0, after=(ready,), groups=pairs).tolist() == [3.0, 6.0, 3.0, 6.0]


def test_streams_that_share_a_link_take_turns() -> None:
    sim = Simulation(2)
    sim.run(("fill", "link"), "f", 2.0, groups=ALL)
    assert sim.run(("reduce", "link"), "r", 1.0, groups=ALL).tolist() == [3.0, 3.0]
    assert sim.run(("reduce",), "s", 1.0).tolist() == [4.0, 4.0]


def test_spans_show_every_operation() -> None:
    sim = Simulation(2)
    sim.compute("forward", np.array([1.0, 2.0]))
    (span,) = sim.spans
    assert (span.stream, span.name) == (COMPUTE, "forward")
    assert (span.start.tolist(), span.end.tolist()) == ([0.0, 0.0], [1.0, 2.0])


def test_a_straggler_slows_its_computation_only() -> None:
    sim = Simulation(3, Noise(slowdown={1: 2.0}))
    assert sim.compute("a", 1.0).tolist() == [1.0, 2.0, 1.0]
    assert sim.run(("fill",), "f", 1.0).tolist() == [1.0, 1.0, 1.0]


def test_a_link_is_free_again_while_latency_passes() -> None:
    sim = Simulation(2)
    first = sim.run(("fill",), "fill", 5.0, links={"link": 2.0})
    second = sim.run(("reduce",), "reduce", 5.0, links={"link": 2.0})
    third = sim.run(("fill",), "fill", 1.0, links={"link": 1.0})  # behind the first on its stream
    assert [float(end[0]) for end in (first, second, third)] == [5.0, 7.0, 6.0]


def test_a_collective_under_way_slows_computation_beside_it() -> None:
    sim = Simulation(2, contention=0.5)
    sim.run(("gather",), "gather", 9.0, links={"link": 1.0})
    sim.run(("fill",), "fill", 3.0, links={"link": 1.0}, contends=True)  # from 1 to 4
    assert sim.compute("a", 3.0)[0] == 3.0 * 1.5
    assert sim.compute("b", 3.0)[0] == 4.5 + 3.0


def test_noise_repeats_by_seed_and_keeps_the_mean() -> None:
    def ends(seed: int) -> np.ndarray[Any, Any]:
        return Simulation(20_000, Noise(sigma=0.2, seed=seed)).compute("a", 1.0)

    assert np.array_equal(ends(1), ends(1))
    assert not np.array_equal(ends(1), ends(2))
    assert ends(1).mean() == pytest.approx(1.0, abs=0.01)
    assert np.log(ends(1)).std() == pytest.approx(0.2, abs=0.01)


NETWORK = AlphaBeta(intra=Link(1.0, 100.0), inter=Link(10.0, 20.0))


@pytest.mark.parametrize(
    ("kind", "ring", "seconds"),
    [
        ("broadcast", Ring(4, 1), 3 * 1.0 + 400 / 100),
        ("reduce", Ring(4, 1), 3 * 1.0 + 400 / 100),
        ("all_gather", Ring(4, 1), 3 * 1.0 + 3 / 4 * 400 / 100),
        ("reduce_scatter", Ring(4, 1), 3 * 1.0 + 3 / 4 * 400 / 100),
        ("all_reduce", Ring(4, 1), 2 * (3 * 1.0 + 3 / 4 * 400 / 100)),
        # Two nodes of two: one hop between, two inside; two adapters leave each node.
        ("broadcast", Ring(4, 2), 10.0 + 2 * 1.0 + 400 / 40),
        # As many adapters as the intra-node link can feed, and no more.
        ("broadcast", Ring(16, 2), 10.0 + 14 * 1.0 + 400 / 100),
        # Tree: two levels of nodes beat the three hops of a ring.
        ("all_reduce", Ring(4, 4), 2 * (2 * 10.0 + 3 / 4 * 400 / 20)),
        ("broadcast", Ring(1, 1), 0.0),
        # A rank starts three messages; what it sends leaves by its own adapter.
        ("all_to_all", Ring(4, 1), 1.0 + 1.25e-6 + 400 / 100),
        ("all_to_all", Ring(4, 2), 10.0 + 1.25e-6 + 400 / 20),
    ],
)
def test_collectives_by_hand(kind: Collective, ring: Ring, seconds: float) -> None:
    assert NETWORK.travel(kind, ring, 400.0).seconds == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        ("broadcast", 2 * 1.0),  # those of several owners go around together
        ("all_gather", 2 * 3 * 1.0),  # every one goes around
    ],
)
def test_two_more_collectives_by_hand(kind: Collective, seconds: float) -> None:
    once, thrice = (NETWORK.travel(kind, Ring(4, 1), 400.0, calls).seconds for calls in (1, 3))
    assert thrice - once == pytest.approx(seconds)


def test_grid_of_groups() -> None:
    grid = Topology(world=16, gpus_per_node=8, replicate=2, tp=2)
    assert (grid.shard, grid.nodes) == (4, 2)
    shard, replicate, data, *_ = grid.group_ids().values()
    assert [int(r) for r in np.flatnonzero(shard == shard[0])] == [0, 2, 4, 6]
    assert [int(r) for r in np.flatnonzero(replicate == replicate[3])] == [3, 11]
    assert grid.ring(shard) == Ring(4, 1)
    assert grid.ring(replicate) == Ring(2, 2)
    assert grid.ring(data) == Ring(8, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Simulation(2, Noise(sigma=-0.1)), "sigma=-0.1 must be at least 0"),
        (lambda: Simulation(2, Noise(slowdown={0: 0.0})), "rank 0 has factor 0.0"),
        (lambda: Simulation(2, Noise(slowdown={5: 1.5})), "there is no rank 5 among 2"),
        (lambda: Topology(world=0), "world=0 must be a whole number"),
        (lambda: Topology(world=8, replicate=3), "replicate=3 × tp=1 does not divide world=8"),
        (lambda: Topology(world=12), "gpus_per_node=8 does not divide world=12"),
        (lambda: Topology(world=24, tp=3), "tp=3 and gpus_per_node=8: one must divide the other"),
    ],
)
def test_bad_noise_and_bad_grids_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
