"""A dedicated model of some mode, a single-process twin beside it, and their comparison."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from harness.assertions import relative_errors
from harness.dtensors import local_tensor
from harness.network import Block, Network, full_state, is_matrix, loss_of, shard, tensor_parallel
from harness.oracle import Reference
from harness.toy import LR, OPTIONS, batch, build
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import dmuon
from dmuon.dedicated.dedication import dedications
from dmuon.dedicated.owned_tensor import OwnedTensor

TOLERANCE = 1e-5  # relative, per tensor; rounding alone stays below 2e-6


# -- modes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mode:
    """How a model is distributed and trained.

    Attributes:
        mesh: name and extent of each dimension; None stands for what is left of the ranks, "tp" is tensor parallel.
        fsdp: FSDP2 shards what dmuon does not own; otherwise dmuon replicates it.
        keep: whole weights stay in memory.
        overlap: Newton-Schulz runs during backward.
        comm: options of the communication.
    """

    mesh: tuple[tuple[str, int | None], ...]
    fsdp: bool = False
    keep: bool = False
    overlap: bool = False
    comm: dmuon.CommOptions = field(default_factory=dmuon.CommOptions)

    @property
    def lacks(self) -> frozenset[str]:
        """What the parts that are not dmuon's cannot do; see ``fuzz_actions.action``."""
        return FSDP2_LACKS if self.fsdp else frozenset()

    def extents(self, world: int) -> tuple[int, ...]:
        given = prod(extent for _, extent in self.mesh if extent is not None)
        assert world % given == 0, f"{world} ranks do not fill a mesh {self.mesh}"
        return tuple(world // given if extent is None else extent for _, extent in self.mesh)

    def distribute(self, model: nn.Module, world: int) -> DeviceMesh:
        """Split, dedicate and shard ``model``; returns the data-parallel mesh."""
        names = tuple(name for name, _ in self.mesh)
        whole = init_device_mesh("cpu", self.extents(world), mesh_dim_names=names)
        mesh = whole
        if "tp" in names:
            tensor_parallel(model, whole["tp"])
            mesh = whole[tuple(name for name in names if name != "tp")]
        dmuon.dedicate_params(model, mesh, costs="flops", reshard_after_forward=not self.keep, comm=self.comm)
        if self.fsdp:
            # FSDP2 always reshards, its root too: it does not notice that weights it has kept were edited meanwhile.
            for block in model.blocks:  # type: ignore[union-attr]
                dmuon.fully_shard(block, mesh=mesh, reshard_after_forward=True)
            dmuon.fully_shard(model, mesh=mesh, reshard_after_forward=True)
        return mesh


RAISE_IN_BACKWARD = "going on after a raise in backward"
DROP_UNREDUCED = "zero_grad() that drops gradients of no_sync()"
ANY_FREEZE = "freezing what is sharded"
INFERENCE = "inference_mode()"
FSDP2_LACKS = frozenset({RAISE_IN_BACKWARD, DROP_UNREDUCED, ANY_FREEZE, INFERENCE})

LINE = (("shard", None),)
GRID = (("replicate", 2), ("shard", None))
MERGED = dmuon.CommOptions(merge_bytes=2**20)  # all blocks together

MODES = {
    "1d-reshard": Mode(LINE, fsdp=True),
    "1d-keep": Mode(LINE, fsdp=True, keep=True),
    "1d-overlap": Mode(LINE, fsdp=True, overlap=True),
    "1d-merged": Mode(LINE, fsdp=True, comm=MERGED),
    "1d-no-prefetch": Mode(LINE, fsdp=True, comm=dmuon.CommOptions(prefetch=0)),
    "1d-prefetch-2": Mode(LINE, fsdp=True, comm=dmuon.CommOptions(prefetch=2, outstanding_reductions=1)),
    "two-lines-reshard": Mode(LINE),
    "two-lines-keep": Mode(LINE, keep=True),
    "two-lines-overlap": Mode(LINE, keep=True, overlap=True),
    "two-lines-merged": Mode(LINE, comm=MERGED),
    "ddp": Mode((("replicate", None),)),
    "ddp-overlap": Mode((("replicate", None),), overlap=True),
    "hsdp-reshard": Mode(GRID, fsdp=True),
    "hsdp-keep": Mode(GRID, fsdp=True, keep=True),
    "hsdp-two-lines": Mode(GRID, overlap=True),
    "tp": Mode((("shard", 1), ("tp", None))),
    "tp-two-lines": Mode((("shard", None), ("tp", 2))),
    "tp-ddp": Mode((("replicate", None), ("tp", 2)), overlap=True),
}


def modes_of(world: int) -> list[str]:
    """Those whose mesh ``world`` ranks can fill."""
    return [
        name
        for name, mode in MODES.items()
        if world % prod(extent for _, extent in mode.mesh if extent is not None) == 0
    ]


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


def fresh() -> Network:
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
            f"python tests/programs/fuzz.py --mode {self.mode} --seed {self.seed} --actions {actions} "
            f"--segment {actions} "
            f"--world {self.world}"
        )


@dataclass(slots=True)
class Report:
    """What a run did, the largest relative error of each kind, and batches that this rank updated in backward."""

    actions: Counter[str] = field(default_factory=Counter)
    worst: dict[str, float] = field(default_factory=dict)
    overlapped: int = 0

    def note(self, kind: str, error: float) -> None:
        self.worst[kind] = max(self.worst.get(kind, 0.0), error)


class Run:
    """A dedicated model on this rank and its twin."""

    def __init__(self, case: Case, rank: int, twin: Twin) -> None:
        self.case = case
        self.rank = rank
        self.mode = MODES[case.mode]
        self.model = fresh()
        mesh = self.mode.distribute(self.model, case.world)
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        self.part, self.parts = 0, mesh.size()  # of a global batch
        for position, extent in zip(coordinate, mesh.mesh.shape, strict=True):
            self.part = self.part * extent + position
        self.replicas = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)).get("replicate", 1)
        self.optimizer = self.new_optimizer(LR)
        self.twin = twin
        self.history: list[str] = []
        self.report = Report()
        self.saves = 0
        self.batches = itertools.count()

    def new_optimizer(self, lr: float) -> dmuon.Muon:
        return dmuon.Muon(self.model, **{**OPTIONS, "lr": lr}, overlap_backward=self.mode.overlap)

    def has(self, capability: str) -> bool:
        return capability not in self.mode.lacks

    def next_batch(self) -> int:
        return next(self.batches)

    def detail(self, text: str) -> None:
        """Say what the running action is about to do: a failure or hang shows it."""
        self.history[-1] += f" {text}"
        print(f"  {text}", flush=True)

    def loss(self, index: int) -> Tensor:
        """Of this rank's part of a global batch."""
        return loss_of(self.model, *shard(batch(index), self.part, self.parts))

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
        expected = sum(is_matrix(name) and param.grad is not None for name, param in self.twin.params.items())
        self.optimizer.step()
        self.twin.step()
        stats = self.optimizer.last_step
        assert not stats.nonfinite, f"not finite: {stats.nonfinite}"
        total = torch.tensor(stats.ns_matrices)
        dist.all_reduce(total)
        assert int(total) == expected, (
            f"{int(total)} matrices were orthogonalized on all ranks, {expected} have gradients"
        )
        self.report.overlapped += stats.overlapped

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)
        self.twin.zero_grad(set_to_none)
        for name, param in self.params().items():
            left = param.grad is not None and (set_to_none or bool(local_tensor(param.grad).any()))
            assert not left, f"{name} has a gradient after zero_grad(set_to_none={set_to_none})"


# -- comparison ----------------------------------------------------------------------------------------------------


def require_close(run: Run, kind: str, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, error in relative_errors(found, expected).items():
        run.report.note(kind, error)
        assert error <= TOLERANCE, f"{kind} of {name} is off by {error:.1e}, relative, limit {TOLERANCE:.0e}"


def _gradient(param: nn.Parameter) -> Tensor | None:
    """The whole gradient, None on ranks that hold nothing of it. Collective among those that do."""
    grad = param.grad
    assert grad is not None
    if isinstance(param, OwnedTensor):
        entry = param.keeper.matrix_of(param)  # type: ignore[union-attr]
        if not entry.mine:
            return None
        held = local_tensor(grad)
        return held if entry.tensor is None else entry.tensor.wrap(held, entry.shape).full_tensor()
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def check_gradients(run: Run) -> None:
    """The gradients are the twin's, and missing where it has none."""
    found, expected = {}, {}
    for name, param in run.params().items():
        other = run.twin.params[name].grad
        assert (param.grad is None) == (other is None), f"gradient of {name} is {param.grad}, the twin's {other}"
        if other is None:
            continue
        grad = _gradient(param)
        if grad is not None:
            found[name], expected[name] = grad, other
    require_close(run, "gradient", found, expected)


def require_same_on_all_ranks(what: str, tensors: dict[str, Tensor]) -> None:
    ours = torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors.values()])
    theirs = ours.clone()
    dist.broadcast(theirs, src=0)
    sizes = [tensor.numel() for tensor in tensors.values()]
    for name, mine, first in zip(tensors, ours.split(sizes), theirs.split(sizes), strict=True):
        assert torch.equal(mine, first), f"{what} {name} differs from rank 0's"


def check_weights(run: Run) -> dict[str, Tensor]:
    """Whole weights are the same on all ranks, and the twin's. Collective."""
    weights = full_state(run.model)
    require_same_on_all_ranks("weight", weights)
    require_close(run, "weight", weights, dict(run.twin.model.state_dict()))
    return weights


def check_rest(run: Run, filled: int | None = None) -> None:
    """Nothing is under way, no block is open, and of weights that are not kept at most ``filled`` buffers have memory.

    A step may have published as many as are prefetched: the default.
    """
    for dedication in dedications(run.model):
        runtime = dedication.runtime
        for block in runtime.blocks:
            assert block.phase.name == "REST", f"{block.name} is {block.phase.name}"
        for entry in runtime.matrices():
            held = {id(held[name]) for held, name in entry.places}
            assert held == {id(entry.rest)}, f"{entry.fqn}: a module does not hold its resting form"
            assert entry.full.grad is None, f"{entry.fqn} has an unreduced gradient"
        allowed = run.mode.comm.prefetch if filled is None else filled
        holding = [b.name for b in runtime.buffers if b.buffer_nbytes and not b.keep]
        assert len(holding) <= allowed, f"blocks {holding} hold whole weights at rest"


def resynchronize(run: Run) -> None:
    """Compare everything, then let the twin take over weights and optimizer state. Collective."""
    weights = check_weights(run)
    named = get_optimizer_state_dict(run.model, run.optimizer, options=StateDictOptions(full_state_dict=True))
    expected = run.twin.state()
    for name in expected.keys() - named["state"].keys():  # a frozen one begins anew when it thaws
        assert not run.twin.params[name].requires_grad, f"{name} has no state"
        assert not any(bool(tensor.any()) for tensor in expected.pop(name).values()), f"{name} has lost its state"
    for kind in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
        ours = {name: state[kind] for name, state in named["state"].items() if kind in state}
        theirs = {name: state[kind] for name, state in expected.items() if kind in state}
        require_same_on_all_ranks(kind, ours)
        require_close(run, kind, ours, theirs)
    for name, state in expected.items():
        if "step" in state:
            steps = float(named["state"][name]["step"]), float(state["step"])
            assert steps[0] == steps[1], f"AdamW has done {steps[0]:g} steps of {name}, the twin {steps[1]:g}"
    for ours, theirs in zip(run.optimizer.param_groups, run.twin.groups(), strict=True):
        for option in ("lr", "weight_decay", "betas" if "betas" in theirs else "momentum"):
            assert ours[option] == theirs[option], f"{option} is {ours[option]}, not {theirs[option]}"
    with torch.no_grad():
        for name, param in run.twin.params.items():
            param.copy_(weights[name])
            for kind, tensor in expected.get(name, {}).items():
                tensor.copy_(named["state"][name][kind])
