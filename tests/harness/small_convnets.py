"""Small convolutional networks, and which of their kernels and matrices are hidden."""

from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor

from harness.small_models import Case, Model

PIXELS, CLASSES = 8, 5


def conv(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)


class Unit(nn.Module):
    """A residual unit, as ResNets have it; norms are over groups, so that ranks see what one process sees."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.norm1 = conv(inputs, outputs, stride), nn.GroupNorm(2, outputs)
        self.conv2, self.norm2 = conv(outputs, outputs), nn.GroupNorm(2, outputs)
        self.down = nn.Conv2d(inputs, outputs, 1, stride) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(torch.tanh(self.norm1(self.conv1(x)))))
        return torch.tanh(y + self.down(x))


def resnet(*depths: int) -> nn.Module:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        for part in (m.stem, *(m.get_submodule(f"layer{i}") for i in range(len(depths)))):
            x = part(x)
        return m.fc(x.mean((-1, -2)))

    stages = {}
    for i, depth in enumerate(depths):
        units = [
            Unit(8 * max(1, i), 8 * (i + 1), 1 + (i > 0)),
            *(Unit(8 * (i + 1), 8 * (i + 1)) for _ in range(depth - 1)),
        ]
        stages[f"layer{i}"] = nn.Sequential(*units)
    return Model(forward, stem=conv(3, 8), **stages, fc=nn.Linear(8 * len(depths), CLASSES))


def lenet() -> nn.Module:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x = torch.tanh(m.conv2(torch.tanh(m.conv1(x))))
        return m.fc3(torch.tanh(m.fc2(torch.tanh(m.fc1(x.flatten(1))))))

    return Model(
        forward, conv1=conv(3, 6, 2), conv2=conv(6, 8, 2), fc1=nn.Linear(32, 20), fc2=nn.Linear(20, 12),
        fc3=nn.Linear(12, CLASSES),
    )  # fmt: skip


def flat() -> nn.Module:
    return nn.Sequential(
        conv(3, 8, 2), nn.Tanh(), conv(8, 12), nn.Tanh(), conv(12, 12, 2), nn.Tanh(), nn.Flatten(),
        nn.Linear(48, CLASSES),
    )  # fmt: skip


def units(*names: str, down: tuple[str, ...] = ()) -> tuple[str, ...]:
    return tuple(f"{n}.{part}" for n in names for part in ("conv1", "conv2", *(["down"] if n in down else [])))


CONVNETS: dict[str, Case] = {
    "ResNet": Case(
        lambda: resnet(2, 2), units("layer0.0", "layer0.1", "layer1.0", "layer1.1", down=("layer1.0",)),
        ("layer0.0", "layer0.1", "layer1.0", "layer1.1"),
    ),
    "LeNet": Case(lenet, ("conv2", "fc1", "fc2")),
    "a flat Sequential of convolutions": Case(flat, ("2", "4")),
}  # fmt: skip


def images(step: int) -> Tensor:
    return torch.randn(8, 3, PIXELS, PIXELS, generator=torch.Generator().manual_seed(step))
