"""Plans are files: saved whole, read with every fault named, applied to the model that they were made for only."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness.assertions import assert_equal_weights, assert_same_tensors
from harness.commands import command
from harness.configs import SMALL_LLAMA, written
from harness.dedicated_toy import refused
from harness.network import is_matrix
from harness.on_ranks import on_ranks
from harness.oracle import reference_weights
from harness.plans import rotated
from harness.pool import RankPool
from harness.toy import build, trained
from harness.trees import H, llama
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import dmuon
from dmuon import OwnerPlan
from dmuon.dedicated.dedication import dedications
from dmuon.planning import owner_plan
from dmuon.planning.cost_lookup import FoundCosts
from dmuon.solver import CostTable, Matrix, SolveOptions

# Batches of several matrices pay here, and the FLOPs that the planner would go by otherwise say that they do not.
BATCHED = CostTable({(13, 13): {1: 60, 2: 70, 4: 80}, (13, 29): {1: 100, 2: 110}})
GREEDY = SolveOptions(method="greedy")


def toy_plan(world: int, table: CostTable = BATCHED) -> OwnerPlan:
    """A plan for the toy, made without a process group."""
    named = build().named_parameters()
    matrices = [Matrix(n, *p.shape, ".".join(n.split(".")[:2])) for n, p in named if is_matrix(n)]
    return OwnerPlan.from_solution(dmuon.solver.plan(matrices, world, table, GREEDY), FoundCosts(table, "a table"))


# -- files --------------------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    counts=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 4)), min_size=1, max_size=5),
    world=st.integers(1, 6),
    block=st.text(max_size=3),
    cost_source=st.text(max_size=8),
    times=st.lists(st.integers(1, 99), min_size=3, max_size=3).map(sorted),
)
def test_a_plan_survives_its_file(
    tmp_path: Path, counts: list[tuple[int, int, int]], world: int, block: str, cost_source: str, times: list[int]
) -> None:
    shapes = [(m, n) for m, n, count in counts for _ in range(count)]
    matrices = [Matrix(f"m{i}", m, n, f"{block}{i % 3}", 1 + i) for i, (m, n) in enumerate(shapes)]
    table = CostTable({m.shape: dict(zip((1, 2, 4), times, strict=True)) for m in matrices})
    costs = FoundCosts(table, cost_source)
    plan = OwnerPlan.from_solution(dmuon.solver.plan(matrices, world, table, GREEDY), costs)
    assert plan.chunks == {m.shape: table.batch_size(m.shape) for m in matrices}
    path = tmp_path / "plan.json"
    plan.save(path)
    again = OwnerPlan.load(str(path))
    assert replace(again, origin=plan.origin) == plan and again.digest == plan.digest
    assert again.origin == f"loaded from {path}"
    text = path.read_bytes()
    again.save(path)
    assert path.read_bytes() == text


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    toy_plan(2).save(path)
    return path


def set_field(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda document: document.__setitem__(name, value)


def drop_field(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda document: document.__delitem__(name)


def tampered(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def set_owner(document: dict[str, Any]) -> None:
    document["solution"] = rotated(OwnerPlan.from_json(document, "a file")).solution.to_json()


def set_chunk(document: dict[str, Any]) -> None:
    document["chunks"]["13x13"] += 1


@pytest.mark.pitfall("P21", "P50")
@pytest.mark.parametrize(
    ("tamper", "says"),
    [
        (set_owner, "the content was changed: its SHA-256 is"),
        (set_chunk, "the content was changed: its SHA-256 is"),
        (set_field("cost_source", "elsewhere"), "the content was changed"),
        (set_field("schema", 99), "field 'schema' is 99, this version of dmuon reads 2"),
        *((drop_field(name), "the content was changed") for name in ("solution", "sha256")),
    ],
)
def test_a_tampered_file_is_refused_by_file_and_field(
    saved: Path, tamper: Callable[[dict[str, Any]], None], says: str
) -> None:
    tampered(saved, tamper)
    with pytest.raises(ValueError, match=rf"(?s)plan file .*plan\.json: {says}.*; plan again"):
        OwnerPlan.load(saved)


# -- reuse --------------------------------------------------------------------------------------------------------


def not_again(*_: Any, **__: Any) -> None:
    raise AssertionError("a run with a plan measured or solved")


@pytest.mark.pitfall("P21")
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
@on_ranks()
def test_a_run_with_a_saved_plan_repeats_the_run_that_saved_it_bit_by_bit(
    rank: int, world: int, tmp_path: Path
) -> None:
    """A run that writes its plan, one that reads the file, one that takes the object, and one that plans otherwise."""
    mesh, path = init_device_mesh("cpu", (world,)), str(tmp_path / "plan.json")
    model = build(seed=rank)
    first = dmuon.dedicate_params(model, mesh, costs=BATCHED, solve=GREEDY)
    if rank == 0:
        first.save(path)
    dist.barrier()
    weights = trained(model, rank, world)
    assert_equal_weights(weights, reference_weights(2))
    elsewhere = path if rank == 0 else "/nonexistent/plan.json"  # only rank 0 reads
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dmuon.planning.cost_lookup.find_costs", not_again)
        patch.setattr(owner_plan, "solve_plan", not_again)
        for name, source in (("file", elsewhere), ("object", first)):
            model = build(seed=rank)
            plan = dmuon.dedicate_params(model, mesh, plan=source)
            assert plan.digest == first.digest and plan.cost_source == first.cost_source == "given"
            assert plan.matrices == first.matrices, "in the order of the model"
            assert plan.origin == (f"loaded from {path}" if name == "file" else "given")
            assert (plan.owners, plan.chunks) == (first.owners, first.chunks), name
            assert_same_tensors(trained(model, rank, world), weights)
    other = dmuon.dedicate_params(build(), mesh, costs="flops")
    assert max(first.chunks.values()) > 1 and other.chunks != first.chunks, "planning anew would have been seen"


@pytest.mark.pitfall("P21")
@on_ranks(2)
def test_owners_and_batches_are_the_files_and_bytes_this_runs(rank: int, world: int, tmp_path: Path) -> None:
    """A plan that the planner would not make, written elsewhere for fp32 communication, applied to an fp64 run."""
    planned, path = rotated(toy_plan(2)), tmp_path / "plan.json"
    if rank == 0:
        planned.save(path)
    model = build(seed=rank)
    policy = MixedPrecisionPolicy(param_dtype=torch.float64)
    plan = dmuon.dedicate_params(model, init_device_mesh("cpu", (world,)), plan=path, mp_policy=policy)
    owners = [entry.rest.owner for entry in dedications(model)[0].runtime.matrices()]
    assert plan.owners == planned.owners and plan.digest == planned.digest
    assert all(m.nbytes == 8 * m.rows * m.cols for m in (*plan.matrices, *plan.solution.matrices)), "of this run"
    assert tuple(owners.count(r) for r in range(world)) == planned.solution.rank_matrices
    assert f"plan: loaded from {path}, digest with batches {planned.digest}" in dmuon.explain(model)


# -- refused ------------------------------------------------------------------------------------------------------


LOADED = r"the owner plan \(loaded from .*plan\.json\)"
TWO_MATRICES = [Matrix(f"blocks.{i}.mix.weight", 13, 13, f"blocks.{i}") for i in range(2)]
OTHER_BLOCKS: dict[str, Any] = {
    "blocks": lambda fqn, module: fqn == "blocks.0" or fqn == "blocks.1.mix",
    "select": lambda fqn, module, param: fqn in ("blocks.0.mix.weight", "blocks.1.mix.weight"),
}


def plan_of_two_matrices(path: Path) -> None:
    OwnerPlan.from_solution(dmuon.solver.plan(TWO_MATRICES, 2, BATCHED), FoundCosts(BATCHED, "a table")).save(path)


def transposed() -> nn.Module:
    model = build()
    model.blocks[1].up = nn.Linear(29, 13)
    return model


# What writes the file, another model than the file's, options, and what is told.
UNFIT: list[tuple[Callable[[Path], Any], Callable[[], nn.Module], dict[str, Any], str]] = [
    (toy_plan(3).save, build, {}, rf"{LOADED} is for 3 ranks, this mesh has 2; plan again: leave plan= out"),
    (
        toy_plan(2).save,
        lambda: build(layers=4),
        {},
        rf"{LOADED} has no owner for parameter 'blocks\.3\.\w+\.weight'.*; plan again: leave plan=",
    ),
    (
        toy_plan(2).save,
        lambda: build(layers=2),
        {},
        rf"{LOADED} holds 'blocks\.2\.\w+\.weight', which is no parameter that .*; plan again",
    ),
    (
        toy_plan(2).save,
        transposed,
        {},
        r"'blocks\.1\.up\.weight' with shape \(29, 13\), here it is \(13, 29\); plan again",
    ),
    (
        plan_of_two_matrices,
        build,
        OTHER_BLOCKS,
        r"'blocks\.1\.mix\.weight' with block 'blocks\.1', here it is 'blocks\.1\.mix'; plan again",
    ),
    (lambda path: path.write_text("{}"), build, {}, r"plan file .*plan\.json: field 'schema'"),
]


@pytest.mark.pitfall("P21", "P49", "P50")
@on_ranks(2)
def test_a_file_that_does_not_fit_is_refused_on_every_rank(rank: int, world: int, tmp_path: Path) -> None:
    for number, (save, make, options, says) in enumerate(UNFIT):
        path = tmp_path / f"{number}-plan.json"
        if rank == 0:
            save(path)
        dist.barrier()
        with pytest.raises(ValueError, match=says):
            refused(make(), plan=str(path), costs=None, **options)


PLAN = toy_plan(2)
OTHER = r"option plan is a plan with digest \w{64} on rank 1 and a plan with digest \w{64} on .*every rank"
OF_RANK_1: list[tuple[Any, str]] = [
    (rotated(PLAN), OTHER),
    (replace(PLAN, chunks={(13, 13): 1, (13, 29): 1}), OTHER),
    ("plan.json", "plan is a path on rank 1 and a plan with .*every rank"),
    (None, "plan is None on rank 1 and a plan with digest.*every rank"),
]


@pytest.mark.pitfall("P21", "P49")
@on_ranks(2)
def test_another_plan_on_one_rank_is_refused_on_every_rank(rank: int, world: int) -> None:
    for plan, says in OF_RANK_1:
        with pytest.raises(ValueError, match=says):
            refused(build(), plan=plan if rank else PLAN, costs=None)


# -- from dmuon-plan ------------------------------------------------------------------------------------------------


def dedicate_llama(rank: int, world: int, path: str) -> tuple[dict[str, int], dict[str, int]]:
    plan = dmuon.dedicate_params(llama(), init_device_mesh("cpu", (world,)), plan=path)
    return plan.owners, OwnerPlan.load(path).owners


def test_a_plan_that_the_command_wrote_for_a_config_fits_the_model_of_that_config(
    ranks: RankPool, tmp_path: Path
) -> None:
    config, path = written(tmp_path, SMALL_LLAMA | {"intermediate_size": H}), tmp_path / "plan.json"
    assert command("dmuon-plan")([str(config), "--world", "2", "--json", str(path)]) == 0
    for applied, of_file in ranks(2, dedicate_llama, str(path)):
        assert applied == of_file and set(applied.values()) == {0, 1}
