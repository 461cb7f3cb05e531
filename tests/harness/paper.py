"""Members of Muon's family on the matrices of one process, written from their papers in fp64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from types import MappingProxyType
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from harness.network import is_matrix
from harness.oracle import Twin, newton_schulz
from harness.toy import DECAY, LR

NONE: Mapping[str, float] = MappingProxyType({})
CLASSIC = [(3.4445, -4.775, 2.0315)] * 5  # Keller Jordan's five steps


class Paper(Twin):
    """Each matrix is ``(out, in)``, whatever lies where; options are called as those of ``dmuon.Muon``."""

    def __init__(self, lr: float = LR, decay: float = DECAY, **options: Any) -> None:
        super().__init__([], lr, decay)
        self.lr, self.decay, self.family = lr, decay, options
        self.moments: dict[int, dict[str, Tensor]] = {}
        self.multipliers: dict[int, float] = {}  # of the learning rate, by id

    def add(self, value: Tensor, cut: Callable[[Tensor], list[Tensor]] | None = None, multiplier: float = 1.0) -> None:
        super().add(value, cut)
        self.optimizers.pop()
        self.params[-1] = [nn.Parameter(param.detach().double()) for param in self.params[-1]]
        for param in self.params[-1]:
            zeros = torch.zeros_like(param)
            rows = zeros.new_zeros(len(param), 1)
            self.moments[id(param)] = {"momentum": zeros, "rows": rows, "elements": torch.zeros_like(zeros)}
            self.multipliers[id(param)] = multiplier

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor | None]) -> int:
        count = 0
        for params, cut, grad in zip(self.params, self.cuts, grads, strict=True):
            for param, of_matrix in zip(params, cut(grad), strict=True) if grad is not None else ():
                self.update(param, of_matrix.double(), self.moments[id(param)])
                count += 1
        return count

    def update(self, weight: Tensor, grad: Tensor, moments: dict[str, Tensor]) -> None:
        """One step of one matrix."""
        how = self.family.get("weight_decay_mode", "decoupled")
        if how == "l2":
            grad = grad + self.decay * weight
        momentum, stored = moments["momentum"], self.family.get("momentum_dtype", torch.float64)
        folded = 0.95 * momentum + 0.05 * grad
        momentum.copy_(folded.float().to(stored) if stored is torch.bfloat16 else folded)
        averaged = 0.05 * grad + 0.95 * folded if self.family.get("nesterov", True) else folded
        update = self.orthogonal(averaged, moments)
        lr = self.lr * self.multipliers[id(weight)]
        if how == "hyperball" and weight.any():  # W ← R normalize(W - η R normalize(u))
            radius = weight.norm()
            moved = weight - lr * radius * (update / update.norm() if update.any() else update)
            weight.copy_(radius * moved / moved.norm())
            return
        decay = {"decoupled": lr * self.decay, "independent": self.decay, "l2": 0.0}.get(how, 0.0)
        kept = torch.full_like(weight, 1 - decay)
        if how == "cautious":  # x ← x - η (u + λ 1[u x >= 0] x)
            kept = 1 - lr * self.decay * (update * weight >= 0).double()
        weight.copy_(kept * weight - lr * self.rate(weight) * update)

    def orthogonal(self, x: Tensor, moments: dict[str, Tensor]) -> Tensor:
        by_user = self.family.get("orthogonalize")
        x = x.sign() if self.family.get("second_moment") == "element" else x
        found = newton_schulz(x, CLASSIC, eps=1e-30) if by_user is None else by_user(x[None])[0]
        if self.family.get("second_moment") == "row":
            rows, beta = moments["rows"], self.family.get("second_moment_beta", 0.95)
            rows.copy_(beta * rows + (1 - beta) * found.square().mean(1, keepdim=True))
            found = found / (rows.sqrt() + 1e-8)
        elif self.family.get("second_moment") == "element":
            elements, beta = moments["elements"], self.family.get("second_moment_beta", 0.95)
            elements.copy_(beta * elements + (1 - beta) * found.square())
            found = found / (elements.sqrt() + 1e-8)
        if "second_moment" in self.family:
            # η̂ = 0.2 η √(mn) / ‖Ô‖, of which `rate` is 0.2 √max(m, n)
            found = found * min(found.shape) ** 0.5 / found.norm() if found.any() else found
        return found

    def rate(self, weight: Tensor) -> float:
        """Of the shape."""
        rms: float = self.family.get("adjust_lr_fn", 0.2)
        return rms * max(weight.shape) ** 0.5

    def momentum(self, index: int) -> Tensor:
        return self.joined(index, [self.moments[id(param)]["momentum"] for param in self.params[index]])


def trained_by(
    twin: Paper, model: nn.Module, backward: Callable[[int], Any], steps: int, multipliers: Mapping[str, float] = NONE
) -> dict[str, Tensor]:
    """Weights of one process: matrices as the paper says, the rest by ``torch.optim.AdamW``.

    Args:
        backward: lets the parameters have the gradients of a step.
        multipliers: of learning rates, by patterns of names.
    """
    named = dict(model.named_parameters())
    matrices = [param for name, param in named.items() if is_matrix(name)]
    groups = []
    for name, param in named.items():
        factor = next((f for pattern, f in multipliers.items() if fnmatch(name, pattern)), 1.0)
        if is_matrix(name):
            twin.add(param.detach(), multiplier=factor)
        else:
            decay = DECAY if param.ndim > 1 else 0.0
            groups.append({"params": [param], "weight_decay": decay, "lr": LR * factor})
    adamw = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
    for step in range(steps):
        model.zero_grad()
        backward(step)
        twin.step([param.grad for param in matrices])
        adamw.step()
        with torch.no_grad():
            for param, value in zip(matrices, twin.weights(), strict=True):
                param.copy_(value)
    return {name: param.detach().clone() for name, param in named.items()}
