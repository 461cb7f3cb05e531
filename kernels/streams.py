"""Whether a device has streams."""

from __future__ import annotations

from typing import Any

import torch


def streams_of(device: torch.device) -> Any:
    """The module with the streams and events of ``device``, as ``torch.cuda`` is.

    None where everything runs in turn and has ended when the call returns. Whoever waits, or need not wait, asks here.
    """
    return None if device.type == "cpu" else torch.get_device_module(device.type)
