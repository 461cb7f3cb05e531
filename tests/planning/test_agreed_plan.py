"""The plan is one and the same on all ranks, and dmuon's groups stay out of everyone else's way."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness.assertions import assert_equal_weights
from harness.oracle import reference_weights
from harness.pool import RankPool
from harness.toy import LR, batch, build
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import dmuon
from dmuon.check.model import is_matrix, loss_of, shard
from dmuon.check.topologies import full_state
from dmuon.planning import agreed_plan as plan_module
from dmuon.planning import owner_plan
from dmuon.platform import host as place_module
from dmuon.solver import Plan, SolveOptions

OPTIONS: dict[str, Any] = {"lr": LR, "weight_decay": 0.1, "ns_coefficients": "classic"}
NAMES = sorted(n for n, _ in build().named_parameters() if is_matrix(n))

# No heuristic can prove its plan over two ranks: three matrices of 70 ns and six of 100 ns never split into halves.
UNEVEN = dmuon.solver.CostTable({(13, 13): {1: 70}, (13, 29): {1: 100}})


def train(model: nn.Module, rank: int, world: int, steps: int = 2) -> dict[str, Tensor]:
    optimizer = dmuon.Muon(model, **OPTIONS)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, *shard(batch(step), rank, world)).backward()
        optimizer.step()
    return full_state(model)


# -- one plan -----------------------------------------------------------------------------------------------------


class OneHugeMatrix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"fc": nn.Linear(n, n)}) for n in (96, 4, 4, 4))


def several_plans(rank: int, world: int) -> dict[str, tuple[str, dict[str, int], tuple[int, ...], float]]:
    mesh = init_device_mesh("cpu", (world,))
    calls: dict[str, Callable[[], dmuon.OwnerPlan]] = {
        "toy": lambda: dmuon.dedicate_params(build(rank), mesh, costs="flops"),
        "again": lambda: dmuon.dedicate_params(build(rank), mesh, costs="flops"),
        "greedy": lambda: dmuon.dedicate_params(build(rank), mesh, costs="flops", solve=SolveOptions(method="greedy")),
        "milp": lambda: dmuon.dedicate_params(
            build(rank), mesh, costs=UNEVEN, solve=SolveOptions(method="milp", gap_target=0)
        ),
        "one matrix": lambda: dmuon.dedicate_params(
            build(rank), mesh, costs="flops", select=lambda fqn, *_: fqn == NAMES[0]
        ),
        "one huge": lambda: dmuon.dedicate_params(OneHugeMatrix(), mesh, costs="flops"),
        "equal costs": lambda: dmuon.dedicate_params(
            build(rank),
            mesh,
            costs=dmuon.solver.CostTable({(13, 13): {1: 7}, (13, 29): {1: 7}}),
        ),
    }
    found = {}
    for name, call in calls.items():
        plan = call()
        loads = tuple(plan.solution.loads_ns)
        found[name] = (plan.digest, plan.owners, loads, plan.balance)
    return found


@pytest.mark.pitfall("P20", "P21", "P52", "P53")
@pytest.mark.parametrize("world", [1, 2, 4])
def test_all_ranks_hold_the_same_balanced_plan(ranks: RankPool, world: int) -> None:
    results = ranks(world, several_plans)
    for other in results[1:]:
        assert other == results[0], "ranks differ"
    plans = results[0]
    assert plans["toy"] == plans["again"], "a plan that is proven or heuristic repeats"
    for name in ("toy", "greedy", "milp", "equal costs"):
        _, owners, loads, _ = plans[name]
        assert sorted(owners) == NAMES and set(owners.values()) == set(range(world)), name
        assert max(loads) <= 1.5 * sum(loads) / world, f"{name}: {loads}"
    counts = [list(plans["equal costs"][1].values()).count(r) for r in range(world)]
    assert max(counts) - min(counts) <= 1, "equal costs mean equal counts"
    assert plans["one matrix"][1] == {NAMES[0]: plans["one matrix"][1][NAMES[0]]}
    _, owners, loads, balance = plans["one huge"]
    if world > 1:
        huge = owners["blocks.0.fc.weight"]
        assert all(owner != huge for name, owner in owners.items() if name != "blocks.0.fc.weight"), "it owns no more"
        assert balance > 1 and max(loads) == loads[huge]


def train_one_matrix(rank: int, world: int) -> dict[str, Tensor]:
    model = build(rank)
    dmuon.dedicate_params(
        model, init_device_mesh("cpu", (world,)), costs="flops", select=lambda fqn, *_: fqn == NAMES[0]
    )
    return train(model, rank, world)


@pytest.mark.pitfall("P14", "P53")
def test_more_ranks_than_matrices_train_exactly(ranks: RankPool) -> None:
    expected = reference_weights(2, matrix=lambda name: name == NAMES[0])
    for weights in ranks(3, train_one_matrix):
        assert_equal_weights(weights, expected)


# What one layer of a common model calls its matrices, and what no model does.
WIDE = 48
NAMINGS: dict[str, tuple[str, dict[str, tuple[int, int]]]] = {
    "GPT-2": (
        "transformer.h",
        {"attn.c_proj": (WIDE, WIDE), "mlp.c_fc": (4 * WIDE, WIDE), "mlp.c_proj": (WIDE, 4 * WIDE)},
    ),
    "Llama": (
        "model.layers",
        {
            **{f"self_attn.{name}_proj": (WIDE, WIDE) for name in "qo"},
            **{f"self_attn.{name}_proj": (WIDE // 4, WIDE) for name in "kv"},
            **{f"mlp.{name}_proj": (128, WIDE) for name in ("gate", "up")},
            "mlp.down_proj": (WIDE, 128),
        },
    ),
    "ViT": (
        "vit.encoder.layer",
        {
            **{f"attention.attention.{name}": (WIDE, WIDE) for name in ("query", "key", "value")},
            "attention.output.dense": (WIDE, WIDE),
            "intermediate.dense": (4 * WIDE, WIDE),
            "output.dense": (WIDE, 4 * WIDE),
        },
    ),
    "unknown": ("trunk", {"a": (WIDE, WIDE), "zz.b": (WIDE, 2 * WIDE), "c": (7, WIDE), "d": (7, WIDE)}),
}


class Layer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def named_model(stem: str, layer: dict[str, tuple[int, int]], layers: int = 6) -> nn.Module:
    def put(root: nn.Module, name: str, module: nn.Module) -> None:
        *path, last = name.split(".")
        for part in path:
            if part not in root._modules:
                root.add_module(part, nn.Module())
            root = root._modules[part]
        root.add_module(last, module)

    blocks = nn.ModuleList(Layer() for _ in range(layers))
    for block in blocks:
        for name, (rows, cols) in layer.items():
            put(block, name, nn.Linear(cols, rows, bias=False))
    model = nn.Module()
    put(model, stem, blocks)
    return model


def plan_of_named_model(rank: int, world: int, naming: str) -> tuple[dict[str, int], tuple[int, ...]]:
    model = named_model(*NAMINGS[naming])
    plan = dmuon.dedicate_params(model, init_device_mesh("cpu", (world,)), costs="flops")
    return plan.owners, plan.solution.loads_ns


@pytest.mark.pitfall("P20")
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("naming", NAMINGS)
def test_owners_are_balanced_whatever_layers_are_called(ranks: RankPool, naming: str, world: int) -> None:
    stem, layer = NAMINGS[naming]
    owners, loads = ranks(world, plan_of_named_model, naming)[0]
    assert sorted(owners) == sorted(f"{stem}.{i}.{name}.weight" for i in range(6) for name in layer)
    assert max(loads) <= 1.1 * sum(loads) / world, f"loads {loads}"
    for i in range(6):
        held = [owner for name, owner in owners.items() if name.startswith(f"{stem}.{i}.")]
        assert max(held.count(r) for r in range(world)) < len(held), f"layer {i} is all on one owner"


def ranks_given_to_the_solver(rank: int, world: int, hosts: list[str]) -> list[dmuon.solver.Rank]:
    seen = []

    def solve(matrices: Any, ranks: Any, *rest: Any) -> Plan:
        seen.extend(ranks)
        return dmuon.solver.plan(matrices, ranks, *rest)

    with (
        replaced(plan_module, "solve_plan", solve),
        replaced(place_module.socket, "gethostname", lambda: hosts[rank]),
    ):
        dmuon.dedicate_params(build(), init_device_mesh("cpu", (world,)), costs="flops")
    return seen


@pytest.mark.parametrize(
    ("hosts", "nodes"), [(["b", "b", "a", "a"], [0, 0, 1, 1]), (["b", "a", "b"], [0, 1, 0]), (["a"], [0])]
)
def test_ranks_of_one_host_are_one_node(ranks: RankPool, hosts: list[str], nodes: list[int]) -> None:
    first, *others = ranks(len(hosts), ranks_given_to_the_solver, hosts)
    assert first == [dmuon.solver.Rank(index, node=node) for index, node in enumerate(nodes)]
    assert not any(others), "rank 0 alone solves"


# -- what can go wrong with it ------------------------------------------------------------------------------------


@contextmanager
def replaced(target: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, original)


class _OtherOwner:
    """A reader that gives a valid plan, but not the one that was sent."""

    @staticmethod
    def from_json(document: dict[str, Any]) -> Plan:
        plan = Plan.from_json(document)
        owners = {name: (owner + 1) % plan.world for name, owner in plan.owners.items()}
        loads = plan.loads_ns[-1:] + plan.loads_ns[:-1]
        return Plan(owners, plan.matrices, loads, plan.bound_ns, plan.stage, plan.reason, plan.estimated)


class _SpoiledInTransit:
    @staticmethod
    def from_json(document: dict[str, Any]) -> Plan:
        other = _OtherOwner.from_json(document).to_json()
        return Plan.from_json({**other, "digest": document["digest"]})


class _AnotherModel:
    @staticmethod
    def from_json(document: dict[str, Any]) -> Plan:
        plan = Plan.from_json(document)
        renamed = tuple(dmuon.solver.Matrix(f"x.{m.name}", m.rows, m.cols, m.block, m.nbytes) for m in plan.matrices)
        owners = {f"x.{name}": owner for name, owner in plan.owners.items()}
        return Plan(owners, renamed, plan.loads_ns, plan.bound_ns, plan.stage, plan.reason, plan.estimated)


def tampered(rank: int, world: int, reader: type) -> None:
    with replaced(owner_plan, "Plan", reader if rank == 1 else Plan):
        dmuon.dedicate_params(build(), init_device_mesh("cpu", (world,)), costs="flops")


@pytest.mark.pitfall("P21")
@pytest.mark.parametrize(
    ("reader", "match"),
    [
        (_OtherOwner, r"rank 1 holds another owner plan than rank 0 \(digests \w{64} and \w{64}\)"),
        (_SpoiledInTransit, "rank 1: .*digest"),
        (_AnotherModel, r"rank 1: the owner plan \(solved now\) has no owner for parameter 'blocks\."),
    ],
)
def test_a_tampered_plan_on_one_rank_raises_on_every_rank(ranks: RankPool, reader: type, match: str) -> None:
    ranks(3, tampered, reader, expect=ValueError, match=match, timeout=30)


def failing_solver(rank: int, world: int) -> None:
    def fail(*_: Any) -> Plan:
        raise ZeroDivisionError("a bug in the solver")

    with replaced(plan_module, "solve_plan", fail if rank == 0 else plan_module.solve_plan):
        dmuon.dedicate_params(build(), init_device_mesh("cpu", (world,)), costs="flops")


@pytest.mark.pitfall("P51", "P49")
def test_a_failing_planner_raises_its_message_on_every_rank(ranks: RankPool) -> None:
    ranks(2, failing_solver, expect=ValueError, match="ZeroDivisionError: a bug in the solver", timeout=30)


def solver_missing(rank: int, world: int) -> tuple[list[str], str, dict[str, Tensor]]:
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "pulp"}
    for name in before:
        del sys.modules[name]
    sys.modules["pulp"] = None  # type: ignore[assignment]
    try:
        model = build()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            solve = SolveOptions(method="milp", gap_target=0)
            plan = dmuon.dedicate_params(model, init_device_mesh("cpu", (world,)), costs=UNEVEN, solve=solve)
    finally:
        del sys.modules["pulp"]
        sys.modules.update(before)
    return [str(w.message) for w in caught], plan.digest, train(model, rank, world)


@pytest.mark.pitfall("P51")
def test_without_a_solver_rank_0_warns_and_all_ranks_use_its_best_plan(ranks: RankPool) -> None:
    results = ranks(2, solver_missing)
    assert any(re.search("MILP|PuLP|pulp", message) for message in results[0][0]), results[0][0]
    assert not results[1][0], "ranks that do not solve have nothing to say"
    assert results[0][1] == results[1][1]
    for _, _, weights in results:
        assert_equal_weights(weights, reference_weights(2))


def out_of_time(rank: int, world: int) -> tuple[list[str], str, dict[str, Tensor]]:
    # A time limit makes a solver's answer depend on the clock; each rank on its own could end elsewhere.
    model, solve = build(), SolveOptions(method="milp", gap_target=0, time_limit_s=1e-9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = dmuon.dedicate_params(model, init_device_mesh("cpu", (world,)), costs=UNEVEN, solve=solve)
    return [str(w.message) for w in caught], plan.digest, train(model, rank, world)


@pytest.mark.pitfall("P21", "P51")
def test_ranks_agree_on_a_plan_that_ran_out_of_time(ranks: RankPool) -> None:
    results = ranks(2, out_of_time)
    assert any("stopped at the time limit" in message for message in results[0][0]), results[0][0]
    assert len({digest for _, digest, _ in results}) == 1
    for _, _, weights in results:
        assert_equal_weights(weights, reference_weights(2))


# -- groups -------------------------------------------------------------------------------------------------------


def two_process_groups(rank: int, world: int) -> list[dict[str, Tensor]]:
    found = []
    for attempt in range(2):
        mesh = init_device_mesh("cpu", (world,))
        model = build(seed=rank)
        dmuon.dedicate_params(model, mesh, costs="flops")
        found.append(train(model, rank, world))
        if attempt == 0:
            del model, mesh
            store = dist.distributed_c10d._get_default_store()
            dist.barrier()
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=dist.PrefixStore("second", store), rank=rank, world_size=world)
    return found


@pytest.mark.pitfall("P24")
def test_a_new_mesh_after_destroying_the_process_group_works(ranks: RankPool) -> None:
    for found in ranks(2, two_process_groups, fresh=True):
        for weights in found:
            assert_equal_weights(weights, reference_weights(2))


def users_own_collectives(rank: int, world: int, fsdp: bool) -> dict[str, Tensor]:
    model = build(seed=rank)
    mesh = init_device_mesh("cpu", (world,))
    dmuon.dedicate_params(model, mesh, costs="flops")
    if fsdp:
        for block in model.blocks:
            dmuon.fully_shard(block, mesh=mesh)
        dmuon.fully_shard(model, mesh=mesh)
    optimizer = dmuon.Muon(model, **OPTIONS)
    expected = sum(range(1, world + 1))
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
        assert torch.equal(value, torch.full_like(value, expected))
        seen += 1

    for block in model.blocks:
        block.register_forward_hook(lambda m, a, out: out.register_hook(collective) and None)
        block.register_forward_pre_hook(collective)
    for step in range(2):
        optimizer.zero_grad()
        loss = loss_of(model, *shard(batch(step), rank, world))
        collective(wait=False)
        collective()
        loss.backward()
        collective()
        optimizer.step()
        collective(wait=False)
    for work, value in pending:
        work.wait()
        assert torch.equal(value, torch.full_like(value, expected))
    assert seen == 2 * (3 + 3 + 2)
    return full_state(model)


@pytest.mark.pitfall("P25")
@pytest.mark.parametrize("fsdp", [False, True], ids=["two-lines", "fsdp2"])
def test_a_users_collectives_on_the_default_group_do_not_interleave(ranks: RankPool, fsdp: bool) -> None:
    for weights in ranks(3, users_own_collectives, fsdp):
        assert_equal_weights(weights, reference_weights(2))


def half_worlds(rank: int, world: int, both: bool) -> dict[str, Tensor] | None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("job", "shard"))["shard"]
    job, place = divmod(rank, 2)
    if job == 1 and not both:
        return None  # takes part in nothing
    model = build(seed=100 * job + place, layers=2 + job)
    dmuon.dedicate_params(model, mesh, costs="flops")
    for block in model.blocks:
        dmuon.fully_shard(block, mesh=mesh)
    dmuon.fully_shard(model, mesh=mesh)
    with dmuon.summon_full_params(model):
        assert model.blocks[0].mix.weight.shape == (13, 13)
    return train(model, place, 2)


@pytest.mark.pitfall("P24", "P25")
@pytest.mark.parametrize("both", [True, False], ids=["two jobs", "one job"])
def test_meshes_over_parts_of_the_world_do_not_involve_the_rest(ranks: RankPool, both: bool) -> None:
    results = ranks(4, half_worlds, both)
    for rank, weights in enumerate(results):
        if rank >= 2 and not both:
            assert weights is None
            continue
        job = rank // 2
        assert_equal_weights(weights, reference_weights(2, seed=100 * job, layers=2 + job))


# -- explain ------------------------------------------------------------------------------------------------------


def explained(rank: int, world: int) -> tuple[str, dict[str, int], str]:
    model = build()
    mesh = init_device_mesh("cpu", (world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    plan = dmuon.dedicate_params(model, mesh, costs="flops", mp_policy=policy)
    optimizer = dmuon.Muon(model)
    before = dmuon.explain(model, optimizer)
    assert "0 matrices orthogonalized" in before and "no step yet" in before
    for block in model.blocks:
        dmuon.fully_shard(block, mesh=mesh, mp_policy=policy)
    dmuon.fully_shard(model, mesh=mesh, mp_policy=policy)
    assert "sharded by FSDP2 in 4 modules" in dmuon.explain(model)
    optimizer = dmuon.Muon(model)
    loss_of(model, *shard(batch(0), rank, world)).backward()
    optimizer.step()
    with pytest.raises(TypeError, match=r"optimizer must be a dmuon\.Muon, got SGD"):
        dmuon.explain(model, torch.optim.SGD(model.parameters()))
    return dmuon.explain(model, optimizer), plan.owners, plan.digest


@pytest.mark.pitfall("P01", "P02", "P03", "P20")
def test_explain_shows_every_parameter_its_route_and_the_balance(ranks: RankPool) -> None:
    results = ranks(2, explained)
    sizes = {n: p.numel() for n, p in build().named_parameters()}
    for rank, (text, owners, digest) in enumerate(results):
        muon, _, rest = text.partition("on AdamW")
        for name in sizes:
            [line] = [line for line in text.splitlines() if line.split()[:1] == [name]]
            assert (line in muon) == is_matrix(name), f"{name} is in the wrong table"
            if is_matrix(name):
                cells = line.split()
                assert cells[2] == ".".join(name.split(".")[:2]) and int(cells[3]) == owners[name]
                assert line.endswith("matrix inside a block")
            else:
                reasons = {"embed.weight": "embedding embed", "head.weight": "outside blocks"}
                assert line.endswith(reasons.get(name, "1-D"))
        elements = sum(size for name, size in sizes.items() if is_matrix(name))
        assert f"Muon: 9 matrices, {elements:,} elements" in rest
        assert f"AdamW: {len(sizes) - 9} parameters, {sum(sizes.values()) - elements:,} elements" in rest
        assert "forward in torch.bfloat16, masters in torch.float32, gradients reduced in torch.float32" in rest
        assert digest in text and "makespan" in text and "bound" in text
        for owner in range(2):
            held = sum(o == owner for o in owners.values())
            [row] = [line.split() for line in rest.splitlines() if line.split()[:1] == [str(owner)]]
            assert int(row[-2]) == held, "matrices per rank"
        mine = sum(o == rank for o in owners.values())
        assert f"{mine} matrices orthogonalized" in text


# -- summon -------------------------------------------------------------------------------------------------------


def summoned(rank: int, world: int, keep: bool, fsdp: bool) -> dict[str, Any]:
    model = build()
    mesh = init_device_mesh("cpu", (world,))
    dmuon.dedicate_params(model, mesh, costs="flops", reshard_after_forward=not keep)
    if fsdp:
        for block in model.blocks:
            dmuon.fully_shard(block, mesh=mesh, reshard_after_forward=not keep)
        dmuon.fully_shard(model, mesh=mesh)
    tokens = batch(0)[0]
    model(tokens)  # leaves weights in the buffers where they are kept

    def owned() -> dict[str, Tensor]:
        return {n: p.detach().clone() for n, p in model.named_parameters() if is_matrix(n)}

    found: dict[str, Any] = {}
    resting = dict(model.named_parameters())
    with dmuon.summon_full_params(model):
        found["read"] = owned()
        model.blocks[0].mix.weight.data.mul_(2)
        with torch.no_grad():
            model.blocks[1].up.weight.zero_()
        model.blocks[2].down.weight.data = torch.ones_like(model.blocks[2].down.weight)
        model.blocks[2].mix.weight = nn.Parameter(torch.eye(13))
    assert all(resting[n] is p for n, p in model.named_parameters()), "the same resting parameters as before"
    found["edited"] = model(tokens).detach()

    with dmuon.summon_full_params(model, writeback=False):
        model.blocks[0].mix.weight.data.zero_()
    with pytest.raises(KeyError, match="mine"), dmuon.summon_full_params(model):
        model.blocks[0].mix.weight.data.zero_()
        raise KeyError("mine")
    with dmuon.summon_full_params(model):
        for use, match in (
            (lambda: model.blocks[0](torch.ones(1, 13)), "forward or backward of block .*inside summon_full_params"),
            (lambda: dmuon.summon_full_params(model).__enter__(), "inside summon_full_params"),
        ):
            with pytest.raises(RuntimeError, match=match):
                use()
    with (
        pytest.raises(RuntimeError, match=r"'blocks\.0\.mix\.weight'.*was replaced by shape"),
        dmuon.summon_full_params(model),
    ):
        model.blocks[0].mix.weight = nn.Parameter(torch.ones(2, 2))
    found["unchanged"] = model(tokens).detach()
    with pytest.raises(RuntimeError, match="is FORWARD"):
        model.blocks[1].mix.register_forward_hook(lambda *_: dmuon.summon_full_params(model).__enter__())
        model(tokens)
    return found


@pytest.mark.pitfall("P17", "P28", "P54")
@pytest.mark.parametrize(("keep", "fsdp"), [(False, True), (True, False)], ids=["reshard-fsdp2", "keep-two-lines"])
def test_summoned_weights_are_whole_and_edits_reach_the_next_forward(ranks: RankPool, keep: bool, fsdp: bool) -> None:
    model = build()
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        model.blocks[0].mix.weight.mul_(2)
        model.blocks[1].up.weight.zero_()
        model.blocks[2].down.weight.fill_(1)
        model.blocks[2].mix.weight.copy_(torch.eye(13))
        expected = model(batch(0)[0])
    for found in ranks(2, summoned, keep, fsdp):
        assert found["read"].keys() == set(NAMES)
        for name, tensor in found["read"].items():
            assert torch.equal(tensor, start[name]), name
        torch.testing.assert_close(found["edited"], expected)
        torch.testing.assert_close(found["unchanged"], expected)


def summoned_in_half(rank: int, world: int, own_dtype: bool) -> dict[str, Tensor]:
    model = build()
    policy = None if own_dtype else MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    dmuon.dedicate_params(model, init_device_mesh("cpu", (world,)), costs="flops", mp_policy=policy)
    if not own_dtype:
        for block in model.blocks:
            block.register_forward_pre_hook(lambda m, args: (args[0].to(torch.bfloat16),))
            block.norm.to(torch.bfloat16)
            block.up.bias.data, block.down.bias.data = (
                b.data.to(torch.bfloat16) for b in (block.up.bias, block.down.bias)
            )
        model.norm.to(torch.bfloat16)
        model.head.to(torch.bfloat16)
        model(batch(0)[0])
    with dmuon.summon_full_params(model):
        weight = model.blocks[0].mix.weight
        assert weight.dtype == torch.float32
        weight.data.add_(1e-6)
    with dmuon.summon_full_params(model, writeback=False):
        return {n: p.detach().clone() for n, p in model.named_parameters() if is_matrix(n)}


@pytest.mark.pitfall("P42")
@pytest.mark.parametrize("own_dtype", [False, True], ids=["bf16 policy", "fp32"])
def test_summoning_keeps_fp32_precision(ranks: RankPool, own_dtype: bool) -> None:
    start = {n: p.detach() for n, p in build().named_parameters()}
    for found in ranks(2, summoned_in_half, own_dtype):
        for name, tensor in found.items():
            wanted = start[name] + 1e-6 if name == "blocks.0.mix.weight" else start[name]
            assert torch.equal(tensor, wanted), name
