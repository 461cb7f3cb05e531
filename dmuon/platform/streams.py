"""Streams beside the one that computes, time per phase, and what else differs between devices.

[Note: who keeps a tensor alive]
The memory of a tensor belongs to the stream that was current when it was made. Once the last reference is gone, that
stream's next allocation may take the memory, although another stream has yet to read it. So whatever a second stream
reads or writes is protected in one of three ways:

1. Somebody keeps a reference until the first stream has waited for the second: whoever starts a collective keeps what
   it sends and receives.
2. Where nobody knows when the last reference goes, the reader announces it in advance, by
   ``Stream.beside(reads)``: a user may clear a gradient from which an update is being computed.
3. The flat buffers of owned weights never lose their last reference. Their storage is resized instead, after the stream
   that computes has waited for every collective on them.

What computes may itself change streams between a forward, its backward and the step. ``Origin`` remembers the stream
that memory belongs to; before the memory goes back, that stream waits for the one that used it last.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from dmuon.kernels import streams_of


def mesh_device(device_type: str) -> torch.device:
    """The device that this process uses on a mesh of ``device_type``."""
    if device_type == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(device_type)
    return torch.device(device_type, module.current_device())


def group_options(device_type: str, urgent: bool, timeout: timedelta) -> Any:
    """Options of a process group: on NCCL, urgent collectives get a stream of high priority.

    The timeout is here too, since torch warns where it differs from that of the group.
    """
    if device_type != "cuda" or not dist.is_nccl_available() or "nccl" not in str(dist.get_backend_config()):
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=urgent)
    options._timeout = timeout
    return options


class Stream:
    """A stream beside the one that computes; on the CPU everything runs in turn.

    Args:
        priority: negative for work that runs before other work that waits, as torch says it.
    """

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self._device = device
        self._module = streams_of(device)
        self._stream: Any = None if self._module is None else self._module.Stream(device, priority=priority)

    @contextmanager
    def beside(self, reads: Sequence[torch.Tensor] = ()) -> Iterator[None]:
        """What is queued inside runs after everything queued so far, and beside everything queued later.

        Args:
            reads: tensors that are read inside and may lose their last reference before that has happened.
        """
        if self._module is None:
            yield
            return
        self._stream.wait_stream(self._module.current_stream(self._device))
        for tensor in reads:
            tensor.record_stream(self._stream)
        with self._module.stream(self._stream):
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """What is queued inside waits for nothing queued before, and has ended when the host goes on."""
        with nullcontext() if self._module is None else self._module.stream(self._stream):
            yield
        if self._module is not None:
            self._stream.synchronize()

    def handed_over(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, which was made on this stream, for the current one: its memory waits for what that reads."""
        if self._module is not None:
            tensor.record_stream(self._module.current_stream(self._device))
        return tensor

    def mark(self) -> torch.Event | None:
        """What was queued on this stream so far, for :meth:`join_up_to`; None where everything runs in turn."""
        return None if self._module is None else _recorded(self._module, self._stream)

    def join(self) -> None:
        """Everything queued from now on runs after what was queued on this stream so far."""
        if self._module is not None:
            self._module.current_stream(self._device).wait_stream(self._stream)

    def join_up_to(self, mark: torch.Event | None) -> None:
        """As :meth:`join`, but without waiting for what was queued behind ``mark``; for nothing if that is None."""
        if self._module is not None and mark is not None:
            self._module.current_stream(self._device).wait_event(mark)


def await_device(device: torch.device) -> None:
    """Let the host wait for what was queued on the current stream."""
    module = streams_of(device)
    if module is not None:
        module.current_stream(device).synchronize()


class Origin:
    """The current stream: on which what happens now is queued, and to which memory that is allocated now returns."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = streams_of(device)
        self._stream = None if self._module is None else self._module.current_stream(device)

    def join(self) -> None:
        """Everything queued from now on, perhaps on another stream, runs after what was queued on this one so far."""
        if self._module is None or self._stream is None:
            return
        current = self._module.current_stream(self._device)
        if current != self._stream:
            current.wait_stream(self._stream)

    def await_users(self) -> None:
        """Call it on the stream that used the memory last, before the memory is given back."""
        if self._module is None or self._stream is None:
            return
        current = self._module.current_stream(self._device)
        if current != self._stream:
            self._stream.wait_stream(current)


def _recorded(module: Any, stream: Any, **options: Any) -> torch.Event:
    """An event behind what is queued on ``stream``, whichever device is current."""
    event: torch.Event = module.Event(**options)
    event.record(stream)
    return event


def pinned_like(values: torch.Tensor) -> torch.Tensor:
    """Memory of the host, shaped as ``values``, that a device can read or write while the host goes on."""
    return torch.empty_like(values, device="cpu", pin_memory=True)


class HostCopy:
    """Numbers on their way to the host, which does not wait for them until it asks."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        self._arrived: torch.Event | None = None
        module = streams_of(values.device)
        if module is not None:
            self._values = pinned_like(values)
            self._values.copy_(values, non_blocking=True)
            self._arrived = _recorded(module, module.current_stream(values.device))

    @property
    def immediate(self) -> bool:
        """Whether asking never waits."""
        return self._arrived is None

    def tolist(self) -> list[int]:
        if self._arrived is not None:
            self._arrived.synchronize()
        values: list[int] = self._values.tolist()
        return values


class PhaseTimer:
    """Seconds per named phase of the last step; events on an accelerator (read lazily), the wall clock on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = streams_of(device)
        self._phases: list[tuple[str, Any, Any]] = []  # and when they began and ended

    def reset(self) -> None:
        self._phases.clear()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = time.perf_counter() if self._module is None else self._mark()
        with record_function(f"dmuon::{name}"):
            yield
        self._phases.append((name, begin, time.perf_counter() if self._module is None else self._mark()))

    def _mark(self) -> torch.Event:
        return _recorded(self._module, self._module.current_stream(self._device), enable_timing=True)

    def seconds(self) -> dict[str, float]:
        """Phase name to seconds. On an accelerator this waits for the step to finish: call it outside the hot path."""
        total: dict[str, float] = {}
        for name, begin, end in self._phases:
            if self._module is not None:
                end.synchronize()
            took = end - begin if self._module is None else begin.elapsed_time(end) / 1e3
            total[name] = total.get(name, 0.0) + took
        return total
