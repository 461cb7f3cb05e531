"""Streams of which one runs late, and memory that holds no numbers until it is written: missing waits as wrong numbers.

A stream runs late by pauses that are queued on it at random, where the program turns to it. Whoever waits for it gets
the same bits as before. Whoever should wait and does not reads what was there before, which is NaN in memory that was
just allocated.
"""

from __future__ import annotations

import linecache
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from dmuon.dedicated.buffer import BufferState, OwnedBuffer
from dmuon.kernels import streams_in_place, streams_of

COMPUTING = "the computation"
_PASSING_ON = ("dmuon/check/delays.py", "dmuon/platform/streams.py")  # who made a stream is who called them
_PAUSES_MS = (0.3, 1.0, 4.0)
_OFTEN = 0.6


class LateStreams:
    """Stands for the module of a device's streams, which it calls.

    Args:
        pause: queues a pause of so many milliseconds on the current stream; without streams it lets the host sleep.

    Attributes:
        late: name of the stream that pauses; None: none does.
        names: of the streams, as they came; the first is that on which the program computes.
        buffers: whose memory is filled with NaN where it was just allocated.
    """

    def __init__(self, device: torch.device, pause: Callable[[float], None], seed: int) -> None:
        self.late: str | None = None
        self.names = [COMPUTING]
        self.buffers: Sequence[OwnedBuffer] = ()
        self._device = device
        self._module = streams_of(device)
        self._pause = pause
        self._random = random.Random(seed)
        self._name_of: dict[int, str] = {}  # by number of the stream
        self._poisoned: set[int] = set()  # by id of the buffer

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Meanwhile streams are asked for here. What is built inside keeps doing so."""
        if self._module is None:
            yield
            return
        with streams_in_place(self._device.type, self):
            yield

    def turn_to(self, name: str) -> None:
        """The program turns to that stream, which is current: it may pause."""
        if name == self.late and self._random.random() < _OFTEN:
            self._pause(self._random.choice(_PAUSES_MS))

    # -- as torch.cuda ---------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def Stream(self, *args: Any, **kwargs: Any) -> Any:
        made = self._module.Stream(*args, **kwargs)
        name = _place()
        alike = sum(known.split(" #")[0] == name for known in self.names)
        self.names.append(f"{name} #{alike + 1}" if alike else name)
        self._name_of[made.stream_id] = self.names[-1]
        return made

    def Event(self, *args: Any, **kwargs: Any) -> Any:
        self._turn_to_current()
        return self._module.Event(*args, **kwargs)

    def current_stream(self, device: Any = None) -> Any:
        self._poison()
        self._turn_to_current()
        return self._module.current_stream(device)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        with self._module.stream(stream):
            self._turn_to_current()
            yield

    def _turn_to_current(self) -> None:
        number = self._module.current_stream(self._device).stream_id
        self.turn_to(self._name_of.get(number, COMPUTING))

    def _poison(self) -> None:
        """Fill the flat buffers that were allocated since the last look, on the stream that allocated them."""
        for buffer in self.buffers:
            if buffer.state is not BufferState.FREED or not buffer.buffer_nbytes:
                self._poisoned.discard(id(buffer))
            elif id(buffer) not in self._poisoned:
                self._poisoned.add(id(buffer))
                flat = buffer._buffer
                with torch.no_grad():  # not by the buffer itself: backward would take its weights for changed
                    torch.empty(0, dtype=flat.dtype, device=flat.device).set_(flat.untyped_storage()).fill_(torch.nan)


@contextmanager
def deterministic(*, poison: bool) -> Iterator[None]:
    """Operations that give the same bits each time, where torch has them.

    Args:
        poison: memory that is allocated and not written holds NaN.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic.*")  # the bits themselves are compared
        torch.use_deterministic_algorithms(True, warn_only=True)
        memory.fill_uninitialized_memory = poison
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
            memory.fill_uninitialized_memory = filled


def not_a_number(tensors: dict[str, Tensor]) -> list[str]:
    """Names of those that hold NaN."""
    return sorted(name for name, tensor in tensors.items() if bool(tensor.isnan().any()))


def _place() -> str:
    """Where in dmuon a stream is being made, and by the name that the source gives it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename).as_posix()
        if "/dmuon/" in path and not path.endswith(_PASSING_ON):
            text = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            name = text.partition("=")[0].strip().removeprefix("self.") or "stream"
            return f"{name} (dmuon{path.rpartition('/dmuon')[2]}:{frame.f_lineno})"
        frame = frame.f_back
    return "a stream of the program"
