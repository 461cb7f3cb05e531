"""Models whose blocks leave tensors where no output of theirs shows them: auxiliary losses, and keys in a cache."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from harness.network import Block, Network, Size, shard
from harness.toy import WIDTH, batch, build
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

# -- auxiliary losses --------------------------------------------------------------------------------------------------

BOARD: list[Tensor] = []  # what blocks leave where nothing of theirs refers to it


@dataclass
class Out:
    hidden: Tensor
    aux: Tensor


class Gated(Block):
    """Beside the toy's block a matrix that only an auxiliary loss trains; a way is how both come out."""

    def __init__(self, size: Size, way: str) -> None:
        super().__init__(size)
        self.gate = nn.Linear(size.width, size.width)
        self.way = way
        self.left: Any = None

    def forward(self, x: Tensor) -> Any:
        hidden, aux = super().forward(x), self.gate(x.detach()).square().mean()
        return getattr(self, f"by_{self.way}")(hidden, aux)

    def by_dataclass(self, hidden: Tensor, aux: Tensor) -> Any:
        return Out(hidden, aux)

    def by_attribute(self, hidden: Tensor, aux: Tensor) -> Any:
        self.left = aux
        return hidden

    def by_board(self, hidden: Tensor, aux: Tensor) -> Any:
        BOARD.append(aux)
        return hidden

    def by_board_alone(self, hidden: Tensor, aux: Tensor) -> Any:
        BOARD[:] = [*BOARD, hidden, aux]


class Reading(Network):
    """Reads what the blocks leave; ``total`` is the sum of the auxiliary losses of the last forward."""

    total: Tensor

    def forward(self, tokens: Tensor) -> Tensor:
        x, aux = self.embed(tokens), []
        BOARD.clear()
        for block in self.blocks:
            out = block(x)
            match block.way:
                case "dataclass":
                    x, found = out.hidden, out.aux
                case "attribute":
                    x, found = out, block.left
                case "board":
                    x, found = out, BOARD[-1]
                case _:
                    x, found = BOARD[-2:]
            aux.append(found)
        self.total = torch.stack(aux).sum()
        return self.head(self.norm(x))


def model_of(way: str) -> Reading:
    model = build(block=partial(Gated, way=way))
    model.__class__ = Reading
    return model


def auxiliary_loss(model: nn.Module, step: int, part: int = 0, parts: int = 1, _: Any = None) -> Tensor:
    tokens, targets = shard(batch(step), part, parts)
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + model.total


# -- keys in a cache ---------------------------------------------------------------------------------------------------


class Late(torch.autograd.Function):
    """On odd ranks forward and backward pass a moment later, so that others have to wait for what these send."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        _pause()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        _pause()
        return grad


def _pause() -> None:
    if dist.is_initialized() and dist.get_rank() % 2:
        time.sleep(0.004)


class Stash(torch.autograd.Function):
    """Keeps what backward needs on the context, where no hook on saved tensors sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad @ ctx.weight, grad.t() @ ctx.x


class Layer(nn.Linear):
    """Multiplies by its weight, each way of which saves something else: a view, the parameter, a product of it."""

    def __init__(self, how: str) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)
        self.how = how
        self.register_buffer("mask", torch.linspace(0.5, 1.5, WIDTH * WIDTH).view(WIDTH, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        match self.how:
            case "view":
                return F.linear(x, self.weight)
            case "parameter":
                return x @ self.weight
            case "product":
                return F.linear(x, self.weight * self.mask * self.weight)
            case _:
                return Stash.apply(x, self.weight)


HOOKS: dict[str, Callable[[], Any]] = {
    "nothing": contextlib.nullcontext,
    "pass through": lambda: saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
    "cpu": save_on_cpu,
}
AROUND: dict[str, Callable[..., Any]] = {
    "nothing": lambda block, *args: block(*args),
    "reentrant": lambda block, *args: checkpoint(block, *args, use_reentrant=True),
    "non-reentrant": lambda block, *args: checkpoint(block, *args, use_reentrant=False),
}


class Keys:
    """A cache: an object, which no one looks into."""

    def __init__(self) -> None:
        self.of_layers: list[Tensor] = []


class Writer(nn.Module):
    """Leaves keys in a cache that later blocks read."""

    def __init__(self, how: str, inside: str) -> None:
        super().__init__()
        self.norm, self.key, self.up, self.down = nn.LayerNorm(WIDTH), Layer(how), Layer(how), Layer(how)
        self.inside = inside

    def forward(self, x: Tensor, keys: Keys) -> Tensor:
        with HOOKS[self.inside]():
            h = self.norm(Late.apply(x))
            keys.of_layers.append(Late.apply(torch.tanh(self.key(h))))
            return x + self.down(torch.relu(self.up(h)))


class Reader(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.norm, self.query, self.out = nn.LayerNorm(WIDTH), Layer(how), Layer(how)

    def forward(self, y: Tensor, key: Tensor) -> Tensor:
        return y + self.out(self.query(self.norm(Late.apply(y))) * key)


class Towers(nn.Module):
    """Two towers as in a vision-language-action model: the output of the first is thrown away, its keys are not."""

    def __init__(self, how: str, inside: str, around: str, outside: str) -> None:
        """``outside`` hooks are around the whole forward, ``inside`` ones in each writer."""
        super().__init__()
        torch.manual_seed(0)
        self.writers = nn.ModuleList(Writer(how, inside) for _ in range(4))
        self.readers = nn.ModuleList(Reader(how) for _ in range(4))
        self.around, self.outside = around, outside

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        keys = Keys()
        for writer in self.writers:
            x = writer(x, keys)
        for reader, key in zip(self.readers, keys.of_layers, strict=True):
            y = AROUND[self.around](reader, y, key)
        return y


def towers_loss(model: Towers, step: int, part: int, parts: int, _: Any) -> Tensor:
    draw = torch.Generator().manual_seed(step)
    x, y = (torch.randn(8, WIDTH, generator=draw).chunk(parts)[part].requires_grad_() for _ in range(2))
    with HOOKS[model.outside]():
        loss: Tensor = model(x, y).square().mean()
    return loss


WAYS = ("dataclass", "attribute", "board", "board_alone")  # beside a tuple: no hook of dmuon looks into any of them
TOWERS = [  # how weights are used, hooks inside, what is around readers, hooks outside
    ("view", "nothing", "nothing", "nothing"),
    ("view", "pass through", "nothing", "nothing"),
    ("parameter", "pass through", "non-reentrant", "cpu"),
    ("product", "cpu", "reentrant", "nothing"),
    ("stash", "nothing", "nothing", "pass through"),
]
