"""Backward enters blocks where no output shows it: what the hooks do for that. That it trains: tests/parity/."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn as nn
from harness.assertions import about
from harness.dedicated_toy import dedicate
from harness.network import shard
from harness.on_ranks import on_ranks
from harness.topologies import lay
from harness.toy import batch, build
from programs.left_behind import auxiliary_loss, model_of
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from dmuon.dedicated.dedication import dedications

pytestmark = pytest.mark.pitfall("P66", "P83")


class Toy(nn.Module):
    """One block, of whose forward ``forward`` is the body."""

    def __init__(self, forward: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Toy.Block(forward), Toy.Block(forward)])

    class Block(nn.Module):
        def __init__(self, forward: Callable[[nn.Module, Any], Any]) -> None:
            super().__init__()
            self.first, self.second, self.body = nn.Linear(4, 4), nn.Linear(4, 4), forward
            self.forwards = 0

        def forward(self, x: Any) -> Any:
            self.forwards += 1
            return self.body(self, x)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


def dedicated(forward: Callable[[nn.Module, Any], Any], **options: Any) -> Toy:
    model: Toy = dedicate(Toy(forward), **options)
    return model


def plain(block: nn.Module, x: Tensor) -> Tensor:
    return torch.relu(block.second(torch.tanh(block.first(x))))


def hooks_now() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


@on_ranks(2)
def test_checkpointing_around_a_block_recomputes_it_once_and_hooks_outside_see_all_that_is_no_weight(
    rank: int, world: int
) -> None:
    seen: dict[bool, list[tuple[int, ...]]] = {}
    for owned in (False, True):
        model = dedicated(plain) if owned else Toy(plain)
        x = torch.ones(2, 4, requires_grad=True)
        checkpoint(model.blocks[0], x, use_reentrant=False).sum().backward()
        assert model.blocks[0].forwards == 2
        seen[owned] = []
        note = partial(_note, seen[owned])
        with saved_tensors_hooks(note, lambda tensor: tensor):
            model.blocks[1](x).sum().backward()
    weights = [(4, 4)] * (len(seen[False]) - len(seen[True]))
    assert sorted([*seen[True], *weights]) == sorted(seen[False]) and len(weights) == 2


def _note(seen: list[tuple[int, ...]], tensor: Tensor) -> Tensor:
    seen.append(tuple(tensor.shape))
    return tensor


@on_ranks(2)
def test_the_hooks_come_off_whatever_ends_a_forward(rank: int, world: int) -> None:
    ends: list[type[BaseException]] = []

    def body(block: nn.Module, x: Tensor) -> Tensor:
        for kind in ends:
            raise kind
        return plain(block, x)

    model, twin = dedicated(body), Toy(body)
    x = torch.ones(2, 4, requires_grad=True)
    for kind, outside in product((ValueError, KeyboardInterrupt), (contextlib.nullcontext, save_on_cpu)):
        ends[:] = [kind]
        with pytest.raises(kind), outside():
            model(x)
        ends.clear()
        found, expected = model(x), twin(x)
        assert hooks_now() is None and torch.equal(found, expected)
        found.sum().backward()


@on_ranks(2)
def test_what_a_forward_may_not_do_is_named(rank: int, world: int) -> None:
    """What functions of torch.func need is there if weights are kept."""

    def changes(block: nn.Module, x: Tensor) -> Tensor:
        return torch.exp(block.first(x)).add_(1)

    def forces(block: nn.Module, x: Tensor) -> Tensor:
        return torch.func.grad(lambda at: at.sin().sum())(x.detach()) + block.first(x)

    def clamps(block: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            block.first.weight.clamp_(-0.1, 0.1)
        return block.first(x)

    def replaces(block: nn.Module, x: Tensor) -> Tensor:
        block.first.weight.data = block.first.weight.data.clamp(-0.1, 0.1)
        return block.first(x)

    edited = r"'blocks\.0\.first\.weight' was changed in place inside the forward"
    for body, keep, told in [
        (changes, False, r"a tensor of shape \(2, 4\) that backward needs was changed in place"),
        (forces, False, r"saved tensor hooks.* block 'blocks\.0'.*reshard_after_forward=False"),
        *((edit, keep, edited) for edit, keep in product((clamps, replaces), (False, True))),
    ]:
        with about((body, keep)), pytest.raises(RuntimeError, match=told):
            dedicated(body, reshard_after_forward=not keep)(torch.ones(2, 4)).sum().backward()
    model, twin = dedicated(forces, reshard_after_forward=False), Toy(forces)
    assert torch.equal(model(torch.ones(2, 4)), twin(torch.ones(2, 4)))


# -- gradients that no output shows -----------------------------------------------------------------------------------


@on_ranks(1)
def test_a_graph_of_older_weights_is_refused_though_no_output_shows_it(rank: int, world: int) -> None:
    model = model_of("board")
    laid = lay("1d-1-two-lines", model)
    optimizer = laid.optimizer()
    auxiliary_loss(model, 0).backward(retain_graph=True)
    total = model.total
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"the weights of block 'blocks\.\d' changed between its forward and its b"):
        total.backward()


@on_ranks(2)
def test_a_forward_that_raises_leaves_no_weights_behind(rank: int, world: int) -> None:
    """Nothing comes out of it either, but no backward will enter it."""
    model = model_of("attribute")
    lay("1d-two-lines", model)
    block = dedications(model)[0].runtime.blocks[0]
    handle = model.blocks[0].down.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        auxiliary_loss(model, 0, rank, world)
    handle.remove()
    assert sum(storage.nbytes() for storage in block.buffer.storages) == 0


@pytest.mark.parametrize("layout", ["1d-two-lines", "ddp-2"])
@on_ranks(2)
def test_features_of_a_forward_that_was_broken_off_are_differentiated(rank: int, world: int, layout: str) -> None:
    """Programs end a forward by an exception once they have what they want."""
    model, found = build(), []
    lay(layout, model)
    for one, data in ((model, shard(batch(0), rank, world)), (alone := build(), batch(0))):

        def take(_module: nn.Module, _args: Any, features: Tensor) -> None:
            found.append(features)
            raise StopIteration

        handle = one.blocks[1].down.register_forward_hook(take)
        with contextlib.suppress(StopIteration):
            one(data[0])
        handle.remove()
        found.pop().square().mean().backward()
    for name, param in alone.named_parameters():
        grad = model.get_parameter(name).grad
        assert (grad is None) == (param.grad is None), name
        if param.grad is not None:
            torch.testing.assert_close(grad.norm(), param.grad.norm())
