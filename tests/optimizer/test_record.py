"""What a step did to each matrix, as its record says, against the weights before and after in fp64."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest
import torch
from harness.fused import FusedModel, by_spec, fused_loss
from harness.hand_laid import SPLITS
from harness.network import full_state
from harness.on_ranks import assert_same_over_ranks, on_ranks, slowly
from harness.topologies import lay
from harness.toy import DECAY, LR, OPTIONS, build, train
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon
from dmuon.kernels import update_scale

SPEC = by_spec()


def oracle(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, dmuon.MatrixStats]:
    """Of the model of all splits: cut by hand, as a whole, in fp64."""
    expected = {}
    for name, new in after.items():
        if "weight" not in name or "blocks" not in name:
            continue
        spec = SPLITS[int(name.rsplit("weight", 1)[1])].spec
        shapes = spec.matrices(new.shape)
        for number, (old_part, new_part) in enumerate(zip(parts(before[name], spec), parts(new, spec), strict=True)):
            label = name if new.ndim == 2 and spec.is_whole else f"{name}[{number}]"
            expected[label] = stats(old_part, new_part, shapes[number], transposed=spec.transposed)
    return expected


def parts(whole: Tensor, spec: dmuon.MatrixSpec) -> list[Tensor]:
    """In the order of their numbers."""
    stack = whole.reshape(spec.matrix_shape(whole.shape))
    rows = [[i for start, stop in runs for i in range(start, stop)] for runs in spec.runs(stack.shape[spec.dim])]
    return [matrix.index_select(spec.dim - 1, torch.tensor(of_part)) for matrix in stack for of_part in rows]


def stats(old: Tensor, new: Tensor, shape: tuple[int, int], transposed: bool = False) -> dmuon.MatrixStats:
    update = new.double() - (1 - LR * DECAY) * old.double()
    m, n = reversed(shape) if transposed else shape
    norm = new.double().norm().item()
    return dmuon.MatrixStats(
        update_rms=update.square().mean().sqrt().item(),
        effective_lr=LR * update_scale("match_rms_adamw", (m, n)),
        weight_norm=norm,
        update_ratio=update.norm().item() / norm,
    )


def assert_alike(found: dict[str, dmuon.MatrixStats], expected: dict[str, dmuon.MatrixStats]) -> None:
    assert found.keys() == expected.keys()
    for name, one in found.items():
        wanted = expected[name]
        for field in ("update_rms", "effective_lr", "weight_norm", "update_ratio"):
            assert getattr(one, field) == pytest.approx(getattr(wanted, field), rel=1e-9), f"{field} of {name}"


def fused_model() -> FusedModel:
    """In fp64; its batches are not."""
    model = FusedModel().double()
    model.register_forward_pre_hook(lambda _module, args: (args[0].double(),))
    return model


def test_one_process_records_each_part() -> None:
    model = fused_model()
    optimizer = dmuon.Muon(model, select=SPEC, **OPTIONS)
    before = full_state(model)
    fused_loss(model, 0).backward()
    record = optimizer.record_next_step()
    assert record is optimizer.record_next_step(), "of the same step"
    optimizer.step()
    assert_alike(record.local(), oracle(before, full_state(model)))
    assert_alike(record.gather(), oracle(before, full_state(model)))


@pytest.mark.parametrize("way", ["early", "sharded"])
@on_ranks(2)
def test_every_rank_gathers_what_one_process_would_see(rank: int, world: int, way: str) -> None:
    model, mesh = fused_model(), init_device_mesh("cpu", (world,))
    options: dict[str, Any] = dict(OPTIONS)
    if way == "early":
        dmuon.dedicate_params(model, mesh, select=SPEC, costs="flops")
        options["overlap_backward"] = True
    else:
        fully_shard(model, mesh=mesh)
        options |= {"select": SPEC, "distributed_config": dmuon.create_dtensor_config(costs="flops")}
    optimizer = dmuon.Muon(model, **options)
    for step in range(3):
        optimizer.zero_grad()
        fused_loss(model, step, rank, world).backward()
        before = full_state(model)
        record = optimizer.record_next_step() if step == 1 else None
        optimizer.step()
        if record is not None:
            expected = oracle(before, full_state(model))
            later = record
    gathered = later.gather()  # a step later: it is of the step that it was asked for
    assert_alike(gathered, expected)
    local = later.local()
    assert all(gathered[name] == one for name, one in local.items())
    if way == "early":
        assert len(local) == optimizer.last_step.ns_matrices, "what it owns"
    else:
        assert len(local) < len(gathered), "what it has whole"


@pytest.mark.parametrize("layout", ["fsdp2-hsdp", *slowly("hsdp", "tp-ddp", "ddp")])
@on_ranks("layout")
def test_copies_are_counted_once(rank: int, world: int, layout: str) -> None:
    laid = lay(layout, build())
    optimizer = dmuon.Muon(laid.model, distributed_config=laid.config, **OPTIONS)
    before = full_state(laid.model)
    laid.backward(0)
    record = optimizer.record_next_step()
    optimizer.step()
    after = full_state(laid.model)
    gathered = record.gather()
    assert len(gathered) == 9
    for name, one in gathered.items():
        wanted = stats(before[name], after[name], tuple(after[name].shape))
        assert one.weight_norm == pytest.approx(wanted.weight_norm, rel=1e-6)
        assert one.effective_lr == pytest.approx(wanted.effective_lr, rel=1e-12)
        assert one.update_rms == pytest.approx(wanted.update_rms, rel=1e-3), "weights are fp32"
    assert_same_over_ranks({name: torch.tensor(astuple(one)) for name, one in sorted(gathered.items())})


def test_only_the_step_that_was_asked_for_and_what_it_updated() -> None:
    model = build()
    optimizer = dmuon.Muon(model, **OPTIONS)
    record = optimizer.record_next_step()
    with pytest.raises(RuntimeError, match="this record is empty"):
        record.local()
    train(model, optimizer, range(1))
    first = record.local()
    train(model, optimizer, range(1, 3))
    assert record.local() == first
    assert len(first) == 9
    again = optimizer.record_next_step()
    assert again is not record
    optimizer.zero_grad()
    model.blocks[0].mix.weight.grad = torch.zeros(13, 13)
    optimizer.step()
    assert again.local().keys() == {"blocks.0.mix.weight"}, "the only one with a gradient"
