"""Models and training loops out of the ordinary, which run alike in a single process and on ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from harness.oracle import Reference
from harness.toy import SIZE, VOCAB, WIDTH, batch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from dmuon.check.model import Block, Network, loss_of

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

Sequence = Callable[[nn.Module, Any, Callable[[int], Tensor]], None]


def dropped_batch(model: nn.Module, optimizer: Any, loss: Callable[[int], Tensor]) -> None:
    for step in range(3):
        loss(10 + step).backward()
        if step == 1:
            model.zero_grad()  # not the optimizer's: a skipped step must leave nothing behind whoever clears it
        else:
            optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()


def step_twice(model: nn.Module, optimizer: Any, loss: Callable[[int], Tensor]) -> None:
    for step in range(2):
        optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()


def two_forwards_one_backward(model: nn.Module, optimizer: Any, loss: Callable[[int], Tensor]) -> None:
    for step in range(3):
        optimizer.zero_grad()
        first, second = loss(step), loss(20 + step)
        (first + second).backward()
        optimizer.step()


def two_forwards_two_backwards(model: nn.Module, optimizer: Any, loss: Callable[[int], Tensor]) -> None:
    for step in range(3):
        optimizer.zero_grad()
        first, second = loss(step), loss(20 + step)
        second.backward()
        first.backward()
        optimizer.step()


def retained_graph(model: nn.Module, optimizer: Any, loss: Callable[[int], Tensor]) -> None:
    for step in range(2):
        optimizer.zero_grad()
        value = loss(step)
        value.backward(retain_graph=True)
        value.backward()
        optimizer.step()


def forwards_that_never_run_backward(model: nn.Module, optimizer: Any, loss: Callable[[int], Tensor]) -> None:
    for step in range(3):
        optimizer.zero_grad()
        loss(30 + step)
        with torch.no_grad():
            loss(40 + step)
        with torch.inference_mode():
            loss(50 + step)
        loss(step).backward()
        with torch.no_grad():
            loss(60 + step)
        optimizer.step()
        model.eval()
        with torch.no_grad():
            loss(70 + step)
        model.train()


def exceptions(model: nn.Module, optimizer: Any, loss: Callable[[int], Tensor]) -> None:
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


def gradients_as_the_user_wants(model: nn.Module, optimizer: Any, loss: Callable[[int], Tensor]) -> None:
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        loss(step).backward()
        for param in model.parameters():
            if param.grad is not None:
                param.grad.mul_(0.5)
                param.grad.add_(param.detach(), alpha=0.01)
        optimizer.step()


def unfrozen_later(model: nn.Module, optimizer: Any, loss: Callable[[int], Tensor]) -> None:
    frozen = [model.embed.weight, model.norm.weight, model.blocks[1].up.bias]
    for step in range(4):
        for param in frozen:
            param.requires_grad_(step >= 2)
        optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()


SEQUENCES = [
    pytest.param(unfrozen_later, marks=pytest.mark.pitfall("P19")),
    pytest.param(dropped_batch, marks=pytest.mark.pitfall("P16")),
    pytest.param(step_twice, marks=pytest.mark.pitfall("P22")),
    pytest.param(two_forwards_one_backward, marks=pytest.mark.pitfall("P19")),
    pytest.param(two_forwards_two_backwards, marks=pytest.mark.pitfall("P19")),
    pytest.param(retained_graph),
    pytest.param(forwards_that_never_run_backward, marks=pytest.mark.pitfall("P17")),
    pytest.param(exceptions, marks=pytest.mark.pitfall("P17")),
    pytest.param(gradients_as_the_user_wants),
]
