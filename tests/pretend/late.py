"""A device on which what a stream computes late is not there until somebody waits for the stream."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pretend import module
from pretend.listener import Listener, Range, Stream

_NOWHERE = 0xFF  # bytes of NaN in every floating-point dtype


class LateDevice(Listener):
    """What is written on a stream that pauses is hidden from all others until anything waits for that stream.

    Stands for the module of the device's streams. Whoever waits ends the hiding for all, so a missing wait shows only
    as long as nobody else has waited.
    """

    def __init__(self) -> None:
        self.late: set[int] = set()  # streams that have paused in what runs on them now
        self.behind: set[int] = set()  # streams whose writes are hidden
        self._events: set[int] = set()  # that were recorded on one of them since
        self.written: list[Range] = []
        self._hidden: list[tuple[int, bytes]] = []
        self.lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        return getattr(module, name)

    def pause(self, _milliseconds: float) -> None:
        """What the current stream does from now on comes late."""
        self.late.add(module.current_stream().stream_id)

    @contextmanager
    def stream(self, stream: torch.Stream) -> Iterator[None]:
        if stream.stream_id in self.behind:
            self.show()  # to itself a stream is never late
        with module.stream(stream):
            yield
        with self.lock:
            if stream.stream_id in self.late:
                self.late.discard(stream.stream_id)
                self.behind.add(stream.stream_id)
                self.hide()

    def launched(self, op: str, stream: Stream, reads: list[Range], writes: list[Range]) -> None:
        with self.lock:
            if stream.number in self.late and op.startswith("aten::"):
                self.written += writes

    def record_event(self, event: int, stream: Stream) -> None:
        (self._events.add if stream.number in self.behind else self._events.discard)(event)

    def wait_event(self, event: int, stream: Stream) -> None:
        if event in self._events:
            self.show()

    def synchronize(self, *, event: int | None = None, stream: Stream | None = None) -> None:
        if event in self._events or (event is None and (stream is None or stream.number in self.behind)):
            self.show()

    def freed(self, address: int, nbytes: int, stream: Stream) -> None:
        """Whoever gets that memory next finds no late writes in it."""

        def lies_inside(start: int) -> bool:
            return address <= start < address + nbytes

        with self.lock:
            self.written = [place for place in self.written if not lies_inside(place[0])]
            self._hidden = [(start, content) for start, content in self._hidden if not lies_inside(start)]

    def hide(self) -> None:
        for address, nbytes in self.written:
            self._hidden.append((address, ctypes.string_at(address, nbytes)))
            ctypes.memset(address, _NOWHERE, nbytes)
        self.written = []

    def show(self) -> None:
        with self.lock:
            for address, content in reversed(self._hidden):  # the same place may be hidden twice
                ctypes.memmove(address, content, len(content))
            self._hidden = []
            self.behind.clear()
            self._events.clear()
