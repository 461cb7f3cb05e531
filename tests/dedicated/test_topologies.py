"""Unusual programs on every topology and with every option of communication equal a single process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from harness.assertions import assert_equal_weights, assert_same_bits
from harness.oracle import Reference, reference_weights
from harness.pool import RankPool
from harness.topologies import LAYOUTS, Laid, lay, runtime_of
from harness.toy import OPTIONS, SIZE, WIDTH, batch, build
from programs.unusual import (
    KINDS,
    Optional,
    Variant,
    dropped_batch,
    exceptions,
    forwards_that_never_run_backward,
    gradients_as_the_user_wants,
    plain_names,
    reference_variant,
    retained_graph,
    step_twice,
    two_forwards_one_backward,
    two_forwards_two_backwards,
    unfrozen_later,
)
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import dmuon
from dmuon.check.model import Block, Network, Size, is_matrix, loss_of
from dmuon.check.topologies import full_state
from dmuon.dedicated.dedication import dedications

MERGED = 10**6  # bytes: all blocks of a toy model together

Options = dict[str, Any]


def laid_out(name: str, model: nn.Module, comm: Options, **options: Any) -> tuple[Laid, dmuon.Muon]:
    laid = lay(name, model, comm=dmuon.CommOptions(**comm), **options)
    return laid, dmuon.Muon(laid.model, **OPTIONS)


def train(laid: Laid, optimizer: dmuon.Muon, steps: int = 3) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        laid.loss(step).backward()
        optimizer.step()


# -- forwards -----------------------------------------------------------------------------------------------------

TELLING = [
    "block called twice",
    "one call without backward",
    "nested outputs",
    "skipped block",
    "branches",
    "block input without gradient",
    "checkpoint reentrant",
    "checkpoint several blocks",
]

_reference_variant = lru_cache(maxsize=None)(reference_variant)


def run_kinds(_rank: int, _world: int, name: str, keep: bool, comm: Options, kinds: list[str]) -> dict[str, Any]:
    found = {}
    for kind in kinds:
        laid, optimizer = laid_out(name, Variant(kind), comm, keep=keep)
        train(laid, optimizer)
        resident = keep or LAYOUTS[name].dims[0] == ("replicate", LAYOUTS[name].world)
        for buffer in runtime_of(laid.model).buffers:
            buffer.free()  # also what the last step published: nobody may still use it
            assert buffer.buffer_nbytes == 0
        assert resident or not any(buffer.in_use for buffer in runtime_of(laid.model).buffers)
        found[kind] = plain_names(full_state(laid.model))
    return found


def check_kinds(
    ranks: RankPool, name: str, comm: Options, keep: bool = False, kinds: list[str] = KINDS
) -> list[dict[str, Any]]:
    results = ranks(LAYOUTS[name].world, run_kinds, name, keep, comm, kinds, timeout=100)
    for kind in kinds:
        assert_same_bits([r[kind] for r in results])
        try:
            assert_equal_weights(results[0][kind], _reference_variant(kind))
        except AssertionError as error:
            raise AssertionError(f"{kind}: {error}") from None
    return results


@pytest.mark.pitfall("P15", "P18", "P19", "P58")
@pytest.mark.parametrize(
    ("name", "keep", "comm"),
    [
        pytest.param("hsdp", False, {}, marks=pytest.mark.slow),
        ("ddp-2", False, {"transport": "single", "outstanding_reductions": 1}),
        pytest.param(
            "1d-two-lines",
            False,
            {"merge_bytes": MERGED, "transport": "single", "prefetch": 2},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "1d-two-lines",
            True,
            {"merge_bytes": MERGED, "prefetch": 0, "asynchronous": False},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_unusual_forwards_equal_single_process(ranks: RankPool, name: str, keep: bool, comm: Options) -> None:
    check_kinds(ranks, name, comm, keep, TELLING)


@pytest.mark.slow
@pytest.mark.parametrize("keep", [False, True], ids=["reshard", "keep"])
@pytest.mark.parametrize(
    "comm",
    [
        {},
        {"transport": "broadcast", "prefetch": 2, "outstanding_reductions": 4},
        {"transport": "single", "prefetch": 0, "outstanding_reductions": 1},
        {"merge_bytes": MERGED},
        {"asynchronous": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["hsdp", "ddp-4", "1d"])
def test_unusual_forwards_equal_single_process_with_every_option(
    ranks: RankPool, name: str, comm: Options, keep: bool
) -> None:
    check_kinds(ranks, name, comm, keep)


# -- options change nothing ---------------------------------------------------------------------------------------

VARIED: list[Options] = [
    {},
    {"asynchronous": False},
    {"prefetch": 0},
    {"prefetch": 2, "outstanding_reductions": 4},
    {"outstanding_reductions": 1},
    {"merge_bytes": MERGED},
    {"transport": "single"},
    {"transport": "broadcast"},
    {"transport": "single", "merge_bytes": MERGED, "prefetch": 2, "asynchronous": False},
]


def run_options(rank: int, world: int, name: str, keep: bool, varied: list[Options]) -> list[dict[str, Any]]:
    kinds = ["block called twice", "checkpoint reentrant"]
    return [run_kinds(rank, world, name, keep, comm, kinds) for comm in varied]


@pytest.mark.pitfall("P10", "P26")
@pytest.mark.parametrize(
    ("name", "keep"),
    [
        pytest.param("1d", False, marks=pytest.mark.slow),
        pytest.param("hsdp-two-lines", False, marks=pytest.mark.slow),
        pytest.param("ddp-2", False, marks=pytest.mark.slow),
    ],
)
def test_options_of_communication_change_no_bit(ranks: RankPool, name: str, keep: bool) -> None:
    """Two ranks on each lane: whatever the order of a sum, it is the same one."""
    for found in ranks(LAYOUTS[name].world, run_options, name, keep, VARIED, timeout=100):
        for comm, weights in zip(VARIED[1:], found[1:], strict=True):
            for kind, tensors in found[0].items():
                for fqn, tensor in tensors.items():
                    assert torch.equal(weights[kind][fqn], tensor), f"{comm} changes {fqn} of {kind!r}"


@pytest.mark.slow
@pytest.mark.parametrize("keep", [False, True], ids=["reshard", "keep"])
@pytest.mark.parametrize("name", ["1d-two-lines", "hsdp", "hsdp-two-lines", "cp", "tp-fsdp", "tp-ddp"])
def test_asynchronous_equals_synchronous_bitwise(ranks: RankPool, name: str, keep: bool) -> None:
    found = ranks(LAYOUTS[name].world, run_synchronous, name, keep, timeout=100)
    for one, other in found:
        assert_same_bits([one, other])


def run_synchronous(_rank: int, _world: int, name: str, keep: bool) -> list[dict[str, Tensor]]:
    found = []
    for asynchronous in (True, False):
        laid, optimizer = laid_out(name, build(), {"asynchronous": asynchronous}, keep=keep)
        train(laid, optimizer)
        found.append(full_state(laid.model))
    return found


# -- sequences of steps -------------------------------------------------------------------------------------------

Loss = Callable[[int], Tensor]
Sequence = Callable[[nn.Module, Any, Loss], None]


def dedicated(model: nn.Module) -> bool:
    return bool(dedications(model))


def accumulate(model: nn.Module, kind: str) -> None:
    """The next backward reduces fully, within a replica only, or not at all."""
    if dedicated(model):
        dmuon.set_requires_gradient_sync(model, kind != "none")
        dmuon.set_requires_all_reduce(model, kind == "full")


def whole_weights(model: nn.Module) -> AbstractContextManager[None]:
    return dmuon.summon_full_params(model) if dedicated(model) else nullcontext()


def mixed_accumulation(model: nn.Module, optimizer: Any, loss: Loss) -> None:
    orders = [
        ("none", "replica", "full"),
        ("replica", "none", "replica", "full"),
        ("replica", "replica", "full"),
        ("full", "none", "full"),
        ("full", "replica", "full"),
    ]
    for step, kinds in enumerate(orders):
        optimizer.zero_grad()
        for i, kind in enumerate(kinds):
            accumulate(model, kind)
            (loss(10 * step + i) / len(kinds)).backward()
        optimizer.step()


def dropped_accumulation(model: nn.Module, optimizer: Any, loss: Loss) -> None:
    for step, kind in enumerate(("none", "replica", "full")):
        accumulate(model, kind)
        loss(80 + step).backward()
        model.zero_grad()  # not the optimizer's
        for i, micro in enumerate((kind, "full")):
            accumulate(model, micro)
            (loss(10 * step + i) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluation_between_micro_batches(model: nn.Module, optimizer: Any, loss: Loss) -> None:
    for step in range(3):
        optimizer.zero_grad()
        for i, kind in enumerate(("none", "replica", "full")):
            accumulate(model, kind)
            (loss(10 * step + i) / 3).backward()
            model.eval()
            with torch.no_grad():
                loss(90 + i)
            model.train()
        optimizer.step()


def edits_of_whole_weights(model: nn.Module, optimizer: Any, loss: Loss) -> None:
    for step in range(3):
        optimizer.zero_grad()
        with whole_weights(model), torch.no_grad():
            model.blocks[0].mix.weight.mul_(0.5)
        loss(step).backward()
        with whole_weights(model), torch.no_grad():
            model.blocks[2].up.weight.add_(0.01 * step)
            model.blocks[1].down.weight.copy_(model.blocks[0].down.weight)
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


def failure_while_accumulating(model: nn.Module, optimizer: Any, loss: Loss) -> None:
    def fail(*_: Any) -> None:
        raise ArithmeticError

    for kind in ("none", "replica"):
        optimizer.zero_grad()
        accumulate(model, kind)
        loss(1).backward()
        where = model.blocks[1].register_forward_hook(lambda _m, _a, out: out.register_hook(fail) and None)
        accumulate(model, "full")
        with pytest.raises(ArithmeticError):
            loss(2).backward()
        where.remove()
        optimizer.zero_grad()
        loss(3).backward()
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


SEQUENCES = [
    pytest.param(mixed_accumulation, marks=[pytest.mark.pitfall("P12"), pytest.mark.slow]),
    pytest.param(dropped_accumulation, marks=[pytest.mark.pitfall("P16"), pytest.mark.slow]),
    pytest.param(evaluation_between_micro_batches, marks=[pytest.mark.pitfall("P12", "P17"), pytest.mark.slow]),
    pytest.param(edits_of_whole_weights, marks=pytest.mark.pitfall("P17")),
    pytest.param(retry_out_of_memory, marks=[pytest.mark.pitfall("P17"), pytest.mark.slow]),
    pytest.param(failure_while_accumulating, marks=[pytest.mark.pitfall("P16", "P17"), pytest.mark.slow]),
    pytest.param(only_forwards, marks=[pytest.mark.pitfall("P22"), pytest.mark.slow]),
    pytest.param(exceptions, marks=pytest.mark.pitfall("P17")),
    pytest.param(dropped_batch, marks=[pytest.mark.pitfall("P16"), pytest.mark.slow]),
    pytest.param(step_twice, marks=[pytest.mark.pitfall("P22"), pytest.mark.slow]),
    pytest.param(two_forwards_one_backward, marks=pytest.mark.slow),
    pytest.param(two_forwards_two_backwards, marks=pytest.mark.slow),
    pytest.param(retained_graph, marks=pytest.mark.slow),
    pytest.param(forwards_that_never_run_backward, marks=[pytest.mark.pitfall("P17"), pytest.mark.slow]),
    pytest.param(gradients_as_the_user_wants, marks=pytest.mark.slow),
    pytest.param(unfrozen_later, marks=[pytest.mark.pitfall("P19"), pytest.mark.slow]),
]

# Stock FSDP2 cannot do these (see test_runtime.py; nor does it drop what it accumulated when gradients are cleared);
# they run on what dmuon does alone.
WITHOUT_FSDP = (
    dropped_accumulation,
    exceptions,
    forwards_that_never_run_backward,
    unfrozen_later,
    retry_out_of_memory,
    failure_while_accumulating,
    evaluation_between_micro_batches,
    only_forwards,
)

ALONE = [
    ("hsdp-two-lines", False, {}),
    ("hsdp-two-lines", True, {"transport": "single"}),
    ("hsdp-two-lines", False, {"merge_bytes": MERGED, "prefetch": 2, "outstanding_reductions": 4}),
    ("ddp-4", False, {"merge_bytes": MERGED}),
]


def run_sequence(_rank: int, _world: int, sequence: Sequence, modes: list[Any]) -> list[dict[str, Tensor]]:
    found = []
    for name, keep, comm in modes:
        laid, optimizer = laid_out(name, build(), comm, keep=keep)
        sequence(laid.model, optimizer, lambda i, laid=laid: laid.loss(i))
        found.append(full_state(laid.model))
    return found


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_sequences_equal_single_process(ranks: RankPool, sequence: Sequence) -> None:
    modes: list[Any] = ALONE if sequence in WITHOUT_FSDP else [*ALONE[2:], ("hsdp", False, {})]
    results = ranks(4, run_sequence, sequence, modes, timeout=100)
    model = build()
    sequence(model, Reference(model), lambda i: loss_of(model, *batch(i)))
    expected = {n: p.detach() for n, p in model.state_dict().items()}
    for index, mode in enumerate(modes):
        assert_same_bits([r[index] for r in results])
        try:
            assert_equal_weights(results[0][index], expected)
        except AssertionError as error:
            raise AssertionError(f"{mode}: {error}") from None


class Skipping(Network):
    skipped: int | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            x = x if index == self.skipped else block(x)
        return self.head(self.norm(x))


def drop_then_skip(model: Skipping, optimizer: Any, loss: Loss, kind: str) -> None:
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


def run_drop_then_skip(_rank: int, _world: int, kind: str, modes: list[Any]) -> list[dict[str, Tensor]]:
    found = []
    for name, comm in modes:
        torch.manual_seed(0)
        laid, optimizer = laid_out(name, Skipping(SIZE), comm)
        drop_then_skip(laid.model, optimizer, lambda i, laid=laid: laid.loss(i), kind)
        found.append(full_state(laid.model))
    return found


@pytest.mark.pitfall("P16")
@pytest.mark.parametrize("kind", ["none", "replica"])
def test_dropped_gradients_of_a_skipped_block_stay_dropped(ranks: RankPool, kind: str) -> None:
    modes = [("hsdp-two-lines", {}), ("hsdp-two-lines", {"merge_bytes": MERGED}), ("ddp-4", {"merge_bytes": MERGED})]
    results = ranks(4, run_drop_then_skip, kind, modes)
    torch.manual_seed(0)
    model = Skipping(SIZE)
    drop_then_skip(model, Reference(model), lambda i: loss_of(model, *batch(i)), kind)
    expected = {n: p.detach() for n, p in model.state_dict().items()}
    for found in results:
        for mode, weights in zip(modes, found, strict=True):
            try:
                assert_equal_weights(weights, expected)
            except AssertionError as error:
                raise AssertionError(f"{mode}: {error}") from None


# Which rank uses the optional matrices in which micro-batch of a step; the kind of each micro-batch.
USES = [
    [((False, True, False, False), "replica"), ((False, False, False, False), "full")],
    [((False, False, False, True), "none"), ((True, False, False, False), "replica"), ((False,) * 4, "full")],
    [((False,) * 4, "replica"), ((False,) * 4, "full")],
    [((True, False, False, False), "replica"), ((False, False, True, False), "full")],
]


def run_optional(rank: int, world: int, name: str, comm: Options) -> tuple[dict[str, Tensor], list[list[str]]]:
    laid, optimizer = laid_out(name, Optional(), comm)
    names = []
    for step, micro in enumerate(USES):
        optimizer.zero_grad()
        for i, (uses, kind) in enumerate(micro):
            accumulate(laid.model, kind)
            x = torch.randn(world, 4, WIDTH, generator=torch.Generator().manual_seed(10 * step + i))
            laid.model(x[rank], uses[rank]).square().mean().backward()
        names.append([n for n, p in laid.model.named_parameters() if p.grad is None])
        optimizer.step()
    return full_state(laid.model), names


@pytest.mark.pitfall("P12", "P19", "P48")
@pytest.mark.parametrize(
    ("name", "comm"), [("hsdp-two-lines", {}), ("hsdp-two-lines", {"merge_bytes": MERGED}), ("ddp-4", {})]
)
def test_accumulated_gradients_that_only_some_ranks_have(ranks: RankPool, name: str, comm: Options) -> None:
    results = ranks(4, run_optional, name, comm)
    model = Optional()
    optimizer = Reference(model, matrix=lambda n: n.startswith("blocks.") and n.endswith("weight"))
    unused = []
    for step, micro in enumerate(USES):
        optimizer.zero_grad()
        for i, (uses, _) in enumerate(micro):
            x = torch.randn(4, 4, WIDTH, generator=torch.Generator().manual_seed(10 * step + i))
            sum(model(x[r], uses[r]).square().mean() / 4 for r in range(4)).backward()
        unused.append([n for n, p in model.named_parameters() if p.grad is None])
        optimizer.step()
    assert [len(u) for u in unused] == [0, 0, 5, 0]
    for weights, names in results:
        assert names == unused
        assert_equal_weights(weights, {n: p.detach() for n, p in model.state_dict().items()})


# -- a user's own collectives -------------------------------------------------------------------------------------


def run_user_collectives(rank: int, world: int, name: str) -> dict[str, Tensor]:
    """All-reduces of the user between and within forward and backward, some still under way."""
    laid, optimizer = laid_out(name, build(), {})
    works: list[tuple[Any, Tensor]] = []

    def communicate(*_: Any) -> None:
        value = torch.full((1000,), float(rank))
        works.append((dist.all_reduce(value, async_op=True), value))

    for block in laid.model.blocks:
        block.register_forward_hook(communicate)
        block.up.register_full_backward_hook(communicate)
    for step in range(3):
        optimizer.zero_grad()
        loss = laid.loss(step)
        communicate()
        dist.barrier()
        loss.backward()
        communicate()
        optimizer.step()
    for work, value in works:
        work.wait()
        assert torch.equal(value, torch.full((1000,), float(sum(range(world)))))
    return full_state(laid.model)


@pytest.mark.pitfall("P25")
@pytest.mark.parametrize("name", ["hsdp", "ddp-2"])
def test_collectives_of_the_user_do_not_interleave(ranks: RankPool, name: str) -> None:
    for weights in ranks(LAYOUTS[name].world, run_user_collectives, name):
        assert_equal_weights(weights, reference_weights(3))


# -- compile ------------------------------------------------------------------------------------------------------


def run_compiled(_rank: int, _world: int, name: str) -> dict[str, Tensor]:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = build()
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    laid, optimizer = laid_out(name, model, {})
    train(laid, optimizer, 1)
    graphs = counters["stats"]["unique_graphs"]
    train(laid, optimizer)
    assert graphs >= 1 and counters["stats"]["unique_graphs"] == graphs, "compiled again in a later step"
    assert not counters["graph_break"]
    return full_state(laid.model)


@pytest.mark.pitfall("P57")
@pytest.mark.parametrize("name", ["ddp-2", pytest.param("hsdp", marks=pytest.mark.slow)])
def test_compiled_blocks_are_exact_and_compile_once(ranks: RankPool, name: str) -> None:
    model = build()
    optimizer = Reference(model)
    for step in (0, 0, 1, 2):
        optimizer.zero_grad()
        loss_of(model, *batch(step)).backward()
        optimizer.step()
    for weights in ranks(LAYOUTS[name].world, run_compiled, name, timeout=110):
        assert_equal_weights(weights, {n: p.detach() for n, p in model.state_dict().items()})


# -- two dtypes in one block --------------------------------------------------------------------------------------


class TwoDtypes(Block):
    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self.mix.double()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(x.double()).float() + self.down(F.gelu(self.up(self.norm(x))))


def run_two_dtypes(_rank: int, _world: int, name: str, comm: Options) -> dict[str, Tensor]:
    laid, optimizer = laid_out(name, build(block=TwoDtypes), comm)
    train(laid, optimizer)
    dtypes = {e.fqn: (e.full.dtype, e.master.dtype) for e in runtime_of(laid.model).entries()}
    for fqn, found in dtypes.items():
        wanted = torch.float64 if fqn.endswith("mix.weight") else torch.float32
        assert found == (wanted, wanted), fqn
    return full_state(laid.model)


@pytest.mark.parametrize(
    ("name", "comm"),
    [("hsdp-two-lines", {}), ("ddp-2", {"merge_bytes": MERGED}), ("1d-two-lines", {"merge_bytes": MERGED})],
)
def test_two_dtypes_in_one_block(ranks: RankPool, name: str, comm: Options) -> None:
    expected = reference_weights(3, block=TwoDtypes)
    for weights in ranks(LAYOUTS[name].world, run_two_dtypes, name, comm):
        assert_equal_weights(weights, expected)


# -- tensor parallelism beyond rows and columns -------------------------------------------------------------------


class SequenceBlock(Block):
    """A block whose norm sees a part of the sequence on each tensor-parallel rank."""

    tensor_mesh: DeviceMesh

    def forward(self, x: Tensor) -> Tensor:
        along = DTensor.from_local(x, self.tensor_mesh, [Replicate()], run_check=False)
        return x + self.mix(x) + self.down(F.gelu(self.up(self.norm(along))))


def split_sequence(model: Network, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        block.tensor_mesh = mesh
        plan = {
            "norm": SequenceParallel(),
            "mix": ColwiseParallel(output_layouts=Replicate()),
            "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
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


SPLITS: dict[str, tuple[Callable[[], Network], Callable[[Network, DeviceMesh], None]]] = {
    "sequence": (lambda: build(block=SequenceBlock), split_sequence),
    "copies": (build, copy_matrix),
}


def run_split(_rank: int, world: int, kind: str, fsdp: bool) -> tuple[dict[str, Tensor], int, list[str]]:
    make, split = SPLITS[kind]
    model = make()
    whole = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    mesh = whole["dp"]
    split(model, whole["tp"])
    dmuon.dedicate_params(model, mesh, costs="flops")
    if fsdp:
        for block in model.blocks:
            dmuon.fully_shard(block, mesh=mesh)
        dmuon.fully_shard(model, mesh=mesh)
    optimizer = dmuon.Muon(model, **OPTIONS)
    train(Laid(model, mesh, mesh.get_local_rank(), mesh.size(), model), optimizer)
    muon = [n for n, p in model.named_parameters() if p in dmuon.owned_parameters(model)]
    return full_state(model), optimizer.last_step.ns_matrices, muon


@pytest.mark.pitfall("P04", "P37")
@pytest.mark.parametrize(("world", "fsdp"), [(2, False), (4, False), (4, True)], ids=["tp", "dp-tp", "fsdp-tp"])
@pytest.mark.parametrize("kind", SPLITS)
def test_sequence_parallel_norms_and_copied_matrices(ranks: RankPool, kind: str, world: int, fsdp: bool) -> None:
    results = ranks(world, run_split, kind, fsdp)
    for weights, _, muon in results:
        assert len(muon) == 9 and all(map(is_matrix, muon)), "norms stay on AdamW"
        assert_equal_weights(weights, reference_weights(3))
    assert_same_bits([weights for weights, *_ in results])
    assert sum(calls for _, calls, _ in results) == 9


# -- other meshes -------------------------------------------------------------------------------------------------


def run_parts_of_the_world(rank: int, _world: int, alone: bool) -> list[dict[str, Tensor]]:
    """Pairs of ranks train different models; with ``alone`` only the last pair uses dmuon."""
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "shard"))
    mesh = pairs["shard"]
    which = rank // 2
    if alone and which == 0:
        return []
    model = build(seed=which)
    dmuon.dedicate_params(model, mesh, costs="flops")
    for block in model.blocks:
        dmuon.fully_shard(block, mesh=mesh)
    dmuon.fully_shard(model, mesh=mesh)
    train(Laid(model, mesh, rank % 2, 2, model), dmuon.Muon(model, **OPTIONS))
    return [full_state(model)]


@pytest.mark.parametrize("alone", [False, True], ids=["all", "one"])
def test_parts_of_the_world_are_independent(ranks: RankPool, alone: bool) -> None:
    results = ranks(4, run_parts_of_the_world, alone)
    assert [len(r) for r in results] == ([0, 0, 1, 1] if alone else [1] * 4)
    for rank, found in enumerate(results):
        for weights in found:
            assert_equal_weights(weights, reference_weights(3, seed=rank // 2))


def run_again(rank: int, world: int) -> list[dict[str, Tensor]]:
    """A model, then all process groups destroyed, then another model; the first one stays alive."""
    store = dist.distributed_c10d._get_default_store()
    alive, found = [], []
    for name in ("hsdp", "tp-fsdp", "hsdp", "ddp-4"):
        laid, optimizer = laid_out(name, build(), {})
        train(laid, optimizer)
        found.append(full_state(laid.model))
        alive.append((laid, optimizer))
        dist.destroy_process_group()
        again = dist.PrefixStore(f"again{len(found)}", store)
        dist.init_process_group("gloo", store=again, rank=rank, world_size=world)
    return found


@pytest.mark.pitfall("P24")
def test_new_meshes_after_the_process_groups_were_destroyed(ranks: RankPool) -> None:
    for found in ranks(4, run_again, fresh=True):
        for weights in found:
            assert_equal_weights(weights, reference_weights(3))
