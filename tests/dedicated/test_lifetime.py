"""What a deleted model or optimizer gives back, and when."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
from harness.dedicated_toy import dedicate, dedicated, default_mesh
from harness.inside import group_names
from harness.network import loss_of, shard
from harness.on_ranks import on_ranks
from harness.toy import LR, batch, build, train
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import dmuon
import dmuon.dedicated.dedicate

pytestmark = pytest.mark.pitfall("P69")


@contextmanager
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def watched(model: nn.Module, optimizer: dmuon.Muon) -> list[weakref.ref[Any]]:
    """What has to go: modules, parameters, gradients, state. Weak references of tensors forbid ``Module.to`` only."""
    tensors = [t for p in model.parameters() for t in (p, p.grad, *optimizer.state[p].values())]
    found = [*model.modules(), optimizer, *(t for t in tensors if isinstance(t, Tensor))]
    return [weakref.ref(item) for item in found]


@pytest.mark.parametrize("world", [2, 4])
@on_ranks()
def test_deleted_models_and_optimizers_are_freed_at_once(rank: int, world: int) -> None:
    mesh = default_mesh()
    if world == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    dedicated(mesh=mesh)
    made = group_names()
    for order, options in (("model first", {}), ("optimizer first", {"overlap_backward": True})):
        with no_collections():
            model: Any = dedicated(mesh=mesh, reshard_after_forward=order == "model first")
            optimizer: Any = dmuon.Muon(model, lr=LR, **options)
            train(model, optimizer, range(2), rank, world)
            with torch.no_grad():
                model(shard(batch(2), rank, world)[0])
            references = watched(model, optimizer)
            assert len(references) > 50
            if order == "model first":
                del model, optimizer
            else:
                del optimizer, model
            assert [reference() for reference in references if reference() is not None] == []
            assert group_names() == made, "the second model and what follows use the groups of the first"


@on_ranks(2)
def test_groups_serve_the_next_model_though_collectives_of_the_last_are_under_way(rank: int, world: int) -> None:
    """A graph that is alive, fills and publications that nobody waits for, and a backward that raised."""
    with no_collections():
        for case in range(3):
            model: Any = dedicated(comm=dmuon.CommOptions(prefetch=3))
            optimizer: Any = dmuon.Muon(model, lr=LR)
            train(model, optimizer, range(1), rank, world)
            if case == 1:
                loss = loss_of(model, *shard(batch(2), rank, world))
                del loss
            if case == 2:
                handle = model.blocks[0].register_full_backward_hook(fail)
                with pytest.raises(RuntimeError, match="mine"):
                    loss_of(model, *shard(batch(2), rank, world)).backward()
                del handle
                optimizer.zero_grad()
            del model, optimizer
            if case == 2:
                gc.collect()  # the traceback is a cycle of pytest's


def fail(*_: Any) -> None:
    raise RuntimeError("mine")


@on_ranks(2)
def test_a_dedication_that_failed_leaves_a_plain_model(rank: int, world: int) -> None:
    model = build()
    params = list(model.parameters())
    original = dmuon.dedicated.dedicate.OwnedBuffer
    made: list[Any] = []

    def limited(*args: Any, **options: Any) -> Any:
        if made:
            raise torch.OutOfMemoryError("no memory for the second buffer")
        made.append(original(*args, **options))
        return made[-1]

    with mock.patch.object(dmuon.dedicated.dedicate, "OwnedBuffer", limited), pytest.raises(torch.OutOfMemoryError):
        dedicate(model)
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    model(shard(batch(0), rank, world)[0]).sum().backward()  # a plain model again


@on_ranks(2)
def test_ranks_that_run_models_in_other_orders_are_told(rank: int, world: int) -> None:
    """One model's weights would be taken for the other's, as they share process groups."""
    models: list[Any] = [dedicated() for _ in range(2)]
    with torch.no_grad(), pytest.raises(dmuon.CollectiveError, match=r"of model 1.* on rank 1 where rank 0 has"):
        for model in models[:: -1 if rank else 1]:
            model(shard(batch(0), rank, world)[0])


@on_ranks(2)
def test_exchanges_of_deleted_optimizers_leave_one_group(rank: int, world: int) -> None:
    before = group_names()
    with no_collections():
        for _ in range(3):
            model: Any = nn.parallel.DistributedDataParallel(build())
            optimizer: Any = dmuon.Muon(model, lr=LR)
            train(model, optimizer, range(2), rank, world)
            references = watched(model, optimizer)
            del model, optimizer
            assert [reference() for reference in references if reference() is not None] == []
            assert len(group_names()) == len(before) + 1
