"""A byte-level GPT in plain PyTorch: pre-norm blocks, RMSNorm, rotary attention, SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Sizes of a `GPT`; `width` must be a multiple of `2 * heads`."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    context: int = 128

    @property
    def hidden(self) -> int:
        """SwiGLU's inner width: two thirds of `4 * width`, rounded up to a multiple of 32."""
        return -(-8 * self.width // 96) * 32


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q = nn.Linear(config.width, config.width, bias=False)
        self.k = nn.Linear(config.width, config.width, bias=False)
        self.v = nn.Linear(config.width, config.width, bias=False)
        self.o = nn.Linear(config.width, config.width, bias=False)
        size = config.width // config.heads
        frequencies = 10000.0 ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(config.context), frequencies)  # (T, size / 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def _rotate(self, x: Tensor) -> Tensor:  # (B, H, T, size)
        a, b = x.chunk(2, dim=-1)
        cos, sin = self.cos[: x.shape[2]].to(x.dtype), self.sin[: x.shape[2]].to(x.dtype)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, width)
        q, k, v = (
            projection(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for projection in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(self._rotate(q), self._rotate(k), v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Maps bytes `(B, T)` to next-byte logits `(B, T, 256)`; the head is not tied to the embedding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            writes_residual = name.endswith(("attention.o.weight", "mlp.down.weight"))
            # GPT-2's initialisation: the residual stream's variance does not grow with depth
            nn.init.normal_(parameter, std=0.02 / (2 * config.layers) ** 0.5 if writes_residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
