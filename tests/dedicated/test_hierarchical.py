"""Rows over several nodes that communicate in two levels: the same weights, fewer links one after the other."""

from __future__ import annotations

import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier, local
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.assertions import about, assert_equal_weights, assert_same_bits, assert_same_tensors
from harness.dedicated_toy import dedicate, refused
from harness.hosts import on_hosts
from harness.network import full_state, loss_of
from harness.oracle import reference_weights
from harness.pool import RankPool
from harness.topologies import Laid, lay, runtime_of
from harness.toy import OPTIONS, batch, build
from harness.traffic import Amount, Traffic
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import dmuon
from dmuon.comm import lines
from dmuon.comm.lines import Line, gather, line_in_levels, reduce, scratch
from dmuon.comm.monitor import Monitor
from dmuon.layout.buffer import Transport, lay_spans
from dmuon.layout.topology import GlobalRank, Position, node_grid
from dmuon.report.accounting import expected_traffic

TWO_BY_TWO = "aabb"  # the host of each rank
ACROSS = "abba"


def laid_on(rank: int, name: str, hosts: str, **options: Any) -> Laid:
    with on_hosts(rank, hosts):
        return lay(name, build(), **options)


# -- one line -----------------------------------------------------------------------------------------------------

# Transports, and elements by position.
PARTS: list[tuple[Transport, dict[int, int]]] = [
    ("broadcast", {0: 3, 1: 5, 2: 2, 3: 1}),
    ("broadcast", {1: 4}),
    ("broadcast", {0: 2, 3: 4}),
    ("single", {0: 3, 1: 5, 2: 2, 3: 1}),
    ("single", {2: 4}),
    ("single", {}),
]
Arrived = tuple[dict[int, Tensor], Tensor]


def gather_and_reduce(rank: int, line: Line, transport: Transport, sizes: dict[int, int]) -> Arrived:
    """What arrives of values whose averages are exact in every order: all parts, and this rank's average."""
    spans = lay_spans(transport, sizes, 4, order=line.order)
    region = torch.full((spans.size,), -1.0)
    parts = {i: region[a:b] for i, (a, b) in spans.filled.items()}
    if rank in parts:
        parts[rank].copy_(torch.arange(parts[rank].numel()) + 100.0 * rank)
    for work in gather(transport, region, parts, line):
        assert work is not None
        work.wait()
    region, averaged = scratch(transport, spans, torch.float32, torch.device("cpu"))
    for i, part in averaged.items():
        part.copy_(torch.arange(part.numel()) * 16.0 + 1000 * i + 4 * rank)
    mine, works = reduce(transport, region, averaged, line)
    for work in works:
        assert work is not None
        work.wait()
    return parts, mine


def both_ways(rank: int, _world: int, hosts: str) -> list[tuple[Arrived, Arrived]]:
    """In one level, and in two."""
    laid = [
        laid_on(rank, "1d-4-two-lines", hosts, comm=dmuon.CommOptions(hierarchical=hierarchical))
        for hierarchical in (False, True)
    ]
    lines = [runtime_of(one.model).comm.row.gradients for one in laid]
    found = [[gather_and_reduce(rank, line, *case) for line in lines] for case in PARTS]
    return [(flat, levels) for flat, levels in found]


@pytest.mark.parametrize("hosts", [TWO_BY_TWO, pytest.param(ACROSS, marks=pytest.mark.slow)])
def test_two_levels_bring_what_one_brings(ranks: RankPool, hosts: str) -> None:
    for rank, cases in enumerate(ranks(4, both_ways, hosts)):
        for (transport, sizes), ((parts, average), (in_levels, average_in_levels)) in zip(PARTS, cases, strict=True):
            with about((transport, sizes, rank)):
                assert_same_tensors(in_levels, parts)
                for i, size in sizes.items():
                    assert torch.equal(in_levels[i][:size], torch.arange(size) + 100.0 * i)
                assert torch.equal(average_in_levels, average)
                if rank in sizes:
                    expected = torch.arange(sizes[rank]) * 16.0 + 1000 * rank + 6
                    assert torch.equal(average_in_levels[: sizes[rank]], expected)


# -- six positions, of which nodes and ranks per node differ --------------------------------------------------------


@dataclass(eq=False)
class Meeting:
    """A process group of threads, which is as many barriers with a value of each rank."""

    ranks: tuple[int, ...]
    values: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = Barrier(len(self.ranks), timeout=20)

    def size(self) -> int:
        return len(self.ranks)

    def meet(self, value: Tensor) -> list[Tensor]:
        """Of all ranks, in their order."""
        self.values[here.rank] = value.clone()
        self.barrier.wait()
        found = [self.values[rank] for rank in self.ranks]
        self.barrier.wait()
        return found


class Done:
    def wait(self) -> None:
        pass


here = local()


def fake_collectives(patch: pytest.MonkeyPatch) -> None:
    def all_gather(out: Tensor, own: Tensor, *, group: Meeting, async_op: bool) -> Done:
        out.copy_(torch.cat(group.meet(own)))
        return Done()

    def reduce_scatter(out: Tensor, whole: Tensor, op: Any, *, group: Meeting, async_op: bool) -> Done:
        average = torch.stack(group.meet(whole)).mean(0)
        whole.fill_(math.nan)  # garbage
        out.copy_(average.chunk(group.size())[group.ranks.index(here.rank)])
        return Done()

    def broadcast(part: Tensor, src: int, group: Meeting, async_op: bool) -> Done:
        part.copy_(group.meet(part)[group.ranks.index(src)])
        return Done()

    def reduce_(part: Tensor, target: int, op: Any, group: Meeting, async_op: bool) -> Done:
        average = torch.stack(group.meet(part)).mean(0)
        assert target in group.ranks
        part.copy_(average if here.rank == target else torch.full_like(part, math.nan))
        return Done()

    patch.setattr(lines, "all_gather_single", all_gather)
    patch.setattr(lines, "reduce_scatter_single", reduce_scatter)
    patch.setattr(lines, "in_one_launch", lambda _group, _device, launches: [launch() for launch in launches])
    patch.setattr(dist, "broadcast", broadcast)
    patch.setattr(dist, "reduce", reduce_)


@pytest.mark.parametrize("hosts", ["aaabbb", "aabbcc", "abcabc", "abbacc"])
@pytest.mark.parametrize("transport", ["broadcast", "single"])
def test_nodes_and_ranks_of_a_node_are_not_taken_for_each_other(
    monkeypatch: pytest.MonkeyPatch, transport: Transport, hosts: str
) -> None:
    fake_collectives(monkeypatch)
    row, sizes = tuple(map(GlobalRank, range(6))), {0: 3, 1: 5, 3: 2, 4: 1}
    grid = node_grid(row, dict(zip(row, hosts, strict=True)))
    groups = [{ranks: Meeting(ranks) for ranks in (*grid.rails, *grid.nodes)} for _ in range(2)]

    def both(rank: GlobalRank) -> None:
        here.rank = rank
        weights, gradients = (
            line_in_levels(row, Position(rank), grid, None, made[grid.rail_of(rank)], made[grid.node_of(rank)])
            for made in groups
        )
        assert [grid.rails.index(grid.rail_of(row[i])) for i in weights.firsts] == sorted(
            range(len(grid.rails)), key=lambda rail: min(grid.rails[rail])
        ), "one position on each rail"
        spans = lay_spans(transport, sizes, 6, order=weights.order)
        region = torch.full((spans.size,), -1.0)
        parts = {i: region[a:b] for i, (a, b) in spans.filled.items()}
        if rank in parts:
            parts[rank].copy_(torch.arange(parts[rank].numel()) + 100.0 * rank)
        gather(transport, region, parts, weights)
        for i, size in sizes.items():
            assert torch.equal(parts[i][:size], torch.arange(size) + 100.0 * i)
        region, averaged = scratch(transport, spans, torch.float64, torch.device("cpu"))
        for i, part in averaged.items():
            part.copy_(torch.arange(part.numel()) + 1000 * i + 12 * rank)
        mine, _ = reduce(transport, region, averaged, gradients)
        if rank in sizes:
            torch.testing.assert_close(
                mine[: sizes[rank]], torch.arange(sizes[rank], dtype=torch.float64) + 1000 * rank + 30
            )

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(both, row))


@pytest.mark.parametrize(("waiting_fails", "launch_fails", "error"), [(True, "", "gone"), (False, "node", "no link")])
def test_what_was_started_is_handed_over_when_a_second_leg_fails(
    monkeypatch: pytest.MonkeyPatch, waiting_fails: bool, launch_fails: str, error: str
) -> None:
    waited: list[int] = []

    class Under:
        def __init__(self, number: int) -> None:
            self.number = number

        def wait(self) -> None:
            waited.append(self.number)
            if waiting_fails and self.number == 0:
                raise RuntimeError(error)

    def launch(group: str, *_: object) -> list[Any]:
        if group == launch_fails:
            raise RuntimeError(error)
        return works

    works, left = [Under(0), Under(1)], Left()
    row = tuple(map(GlobalRank, range(4)))
    grid = node_grid(row, dict(zip(row, TWO_BY_TWO, strict=True)))
    line: Any = line_in_levels(row, Position(0), grid, None, "rail", "node")
    parts = {i: torch.zeros(1) for i in range(4)}
    monkeypatch.setattr(lines, "in_one_launch", launch)
    cpu = torch.device("cpu")
    monitor = Monitor(row[:1], row[0], dist.HashStore(), "a", device=cpu, groups=left, patience=0.1)
    with pytest.raises(dmuon.CollectiveError, match=f"fill a failed: {error}"):
        monitor.start("fill", "fill a", lambda: gather("broadcast", torch.zeros(4), parts, line))
    assert left.works == works and waited == [0, 1]


@dataclass
class Left:
    works: list[Any] = field(default_factory=list)

    def leave(self, works: Iterable[Any]) -> None:
        self.works.extend(works)


def test_lines_of_one_level_and_of_two_differ() -> None:
    row = tuple(map(GlobalRank, range(4)))
    grid = node_grid(row, dict(zip(row, TWO_BY_TWO, strict=True)))
    levels = line_in_levels(row, Position(0), grid, None, "rail", "node")
    assert levels != Line(row, Position(0), None)
    assert hash(levels) == hash(line_in_levels(row, Position(0), grid, None, "rail", "node"))


# -- training -----------------------------------------------------------------------------------------------------


def train(rank: int, _world: int, hosts: str, hierarchical: bool, transport: Transport, keep: bool) -> Any:
    """Weights after some steps, and the collectives of the last one beside what the formula says."""
    comm = dmuon.CommOptions(hierarchical=hierarchical, transport=transport)
    laid = laid_on(rank, "1d-4-two-lines", hosts, comm=comm, keep=keep)
    optimizer = laid.optimizer()
    for step in range(3):
        with Traffic() as traffic:
            optimizer.zero_grad()
            laid.backward(step)
            optimizer.step()
    runtime = runtime_of(laid.model)
    expected = expected_traffic(runtime)
    wanted = {p: Amount(expected.calls[p], expected.nbytes[p]) for p in ("fill", "reduce")}
    found = {p: amount for p, amount in traffic.of(runtime.comm).items() if p in wanted}
    return full_state(laid.model), found, wanted


@pytest.mark.parametrize(
    ("transport", "keep", "hosts"),
    [
        ("broadcast", False, TWO_BY_TWO),
        pytest.param("single", True, TWO_BY_TWO, marks=pytest.mark.slow),
        pytest.param("single", False, ACROSS, marks=pytest.mark.slow),
    ],
)
def test_training_in_two_levels_equals_one_process(
    ranks: RankPool, transport: Transport, keep: bool, hosts: str
) -> None:
    """Each collective is counted, and the bytes between nodes are those of one rail."""
    found = ranks(4, train, hosts, True, transport, keep)
    assert_same_bits([weights for weights, _, _ in found])
    assert_equal_weights(found[0][0], reference_weights(3))
    for _, counted, wanted in found:
        assert counted == wanted
    flat = ranks(4, train, hosts, False, transport, keep)
    assert_equal_weights(found[0][0], flat[0][0], 1e-6)
    for purpose in ("fill", "reduce"):
        one, two = (sum(found[purpose].nbytes for _, found, _ in runs) for runs in (flat, found))
        assert two == one * 3 / 2, "within nodes all bytes, along each of two rails its own"


def train_replicas(rank: int, _world: int) -> Any:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    model = build()
    with on_hosts(rank, "aabbccdd"):
        dedicate(model, mesh, comm=dmuon.CommOptions(hierarchical=True))
    optimizer = dmuon.Muon(model, **OPTIONS)
    for step in range(3):
        optimizer.zero_grad()
        tokens, targets = (tensor.chunk(4)[rank % 4] for tensor in batch(step))
        loss_of(model, tokens, targets).backward()
        optimizer.step()
        with torch.no_grad():  # which ranks of a row compare
            loss_of(model, tokens, targets)
    return full_state(model)


@pytest.mark.slow
def test_each_replica_has_a_row_of_two_levels() -> None:
    pool = RankPool(8)
    try:
        found = pool(8, train_replicas)
    finally:
        pool.close()
    assert_same_bits(found)
    assert_equal_weights(found[0], reference_weights(3))


def refuse(rank: int, _world: int, hosts: str) -> None:
    with on_hosts(rank, hosts):
        refused(build(), comm=dmuon.CommOptions(hierarchical=True))


@pytest.mark.parametrize(
    ("hosts", "where"),
    [
        ("aaab", "3 of them on host 'a' and 1 on 'b'"),
        pytest.param("aaaa", "all on host 'a'", marks=pytest.mark.slow),
        pytest.param("abcd", "one on each of their hosts", marks=pytest.mark.slow),
    ],
)
def test_rows_that_have_no_two_levels_are_refused_on_all_ranks(ranks: RankPool, hosts: str, where: str) -> None:
    message = f"comm.hierarchical=True: the row of ranks 0, 1, 2, 3 has {where}; "
    ranks(4, refuse, hosts, expect=ValueError, match=message)
