"""What a training program may do, on a dedicated model and its twin alike."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from harness.network import is_matrix
from harness.toy import DECAY, LR, batch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor

import dmuon
from programs.fuzz_twin import (
    ALL,
    ANY_FREEZE,
    DROP_UNREDUCED,
    INFERENCE,
    MODES,
    RAISE_IN_BACKWARD,
    TOLERANCE,
    Run,
    check_gradients,
    require_close,
    require_same_on_all_ranks,
    resynchronize,
    take_branches,
)

SYNCS = ["all", "within replicas", "none"]  # how far a backward reduces gradients


class Trap(Exception):
    """Raised on purpose, on every rank."""


@dataclass(frozen=True, slots=True)
class Action:
    run: Callable[[Run, random.Random], None]
    weight: int
    needs: frozenset[str]


ACTIONS: dict[str, Action] = {}


def action(weight: int = 1, needs: str | None = None) -> Callable[[Any], Any]:
    """Register an action that comes ``weight`` times in a deck, in modes that have what it ``needs``."""

    def register(function: Callable[[Run, random.Random], None]) -> Callable[[Run, random.Random], None]:
        ACTIONS[function.__name__] = Action(function, weight, frozenset() if needs is None else frozenset({needs}))
        return function

    return register


def possible_actions(mode: str) -> set[str]:
    return {name for name, entry in ACTIONS.items() if not entry.needs & MODES[mode].lacks}


def finish(run: Run, draw: random.Random) -> None:
    """Step on the gradients that are there, sometimes clipped, and clear them."""
    chance = draw.random()
    if chance < 0.3:
        clip(run, draw)
    elif chance < 0.4:
        clip_values(run, draw)
    run.step()
    run.zero_grad(set_to_none=draw.random() < 0.8)


@action(weight=3)
def ordinary_step(run: Run, draw: random.Random) -> None:
    run.train_pass()
    finish(run, draw)


@action()
def step_with_closure(run: Run, draw: random.Random) -> None:
    index = run.next_batch()

    def closure() -> float:
        run.optimizer.zero_grad()
        loss = run.loss(index)
        loss.backward()
        return float(loss.detach())

    run.optimizer.step(closure)
    run.twin.zero_grad()
    run.twin.backward([index])
    check_gradients(run)
    run.twin.step()
    run.zero_grad()


@action(weight=2)
def accumulate(run: Run, draw: random.Random) -> None:
    """Micro-batches, synchronized or not one by one, with other things in between, equal one big batch."""
    k = draw.randint(2, 4)
    syncs = [draw.choice(SYNCS) for _ in range(k - 1)] + ["all"]
    run.detail(f"syncs={syncs}")
    batches = [run.next_batch() for _ in range(k)]
    for index, sync in zip(batches, syncs, strict=True):
        with _synchronization(run, sync, draw):
            (run.loss(index) / k).backward()
        if index != batches[-1] and draw.random() < 0.6:
            between = draw.choice([evaluate, forward_only, read_state, raise_in_forward])
            run.detail(between.__name__)
            between(run, draw)
    run.twin.backward(batches)
    check_gradients(run)
    finish(run, draw)


@contextmanager
def _synchronization(run: Run, sync: str, draw: random.Random) -> Iterator[None]:
    """A micro-batch that reduces gradients as ``sync`` says."""
    if sync != "within replicas" and draw.random() < 0.5:
        with nullcontext() if sync == "all" else dmuon.no_sync(run.model):
            yield
        return
    dmuon.set_requires_gradient_sync(run.model, sync != "none")
    dmuon.set_requires_all_reduce(run.model, sync == "all")
    try:
        yield
    finally:
        dmuon.set_requires_gradient_sync(run.model, True)
        dmuon.set_requires_all_reduce(run.model, True)


@action(weight=2)
def evaluate(run: Run, draw: random.Random) -> None:
    """Logits are the twin's, and bitwise the same on all ranks."""
    tokens, _ = batch(run.next_batch())
    mode = torch.inference_mode if run.has(INFERENCE) and draw.random() < 0.3 else torch.no_grad
    run.model.eval()
    with mode():
        logits, expected = run.model(tokens), run.twin.model(tokens)
    run.model.train()
    require_same_on_all_ranks("logits", {"of an evaluation": logits})
    require_close(run, "logits", {"an evaluation": logits}, {"an evaluation": expected})


@action()
def forward_only(run: Run, draw: random.Random) -> None:
    """A training forward whose graph is thrown away."""
    run.loss(run.next_batch())


@action()
def drop_gradients(run: Run, draw: random.Random) -> None:
    """A batch that is skipped leaves nothing behind."""
    if run.has(DROP_UNREDUCED) and draw.random() < 0.6:
        sync = draw.choice(SYNCS)
        run.detail(f"sync={sync}")
        with _synchronization(run, sync, draw):
            run.loss(run.next_batch()).backward()
    else:
        run.train_pass()
    if draw.random() < 0.5:
        run.model.zero_grad()
    run.zero_grad()


@action()
def step_repeatedly(run: Run, draw: random.Random) -> None:
    run.train_pass()
    run.step()
    run.step()
    if draw.random() < 0.5:
        run.zero_grad()
        run.step()
    run.zero_grad()


@action()
def skip_step(run: Run, draw: random.Random) -> None:
    """Gradients stay, and the next pass adds to them."""
    run.train_pass()


@action()
def clip(run: Run, draw: random.Random) -> None:
    """Clip what is there; torch's function where everything is sharded."""
    limit = draw.choice([1e-3, 0.1, 0.5])
    order = draw.choice([2.0, 2.0, 1.0, math.inf])
    stock = run.mode.fsdp and order == 2.0 and draw.random() < 0.5
    run.detail(f"limit={limit} order={order} stock={stock}")
    function = torch.nn.utils.clip_grad_norm_ if stock else dmuon.clip_grad_norm_
    norm = function(run.model.parameters(), limit, order)
    found = norm.full_tensor() if isinstance(norm, DTensor) else norm
    expected = torch.nn.utils.clip_grad_norm_(run.twin.model.parameters(), limit, order)
    require_close(run, "norm", {"all gradients": found}, {"all gradients": expected})


@action()
def clip_values(run: Run, draw: random.Random) -> None:
    limit = draw.choice([1e-4, 1e-2, 1.0])
    run.detail(f"values limit={limit}")
    dmuon.clip_grad_value_(run.model.parameters(), limit)
    for param in run.twin.params.values():  # torch's function raises if there are no gradients
        if param.grad is not None:
            param.grad.clamp_(-limit, limit)


@action()
def edit_gradients(run: Run, draw: random.Random) -> None:
    """Gradients are the user's to scale, to clear, and to take away."""
    name = draw.choice(sorted(run.twin.params))
    run.detail(f"none for {name}")
    run.train_pass()
    for params in (run.params(), run.twin.params):
        for param in params.values():
            if param.grad is not None:
                param.grad.mul_(0.5)
        params[name].grad = None
    finish(run, draw)


@action()
def change_options(run: Run, draw: random.Random) -> None:
    lrs = [LR * draw.choice([0.25, 0.5, 1.0, 2.0]) for _ in range(2)]
    decay, momentum = draw.choice([0.0, 0.05, DECAY]), draw.choice([0.0, 0.9, 0.95])
    run.detail(f"lrs={lrs} weight_decay={decay} momentum={momentum}")
    for groups in (run.optimizer.param_groups, run.twin.groups()):
        for group in groups:
            group["lr"] = lrs["momentum" in group]
            if "momentum" in group:
                group["momentum"], group["weight_decay"] = momentum, decay


@action()
def save(run: Run, draw: random.Random) -> None:
    """A checkpoint by stock means; the twin remembers its state, after it has taken over the same bits."""
    resynchronize(run)
    run.saves += 1
    weights, state = get_state_dict(run.model, run.optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=_checkpoint(run))
    run.twin.save()


@action(weight=2)
def load(run: Run, draw: random.Random) -> None:
    """The latest checkpoint undoes at least one step; gradients stay as they are."""
    if run.saves == 0:
        save(run, draw)
    run.train_pass()
    finish(run, draw)
    if draw.random() < 0.3:
        run.train_pass()
    weights, state = get_state_dict(run.model, run.optimizer)
    loaded = {"model": weights, "optimizer": state}
    dcp.load(loaded, checkpoint_id=_checkpoint(run))
    set_state_dict(run.model, run.optimizer, model_state_dict=weights, optim_state_dict=loaded["optimizer"])
    run.twin.load()
    look = draw.choice([evaluate, forward_only, None])
    if look is None:
        resynchronize(run)
    else:
        run.detail(look.__name__)
        look(run, draw)


def _checkpoint(run: Run) -> str:
    return f"{run.case.folder}/{run.case.mode}-{run.case.seed}-{run.saves}"


@action()
def raise_in_forward(run: Run, draw: random.Random) -> None:
    """The forward after one that raised is an ordinary one."""
    name = draw.choice(SITES)
    run.detail(f"at {name}")
    handle = run.model.get_submodule(name).register_forward_pre_hook(_raise)
    try:
        run.loss(run.next_batch())
    except Trap:
        pass
    else:
        raise AssertionError(f"nothing raised at {name}")
    finally:
        handle.remove()
    evaluate(run, draw)


@action(weight=2, needs=RAISE_IN_BACKWARD)
def raise_in_backward(run: Run, draw: random.Random) -> None:
    """Once gradients are cleared, nothing of a backward that raised comes back."""
    name = draw.choice(SITES)
    if name == "embed" and not run.model.embed.weight.requires_grad:
        name = "blocks.1"  # no gradient comes to a frozen embedding
    sync, at_once = draw.choice(SYNCS), draw.random() < 0.5
    unreduced = SYNCS[1:] if run.replicas > 1 else ["none"]
    earlier = draw.choice([None, *unreduced])
    if at_once:  # what was reduced before is out of reach of `model.zero_grad()` while a block holds whole weights
        run.zero_grad()
    run.detail(f"at {name} sync={sync} earlier={earlier} at_once={at_once}")
    if earlier is not None:
        with _synchronization(run, earlier, draw):
            run.loss(run.next_batch()).backward()
    handle = run.model.get_submodule(name).register_forward_hook(_trap_gradient)
    try:
        with _synchronization(run, sync, draw):
            run.loss(run.next_batch()).backward()
    except Trap:
        pass
    else:
        raise AssertionError(f"nothing raised at {name}")
    finally:
        handle.remove()
    if at_once:  # not the optimizer's: the next forward must clean up on its own
        run.model.zero_grad()
        run.twin.zero_grad()
        run.train_pass()
        finish(run, draw)
    else:
        run.zero_grad()


SITES = ["embed", "blocks.0", "blocks.0.up", "blocks.1", "blocks.1.mix", "blocks.2", "blocks.2.down", "norm", "head"]


def _raise(*_: Any) -> None:
    raise Trap


def _trap_gradient(_module: nn.Module, _args: Any, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(_raise)


@action()
def edit_whole_weights(run: Run, draw: random.Random) -> None:
    """Edits under ``summon_full_params`` are seen, unless they raised or were not to be written back."""
    kind = draw.choice(["written", "written", "dropped", "raised"])
    run.detail(kind)
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    noise = {n: 0.01 * torch.randn(p.shape, generator=generator) for n, p in run.twin.params.items() if is_matrix(n)}
    try:
        with dmuon.summon_full_params(run.model, writeback=kind != "dropped"), torch.no_grad():
            for name, param in run.model.named_parameters():
                if name in noise:
                    param.mul_(0.95).add_(_placed(noise[name], param))
            if kind == "raised":
                raise Trap
    except Trap:
        pass
    if kind == "written":
        with torch.no_grad():
            for name, value in noise.items():
                run.twin.params[name].mul_(0.95).add_(value)


def _placed(tensor: Tensor, like: Tensor) -> Tensor:
    """``tensor``, which every rank has whole, split as ``like`` is."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


@action()
def edit_in_place(run: Run, draw: random.Random) -> None:
    """Elementwise edits of the parameters as they rest."""
    names = draw.sample(sorted(run.twin.params), 4)
    run.detail(str(names))
    for params in (run.params(), run.twin.params):
        with torch.no_grad():
            for name in names:
                params[name].mul_(0.97)


@action()
def read_state(run: Run, draw: random.Random) -> None:
    """Reading changes nothing."""
    kind = draw.choice(["model", "optimizer", "both"])
    run.detail(kind)
    if kind == "model":
        run.model.state_dict()
    elif kind == "optimizer":
        run.optimizer.state_dict()
    else:
        get_state_dict(run.model, run.optimizer)


@action(weight=2)
def freeze_or_unfreeze(run: Run, draw: random.Random) -> None:
    frozen = sorted(name for name, param in run.twin.params.items() if not param.requires_grad)
    free = sorted(n for n, p in run.twin.params.items() if p.requires_grad and (is_matrix(n) or run.has(ANY_FREEZE)))
    thaw = bool(frozen) and (len(frozen) > 2 or draw.random() < 0.5)
    name = draw.choice(frozen if thaw else free)
    run.detail(f"{name} requires_grad={thaw}")
    run.params()[name].requires_grad_(thaw)
    run.twin.params[name].requires_grad_(thaw)
    run.train_pass()
    finish(run, draw)


@action(weight=2)
def between_forward_and_backward(run: Run, draw: random.Random) -> None:
    interlude = draw.choice([evaluate, forward_only, read_state, raise_in_forward])
    run.detail(interlude.__name__)
    index = run.next_batch()
    loss = run.loss(index)
    interlude(run, draw)
    loss.backward()
    run.twin.backward([index])
    check_gradients(run)
    finish(run, draw)


@action()
def user_all_reduce(run: Run, draw: random.Random) -> None:
    """A user's own collective between forward and backward, waited for after it or at once."""
    index = run.next_batch()
    loss = run.loss(index)
    mean = loss.detach().clone()
    late = draw.random() < 0.5
    run.detail(f"late={late}")
    work = dist.all_reduce(mean, dist.ReduceOp.AVG, async_op=late)
    loss.backward()
    if late:
        work.wait()
    expected = run.twin.backward([index])
    assert math.isclose(float(mean), expected, rel_tol=TOLERANCE), f"mean loss {float(mean)}, the twin's {expected}"
    check_gradients(run)
    finish(run, draw)


@action()
def rebuild_optimizer(run: Run, draw: random.Random) -> None:
    """A new optimizer with the old one's state dict; gradients stay."""
    state = run.optimizer.state_dict()
    run.optimizer = run.new_optimizer(lr=1.0)
    run.optimizer.load_state_dict(state)


@action(weight=2)
def branch(run: Run, draw: random.Random) -> None:
    """Matrices that only some ranks use, or none; without synchronization first, sometimes."""
    for sync in [draw.choice(SYNCS[1:]), "all"] if draw.random() < 0.4 else ["all"]:
        ways = [tuple(draw.random() < 0.5 for _ in ALL) for _ in range(run.parts)]
        run.detail(f"sync={sync} " + "/".join("".join("-x"[b] for b in way) for way in ways))
        index = run.next_batch()
        take_branches(run.model, ways[run.part])
        with _synchronization(run, sync, draw):
            run.loss(index).backward()
        run.twin.backward_by_part(index, ways)
    take_branches(run.model, ALL)
    check_gradients(run)
    finish(run, draw)


@action()
def two_forwards(run: Run, draw: random.Random) -> None:
    """Two graphs at once: one backward through both, or one each in either order; or one graph twice."""
    indices = [run.next_batch(), run.next_batch()]
    order = draw.choice(["sum", "first", "last", "same"])
    run.detail(order)
    if order == "same":
        indices[1] = indices[0]
        loss = run.loss(indices[0])
        loss.backward(retain_graph=True)
        loss.backward()
    else:
        losses = [run.loss(index) for index in indices]
        for loss in {"sum": [losses[0] + losses[1]], "first": losses, "last": losses[::-1]}[order]:
            loss.backward()
    run.twin.backward(indices, scale=2.0)
    check_gradients(run)
    finish(run, draw)
