"""Ways to train one GPT over ranks: dedicated Muon, gather-then-compute Muon, FSDP2 + AdamW."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from training.gather import GatherMuon
from training.model import GPT, GPTConfig
from training.trainer import adamw, sharded

import dmuon
from dmuon.dedicated.dedication import dedications
from dmuon.model.routing import route_parameters

LR = 2e-3
GATHER, DEDICATED, ADAMW = "gather-then-compute", "dedicated", "fsdp2 + adamw"


@dataclass(frozen=True, slots=True)
class Sizes:
    """The model, its data, the ranks, and how often everything is timed."""

    world: int = 2
    layers: int = 4
    width: int = 256
    heads: int = 4
    context: int = 256
    batch: int = 4
    rounds: int = 15
    warmup: int = 3
    check: int = 3
    costs: str | None = None
    seed: int = 0

    @property
    def tokens(self) -> int:
        """Per rank and step."""
        return self.batch * self.context


# Of each field that counts something, its smallest value.
LEAST = dict.fromkeys(("world", "layers", "width", "heads", "context", "batch", "rounds"), 1)


@dataclass(frozen=True, slots=True)
class Mode:
    """How a dedicated model is laid out and communicates.

    Attributes:
        dims: mesh dimension of data parallelism, ``tp`` for tensor parallelism over all ranks instead.
    """

    dims: str = "shard"
    keep: bool = False
    overlap: bool = False
    comm: dmuon.CommOptions = field(default_factory=dmuon.CommOptions)


@dataclass(slots=True)
class Program:
    """One way to train: forward and backward, and the optimizers that follow.

    Attributes:
        shared: all ranks see the whole batch, as tensor parallelism wants it.
        update_seconds: what the optimizers took in the last step.
    """

    name: str
    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    reference: str
    shared: bool = False
    update_seconds: float = 0.0

    @property
    def plan(self) -> dmuon.OwnerPlan:
        """Of a dedicated model."""
        return dedications(self.model)[0].plan

    def backward(self, tokens: Tensor, targets: Tensor) -> None:
        F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten()).backward()

    def step(self, tokens: Tensor, targets: Tensor, optimize: bool = True) -> None:
        self.backward(tokens, targets)
        if optimize:
            self.update()
        self.zero_grad()

    def update(self) -> None:
        start = time.perf_counter()
        for optimizer in self.optimizers:
            optimizer.step()
        self.update_seconds = time.perf_counter() - start

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def initial_model(sizes: Sizes) -> GPT:
    torch.manual_seed(sizes.seed)
    return GPT(GPTConfig(sizes.layers, sizes.width, sizes.heads, sizes.context))


def build_dedicated(name: str, mode: Mode, model: GPT, sizes: Sizes) -> Program:
    """``model`` itself, dedicated."""
    if mode.dims == "tp":
        both = init_device_mesh("cpu", (1, sizes.world), mesh_dim_names=("shard", "tp"))
        _split(model, both["tp"])
        mesh = both["shard"]
    else:
        mesh = init_device_mesh("cpu", (sizes.world,), mesh_dim_names=(mode.dims,))
    dmuon.dedicate_params(model, mesh, reshard_after_forward=not mode.keep, costs=sizes.costs, comm=mode.comm)
    if mode.dims == "shard":
        for block in model.blocks:
            dmuon.fully_shard(block, mesh=mesh, reshard_after_forward=not mode.keep)
        dmuon.fully_shard(model, mesh=mesh)
    optimizer = dmuon.Muon(model, lr=LR, overlap_backward=mode.overlap)
    return Program(name, model, [optimizer], "muon", shared=mode.dims == "tp")


def _split(model: GPT, mesh: DeviceMesh) -> None:
    """Tensor parallelism over all ranks: heads and hidden units."""
    columns = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
    for block in model.blocks:
        plan = {name: ColwiseParallel() for name in columns}
        plan |= {name: RowwiseParallel() for name in ("attention.o", "mlp.down")}
        parallelize_module(block, mesh, plan)
        block.attention.heads //= mesh.size()


def build_stock(name: str, initial: GPT, mesh: DeviceMesh, sizes: Sizes) -> Program:
    """The program called ``GATHER``, ``DEDICATED`` or ``ADAMW``."""
    if name == DEDICATED:
        return build_dedicated(name, Mode(), copy.deepcopy(initial), sizes)
    matrices = {r.fqn for r in route_parameters(copy.deepcopy(initial)) if r.muon}
    model = sharded(fully_shard, copy.deepcopy(initial), mesh=mesh)
    if name == ADAMW:
        return Program(name, model, [adamw(model.parameters(), LR)], "adamw")
    assert name == GATHER, name
    named = list(model.named_parameters())
    muon = GatherMuon([p for n, p in named if n in matrices], lr=LR)
    return Program(name, model, [muon, adamw((p for n, p in named if n not in matrices), LR)], "muon")


def data(sizes: Sizes, step: int, rank: int | None, shared: bool = False) -> tuple[Tensor, Tensor]:
    """Random bytes of one rank, or of all ranks together (no rank, or ``shared``)."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(256, (sizes.world, sizes.batch, sizes.context + 1), generator=generator)
    part = tokens.flatten(0, 1) if rank is None or shared else tokens[rank]
    return part[:, :-1], part[:, 1:]


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    state = get_model_state_dict(model)
    return {n: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone() for n, t in state.items()}


def largest_difference(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Of any weight, relative in the Frobenius norm."""
    pairs = [(weights[n], e) for n, e in expected.items() if n in weights]
    return max(float((w - e).norm() / e.norm().clamp(min=1e-12)) for w, e in pairs)


def errors(programs: list[Program], initial: GPT, sizes: Sizes, rank: int) -> dict[str, float]:
    """By program, the largest difference of any weight from a single process after ``sizes.check`` steps."""
    twins = {}
    for kind in ("muon", "adamw"):
        twin = copy.deepcopy(initial)
        optimizer: Any = dmuon.Muon(twin, lr=LR) if kind == "muon" else adamw(twin.parameters(), LR)
        single = Program(kind, twin, [optimizer], kind)
        for step in range(sizes.check):
            single.step(*data(sizes, step, None))
        twins[kind] = {n: p.detach() for n, p in twin.state_dict().items()}
    by_program = {}
    for program in programs:
        for step in range(sizes.check):
            program.step(*data(sizes, step, rank, program.shared))
        by_program[program.name] = largest_difference(whole_weights(program.model), twins[program.reference])
    return by_program
