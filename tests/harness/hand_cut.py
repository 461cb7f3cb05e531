"""Weights that a program cuts itself, and what ``torch.optim.Muon`` makes of the whole ones in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from harness.oracle import fp32_newton_schulz


class Cut:
    """How one weight is cut: by role the dimension, and the lengths or None for torch.chunk's."""

    def __init__(self, shape: tuple[int, ...], apart: tuple[str, ...] = (), **cuts: Any) -> None:
        self.shape = shape
        self.apart = apart
        self.cuts = {role: cut if isinstance(cut, tuple) else (cut, None) for role, cut in cuts.items()}

    def part(self, whole: Tensor, sizes: Mapping[str, int], at: Mapping[str, int]) -> Tensor:
        for role in ("tp", "ep", "fsdp"):  # in this order where two cut one dimension
            if role in self.cuts and role in sizes:
                dim, lengths = self.cuts[role]
                size = sizes[role]
                lengths = lengths or [len(range(whole.shape[dim])[i::size]) for i in range(size)]
                whole = whole.split(list(lengths), dim)[at[role]]
        return whole.contiguous()

    def number(self, sizes: Mapping[str, int], at: Mapping[str, int]) -> int:
        """Of the whole of which this rank has a part: along roles that are apart, each has another."""
        return sum(at[role] for role in self.apart)

    def matrices(self) -> int:
        return self.shape[0] if len(self.shape) == 3 else 1


def seeded(shape: Sequence[int], *seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(hash((1, *seed)) % 2**31)
    return torch.randn(*shape, generator=generator)


def whole_weight(cut: Cut, index: int, number: int, steps: int) -> Tensor:
    """After ``steps`` of ``torch.optim.Muon`` on one process, matrix by matrix."""
    weight = seeded(cut.shape, index, number)
    matrices = [nn.Parameter(m.clone()) for m in (weight if weight.ndim == 3 else [weight])]
    optimizer = torch.optim.Muon(
        matrices, lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw", eps=1e-30
    )
    for step in range(steps):
        grad = seeded(cut.shape, index, number, step)
        for matrix, one in zip(matrices, grad if grad.ndim == 3 else [grad], strict=True):
            matrix.grad = one.clone()
        with fp32_newton_schulz():
            optimizer.step()
    stepped = torch.stack([m.detach() for m in matrices])
    return stepped if weight.ndim == 3 else stepped[0]
