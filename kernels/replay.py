"""A function of one tensor as a CUDA graph: one launch instead of dozens, for small matrices."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_MOST_GRAPHS = 32  # each keeps its workspace; shapes of a model are fewer


@dataclass(frozen=True, slots=True)
class Recording:
    """A function of what is in ``source``: ``replay`` queues it on the current stream, and leaves it in ``result``."""

    replay: Callable[[], None]
    source: Tensor
    result: Tensor


class Recorder(Protocol):
    """What makes recordings."""

    def busy(self) -> bool:
        """Whether the caller records what it queues, so that nothing else may be recorded now."""

    def record(self, run_eager: Callable[[Tensor], Tensor], x: Tensor) -> Recording:
        """Of ``run_eager``, for tensors like ``x``."""


class CudaGraphs:
    """Records CUDA graphs."""

    def busy(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def record(self, run_eager: Callable[[Tensor], Tensor], x: Tensor) -> Recording:
        with torch.cuda.device(x.device):
            current = torch.cuda.current_stream()
            stream = torch.cuda.Stream()  # of this device: torch's own for captures is of whichever came first
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                # Once outside capture: compiling and loading kernels cannot be captured.
                run_eager(x.clone())
            current.wait_stream(stream)
            source = torch.empty_like(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                result = run_eager(source)
        return Recording(graph.replay, source, result)


recorder: Recorder = CudaGraphs()
_recordings: OrderedDict[Hashable, Recording] = OrderedDict()  # the least recently replayed first


def replayed(run_eager: Callable[[Tensor], Tensor], x: Tensor, key: Hashable) -> Tensor:
    """``run_eager(x)``, by a graph that is captured on first use; ``x`` is not modified.

    The result is overwritten by the next replay of the same graph. While the caller captures a graph of its own, the
    kernels are launched into that one, and ``x`` is ``run_eager``'s to overwrite.

    Args:
        run_eager: launches kernels on the current stream of ``x``'s device, and waits for none of them.
        key: what ``run_eager`` computes: equal keys on tensors of one shape, dtype and device share a graph.
    """
    if recorder.busy():
        return run_eager(x)
    key = (x.device, tuple(x.shape), x.dtype, key)
    recording = _recordings.pop(key, None) or recorder.record(run_eager, x)
    _recordings[key] = recording
    if len(_recordings) > _MOST_GRAPHS:
        _recordings.popitem(last=False)
    recording.source.copy_(x)
    recording.replay()
    return recording.result


def drop_graphs() -> None:
    """Drop all graphs and the memory that they keep."""
    _recordings.clear()
