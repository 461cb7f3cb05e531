"""Module trees with the names of real models; nothing in them runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
