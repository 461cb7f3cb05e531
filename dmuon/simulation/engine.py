"""A discrete-event engine for programs whose streams are first-in first-out and whose collectives have one order.

Under those two rules no event queue is needed. Operations are taken in program order. Each starts as soon as its
resources are free, what it waits for has ended and, if it is a collective, all its members are there. Every time is a
vector over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]  # seconds, one per rank

COMPUTE = "compute"

_NO_LINKS: Mapping[str, float | Times] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Noise:
    """How ranks differ in speed.

    Attributes:
        sigma: standard deviation of the logarithm of every computation's duration; the mean stays as it is.
        slowdown: rank to the factor on all its computation: a straggler.
        seed: of the random numbers.

    Raises:
        ValueError: a negative ``sigma``, or a factor that is not positive.
    """

    sigma: float = 0.0
    slowdown: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.sigma) and self.sigma >= 0):
            raise ValueError(f"sigma={self.sigma!r} must be at least 0; 0 is no noise")
        for rank, factor in self.slowdown.items():
            if not (math.isfinite(factor) and factor > 0):
                raise ValueError(f"slowdown: rank {rank} has factor {factor!r}; give a positive number, 1 is none")


@dataclass(frozen=True, slots=True)
class Span:
    """One operation on every rank; a rank with ``start == end`` did nothing."""

    stream: str
    name: str
    start: Times
    end: Times


def latest(*times: Times) -> Times:
    """For each rank, the largest of its times."""
    result: Times = np.maximum.reduce(times)
    return result


class Groups:
    """Disjoint groups that together hold every rank."""

    def __init__(self, ids: NDArray[np.int64]) -> None:
        _, self._ids = np.unique(ids, return_inverse=True)
        self._order = np.argsort(self._ids, kind="stable")
        self._starts = np.searchsorted(self._ids[self._order], np.arange(int(self._ids.max()) + 1))

    def latest(self, times: Times) -> Times:
        """For each rank, the largest of its group's ``times``."""
        return np.asarray(np.maximum.reduceat(times[self._order], self._starts)[self._ids])


class _Link:
    """When a link carries bytes, on every rank: until when, and the last time before that it idled."""

    def __init__(self, ranks: int) -> None:
        self._free, self._idle_from, self._idle_to = np.zeros(ranks), np.zeros(ranks), np.zeros(ranks)

    def earliest(self, ready: Times, busy: float | Times) -> Times:
        """From when on it could carry something for ``busy`` seconds that is ready at ``ready``."""
        start = np.maximum(ready, self._idle_from)
        return np.where(start + busy <= self._idle_to, start, np.maximum(ready, self._free))

    def hold(self, start: Times, busy: float | Times) -> None:
        """Carry something from ``start`` on."""
        end = start + busy
        before = end <= self._idle_to  # while it idled
        idles = ~before & (start > self._free)
        self._idle_from = np.where(before, end, np.where(idles, self._free, self._idle_from))
        self._idle_to = np.where(idles, start, self._idle_to)
        self._free = np.where(before, self._free, np.maximum(self._free, end))


class Simulation:
    """Streams of every rank and the time at which each is free, and links that streams share.

    A stream serves one operation at a time, in the order in which operations are submitted. A link does as well, but
    what is ready sooner passes what still waits for its own stream.

    Args:
        contention: how much longer computation takes while what contends with it is under way, as a part of the time
            of both.

    Raises:
        ValueError: no rank, or a straggler that does not exist.
    """

    def __init__(self, ranks: int, noise: Noise | None = None, contention: float = 0.0) -> None:
        if ranks < 1:
            raise ValueError(f"ranks={ranks} must be at least 1")
        noise = noise or Noise()
        self.ranks = ranks
        self.spans: list[Span] = []
        self._free: dict[str, Times] = {}
        self._links: dict[str, _Link] = {}
        self._contention = contention
        self._arrived = np.zeros(ranks)  # the last of what contends and has started
        self._sigma = noise.sigma
        self._random = np.random.default_rng(noise.seed)
        self._slowdown = np.ones(ranks)
        for rank, factor in noise.slowdown.items():
            if not 0 <= rank < ranks:
                raise ValueError(f"slowdown: there is no rank {rank} among {ranks}; use 0 … {ranks - 1}")
            self._slowdown[rank] = factor

    def now(self, stream: str) -> Times:
        """When everything submitted to ``stream`` so far has ended."""
        return self._free[stream].copy() if stream in self._free else np.zeros(self.ranks)

    def wait(self, stream: str, times: Times) -> None:
        """Whatever is submitted to ``stream`` from here starts no earlier than ``times``."""
        self._free[stream] = np.maximum(self.now(stream), times)

    def compute(self, name: str, seconds: float | Times) -> Times:
        """Run on the compute stream, with each rank's noise and slowdown; returns the ends."""
        took = seconds * self._slowdown
        if self._sigma:
            took = took * np.exp(self._sigma * self._random.standard_normal(self.ranks) - self._sigma**2 / 2)
        if self._contention:
            took = took + self._contention * np.clip(self._arrived - self.now(COMPUTE), 0.0, took)
        return self.run((COMPUTE,), name, took)

    def run(
        self,
        streams: tuple[str, ...],
        name: str,
        seconds: float | Times,
        *,
        links: Mapping[str, float | Times] = _NO_LINKS,
        after: Iterable[Times] = (),
        groups: Groups | None = None,
        contends: bool = False,
    ) -> Times:
        """Submit an operation that holds all ``streams`` for ``seconds``; returns the ends.

        Args:
            streams: a timeline shows the first.
            seconds: one duration, or one per rank.
            links: seconds for which each link is busy from the start on: that of bytes, while latency passes.
            after: ends of what it waits for.
            groups: for a collective: its members start together.
            contends: computation beside it takes longer.
        """
        start = latest(*map(self.now, streams), *after)
        for link, busy in links.items():
            start = self._links.setdefault(link, _Link(self.ranks)).earliest(start, busy)
        if groups is not None:
            start = groups.latest(start)
        end: Times = start + seconds
        for stream in streams:
            self._free[stream] = end
        for link, busy in links.items():
            self._links[link].hold(start, busy)
        if contends:
            self._arrived = np.maximum(self._arrived, end)
        self.spans.append(Span(streams[0], name, start, end))
        return end
