"""What the runtime holds, when it fetches and frees it, and which misuse it names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness.assertions import assert_equal_weights
from harness.dedicated_toy import dedicated
from harness.dtensors import local_tensor
from harness.network import full_state, loss_of, shard
from harness.on_ranks import on_ranks
from harness.topologies import lay, runtime_of
from harness.toy import OPTIONS, WIDTH, batch, build, train
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call

import dmuon
from dmuon.dedicated.dedication import dedications

# -- freshness ----------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_elementwise_optimizers_work_on_owned_parameters(rank: int, world: int) -> None:
    """An ordinary elementwise optimizer over owned parameters is exact as well, and its edits are seen."""
    model, twin = lay("1d", build(), keep=True).model, build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    other = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, range(3), rank, world)
    train(twin, other, range(3))
    assert_equal_weights(full_state(model), full_state(twin))


# -- placement and memory -----------------------------------------------------------------------------------------


@pytest.mark.pitfall("P14", "P27", "P59")
@pytest.mark.parametrize("keep", [False, True])
@on_ranks(2)
def test_placeholders_are_empty_and_buffers_freed(rank: int, world: int, keep: bool) -> None:
    laid = lay("1d", build(), keep=keep)
    model, optimizer = laid.network, laid.optimizer()
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
    assert len(owners) == 9
    assert max(inside) <= (3 if keep else 2), "the block that computes and the prefetched one"


def _filled(runtime: Any) -> int:
    return sum(_nbytes(g) > 0 for g in runtime.buffers)


def _nbytes(buffer: Any) -> int:
    return sum(storage.nbytes() for storage in buffer.storages)


@pytest.mark.pitfall("P59")
@pytest.mark.parametrize("layout", ["1d-two-lines", "tp"])
@on_ranks("layout")
def test_gradients_keep_no_memory_of_what_others_own(rank: int, world: int, layout: str) -> None:
    laid = lay(layout, build())
    laid.loss(0).backward()
    grads = [local_tensor(p.grad) for p in dmuon.owned_parameters(laid.model)]
    kept = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in grads if g.numel()}
    assert sum(kept.values()) <= sum(-(-g.nbytes // 256) * 256 for g in grads)


# -- misuse -------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_misuse_is_named(rank: int, world: int) -> None:
    model = dedicated()
    optimizer = dmuon.Muon(model, **OPTIONS)
    loss_of(model, *batch(0)).backward()
    with dmuon.summon_full_params(model):
        with pytest.raises(RuntimeError, match=r"step\(\) while block 'blocks\.0' is SUMMONED"):
            optimizer.step()
        with pytest.raises(RuntimeError, match=r"block 'blocks\.0' while .* summon_full_params"):
            model(batch(0)[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dmuon.dedicated.runtime.is_capturing", lambda device: True)
        with pytest.raises(RuntimeError, match=r"block 'blocks\.0' was called while a CUDA graph is being captured"):
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
    optimizer.zero_grad()
    model(batch(0)[0]).sum().backward(inputs=list(model.parameters()))
    told = r"no parameter that dmuon owns has a gradient: backward\(inputs=…\) and autograd\.grad"
    with pytest.raises(RuntimeError, match=told):
        optimizer.step()
    optimizer.zero_grad()
    params = list(model.parameters())
    grads = torch.autograd.grad(model(batch(0)[0]).sum(), params, allow_unused=True)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    with pytest.raises(RuntimeError, match=told):
        optimizer.step()
    computed = {"blocks.0.up.weight": model.get_parameter("blocks.0.up.weight") * 2}
    with pytest.raises(RuntimeError, match=r"'blocks\.0\.up\.weight' was replaced in its module after dedicate_params"):
        functional_call(model, computed, (batch(0)[0],))
    model.blocks[1].mix.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    with pytest.raises(RuntimeError, match=r"'blocks\.1\.mix\.weight' was replaced in its module"):
        model(batch(0)[0])


# -- without a process group -------------------------------------------------------------------------------------------


@pytest.mark.pitfall("P56")
def test_without_a_process_group_each_function_says_what_to_do() -> None:
    assert not dist.is_initialized()
    model = build()
    with pytest.raises(TypeError, match=r"mesh must be a torch\.distributed DeviceMesh"):
        dmuon.dedicate_params(model, None)  # type: ignore[arg-type]
    mesh = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    with pytest.raises(ValueError, match=r"not initialized.*init_process_group.*dmuon\.Muon\(model\) alone is enough"):
        dmuon.dedicate_params(model, mesh)
    for use in (
        lambda: dmuon.set_requires_gradient_sync(model, False),
        lambda: dmuon.summon_full_params(model).__enter__(),
        lambda: dmuon.no_sync(model).__enter__(),
    ):
        with pytest.raises(ValueError, match=r"not dedicated: call dmuon\.dedicate_params"):
            use()
    assert dmuon.owned_parameters(model) == set()
