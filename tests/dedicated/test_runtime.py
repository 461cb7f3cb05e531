"""The step under unusual use: every case equals the same program in a single process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from harness.pool import RankPool
from harness.toy import (
    LR,
    VOCAB,
    WIDTH,
    Block,
    Reference,
    assert_equal_weights,
    batch,
    build,
    full_state,
    loss_of,
    shard,
)
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import dmuon
from dmuon.check.traffic import Traffic
from dmuon.dedicated.dedication import dedications

OPTIONS: dict[str, Any] = {"lr": LR, "weight_decay": 0.1, "ns_coefficients": "classic"}
MODES = pytest.mark.parametrize(("fsdp", "keep"), [(True, False), (True, True), (False, False), (False, True)])


def dedicate(model: nn.Module, world: int, fsdp: bool = True, keep: bool = False, **options: Any) -> dmuon.Muon:
    mesh = init_device_mesh("cpu", (world,))
    dmuon.dedicate_params(model, mesh, costs="flops", reshard_after_forward=not keep)
    if fsdp:
        for block in model.blocks:
            dmuon.fully_shard(block, mesh=mesh)
        dmuon.fully_shard(model, mesh=mesh)
    return dmuon.Muon(model, **{**OPTIONS, **options})


def runtime_of(model: nn.Module) -> Any:
    return dedications(model)[0].runtime


def assert_same_on_all_ranks(results: list[dict[str, Tensor]]) -> None:
    for other in results[1:]:
        for name, tensor in results[0].items():
            assert torch.equal(other[name], tensor), f"{name} differs between ranks"


# -- programs: each is run by a single process and by every rank --------------------------------------------------


class NestedBlock(Block):
    """Nested outputs whose first tensor nobody uses, keyword inputs, and an input that needs no gradient."""

    def forward(self, x: Tensor, *, extra: dict[str, Tensor]) -> dict[str, Any]:  # type: ignore[override]
        y = super().forward(x + extra["bias"])
        return {"unused": (self.up(x), None), "hidden": [y, extra["bias"]]}


class Variant(nn.Module):
    """Runs the blocks of a toy model in the way that ``kind`` names."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(NestedBlock() if kind == "nested outputs" else Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
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


def run_variants(rank: int, world: int, kinds: list[str], fsdp: bool, keep: bool) -> dict[str, dict[str, Tensor]]:
    found = {}
    for kind in kinds:
        model = Variant(kind)
        optimizer = dedicate(model, world, fsdp, keep)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, *shard(batch(step), rank, world)).backward()
            assert keep or all(g.state.name == "FREED" for g in runtime_of(model).buffers)
            optimizer.step()
        found[kind] = plain_names(full_state(model))
    return found


def reference_variant(kind: str) -> dict[str, Tensor]:
    model = Variant(kind)
    optimizer = Reference(model, matrix=lambda name: variant_matrix(name.replace("_checkpoint_wrapped_module.", "")))
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, *batch(step)).backward()
        optimizer.step()
    return plain_names({name: tensor.detach() for name, tensor in model.state_dict().items()})


def check_variants(ranks: RankPool, world: int, kinds: list[str], fsdp: bool, keep: bool) -> None:
    results = ranks(world, run_variants, kinds, fsdp, keep)
    for kind in kinds:
        assert_same_on_all_ranks([r[kind] for r in results])
        try:
            assert_equal_weights(results[0][kind], reference_variant(kind))
        except AssertionError as error:
            raise AssertionError(f"{kind}: {error}") from None


@pytest.mark.pitfall("P15", "P18", "P19", "P58")
@pytest.mark.parametrize(
    ("world", "fsdp", "keep"),
    [
        (2, True, False),
        *(
            pytest.param(world, fsdp, keep, marks=pytest.mark.slow)
            for world in (2, 3)
            for fsdp in (True, False)
            for keep in (True, False)
            if (world, fsdp, keep) != (2, True, False)
        ),
    ],
)
def test_unusual_forwards_equal_single_process(ranks: RankPool, world: int, fsdp: bool, keep: bool) -> None:
    everything = world == 2 or (fsdp and not keep)
    check_variants(ranks, world, KINDS if everything else ["plain", "branches"], fsdp, keep)


@pytest.mark.slow
@MODES
def test_unusual_forwards_equal_single_process_on_four_ranks(ranks: RankPool, fsdp: bool, keep: bool) -> None:
    check_variants(ranks, 4, KINDS, fsdp, keep)


# -- sequences of steps -------------------------------------------------------------------------------------------

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


def run_sequence(rank: int, world: int, sequence: Sequence, modes: list[tuple[bool, bool]]) -> list[dict[str, Tensor]]:
    found = []
    for fsdp, keep in modes:
        model = build()
        optimizer = dedicate(model, world, fsdp, keep)
        sequence(model, optimizer, lambda i, m=model: loss_of(m, *shard(batch(i), rank, world)))
        found.append(full_state(model))
    return found


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_sequences_equal_single_process(ranks: RankPool, sequence: Sequence) -> None:
    # Stock FSDP2 cannot go on after an exception inside a backward, and its root keeps weights from before the step
    # when a forward without gradients runs between backward and step; those run on what dmuon does alone.
    alone = [(False, False), (False, True)]
    only_alone = (exceptions, forwards_that_never_run_backward, unfrozen_later)
    modes = alone if sequence in only_alone else [(True, False), (True, True), *alone]
    results = ranks(2, run_sequence, sequence, modes)
    model = build()
    optimizer = _SingleProcess(model)
    sequence(model, optimizer, lambda i: loss_of(model, *batch(i)))
    expected = {n: p.detach() for n, p in model.state_dict().items()}
    for index, mode in enumerate(modes):
        assert_same_on_all_ranks([r[index] for r in results])
        try:
            assert_equal_weights(results[0][index], expected)
        except AssertionError as error:
            raise AssertionError(f"fsdp, keep = {mode}: {error}") from None


class _SingleProcess(Reference):
    def zero_grad(self, set_to_none: bool = True) -> None:
        self.muon.zero_grad(set_to_none)
        self.adamw.zero_grad(set_to_none)


# -- ranks that differ --------------------------------------------------------------------------------------------


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


USES = [(True, True), (True, False), (False, False), (False, True), (False, False)]


def run_optional(rank: int, world: int, keep: bool) -> tuple[dict[str, Tensor], list[list[str]]]:
    model = Optional()
    optimizer = dedicate(model, world, fsdp=False, keep=keep)
    names: list[list[str]] = []
    for step, uses in enumerate(USES):
        optimizer.zero_grad()
        x = torch.randn(world, 4, WIDTH, generator=torch.Generator().manual_seed(step))
        model(x[rank], uses[rank]).square().mean().backward()
        names.append([n for n, p in model.named_parameters() if p.grad is None])
        optimizer.step()
    return full_state(model), names


@pytest.mark.pitfall("P19", "P48")
@pytest.mark.parametrize("keep", [False, True])
def test_parameters_used_on_some_ranks_only(ranks: RankPool, keep: bool) -> None:
    """No hang; a parameter that no rank used keeps ``grad is None`` and is skipped, as in a single process."""
    results = ranks(2, run_optional, keep)
    model = Optional()
    optimizer = Reference(model, matrix=lambda n: n.startswith("blocks.") and n.endswith("weight"))
    unused = []
    for step, uses in enumerate(USES):
        optimizer.zero_grad()
        x = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(step))
        sum(model(x[r], uses[r]).square().mean() / 2 for r in range(2)).backward()
        unused.append([n for n, p in model.named_parameters() if p.grad is None])
        optimizer.step()
    expected = {n: p.detach() for n, p in model.state_dict().items()}
    assert unused[0] == [] and len(unused[2]) == 5
    for weights, names in results:
        assert names == unused
        assert_equal_weights(weights, expected)


# -- freshness ----------------------------------------------------------------------------------------------------


def run_fresh_weights(rank: int, world: int) -> None:
    tokens, targets = batch(0)
    for keep in (False, True):
        model = build()
        optimizer = dedicate(model, world, keep=keep)
        twin = build()
        loss_of(model, tokens, targets).backward()
        optimizer.step()  # publishes: buffers are being filled with the new weights now
        target = {n: torch.randn_like(p) for n, p in twin.state_dict().items()}
        twin.load_state_dict(target)
        model.load_state_dict({n: _as(model.state_dict()[n], t) for n, t in target.items()})
        with torch.no_grad():
            assert torch.allclose(model(tokens), twin(tokens), atol=1e-6), (
                "forward after a load uses the loaded weights"
            )
            for p, q in zip(model.blocks[0].parameters(), twin.blocks[0].parameters(), strict=True):
                p.mul_(0.5)
                q.mul_(0.5)
            assert torch.allclose(model(tokens), twin(tokens), atol=1e-6), "… and after an edit the edited ones"
            for p, q in zip(model.blocks[1].parameters(), twin.blocks[1].parameters(), strict=True):
                p.data.mul_(0.5)
                q.data.mul_(0.5)
            assert torch.allclose(model(tokens), twin(tokens), atol=1e-6), "… also through .data"
        out = loss_of(model, tokens, targets)
        with torch.no_grad():
            for p in dmuon.owned_parameters(model):
                p.mul_(0.5)
        with pytest.raises(RuntimeError, match=r"block 'blocks\.2' changed between its forward and its backward"):
            out.backward()
        dist.barrier()


def _as(like: Tensor, value: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor, distribute_tensor

    return distribute_tensor(value, like.device_mesh, like.placements) if isinstance(like, DTensor) else value


@pytest.mark.pitfall("P17", "P28")
def test_forward_never_uses_weights_of_an_older_generation(ranks: RankPool) -> None:
    ranks(2, run_fresh_weights)


def run_foreign_optimizer(rank: int, world: int) -> None:
    """An ordinary elementwise optimizer over owned parameters is exact as well, and its edits are seen."""
    for keep in (False, True):
        model, twin = build(), build()
        dedicate(model, world, keep=keep)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        other = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            optimizer.zero_grad()
            other.zero_grad()
            loss_of(model, *shard(batch(step), rank, world)).backward()
            loss_of(twin, *batch(step)).backward()
            optimizer.step()
            other.step()
        assert_equal_weights(full_state(model), {n: p.detach() for n, p in twin.state_dict().items()})


def test_elementwise_optimizers_work_on_owned_parameters(ranks: RankPool) -> None:
    ranks(2, run_foreign_optimizer)


# -- compile ------------------------------------------------------------------------------------------------------


def run_compiled(rank: int, world: int) -> list[tuple[dict[str, Tensor], list[int]]]:
    from torch._dynamo.utils import counters

    found = []
    for fsdp in (False, True):
        torch._dynamo.reset()
        counters.clear()
        model = build()
        mesh = init_device_mesh("cpu", (world,))
        dmuon.dedicate_params(model, mesh, costs="flops")
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
            if fsdp:
                dmuon.fully_shard(block, mesh=mesh)
        optimizer = dmuon.Muon(model, **OPTIONS)
        graphs = []
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, *shard(batch(step), rank, world)).backward()
            optimizer.step()
            graphs.append(counters["stats"]["unique_graphs"])
        assert not counters["graph_break"]
        found.append((full_state(model), graphs))
    return found


@pytest.mark.pitfall("P57")
def test_compiled_blocks_are_exact_and_compile_once(ranks: RankPool) -> None:
    results = ranks(2, run_compiled, timeout=100)
    model = build()
    optimizer = Reference(model)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, *batch(step)).backward()
        optimizer.step()
    for result in results:
        for weights, graphs in result:
            assert_equal_weights(weights, {n: p.detach() for n, p in model.state_dict().items()})
            assert graphs[0] >= 1 and graphs[-1] == graphs[0], f"compiled again: {graphs} graphs after each step"


# -- placement and memory -----------------------------------------------------------------------------------------


def run_placement(rank: int, world: int, keep: bool) -> dict[str, Any]:
    model = build()
    optimizer = dedicate(model, world, keep=keep)
    runtime = runtime_of(model)
    owners = dedications(model)[0].plan.owners
    tokens, targets = shard(batch(0), rank, world)
    inside: list[int] = []
    for block in model.blocks:
        block.norm.register_forward_hook(lambda *_: inside.append(_filled(runtime)))

    def check(filled: int) -> None:
        for param in dmuon.owned_parameters(model):
            held = param._local_tensor.untyped_storage().nbytes()
            assert held == (param.numel() * 4 if owners[param.fqn] == rank else 0), param.fqn
        assert _filled(runtime) == filled, [g.buffer_nbytes for g in runtime.buffers]

    kept = len(runtime.buffers) if keep else 0
    check(0)
    for _ in range(2):
        out = loss_of(model, tokens, targets)
        check(kept)
        out.backward()
        check(kept)
        for entry in runtime.entries():
            assert entry.full.grad is None
            grad = entry.rest.grad
            assert grad._local_tensor.shape == (entry.shape if entry.owner == rank else (0, entry.shape[1]))
        optimizer.step()
        check(len(runtime.buffers) if keep else 1)  # published: prefetch depth 1
        with torch.no_grad():
            model(tokens)
        check(kept)
    return {"most blocks at once": max(inside), "owned": sum(o == rank for o in owners.values())}


def _filled(runtime: Any) -> int:
    return sum(g.buffer_nbytes > 0 for g in runtime.buffers)


@pytest.mark.pitfall("P14", "P27", "P59")
@pytest.mark.parametrize("keep", [False, True])
def test_placeholders_are_empty_and_buffers_freed(ranks: RankPool, keep: bool) -> None:
    results = ranks(4, run_placement, keep)
    assert sum(r["owned"] for r in results) == 9
    for result in results:
        assert result["most blocks at once"] <= (3 if keep else 2), "the block that computes and the prefetched one"


def run_rank_without_matrices(rank: int, world: int) -> tuple[dict[str, Tensor], int]:
    torch.manual_seed(0)
    model = build(layers=1)
    mesh = init_device_mesh("cpu", (world,))
    dmuon.dedicate_params(model, mesh, costs="flops", select=lambda fqn, *_: fqn.endswith(("mix.weight", "up.weight")))
    optimizer = dmuon.Muon(model, **OPTIONS)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, *shard(batch(step), rank, world)).backward()
        optimizer.step()
    return full_state(model), optimizer.last_step.ns_matrices


@pytest.mark.pitfall("P14", "P53")
def test_ranks_that_own_nothing(ranks: RankPool) -> None:
    results = ranks(4, run_rank_without_matrices)
    assert sorted(calls for _, calls in results) == [0, 0, 1, 1]
    model = build(layers=1)
    optimizer = Reference(model, matrix=lambda n: n.endswith(("mix.weight", "up.weight")))
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, *batch(step)).backward()
        optimizer.step()
    for weights, _ in results:
        assert_equal_weights(weights, {n: p.detach() for n, p in model.state_dict().items()})


# -- collectives --------------------------------------------------------------------------------------------------


def run_counts(rank: int, world: int, keep: bool, micro: int) -> dict[str, int]:
    model = build()
    optimizer = dedicate(model, world, fsdp=False, keep=keep)
    tokens, targets = shard(batch(0), rank, world)
    for _ in range(2):
        with Traffic() as traffic:
            for i in range(micro):
                dmuon.set_requires_gradient_sync(model, i == micro - 1)
                loss_of(model, tokens, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    return traffic.operations()


@pytest.mark.pitfall("P12", "P26")
@pytest.mark.parametrize(("keep", "micro"), [(False, 1), (True, 1), (False, 3), (True, 3)])
def test_collective_counts(ranks: RankPool, keep: bool, micro: int) -> None:
    """Per block and owner: broadcasts once per pass over resharded weights or once per step when kept, one reduce."""
    owners_per_block = 2
    blocks = 3
    results = ranks(2, run_counts, keep, micro)
    fills = blocks if keep else 2 * micro * blocks
    for counts in results:
        assert counts == {
            "broadcast_": fills * owners_per_block,
            "reduce_": blocks * owners_per_block,
            "allreduce_": 2,  # one bucket of replicated gradients, one exchange of what was used
        }


# -- misuse -------------------------------------------------------------------------------------------------------


def run_misuse(rank: int, world: int) -> None:
    model = build()
    optimizer = dedicate(model, world, fsdp=False)
    loss_of(model, *batch(0)).backward()
    with dmuon.summon_full_params(model):
        with pytest.raises(RuntimeError, match=r"step\(\) while block 'blocks\.0' is SUMMONED"):
            optimizer.step()
        with pytest.raises(RuntimeError, match=r"block 'blocks\.0' while .* summon_full_params"):
            model(batch(0)[0])
    with dmuon.no_sync(model):
        loss_of(model, *batch(0)).backward()
    with pytest.raises(RuntimeError, match=r"gradient of 'blocks\.0.*' is not reduced"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"create_graph=True\) through block 'blocks\.2'"):
        loss_of(model, *batch(0)).backward(create_graph=True)
    with dmuon.summon_full_params(model):
        assert len(dmuon.owned_parameters(model)) == 9
    model.blocks[1].mix.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    with pytest.raises(RuntimeError, match=r"'blocks\.1\.mix\.weight' was replaced in its module"):
        model(batch(0)[0])


def test_misuse_is_named(ranks: RankPool) -> None:
    ranks(2, run_misuse)
