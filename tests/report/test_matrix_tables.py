"""``explain`` tells of each matrix who orthogonalizes it, and at what cost, and what costs more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.nn as nn
from harness.dtensors import local_tensor
from harness.fused import FusedModel, by_spec, fused_loss
from harness.hand_laid import SPLITS
from harness.inside import exchange_of
from harness.on_ranks import of_all_ranks, on_ranks, over_ranks, slowly
from harness.topologies import lay
from harness.toy import OPTIONS, build, train
from harness.trees import bare, linear, node, of, stack
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon
from dmuon.dedicated.dedication import dedications
from dmuon.report import accounting
from dmuon.solver import CostTable

TABLE = CostTable({(13, 13): {1: 1_000, 2: 1_500, 4: 2_200}, (13, 29): {1: 3_000, 2: 5_000}})


def rows_of(model: nn.Module, optimizer: dmuon.Muon | None) -> list[accounting.MatrixRow]:
    return accounting.matrix_rows(model, optimizer, dedications(model))


def check_owners(rows: list[accounting.MatrixRow], optimizer: dmuon.Muon, rank: int) -> None:
    """Rows of this rank are exactly the matrices of the last step."""
    own = [row for row in rows if row.owner == rank]
    stats = optimizer.last_step
    assert len(own) == stats.ns_matrices
    assert {(min(row.shape), max(row.shape)) for row in own} == stats.variants.keys()


@pytest.mark.parametrize("layout", ["1d-1", "1d", "fsdp2-2", *slowly("tp-fsdp", "fsdp2-hsdp", "ddp")])
@on_ranks("layout")
def test_owners_and_times_are_those_of_the_step(rank: int, world: int, layout: str) -> None:
    model = build(seed=0)
    laid = lay(layout, model, costs=TABLE)
    dedicated = dedications(laid.model)
    config = None if dedicated else laid.config
    optimizer = dmuon.Muon(laid.model, distributed_config=config, **OPTIONS)
    before = rows_of(laid.model, optimizer)
    laid.backward(0)
    optimizer.step()
    rows = rows_of(laid.model, optimizer)
    assert rows == before, "a step changes nothing of it"
    check_owners(rows, optimizer, rank)
    sums = accounting.rank_sums(rows)
    plans = [dedicated[0].plan] if dedicated else list(exchange_of(optimizer).layouts.plans.values())
    for plan in plans:
        loads = [sums[r].predicted_ns or 0 for r in range(world)]
        assert loads == pytest.approx(list(plan.solution.loads_ns))
    if dedicated:
        muon = [p for g in optimizer.param_groups if g["use_muon"] for p in g["params"]]
        held = sum(local_tensor(p).nbytes + local_tensor(optimizer.state[p]["momentum_buffer"]).nbytes for p in muon)
        assert held == 2 * accounting.expected_memory(dedicated[0].runtime)["fp32 masters"]
    told = [(row.tensor, row.owner, row.predicted_ns) for row in rows]
    assert of_all_ranks(told) == [told] * world, "every rank tells the same of owners and predictions"


@pytest.mark.parametrize("dedicated", [True, False])
@on_ranks(2)
def test_each_part_of_a_fused_tensor_has_a_row_of_its_own(rank: int, world: int, dedicated: bool) -> None:
    model, mesh = FusedModel(), init_device_mesh("cpu", (world,))
    if dedicated:
        dmuon.dedicate_params(model, mesh, select=by_spec(), costs="flops")
        optimizer = dmuon.Muon(model, **OPTIONS)
    else:
        fully_shard(model, mesh=mesh)
        groups = dmuon.param_groups(model, select=by_spec())
        optimizer = dmuon.Muon(groups, distributed_config=dmuon.create_dtensor_config(costs="flops"), **OPTIONS)
    fused_loss(model, 0, rank, world).backward()
    optimizer.step()
    rows = rows_of(model, optimizer)
    for i, split in enumerate(SPLITS):
        shapes = split.spec.matrices(split.shape)
        for layer in range(2):
            of_tensor = [row for row in rows if row.tensor == f"blocks.{layer}.0.weight{i}"]
            assert [row.shape for row in of_tensor] == shapes
            assert [row.number for row in of_tensor] in ([None], list(range(len(shapes))))
    check_owners(rows, optimizer, rank)
    owned = sum(row.owner == rank for row in rows)
    assert over_ranks(owned) == len(rows)
    assert {row.predicted_ns is not None for row in rows if "weight0" in row.tensor} == {True}


@on_ranks(2)
def test_one_rank_may_ask_alone(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    dedicated = build()
    dmuon.dedicate_params(dedicated, mesh, costs="flops")
    sharded = fully_shard(build(), mesh=mesh)
    for model in (dedicated, sharded):
        optimizer = dmuon.Muon(model, **OPTIONS)
        for _ in range(2):
            if rank == 1:
                assert "rank 0" in dmuon.explain(model, optimizer) and "rank 1" in dmuon.explain(model, optimizer)
            train(model, optimizer, range(1), rank, world)
    assert over_ranks(1) == world


def test_many_experts_are_told_in_few_lines_and_one_by_one_on_request() -> None:
    layers, count = 48, 128

    def layer() -> nn.Module:
        weights = {"gate_up_proj": bare(count, 12, 4), "down_proj": bare(count, 4, 6)}
        return node(proj=linear(4, 4), experts=of("Experts", num_experts=count, **weights))

    model = node(layers=stack(layer, layers))
    optimizer = dmuon.Muon(model, select=lambda fqn, _module, param: param.ndim > 1)
    text = dmuon.explain(model, optimizer)
    assert len(text.splitlines()) < 40
    folded = {line.split()[0]: line.split()[1] for line in text.splitlines() if line.startswith("  layers")}
    matrices = layers * count
    assert folded["layers.*.proj.weight"] == "48"
    assert folded["layers.*.experts.down_proj[*]"] == f"{matrices:,}"
    assert folded["layers.*.experts.gate_up_proj[*]"] in (f"{matrices:,}", f"{2 * matrices:,}")
    every = dmuon.explain(model, optimizer, max_rows=None).splitlines()
    assert sum("[127] " in line for line in every) == 2 * layers
    with pytest.raises(ValueError, match="max_rows"):
        dmuon.explain(model, optimizer, max_rows=0)


@on_ranks(2)
def test_a_plan_keeps_its_costs_and_one_without_predicts_nothing(rank: int, world: int, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (world,))
    plan = dmuon.dedicate_params(build(), mesh, costs=TABLE)
    assert plan.costs is not None and plan.costs.costs == TABLE.costs
    if rank == 0:
        plan.save(tmp_path / "plan.json")
        replace(plan, costs=None).save(tmp_path / "old.json")
    dist.barrier()
    for name, predicted in (("plan", True), ("old", False)):
        model = build()
        loaded = dmuon.dedicate_params(model, mesh, plan=tmp_path / f"{name}.json")
        assert loaded.digest == plan.digest
        rows = rows_of(model, dmuon.Muon(model))
        assert all((row.predicted_ns is not None) == predicted for row in rows)
        assert ("not predicted" in dmuon.explain(model)) != predicted


# -- what the optimizer does, whatever it was given, and what costs more than it should --------------------------------


def line_of(text: str, name: str) -> str:
    """The first of its matrices."""
    return next(line for line in text.splitlines() if line.split()[:1] in ([name], [f"{name}[0]"]))


def test_groups_of_ones_own_are_told_as_they_are() -> None:
    """Of a model that the policy refuses, too; and what is in no group."""
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 12), nn.Linear(4, 4)), nn.Linear(4, 4))
    model[0][0].qkv = nn.Linear(4, 12)  # looks fused
    muon = [model[0][1].weight]
    optimizer = dmuon.Muon([{"params": muon, "use_muon": True}, {"params": [model[1].bias], "use_muon": False}])
    text = dmuon.explain(model, optimizer)
    assert "one matrix" in line_of(text, "0.1.weight")
    assert line_of(text, "1.weight").endswith("in no group: this optimizer does not train it")
    assert "in no group" not in line_of(text, "1.bias")


def fused() -> nn.Module:
    """``qkv`` tells by its name, ``wi`` by what follows it, ``square`` is only named like one, ``down`` is none."""
    return node(qkv=linear(32, 96), square_qkv=linear(32, 32), wi=linear(32, 256), down=linear(128, 32))


SPLIT = {"qkv": dmuon.MatrixSpec((32, 32, 32)), "wi": dmuon.MatrixSpec((128, 128))}


def whole(_fqn: str, _module: nn.Module, param: nn.Parameter) -> bool:
    return param.ndim == 2


def split(fqn: str, _module: nn.Module, param: nn.Parameter) -> bool | dmuon.MatrixSpec:
    return param.ndim == 2 and SPLIT.get(fqn.split(".")[-2], True)


@pytest.mark.pitfall("P78")
@pytest.mark.parametrize("way", ["sharded", "dedicated"])
@on_ranks(2)
def test_what_looks_fused_and_is_taken_whole_is_told(rank: int, world: int, way: str) -> None:
    mesh = init_device_mesh("cpu", (world,))
    for select, warned in ((whole, True), (split, False)):
        model = nn.Sequential(fused(), fused())
        given: dict[str, Any] = {"select": select}
        if way == "sharded":
            fully_shard(model, mesh=mesh)
            given["distributed_config"] = dmuon.create_dtensor_config(costs="flops")
        elif way == "dedicated":
            dmuon.dedicate_params(model, mesh, costs="flops", **given)
            given = {}
        text = dmuon.explain(model, dmuon.Muon(model, **given))
        told = [line for line in text.splitlines() if "fused into one tensor" in line]
        assert bool(told) == warned
        if told:
            [line] = told
            assert "'0.qkv.weight'" in line and "'0.wi.weight'" in line
            assert "and 1 more" in line and "square" not in line and "down" not in line


def test_an_optimizer_that_will_be_laid_out_anew_says_so() -> None:
    """One whose parameters were replaced, and one that lost a group."""
    model = build()
    optimizer = dmuon.Muon(model, **OPTIONS)
    assert "the next step decides" not in dmuon.explain(model, optimizer)
    muon = optimizer.param_groups[0]["params"]
    muon[0] = nn.Parameter(muon[0].detach().clone())
    text = dmuon.explain(model, optimizer)
    assert "the next step decides" in text and "parameter 0 of group 0" in text
    train(model, optimizer, range(1))
    assert "the next step decides" not in dmuon.explain(model, optimizer)
    del optimizer.param_groups[0]
    assert "the next step decides" in dmuon.explain(model, optimizer)
