"""What has happened on the pretended device, as the clock of ``streams.clock`` judges it: accesses in no order."""

from __future__ import annotations

import sys
from bisect import bisect_right, insort
from collections import Counter

from streams import clock
from streams.clock import Block, Clock, Knowledge, Memory, Race, Site

from pretend.listener import Listener, Range, Stream

PROGRAM = "the program"


class Timekeeper(Listener):
    """Only writes down what it hears, for several threads tell it at once; :meth:`races` goes through it in the end."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, tuple[object, ...], Site]] = []

    def note(self, kind: str, *values: object, what: str = "") -> None:
        self.heard.append((kind, values, Site(_function(), what or kind)))

    def record_event(self, event: int, stream: Stream) -> None:
        self.note("record_event", event, stream)

    def wait_event(self, event: int, stream: Stream) -> None:
        self.note("wait_event", event, stream)

    def synchronize(self, *, event: int | None = None, stream: Stream | None = None) -> None:
        self.note("synchronize", event, stream)

    def allocated(self, address: int, nbytes: int, stream: Stream) -> None:
        self.note("allocated", address, nbytes, stream, what="memory")

    def freed(self, address: int, nbytes: int, stream: Stream) -> None:
        self.note("freed", address)

    def record_stream(self, address: int, nbytes: int, stream: Stream) -> None:
        self.note("recorded", address, stream)

    def launched(self, op: str, stream: Stream, reads: list[Range], writes: list[Range]) -> None:
        self.note("launched", stream, reads, writes, what=op.split("::")[1])

    def races(self) -> Counter[Race]:
        """How often each was seen."""
        history = _History()
        for kind, values, site in self.heard:
            getattr(history, kind)(*values, site)
        return history.memory.races


class _History:
    """One device's; memory that was there before anybody listened is not judged."""

    def __init__(self) -> None:
        self._clock = Clock()
        self.memory = Memory(self._clock)
        self._streams: dict[Stream, clock.Stream] = {}
        self._events: dict[int, Knowledge] = {}
        self.starts: list[int] = []  # ascending addresses of the blocks
        self._blocks: dict[int, tuple[Block, int]] = {}

    def _stream(self, stream: Stream) -> clock.Stream:
        return self._streams.setdefault(stream, clock.Stream(f"stream {stream.number}"))

    def _block(self, address: int) -> tuple[Block, int] | None:
        """The block in which ``address`` lies, and where in it."""
        index = bisect_right(self.starts, address) - 1
        if index < 0:
            return None
        start = self.starts[index]
        block, nbytes = self._blocks[start]
        return (block, address - start) if address < start + nbytes else None

    def record_event(self, event: int, stream: Stream, _site: Site) -> None:
        self._events[event] = self._clock.moment(self._stream(stream))

    def wait_event(self, event: int, stream: Stream, _site: Site) -> None:
        self._clock.wait(self._stream(stream), self._events.get(event, {}))

    def synchronize(self, event: int | None, stream: Stream | None, _site: Site) -> None:
        if event is not None:
            self._clock.wait_on_host(self._events.get(event, {}))
        else:
            for each in [self._stream(stream)] if stream is not None else self._streams.values():
                self._clock.wait_on_host(self._clock.moment(each))

    def allocated(self, address: int, nbytes: int, stream: Stream, site: Site) -> None:
        self._blocks[address] = self.memory.allocate(self._stream(stream), nbytes, site), nbytes
        insort(self.starts, address)

    def freed(self, address: int, _site: Site) -> None:
        if address in self._blocks:
            self.memory.free(self._blocks.pop(address)[0])
            self.starts.remove(address)

    def recorded(self, address: int, stream: Stream, _site: Site) -> None:
        found = self._block(address)
        if found is not None:
            self.memory.record(found[0], self._stream(stream))

    def launched(self, stream: Stream, reads: list[Range], writes: list[Range], site: Site) -> None:
        for ranges, is_write in ((reads, False), (writes, True)):
            for address, nbytes in ranges:
                found = self._block(address)
                if found is not None:
                    block, start = found
                    self.memory.access(block, self._stream(stream), start, start + nbytes, is_write, site)


def _function() -> str:
    """Of dmuon, the innermost that is running in this thread."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("dmuon."):
            return f"{module.removeprefix('dmuon.')}.{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return PROGRAM
