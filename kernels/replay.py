"""Newton–Schulz of one shape and batch size as a CUDA graph: one launch instead of dozens, for small matrices."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .coefficients import Coefficients
from .variant import Variant

_MOST_GRAPHS = 32  # each keeps its workspace; shapes of a model are fewer


@dataclass(frozen=True, slots=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    source: Tensor
    result: Tensor


_recordings: OrderedDict[tuple[object, ...], _Recording] = OrderedDict()


def replayed(x: Tensor, variant: Variant, coefficients: Coefficients, storage: torch.dtype) -> Tensor:
    """What ``run`` returns for ``x`` ``(k, m, n)``, by a graph that is captured on first use.

    The result is overwritten by the next replay of the same graph. While the caller captures a graph of its own, the
    kernels are launched into that one.
    """
    from .newton_schulz import run

    eager = replace(variant, replay=False)
    if torch.cuda.is_current_stream_capturing():
        return run(x, eager, coefficients, storage)
    key = (x.device, tuple(x.shape), x.dtype, eager, coefficients, storage)
    recording = _recordings.pop(key, None) or _record(x, eager, coefficients, storage)
    _recordings[key] = recording
    if len(_recordings) > _MOST_GRAPHS:
        _recordings.popitem(last=False)
    recording.source.copy_(x)
    recording.graph.replay()
    return recording.result


def forget() -> None:
    """Drop all graphs and the memory that they keep."""
    _recordings.clear()


def _record(x: Tensor, variant: Variant, coefficients: Coefficients, storage: torch.dtype) -> _Recording:
    from .newton_schulz import run

    with torch.cuda.device(x.device):
        current = torch.cuda.current_stream()
        stream = torch.cuda.Stream()  # of this device: torch's own for captures is of whichever came first
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            # Once outside capture: compiling and loading kernels cannot be captured.
            run(x.clone(), variant, coefficients, storage)
        current.wait_stream(stream)
        source = torch.empty_like(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            result = run(source, variant, coefficients, storage)
    return _Recording(graph, source, result)
