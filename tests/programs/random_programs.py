"""Random training programs on two ranks, each beside the same program in one process: equal, or refused by name.

A program is a model, a layout and a few passes, drawn from a seed: blocks that hand tensors to later ones through an
object, that recompute a part of themselves, or that save by hooks of their own; blocks merged, freed or kept; several
backwards before a step; evaluations, edits, loads and forwards that raise in between; parameters that come late or
thaw; gradients and models in other memory orders.

``python tests/programs/random_programs.py --programs 2000`` runs them at length. Each must end like its twin: nothing
silent, nothing that hangs.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn as nn
from harness.dtensors import whole
from harness.on_ranks import of_all_ranks
from harness.pool import RankPool
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import dmuon
from programs.left_behind import AROUND, HOOKS

WIDTH, BATCH, TOLERANCE = 8, 8, 2e-4
CHUNK = 25  # programs in one call of the pool
SECONDS = 8.0  # of one program at the most, on a busy machine


@dataclass(frozen=True)
class Program:
    layout: str
    blocks: tuple[tuple[str, str], ...]  # of each, how it recomputes or hooks, and what it leaves in the cache
    keep: bool
    merge_bytes: int
    prefetch: int
    passes: tuple[str, ...]
    channels_last: bool


def draw_program(seed: int) -> Program:
    draw = random.Random(seed)
    layout = draw.choices(list(LAYOUTS), [3, 2, 1, 1, 1])[0]
    dedicated = layout.startswith("dedicated")
    hidden = layout != "sharded"  # FSDP2 does not find what it freed where no output shows the way
    insides = list(INSIDE) if layout != "copied" else [i for i in INSIDE if i != "reentrant"]
    blocks = tuple(
        (draw.choice(insides), draw.choice(("nothing", "nothing", "key", "loss")) if hidden else "nothing")
        for _ in range(draw.randint(2, 4))
    )
    kinds = [*PASSES, *DEDICATED_PASSES] if dedicated else list(PASSES)
    if layout == "dedicated and sharded":  # FSDP2 keeps to the parameters that it was given, as they lay
        kinds = [kind for kind in kinds if kind not in ("late_head", "reordered")]
    return Program(
        layout,
        blocks,
        keep=draw.random() < 0.3,
        merge_bytes=draw.choice((0, 10**6)),
        prefetch=draw.choice((0, 1, 2)),
        passes=tuple(draw.choice(kinds) for _ in range(draw.randint(2, 4))),
        channels_last=draw.random() < 0.4,
    )


# -- models ------------------------------------------------------------------------------------------------------------


class Cache:
    """What blocks leave for later ones, and for the loss, where no output shows it."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.losses: list[Tensor] = []


def hooked(hooks: str, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with HOOKS[hooks]():
        return function(x)


INSIDE: dict[str, Callable[..., Tensor]] = {
    **AROUND,
    "hooks": partial(hooked, "pass through"),
    "cpu": partial(hooked, "cpu"),
}


class Block(nn.Module):
    def __init__(self, inside: str, leaves: str) -> None:
        super().__init__()
        self.inside, self.leaves = inside, leaves
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(self.norm(x)))

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        h = INSIDE[self.inside](self.inner, x)
        key = torch.tanh(self.key(x))
        if self.leaves == "key":
            cache.keys.append(key)
            key = key.detach()
        elif self.leaves == "loss":
            cache.losses.append(key.square().mean())
            key = key.detach()
        return x + self.down(h) + 0.1 * key


class Net(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, WIDTH, 2)
        self.blocks = nn.ModuleList(Block(*block) for block in program.blocks)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        cache = Cache()
        x = self.stem(x).mean((2, 3))
        for block in self.blocks:
            x = block(x, cache)
            if cache.keys and block is not self.blocks[-1]:
                x = x + 0.1 * cache.keys[0]
        out = self.head(x).square().mean()
        return out + sum(0.1 * key.square().mean() for key in cache.keys) + sum(cache.losses)


def batch(number: int) -> Tensor:
    return torch.randn(BATCH, 2, 3, 3, generator=torch.Generator().manual_seed(number))


# -- layouts -----------------------------------------------------------------------------------------------------------


class Laid:
    """A model in some layout with its optimizer, on this rank; alone it is the twin."""

    def __init__(self, program: Program, layout: str, rank: int, world: int) -> None:
        torch.manual_seed(0)
        self.program, self.layout, self.rank, self.world = program, layout, rank, world
        self.model = self.inner = Net(program)
        if program.channels_last and "sharded" not in layout:  # which FSDP2 does not take
            self.inner.to(memory_format=torch.channels_last)
        if layout != "alone":
            self.model = LAYOUTS[layout](self.inner, program, init_device_mesh("cpu", (world,)))
        self.optimizer = dmuon.Muon(self.model, lr=0.05, adamw_lr=0.01)

    def loss(self, number: int) -> Tensor:
        share = BATCH // self.world
        rows = slice(self.rank * share, (self.rank + 1) * share)
        return self.model(batch(number)[rows])

    def summoned(self, writeback: bool) -> contextlib.AbstractContextManager[None]:
        dedicated = self.layout.startswith("dedicated")
        return dmuon.summon_full_params(self.inner, writeback=writeback) if dedicated else contextlib.nullcontext()

    def weights(self) -> dict[str, Tensor]:
        with self.summoned(writeback=False):
            return {name: whole(param) for name, param in self.inner.named_parameters()}

    def norms(self) -> dict[str, float]:
        return {n: float(whole(p.grad.norm())) for n, p in self.inner.named_parameters() if p.grad is not None}


def dedicated(model: Net, program: Program, mesh: Any) -> nn.Module:
    comm = dmuon.CommOptions(merge_bytes=program.merge_bytes, prefetch=program.prefetch)
    dmuon.dedicate_params(model, mesh, costs="flops", reshard_after_forward=not program.keep, comm=comm)
    return model


def dedicated_and_sharded(model: Net, program: Program, mesh: Any) -> nn.Module:
    dedicated(model, program, mesh)
    return dmuon.fully_shard(model, mesh=mesh, reshard_after_forward=False)


def dedicated_copies(model: Net, program: Program, mesh: Any) -> nn.Module:
    return dedicated(model, program, init_device_mesh("cpu", (mesh.size(),), mesh_dim_names=("replicate",)))


def sharded(model: Net, program: Program, mesh: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=not program.keep)
    return fully_shard(model, mesh=mesh)


def copied(model: Net, program: Program, mesh: Any) -> nn.Module:
    return DistributedDataParallel(model, find_unused_parameters=True)


LAYOUTS: dict[str, Callable[[Net, Program, Any], nn.Module]] = {
    "dedicated": dedicated,
    "dedicated and sharded": dedicated_and_sharded,
    "dedicated copies": dedicated_copies,
    "sharded": sharded,
    "copied": copied,
}


# -- passes ------------------------------------------------------------------------------------------------------------


def once(laid: Laid, number: int) -> None:
    laid.loss(number).backward()


def accumulated(laid: Laid, number: int) -> None:
    laid.loss(number).backward()
    laid.loss(number + 1).backward()


def other_order(laid: Laid, number: int) -> None:
    """Gradients whose strides are not the parameters'."""
    laid.loss(number).backward()
    for name, param in laid.inner.named_parameters():
        if param.ndim == 2 and name.startswith("head") and not isinstance(param, DTensor):
            param.grad = param.grad.t().contiguous().t()


def thawed(laid: Laid, number: int) -> None:
    """The head does not train in one pass; what DDP does with that is its own."""
    laid.inner.head.weight.requires_grad_(False)
    laid.loss(number).backward()
    laid.inner.head.weight.requires_grad_(True)


def same_graph_twice(laid: Laid, number: int) -> None:
    loss = laid.loss(number)
    loss.backward(retain_graph=True)
    loss.backward()


def two_forwards_first(laid: Laid, number: int) -> None:
    losses = [laid.loss(number), laid.loss(number + 1)]
    for loss in losses:
        loss.backward()


def unsynchronized_first(laid: Laid, number: int) -> None:
    with contextlib.nullcontext() if laid.layout == "alone" else dmuon.no_sync(laid.inner):
        laid.loss(number).backward()
    laid.loss(number + 1).backward()


def late_head(laid: Laid, number: int) -> None:
    """A head that comes after the optimizer was built, the same on all ranks."""
    torch.manual_seed(number)
    old = laid.inner.head
    laid.inner.head = nn.Linear(WIDTH, 3)
    for group in laid.optimizer.param_groups:
        group["params"] = [p for p in group["params"] if not any(p is q for q in old.parameters())]
    options = {"use_muon": False, "lr": 0.01}
    laid.optimizer.add_param_group({"params": [laid.inner.head.weight], **options})
    laid.optimizer.add_param_group({"params": [laid.inner.head.bias], **options, "weight_decay": 0.0})
    laid.loss(number).backward()


def reordered(laid: Laid, number: int) -> None:
    """The model gets another memory order between two steps."""
    laid.inner.stem.to(memory_format=torch.channels_last)
    laid.loss(number).backward()


def clipped(laid: Laid, number: int) -> None:
    laid.loss(number).backward()
    dmuon.clip_grad_norm_(laid.inner.parameters(), 0.02)


def evaluated_between(laid: Laid, number: int) -> None:
    """Between a forward and its backward, and a forward whose graph is thrown away before."""
    laid.loss(number + 1)
    loss = laid.loss(number)
    with torch.no_grad():
        laid.loss(number + 1)
    loss.backward()


def raised_in_forward(laid: Laid, number: int) -> None:
    """The forward after one that raised is an ordinary one."""
    handle = laid.inner.blocks[-1].down.register_forward_pre_hook(lambda *_: 1 / 0)  # type: ignore[arg-type]
    with contextlib.suppress(ZeroDivisionError):
        laid.loss(number)
    handle.remove()
    laid.loss(number).backward()


def edited_whole(laid: Laid, number: int) -> None:
    with laid.summoned(writeback=True), torch.no_grad():
        laid.inner.blocks[0].up.weight.mul_(1.5)
    laid.loss(number).backward()


def edited_at_rest(laid: Laid, number: int) -> None:
    with torch.no_grad():
        laid.inner.blocks[0].down.weight.mul_(0.5)
    laid.loss(number).backward()


def loaded_anew(laid: Laid, number: int) -> None:
    """What was saved a moment ago changes nothing."""
    laid.optimizer.load_state_dict(laid.optimizer.state_dict())
    laid.inner.load_state_dict(laid.inner.state_dict())
    laid.loss(number).backward()


PASSES = {f.__name__: f for f in (once, accumulated, other_order, clipped)}
DEDICATED_PASSES = {
    f.__name__: f
    for f in (
        *(thawed, same_graph_twice, two_forwards_first, unsynchronized_first, late_head, reordered),
        *(evaluated_between, raised_in_forward, edited_whole, edited_at_rest, loaded_anew),
    )
}


def play(rank: int, world: int, seed: int) -> None:
    """One program and its twin. Raises AssertionError where they differ."""
    program = draw_program(seed)
    laid, twin = Laid(program, program.layout, rank, world), Laid(program, "alone", 0, 1)
    for number, name in enumerate(program.passes):
        for each in (twin, laid):
            each.optimizer.zero_grad()
            {**PASSES, **DEDICATED_PASSES}[name](each, 2 * number)
        _require_close(laid.norms(), twin.norms(), f"{name}: norms of gradients")
        for each in (twin, laid):
            each.optimizer.step()
    found = laid.weights()
    for name, value in twin.weights().items():
        error = float((found[name] - value).norm() / value.norm().clamp_min(1e-6))
        assert error <= TOLERANCE, f"{name} is off by {error:.1e}"


def _require_close(found: dict[str, float], expected: dict[str, float], what: str) -> None:
    assert found.keys() == expected.keys(), f"{what}: {sorted(found.keys() ^ expected.keys())}"
    for name, value in expected.items():
        assert abs(found[name] - value) <= TOLERANCE * max(value, 1e-4), f"{what}: {name} {found[name]} for {value}"


def play_all(rank: int, world: int, seeds: list[int]) -> list[str]:
    """What went wrong, one line a program."""
    wrong = []
    for seed in seeds:
        print(f"program {seed}: {draw_program(seed)}", flush=True)
        try:
            play(rank, world, seed)
            fault = ""
        except Exception as error:
            fault = f"{type(error).__name__}: {str(error)[:400]}"
        faults = of_all_ranks(fault)
        if any(faults):
            wrong.append(f"program {seed}: {' | '.join(faults)}")
    return wrong


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Random programs on two ranks, each beside its twin in one process.")
    parser.add_argument("--programs", type=int, default=2000, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first; each next one adds one")
    options = parser.parse_args(arguments)
    pool, wrong, start = RankPool(), [], time.monotonic()
    kinds: Counter[str] = Counter()
    seeds = range(options.seed, options.seed + options.programs)
    for first in range(0, len(seeds), CHUNK):
        some = list(seeds[first : first + CHUNK])
        kinds.update(name for seed in some for name in draw_program(seed).passes)
        found = pool(2, play_all, some, timeout=60 + SECONDS * len(some))[0]
        wrong += found
        for line in found:
            print(line, flush=True)
    pool.close()
    print(
        f"{len(seeds)} programs, {len(wrong)} wrong or refused, {time.monotonic() - start:.0f} s; passes: {dict(kinds)}"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
