"""Device specifics: streams and groups for communication, phase timing. CPU code paths pay nothing for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Aside", "CommStreams", "HostCopy", "SideStream", "group_options", "mesh_device"]


def mesh_device(device_type: str) -> torch.device:
    """The device that this process uses on a mesh of ``device_type``."""
    if device_type == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(device_type)
    return torch.device(device_type, module.current_device())


def group_options(device_type: str, urgent: bool, timeout: timedelta | None) -> Any:
    """Options of a process group: on NCCL, urgent collectives get a stream of high priority."""
    if device_type != "cuda" or not dist.is_nccl_available() or "nccl" not in str(dist.get_backend_config()):
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=urgent)
    if timeout is not None:
        options._timeout = timeout
    return options


class CommStreams:
    """One stream each on which fills, publications and reductions start; on the CPU none exists."""

    def __init__(self, device: torch.device) -> None:
        self._module = None if device.type == "cpu" else torch.get_device_module(device.type)
        self._device = device
        self._fill = None if self._module is None else self._module.Stream(device)
        self._publish = None if self._module is None else self._module.Stream(device)
        self._reduce = None if self._module is None else self._module.Stream(device)

    def join(self) -> None:
        """Everything queued from here on runs after what fills and publications have queued so far."""
        if self._module is not None:
            for stream in (self._fill, self._publish):
                self._module.current_stream(self._device).wait_stream(stream)

    def join_reductions(self) -> None:
        """Everything queued from here on runs after what reductions have queued so far."""
        if self._module is not None:
            self._module.current_stream(self._device).wait_stream(self._reduce)

    @contextmanager
    def fill(self) -> Iterator[None]:
        """Collectives started inside run after everything queued so far, beside everything queued later."""
        with self._beside(self._fill):
            yield

    @contextmanager
    def publish(self) -> Iterator[None]:
        """As :meth:`fill`, on the stream of publications."""
        with self._beside(self._publish):
            yield

    @contextmanager
    def reduce(self) -> Iterator[None]:
        """As :meth:`fill`, on the stream of reductions."""
        with self._beside(self._reduce):
            yield

    @contextmanager
    def _beside(self, stream: torch.Stream | None) -> Iterator[None]:
        if self._module is None or stream is None:
            yield
            return
        stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(stream):
            yield


class SideStream:
    """A stream for computation beside the current one; on the CPU everything runs in turn."""

    def __init__(self, device: torch.device) -> None:
        self._module = None if device.type == "cpu" else torch.get_device_module(device.type)
        self._device = device
        self._stream = None if self._module is None else self._module.Stream(device)

    @contextmanager
    def beside(self, read: Sequence[torch.Tensor]) -> Iterator[None]:
        """What is queued inside runs after everything queued so far, and may read ``read`` even if they are freed."""
        if self._module is None or self._stream is None:
            yield
            return
        self._stream.wait_stream(self._module.current_stream(self._device))
        for tensor in read:
            tensor.record_stream(self._stream)
        with self._module.stream(self._stream):
            yield

    def join(self) -> None:
        """Everything queued on the current stream from here on runs after what was queued inside."""
        if self._module is not None:
            self._module.current_stream(self._device).wait_stream(self._stream)


class Aside:
    """A stream that waits for nothing that computes; on the CPU there is none."""

    def __init__(self, device: torch.device) -> None:
        self._module = None if device.type == "cpu" else torch.get_device_module(device.type)
        self._stream = None if self._module is None else self._module.Stream(device, priority=-1)

    @contextmanager
    def beside_nothing(self) -> Iterator[None]:
        """What is queued inside needs no result of what was queued before, and ends before the host goes on."""
        if self._module is None or self._stream is None:
            yield
            return
        with self._module.stream(self._stream):
            yield
            self._stream.synchronize()


class HostCopy:
    """Numbers on their way to the host, which does not wait for them until it asks."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        self._arrived: torch.Event | None = None
        if values.device.type != "cpu":
            module = torch.get_device_module(values.device.type)
            self._values = torch.empty_like(values, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._arrived = module.Event()
            self._arrived.record()

    @property
    def immediate(self) -> bool:
        """Whether asking never waits."""
        return self._arrived is None

    def tolist(self) -> list[int]:
        if self._arrived is not None:
            self._arrived.synchronize()
        values: list[int] = self._values.tolist()
        return values
