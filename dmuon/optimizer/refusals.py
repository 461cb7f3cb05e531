"""When an optimizer can take no step: moments, and functions of a user that would fail in the middle of one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch

from dmuon.dedicated.dedication import averaged_by_dmuon
from dmuon.kernels import is_capturing, update_scale
from dmuon.optimizer.wrapping import Wrapping
from dmuon.platform.torch_private import current_backward
from dmuon.step.rounds import Round


def check_moment(device: torch.device, wrapping: Wrapping, *, copied: bool, params: Set[int]) -> None:
    """Refuse a step where it would be recorded, be early, or wait for ranks that take none.

    Args:
        wrapping: of the model, which may let ranks leave a loop early.
        copied: DDP averages gradients.
        params: ids of what the optimizer trains.

    Raises:
        RuntimeError: says what to do.
    """
    if is_capturing(device):
        raise RuntimeError(
            "Muon.step() was called while a CUDA graph is being captured, which would replay this step's learning "
            "rate, votes and addresses for ever; capture forward and backward alone, and call step() outside"
        )
    if current_backward() is not None and (copied or averaged_by_dmuon() & params):
        who = "DistributedDataParallel" if copied else "dmuon"
        raise RuntimeError(
            f"Muon.step() was called inside backward, in which {who} has not averaged all gradients yet; call step() "
            "when backward() has returned"
        )
    if wrapping.ddp and wrapping.is_uneven():
        raise RuntimeError(
            "Muon.step() was called inside DistributedDataParallel.join(): ranks that run out of batches leave that "
            "loop, and the others would wait for them in every step; give all ranks the same number of batches"
        )


def check_scales(groups: Sequence[Mapping[str, Any]], rounds: Iterable[Round]) -> None:
    """Ask a user's ``adjust_lr_fn`` for all shapes before any weight changes.

    Raises:
        Exception: whatever it raises; ValueError, if it returns no factor.
    """
    for round_ in rounds:
        scale = groups[round_.index]["adjust_lr_fn"]
        for batch in round_.batches if callable(scale) and round_.knows_shapes else ():
            update_scale(scale, batch.scaled_shape)
