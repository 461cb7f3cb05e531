"""Replays without CUDA graphs: a recording computes anew, from a buffer and into another that it keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from dmuon.kernels import drop_graphs
from dmuon.step import update

replay = import_module("dmuon.kernels.replay")


class Buffers:
    """As ``dmuon.kernels.replay.CudaGraphs``."""

    def __init__(self) -> None:
        self.pools: list[Tensor] = []  # nobody else gets what a graph has allocated
        self.workspace = torch.zeros(1)  # that products have on the stream that captures: all graphs write it

    def record(self, run_eager: Callable[[Tensor], Tensor], x: Tensor) -> Any:
        source = torch.empty_like(x)
        result = torch.empty_like(run_eager(x.clone()))
        self.pools.append(result)

        def again() -> None:
            self.workspace.zero_()
            result.copy_(run_eager(source.clone()))

        return replay.Recording(again, source, result)


@contextmanager
def recorded_in_buffers(most: int) -> Iterator[None]:
    """All batches are replayed, by at most so many recordings."""
    choose = update.step_variant
    _forget()
    try:
        with (
            mock.patch.object(replay, "recorder", Buffers()),
            mock.patch.object(replay, "_MOST_GRAPHS", most),
            mock.patch.object(update, "step_variant", lambda *args: replace(choose(*args), replay=True)),
        ):
            yield
    finally:
        _forget()


def _forget() -> None:
    drop_graphs()
    replay._ended.clear()  # events of other streams
