"""The step under unusual use: every case equals the same program in a single process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness.assertions import assert_equal_weights, assert_same_bits
from harness.oracle import Reference
from harness.pool import RankPool
from harness.topologies import runtime_of
from harness.toy import OPTIONS, WIDTH, batch, build
from programs.unusual import (
    KINDS,
    SEQUENCES,
    Optional,
    Sequence,
    Variant,
    exceptions,
    forwards_that_never_run_backward,
    plain_names,
    reference_variant,
    unfrozen_later,
)
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import dmuon
from dmuon.check.model import loss_of, shard
from dmuon.check.topologies import full_state
from dmuon.check.traffic import Traffic
from dmuon.dedicated.dedication import dedications

MODES = pytest.mark.parametrize(("fsdp", "keep"), [(True, False), (True, True), (False, False), (False, True)])


def dedicate(model: nn.Module, world: int, fsdp: bool = True, keep: bool = False, **options: Any) -> dmuon.Muon:
    mesh = init_device_mesh("cpu", (world,))
    dmuon.dedicate_params(model, mesh, costs="flops", reshard_after_forward=not keep)
    if fsdp:
        for block in model.blocks:
            dmuon.fully_shard(block, mesh=mesh)
        dmuon.fully_shard(model, mesh=mesh)
    return dmuon.Muon(model, **{**OPTIONS, **options})


# -- programs: each is run by a single process and by every rank --------------------------------------------------


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


def check_variants(ranks: RankPool, world: int, kinds: list[str], fsdp: bool, keep: bool) -> None:
    results = ranks(world, run_variants, kinds, fsdp, keep)
    for kind in kinds:
        assert_same_bits([r[kind] for r in results])
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
    optimizer = Reference(model)
    sequence(model, optimizer, lambda i: loss_of(model, *batch(i)))
    expected = {n: p.detach() for n, p in model.state_dict().items()}
    for index, mode in enumerate(modes):
        assert_same_bits([r[index] for r in results])
        try:
            assert_equal_weights(results[0][index], expected)
        except AssertionError as error:
            raise AssertionError(f"fsdp, keep = {mode}: {error}") from None


# -- ranks that differ --------------------------------------------------------------------------------------------


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
