"""Streams that run late: which pauses, and which memory holds NaN."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from dmuon.check import delays
from dmuon.check.delays import COMPUTING, LateStreams, deterministic, not_a_number
from dmuon.dedicated.buffer import BufferState
from dmuon.kernels import streams_in_place, streams_of
from dmuon.platform.streams import Stream

CPU, OTHER = torch.device("cpu"), torch.device("meta")


@dataclass(eq=False)
class Made:
    stream_id: int
    waits: list[int] = field(default_factory=list)

    def wait_stream(self, other: Made) -> None:
        self.waits.append(other.stream_id)


class Module:
    """Of a device that has nothing but streams."""

    def __init__(self) -> None:
        self.current = Made(0)
        self.made = 0

    def Stream(self, _device: Any, priority: int = 0) -> Made:
        self.made += 1
        return Made(self.made)

    def current_stream(self, _device: Any = None) -> Made:
        return self.current

    @contextmanager
    def stream(self, stream: Made) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


def turned(late: str | None, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[int]]:
    """Names of the streams, and the numbers of those that were current at each pause."""
    monkeypatch.setattr(delays, "_OFTEN", 1.0)
    module = Module()
    pauses: list[int] = []
    with streams_in_place("meta", module):
        streams = LateStreams(OTHER, lambda _: pauses.append(module.current.stream_id), seed=0)
        streams.late = late
        with streams.in_place():
            first = Stream(OTHER)
            second = Stream(OTHER)
            for stream in (first, second):
                with stream.beside():
                    pass
    return streams.names, pauses


def test_one_stream_pauses_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    names, pauses = turned(None, monkeypatch)
    assert len(names) == 3 and names[0] == COMPUTING and not pauses
    for number, name in enumerate(names):
        assert set(turned(name, monkeypatch)[1]) == {number}, name


def test_streams_are_as_they_were_behind_it() -> None:
    module, other = Module(), Module()
    with streams_in_place("meta", module):
        with streams_in_place("meta", other):
            assert streams_of(OTHER) is other
        assert streams_of(OTHER) is module
    assert streams_of(CPU) is None


@dataclass
class Buffer:
    """As a flat buffer, as far as delays look at it."""

    _buffer: torch.Tensor
    state: BufferState

    @property
    def buffer_nbytes(self) -> int:
        return self._buffer.untyped_storage().nbytes()


def test_new_memory_of_a_buffer_holds_nan_once() -> None:
    flat = torch.ones(4, dtype=torch.bfloat16)
    buffer = Buffer(flat, BufferState.FREED)
    with streams_in_place("meta", Module()):
        streams = LateStreams(OTHER, lambda _: None, seed=0)
        streams.buffers = [buffer]  # type: ignore[list-item]
        version = flat._version
        streams.current_stream()
        assert flat.isnan().all() and flat._version == version
        flat.fill_(2)  # by whoever fills it, who then waits for nothing
        streams.current_stream()
        assert (flat == 2).all()
        buffer.state = BufferState.READY
        streams.current_stream()
        assert (flat == 2).all()
        buffer.state = BufferState.FREED
        streams.current_stream()
        assert flat.isnan().all()


def test_memory_that_nobody_wrote_holds_nan_where_it_is_poisoned() -> None:
    with deterministic(poison=True):
        assert torch.empty(3).isnan().all() and torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    assert not_a_number({"a": torch.ones(2), "b": torch.tensor([1, torch.nan])}) == ["b"]
