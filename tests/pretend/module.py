"""``torch.pretend``: what torch, FSDP2 and dmuon ask of the module of a device. :func:`load` makes it so."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness.inside import default_store, limit_of

NAME = "pretend"

Stream = torch.Stream  # both take the accelerator for their device, and there is no other
Event = torch.Event

_library: ctypes.CDLL | None = None


def load(path: Path) -> None:
    """Make this process one that has the device. Before its first backward: autograd counts devices then."""
    global _library
    if _library is not None:
        return
    torch.ops.load_library(str(path))
    _library = ctypes.CDLL(str(path))
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend()
    # Of the CPU too: what travels is handed to the group's back end for that.
    dist.Backend.register_backend(NAME, _backend, devices=[NAME, "cpu"])


def library() -> ctypes.CDLL:
    assert _library is not None, "load() comes first"
    return _library


def _backend(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """gloo, which says that it is the device's own."""
    gloo: Any = dist.distributed_c10d.ProcessGroupGloo  # type: ignore[attr-defined]
    named: dist.ProcessGroup = type("Pretended", (gloo,), {"name": lambda _self: NAME})(store, rank, size, timeout)
    return named


def on_device(rank: int, world: int, path: Path, program: Callable[..., Any], *args: Any) -> Any:
    """``program(rank, world, *args)`` in groups that communicate tensors of both devices.

    Called by the pool of ranks, in workers that have run nothing but this: autograd makes one thread for each device
    at the first backward of a process.
    """
    load(path)
    set_device(rank)
    store = dist.PrefixStore(NAME, default_store())
    limit = limit_of(dist.group.WORLD)
    dist.destroy_process_group()
    dist.init_process_group(f"cpu:gloo,{NAME}:{NAME}", store=store, rank=rank, world_size=world, timeout=limit)
    return program(rank, world, *args)


# -- devices ----------------------------------------------------------------------------------------------------------


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def device_count() -> int:
    return int(library().pretend_device_count())  # torch.accelerator.device_count() asks this function


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: torch.device | str | int) -> None:
    torch.accelerator.set_device_index(_index(device))


@contextmanager
def device(device: torch.device | str | int) -> Iterator[None]:
    before = current_device()
    set_device(device)
    try:
        yield
    finally:
        set_device(before)


def get_device_name(device: torch.device | str | int | None = None) -> str:
    return f"{NAME}ed"


def _index(device: torch.device | str | int | None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


# -- streams ----------------------------------------------------------------------------------------------------------


def current_stream(device: torch.device | str | int | None = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: torch.device | str | int | None = None) -> torch.Stream:
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=current_stream().device_type)


def set_stream(stream: torch.Stream) -> None:
    with _kept_device():  # torch takes the stream's device as well
        torch.accelerator.set_stream(stream)


@contextmanager
def _kept_device() -> Iterator[None]:
    before = current_device()
    try:
        yield
    finally:
        set_device(before)


def stream(stream: torch.Stream | None) -> Any:
    return nullcontext() if stream is None else _on(stream)


@contextmanager
def _on(stream: torch.Stream) -> Iterator[None]:
    with device(stream.device):
        before = current_stream()
        set_stream(stream)
        try:
            yield
        finally:
            set_stream(before)


def synchronize(device: torch.device | str | int | None = None) -> None:
    torch.accelerator.synchronize(_index(device))


# -- random numbers, which are the CPU's ------------------------------------------------------------------------------


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


manual_seed_all = manual_seed


def get_rng_state(device: torch.device | str | int = NAME) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: torch.device | str | int = NAME) -> None:
    torch.set_rng_state(state)


def _is_in_bad_fork() -> bool:
    return False


# -- what else is asked -----------------------------------------------------------------------------------------------


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def empty_cache() -> None:
    """Freed memory is the host's again at once."""
