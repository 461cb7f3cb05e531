"""Random sequences of everything a training program may do, on several ranks and in a single-process twin beside them.

Every rank draws the same actions from the same seed, and applies each to its part of a dedicated model and to a whole
twin of its own, which trains on the global batch. They must never diverge, and no action may hang.

What is compared, and how tightly:

- Gradients after every synchronizing backward, logits of every evaluation, norms of clipping.
- Whole weights after about half of the actions. Reading them touches the runtime, so that always doing so would hide
  what a missing clean-up does to the next action.
- Every ``RESYNC`` actions also momentum, AdamW state and options of the optimizer; then the twin takes over weights and
  state bit by bit. What was compared is within rounding of the twin, so nothing is forgiven, and rounding never adds up
  over more than ``RESYNC`` actions: tolerances stay tight however long the run is.

``python tests/fuzz.py --actions 2000 --seed 0`` runs it at length; ``--help`` lists the options.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from pool import RankFailure, RankPool
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from toy import DECAY, LR, Block, Reference, Toy, batch, build, full_state, is_matrix, loss_of, relative_errors, shard

import dmuon
from dmuon.dedicate import dedications
from dmuon.owned_tensor import OwnedTensor

OPTIONS: dict[str, Any] = {"lr": LR, "weight_decay": DECAY, "ns_coefficients": "classic"}
TOLERANCE = 1e-5  # relative, per tensor; rounding alone stays below 2e-6
RESYNC = 10
SHOWN = 12  # actions in a failure message
COLLECTIVE_SECONDS = 40.0  # a collective that takes longer raises: the failure then names the action
LEAST_SECONDS, SECONDS_PER_ACTION = 120.0, 1.0  # a run that takes longer hangs


class Divergence(AssertionError):
    """The model and its twin differ, or an action failed; the message says how to replay it."""


class Trap(Exception):
    """Raised on purpose, on every rank."""


# -- topologies ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Topology:
    """How a model is distributed.

    Attributes:
        apply: ``apply(model, world, keep)`` dedicates it and shards the rest.
        lacks: what the parts that are not dmuon's cannot do; see ``action``.
        data: ``data(rank, world)`` is the part of the global batch that a rank gets, and the number of parts.
    """

    apply: Callable[[nn.Module, int, bool], None]
    lacks: frozenset[str] = frozenset()
    data: Callable[[int, int], tuple[int, int]] = lambda rank, world: (rank, world)


def two_lines(model: nn.Module, world: int, keep: bool) -> None:
    dmuon.dedicate_params(model, init_device_mesh("cpu", (world,)), costs="flops", reshard_after_forward=not keep)


def one_dimensional(model: nn.Module, world: int, keep: bool) -> None:
    mesh = init_device_mesh("cpu", (world,))
    dmuon.dedicate_params(model, mesh, costs="flops", reshard_after_forward=not keep)
    # FSDP2 is told to reshard its root too: it does not notice that weights it has kept were edited meanwhile.
    for block in model.blocks:  # type: ignore[union-attr]
        dmuon.fully_shard(block, mesh=mesh, reshard_after_forward=True)
    dmuon.fully_shard(model, mesh=mesh, reshard_after_forward=True)


RAISE_IN_BACKWARD = "going on after a raise in backward"
DROP_UNREDUCED = "zero_grad() that drops gradients of no_sync()"
ANY_FREEZE = "freezing what is sharded"
INFERENCE = "inference_mode()"
FSDP2_LACKS = frozenset({RAISE_IN_BACKWARD, DROP_UNREDUCED, ANY_FREEZE, INFERENCE})

TOPOLOGIES = {
    "1d": Topology(one_dimensional, lacks=FSDP2_LACKS),
    "two-lines": Topology(two_lines),
}
MODES = [f"{topology}-{residence}" for topology in TOPOLOGIES for residence in ("reshard", "keep")]


def dedicate(model: nn.Module, world: int, topology: str, keep: bool) -> None:
    """Distribute ``model`` in place, weights freed after use or kept."""
    TOPOLOGIES[topology].apply(model, world, keep)


# -- model and twin ------------------------------------------------------------------------------------------------


class BranchBlock(Block):
    """``Block`` whose square matrix may be left out."""

    branch = True

    def forward(self, x: Tensor) -> Tensor:
        if self.branch:
            return super().forward(x)
        return x + self.down(F.gelu(self.up(self.norm(x))))


Branches = tuple[bool, ...]  # per block: whether it uses its square matrix


def take_branches(model: nn.Module, branches: Branches) -> None:
    for block, branch in zip(model.blocks, branches, strict=True):  # type: ignore[union-attr, arg-type]
        block.branch = branch


def fresh() -> Toy:
    return build(block=BranchBlock)


ALL = (True,) * len(fresh().blocks)


class Twin:
    """The same model in one process, on global batches."""

    def __init__(self) -> None:
        self.model = fresh()
        self.optimizer = Reference(self.model)
        self.saved: Any = None

    @cached_property
    def params(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def groups(self) -> list[dict[str, Any]]:
        """In the order of ``dmuon.Muon``."""
        return [*self.optimizer.muon.param_groups, *self.optimizer.adamw.param_groups]

    def backward(self, batches: list[int], scale: float = 1.0) -> float:
        """Gradient of the mean loss over all ``batches`` at once; returns the loss."""
        tokens, targets = (torch.cat(parts) for parts in zip(*map(batch, batches), strict=True))
        loss = loss_of(self.model, tokens, targets)
        (loss * scale).backward()
        return float(loss.detach())

    def backward_by_part(self, index: int, branches: list[Branches]) -> None:
        """The average gradient of parts of a batch that take different ways through the model."""
        for part, way in enumerate(branches):
            take_branches(self.model, way)
            (loss_of(self.model, *shard(batch(index), part, len(branches))) / len(branches)).backward()
        take_branches(self.model, ALL)

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.model.zero_grad(set_to_none)

    def save(self) -> None:
        parts = (self.model, self.optimizer.muon, self.optimizer.adamw)
        self.saved = copy.deepcopy([part.state_dict() for part in parts])

    def load(self) -> None:
        for part, state in zip(
            (self.model, self.optimizer.muon, self.optimizer.adamw), copy.deepcopy(self.saved), strict=True
        ):
            part.load_state_dict(state)
        for name, param in self.params.items():  # torch's set_state_dict skips the optimizer state of what is frozen
            if not param.requires_grad:
                (self.optimizer.muon if is_matrix(name) else self.optimizer.adamw).state.pop(param, None)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Optimizer state by name of the parameter; what no step has made yet is zero."""
        found = {}
        for name, param in self.params.items():
            owner = self.optimizer.muon if is_matrix(name) else self.optimizer.adamw
            kinds = ["momentum_buffer"] if is_matrix(name) else ["exp_avg", "exp_avg_sq"]
            state = owner.state[param]
            if "step" not in state and not is_matrix(name):
                state["step"] = torch.zeros(())
            for kind in kinds:
                state.setdefault(kind, torch.zeros_like(param))
            found[name] = state
        return found


# -- one run -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """One run: ``actions`` actions from ``seed`` on a new model. ``folder`` is for its checkpoints."""

    mode: str
    seed: int
    actions: int
    world: int
    folder: str

    def replay(self, actions: int) -> str:
        return (
            f"python tests/fuzz.py --mode {self.mode} --seed {self.seed} --actions {actions} --segment {actions} "
            f"--world {self.world}"
        )


@dataclass(slots=True)
class Report:
    """What a run did, and the largest relative error of each kind."""

    actions: Counter[str] = field(default_factory=Counter)
    worst: dict[str, float] = field(default_factory=dict)

    def note(self, kind: str, error: float) -> None:
        self.worst[kind] = max(self.worst.get(kind, 0.0), error)


class Run:
    """A dedicated model on this rank and its twin."""

    def __init__(self, case: Case, rank: int, twin: Twin) -> None:
        topology, _, residence = case.mode.rpartition("-")
        self.case = case
        self.rank = rank
        self.topology = TOPOLOGIES[topology]
        self.keep = residence == "keep"
        self.data = self.topology.data(rank, case.world)
        self.model = fresh()
        dedicate(self.model, case.world, topology, self.keep)
        self.optimizer = dmuon.Muon(self.model, **OPTIONS)
        self.twin = twin
        self.history: list[str] = []
        self.report = Report()
        self.saves = 0
        self._batches = itertools.count()

    # -- doing ---------------------------------------------------------------------------------------------------

    def has(self, capability: str) -> bool:
        return capability not in self.topology.lacks

    def next_batch(self) -> int:
        return next(self._batches)

    def detail(self, text: str) -> None:
        """Say what the running action is about to do: a failure or hang shows it."""
        self.history[-1] += f" {text}"
        print(f"  {text}", flush=True)

    def loss(self, index: int) -> Tensor:
        """Of this rank's part of a global batch."""
        return loss_of(self.model, *shard(batch(index), *self.data))

    def params(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def train_pass(self) -> None:
        """One forward and backward."""
        index = self.next_batch()
        self.loss(index).backward()
        self.twin.backward([index])
        check_gradients(self)
        check_rest(self, filled=0)

    def step(self) -> None:
        self.optimizer.step()
        self.twin.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)
        self.twin.zero_grad(set_to_none)
        for name, param in self.params().items():
            left = param.grad is not None and (set_to_none or bool(_local(param.grad).any()))
            assert not left, f"{name} has a gradient after zero_grad(set_to_none={set_to_none})"

    def finish(self, draw: random.Random) -> None:
        """Step on the gradients that are there, sometimes clipped, and clear them."""
        if draw.random() < 0.3:
            clip(self, draw)
        self.step()
        self.zero_grad(set_to_none=draw.random() < 0.8)

    # -- running -------------------------------------------------------------------------------------------------

    def play(self) -> None:
        """All actions of the case.

        Raises:
            Divergence: something differed or failed.
        """
        deck = _deck(self.case)
        for index in range(self.case.actions):
            name = next(deck)
            self.history.append(f"{index} {name}")
            print(self.history[-1], flush=True)
            try:
                draw = random.Random(f"{self.case.seed}/{index}")
                ACTIONS[name].run(self, draw)
                check_rest(self)
                last = index + 1 == self.case.actions
                if last or (index + 1) % RESYNC == 0:
                    resynchronize(self)
                elif draw.random() < 0.5:
                    check_weights(self)
            except Exception as error:
                raise Divergence(self._failure(index, error)) from error
            self.report.actions[name] += 1

    def _failure(self, index: int, error: Exception) -> str:
        first_line = (str(error).splitlines() or [""])[0]
        return "\n".join(
            [
                f"{self.case.mode}, seed {self.case.seed}: action {index} on rank {self.rank} of {self.case.world}: "
                f"{type(error).__name__}: {first_line}",
                "last actions:",
                *(f"  {entry}" for entry in self.history[-SHOWN:]),
                f"replay: {self.case.replay(index + 1)}",
            ]
        )


def run_case(rank: int, world: int, case: Case, twin: type[Twin] = Twin) -> Report:
    """What one rank does; for ``RankPool``."""
    assert world == case.world
    run = Run(case, rank, twin())
    run.play()
    return run.report


# -- checks --------------------------------------------------------------------------------------------------------


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _require_close(run: Run, kind: str, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    errors = relative_errors(found, expected)
    for name, error in errors.items():
        run.report.note(kind, error)
        assert error <= TOLERANCE, f"{kind} of {name} is off by {error:.1e}, relative, limit {TOLERANCE:.0e}"


def check_gradients(run: Run) -> None:
    """The gradients are the twin's, and missing where it has none."""
    found, expected = {}, {}
    for name, param in run.params().items():
        grad, other = param.grad, run.twin.params[name].grad
        assert (grad is None) == (other is None), f"gradient of {name} is {grad}, the twin's {other}"
        if grad is None or other is None:
            continue
        if isinstance(grad, OwnedTensor):
            if _local(grad).shape != grad.shape:
                continue
            grad = _local(grad)
        found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
        expected[name] = other
    _require_close(run, "gradient", found, expected)


def _require_same_on_all_ranks(what: str, tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        theirs = tensor.detach().clone()
        dist.broadcast(theirs, src=0)
        assert torch.equal(theirs, tensor), f"{what} {name} differs from rank 0's"


def check_weights(run: Run) -> dict[str, Tensor]:
    """Whole weights are the same on all ranks, and the twin's. Collective."""
    weights = full_state(run.model)
    _require_same_on_all_ranks("weight", weights)
    _require_close(run, "weight", weights, dict(run.twin.model.state_dict()))
    return weights


def check_rest(run: Run, filled: int = 1) -> None:
    """Nothing is under way, no block is open, and of weights that are not kept at most ``filled`` blocks hold memory.

    One block, the first that the next forward wants, may have been published by a step.
    """
    for dedication in dedications(run.model):
        groups = dedication.runtime.groups
        for group in groups:
            assert group.state.name in ("FREED", "FILLING", "READY"), f"{group.name} is {group.state.name}"
            for entry in group.entries:
                held = {id(module._parameters[name]) for module, name in entry.sites}
                assert held == {id(entry.rest)}, f"{entry.fqn}: a module does not hold its resting form"
                assert entry.full.grad is None and not entry.unreduced, f"{entry.fqn} has an unreduced gradient"
        holding = [group.name for group in groups if group.buffer_nbytes]
        assert run.keep or len(holding) <= filled, f"blocks {holding} hold whole weights at rest"


def resynchronize(run: Run) -> None:
    """Compare everything, then let the twin take over weights and optimizer state. Collective."""
    weights = check_weights(run)
    named = get_optimizer_state_dict(run.model, run.optimizer, options=StateDictOptions(full_state_dict=True))
    expected = run.twin.state()
    for kind in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
        ours = {name: state[kind] for name, state in named["state"].items() if kind in state}
        theirs = {name: state[kind] for name, state in expected.items() if kind in state}
        _require_same_on_all_ranks(kind, ours)
        _require_close(run, kind, ours, theirs)
    for name, state in expected.items():
        if "step" in state:
            steps = float(named["state"][name]["step"]), float(state["step"])
            assert steps[0] == steps[1], f"AdamW has done {steps[0]:g} steps of {name}, the twin {steps[1]:g}"
    for ours, theirs in zip(run.optimizer.param_groups, run.twin.groups(), strict=True):
        for option in ("lr", "weight_decay", "momentum", "betas"):
            assert ours.get(option) == theirs.get(option), f"{option} is {ours.get(option)}, not {theirs.get(option)}"
    with torch.no_grad():
        for name, param in run.twin.params.items():
            param.copy_(weights[name])
            for kind, tensor in expected[name].items():
                tensor.copy_(named["state"][name][kind])


# -- actions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Action:
    run: Callable[[Run, random.Random], None]
    weight: int
    needs: frozenset[str]


ACTIONS: dict[str, Action] = {}


def action(weight: int = 1, needs: str | None = None) -> Callable[[Any], Any]:
    """Register an action that comes ``weight`` times in a deck, where the topology has what it ``needs``."""

    def register(function: Callable[[Run, random.Random], None]) -> Callable[[Run, random.Random], None]:
        ACTIONS[function.__name__] = Action(function, weight, frozenset() if needs is None else frozenset({needs}))
        return function

    return register


def possible_actions(mode: str) -> set[str]:
    lacks = TOPOLOGIES[mode.rpartition("-")[0]].lacks
    return {name for name, entry in ACTIONS.items() if not entry.needs & lacks}


def _deck(case: Case) -> Iterator[str]:
    """Names in random order, each as often as its weight says before the deck is shuffled anew."""
    draw = random.Random(case.seed)
    possible = possible_actions(case.mode)
    while True:
        deck = [name for name, entry in ACTIONS.items() if name in possible for _ in range(entry.weight)]
        draw.shuffle(deck)
        yield from deck


@action(weight=3)
def ordinary_step(run: Run, draw: random.Random) -> None:
    run.train_pass()
    run.finish(draw)


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
    synced = [draw.random() < 0.4 for _ in range(k - 1)] + [True]
    run.detail(f"synced={synced}")
    batches = [run.next_batch() for _ in range(k)]
    for index, sync in zip(batches, synced, strict=True):
        with _synchronization(run, sync, draw):
            (run.loss(index) / k).backward()
        if index != batches[-1] and draw.random() < 0.6:
            between = draw.choice([evaluate, forward_only, read_state, raise_in_forward])
            run.detail(between.__name__)
            between(run, draw)
    run.twin.backward(batches)
    check_gradients(run)
    run.finish(draw)


@contextmanager
def _synchronization(run: Run, sync: bool, draw: random.Random) -> Iterator[None]:
    """A micro-batch with or without synchronization, by either of the two calls."""
    if draw.random() < 0.5:
        with nullcontext() if sync else dmuon.no_sync(run.model):
            yield
    else:
        dmuon.set_requires_gradient_sync(run.model, sync)
        yield
        dmuon.set_requires_gradient_sync(run.model, True)


@action(weight=2)
def evaluate(run: Run, draw: random.Random) -> None:
    """Logits are the twin's, and bitwise the same on all ranks."""
    tokens, _ = batch(run.next_batch())
    mode = torch.inference_mode if run.has(INFERENCE) and draw.random() < 0.3 else torch.no_grad
    run.model.eval()
    with mode():
        logits, expected = run.model(tokens), run.twin.model(tokens)
    run.model.train()
    _require_same_on_all_ranks("logits", {"of an evaluation": logits})
    _require_close(run, "logits", {"an evaluation": logits}, {"an evaluation": expected})


@action()
def forward_only(run: Run, draw: random.Random) -> None:
    """A training forward whose graph is thrown away."""
    run.loss(run.next_batch())


@action()
def drop_gradients(run: Run, draw: random.Random) -> None:
    """A batch that is skipped leaves nothing behind."""
    if run.has(DROP_UNREDUCED) and draw.random() < 0.6:
        run.detail("unreduced")
        with dmuon.no_sync(run.model):
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
    stock = bool(run.topology.lacks) and order == 2.0 and draw.random() < 0.5
    run.detail(f"limit={limit} order={order} stock={stock}")
    function = torch.nn.utils.clip_grad_norm_ if stock else dmuon.clip_grad_norm_
    norm = function(run.model.parameters(), limit, order)
    found = norm.full_tensor() if isinstance(norm, DTensor) else norm
    expected = torch.nn.utils.clip_grad_norm_(run.twin.model.parameters(), limit, order)
    _require_close(run, "norm", {"all gradients": found}, {"all gradients": expected})


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
    run.finish(draw)


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
    run.finish(draw)
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
    sync, accumulated, at_once = (draw.random() < p for p in (0.7, 0.4, 0.5))
    run.detail(f"at {name} sync={sync} accumulated={accumulated} at_once={at_once}")
    if accumulated:
        with dmuon.no_sync(run.model):
            run.loss(run.next_batch()).backward()
    handle = run.model.get_submodule(name).register_forward_hook(_trap_gradient)
    try:
        with nullcontext() if sync else dmuon.no_sync(run.model):
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
        run.finish(draw)
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
                    param.mul_(0.95).add_(noise[name])
            if kind == "raised":
                raise Trap
    except Trap:
        pass
    if kind == "written":
        with torch.no_grad():
            for name, value in noise.items():
                run.twin.params[name].mul_(0.95).add_(value)


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
    run.finish(draw)


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
    run.finish(draw)


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
    run.finish(draw)


@action()
def rebuild_optimizer(run: Run, draw: random.Random) -> None:
    """A new optimizer with the old one's state dict; gradients stay."""
    state = run.optimizer.state_dict()
    run.optimizer = dmuon.Muon(run.model, **{**OPTIONS, "lr": 1.0})
    run.optimizer.load_state_dict(state)


@action(weight=2)
def branch(run: Run, draw: random.Random) -> None:
    """Matrices that only some ranks use, or none; without synchronization first, sometimes."""
    parts = run.data[1]
    accumulated = draw.random() < 0.4
    for sync in [False, True] if accumulated else [True]:
        ways = [tuple(draw.random() < 0.5 for _ in ALL) for _ in range(parts)]
        run.detail(f"sync={sync} " + "/".join("".join("-x"[b] for b in way) for way in ways))
        index = run.next_batch()
        take_branches(run.model, ways[run.data[0]])
        with nullcontext() if sync else dmuon.no_sync(run.model):
            run.loss(index).backward()
        run.twin.backward_by_part(index, ways)
    take_branches(run.model, ALL)
    check_gradients(run)
    run.finish(draw)


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
    run.finish(draw)


# -- command -------------------------------------------------------------------------------------------------------


def run_segment(pool: RankPool, case: Case, twin: type[Twin] = Twin) -> Report:
    """Run ``case`` on the ranks of ``pool``.

    Raises:
        RankFailure: a rank failed or hung; the message holds the actions of that rank and the command to replay them.
    """
    limit = LEAST_SECONDS + SECONDS_PER_ACTION * case.actions
    try:
        return pool(case.world, run_case, case, twin, timeout=limit, pg_timeout=COLLECTIVE_SECONDS)[0]  # type: ignore[no-any-return]
    except RankFailure as failure:
        raise RankFailure(f"{failure}\n\nreplay: {case.replay(case.actions)}") from None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Random actions on a dedicated model and on its twin.")
    parser.add_argument("--actions", type=int, default=2000, help="in all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first segment; each next one adds one")
    parser.add_argument("--mode", choices=MODES, help="default: all, one after another")
    parser.add_argument("--world", type=int, default=3, help="ranks (default: %(default)s)")
    parser.add_argument("--segment", type=int, default=100, help="actions on one model (default: %(default)s)")
    options = parser.parse_args(arguments)
    pool = RankPool()
    counts: Counter[str] = Counter()
    failures = 0
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dmuon-fuzz-") as folder:
        for number, done in enumerate(range(0, options.actions, options.segment)):
            mode = options.mode or MODES[number % len(MODES)]
            size = min(options.segment, options.actions - done)
            case = Case(mode, options.seed + number, size, options.world, folder)
            began = time.monotonic()
            try:
                report = run_segment(pool, case)
            except RankFailure as failure:
                failures += 1
                print(f"{mode} seed {case.seed}: FAILED\n{failure}", flush=True)
                continue
            counts += report.actions
            worst = ", ".join(f"{kind} {error:.0e}" for kind, error in sorted(report.worst.items()))
            seconds = time.monotonic() - began
            print(f"{mode} seed {case.seed}: {size} actions in {seconds:.1f} s; largest errors: {worst}", flush=True)
    pool.close()
    kinds = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    seconds = time.monotonic() - start
    print(f"{counts.total()} actions without a difference, {failures} segments failed, {seconds:.0f} s: {kinds}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
