"""A function of one tensor as a CUDA graph: one launch instead of dozens, for small matrices.

[Note: one order of all replays]
What a graph writes is written again by its next replay, on whatever stream that is queued: several optimizers replay
graphs of one shape, and early updates do so on a stream of their own. Different graphs share memory too: products on a
stream have one workspace, so that of the stream that captures is in all of them. So the replays of one device run one
after the other, each with the copies into its graph and out of it.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .device import is_capturing, streams_of

_MOST_GRAPHS = 32  # each keeps its workspace; shapes of a model are fewer


@dataclass(frozen=True, slots=True)
class Recording:
    """A function of what is in ``source``: ``replay`` queues it on the current stream, and leaves it in ``result``.

    ``pool`` is kept as long as the graph that lies in it.
    """

    replay: Callable[[], None]
    source: Tensor
    result: Tensor
    pool: object = None


class _Pool:
    """Memory that the graphs of one device share."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()


class CudaGraphs:
    """Records CUDA graphs, in the middle of a step or a backward.

    ``torch.cuda.graph`` would wait for the whole device first, collectives of other ranks among the rest, and give all
    cached memory back to the driver.
    """

    def __init__(self) -> None:
        # Of each device a stream, kept since torch has few and gives each to several who ask.
        self._streams: dict[torch.device, Any] = {}
        # And the memory that all its graphs share, as they do the stream's workspace: their replays never overlap, and
        # results are copied. It must be forgotten with the last graph: the allocator counts the graphs in a pool, and
        # refuses a capture into one that has none left.
        self._pools: WeakValueDictionary[torch.device, _Pool] = WeakValueDictionary()
        self._unfinished: list[Any] = []  # the allocator goes on asking a graph whose capture did not end

    def record(self, run_eager: Callable[[Tensor], Tensor], x: Tensor) -> Recording:
        """Of ``run_eager``, for tensors like ``x``; what this queues waits for nothing, and the host neither."""
        with torch.cuda.device(x.device):
            # Once outside capture: compiling and loading kernels cannot be captured. And not on the stream that
            # captures: its workspace for products must be the graphs' own.
            run_eager(x.clone())
            source = torch.empty_like(x)
            graph = torch.cuda.CUDAGraph()
            if x.device not in self._streams:
                self._streams[x.device] = torch.cuda.Stream(x.device)
            stream = self._streams[x.device]
            pool = self._pools.get(x.device) or _Pool()
            # A capture begins by resetting the offsets that all graphs draw random numbers from: not between a user's
            # graph and what that draws.
            current = torch.cuda.current_stream(x.device)
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                # Of this thread alone: meanwhile NCCL's watchdog asks for its events.
                self._unfinished.append(graph)
                graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
                try:
                    result = run_eager(source)
                except BaseException:
                    with suppress(Exception):
                        self._end(graph, x.device, pool.handle)
                    raise
                self._end(graph, x.device, pool.handle)
            current.wait_stream(stream)
        self._pools[x.device] = pool  # only now: a capture that failed may have left none in it
        return Recording(graph.replay, source, result, pool)

    def _end(self, graph: Any, device: torch.device, pool: Any) -> None:
        """End the capture. Where that fails, torch leaves its allocator as if it went on."""
        try:
            graph.capture_end()
        except BaseException:
            with suppress(Exception):
                torch._C._cuda_endAllocateToPool(device.index, pool)
            raise
        self._unfinished.remove(graph)


recorder = CudaGraphs()
_lock = threading.Lock()  # of what follows
_recordings: OrderedDict[Hashable, Recording | None] = OrderedDict()  # the least recently replayed first
_ended: dict[torch.device, Any] = {}  # an event: the last replay on this device


def replayed(run_eager: Callable[[Tensor], Tensor], x: Tensor, key: Hashable) -> Tensor:
    """``run_eager(x)``, by a graph that is captured on first use: a new tensor; ``x`` is not modified.

    While the caller captures a graph of its own, the kernels are launched into that one; and where capturing fails, on
    the current stream, from then on. Then ``x`` is ``run_eager``'s to overwrite.

    Args:
        run_eager: launches kernels on the current stream of ``x``'s device, and waits for none of them.
        key: what ``run_eager`` computes: equal keys on tensors of one shape, dtype and device share a graph.
    """
    if is_capturing(x.device):
        return run_eager(x)
    key = (x.device, tuple(x.shape), x.dtype, key)
    with _lock:
        recording = _recordings.pop(key) if key in _recordings else _record(run_eager, x)
        _recordings[key] = recording
        if len(_recordings) > _MOST_GRAPHS:
            _recordings.popitem(last=False)
        if recording is not None:
            return _replay(recording, x)
    return run_eager(x)


def _record(run_eager: Callable[[Tensor], Tensor], x: Tensor) -> Recording | None:
    """None, with a warning, where that fails: for want of memory, say, which a capture cannot take from the cache."""
    try:
        return recorder.record(run_eager, x)
    except Exception as error:  # whatever a driver may raise
        warnings.warn(
            f"no CUDA graph for {tuple(x.shape)} on {x.device} ({type(error).__name__}: {error}); its kernels are "
            "launched one by one, which is slower"
        )
        return None


def _replay(recording: Recording, x: Tensor) -> Tensor:
    """See [Note: one order of all replays]."""
    streams = streams_of(x.device)
    current = None if streams is None else streams.current_stream(x.device)
    if current is not None:
        if _ended.get(x.device) is not None:
            current.wait_event(_ended[x.device])
        recording.source.record_stream(current)  # it may be dropped from the table before this has run
    recording.source.copy_(x)
    recording.replay()
    result = recording.result.clone()
    if current is not None:
        _ended[x.device] = current.record_event()
    return result


def drop_graphs() -> None:
    """Drop all graphs and the memory that they keep."""
    with _lock:
        _recordings.clear()
