"""Gradients that no output shows wait as others do, or somebody is told; that they train stands in tests/parity/."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from harness.dtensors import local_tensor
from harness.heard import heard
from harness.on_ranks import on_ranks
from harness.topologies import lay
from harness.toy import OPTIONS, batch, build
from programs.left_behind import auxiliary_loss, model_of
from torch.distributed.device_mesh import init_device_mesh

import dmuon
from dmuon.dedicated.dedication import dedications

pytestmark = pytest.mark.pitfall("P66")


@on_ranks(2)
def test_unseen_gradients_accumulate_and_wait_as_others_do(rank: int, world: int) -> None:
    """Without synchronization first, then with it: the mean of both micro-batches, of all ranks."""
    twin = model_of("tuple")
    for step in range(2):
        auxiliary_loss(twin, step).backward()
    expected = {n: p.grad for n, p in twin.named_parameters() if n.endswith("gate.weight")}
    model = model_of("board")
    lay("ddp-2", model)
    with dmuon.no_sync(model):
        auxiliary_loss(model, 0, rank, world).backward()
    auxiliary_loss(model, 1, rank, world).backward()
    for matrix in dedications(model)[0].runtime.matrices():
        if matrix.fqn in expected and matrix.rest.owner == rank:
            found = local_tensor(matrix.rest.grad)
            torch.testing.assert_close(found, expected[matrix.fqn], rtol=1e-5, atol=1e-7)


@on_ranks(1)
def test_a_graph_of_older_weights_is_refused_though_no_output_shows_it(rank: int, world: int) -> None:
    model = model_of("board")
    laid = lay("1d-1-two-lines", model)
    optimizer = laid.optimizer()
    auxiliary_loss(model, 0).backward(retain_graph=True)
    total = model.total
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"the weights of block 'blocks\.\d' changed between its forward and its b"):
        total.backward()


@on_ranks(2)
def test_a_forward_that_raises_leaves_no_weights_behind(rank: int, world: int) -> None:
    """Nothing comes out of it either, but no backward will enter it."""
    model = model_of("attribute")
    lay("1d-two-lines", model)
    block = dedications(model)[0].runtime.blocks[0]
    handle = model.blocks[0].down.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        auxiliary_loss(model, 0, rank, world)
    handle.remove()
    assert sum(storage.nbytes() for storage in block.buffer.storages) == 0


# -- groups that leave something out ------------------------------------------------------------------------------


def warnings_of(groups: Callable[[nn.Module], Any]) -> list[str]:
    model = build()
    dmuon.dedicate_params(model, init_device_mesh("cpu", (1,)), costs="flops")
    optimizer = dmuon.Muon(groups(model), **OPTIONS)
    with heard() as messages:
        for step in range(2):
            F.cross_entropy(model(batch(step)[0]).flatten(0, 1), batch(step)[1].flatten()).backward()
            optimizer.step()
    return [m for m in messages if "no group" in m]


@on_ranks(1)
def test_groups_that_leave_parameters_out_say_so_once(rank: int, world: int) -> None:
    assert warnings_of(lambda model: model) == []
    assert warnings_of(dmuon.param_groups) == []
    (told,) = warnings_of(lambda model: [p for p in dmuon.owned_parameters(model) if p.fqn != "blocks.0.mix.weight"])
    assert "'blocks.0.mix.weight'" in told and "'embed.weight'" in told
    (told,) = warnings_of(lambda model: dmuon.param_groups(model)[:1])
    assert "blocks" not in told and "'embed.weight'" in told and "'head.weight'" in told
