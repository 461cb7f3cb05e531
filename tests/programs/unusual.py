"""Models and training loops out of the ordinary, which run alike in a single process and on ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from harness.network import Block, Network, loss_of
from harness.oracle import Reference
from harness.toy import SIZE, VOCAB, WIDTH, batch, build
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import dmuon
from dmuon.dedicated.dedication import dedications

# -- models ---------------------------------------------------------------------------------------------------------


class NestedBlock(Block):
    """Nested outputs whose first tensor nobody uses, keyword inputs, and an input that needs no gradient."""

    def forward(self, x: Tensor, *, extra: dict[str, Tensor]) -> dict[str, Any]:  # type: ignore[override]
        y = super().forward(x + extra["bias"])
        return {"unused": (self.up(x), None), "hidden": [y, extra["bias"]]}


class Variant(Network):
    """Runs the blocks of a toy model in the way that ``kind`` names."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        super().__init__(SIZE, NestedBlock if kind == "nested outputs" else Block)
        self.kind = kind
        if kind == "parameter used three times":
            self.blocks[1].mix = self.blocks[1].alias = nn.Linear(WIDTH, WIDTH, bias=False)
        if kind == "frozen matrix":
            self.blocks[0].mix.weight.requires_grad_(False)
        if kind == "block input without gradient":
            self.embed.weight.requires_grad_(False)
        if kind == "checkpoint wrapper":
            for i, block in enumerate(self.blocks):
                self.blocks[i] = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
        if kind == "checkpoint inside":
            for block in self.blocks:
                block.up = checkpoint_wrapper(block.up, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
                block.down = checkpoint_wrapper(block.down, checkpoint_impl=CheckpointImpl.REENTRANT)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        run = getattr(self, "_" + self.kind.replace(" ", "_"), self._plain)
        return self.head(self.norm(run(x)))

    def _plain(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def _block_called_twice(self, x: Tensor) -> Tensor:
        first, second, third = self.blocks
        return third(first(second(first(x))))

    def _same_block_twice_in_a_row(self, x: Tensor) -> Tensor:
        first, second, third = self.blocks
        return third(second(second(first(x))))

    def _one_call_without_backward(self, x: Tensor) -> Tensor:
        first, second, third = self.blocks
        second(x).sum()
        return third(second(first(x)))

    def _no_grad_call_inside(self, x: Tensor) -> Tensor:
        first, second, third = self.blocks
        with torch.no_grad():
            target = second(x)
        return third(second(first(x))) + target

    def _nested_outputs(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, extra={"bias": torch.ones(WIDTH)})["hidden"][0]
        return x

    def _parameter_used_three_times(self, x: Tensor) -> Tensor:
        first, second, third = self.blocks
        return third(second(second(first(x))))

    def _skipped_block(self, x: Tensor) -> Tensor:
        first, _, third = self.blocks
        return third(first(x))

    def _branches(self, x: Tensor) -> Tensor:
        first, second, third = self.blocks
        y = first(x)
        return third(second(y) + y) + second(x)

    def _checkpoint_reentrant(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x

    def _checkpoint_non_reentrant(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    def _checkpoint_several_blocks(self, x: Tensor) -> Tensor:
        first, second, third = self.blocks
        return third(checkpoint(lambda y: second(first(y)), x, use_reentrant=False))


KINDS = [
    "checkpoint several blocks",
    "plain",
    "block called twice",
    "same block twice in a row",
    "one call without backward",
    "no grad call inside",
    "nested outputs",
    "parameter used three times",
    "frozen matrix",
    "block input without gradient",
    "skipped block",
    "branches",
    "checkpoint reentrant",
    "checkpoint non reentrant",
    "checkpoint wrapper",
    "checkpoint inside",
]


def variant_matrix(name: str) -> bool:
    return name.startswith("blocks.") and name.endswith(("mix.weight", "alias.weight", "up.weight", "down.weight"))


def plain_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("_checkpoint_wrapped_module.", ""): tensor for name, tensor in state.items()}


@cache
def reference_variant(kind: str) -> dict[str, Tensor]:
    model = Variant(kind)
    optimizer = Reference(model, matrix=lambda name: variant_matrix(name.replace("_checkpoint_wrapped_module.", "")))
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, *batch(step)).backward()
        optimizer.step()
    return plain_names({name: tensor.detach() for name, tensor in model.state_dict().items()})


class Skipping(Network):
    """Leaves out block ``skipped``."""

    skipped: int | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            x = x if index == self.skipped else block(x)
        return self.head(self.norm(x))


def skipping() -> Skipping:
    torch.manual_seed(0)
    return Skipping(SIZE)


class Optional(nn.Module):
    """A matrix and a bias in each block that only some calls use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(OptionalBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor, use: bool) -> Tensor:
        for block in self.blocks:
            x = block(x, use)
        return self.head(x) if use else F.linear(x, self.head.weight)


class OptionalBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.extra = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, use: bool) -> Tensor:
        return x + self.mix(x) + (self.extra(x) if use else 0.0)


# -- training loops -------------------------------------------------------------------------------------------------

Loss = Callable[[int], Tensor]


def dedicated(model: nn.Module) -> bool:
    return bool(dedications(model))


def accumulate(model: nn.Module, kind: str) -> None:
    """The next backward reduces fully, within a replica only, or not at all."""
    if dedicated(model):
        dmuon.set_requires_gradient_sync(model, kind != "none")
        dmuon.set_requires_all_reduce(model, kind == "full")


def dropped_batch(model: nn.Module, optimizer: Any, loss: Loss) -> None:
    for step in range(3):
        loss(10 + step).backward()
        if step == 1:
            model.zero_grad()  # not the optimizer's: a skipped step must leave nothing behind whoever clears it
        else:
            optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()


def two_forwards_two_backwards(model: nn.Module, optimizer: Any, loss: Loss) -> None:
    for step in range(3):
        optimizer.zero_grad()
        first, second = loss(step), loss(20 + step)
        second.backward()
        first.backward()
        optimizer.step()


def exceptions(model: nn.Module, optimizer: Any, loss: Loss) -> None:
    class Stop(Exception):
        pass

    def stop(*_: Any) -> None:
        raise Stop

    for step in range(3):
        optimizer.zero_grad()
        handle = model.blocks[1].register_forward_pre_hook(stop)
        with pytest.raises(Stop):
            loss(80 + step)
        handle.remove()
        handle = model.blocks[1].mix.register_forward_hook(stop)
        with pytest.raises(Stop):
            loss(80 + step)
        handle.remove()
        handle = model.blocks[1].register_forward_hook(lambda _m, _a, out: out.register_hook(stop) and None)
        with pytest.raises(Stop):
            loss(80 + step).backward()
        handle.remove()
        model.zero_grad()  # not the optimizer's: what the failed pass had in flight must not arrive after this
        loss(step).backward()
        optimizer.step()


def retry_out_of_memory(model: nn.Module, optimizer: Any, loss: Loss) -> None:
    """A batch that fails within a forward or a backward is dropped and run again in two halves."""

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory left")

    def fail_backward(_module: nn.Module, _args: Any, out: Tensor) -> None:
        out.register_hook(fail)

    for step in range(4):
        optimizer.zero_grad()
        block = model.blocks[step % 3]
        where = block.up.register_forward_hook(fail_backward if step % 2 else fail)
        accumulate(model, "full")
        with pytest.raises(torch.OutOfMemoryError):
            loss(step).backward()
        where.remove()
        optimizer.zero_grad()
        for kind in ("none", "full"):
            accumulate(model, kind)
            (loss(step) / 2).backward()
        optimizer.step()


def only_forwards(model: nn.Module, optimizer: Any, loss: Loss) -> None:
    optimizer.step()  # before the first forward, without gradients
    with torch.no_grad():
        for i in range(4):
            loss(i)
    optimizer.step()
    loss(4).backward()
    optimizer.step()
    with torch.inference_mode():
        loss(5)
    optimizer.zero_grad()
    optimizer.step()
    loss(6).backward()
    optimizer.step()


def drop_then_skip(model: Skipping, optimizer: Any, loss: Loss, *, kind: str) -> None:
    """Gradients that were accumulated and dropped belong to a block that the next batch does not run."""
    for step in range(3):
        accumulate(model, kind)
        loss(80 + step).backward()
        model.zero_grad()  # not the optimizer's
        accumulate(model, "full")
        model.skipped = step
        loss(step).backward()
        left = [n for n, p in model.blocks[step].named_parameters() if p.grad is not None]
        assert not left, f"step {step}: {left} of a block that did not run"
        model.skipped = None
        optimizer.step()
        optimizer.zero_grad()


def dropped_by_zeroing(model: nn.Module, optimizer: Any, loss: Loss) -> None:
    for step in range(2):
        accumulate(model, "none")
        loss(50 + step).backward()
        model.zero_grad(set_to_none=False)
        accumulate(model, "full")
        loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()


def skipped_last(model: Skipping, optimizer: Any, loss: Loss, *, kind: str) -> None:
    """A block that the last micro-batch skips keeps its gradient of the one before."""
    for step in range(2):
        for skipped, index, reduced in ((None, step, kind), (1, 20 + step, "full")):
            accumulate(model, reduced)
            model.skipped = skipped
            loss(index).backward()
        optimizer.step()
        optimizer.zero_grad()


def reset_momentum(model: nn.Module, optimizer: Any, loss: Loss, *, how: str) -> None:
    for step in range(3):
        if step == 2:
            for state in (optimizer if dedicated(model) else optimizer.muon).state.values():
                momentum = state.get("momentum_buffer")
                if momentum is None:
                    continue  # of AdamW
                if how == "replaced":
                    state["momentum_buffer"] = torch.zeros_like(momentum)
                elif how == "cleared":
                    state.clear()
                else:
                    momentum.zero_()
        loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()


@dataclass(frozen=True)
class Program:
    """A training loop.

    Attributes:
        alone: stock FSDP2 cannot do it, so that it runs on what dmuon does alone. FSDP2 cannot go on after an exception
            inside a backward, its root keeps weights from before the step when a forward without gradients runs between
            backward and step, and it does not drop what it accumulated when gradients are cleared.
        worlds: on which it runs, and whether it is quick enough for the suite there.
    """

    loop: Callable[[Any, Any, Loss], None]
    pitfalls: tuple[str, ...] = ()
    alone: bool = False
    make: Callable[[], nn.Module] = build
    worlds: Mapping[int, bool] = field(default_factory=lambda: {2: True, 4: False})

    def __str__(self) -> str:
        if isinstance(self.loop, partial):
            return "-".join([self.loop.func.__name__, *self.loop.keywords.values()])
        return self.loop.__name__


FOUR = {4: False}
PROGRAMS = [
    Program(retry_out_of_memory, ("P17",), alone=True, worlds=FOUR),
    Program(only_forwards, ("P22",), alone=True, worlds=FOUR),
    Program(exceptions, ("P17",), alone=True, worlds={2: True, 4: False}),
    Program(dropped_batch, ("P16",)),
    Program(two_forwards_two_backwards, ("P19",)),
    Program(dropped_by_zeroing, ("P16",), alone=True, worlds={2: True}),
    *(
        Program(partial(reset_momentum, how=how), ("P10",), worlds={2: how == "cleared"})
        for how in ("replaced", "cleared", "zeroed")
    ),
    Program(partial(drop_then_skip, kind="none"), ("P16",), True, skipping, FOUR),
    Program(partial(drop_then_skip, kind="replica"), ("P16",), True, skipping, FOUR),
    Program(partial(skipped_last, kind="none"), ("P12", "P19"), True, skipping, {2: True}),
    Program(partial(skipped_last, kind="replica"), ("P12", "P19"), True, skipping, FOUR),
]
