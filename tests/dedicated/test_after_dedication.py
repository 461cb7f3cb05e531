"""A dedicated model in a user's hands: wrappers, moves and edits are exact, or raise with the name and a remedy."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from harness.assertions import about, assert_equal_weights, assert_same_tensors
from harness.dedicated_toy import dedicate, dedicated, default_mesh
from harness.network import Network, full_state, loss_of, shard, shard_blocks
from harness.on_ranks import on_ranks
from harness.oracle import reference_weights
from harness.toy import OPTIONS, WIDTH, batch, build, train, trained
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

import dmuon

OPERATIONS: dict[str, Callable[[Network, Any, DeviceMesh], Any]] = {
    "full_tensor": lambda m, w, mesh: w.full_tensor(),
    "redistribute": lambda m, w, mesh: w.redistribute(mesh, [Replicate()]),
    "to_local": lambda m, w, mesh: w.to_local().clone(),
    "largest of each row": lambda m, w, mesh: w.max(dim=1),
    "row norms": lambda m, w, mesh: w.norm(dim=1),
    "matmul": lambda m, w, mesh: torch.ones(2, WIDTH) @ w,
    "linear": lambda m, w, mesh: m.blocks[0].mix(torch.ones(2, WIDTH)),
    "view": lambda m, w, mesh: w.view(-1),
    "equal": lambda m, w, mesh: torch.equal(w, w),
    "mix owners": lambda m, w, mesh: w.data.add_(torch.ones(WIDTH, WIDTH)),
    "copy_": lambda m, w, mesh: w.data.copy_(torch.ones(WIDTH, WIDTH)),
    "data =": lambda m, w, mesh: setattr(w, "data", torch.ones(WIDTH, WIDTH)),
    "out=": lambda m, w, mesh: torch.mul(w.data, 2.0, out=w.data),
    "random init": lambda m, w, mesh: nn.init.normal_(w),
    "share_memory": lambda m, w, mesh: w.share_memory_(),
    "weight_norm": lambda m, w, mesh: nn.utils.parametrizations.weight_norm(m.blocks[0].mix),
    "deepcopy": lambda m, w, mesh: copy.deepcopy(w),
    "deepcopy model": lambda m, w, mesh: copy.deepcopy(m),
    "pickle": lambda m, w, mesh: pickle.dumps(w),
    "torch.save(model)": lambda m, w, mesh: torch.save(m, io.BytesIO()),
    "bfloat16": lambda m, w, mesh: m.blocks[0].mix.to(torch.bfloat16),
    "meta": lambda m, w, mesh: m.blocks[0].mix.to("meta"),
    "to_empty": lambda m, w, mesh: m.blocks[0].mix.to_empty(device="cpu"),
}
REMEDIES = {
    **dict.fromkeys(("deepcopy", "deepcopy model"), "cannot be copied: copy the model before dedicate_params"),
    **dict.fromkeys(("pickle", "torch.save(model)"), r"cannot be pickled: save model\.state_dict\(\)"),
    **dict.fromkeys(("bfloat16", "meta", "to_empty"), "move the model before dedicate.*mp_policy"),
}


@pytest.mark.pitfall("P54")
@on_ranks(2)
def test_what_would_lie_or_hang_raises_on_the_rank_that_does_it(rank: int, world: int) -> None:
    """One rank does it alone, so that what communicated would hang."""
    model, mesh = dedicated(), default_mesh()
    before = full_state(model)
    for name, use in OPERATIONS.items() if rank == 1 else ():
        remedy = REMEDIES.get(name, r"dmuon\.summon_full_params\(model\)")
        with about(name), pytest.raises(RuntimeError, match=remedy) as told:
            use(model, model.blocks[0].mix.weight, mesh)
        assert "'blocks.0.mix.weight'" in str(told.value), name
    assert_same_tensors(full_state(model), before)


@pytest.mark.pitfall("P54")
@on_ranks(2)
def test_torch_fully_shard_works_with_ignored_params(rank: int, world: int) -> None:
    model = dedicated()
    shard_blocks(model, default_mesh(), ignored_params=dmuon.owned_parameters(model))
    assert_equal_weights(trained(model, rank, world), reference_weights(2))


@on_ranks(2)
def test_parameters_from_before_are_refused_where_they_would_be_trained(rank: int, world: int) -> None:
    model = build()
    kept, groups = [*model.parameters()], dmuon.param_groups(model)
    dedicate(model)
    uses: tuple[Callable[[], Any], ...] = (
        lambda: dmuon.Muon(kept),
        lambda: dmuon.Muon(groups),
        lambda: dmuon.clip_grad_norm_(kept, 1.0),
    )
    for use in uses:
        with pytest.raises(ValueError, match=r"'blocks\.0\.mix\.weight', but what the model had in its place before"):
            use()
    with pytest.raises(RuntimeError, match=r"'blocks\.0\.mix\.weight' before dedicate_params got a gradient"):
        kept[3].sum().backward()


@on_ranks(2)
def test_gradients_are_scaled_by_their_data_in_place(rank: int, world: int) -> None:
    model, alone = dedicated(), build()
    for one, data in ((model, shard(batch(0), rank, world)), (alone, batch(0))):
        loss_of(one, *data).backward()
        for param in one.parameters():
            assert param.grad is not None
            param.grad.data *= 3
    for param, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(param.grad.norm(), expected.grad.norm())
    first, second = (block.mix.weight for block in model.blocks[:2])
    with pytest.raises(RuntimeError, match=r"the data of 'blocks\.0\.mix\.weight\.grad', .* cannot be replaced"):
        first.grad.data = second.grad.data


@on_ranks(2)
def test_layers_that_come_later_are_routed_as_in_one_process(rank: int, world: int) -> None:
    """A layer by a name that dedication did not know: its matrices are Muon's all the same."""
    found = []
    for model in (dedicated(), build()):
        data = (rank, world) if dmuon.owned_parameters(model) else (0, 1)
        train(model, dmuon.Muon(model, **OPTIONS), range(1), *data)
        model.blocks.append(build(seed=3).blocks[0])
        train(model, dmuon.Muon(model, **OPTIONS), range(1, 4), *data)
        found.append(full_state(model))
    assert_equal_weights(*found)


ODD_BUFFERS: dict[str, Tensor] = {
    "bool": torch.tensor([True, False]),
    "int64 scalar": torch.tensor(7),
    "float8": torch.ones(2).to(torch.float8_e4m3fn),
    "strided": torch.arange(12.0).view(3, 4).T,
}


@pytest.mark.pitfall("P60")
@on_ranks(2)
def test_integer_parameters_and_buffers_of_any_dtype_become_rank_0s(rank: int, world: int) -> None:
    model = build()
    model.table = nn.Parameter(torch.full((2, 2), rank), requires_grad=False)
    model.blocks[0].codes = nn.Parameter(torch.full((2, 2), rank), requires_grad=False)
    for name, value in ODD_BUFFERS.items():
        model.register_buffer(name, value if rank == 0 else torch.zeros_like(value))
    dedicate(model)
    assert torch.equal(model.table, torch.zeros(2, 2, dtype=torch.int64)), "rank 0's"
    assert torch.equal(model.blocks[0].codes, torch.zeros(2, 2, dtype=torch.int64))
    for name, value in ODD_BUFFERS.items():
        assert torch.equal(getattr(model, name).to(torch.complex64), value.to(torch.complex64)), name
    trained(model, rank, world)
