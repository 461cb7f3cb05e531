"""The plan is one and the same on all ranks, and dmuon's groups stay out of everyone else's way."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness.assertions import assert_equal_weights, assert_same_bits, raised_by
from harness.inside import default_store
from harness.network import full_state, is_matrix, shard_blocks
from harness.on_ranks import of_all_ranks, on_ranks
from harness.oracle import reference_weights
from harness.topologies import lay
from harness.toy import batch, build, trained
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import dmuon
from dmuon.kernels import user_cache_directory
from dmuon.planning import owner_plan
from dmuon.solver import Plan, SolveOptions

NAMES = sorted(n for n, _ in build().named_parameters() if is_matrix(n))

# No heuristic can prove its plan over two ranks: three matrices of 70 ns and six of 100 ns never split into halves.
EXACT = SolveOptions(method="milp", gap_target=0)
UNEVEN = dmuon.solver.CostTable({(13, 13): {1: 70}, (13, 29): {1: 100}})


# -- one plan -----------------------------------------------------------------------------------------------------


class OneHugeMatrix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"fc": nn.Linear(n, n)}) for n in (96, 4, 4, 4))


def dedicated(rank: int, world: int, **options: Any) -> tuple[nn.Module, dmuon.OwnerPlan]:
    """A toy model and its plan."""
    model = build(rank)
    return model, dmuon.dedicate_params(model, init_device_mesh("cpu", (world,)), **{"costs": "flops", **options})


def only_first(fqn: str, *_: Any) -> bool:
    return fqn == NAMES[0]


PLANS: dict[str, dict[str, Any]] = {
    "toy": {},
    "again": {},
    "greedy": {"solve": SolveOptions(method="greedy")},
    "milp": {"costs": UNEVEN, "solve": EXACT},
    "one matrix": {"select": only_first},
    "equal costs": {"costs": dmuon.solver.CostTable({(13, 13): {1: 7}, (13, 29): {1: 7}})},
}


@pytest.mark.pitfall("P20", "P21", "P52", "P53")
@on_ranks(4)
def test_all_ranks_hold_the_same_balanced_plan(rank: int, world: int) -> None:
    found = {name: dedicated(rank, world, **options)[1] for name, options in PLANS.items()}
    found["one huge"] = dmuon.dedicate_params(OneHugeMatrix(), init_device_mesh("cpu", (world,)), costs="flops")
    plans = {name: (p.digest, p.owners, tuple(p.solution.loads_ns), p.balance) for name, p in found.items()}
    of_ranks = of_all_ranks(plans)
    assert of_ranks.count(plans) == world, "ranks differ"
    assert plans["toy"] == plans["again"], "a plan that is proven or heuristic repeats"
    for name in ("toy", "greedy", "milp", "equal costs"):
        _, owners, loads, _ = plans[name]
        assert sorted(owners) == NAMES and set(owners.values()) == set(range(world)), name
        assert max(loads) <= 1.5 * sum(loads) / world, f"{name}: {loads}"
    counts = [list(plans["equal costs"][1].values()).count(r) for r in range(world)]
    assert max(counts) - min(counts) <= 1, "equal costs mean equal counts"
    assert plans["one matrix"][1] == {NAMES[0]: plans["one matrix"][1][NAMES[0]]}
    _, owners, loads, balance = plans["one huge"]
    huge = owners["blocks.0.fc.weight"]
    assert all(owner != huge for name, owner in owners.items() if name != "blocks.0.fc.weight"), "it owns no more"
    assert balance > 1 and max(loads) == loads[huge]


@pytest.mark.pitfall("P14", "P53")
@on_ranks(3)
def test_more_ranks_than_matrices_train_exactly(rank: int, world: int) -> None:
    model, _ = dedicated(rank, world, select=only_first)
    expected = reference_weights(2, matrix=lambda name: name == NAMES[0])
    assert_equal_weights(trained(model, rank, world), expected)


# -- what can go wrong with it ------------------------------------------------------------------------------------


def other_owner(document: dict[str, Any]) -> Plan:
    """A valid plan, but not the one that was sent."""
    plan = Plan.from_json(document)
    owners = {name: (owner + 1) % plan.world for name, owner in plan.owners.items()}
    return replace(plan, owners=owners, loads_ns=plan.loads_ns[-1:] + plan.loads_ns[:-1])


def another_model(document: dict[str, Any]) -> Plan:
    plan = Plan.from_json(document)
    renamed = tuple(replace(m, name=f"x.{m.name}") for m in plan.matrices)
    return replace(plan, owners={f"x.{name}": owner for name, owner in plan.owners.items()}, matrices=renamed)


def no_plan(*_: Any) -> Plan:
    raise ZeroDivisionError("a bug in the solver")


@pytest.mark.pitfall("P21")
@pytest.mark.parametrize(
    ("reader", "match"),
    [
        (other_owner, r"rank 1 holds another owner plan than rank 0 \(digests \w{64} and \w{64}\)"),
        (another_model, r"rank 1: the owner plan \(solved now\) has no owner for parameter 'blocks\."),
    ],
)
@on_ranks(3, timeout=30)
def test_a_tampered_plan_on_one_rank_raises_on_every_rank(
    rank: int, world: int, reader: Callable[[dict[str, Any]], Plan], match: str
) -> None:
    instead = SimpleNamespace(from_json=reader) if rank == 1 else Plan
    with mock.patch.object(owner_plan, "Plan", instead), pytest.raises(ValueError, match=match):
        dedicated(rank, world)


@pytest.mark.pitfall("P51", "P49")
@on_ranks(2, timeout=30)
def test_a_failing_planner_raises_its_message_on_every_rank(rank: int, world: int) -> None:
    says = "ZeroDivisionError: a bug in the solver"
    with mock.patch.object(owner_plan, "solve_plan", no_plan), pytest.raises(ValueError, match=says):
        dedicated(rank, world)


@pytest.mark.pitfall("P21", "P51")
@pytest.mark.parametrize(
    ("installed", "seconds", "says"),
    [(False, 30.0, "MILP|PuLP|pulp"), (True, 1e-9, "stopped at the time limit")],  # depends on the clock of a rank
    ids=["without a solver", "out of time"],
)
@on_ranks(2)
def test_rank_0_warns_of_a_plan_that_is_not_proven_and_all_ranks_use_it(
    rank: int, world: int, installed: bool, seconds: float, says: str
) -> None:
    solve = replace(EXACT, time_limit_s=seconds)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if not installed:
            patch.setitem(sys.modules, "pulp", None)
        model, plan = dedicated(rank, world, costs=UNEVEN, solve=solve)
    told = [str(w.message) for w in caught]
    assert any(re.search(says, message) for message in told) if rank == 0 else not told, told
    digests = of_all_ranks(plan.digest)
    assert len(set(digests)) == 1
    assert_equal_weights(trained(model, rank, world), reference_weights(2))


# -- groups -------------------------------------------------------------------------------------------------------


@pytest.mark.pitfall("P24")
@on_ranks(2, fresh=True)
def test_a_new_mesh_after_destroying_the_process_group_works(rank: int, world: int) -> None:
    for attempt in range(2):
        assert_equal_weights(trained(dedicated(rank, world)[0], rank, world), reference_weights(2))
        if attempt == 0:
            store = default_store()
            dist.barrier()
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=dist.PrefixStore("second", store), rank=rank, world_size=world)


@pytest.mark.pitfall("P25")
@pytest.mark.parametrize("layout", ["1d-3-two-lines", "1d-3"])
@on_ranks(3)
def test_a_users_collectives_on_the_default_group_do_not_interleave(rank: int, world: int, layout: str) -> None:
    laid = lay(layout, build(rank))
    optimizer = laid.optimizer()
    expected = torch.full((1000,), world * (world + 1) / 2)
    pending: list[tuple[Any, Tensor]] = []
    seen = 0

    def collective(*_: Any, wait: bool = True) -> None:
        nonlocal seen
        value = torch.full((1000,), rank + 1.0)
        work = dist.all_reduce(value, async_op=True)
        if not wait:
            pending.append((work, value))
            return
        work.wait()
        assert torch.equal(value, expected)
        seen += 1

    for block in laid.network.blocks:
        block.register_forward_hook(lambda m, a, out: out.register_hook(collective) and None)
        block.register_forward_pre_hook(collective)
    for step in range(2):
        optimizer.zero_grad()
        loss = laid.loss(step)
        collective(wait=False)
        collective()
        loss.backward()
        collective()
        optimizer.step()
        collective(wait=False)
    for work, value in pending:
        work.wait()
        assert torch.equal(value, expected)
    assert seen == 2 * (3 + 3 + 2)
    assert_equal_weights(full_state(laid.model), reference_weights(2))


@pytest.mark.pitfall("P24", "P25")
@pytest.mark.parametrize("both", [True, False], ids=["two jobs", "one job"])
@on_ranks(4)
def test_meshes_over_parts_of_the_world_do_not_involve_the_rest(rank: int, world: int, both: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("job", "shard"))["shard"]
    job, place = divmod(rank, 2)
    if job == 1 and not both:
        return  # takes part in nothing
    model = build(seed=100 * job + place, layers=2 + job)
    dmuon.dedicate_params(model, mesh, costs="flops")
    shard_blocks(model, mesh, dmuon.fully_shard)
    with dmuon.summon_full_params(model):
        assert model.blocks[0].mix.weight.shape == (13, 13)
    assert_equal_weights(trained(model, place, 2), reference_weights(2, seed=100 * job, layers=2 + job))


# -- summon -------------------------------------------------------------------------------------------------------


def edit(model: nn.Module) -> None:
    model.blocks[0].mix.weight.data.mul_(2)
    with torch.no_grad():
        model.blocks[1].up.weight.zero_()


@pytest.mark.pitfall("P17", "P28", "P54")
@pytest.mark.parametrize(("layout", "keep"), [("1d", False), ("1d-two-lines", True)])
@on_ranks(2)
def test_summoned_weights_are_whole_and_edits_reach_the_next_forward(
    rank: int, world: int, layout: str, keep: bool
) -> None:
    edited = build()
    start = {n: p.detach().clone() for n, p in edited.named_parameters() if is_matrix(n)}
    edit(edited)
    with torch.no_grad():
        edited.blocks[2].down.weight.fill_(1)
        edited.blocks[2].mix.weight.copy_(torch.eye(13))
        expected = edited(batch(0)[0])
    model = lay(layout, build(), keep=keep).network
    tokens = batch(0)[0]
    model(tokens)  # leaves weights in the buffers where they are kept

    resting = dict(model.named_parameters())
    with dmuon.summon_full_params(model):
        assert_same_bits([start, {n: p for n, p in model.named_parameters() if is_matrix(n)}])
        edit(model)
        model.blocks[2].down.weight.data = torch.ones_like(model.blocks[2].down.weight)
        model.blocks[2].mix.weight = nn.Parameter(torch.eye(13))
    assert all(resting[n] is p for n, p in model.named_parameters()), "the same resting parameters as before"
    torch.testing.assert_close(model(tokens).detach(), expected)

    with dmuon.summon_full_params(model, writeback=False):
        model.blocks[0].mix.weight.data.zero_()
    with pytest.raises(KeyError, match="mine"), dmuon.summon_full_params(model):
        model.blocks[0].mix.weight.data.zero_()
        raise KeyError("mine")
    with dmuon.summon_full_params(model):
        with pytest.raises(RuntimeError, match=r"forward or backward of block .*inside summon_full_params"):
            model.blocks[0](torch.ones(1, 13))
        with pytest.raises(RuntimeError, match="inside summon_full_params"):
            dmuon.summon_full_params(model).__enter__()
    replaced_by = r"'blocks\.0\.mix\.weight'.*was replaced by shape"
    with pytest.raises(RuntimeError, match=replaced_by), dmuon.summon_full_params(model):
        model.blocks[0].mix.weight = nn.Parameter(torch.ones(2, 2))
    torch.testing.assert_close(model(tokens).detach(), expected)
    with pytest.raises(RuntimeError, match="is FORWARD"):
        model.blocks[1].mix.register_forward_hook(lambda *_: dmuon.summon_full_params(model).__enter__())
        model(tokens)


@pytest.mark.pitfall("P42")
@pytest.mark.parametrize("own_dtype", [False, True], ids=["bf16 policy", "fp32"])
@on_ranks(2)
def test_summoning_keeps_fp32_precision(rank: int, world: int, own_dtype: bool) -> None:
    policy = None if own_dtype else MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model, _ = dedicated(0, world, mp_policy=policy)
    if not own_dtype:
        for name, param in model.named_parameters():
            if not is_matrix(name) and name != "embed.weight":
                param.data = param.data.to(torch.bfloat16)
        for block in model.blocks:
            block.register_forward_pre_hook(lambda m, args: (args[0].to(torch.bfloat16),))
        model(batch(0)[0])
    with dmuon.summon_full_params(model):
        weight = model.blocks[0].mix.weight
        assert weight.dtype == torch.float32
        weight.data.add_(1e-6)
    start = {n: p.detach() for n, p in build().named_parameters()}
    with dmuon.summon_full_params(model, writeback=False):
        for name, param in model.named_parameters():
            if is_matrix(name):
                wanted = start[name] + 1e-6 if name == "blocks.0.mix.weight" else start[name]
                assert torch.equal(param, wanted), name


@on_ranks(2)
def test_a_restart_solves_nothing_again(rank: int, world: int) -> None:
    """Unless something that the plan depends on is another; a file that cannot be read is written anew."""
    costs = dmuon.solver.CostTable({(13, 13): {1: 71}, (13, 29): {1: 101}})
    with mock.patch.object(owner_plan, "_LONG_S", 0.0):
        _, first = dedicated(rank, world, costs=costs)
    stop = mock.patch.object(owner_plan, "solve_plan", side_effect=RuntimeError("solved"))
    with stop:
        _, again = dedicated(rank, world, costs=costs)
        other = raised_by(lambda: dedicated(rank, world, costs=costs, solve=SolveOptions(gap_target=0.02)))
    assert again.digest == first.digest and again.solution == first.solution
    assert other.matches(ValueError, "solved"), other
    if rank == 0:
        for path in user_cache_directory().glob("plan-*.json"):
            path.write_text("{")
    dist.barrier()
    with stop:
        broken = raised_by(lambda: dedicated(rank, world, costs=costs))
    assert broken.matches(ValueError, "solved"), broken
