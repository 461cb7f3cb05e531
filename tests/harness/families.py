"""Modules of classes that are known by their names, made by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn

from harness.trees import D, H

HEADS = {"num_heads": 2, "num_attention_heads": 2, "head_dim": 4}


class Conv1D(nn.Module):
    """GPT-2's: a linear layer whose weight is stored (in, out)."""

    def __init__(self, out: int, inp: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inp, out))


def of(kind: str, package: str = "", /, **attributes: Any) -> nn.Module:
    """A module of a class of this name and package, with these children, parameters and attributes."""
    cls = type(kind, (nn.Module,), {"__module__": package or "mine", "forward": lambda self: None})
    module: nn.Module = cls()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def bare(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def experts() -> dict[str, nn.Parameter]:
    return {"gate_up_proj": bare(3, 2 * H, D), "down_proj": bare(3, D, H)}
