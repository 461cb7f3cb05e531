"""A small model, what one process makes of it, and ways to lay it over all ranks, which must arrive there too."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from textwrap import fill
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_map_only

import dmuon
from dmuon.dedicated.dedication import dedications
from dmuon.kernels import coefficient_sequence
from dmuon.platform.torch_private import TorchDispatchMode, local_tensor
from dmuon.report.accounting import dedicated_messages, exchanged_messages, totals

# -- in one process -------------------------------------------------------------------------------------------------

WIDTH, HIDDEN, LAYERS, VOCABULARY = 64, 168, 4, 53
CONTEXT = 64  # tokens per row
LR, DECAY, MOMENTUM = 2e-3, 0.1, 0.95
# AdamW's first step is the sign of a gradient unless eps says otherwise: rounding then decides where it is nearly zero.
ADAMW_EPS = 1e-4
OPTIONS: dict[str, Any] = {"lr": LR, "weight_decay": DECAY, "momentum": MOMENTUM, "adamw_eps": ADAMW_EPS}
STEPS = 4  # in the last of which gradients are clipped, and accumulated where there are several ranks
MAX_NORM = 0.5  # below the norm of these gradients, so that clipping acts


class Block(nn.Module):
    """One square matrix, and one of each orientation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mix(x) + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Network(nn.Module):
    """Token in, logits of the next one out; the same initial weights on every device."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            self.norm = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.to(device)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def is_matrix(name: str) -> bool:
    """Whether a parameter belongs to Muon, said independently of dmuon's policy."""
    return name.startswith("blocks.") and name.endswith(".weight") and "norm" not in name


def batch(world: int, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a global batch over ``world`` ranks, ``(2 * world, CONTEXT)`` each.

    Every topology can divide it, and each part be halved.
    """
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(VOCABULARY, (2 * world, CONTEXT + 1), generator=generator).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """Mean cross entropy, computed under autocast to ``dtype`` unless that is fp32."""
    with torch.autocast(tokens.device.type, dtype=dtype) if dtype != torch.float32 else nullcontext():
        logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@dataclass(frozen=True, slots=True)
class Reference:
    """What a single process makes of the network.

    Attributes:
        device: where it was trained, and where topologies are.
        initial, trained: weights before and after training.
        norm: norm of the gradients that were clipped, before that.
    """

    device: torch.device
    initial: dict[str, Tensor]
    trained: dict[str, Tensor]
    norm: float


def train_alone(world: int, device: torch.device, dtype: torch.dtype) -> Reference:
    """Some steps over the global batches of ``world`` ranks.

    Matrices are trained by the formulas of Muon, with Newton-Schulz in fp64, and the rest by ``torch.optim.AdamW``.
    """
    model = Network(device)
    named = dict(model.named_parameters())
    momentum = {name: torch.zeros_like(param) for name, param in named.items() if is_matrix(name)}
    rest = [param for name, param in named.items() if name not in momentum]
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=ADAMW_EPS)
    initial = {name: param.detach().clone() for name, param in named.items()}
    for step in range(STEPS):
        model.zero_grad()
        loss_of(model, *batch(world, step, device), dtype).backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM if step == STEPS - 1 else math.inf))
        with torch.no_grad():
            for name, average in momentum.items():
                param, grad = named[name], named[name].grad
                assert grad is not None
                average.lerp_(grad, 1 - MOMENTUM)
                update = newton_schulz(grad.lerp(average, MOMENTUM)[None])[0].to(param.dtype)
                param.mul_(1 - LR * DECAY).sub_(update, alpha=LR * 0.2 * math.sqrt(max(param.shape)))
        adamw.step()
    return Reference(device, initial, {name: param.detach() for name, param in named.items()}, norm)


def newton_schulz(matrices: Tensor) -> Tensor:
    """Five steps of Polar Express on ``(k, m, n)`` in fp64, by their formula."""
    x = matrices.double()
    x = x.mT if x.shape[1] > x.shape[2] else x
    x = x / x.flatten(1).norm(dim=1)[:, None, None]
    for a, b, c in coefficient_sequence("polar_express", 5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x if matrices.shape == x.shape else x.mT
    return result


# -- on all ranks ---------------------------------------------------------------------------------------------------

TOPOLOGIES = ("1d", "hsdp", "ddp", "cp", "tp", "tp-hsdp", "fsdp2", "fsdp2-hsdp", "fsdp2-tp")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the report; of what a check has measured, it passes if ``value`` is at most ``limit``.

    Attributes:
        unit: how ``value`` is named when it is printed; empty where it is a count of what is wrong.
        where: on which topology, or of which ranks.
    """

    check: str
    text: str
    value: float = 0
    limit: float = 0
    unit: str = ""
    status: Literal["pass", "fail", "skip", "warn", "info"] = "info"
    where: str = ""

    def __str__(self) -> str:
        head = f"{self.status:<6}{self.check:<13}" + (f"{self.where:<28}" if self.where else "")
        return fill(
            head + self.text, 100, subsequent_indent=" " * len(head), break_long_words=False, break_on_hyphens=False
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """A mesh, and how a model is spread over it.

    Attributes:
        dims: names and extents of mesh dimensions; ``tp`` is tensor parallel, the others are data parallel.
        fsdp: FSDP2 shards what dmuon does not own.
        dedicated: dmuon owns the matrices; otherwise FSDP2 shards them, and the optimizer exchanges them.
        keep: unsharded weights stay after forward.
        dtype: dtype of owned weights in forward and backward.
        ns_dtype: dtype of Newton-Schulz; None is dmuon's choice.
    """

    name: str
    dims: tuple[tuple[str, int], ...]
    fsdp: bool = True
    dedicated: bool = True
    keep: bool = False
    dtype: torch.dtype = torch.float32
    ns_dtype: torch.dtype | None = torch.float32

    def __str__(self) -> str:
        grid = "x".join(str(extent) for _, extent in self.dims)
        dtype = {torch.float32: "fp32", torch.bfloat16: "bf16"}[self.dtype]
        newton = "" if self.ns_dtype else " default NS"
        return f"{self.name} {grid} {'keep' if self.keep else 'reshard'} {dtype}{newton}"

    @property
    def is_exact(self) -> bool:
        """Whether a training differs from one process by orders of sums only."""
        return self.dtype == self.ns_dtype == torch.float32

    @property
    def limits(self) -> tuple[float, float]:
        """Limits of relative differences: of what training changed, and of the norm of gradients.

        Newton-Schulz magnifies small singular values and their noise with them: on real gradients fp16 stays within
        0.1, and bf16 products, whose noise differs by how a batch is divided, made 0.09.
        """
        return (1e-3, 1e-4) if self.is_exact else (0.25 if self.dtype == torch.bfloat16 else 0.1, 0.05)

    def mine(self, rows: Tensor, mesh: DeviceMesh) -> Tensor:
        """This rank's part of a global batch: tensor-parallel ranks have the same."""
        for name, extent in self.dims:
            if name != "tp":
                rows = rows.chunk(extent)[mesh.get_local_rank(name)]
        return rows


def layout_of(name: str, world: int, hosts: int) -> Layout | str:
    """The topology ``name`` over ``world`` ranks, with a replica per host if there are several; or why not."""
    replicas = hosts if hosts > 1 and world % hosts == 0 and world > hosts else 2
    one, half, tp = ("shard", world), ("shard", world // 2), ("tp", 2)
    hsdp = (("replicate", replicas), ("shard", world // replicas))
    # By name: the least number of ranks, and one that divides it.
    least, divisor, layout = {
        "1d": (1, 1, Layout(name, (one,))),
        "hsdp": (4, replicas, Layout(name, hsdp)),
        "ddp": (2, 1, Layout(name, (("replicate", world),), fsdp=False)),
        "cp": (4, 2, Layout(name, (half, ("cp", 2)), fsdp=False)),
        "tp": (2, 2, Layout(name, (half, tp), fsdp=world > 2)),
        "tp-hsdp": (8, 4, Layout(name, (("replicate", 2), ("shard", world // 4), tp))),
        "fsdp2": (2, 1, Layout(name, (one,), dedicated=False)),
        "fsdp2-hsdp": (4, replicas, Layout(name, hsdp, dedicated=False)),
        "fsdp2-tp": (4, 2, Layout(name, (half, tp), dedicated=False)),
    }[name]
    if world >= least and world % divisor == 0:
        return layout
    return f"needs at least {least} ranks and a multiple of {divisor}, here {'are' if world > 1 else 'is'} {world}"


def lay(layout: Layout, model: Network, mesh: DeviceMesh) -> None:
    """Split, dedicate (if the layout says so) and shard ``model``. Collective over all ranks."""
    data = tuple(name for name, _ in layout.dims if name != "tp")
    along = mesh[data] if len(data) < len(layout.dims) else mesh
    if len(data) < len(layout.dims):
        for block in model.blocks:  # columns that are gathered behind, columns, and rows
            plan = {
                "mix": ColwiseParallel(output_layouts=Replicate()),
                "up": ColwiseParallel(use_local_output=False),
                "down": RowwiseParallel(),
            }
            parallelize_module(block, mesh["tp"], plan)
    if layout.dedicated:
        policy = MixedPrecisionPolicy(param_dtype=layout.dtype)
        dmuon.dedicate_params(model, along, reshard_after_forward=not layout.keep, mp_policy=policy, costs="flops")
    if layout.fsdp:
        for module in (*model.blocks, model):
            dmuon.fully_shard(module, mesh=along, reshard_after_forward=not layout.keep and module is not model)


class Training:
    """A model and its optimizer. All methods are collective; those that check return what this rank measured.

    Args:
        mesh: mesh of the layout; several trainings share its groups.
    """

    def __init__(self, layout: Layout, mesh: DeviceMesh, reference: Reference, seed: int = 0) -> None:
        self._layout, self._mesh, self._reference = layout, mesh, reference
        self._steps = 0
        self._model = Network(reference.device, seed)
        lay(layout, self._model, mesh)
        self._optimizer = dmuon.Muon(
            self._model,
            **OPTIONS,
            ns_dtype=layout.ns_dtype,
            distributed_config=None if layout.dedicated else dmuon.create_dtensor_config(costs="flops"),
        )

    def _backward(self, micro: int = 1) -> None:
        """Gradients of this rank's part of the next global batch, in ``micro`` parts."""
        rows = batch(dist.get_world_size(), self._steps, self._reference.device)
        tokens, targets = (self._layout.mine(each, self._mesh).chunk(micro) for each in rows)
        for i, (x, y) in enumerate(zip(tokens, targets, strict=True), 1):
            if self._layout.dedicated:
                dmuon.set_requires_gradient_sync(self._model, i == micro)
            else:
                assert isinstance(self._model, FSDPModule)
                self._model.set_requires_gradient_sync(i == micro)
            (loss_of(self._model, x, y, self._layout.dtype) / micro).backward()

    def _step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._steps += 1

    def parity(self) -> list[Line]:
        """Weights of one process after steps of which the last accumulates and clips; the same bits on all ranks."""
        while self._steps < STEPS - 1:
            self._backward()
            self._step()
        self._backward(micro=2)
        norm = float(dmuon.clip_grad_norm_(self._model.parameters(), MAX_NORM))
        self._step()
        error = abs(norm - self._reference.norm) / self._reference.norm
        found = _unsharded(self._model)
        first = {name: tensor.clone() for name, tensor in found.items()}
        for tensor in first.values():
            dist.broadcast(tensor, src=0)
        other = _differing(found, first)
        return [
            self._difference(found),
            Line("clip", f"norm {norm:.4f} of all gradients", error, self._layout.limits[1], "relative difference"),
            Line("same bits", f"{other} of {len(found)} weights differ from those of rank 0", other),
        ]

    def _difference(self, found: dict[str, Tensor]) -> Line:
        """How far weights are from those of one process, over how far training has moved them."""
        errors: dict[str, float] = {}
        for name, start in self._reference.initial.items():
            if self._layout.is_exact or is_matrix(name):  # AdamW turns the noise of half precision into signs
                expected = self._reference.trained[name].double()
                errors[name] = float((found[name].to(expected) - expected).norm() / (expected - start).norm())
        worst = max(errors, key=errors.__getitem__)
        what = f"largest difference over the change, in {worst},"
        return Line("parity", "as one process", errors[worst], self._layout.limits[0], what)

    def ownership(self) -> list[Line]:
        """What a step sends; and every matrix is held once in each copy, and orthogonalized by one rank."""
        self._backward()
        self._step()  # nothing of the state dicts before it is under way in what follows
        dedicated = self._layout.dedicated
        traffic = Traffic(self._mesh.get_all_groups())  # which are FSDP2's: dmuon has its own
        with traffic if dedicated else nullcontext():
            self._backward()
        with traffic:
            self._step()
        if dedicated:
            messages = dedicated_messages(dedications(self._model)[0].runtime, ns_dtype=self._layout.ns_dtype)
        else:
            messages = exchanged_messages(self._optimizer)
        planned = [sum(column) for column in zip((0, 0), *totals(messages).values(), strict=True)]
        counted = _equal("collectives", "{} of {} bytes", [traffic.calls, traffic.nbytes], planned)
        params = [param for name, param in self._model.named_parameters() if is_matrix(name)]
        momentum = [self._optimizer.state[p]["momentum_buffer"] for p in params if p in self._optimizer.state]
        here = [sum(local_tensor(tensor).numel() for tensor in tensors) for tensors in (params, momentum)]
        held = torch.tensor([self._optimizer.last_step.ns_matrices, *here], device=self._reference.device)
        dist.all_reduce(held)
        copies = 1 if dedicated else dict(self._layout.dims).get("replicate", 1)
        elements = copies * sum(param.numel() for param in params)
        text = "all ranks orthogonalize {} matrices, and hold {} elements of weights and {} of momentum"
        return [_equal("ownership", text, held.tolist(), [len(params), elements, elements]), counted]

    def checkpoint(self) -> Line:
        """State dicts into a fresh model: the same weights, and the same bits after another step."""
        # Copies, as a file would hold: what is loaded is not shared with what was saved.
        model_state, optimizer_state = tree_map_only(Tensor, torch.clone, get_state_dict(self._model, self._optimizer))
        fresh = Training(self._layout, self._mesh, self._reference, seed=1)
        set_state_dict(fresh._model, fresh._optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
        fresh._steps = self._steps
        loaded = _differing(_unsharded(fresh._model), _unsharded(self._model))
        for training in (self, fresh):
            training._backward()
            training._step()
        stepped = _differing(_unsharded(fresh._model), _unsharded(self._model))
        text = f"{loaded} tensors differ in a fresh model after loading, {stepped} after one more step"
        return Line("checkpoint", text, loaded + stepped)


def _equal(check: str, text: str, found: list[int], planned: list[int]) -> Line:
    wrong = found != planned
    return Line(check, text.format(*found) + (f"; expected {planned}" if wrong else ""), int(wrong))


def _unsharded(model: Network) -> dict[str, Tensor]:
    """Whole tensors on every rank, by stock means; on the host, unless by NCCL. Collective."""
    state = {name: t for name, t in get_model_state_dict(model).items() if isinstance(t, Tensor)}
    if dist.get_backend() != "nccl":  # what DTensors gather, gloo takes for memory of the host wherever it is
        state = {name: t.cpu() for name, t in state.items()}
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in state.items()}


def _differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> int:
    """How many tensors differ in their bits."""
    return sum(not torch.equal(found[name], tensor) for name, tensor in expected.items())


class Traffic(TorchDispatchMode):
    """Counts the collectives that this rank starts while it is entered.

    All-reduces are left out: consistency checks, and averages of what nobody shards.

    Args:
        others: groups that are not counted.

    Attributes:
        calls: how many collectives there were.
        nbytes: bytes of what they gather or reduce, of an all-to-all of what arrives.
    """

    def __init__(self, others: Iterable[dist.ProcessGroup]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = self.nbytes = 0
        self._others = {group.group_name for group in others}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        counted = func.namespace == "c10d" and not name.startswith(("allreduce", "barrier"))
        if counted and self._others.isdisjoint(map(_group_name, args)):
            self.calls += 1
            self.nbytes += _nbytes(args[0]) if name.startswith("alltoall") else max(map(_nbytes, args[:2]))
        return func(*args, **(kwargs or {}))


def _group_name(value: Any) -> str:
    if not isinstance(value, torch.ScriptObject):
        return ""
    try:
        name: str = dist.ProcessGroup.unbox(value).group_name
    except RuntimeError:  # another kind of object, such as a reduction
        return ""
    return name


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_nbytes, value)) if isinstance(value, (list, tuple)) else 0


def check_layout(layout: Layout, reference: Reference) -> list[Line]:
    """Train, and measure on this rank what has to hold. Collective over all ranks."""
    names, extents = zip(*layout.dims, strict=True)
    mesh = init_device_mesh(reference.device.type, extents, mesh_dim_names=names)
    training = Training(layout, mesh, reference)
    lines = training.parity()
    return [*lines, *training.ownership(), training.checkpoint()] if layout.is_exact else lines
