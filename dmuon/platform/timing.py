"""Time per phase of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import record_function

__all__ = ["PhaseTimer"]


class PhaseTimer:
    """Seconds per named phase of the last step; events on an accelerator (read lazily), the wall clock on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._module = None if device.type == "cpu" else torch.get_device_module(device.type)
        self._wall: dict[str, float] = {}
        self._events: list[tuple[str, torch.Event, torch.Event]] = []

    def reset(self) -> None:
        self._wall.clear()
        self._events.clear()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self._module is None:
            start = time.perf_counter()
            with record_function(f"dmuon::{name}"):
                yield
            self._wall[name] = self._wall.get(name, 0.0) + time.perf_counter() - start
            return
        begin = self._module.Event(enable_timing=True)
        end = self._module.Event(enable_timing=True)
        begin.record()
        with record_function(f"dmuon::{name}"):
            yield
        end.record()
        self._events.append((name, begin, end))

    def seconds(self) -> dict[str, float]:
        """Phase name to seconds. On an accelerator this waits for the step to finish: call it outside the hot path."""
        total = dict(self._wall)
        for name, begin, end in self._events:
            end.synchronize()
            total[name] = total.get(name, 0.0) + begin.elapsed_time(end) / 1e3
        return total
