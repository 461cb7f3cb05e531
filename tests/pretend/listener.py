"""What happens on the device, told to an object: streams, events, memory, and what each operator reads and writes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from pretend import module

Range = tuple[int, int]  # address, bytes


class Stream(NamedTuple):
    device: int
    number: int  # 0 is the default stream


class Listener:
    """Overridden by whoever wants to know. Called by the thread in which it happens, autograd's included.

    ``Stream.wait_stream`` is an event that the other stream records and this one waits for; so is what autograd does
    between the streams of a forward. Collectives run on a stream of their communicator, which waits for the current
    one; ``Work.wait`` is an event as well.
    """

    def stream_created(self, stream: Stream, priority: int) -> None: ...

    def record_event(self, event: int, stream: Stream) -> None: ...

    def wait_event(self, event: int, stream: Stream) -> None: ...

    def event_destroyed(self, event: int) -> None: ...

    def synchronize(self, *, event: int | None = None, stream: Stream | None = None) -> None:
        """The host waits for one of them; for the device if for none."""

    def allocated(self, address: int, nbytes: int, stream: Stream) -> None: ...

    def freed(self, address: int, nbytes: int, stream: Stream) -> None:
        """Memory that was allocated on ``stream``."""

    def record_stream(self, address: int, nbytes: int, stream: Stream) -> None: ...

    def launched(self, op: str, stream: Stream, reads: list[Range], writes: list[Range]) -> None:
        """By the operator's name, ``aten::…`` or ``c10d::…``. Views launch nothing."""


_REPORT = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)
_LAUNCHED = ctypes.CFUNCTYPE(
    None,
    ctypes.c_char_p,
    ctypes.c_int64,
    ctypes.c_int64,
    *[ctypes.POINTER(ctypes.c_int64), ctypes.c_int64] * 2,
)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell ``listener`` until the end, where the first exception that it raised is raised."""
    errors: list[BaseException] = []

    def guarded(function: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            try:
                function(*args)
            except BaseException as error:  # C++ has called
                errors.append(error)

        return call

    # In the order of `enum Event`.
    told: list[Callable[[Stream, int, int], None]] = [
        lambda stream, priority, _: listener.stream_created(stream, priority),
        lambda stream, event, _: listener.record_event(event, stream),
        lambda stream, event, _: listener.wait_event(event, stream),
        lambda _stream, event, _: listener.synchronize(event=event),
        lambda stream, _a, _b: listener.synchronize(stream=stream),
        lambda _stream, _a, _b: listener.synchronize(),
        lambda stream, address, nbytes: listener.allocated(address, nbytes, stream),
        lambda stream, address, nbytes: listener.freed(address, nbytes, stream),
        lambda stream, address, nbytes: listener.record_stream(address, nbytes, stream),
        lambda _stream, event, _: listener.event_destroyed(event),
    ]

    def report(event: int, device: int, stream: int, a: int, b: int) -> None:
        told[event](Stream(device, stream), a, b)

    def launched(op: bytes, device: int, stream: int, reads: Any, read: int, writes: Any, written: int) -> None:
        listener.launched(op.decode(), Stream(device, stream), _ranges(reads, read), _ranges(writes, written))

    library = module.library()
    callbacks = _REPORT(guarded(report)), _LAUNCHED(guarded(launched))
    library.pretend_listen(callbacks[0])
    library.pretend_listen_to_operators(callbacks[1])
    try:
        yield
    finally:
        library.pretend_listen(None)
        library.pretend_listen_to_operators(None)
        _kept.append(callbacks)  # another thread may be calling one
    if errors:
        raise errors[0]


_kept: list[Any] = []


def _ranges(numbers: Any, count: int) -> list[Range]:
    return [(numbers[2 * i], numbers[2 * i + 1]) for i in range(count)]
