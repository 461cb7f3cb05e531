"""A dedicated model in a user's hands: wrappers, moves and edits are exact, or raise with the name and a remedy."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from harness.assertions import assert_equal_weights
from harness.dedicated_toy import dedicate, dedicated, default_mesh
from harness.heard import heard
from harness.network import Network, full_state, loss_of, shard
from harness.on_ranks import on_ranks
from harness.oracle import reference_weights
from harness.pool import RankPool
from harness.toy import OPTIONS, WIDTH, batch, build
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Replicate
from torch.optim.optimizer import register_optimizer_step_pre_hook

import dmuon


def operations(rank: int, world: int) -> dict[str, str]:
    """What each use of a resting weight raises; every rank does them alone, so one that communicated would hang."""
    model = dedicated()
    weight = model.blocks[0].mix.weight
    mesh = default_mesh()
    before = full_state(model)
    found = {}
    if rank == 1:
        for name, use in OPERATIONS.items():
            try:
                use(model, weight, mesh)
                found[name] = "nothing"
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
    after = full_state(model)
    assert all(torch.equal(after[n], t) for n, t in before.items()), "a refused operation changed a weight"
    return found


OPERATIONS: dict[str, Callable[[Network, Any, DeviceMesh], Any]] = {
    "full_tensor": lambda m, w, mesh: w.full_tensor(),
    "redistribute": lambda m, w, mesh: w.redistribute(mesh, [Replicate()]),
    "to_local": lambda m, w, mesh: w.to_local().clone(),
    "largest of each row": lambda m, w, mesh: w.max(dim=1),
    "sum of rows": lambda m, w, mesh: w.sum(0),
    "mean of rows": lambda m, w, mesh: w.detach().mean(0),
    "deviation": lambda m, w, mesh: w.std(),
    "row norms": lambda m, w, mesh: w.norm(dim=1),
    "matmul": lambda m, w, mesh: torch.ones(2, WIDTH) @ w,
    "linear": lambda m, w, mesh: m.blocks[0].mix(torch.ones(2, WIDTH)),
    "transpose": lambda m, w, mesh: w.T,
    "index": lambda m, w, mesh: w[0],
    "view": lambda m, w, mesh: w.view(-1),
    "equal": lambda m, w, mesh: torch.equal(w, w),
    "mix owners": lambda m, w, mesh: w.data.add_(torch.ones(WIDTH, WIDTH)),
    "copy_": lambda m, w, mesh: w.data.copy_(torch.ones(WIDTH, WIDTH)),
    "data =": lambda m, w, mesh: setattr(w, "data", torch.ones(WIDTH, WIDTH)),
    "random init": lambda m, w, mesh: nn.init.normal_(w),
    "reset_parameters": lambda m, w, mesh: m.blocks[0].mix.reset_parameters(),
    "share_memory": lambda m, w, mesh: w.share_memory_(),
    "weight_norm": lambda m, w, mesh: nn.utils.parametrizations.weight_norm(m.blocks[0].mix),
    "deepcopy": lambda m, w, mesh: copy.deepcopy(w),
    "deepcopy model": lambda m, w, mesh: copy.deepcopy(m),
    "pickle": lambda m, w, mesh: pickle.dumps(w),
    "torch.save(model)": lambda m, w, mesh: torch.save(m, io.BytesIO()),
    "bfloat16": lambda m, w, mesh: m.blocks[0].mix.to(torch.bfloat16),
    "half": lambda m, w, mesh: m.blocks[0].mix.half(),
    "double": lambda m, w, mesh: m.blocks[0].mix.double(),
    "meta": lambda m, w, mesh: m.blocks[0].mix.to("meta"),
    "to_empty": lambda m, w, mesh: m.blocks[0].mix.to_empty(device="cpu"),
}
REMEDIES = {
    "deepcopy": "RuntimeError.*cannot be copied: copy the model before dedicate_params",
    "deepcopy model": "RuntimeError.*cannot be copied: copy the model before dedicate_params",
    "pickle": r"RuntimeError.*cannot be pickled: save model\.state_dict\(\)",
    "torch.save(model)": r"RuntimeError.*cannot be pickled: save model\.state_dict\(\)",
    **dict.fromkeys(
        ("bfloat16", "half", "double", "meta", "to_empty"), "RuntimeError.*move the model before dedicate.*mp_policy"
    ),
}  # fmt: skip


@pytest.mark.pitfall("P54")
def test_what_would_lie_or_hang_raises_on_the_rank_that_does_it(ranks: RankPool) -> None:
    found = ranks(2, operations)[1]
    assert found.keys() == OPERATIONS.keys()
    for name, message in found.items():
        remedy = REMEDIES.get(name, r"RuntimeError.*dmuon\.summon_full_params\(model\)")
        assert re.search(remedy, message) and "'blocks.0.mix.weight'" in message, f"{name}: {message}"


@pytest.mark.pitfall("P54")
@on_ranks(2)
def test_torch_fully_shard_works_with_ignored_params(rank: int, world: int) -> None:
    model = dedicated()
    mesh = default_mesh()
    for block in model.blocks:
        torch_fully_shard(block, mesh=mesh, ignored_params=dmuon.owned_parameters(model))
    torch_fully_shard(model, mesh=mesh, ignored_params=dmuon.owned_parameters(model))
    assert_equal_weights(trained(model, rank, world), reference_weights(2))


def trained(
    model: nn.Module,
    rank: int,
    world: int,
    before_step: Callable[[], Any] = lambda: None,
    wrapper: nn.Module | None = None,
) -> dict[str, Tensor]:
    optimizer = dmuon.Muon(model, **OPTIONS)
    for step in range(2):
        before_step()
        optimizer.zero_grad()
        loss_of(wrapper or model, *shard(batch(step), rank, world)).backward()
        optimizer.step()
    return full_state(model)


def moves_that_change_nothing(rank: int, world: int) -> list[dict[str, Tensor]]:
    found = []
    for move in (lambda m: m.to("cpu"), lambda m: m.float(), lambda m: m.to(torch.float32).cpu()):
        model = dedicated()
        move(model)
        found.append(trained(model, rank, world))
        model = dedicated()
        found.append(trained(model, rank, world, before_step=lambda m=model, f=move: f(m)))
    return found


@pytest.mark.pitfall("P55")
def test_moves_that_change_nothing_keep_training_exact(ranks: RankPool) -> None:
    expected = reference_weights(2)
    for found in ranks(2, moves_that_change_nothing):
        for weights in found:
            assert_equal_weights(weights, expected)


def edits(rank: int, world: int, keep: bool) -> list[Tensor]:
    """Logits of forwards, each after an edit of a resting weight in place."""
    model = dedicated(reshard_after_forward=not keep)
    tokens = batch(0)[0]
    outputs = [model(tokens)]
    with torch.no_grad():
        for edit in (
            lambda w: w.data.mul_(2),
            lambda w: w.mul_(0.5),
            lambda w: nn.init.zeros_(w),
            lambda w: w.data.detach().add_(1.0),
            lambda w: torch._foreach_mul_([w], 3.0),
            lambda w: w.fill_(0.25),
        ):
            edit(model.blocks[0].mix.weight)
            outputs.append(model(tokens))
    return [o.detach() for o in outputs]


def edits_in_one_process() -> list[Tensor]:
    model = build()
    tokens = batch(0)[0]
    start = model.blocks[0].mix.weight.detach().clone()
    outputs = []
    with torch.no_grad():
        for value in (start, 2 * start, start, 0 * start, 0 * start + 1, 0 * start + 3, 0 * start + 0.25):
            model.blocks[0].mix.weight.copy_(value)
            outputs.append(model(tokens))
    return outputs


@pytest.mark.pitfall("P17", "P28")
@pytest.mark.parametrize("keep", [False, True], ids=["reshard", "keep"])
def test_edits_in_place_reach_the_next_forward(ranks: RankPool, keep: bool) -> None:
    expected = edits_in_one_process()
    for found in ranks(2, edits, keep):
        for number, (output, wanted) in enumerate(zip(found, expected, strict=True)):
            torch.testing.assert_close(output, wanted, msg=lambda m, n=number: f"after edit {n}: {m}")


ODD_BUFFERS: dict[str, Tensor] = {
    "bool": torch.tensor([True, False]),
    "int16": torch.ones(3, dtype=torch.int16),
    "int64 scalar": torch.tensor(7),
    "float8": torch.ones(2).to(torch.float8_e4m3fn),
    "complex": torch.ones(2, dtype=torch.complex64),
    "empty": torch.zeros(0, 3),
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


def foreign_steps(rank: int, world: int) -> list[str]:
    """What the log says of the first optimizer that steps a dedicated model; Muon's, and then of AdamW's."""
    steps: list[object] = []
    register_optimizer_step_pre_hook(lambda *_: steps.append(0))  # another's, which must be called too
    with heard() as told:
        for build_optimizer in (lambda m: dmuon.Muon(m, **OPTIONS), lambda m: torch.optim.AdamW(m.parameters())):
            model = dedicated()
            apart = nn.Linear(2, 2)
            alone, optimizer = torch.optim.SGD(apart.parameters()), build_optimizer(model)
            for step in range(2):
                alone.step()
                loss_of(model, *batch(step)).backward()
                optimizer.step()
    assert len(steps) == 8
    return told


def test_another_optimizer_on_dedicated_matrices_is_told_once(ranks: RankPool) -> None:
    first, second = ranks(2, foreign_steps)
    (told,) = [line for line in first if "dedicated for Muon" in line]
    assert "AdamW trains matrices that were dedicated for Muon" in told and not second
