"""Ways to train one GPT over ranks: dedicated Muon, gather-then-compute Muon, FSDP2 + AdamW; and what a step costs."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from training.gather import GatherMuon
from training.model import GPT, GPTConfig
from training.trainer import adamw, matrices_and_rest, sharded

import dmuon
from common.ablation import OWNERS, SEQUENTIAL, TEXTBOOK, TUNED, ablated
from common.clock import collect, in_turn, medians
from common.options import TurnOptions, option
from common.ranks import over_ranks, timed
from dmuon.dedicated.dedication import dedications

LR = 2e-3
APART = dmuon.create_dtensor_config()  # what every rank trains by itself
GATHER, DEDICATED, ADAMW = "gather-then-compute", "dedicated", "fsdp2 + adamw"


@dataclass(frozen=True, slots=True)
class Sizes(TurnOptions):
    """The model, its data, the ranks, and how often everything is timed."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    context: int = 256
    batch: int = 4
    check: int = 3
    seed: int = option(0, least=0)


S = TypeVar("S", bound=Sizes)


@dataclass(frozen=True, slots=True)
class Mode:
    """How a dedicated model is laid out and communicates.

    Attributes:
        dims: mesh dimension of data parallelism, ``tp`` for tensor parallelism over all ranks instead.
        level: of the ablation: what comes after it is left out.
    """

    dims: str = "shard"
    keep: bool = False
    overlap: bool = False
    level: str = TUNED
    comm: dmuon.CommOptions = field(default_factory=dmuon.CommOptions)


@dataclass(slots=True)
class Program:
    """One way to train: forward and backward, and the optimizers that follow.

    Attributes:
        kind: says how much of Newton–Schulz a rank computes at best: ``owners``, ``gather``, ``adamw``.
        layout: programs of one layout take as long without optimizers.
        shared: all ranks see the whole batch, as tensor parallelism wants it.
        update_seconds: what the optimizers took in the last step.
    """

    name: str
    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    kind: str
    layout: str = "fsdp2"
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
    options: dict[str, Any] = {"reshard_after_forward": not mode.keep, "comm": mode.comm, "costs": sizes.costs}
    if mode.level != TUNED:
        found = dmuon.dedicate_params(copy.deepcopy(model), mesh, **options)
        options |= {"plan": ablated(mode.level, found), "costs": None}
    dmuon.dedicate_params(model, mesh, **options)
    if mode.dims == "shard":
        for block in model.blocks:
            dmuon.fully_shard(block, mesh=mesh, reshard_after_forward=not mode.keep)
        dmuon.fully_shard(model, mesh=mesh)
    form = {"orthogonalize": TEXTBOOK} if mode.level == OWNERS else {}
    optimizer = dmuon.Muon(model, lr=LR, overlap_backward=mode.overlap, **form)
    # With overlap, backward orthogonalizes whether or not a step follows, so that its own would hide that.
    layout = name.replace(" overlap", "")
    return Program(name, model, [optimizer], "owners", layout, shared=mode.dims == "tp")


def _split(model: GPT, mesh: DeviceMesh) -> None:
    """Tensor parallelism over all ranks: heads and hidden units."""
    columns = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
    for block in model.blocks:
        plan = {name: ColwiseParallel() for name in columns}
        plan |= {name: RowwiseParallel() for name in ("attention.o", "mlp.down")}
        parallelize_module(block, mesh, plan)
        block.attention.heads //= mesh.size()


def build_stock(name: str, initial: GPT, mesh: DeviceMesh, sizes: Sizes) -> Program:
    """The program called ``GATHER``, ``SEQUENTIAL``, ``DEDICATED`` or ``ADAMW``."""
    if name == DEDICATED:
        return build_dedicated(name, Mode(), copy.deepcopy(initial), sizes)
    model = sharded(fully_shard, copy.deepcopy(initial), mesh=mesh)
    if name == ADAMW:
        return Program(name, model, [adamw(model.parameters(), LR)], "adamw")
    assert name in (GATHER, SEQUENTIAL), name
    matrices, rest = matrices_and_rest(model)
    muon = GatherMuon(matrices, lr=LR, textbook=name == SEQUENTIAL)
    return Program(name, model, [muon, adamw(rest, LR)], "gather")


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
    by_muon, by_adamw = copy.deepcopy(initial), copy.deepcopy(initial)
    single = Program("muon", by_muon, [dmuon.Muon(by_muon, lr=LR, distributed_config=APART)], "muon")
    singles = single, Program("adamw", by_adamw, [adamw(by_adamw.parameters(), LR)], "adamw")
    for step in range(sizes.check):
        for single in singles:
            single.step(*data(sizes, step, None))
        for program in programs:
            program.step(*data(sizes, step, rank, program.shared))
    expected = {single.kind: single.model.state_dict() for single in singles}
    return {
        program.name: largest_difference(
            whole_weights(program.model), expected["adamw" if program.kind == "adamw" else "muon"]
        )
        for program in programs
    }


# -- what a step costs ------------------------------------------------------------------------------------------------

COLUMNS = {"step": ".1f", "ideal": ".1f", "over": ".2f", "sent": ".1f", "rest": ".1f", "over own": ".2f"}
COLUMNS |= {"of AdamW": ".2f", "step()": ".1f", "exposed": ".1f", "of N/W": ".2f", "of gather": ".2f"}
COLUMNS |= {"exposed CPU": ".1f", "waits": ".1f", "error": ".1e"}
Samples = dict[tuple[str, str], list[float]]


def measure_steps(programs: list[Program], initial: GPT, sizes: Sizes, rank: int) -> Samples:
    """Milliseconds by program and column, and those of a rank alone; in turns."""
    twin = copy.deepcopy(initial)
    muon = dmuon.Muon(twin, lr=LR, distributed_config=APART)
    alone = Program("alone", twin, [muon], "muon")
    layouts = {program.layout: program for program in reversed(programs)}

    def sample(index: int) -> dict[tuple[str, str], float]:
        batch = data(sizes, 1000 + index, rank)
        took = {("alone", "F"): timed(lambda: alone.step(*batch, optimize=False))[0]}
        alone.step(*batch)
        took["alone", "N"] = 1e3 * muon.last_step.seconds["ns"]
        for program in in_turn(programs, index):
            batch = data(sizes, 1000 + index, rank, program.shared)
            took[program.name, "step"], took[program.name, "CPU"] = timed(lambda p=program, b=batch: p.step(*b))
            (took[program.name, "step()"],) = over_ranks([1e3 * program.update_seconds])
            if isinstance(program.optimizers[0], dmuon.Muon):
                waited = 1e3 * program.optimizers[0].last_step.seconds.get("exchange", 0.0)
                (took[program.name, "waits"],) = over_ranks([waited], dist.ReduceOp.MIN)
        for layout, program in layouts.items():
            batch = data(sizes, 1000 + index, rank, program.shared)
            took[layout, "bare"], took[layout, "bare CPU"] = timed(
                lambda p=program, b=batch: p.step(*b, optimize=False)
            )
        return took

    return collect(sizes.warmup, sizes.rounds, sample)


def compare(
    names: Iterable[str], build: Callable[[str, GPT, DeviceMesh, S], Program], settings: S, rank: int
) -> tuple[list[Program], dict[str, Any]]:
    """The programs, the medians of each, and what follows from them; of one rank alone under ``alone``. Collective."""
    mesh, initial = init_device_mesh("cpu", (settings.world,)), initial_model(settings)
    programs = [build(name, initial, mesh, settings) for name in names]
    error, world = errors(programs, initial, settings, rank), settings.world
    samples = measure_steps(programs, initial, settings, rank)
    found: dict[str, dict[str, Any]] = {}
    for (name, column), value in medians(samples).items():
        found.setdefault(name, {})[column] = value
    forward, newton = found["alone"]["F"], found["alone"]["N"]
    share = {"owners": newton / world, "gather": newton, "adamw": 0.0}
    rows = {}
    for program in programs:
        row, bare = found[program.name], found[program.layout]
        row["ideal"] = forward + share[program.kind]
        row["over"] = row["step"] / row["ideal"]
        row["bare"], row["bare CPU"] = bare["bare"], bare["bare CPU"]
        row["over own"] = row["step"] / (row["bare"] + share[program.kind])
        row["exposed"], row["exposed CPU"] = row["step"] - row["bare"], row["CPU"] - row["bare CPU"]
        row["sent"], row["rest"] = row["bare"] - forward, row["exposed"] - share[program.kind]
        row["of N/W"] = row["exposed"] * world / newton
        rows[program.name] = row | {"error": error[program.name]}
    for row in rows.values():
        row["of AdamW"] = row["step"] / rows[ADAMW]["step"]
        row["of gather"] = row["exposed"] / rows[GATHER]["exposed"]
    return programs, {"alone": found["alone"], "programs": rows}


def described(record: dict[str, Any]) -> str:
    """The model, and what one rank alone takes."""
    sizes, alone = record["settings"], record["alone"]
    return (
        f"{sizes['world']} ranks, 1 thread each, gloo; {sizes['layers']} layers of width {sizes['width']}; "
        f"{sizes['batch'] * sizes['context']} tokens per rank; {sizes['rounds']} interleaved rounds; medians in ms\n"
        f"F (forward + backward, no communication) {alone['F']:.1f}   N (Newton-Schulz of all matrices on one rank) "
        f"{alone['N']:.1f}"
    )
