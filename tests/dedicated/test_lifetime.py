"""What a deleted model or optimizer gives back, and when."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness.limits import PROGRAM_SECONDS
from harness.on_ranks import on_ranks
from harness.toy import LR, batch, build, train
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import dmuon
import dmuon.dedicated.dedicate
from dmuon.check.model import loss_of, shard
from dmuon.comm import agreement, lifetime
from dmuon.platform.torch_private import group_names

PROGRAM = Path(__file__).parents[1] / "programs" / "lifetimes.py"

pytestmark = pytest.mark.pitfall("P69")


@contextmanager
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def mesh_of(world: int) -> DeviceMesh:
    if world == 4:
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (world,))


def dedicated(mesh: DeviceMesh, **options: Any) -> nn.Module:
    model = build()
    dmuon.dedicate_params(model, mesh, costs="flops", **options)
    return model


def watched(model: nn.Module, optimizer: dmuon.Muon) -> list[weakref.ref[Any]]:
    """What has to go: modules, parameters, gradients, state. Weak references of tensors forbid ``Module.to`` only."""
    tensors = [t for p in model.parameters() for t in (p, p.grad, *optimizer.state[p].values())]
    found = [*model.modules(), optimizer, *(t for t in tensors if isinstance(t, Tensor))]
    return [weakref.ref(item) for item in found]


@pytest.mark.parametrize("world", [1, 2, 4])
@on_ranks()
def test_deleted_models_and_optimizers_are_freed_at_once(rank: int, world: int) -> None:
    mesh = mesh_of(world)
    before = group_names()
    for order, options in (("model first", {}), ("optimizer first", {"overlap_backward": True})):
        with no_collections():
            model: Any = dedicated(mesh, reshard_after_forward=order == "model first")
            optimizer: Any = dmuon.Muon(model, lr=LR, **options)
            train(model, optimizer, range(2), rank, world)
            with torch.no_grad():
                model(shard(batch(2), rank, world)[0])
            references = watched(model, optimizer)
            assert len(references) > 50 and group_names() > before
            if order == "model first":
                del model, optimizer
            else:
                del optimizer, model
            assert [reference() for reference in references if reference() is not None] == []
            assert group_names() == before, order


@on_ranks(2)
def test_an_optimizer_goes_on_without_its_model_and_a_model_without_its_optimizer(rank: int, world: int) -> None:
    mesh, before = mesh_of(world), group_names()
    with no_collections():
        model: Any = dedicated(mesh)
        train(model, dmuon.Muon(model, lr=LR), range(2), rank, world)
        optimizer: Any = dmuon.Muon(model, lr=LR)
        train(model, optimizer, range(1), rank, world)
        held = [p.grad for p in model.parameters() if p.grad is not None]
        expected = [p.detach().clone() for p in model.parameters()]
        params = list(model.parameters())
        del model
        assert len(held) == len(params)
        optimizer.step()
        assert any(not torch.equal(a, b.detach()) for a, b in zip(expected, params, strict=True) if b.dim() == 1)
        del optimizer, params, held, expected
        assert group_names() == before


@on_ranks(2)
def test_a_part_of_a_deleted_model_still_runs(rank: int, world: int) -> None:
    mesh = mesh_of(world)
    whole: Any = dedicated(mesh)
    x = torch.randn(3, 13, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = whole.blocks[1](x)
    block: Any = whole.blocks[1]
    del whole
    gc.collect()
    before = group_names()
    with torch.no_grad():
        assert torch.equal(block(x), expected)
    block(x).sum().backward()
    assert all(p.grad is not None for p in block.parameters())
    del block
    assert group_names() < before


@on_ranks(2)
def test_what_is_under_way_arrives_before_groups_are_destroyed(rank: int, world: int) -> None:
    """A graph that is alive, fills and publications that nobody waits for, and a backward that raised."""
    mesh, before = mesh_of(world), group_names()
    with no_collections():
        for case in range(3):
            model: Any = dedicated(mesh, comm=dmuon.CommOptions(prefetch=3))
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
            assert group_names() == before, case
            dist.barrier()


def fail(*_: Any) -> None:
    raise RuntimeError("mine")


@on_ranks(2)
def test_groups_of_a_dedication_that_failed_are_gone_while_the_error_is_held(rank: int, world: int) -> None:
    mesh, before = mesh_of(world), group_names()

    def select(fqn: str, *_: Any) -> bool:
        if rank == 1:
            raise ValueError("no idea")
        return fqn.startswith("blocks.") and fqn.endswith(("up.weight", "down.weight"))

    with pytest.raises(ValueError, match="no idea") as first:
        dedicated(mesh, select=select)
    assert group_names() == before

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
        dmuon.dedicate_params(model, mesh, costs="flops")
    assert group_names() == before and first.value is not None
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    model(shard(batch(0), rank, world)[0]).sum().backward()  # a plain model again


@on_ranks(4)
def test_state_dicts_outlive_their_model(rank: int, world: int) -> None:
    """Whole tensors come over the user's mesh."""
    mesh = mesh_of(world)
    model: Any = dedicated(mesh)
    with dmuon.summon_full_params(model):
        expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    state: Any = model.state_dict()
    del model
    gc.collect()
    for name, value in state.items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert torch.equal(whole, expected[name]), name


@on_ranks(2)
def test_where_ranks_destroy_groups_together_they_agree_on_which(rank: int, world: int) -> None:
    """As on NCCL: not before all ranks of a group have released it, and in one order."""
    mesh, before = mesh_of(world), group_names()
    with (
        mock.patch.object(lifetime, "ends_alone", lambda _: False),
        mock.patch.object(agreement, "ends_alone", lambda _: False),
    ):
        models = [dedicated(mesh) for _ in range(2)]
        first, second = (model._dmuon_dedication.runtime.name for model in models)  # and of a group
        opened = group_names()
        assert {first, second} <= opened
        del models[rank]  # on each rank another one: neither may go
        gc.collect()
        assert group_names() == opened
        third: Any = dedicated(mesh)
        assert {first, second} < opened < group_names()
        models.clear()
        fourth: Any = dedicated(mesh)
        assert len(group_names()) == len(before) + 6 and not {first, second} & group_names()
        del third, fourth
    dmuon.Muon(dedicated(mesh), lr=LR)
    assert group_names() == before


@on_ranks(2)
def test_exchanges_of_deleted_optimizers_are_gone_too(rank: int, world: int) -> None:
    before = group_names()
    with no_collections():
        for _ in range(3):
            model: Any = nn.parallel.DistributedDataParallel(build())
            optimizer: Any = dmuon.Muon(model, lr=LR)
            train(model, optimizer, range(2), rank, world)
            references = watched(model, optimizer)
            assert len(group_names()) == len(before) + 1
            del model, optimizer
            assert [reference() for reference in references if reference() is not None] == []
            assert group_names() == before


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dedicated", "exchanged"])
def test_forty_models_hold_no_more_than_one(kind: str, tmp_path: Path) -> None:
    """Under a limit of 256 descriptors; before, each of them kept 20, or 5."""
    command = ["bash", "-c", 'ulimit -n 256; exec "$@"', "-", sys.executable, "-W", "ignore", str(PROGRAM), "40", kind]
    run = subprocess.run(
        [*command, str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PROGRAM_SECONDS,
    )
    found = re.findall(r"'(\w+)': \((\d+), (\d+)\)", run.stdout)
    assert len(found) == 10, run.stdout + run.stderr
    for name, first, last in found:
        assert int(last) <= (20 if name == "keys" else int(first)), (name, run.stdout)


@on_ranks(2)
def test_parameters_that_outlive_their_model_are_refused(rank: int, world: int) -> None:
    params = list(dedicated(mesh_of(world)).parameters())
    gc.collect()
    with pytest.raises(ValueError, match=r"the model of 'blocks\.0\.mix\.weight', which dmuon owned, was deleted"):
        dmuon.Muon(params, LR)
