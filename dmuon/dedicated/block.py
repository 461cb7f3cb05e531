"""One block of a model: when its modules hold whole weights, and for whom."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch.nn as nn

from dmuon.dedicated.buffer import OwnedBuffer
from dmuon.dedicated.matrix import OwnedMatrix

__all__ = ["Block", "Phase"]


class Phase(Enum):
    """What the modules of a block hold, and why. Only a block at rest may be entered."""

    REST = "modules hold the resting form"
    FORWARD = "modules hold whole weights for a forward"
    BACKWARD = "modules hold whole weights for a backward"
    SUMMONED = "modules hold whole weights for the user, inside summon_full_params()"


class Block:
    """Owned matrices of one block that have one communication dtype.

    Attributes:
        buffer: holds the whole weights, possibly beside those of neighbours.
        backward: the backward pass that entered this block.
        calls: forwards whose backward boundary has not been reached.
        awaits_backward: some output of a forward needs a gradient.
    """

    def __init__(self, name: str, module: nn.Module, entries: Sequence[OwnedMatrix], buffer: OwnedBuffer) -> None:
        self.name = name
        self.module = module
        self.entries = list(entries)
        self.buffer = buffer
        self.phase = Phase.REST
        self.backward: int | None = None
        self.calls = 0
        self.awaits_backward = False

    @property
    def at_work(self) -> bool:
        """Whether the modules compute with the buffer."""
        return self.phase in (Phase.FORWARD, Phase.BACKWARD)

    def enter(self, phase: Phase) -> None:
        """Put whole weights into the modules."""
        self._require(Phase.REST)
        for entry in self.entries:
            if not all(entry.is_rest(module._parameters.get(name)) for module, name in entry.sites):
                raise RuntimeError(
                    f"parameter {entry.fqn!r} was replaced in its module after dedicate_params; edit it under "
                    "dmuon.summon_full_params(model) instead"
                )
        self.buffer.acquire(self.name, phase.value)
        for entry in self.entries:
            if entry.full.requires_grad != entry.rest.requires_grad:
                entry.full.requires_grad_(entry.rest.requires_grad)
            entry.place(entry.full)
        self.phase = phase

    def leave(self) -> None:
        """Put the resting form back into the modules."""
        self._require(Phase.FORWARD, Phase.BACKWARD)
        self._rest()
        self.buffer.release(self.name)

    def summon(self, wholes: Sequence[nn.Parameter]) -> None:
        """Put ``wholes``, one per entry, into the modules for the user."""
        self._require(Phase.REST)
        for entry, whole in zip(self.entries, wholes, strict=True):
            entry.place(whole)
        self.phase = Phase.SUMMONED

    def dismiss(self) -> None:
        """End :meth:`summon`."""
        self._require(Phase.SUMMONED)
        self._rest()

    def forget_graph(self) -> None:
        """No backward will come any more."""
        self.backward, self.calls, self.awaits_backward = None, 0, False

    def reset(self) -> None:
        """Back to rest, without gradients that were not reduced."""
        if self.at_work:
            self.leave()
        for entry in self.entries:
            entry.drop_unreduced()
        self.forget_graph()

    def _rest(self) -> None:
        for entry in self.entries:
            entry.place(entry.rest)
        self.phase = Phase.REST

    def _require(self, *phases: Phase) -> None:
        if self.phase not in phases:
            expected = " or ".join(p.name for p in phases)
            raise RuntimeError(f"block {self.name!r} is {self.phase.name}, expected {expected}: {self.phase.value}")
