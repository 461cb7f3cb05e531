"""The blocks of docs/moving-over.md train as the optimizers that they come from, here written out in fp64."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import dmuon
from dmuon.kernels import coefficient_sequence

PAGE = Path(__file__).parents[2] / "docs" / "moving-over.md"
CLASSIC = [(3.4445, -4.7750, 2.0315)] * 5
YOU = [  # as all of these libraries have them
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]


@dataclass(frozen=True)
class Origin:
    """What an optimizer does by default, besides momentum of 0.95."""

    lr: float
    decay: float
    nesterov: bool
    scale: Callable[[int, int], float]
    coefficients: Sequence[tuple[float, float, float]]
    adamw: dict[str, object]
    accumulates: bool = False  # m = 0.95 m + g, in place of an average


ORIGINS = {
    "torch.optim.Muon": Origin(
        1e-3, 0.1, True, lambda m, n: max(1, m / n) ** 0.5, CLASSIC, {"lr": 1e-3, "weight_decay": 0.01}
    ),
    "KellerJordan/Muon": Origin(
        0.02,
        0.0,
        True,
        lambda m, n: max(1, m / n) ** 0.5,
        CLASSIC,
        {"lr": 3e-4, "weight_decay": 0.0, "betas": (0.9, 0.95), "eps": 1e-10},
    ),
    "microsoft/dion": Origin(
        0.01,
        0.01,
        False,
        lambda m, n: (m / n) ** 0.5,
        YOU,
        {"lr": 0.01, "weight_decay": 0.01, "betas": (0.9, 0.95)},
        accumulates=True,
    ),
    "Megatron-LM": Origin(3e-4, 0.01, False, lambda m, n: max(m, n) ** 0.5, YOU, {"lr": 3e-4, "weight_decay": 0.01}),
    "X-Square's dmuon": Origin(
        0.02,
        0.0,
        True,
        lambda m, n: 0.2 * max(m, n) ** 0.5,
        coefficient_sequence("polar_express", 5),
        {"lr": 1e-3, "weight_decay": 0.01},
        accumulates=True,
    ),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 12)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 20, bias=False), nn.GELU(), nn.Linear(20, 12, bias=False))
            for _ in range(2)
        )
        self.head = nn.Linear(12, 16, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x), tokens.flip(0))


def orthogonal(g: Tensor, coefficients: Sequence[tuple[float, float, float]]) -> Tensor:
    x = g.mT if g.size(0) > g.size(1) else g
    x = x / x.norm()
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if g.size(0) > g.size(1) else x


def losses_of(model: Model, step: Callable[[], None]) -> list[float]:
    tokens = torch.arange(16)
    losses = []
    for _ in range(6):
        model.zero_grad()
        loss = model(tokens)
        loss.backward()
        losses.append(loss.item())
        step()
    return losses


def reference(model: Model, origin: Origin) -> list[float]:
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if all(p is not q for q in matrices)]
    groups = [{"params": [p for p in rest if p.ndim == 2]}, {"params": [p for p in rest if p.ndim < 2]}]
    adamw = torch.optim.AdamW(groups, **origin.adamw)
    adamw.param_groups[1]["weight_decay"] = 0.0
    momenta = [torch.zeros_like(p) for p in matrices]

    def step() -> None:
        with torch.no_grad():
            for p, m in zip(matrices, momenta, strict=True):
                if origin.accumulates:
                    m.mul_(0.95).add_(p.grad)
                    g = p.grad + 0.95 * m if origin.nesterov else m
                else:
                    m.lerp_(p.grad, 0.05)
                    g = torch.lerp(p.grad, m, 0.95) if origin.nesterov else m
                p.mul_(1 - origin.lr * origin.decay)
                p.sub_(origin.lr * origin.scale(*p.shape) * orthogonal(g, origin.coefficients))
        adamw.step()

    return losses_of(model, step)


def block_of(name: str) -> str:
    section = PAGE.read_text().split(f"## {name}\n")[1].split("\n## ")[0]
    found = re.search(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("name", ORIGINS)
def test_the_block_of_the_page_gives_the_curve_of_its_origin(name: str) -> None:
    torch.manual_seed(0)
    model = Model()
    expected = reference(deepcopy(model).double(), ORIGINS[name])
    names = {"model": model, "dmuon": dmuon}
    exec(block_of(name), names)
    found = losses_of(model, names["optimizer"].step)
    assert found == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < expected[0] - 1e-3, "it learns"


def test_torchs_own_muon_gives_that_curve_to_the_error_of_bf16() -> None:
    torch.manual_seed(0)
    model = Model()
    expected = reference(deepcopy(model).double(), ORIGINS["torch.optim.Muon"])
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if all(p is not q for q in matrices)]
    norms = [p for p in rest if p.ndim < 2]
    muon = torch.optim.Muon(matrices)
    adamw = torch.optim.AdamW(
        [{"params": [p for p in rest if p.ndim == 2]}, {"params": norms, "weight_decay": 0.0}], lr=1e-3
    )

    def step() -> None:
        muon.step()
        adamw.step()

    assert losses_of(model, step) == pytest.approx(expected, rel=1e-3)
