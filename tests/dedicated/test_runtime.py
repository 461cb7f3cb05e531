"""What the runtime holds, when it fetches and frees it, and which misuse it names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from harness.assertions import assert_equal_weights
from harness.dtensors import local_tensor
from harness.network import full_state, loss_of, shard
from harness.on_ranks import on_ranks
from harness.pool import RankPool
from harness.topologies import LAYOUTS, lay, runtime_of
from harness.toy import OPTIONS, WIDTH, batch, build
from torch.distributed.device_mesh import init_device_mesh

import dmuon
from dmuon.dedicated.dedication import dedications


def dedicate(model: nn.Module, world: int, fsdp: bool = True, keep: bool = False, **options: Any) -> dmuon.Muon:
    mesh = init_device_mesh("cpu", (world,))
    dmuon.dedicate_params(model, mesh, costs="flops", reshard_after_forward=not keep)
    if fsdp:
        for block in model.blocks:
            dmuon.fully_shard(block, mesh=mesh)
        dmuon.fully_shard(model, mesh=mesh)
    return dmuon.Muon(model, **{**OPTIONS, **options})


# -- freshness ----------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_elementwise_optimizers_work_on_owned_parameters(rank: int, world: int) -> None:
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
            held = local_tensor(param).untyped_storage().nbytes()
            assert held == (param.numel() * 4 if owners[param.fqn] == rank else 0), param.fqn
        assert _filled(runtime) == filled, [_nbytes(g) for g in runtime.buffers]

    kept = len(runtime.buffers) if keep else 0
    check(0)
    for _ in range(2):
        out = loss_of(model, tokens, targets)
        check(kept)
        out.backward()
        check(kept)
        for entry in runtime.matrices():
            assert entry.full.grad is None
            grad = entry.rest.grad
            assert local_tensor(grad).shape == (entry.shape if entry.rest.owner == rank else (0, entry.shape[1]))
        optimizer.step()
        check(len(runtime.buffers) if keep else 1)  # published: prefetch depth 1
        with torch.no_grad():
            model(tokens)
        check(kept)
    return {"most blocks at once": max(inside), "owned": sum(o == rank for o in owners.values())}


def _filled(runtime: Any) -> int:
    return sum(_nbytes(g) > 0 for g in runtime.buffers)


def _nbytes(buffer: Any) -> int:
    return sum(storage.nbytes() for storage in buffer.storages)


@pytest.mark.pitfall("P14", "P27", "P59")
@pytest.mark.parametrize("keep", [False, True])
def test_placeholders_are_empty_and_buffers_freed(ranks: RankPool, keep: bool) -> None:
    results = ranks(4, run_placement, keep)
    assert sum(r["owned"] for r in results) == 9
    for result in results:
        assert result["most blocks at once"] <= (3 if keep else 2), "the block that computes and the prefetched one"


def gradient_storage(_rank: int, _world: int, name: str) -> tuple[int, int]:
    laid = lay(name, build())
    laid.loss(0).backward()
    grads = [local_tensor(p.grad) for p in dmuon.owned_parameters(laid.model)]
    kept = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in grads if g.numel()}
    return sum(kept.values()), sum(-(-g.nbytes // 256) * 256 for g in grads)


@pytest.mark.pitfall("P59")
@pytest.mark.parametrize("name", ["1d-two-lines", "hsdp", "ddp-4", "tp"])
def test_gradients_keep_no_memory_of_what_others_own(ranks: RankPool, name: str) -> None:
    for kept, owned in ranks(LAYOUTS[name].world, gradient_storage, name):
        assert kept <= owned, f"{kept} bytes of storage for {owned} bytes of gradients"


# -- misuse -------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_misuse_is_named(rank: int, world: int) -> None:
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
