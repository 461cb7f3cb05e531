"""How blocks communicate: options of ``dedicate_params`` that change speed and memory, never a result."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import get_args

from dmuon.layout.buffer import Transport
from dmuon.platform.options import check_choice, check_flag, check_integer

__all__ = ["CommOptions"]


@dataclass(frozen=True, slots=True)
class CommOptions:
    """Transport and overlap of the owned matrices.

    Attributes:
        transport: ``"broadcast"`` sends each owner's part by a broadcast of its own and reduces gradients likewise;
            ``"single"`` is one all-gather and one reduce-scatter over parts padded to one size; ``"list"`` is the same
            over unequal parts, which NCCL alone can do. ``"auto"`` on NCCL takes ``single`` for a block whose padding
            is at most 15 %, else ``list``; elsewhere ``broadcast``.
        prefetch: blocks whose weights are on their way while another one computes, and that ``step()`` fills.
        outstanding_reductions: blocks whose gradients travel at once.
        merge_bytes: neighbouring blocks communicate together until they hold this many bytes of weights.
        asynchronous: ``False`` waits for every collective where it starts: for debugging; results are bitwise the same.
        timeout: of dmuon's own process groups; ``None`` is the back end's default.

    Raises:
        TypeError, ValueError: an option out of its range, by name.
    """

    transport: Transport = "auto"
    prefetch: int = 1
    outstanding_reductions: int = 2
    merge_bytes: int = 0
    asynchronous: bool = True
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        check_choice("comm.transport", self.transport, get_args(Transport))
        check_integer("comm.prefetch", self.prefetch, 0)
        check_integer("comm.outstanding_reductions", self.outstanding_reductions, 1)
        check_integer("comm.merge_bytes", self.merge_bytes, 0)
        check_flag("comm.asynchronous", self.asynchronous)
        if self.timeout is not None and not isinstance(self.timeout, timedelta):
            raise TypeError(f"comm.timeout must be a datetime.timedelta or None, got {self.timeout!r}")
        if self.timeout is not None and self.timeout <= timedelta(0):
            raise ValueError(f"comm.timeout must be positive, got {self.timeout}")
