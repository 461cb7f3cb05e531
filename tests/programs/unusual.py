"""Models and training loops, ordinary and not, which run alike in a single process and on ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from harness import small_convnets, small_models
from harness.dtensors import local_tensor
from harness.network import Block, Network, Size, is_matrix, loss_of, shard, tensor_parallel
from harness.oracle import Reference
from harness.toy import SIZE, VOCAB, WIDTH, batch, build
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import dmuon
from programs.left_behind import TOWERS, WAYS, Towers, auxiliary_loss, model_of, towers_loss

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
        run = getattr(self, "_" + self.kind.replace(" ", "_"), self.run_plain)
        return self.head(self.norm(run(x)))

    def run_plain(self, x: Tensor) -> Tensor:
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


def plain_name(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "")


def variant_matrix(name: str) -> bool:
    ends = ("mix.weight", "alias.weight", "up.weight", "down.weight")
    return name.startswith("blocks.") and plain_name(name).endswith(ends)


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


class ThinBlock(Block):
    """With matrices of one row and of one column."""

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self.gate = nn.Linear(size.width, 1, bias=False)
        self.lift = nn.Linear(1, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.lift(self.gate(x))


class HiddenSparse(nn.Module):
    """An embedding whose gradient is sparse, which no attribute says."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight, sparse=True)


def hidden_sparse() -> Network:
    model = build()
    model.embed = HiddenSparse(model.embed.weight)  # type: ignore[assignment]
    return model


class TwoDtypes(Block):
    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self.mix.double()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(x.double()).float() + self.down(F.gelu(self.up(self.norm(x))))


class SequenceBlock(Block):
    """A block whose norm sees a part of the sequence on each tensor-parallel rank."""

    tensor_mesh: DeviceMesh | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.tensor_mesh is None:
            return super().forward(x)
        along = DTensor.from_local(x, self.tensor_mesh, [Replicate()], run_check=False)
        # What torch 2.12 gathers along a sequence is not contiguous, though its DTensor says so, and fails to multiply.
        whole = self.norm(along).full_tensor().contiguous()
        return x + self.mix(x) + self.down(F.gelu(self.up(whole)))


def split_sequence(model: Network, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        block.tensor_mesh = mesh
        plan = {
            "norm": SequenceParallel(),
            "mix": ColwiseParallel(output_layouts=Replicate()),
            "up": ColwiseParallel(use_local_output=False),
            "down": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)


def copy_matrix(model: Network, mesh: DeviceMesh) -> None:
    """``mix`` is whole on every tensor-parallel rank, each of which sees a part of the sequence."""

    def scatter(_module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        whole = DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)
        return whole.redistribute(mesh, [Shard(1)])

    def gather(_module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.redistribute(mesh, [Replicate()]).to_local()

    for block in model.blocks:
        distribute_module(block.mix, mesh, input_fn=scatter, output_fn=gather)
        parallelize_module(block, mesh, {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()})


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


# Of each micro-batch of a step, which of its four parts use the optional matrices, and its kind; how many are unused.
USES: list[tuple[list[tuple[tuple[bool, ...], str]], int]] = [
    ([((False, True, False, False), "replica"), ((False,) * 4, "full")], 0),
    ([((False, False, False, True), "none"), ((True, False, False, False), "replica"), ((False,) * 4, "full")], 0),
    ([((False,) * 4, "replica"), ((False,) * 4, "full")], 5),
    ([((True, False, False, False), "replica"), ((False, False, True, False), "full")], 0),
]


def optional_loss(model: nn.Module, step: int, part: int, parts: int, _: torch.dtype) -> Tensor:
    """``step``: ten times that of the loop, and the number of the micro-batch."""
    x = torch.randn(4, 4, WIDTH, generator=torch.Generator().manual_seed(step))
    uses, _kind = USES[step // 10][0][step % 10]
    mine = range(4 * part // parts, 4 * (part + 1) // parts)
    total: Tensor = sum(model(x[i], uses[i]).square().mean() for i in mine) / len(mine)
    return total


# -- training loops -------------------------------------------------------------------------------------------------

Loss = Callable[[int], Tensor]


def dedicated(model: nn.Module) -> bool:
    return bool(dmuon.owned_parameters(model))


def accumulate(model: nn.Module, kind: str) -> None:
    """The next backward reduces fully, within a replica only, or not at all."""
    if dedicated(model):
        dmuon.set_requires_gradient_sync(model, kind != "none")
        dmuon.set_requires_all_reduce(model, kind == "full")


def to_none_by_hand(model: nn.Module, _optimizer: Any) -> None:
    for param in model.parameters():
        param.grad = None


def delete_gradients(model: nn.Module, _optimizer: Any) -> None:
    for param in model.parameters():
        del param.grad


CLEARS: list[Callable[[nn.Module, Any], None]] = [
    lambda model, optimizer: model.zero_grad(),
    lambda model, optimizer: model.zero_grad(set_to_none=False),
    lambda model, optimizer: optimizer.zero_grad(),
    lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    to_none_by_hand,
    delete_gradients,
]


def cleared(model: nn.Module, optimizer: Any, loss: Loss, *, kind: str) -> None:
    """Gradients of an accumulation that was given up reach no step, however they were cleared."""
    for step, clear in enumerate(CLEARS):
        accumulate(model, kind)
        loss(10 + step).backward()
        clear(model, optimizer)
        left = [n for n, p in model.named_parameters() if p.grad is not None and local_tensor(p.grad).any()]
        assert not left, f"step {step}: {left}"
        accumulate(model, "full")
        loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()


HOOKED = ("blocks.0.mix.weight", "blocks.1.up.weight", "blocks.2.down.weight")


def register_hooks(model: nn.Module) -> list[Any]:
    """Of each matrix two that change what is learnt, and one that comes after them."""

    def reverse(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(-2.0)

    handles = []
    for name in HOOKED:
        param = model.get_parameter(name)
        handles.append(param.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3)))
        handles.append(param.register_hook(lambda grad: grad * 0.5 + 1e-4))
        handles.append(param.register_post_accumulate_grad_hook(reverse))
    return handles


def with_hooks() -> Network:
    """They are there before anything is laid out."""
    model = build()
    model.hooks = register_hooks(model)
    return model


def hooked(model: Any, optimizer: Any, loss: Loss) -> None:
    """Hooks see what the owner gets, until they are removed."""
    handles = getattr(model, "hooks", None) or register_hooks(model)
    steps(model, optimizer, loss, count=3)
    for handle in handles:
        handle.remove()
    steps(model, optimizer, loss, count=1)


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


def exceptions_between(model: nn.Module, optimizer: Any, loss: Loss) -> None:
    """A backward that does not synchronize fails before it comes to a block: what was accumulated before it counts."""

    def exhausted(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory left")

    for step in range(3):
        optimizer.zero_grad()
        accumulate(model, "none")
        (loss(2 * step) / 2).backward()
        handle = model.blocks[-1].register_forward_hook(lambda _m, _a, out: out.register_hook(exhausted) and None)
        with pytest.raises(torch.OutOfMemoryError):
            loss(80 + step).backward()
        handle.remove()
        accumulate(model, "full")
        (loss(2 * step + 1) / 2).backward()
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


def steps(model: nn.Module, optimizer: Any, loss: Loss, *, count: int = 4) -> None:
    for step in range(count):
        optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()


def accumulated(model: nn.Module, optimizer: Any, loss: Loss, *, kind: str) -> None:
    """Three batches a step, of which all but the last are reduced as ``kind`` says."""
    for step in range(4):
        optimizer.zero_grad()
        for i, reduced in enumerate((kind, kind, "full")):
            accumulate(model, reduced)
            (loss(3 * step + i) / 3).backward()
        optimizer.step()


def clipped(model: nn.Module, optimizer: Any, loss: Loss, *, by: str) -> None:
    """In every step, by torch's function or by dmuon's."""
    stock = by == "torch" or isinstance(optimizer, Reference)
    clip = nn.utils.clip_grad_norm_ if stock else dmuon.clip_grad_norm_
    for step in range(4):
        optimizer.zero_grad()
        loss(step).backward()
        assert float(clip(model.parameters(), 0.5)) > 0.6
        assert float(clip(model.parameters(), torch.inf)) == pytest.approx(0.5, rel=1e-5)
        optimizer.step()


WEIGHT = "blocks.0.mix.weight"


def double(weight: Tensor) -> None:
    weight.data *= 2  # which sets the attribute, too


EDITS: list[Callable[[Tensor], Any]] = [
    lambda w: w.data.mul_(2),
    lambda w: nn.init.zeros_(w),
    lambda w: w.data.detach().add_(0.1),
    lambda w: torch._foreach_mul_([w], 3.0),
    lambda w: w.fill_(0.25),
    double,
]


def edited(model: nn.Module, optimizer: Any, loss: Loss) -> None:
    """Edits in place reach the next forward, though whole weights of the last one are kept or fetched ahead."""
    for step, edit in enumerate(EDITS):
        optimizer.zero_grad()
        with torch.no_grad():
            loss(20 + step)
            edit(model.get_parameter(WEIGHT))
        loss(step).backward()
        optimizer.step()


def moved(model: nn.Module, optimizer: Any, loss: Loss) -> None:
    """By calls that change nothing."""
    for step, move in enumerate((lambda m: m.to("cpu"), lambda m: m.float(), lambda m: m.to(torch.float32).cpu())):
        optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()
        move(model)


def given_gradients(model: nn.Module, optimizer: Any, loss: Loss) -> None:
    """Backward adds to whole gradients that a program has set."""
    for step in range(2):
        for name, param in model.named_parameters():
            if is_matrix(name):
                param.grad = torch.full(param.shape, 0.01)
        loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()


def looked_at(model: nn.Module, optimizer: Any, loss: Loss) -> None:
    """The first rank alone runs what no backward follows: a block inside of a forward, and forwards of its own.

    As for statistics, to look at a loss, or since one failed and is tried again. The others run on, nothing is compared
    that they do not compare, and reductions come in one order all the same.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0

    def look(model: Any, args: tuple[Tensor, ...]) -> None:
        with torch.no_grad():
            model.blocks[0](model.embed(*args))

    for step in range(4):
        optimizer.zero_grad()
        handles = [model.register_forward_pre_hook(look)] if first and step != 2 else []
        if first and step == 1:
            loss(step)
        if first and step == 2:
            handles.append(model.blocks[1].up.register_forward_pre_hook(lambda *_: 1 / 0))
            with pytest.raises(ZeroDivisionError):
                loss(step)
            handles.pop().remove()
        loss(step).backward()
        for handle in handles:
            handle.remove()
        optimizer.step()


def used_by_some(model: nn.Module, optimizer: Any, loss: Loss) -> None:
    """A parameter that no rank used keeps ``grad is None`` and is skipped."""
    for step, (micro, unused) in enumerate(USES):
        optimizer.zero_grad()
        for i, (_, kind) in enumerate(micro):
            accumulate(model, kind)
            loss(10 * step + i).backward()
        assert sum(p.grad is None for p in model.parameters()) == unused
        optimizer.step()


SCALE, POISONED = 2.0**10, 1


def scaled(model: nn.Module, optimizer: Any, loss: Loss) -> None:
    """By ``GradScaler``; in one step one rank finds an infinity, and all leave that step out."""
    alone = isinstance(optimizer, Reference)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2)
    scales = []
    for step in range(4):
        optimizer.zero_grad()
        if alone and step == POISONED:
            continue
        (loss(step) if alone else scaler.scale(loss(step))).backward()
        if step == POISONED:
            held = [local_tensor(p.grad) for p in model.parameters() if p.grad is not None and p.ndim > 1]
            next(grad for grad in held if grad.numel()).view(-1)[0] = torch.inf
        if not alone:
            scaler.unscale_(optimizer)
        if step == POISONED + 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if alone:
            optimizer.step()
            continue
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert alone or scales == [SCALE, SCALE / 2, SCALE / 2, SCALE], "the same on all ranks"


def averaged(model: nn.Module, optimizer: Any, loss: Loss) -> None:
    """The moving average of docs/guide.md, which takes the place of the weights in an evaluation."""
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(4):
        optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()
        own = {name: p.detach().clone() for name, p in model.named_parameters()}
        with torch.no_grad():
            for name, p in model.named_parameters():
                average[name].lerp_(p.detach(), 0.2)
                p.copy_(average[name])
            loss(9)
            model.state_dict()  # after which the root of FSDP2 has its shards again, and no whole weights from before
            if step < 3:  # what is compared in the end is the average
                for name, p in model.named_parameters():
                    p.copy_(own[name])


def network_loss(model: nn.Module, step: int, part: int, parts: int, dtype: torch.dtype) -> Tensor:
    return loss_of(model, *shard(batch(step), part, parts), dtype)


def penalized_loss(model: nn.Module, step: int, part: int, parts: int, dtype: torch.dtype) -> Tensor:
    """With norms of the matrices, which an owner alone holds."""
    matrices = [p for name, p in model.named_parameters() if is_matrix(name)]
    penalty = 0.3 * sum(p.norm() for p in matrices) + 0.1 * sum(p.norm(1) + p.norm(3) for p in matrices)
    return network_loss(model, step, part, parts, dtype) + penalty


@dataclass(frozen=True)
class Program:
    """A training loop, and the model that it trains.

    Attributes:
        alone: stock FSDP2 cannot do it, so that it runs on what dmuon does alone. FSDP2 cannot go on after an exception
            inside a backward, its root keeps weights from before the step when a forward without gradients runs between
            backward and step, and it does not drop what it accumulated when gradients are cleared.
        matrix: what of the model belongs to Muon.
        loss: of a model, on one of several parts of the batch of a step, under autocast to a dtype.
        frees: each backward of the loop ends with a step, so that no whole weights are left when it comes.
        split: over tensor-parallel ranks.
    """

    loop: Callable[[Any, Any, Loss], None]
    alone: bool = False
    make: Callable[[], nn.Module] = build
    matrix: Callable[[str], bool] = is_matrix
    loss: Callable[[nn.Module, int, int, int, torch.dtype], Tensor] = network_loss
    frees: bool = False
    split: Callable[[Network, DeviceMesh], None] = tensor_parallel


def _small(case: small_models.Case, x: Callable[[int], Tensor]) -> Program:
    """A model in which no layer repeats."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return case.make()

    def loss(model: nn.Module, step: int, part: int, parts: int, _: torch.dtype) -> Tensor:
        return small_models.loss_of(model, x(step).chunk(parts)[part])

    hidden = frozenset(f"{name}.weight" for name in case.hidden)
    return Program(partial(steps, count=3), make=make, matrix=hidden.__contains__, loss=loss)


def _matrix(name: str) -> bool:
    return name.endswith("weight") and "norm" not in name


PROGRAMS: dict[str, Program] = {
    "steps": Program(steps, frees=True),
    "ten steps": Program(partial(steps, count=10)),
    "thin matrices": Program(steps, make=partial(build, block=ThinBlock)),
    "sequence parallel": Program(steps, make=partial(build, block=SequenceBlock), split=split_sequence),
    "copied matrices": Program(steps, split=copy_matrix),
    "two dtypes": Program(partial(steps, count=3), make=partial(build, block=TwoDtypes)),
    "sparse gradients": Program(partial(steps, count=3), make=hidden_sparse),
    "accumulated": Program(partial(accumulated, kind="full")),
    "accumulated locally": Program(partial(accumulated, kind="none")),
    "accumulated in replicas": Program(partial(accumulated, kind="replica")),
    "norms in the loss": Program(partial(steps, count=2), loss=penalized_loss),
    "clipped": Program(partial(clipped, by="dmuon")),
    "clipped by torch": Program(partial(clipped, by="torch")),
    "scaled": Program(scaled, make=partial(build, hidden=28)),
    "averaged": Program(averaged, make=partial(build, hidden=28)),
    **{
        kind: Program(partial(steps, count=3), make=partial(Variant, kind), matrix=variant_matrix, frees=True)
        for kind in KINDS
    },
    "edited": Program(edited),
    "moved": Program(moved),
    "given gradients": Program(given_gradients, alone=True),
    "looked at by one rank": Program(looked_at),
    "only forwards": Program(only_forwards, alone=True),
    "used by some ranks": Program(
        used_by_some,
        alone=True,
        make=Optional,
        matrix=lambda name: name.startswith("blocks.") and name.endswith("weight"),
        loss=optional_loss,
    ),
    "exceptions": Program(exceptions, alone=True),
    "exceptions between": Program(exceptions_between, alone=True),
    "cleared, full": Program(partial(cleared, kind="full")),
    **{f"cleared, {kind}": Program(partial(cleared, kind=kind), alone=True) for kind in ("none", "replica")},
    "gradient hooks": Program(hooked),
    "gradient hooks from before": Program(hooked, make=with_hooks),
    "two forwards two backwards": Program(two_forwards_two_backwards),
    **{f"momentum {how}": Program(partial(reset_momentum, how=how)) for how in ("replaced", "cleared", "zeroed")},
    **{
        f"{name}, {kind}": Program(partial(loop, kind=kind), alone=True, make=skipping)
        for name, loop in (("dropped and skipped", drop_then_skip), ("skipped last", skipped_last))
        for kind in ("none", "replica")
    },
    **{
        f"auxiliary loss by {way}": Program(partial(steps, count=2), make=partial(model_of, way), loss=auxiliary_loss)
        for way in WAYS
    },
    "auxiliary loss, accumulated locally": Program(
        partial(accumulated, kind="none"), alone=True, make=partial(model_of, "board"), loss=auxiliary_loss
    ),
    **{
        f"keys in a cache, {i}": Program(
            partial(steps, count=2), make=partial(Towers, *way), matrix=_matrix, loss=towers_loss
        )
        for i, way in enumerate(TOWERS)
    },
    **{name: _small(case, small_models.batch) for name, case in small_models.CASES.items()},
    **{name: _small(case, small_convnets.images) for name, case in small_convnets.CONVNETS.items()},
}
