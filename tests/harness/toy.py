"""A small model with odd sizes, its data, and the single-process optimizer that every distributed run must equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

VOCAB, WIDTH, HIDDEN = 17, 13, 29
LR, DECAY = 2e-3, 0.1
OPTIONS: dict[str, Any] = {"lr": LR, "weight_decay": DECAY, "ns_coefficients": "classic"}  # of dmuon.Muon


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(x) + self.down(F.gelu(self.up(self.norm(x))))


class Toy(nn.Module):
    def __init__(self, layers: int = 3, tied: bool = False, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(seed: int = 0, **kwargs: Any) -> Toy:
    torch.manual_seed(seed)
    return Toy(**kwargs)


def batch(step: int, rows: int = 12) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one global step, the same in every process."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(VOCAB, (rows, 6), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())


def shard(tensors: tuple[Tensor, Tensor], rank: int, world: int) -> tuple[Tensor, Tensor]:
    return tensors[0].chunk(world)[rank], tensors[1].chunk(world)[rank]


def is_matrix(name: str) -> bool:
    """What the policy must select in ``Toy``, said independently of it."""
    return name.startswith("blocks.") and name.endswith((".mix.weight", ".up.weight", ".down.weight"))


@contextmanager
def fp32_newton_schulz() -> Any:
    """``torch.optim.Muon`` with the same loop in fp32; its own is wired to bf16."""
    from torch.optim import _muon

    def loop(grad: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
        a, b, c = coefficients
        x = grad.float()
        if grad.size(0) > grad.size(1):
            x = x.T
        x = x / x.norm().clamp(min=eps)
        for _ in range(steps):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x.T if grad.size(0) > grad.size(1) else x

    original = _muon._zeropower_via_newtonschulz
    _muon._zeropower_via_newtonschulz = loop
    try:
        yield
    finally:
        _muon._zeropower_via_newtonschulz = original


class Reference:
    """``torch.optim.Muon`` + ``torch.optim.AdamW`` in one process, with the groups that ``dmuon.Muon`` documents."""

    def __init__(
        self,
        model: nn.Module,
        matrix: Callable[[str], bool] = is_matrix,
        lr: float = LR,
        adamw_lr: float | None = None,
        decay: float = DECAY,
        nesterov: bool = True,
    ) -> None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        muon = [p for n, p in named if matrix(n)]
        rest = [p for n, p in named if not matrix(n)]
        self.muon = torch.optim.Muon(
            muon,
            lr=lr,
            weight_decay=decay,
            momentum=0.95,
            nesterov=nesterov,
            adjust_lr_fn="match_rms_adamw",
            eps=1e-30,
        )
        self.adamw = torch.optim.AdamW(
            [
                {"params": [p for p in rest if p.ndim >= 2], "weight_decay": decay},
                {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=lr if adamw_lr is None else adamw_lr,
            betas=(0.9, 0.95),
        )

    def step(self) -> None:
        with fp32_newton_schulz():
            self.muon.step()
        self.adamw.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.muon.zero_grad(set_to_none)
        self.adamw.zero_grad(set_to_none)


def reference_weights(
    steps: int = 5,
    half: bool = False,
    matrix: Callable[[str], bool] = is_matrix,
    nesterov: bool = True,
    **building: Any,
) -> dict[str, Tensor]:
    """Weights of a single process after ``steps`` on the global batches, computed once for equal arguments.

    Args:
        half: forward and backward run under autocast to bf16.
        building: what :func:`build` takes.
    """
    return dict(_reference_weights(steps, half, matrix, nesterov, **building))


@cache
def _reference_weights(
    steps: int, half: bool, matrix: Callable[[str], bool], nesterov: bool, **building: Any
) -> dict[str, Tensor]:
    model = build(**building)
    optimizer = Reference(model, matrix=matrix, nesterov=nesterov)
    for step in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = loss_of(model, *batch(step))
        loss.backward()
        optimizer.step()
    return {n: p.detach().clone() for n, p in model.state_dict().items()}


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Whole tensors of a distributed model on every rank, by stock means. Collective."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=False))
    whole = {n: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone() for n, t in state.items()}
    return whole


def relative_errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return {
        n: float((found[n].double() - expected[n].double()).norm() / expected[n].double().norm().clamp(min=1e-30))
        for n in expected
    }


def assert_equal_weights(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    errors = relative_errors(found, expected)
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= tolerance, f"{worst}: relative error {errors[worst]:.2e} > {tolerance:.0e}; all: {errors}"


def assert_same_bits(results: Sequence[Mapping[str, Tensor]]) -> None:
    """Of every rank's weights."""
    for weights in results[1:]:
        for name, tensor in results[0].items():
            assert torch.equal(weights[name], tensor), f"{name} differs between ranks"
