"""A residual network of matrices, its batches, and how it is split and read: the same in every process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


@dataclass(frozen=True, slots=True)
class Size:
    """Extents of a network."""

    width: int
    hidden: int
    layers: int
    vocabulary: int


class Block(nn.Module):
    """One square matrix, and one of each orientation."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size.width)
        self.mix = nn.Linear(size.width, size.width, bias=False)
        self.up = nn.Linear(size.width, size.hidden)
        self.down = nn.Linear(size.hidden, size.width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mix(x) + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Network(nn.Module):
    """Token in, logits of the next one out."""

    def __init__(self, size: Size, block: Callable[[Size], nn.Module] = Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build(size: Size, device: torch.device, seed: int = 0, block: Callable[[Size], nn.Module] = Block) -> Network:
    """The same initial weights on every device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Network(size, block).to(device)


def is_matrix(name: str) -> bool:
    """What belongs to Muon, said independently of dmuon's policy."""
    return name.startswith("blocks.") and name.endswith(".weight") and "norm" not in name


def batch(size: Size, rows: int, context: int, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and targets, ``(rows, context)`` each."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(size.vocabulary, (rows, context + 1), generator=generator).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def shard(tensors: tuple[Tensor, Tensor], part: int, parts: int) -> tuple[Tensor, Tensor]:
    """Some rows of a batch; the parts are equal if their number divides that of the rows."""
    return tensors[0].chunk(parts)[part], tensors[1].chunk(parts)[part]


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Mean cross entropy, computed under autocast to ``dtype`` unless that is fp32."""
    with torch.autocast(tokens.device.type, dtype=dtype) if dtype != torch.float32 else nullcontext():
        logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def tensor_parallel(model: Network, mesh: DeviceMesh) -> None:
    """Split the blocks: columns, rows, and one that is gathered behind."""
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "mix": ColwiseParallel(output_layouts=Replicate()),
                "up": ColwiseParallel(use_local_output=False),
                "down": RowwiseParallel(),
            },
        )


def shard_blocks(model: nn.Module, mesh: DeviceMesh, by: Callable[..., Any] = fully_shard, **options: Any) -> None:
    """FSDP2 over every block, then over the rest; ``by`` torch's function, or dmuon's."""
    for module in (*model.blocks, model):  # type: ignore[misc, union-attr]
        by(module, mesh=mesh, **options)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """What this process has now."""
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Whole tensors on every rank, by stock means. Collective."""
    state = {name: t for name, t in get_model_state_dict(model).items() if isinstance(t, Tensor)}
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in state.items()}
