"""Whether a device has streams, and whether its current one is being captured."""

from __future__ import annotations

from typing import Any

import torch


def streams_of(device: torch.device) -> Any:
    """The module with the streams and events of ``device``, as ``torch.cuda`` is.

    None where everything runs in turn and has ended when the call returns. Whoever waits, or need not wait, asks here.
    """
    return None if device.type == "cpu" else torch.get_device_module(device.type)


def is_capturing(device: torch.device) -> bool:
    """Whether what is queued on the current stream of ``device`` goes into a CUDA graph, and does not run."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
