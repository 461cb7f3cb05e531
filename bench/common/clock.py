"""How long programs of one process take: points in time on a device, and medians of programs that take turns."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


class Clock:
    """Marks points in time on a CUDA device's own stream, without waiting for it; elsewhere by ``now``, in seconds."""

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        self._cuda, self._now = device.type == "cuda", now

    def mark(self) -> Any:
        if not self._cuda:
            return self._now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, start: Any, end: Any) -> float:
        if not self._cuda:
            return (end - start) * 1e3
        end.synchronize()
        return float(start.elapsed_time(end))


def in_turn(items: Sequence[T], index: int) -> list[T]:
    """All of ``items``; which is first moves on with ``index``, so that none always follows the same one."""
    shift = index % len(items)
    return [*items[shift:], *items[:shift]]


def collect(
    warmup: int,
    rounds: int,
    sample: Callable[[int], Mapping[K, float]],
    seconds: float = math.inf,
    least: int = 3,
) -> dict[K, list[float]]:
    """The samples of ``rounds`` by name; those of the ``warmup`` rounds before are dropped.

    After ``seconds`` it stops, with ``least`` rounds or more.
    """
    samples: dict[K, list[float]] = {}
    begin = time.perf_counter()
    for index in range(-warmup, rounds):
        if index >= least and time.perf_counter() - begin > seconds:
            break
        for name, value in sample(index + warmup).items():
            if index >= 0:
                samples.setdefault(name, []).append(value)
    return samples


def medians(samples: Mapping[K, Sequence[float]]) -> dict[K, float]:
    return {name: statistics.median(values) for name, values in samples.items()}


def cold_samples(
    programs: Mapping[str, Callable[[], object]],
    device: torch.device,
    cache_bytes: int,
    rounds: int,
    seconds: float = math.inf,
) -> dict[str, list[float]]:
    """Milliseconds of each, in turns; on the CPU of this thread's time. Before each, so much memory is written.

    A round before the first warms up.
    """
    cache = torch.empty(cache_bytes // 4, device=device)
    clock = Clock(device, time.thread_time)

    def sample(index: int) -> dict[str, float]:
        took = {}
        for name in in_turn(list(programs), index):
            cache.fill_(index)
            start = clock.mark()
            programs[name]()
            took[name] = clock.milliseconds(start, clock.mark())
        return took

    samples = collect(1, rounds, sample, seconds)
    return {name: samples[name] for name in programs}
