"""A small residual network, its batches, and what one process makes of them: every topology must arrive there."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dmuon.kernels import coefficient_sequence

WIDTH, HIDDEN, LAYERS, VOCABULARY = 64, 168, 4, 53
CONTEXT = 64  # tokens per row
LR, DECAY, MOMENTUM = 2e-3, 0.1, 0.95
# AdamW's first step is the sign of a gradient unless eps says otherwise: rounding then decides where it is nearly zero.
ADAMW_EPS = 1e-4
OPTIONS: dict[str, Any] = {"lr": LR, "weight_decay": DECAY, "momentum": MOMENTUM, "adamw_eps": ADAMW_EPS}
STEPS = 4  # in the last of which gradients are clipped, and accumulated where there are several ranks
MAX_NORM = 0.5  # below the norm of these gradients, so that clipping acts


class Block(nn.Module):
    """One square matrix, and one of each orientation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mix(x) + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Network(nn.Module):
    """Token in, logits of the next one out; the same initial weights on every device."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            self.norm = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.to(device)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def is_matrix(name: str) -> bool:
    """Whether a parameter belongs to Muon, said independently of dmuon's policy."""
    return name.startswith("blocks.") and name.endswith(".weight") and "norm" not in name


def batch(world: int, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a global batch over ``world`` ranks, ``(2 * world, CONTEXT)`` each.

    Every topology can divide it, and each part be halved.
    """
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(VOCABULARY, (2 * world, CONTEXT + 1), generator=generator).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """Mean cross entropy, computed under autocast to ``dtype`` unless that is fp32."""
    with torch.autocast(tokens.device.type, dtype=dtype) if dtype != torch.float32 else nullcontext():
        logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@dataclass(frozen=True, slots=True)
class Reference:
    """What a single process makes of the network.

    Attributes:
        device: where it was trained, and where topologies are.
        initial, trained: weights before and after training.
        norm: norm of the gradients that were clipped, before that.
    """

    device: torch.device
    initial: dict[str, Tensor]
    trained: dict[str, Tensor]
    norm: float


def train_alone(world: int, device: torch.device, dtype: torch.dtype) -> Reference:
    """Some steps over the global batches of ``world`` ranks.

    Matrices are trained by the formulas of Muon, with Newton-Schulz in fp64, and the rest by ``torch.optim.AdamW``.
    """
    model = Network(device)
    named = dict(model.named_parameters())
    momentum = {name: torch.zeros_like(param) for name, param in named.items() if is_matrix(name)}
    rest = [param for name, param in named.items() if name not in momentum]
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=ADAMW_EPS)
    initial = {name: param.detach().clone() for name, param in named.items()}
    for step in range(STEPS):
        model.zero_grad()
        loss_of(model, *batch(world, step, device), dtype).backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM if step == STEPS - 1 else math.inf))
        with torch.no_grad():
            for name, average in momentum.items():
                param, grad = named[name], named[name].grad
                assert grad is not None
                average.lerp_(grad, 1 - MOMENTUM)
                update = newton_schulz(grad.lerp(average, MOMENTUM)[None])[0].to(param.dtype)
                param.mul_(1 - LR * DECAY).sub_(update, alpha=LR * 0.2 * math.sqrt(max(param.shape)))
        adamw.step()
    return Reference(device, initial, {name: param.detach() for name, param in named.items()}, norm)


def newton_schulz(matrices: Tensor) -> Tensor:
    """Five steps of Polar Express on ``(k, m, n)`` in fp64, by their formula."""
    x = matrices.double()
    x = x.mT if x.shape[1] > x.shape[2] else x
    x = x / x.flatten(1).norm(dim=1)[:, None, None]
    for a, b, c in coefficient_sequence("polar_express", 5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x if matrices.shape == x.shape else x.mT
    return result
