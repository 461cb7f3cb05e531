"""Module trees with the names and classes of real models; nothing in them runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

D, H, V = 8, 24, 11  # width, inner width, vocabulary


class Called(nn.Module):
    def forward(self) -> None:
        raise AssertionError("nothing runs forward")


def node(**children: Any) -> nn.Module:
    """A module with these children and parameters, and a ``forward`` (only containers lack one)."""
    module = Called()
    for name, child in children.items():
        setattr(module, name, child)
    return module


def stack(make: Callable[[], nn.Module], layers: int = 2) -> nn.ModuleList:
    return nn.ModuleList(make() for _ in range(layers))


def linear(inp: int = D, out: int = D) -> nn.Linear:
    return nn.Linear(inp, out, bias=False)


def llama(layers: int = 2) -> nn.Module:
    def layer() -> nn.Module:
        attention = node(q_proj=linear(), k_proj=linear(D, D // 2), v_proj=linear(D, D // 2), o_proj=linear())
        mlp = node(gate_proj=linear(D, H), up_proj=linear(D, H), down_proj=linear(H, D), act_fn=nn.SiLU())
        return node(self_attn=attention, mlp=mlp, input_layernorm=nn.RMSNorm(D), post_attention_layernorm=nn.RMSNorm(D))

    inner = node(embed_tokens=nn.Embedding(V, D), layers=stack(layer, layers), norm=nn.RMSNorm(D))
    return node(model=inner, lm_head=linear(D, V))


# -- modules of classes that are known by their names ------------------------------------------------------------------

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


def adapted(base: nn.Module, inp: int = D, out: int = D, rank: int = 2, **attributes: Any) -> nn.Module:
    """A layer under an adapter of ``peft``; what is added to it is the product of two factors."""
    factors = {
        "lora_A": nn.ModuleDict({"default": linear(inp, rank)}),
        "lora_B": nn.ModuleDict({"default": linear(rank, out)}),
    }
    return node(base_layer=base.requires_grad_(False), **factors, **attributes)


def experts() -> dict[str, nn.Parameter]:
    return {"gate_up_proj": bare(3, 2 * H, D), "down_proj": bare(3, D, H)}
