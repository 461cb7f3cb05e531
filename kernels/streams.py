"""Whether a device has streams, and whether its current one is being captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_in_place: dict[str, Any] = {}  # by type of device


def streams_of(device: torch.device) -> Any:
    """The module with the streams and events of ``device``, as ``torch.cuda`` is.

    None where everything runs in turn and has ended when the call returns. Whoever waits, or need not wait, asks here.
    """
    if device.type == "cpu":
        return None
    return _in_place.get(device.type) or torch.get_device_module(device.type)


@contextmanager
def streams_in_place(device_type: str, module: Any) -> Iterator[None]:
    """Meanwhile :func:`streams_of` answers ``module`` for devices of this type: a check may delay what is queued."""
    before = _in_place.get(device_type)
    _in_place[device_type] = module
    try:
        yield
    finally:
        if before is None:
            del _in_place[device_type]
        else:
            _in_place[device_type] = before


def is_capturing(device: torch.device) -> bool:
    """Whether what is queued on the current stream of ``device`` goes into a CUDA graph, and does not run."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
