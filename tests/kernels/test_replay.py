"""Replays of CUDA graphs, with a stand-in for ``torch.cuda``: what is recorded, when, and what must not happen then."""

from __future__ import annotations

import gc
import importlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dmuon.kernels import Variant, drop_graphs, orthogonalize

newton_schulz = importlib.import_module("dmuon.kernels.newton_schulz")
replay = importlib.import_module("dmuon.kernels.replay")
streams = importlib.import_module("dmuon.kernels.device")

EAGER = Variant("gram", (2,), "torch", 8)
REPLAYED = replace(EAGER, replay=True)
# What waits for the whole device, or gives memory back to the driver, which does so too.
DEVICE_WIDE = ("synchronize", "empty_cache")


class Cuda:
    """As ``torch.cuda``, of a device that is the CPU: operations run at once, and what was captured when replayed.

    Attributes:
        calls: by name, in order, with the stream on which they were made.
        fails: the call that does, in a capture.
        uses: of each pool, how many graphs lie in it. The allocator refuses one that had some and has none any more.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.stream_name = "main"
        self.graphs: list[weakref.ref[Graph]] = []
        self.capturing: Graph | None = None
        self.fails = ""
        self.uses = {0: 0}
        self.handles = itertools.count(1)

    def note(self, name: str) -> None:
        self.calls.append((name, self.stream_name))

    def named(self, *names: str) -> list[tuple[str, str]]:
        return [call for call in self.calls if call[0] in names]

    @contextmanager
    def device(self, _device: torch.device) -> Iterator[None]:
        yield

    def Stream(self, _device: Any = None, **_: Any) -> Stream:
        self.note("Stream")
        return Stream(self, "beside")

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.stream_name = self.stream_name, stream.name
        try:
            yield
        finally:
            self.stream_name = before

    def current_stream(self, _device: Any = None) -> Stream:
        return Stream(self, self.stream_name)

    def graph_pool_handle(self) -> int:
        self.note("graph_pool_handle")
        return next(self.handles)

    def synchronize(self, _device: Any = None) -> None:
        self.note("synchronize")

    def empty_cache(self) -> None:
        self.note("empty_cache")

    def is_current_stream_capturing(self) -> bool:
        return self.capturing is not None

    def CUDAGraph(self) -> Graph:
        return Graph(self)


class Stream:
    def __init__(self, cuda: Cuda, name: str) -> None:
        self.cuda = cuda
        self.name = name

    def wait_stream(self, other: Stream) -> None:
        self.cuda.calls.append((f"wait for {other.name}", self.name))


class Graph:
    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.pool, self.ended = 0, False
        self.programs: list[Callable[[], object]] = []

    def capture_begin(self, pool: int, capture_error_mode: str = "global", **_: object) -> None:
        uses = self.cuda.uses
        if uses.get(pool) == 0:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        in_use = {handle for handle, count in uses.items() if count}
        assert in_use <= {pool}, "graphs share a workspace, and so the memory in which it lies"
        uses[pool] = uses.get(pool, 0) + 1
        self.pool = pool
        assert capture_error_mode == "thread_local", "other threads ask for events meanwhile"
        self.cuda.note("capture_begin")
        self.cuda.graphs.append(weakref.ref(self))
        self.cuda.capturing = self

    def capture_end(self) -> None:
        assert self.cuda.capturing is self
        self.cuda.note("capture_end")
        self.cuda.capturing = None
        if self.cuda.fails == "capture_end":
            raise RuntimeError("the driver does not want to")
        self.ended = True

    def __del__(self) -> None:
        self.cuda.uses[self.pool] -= self.ended

    def replay(self) -> None:
        self.cuda.note("replay")
        for program in self.programs:
            program()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    fake, real, real_plan = Cuda(), newton_schulz.run, newton_schulz.planned_call

    def planned(*arguments: Any) -> tuple[Any, ...]:
        """A variant is replayed as if the device could."""
        *others, variant = arguments
        _, *rest = real_plan(*others, replace(variant, replay=False))
        return variant, *rest

    def run(x: Tensor, variant: Variant, *rest: Any) -> Tensor:
        if variant.replay:
            result: Tensor = real(x, variant, *rest)
            return result
        fake.note("run")
        if fake.capturing is not None and fake.fails == "run":
            raise torch.OutOfMemoryError("no memory")
        result = real(x, variant, *rest)
        if fake.capturing is not None:
            fake.capturing.programs.append(lambda: result.copy_(real(x, variant, *rest)))
        return result

    names = (
        "device",
        "Stream",
        "stream",
        "current_stream",
        "synchronize",
        "empty_cache",
        "graph_pool_handle",
        "CUDAGraph",
    )
    for name in names:
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *_: fake.note("end of pool"), raising=False)
    monkeypatch.setattr(torch._C, "_host_emptyCache", fake.empty_cache, raising=False)
    monkeypatch.setattr(newton_schulz, "run", run)
    monkeypatch.setattr(newton_schulz, "planned_call", planned)
    monkeypatch.setattr(replay, "recorder", replay.CudaGraphs())
    monkeypatch.setattr(replay, "is_capturing", lambda _device: fake.is_current_stream_capturing())
    drop_graphs()
    yield fake
    drop_graphs()


def matrices(seed: int = 0, k: int = 2) -> Tensor:
    return torch.randn(k, 16, 48, generator=torch.Generator().manual_seed(seed))


@pytest.mark.pitfall("P64")
def test_recording_waits_for_nothing_on_the_device(cuda: Cuda) -> None:
    """It happens inside of backward and step, with collectives in flight."""
    for k in (1, 2, 3):
        orthogonalize(matrices(k=k), variant=REPLAYED)
    assert len(cuda.graphs) == 3
    assert cuda.named(*DEVICE_WIDE) == []


@pytest.mark.pitfall("P64")
def test_a_device_whose_graphs_compute_something_else_replays_none(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried with collectives in flight: on a stream of its own, and nothing waits for the device."""
    product = replay._product

    def recorded(x: Tensor) -> Tensor:
        result: Tensor = product(x)
        if cuda.capturing is not None:
            cuda.capturing.programs.append(lambda: result.copy_(product(x)))
        return result

    untold = replay.replays_right.__wrapped__
    with monkeypatch.context() as patch:
        patch.setattr(replay, "_product", recorded)
        assert untold(torch.device("cpu"))
        assert cuda.named(*DEVICE_WIDE) == []
        assert {stream for _, stream in cuda.named("capture_begin", "replay")} == {"beside"}
    monkeypatch.setattr(replay, "_product", lambda x: torch.full_like(x, len(cuda.calls)))
    with pytest.warns(UserWarning, match="no CUDA graphs on cpu .it computes something else"):
        assert not untold(torch.device("cpu"))
    cuda.fails = "capture_end"
    with pytest.warns(UserWarning, match="no CUDA graphs on cpu .RuntimeError: the driver does not want to"):
        assert not untold(torch.device("cpu"))


def test_replay_captures_once_and_returns_what_the_kernels_compute(cuda: Cuda) -> None:
    for seed in (0, 1, 2):
        x = matrices(seed)
        assert torch.equal(orthogonalize(x, variant=REPLAYED), orthogonalize(x, variant=EAGER))
        assert torch.equal(x, matrices(seed))
    assert len(cuda.graphs) == 1
    orthogonalize(matrices(k=3), variant=REPLAYED)
    assert len(cuda.graphs) == 2, "another shape"


@pytest.mark.pitfall("P45", "P63")
@pytest.mark.parametrize("shape", [(16, 48), (1, 48)])
def test_one_matrix_is_no_stack_of_its_rows(cuda: Cuda, shape: tuple[int, int]) -> None:
    """A graph takes stacks, in pieces of 8 here."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = orthogonalize(x, variant=REPLAYED)
    assert found.shape == shape and torch.equal(found, orthogonalize(x, variant=EAGER))


def test_results_of_one_graph_are_apart(cuda: Cuda) -> None:
    """What a replay returns is not where the next one writes."""
    x, y = matrices(3), matrices(4)
    key = "Newton-Schulz"
    first, second = (replay.replayed(lambda source: 2 * source, one, key) for one in (x, x))
    assert first.data_ptr() != second.data_ptr()
    first = orthogonalize(x, variant=REPLAYED)
    orthogonalize(y, variant=REPLAYED)
    assert torch.equal(first, orthogonalize(x, variant=EAGER))


def test_in_a_graph_of_the_user_the_kernels_are_launched_into_that_one(cuda: Cuda) -> None:
    cuda.capturing = Graph(cuda)
    found = orthogonalize(matrices(), variant=REPLAYED)
    cuda.capturing = None
    assert not cuda.graphs and torch.equal(found, orthogonalize(matrices(), variant=EAGER))


@pytest.mark.parametrize("fails", ["run", "capture_end"])
def test_where_capturing_fails_the_kernels_are_launched_one_by_one(cuda: Cuda, fails: str) -> None:
    expected = orthogonalize(matrices(), variant=EAGER)
    cuda.fails = fails
    with pytest.warns(UserWarning, match=r"no CUDA graph for \(2, 16, 48\) on cpu .*launched one by one"):
        assert torch.equal(orthogonalize(matrices(), variant=REPLAYED), expected)
    assert cuda.capturing is None and cuda.stream_name == "main", "the capture has ended"
    assert len(cuda.named("end of pool")) == (fails == "capture_end"), "the allocator is told"
    assert torch.equal(orthogonalize(matrices(), variant=REPLAYED), expected)
    assert len(cuda.graphs) == 1, "it is not tried again"
    gc.collect()
    assert [graph() is not None for graph in cuda.graphs] == [fails == "capture_end"], (
        "the allocator asks a graph that has not ended"
    )


@pytest.mark.pitfall("P92")
def test_graphs_are_replayed_after_all_were_dropped_and_after_a_capture_that_failed(cuda: Cuda) -> None:
    """As after a measurement: the allocator refuses a capture into a pool whose last graph is gone."""
    cuda.fails = "run"
    with pytest.warns(UserWarning, match="no CUDA graph"):
        orthogonalize(matrices(k=4), variant=REPLAYED)
    cuda.fails = ""
    for k in (1, 2):
        orthogonalize(matrices(k=k), variant=REPLAYED)
    drop_graphs()
    assert torch.equal(orthogonalize(matrices(k=3), variant=REPLAYED), orthogonalize(matrices(k=3), variant=EAGER))
    assert len(cuda.named("replay")) == 3 and sum(cuda.uses.values()) == 1


def test_an_update_in_a_graph_of_the_user_keeps_no_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused passes read a table in memory of the host, which is free when the graph runs."""

    class Cuda(torch.Tensor):
        device = torch.device("cuda", 0)

    update = importlib.import_module("dmuon.kernels.update")
    asked: list[torch.device] = []
    monkeypatch.setattr(update, "built_passes", asked.append)
    capturing = True
    monkeypatch.setattr(update, "is_capturing", lambda device: capturing)
    for seen in (set(), {Cuda.device}):  # weights and update, of which none is joined
        update.apply_update_([torch.ones(4, 4).as_subclass(Cuda)], torch.ones(1, 4, 4), lr=1, weight_decay=0, scale=1)
        update.momentum_norms([torch.ones(4, 4)], torch.ones(1, 4, 4).as_subclass(Cuda), beta=0.5, nesterov=True)
        assert set(asked) == seen
        capturing = False
