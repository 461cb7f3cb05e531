"""Small models in which no layer repeats, and which of their matrices are hidden."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

INPUTS, WIDTH, OUTPUTS, WORDS = 12, 16, 5, 7
Forward = Callable[[nn.Module, Tensor], Tensor]


class Model(nn.Module):
    """Of these children, and of a function of them: ``forward`` is what a user would write as a method."""

    def __init__(self, forward: Forward, **children: nn.Module) -> None:
        super().__init__()
        self.function = forward
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        hidden: names of the matrices that Muon takes, without ``.weight``.
        blocks: of these when the model is dedicated, by default they themselves.
    """

    make: Callable[[], nn.Module]
    hidden: tuple[str, ...]
    blocks: tuple[str, ...] | None = None


def chain(*names: str) -> Forward:
    """One layer after the other."""

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        for name in names[:-1]:
            x = torch.tanh(model.get_submodule(name)(x))
        last: Tensor = model.get_submodule(names[-1])(x)
        return last

    return forward


def linear(inputs: int = WIDTH, outputs: int = WIDTH, bias: bool = True) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias)


def layers(*widths: int) -> nn.Sequential:
    """A flat Sequential."""
    parts: list[nn.Module] = []
    for takes, gives in pairwise(widths):
        parts += [nn.Linear(takes, gives), nn.Tanh()]
    return nn.Sequential(*parts[:-1])


def mlp() -> nn.Module:
    return Model(
        chain("fc1", "fc2", "fc3", "fc4"), fc1=linear(INPUTS), fc2=linear(), fc3=linear(WIDTH, 24), fc4=linear(24, 5)
    )


def two_layers() -> nn.Module:
    return Model(chain("fc1", "fc2"), fc1=linear(INPUTS), fc2=linear(WIDTH, OUTPUTS))


def separate_actor_and_critic() -> nn.Module:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return torch.cat([m.actor(x), m.critic(x)], -1)

    return Model(forward, actor=layers(INPUTS, WIDTH, WIDTH, 3), critic=layers(INPUTS, WIDTH, WIDTH, 1))


def twin_critics_of_state_and_action() -> nn.Module:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        joined = torch.tanh(torch.cat([m.state(x), m.action(x[:, :3])], -1))
        return m.value(torch.tanh(m.joint(joined)))

    return Model(forward, state=linear(INPUTS, 20), action=linear(3, 20), joint=linear(40), value=linear(WIDTH, 1))


def one_by_one() -> nn.Module:
    """Nobody calls the Sequential itself."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        for layer in m.parts:
            x = layer(x)
        return x

    return Model(forward, parts=layers(INPUTS, WIDTH, WIDTH, OUTPUTS))


def linear_unet() -> nn.Module:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        a = torch.tanh(m.enter(x))
        b = torch.tanh(m.down(a))
        c = torch.tanh(m.middle(b))
        d = torch.tanh(m.up1(torch.cat([b, c], -1)))
        return m.leave(torch.tanh(m.up2(torch.cat([a, d], -1))))

    up = {"up1": linear(64, WIDTH), "up2": linear(32, WIDTH)}
    down = {"enter": linear(INPUTS), "down": linear(WIDTH, 32), "middle": linear(32, 32)}
    return Model(forward, **down, **up, leave=linear(WIDTH, OUTPUTS))


def tied_layers() -> nn.Module:
    model = Model(
        chain("fc1", "fc2", "fc3", "fc4"), fc1=linear(INPUTS), fc2=linear(), fc3=linear(), fc4=linear(WIDTH, OUTPUTS)
    )
    model.fc3.weight = model.fc2.weight
    return model


def one_layer_called_twice() -> nn.Module:
    return Model(chain("fc1", "fc2", "fc2", "fc3"), fc1=linear(INPUTS), fc2=linear(), fc3=linear(WIDTH, OUTPUTS))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = linear(bias=False), linear(WIDTH, 8, bias=False)  # softmax would leave a bias no gradient
        self.v, self.out = linear(WIDTH, 8), linear()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, 8)) for part in (self.q(x), self.k(x), self.v(x)))
        scores = torch.einsum("bihd,bjgd->bhij", q, k).softmax(-1)
        joined: Tensor = self.out(torch.einsum("bhij,bjgd->bihd", scores, v).flatten(-2))
        return joined


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), linear(WIDTH, 40), nn.GELU(), linear(40))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


def words(x: Tensor) -> Tensor:
    """Five tokens for each row."""
    return (x[:, :5] * 1000).long().abs() % WORDS


def transformer_of_attributes() -> nn.Module:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return m.head(m.second(m.first(m.embed(words(x)))))

    return Model(forward, embed=nn.Embedding(WORDS, WIDTH), first=Layer(), second=Layer(), head=nn.Linear(WIDTH, WORDS))


def recurrent() -> nn.Module:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h, _ = m.gru(x.unflatten(-1, (3, 4)))
        return m.head(torch.tanh(m.fc(h[:, -1])))

    return Model(forward, gru=nn.GRU(4, WIDTH, batch_first=True), fc=linear(), head=linear(WIDTH, OUTPUTS))


def computed_by_hand() -> nn.Module:
    """The forward reads the weight of a layer that it does not call."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x = torch.tanh(m.fc1(x))
        return m.fc3(torch.tanh(F.linear(x, m.fc2.weight, m.fc2.bias)))

    return Model(forward, fc1=linear(INPUTS), fc2=linear(), fc3=linear(WIDTH, OUTPUTS))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = (model(x) - 1).square().mean()
    return loss


def batch(step: int) -> Tensor:
    return torch.randn(8, INPUTS, generator=torch.Generator().manual_seed(step))


def build(name: str) -> nn.Module:
    """The same in every process."""
    torch.manual_seed(0)
    return CASES[name].make()


def of_layer(name: str) -> tuple[str, ...]:
    return tuple(f"{name}.{part}" for part in (*(f"attention.{p}" for p in ("q", "k", "v", "out")), "mlp.1", "mlp.3"))


CASES: dict[str, Case] = {
    "layers that are attributes": Case(mlp, ("fc2", "fc3")),
    "a flat Sequential": Case(lambda: layers(INPUTS, WIDTH, WIDTH, OUTPUTS), ("2",)),
    "input and output layer only": Case(two_layers, ("fc1",)),
    "actor and critic": Case(separate_actor_and_critic, ("actor.2", "critic.2")),
    "two inputs that are joined": Case(twin_critics_of_state_and_action, ("action", "joint")),
    "a Sequential whose layers are called one by one": Case(one_by_one, ("parts.2",)),
    "U-Net": Case(linear_unet, ("down", "middle", "up1", "up2")),
    "tied layers": Case(tied_layers, ("fc2",), ("(model)",)),
    "one layer called twice": Case(one_layer_called_twice, ("fc2",)),
    "transformer whose blocks are attributes": Case(
        transformer_of_attributes, (*of_layer("first"), *of_layer("second"))
    ),
    "behind a recurrent layer": Case(recurrent, ("fc",)),
}  # fmt: skip
