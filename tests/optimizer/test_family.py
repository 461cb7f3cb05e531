"""Members of Muon's family, wherever matrices lie, against one process that is written from their papers."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from harness import checkpoints
from harness.assertions import assert_equal_weights
from harness.dtensors import give, local_tensor, parameter
from harness.fused import FusedModel, by_spec, fused_loss, fused_reference, split_params
from harness.hand_laid import SPLITS, Split, Weights
from harness.network import full_state, is_matrix, loss_of
from harness.on_ranks import assert_same_over_ranks, on_ranks, slowly
from harness.paper import Paper, trained_by
from harness.pool import RankPool
from harness.topologies import LAYOUTS, lay
from harness.toy import CPU, DECAY, LR, OPTIONS, batch, build, take_steps, train
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import dmuon
from dmuon import MatrixSpec, create_dtensor_config

STEPS = 3


def polar(x: Tensor) -> Tensor:
    """The exact orthogonal factor; of small singular values nothing, of which rounding would make anything."""
    left, values, right = torch.linalg.svd(x, full_matrices=False)
    return left * (values > 1e-3 * values[:, :1]).to(x)[:, None] @ right


MEMBERS: dict[str, dict[str, Any]] = {
    "independent": {"weight_decay_mode": "independent"},
    "l2": {"weight_decay_mode": "l2"},
    "cautious": {"weight_decay_mode": "cautious"},
    "rms": {"adjust_lr_fn": 0.3},
    "function": {"orthogonalize": polar},
    "normuon": {"second_moment": "row", "second_moment_beta": 0.9},
    "adamuon": {"second_moment": "element", "second_moment_beta": 0.9, "nesterov": False},
    "hyperball": {"weight_decay_mode": "hyperball"},
    "normuon on a sphere": {"weight_decay_mode": "hyperball", "second_moment": "row"},
    "bf16 momentum": {"momentum_dtype": torch.bfloat16},
}
# Gradients that ranks sum up in another order are at times rounded otherwise than in one process.
NEAR = {"bf16 momentum": 1e-4}
STATEFUL = ("normuon", "adamuon", "bf16 momentum")  # whose state is laid out by where matrices lie
PLACED = (*STATEFUL, "hyperball")  # that depend on where matrices lie


def in_turn(*places: str) -> list[tuple[str, str]]:
    """On each place half of the members that depend on it."""
    return [(place, member) for i, place in enumerate(places) for member in PLACED[i % 2 :: 2]]


def paper(member: str, lr: float = LR) -> Paper:
    return Paper(lr, DECAY, **MEMBERS.get(member, {}))


ALONE = [Split("one matrix", shape, MatrixSpec(), lambda w: [w]) for shape in ((8, 5), (6, 12), (4, 16))]  # for teams
BY_RANKS = [
    *product([2], ["owner"], [*PLACED, "l2"]),
    *product([2], ["sharded"], ["adamuon", "normuon on a sphere"]),
    *((2, way, member) for way, member in (("replicated", "normuon"), ("full_replication", "hyperball"))),
    *slowly(*product([4], ["owner", "sharded:2"], PLACED)),
]


@pytest.mark.parametrize(("world", "strategy", "member"), BY_RANKS)
@on_ranks()
def test_tensors_of_any_matrices_on_any_placements(rank: int, world: int, strategy: str, member: str) -> None:
    """DTensors of all splits: rows and columns, even and uneven, copies, and both dimensions at once.

    By rows alone where several ranks orthogonalize; of four ranks each member takes every fourth placement.
    """
    some = slice(1) if strategy != "owner" else slice(PLACED.index(member), None, 4) if world == 4 else slice(None)
    weights = Weights(twin=paper(member, 0.02))
    splits = ALONE if strategy == "sharded:2" else SPLITS
    weights.shard_everywhere(world, ((split.shape, split) for split in splits), some)
    optimizer = weights.optimizer(create_dtensor_config(costs="flops"), strategy=strategy, **MEMBERS[member])
    weights.train(optimizer, STEPS)
    weights.check(optimizer)


@on_ranks(2)
def test_slices_are_nothing_for_a_function_of_whole_matrices(rank: int, world: int) -> None:
    for strategy in ("sharded", "sharded:2", "auto"):
        weights = Weights()
        weights.shard(0, (6, 4), init_device_mesh("cpu", (world,)), [Shard(0)])
        with pytest.raises(ValueError, match=f"strategy='{strategy}' for .*, of which orthogonalize= wants whole"):
            weights.optimizer(create_dtensor_config(costs="flops"), strategy=strategy, orthogonalize=polar)


OWNED = [*product(["1d-3-two-lines"], ["normuon", "hyperball", "cautious", "function"]), *in_turn("tp")]


@pytest.mark.parametrize(("layout", "member"), [*OWNED, *slowly(*in_turn("ddp-2", "hsdp-two-lines"))])
@on_ranks("layout")
def test_tensors_of_any_matrices_that_dmuon_owns(rank: int, world: int, layout: str, member: str) -> None:
    mesh, model = LAYOUTS[layout].mesh(CPU), FusedModel()
    if layout == "tp":
        split_params(model, mesh["tp"])
        mesh = mesh["dp"]
    dmuon.dedicate_params(model, mesh, select=by_spec(), costs="flops")
    optimizer = dmuon.Muon(model, overlap_backward="shard" in (mesh.mesh_dim_names or ()), **OPTIONS, **MEMBERS[member])
    part = 0 if layout == "tp" else rank
    take_steps(optimizer, lambda step: fused_loss(model, step, part, mesh.size()), range(STEPS))
    found = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.state_dict().items()}
    expected = fused_reference(STEPS, twin=paper(member))
    assert_equal_weights({name: found[name] for name in expected}, expected, NEAR.get(member, 1e-5))


MULTIPLIERS = {"*.up.weight": 0.5, "blocks.0.*": 2.0, "embed.*": 3.0, "*.bias": 0.25}
LAID_OUT = [
    *product(["fsdp2-3"], ["adamuon", "independent", "rms", "normuon on a sphere"]),
    *in_turn("ddp"),
    *slowly(*in_turn("tp-alone", "1d-3", "fsdp2-tp", "cp-mesh")),
]


@pytest.mark.parametrize(("layout", "member"), [*LAID_OUT, *((n, "multiplied") for n in ("fsdp2-2", "1d"))])
@on_ranks("layout")
def test_models_as_users_lay_them_out(rank: int, world: int, layout: str, member: str) -> None:
    """Those of no member have learning rates that are multiplied by patterns of names."""
    laid, multipliers = lay(layout, build()), {} if member in MEMBERS else MULTIPLIERS
    optimizer = laid.optimizer(**MEMBERS.get(member, {}), lr_multipliers=multipliers or None)
    laid.train(optimizer, range(STEPS))
    weights = full_state(laid.network)
    assert_equal_weights(weights, trained(member, multipliers), NEAR.get(member, 1e-5))
    assert_same_over_ranks(weights)


def trained(member: str, multipliers: dict[str, float], steps: int = STEPS) -> dict[str, Tensor]:
    model = build()
    return trained_by(paper(member), model, lambda step: loss_of(model, *batch(step)).backward(), steps, multipliers)


# -- checkpoints ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "member"),
    [
        ("1d", "1d-3", "bf16 momentum"),
        ("fsdp2-2", "tp", "normuon"),
        *slowly(
            ("experts on 3", "rows on 2", "adamuon"),
            ("rows on 2", "experts alone", "bf16 momentum"),
            ("fsdp2-tp", "1d", "normuon"),
        ),
    ],
)
def test_state_goes_on_anywhere(ranks: RankPool, tmp_path: Path, source: str, target: str, member: str) -> None:
    path = str(tmp_path)
    ranks(checkpoints.world_of(source), checkpoints.save_after_steps, path, source, False, MEMBERS[member])
    ranks(checkpoints.world_of(target), resumes, path, target, member)


def resumes(rank: int, world: int, path: str, name: str, member: str) -> None:
    found = full_state(checkpoints.resumed(path, name, MEMBERS[member]).model)
    if name in checkpoints.PLACEMENTS:
        twin = paper(member)
        for value in checkpoints.Experts.noise(99):
            twin.add(1.0 + value)
        for step in range(checkpoints.TOTAL):
            twin.step(checkpoints.Experts.noise(step))
        shapes = checkpoints.Experts.SHAPES
        expected = {f"weights.{i}": t.reshape(shapes[i]) for i, t in enumerate(twin.weights())}
    else:
        expected = trained(member, {}, checkpoints.TOTAL)
    assert_equal_weights(found, expected, NEAR.get(member, 1e-5))


# -- learning rates ------------------------------------------------------------------------------------------------


def test_multipliers_stay_where_schedulers_and_checkpoints_change_rates() -> None:
    optimizer = dmuon.Muon(build(), **OPTIONS, lr_multipliers=MULTIPLIERS)
    found = {group["lr_multiplier"] for group in optimizer.param_groups}
    assert found == {1.0, 0.5, 2.0, 3.0, 0.25}
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1)
    optimizer.step()
    scheduler.step()
    assert {group["lr"] for group in optimizer.param_groups} == {0.1 * LR}
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        group["lr_multiplier"] *= 3
    optimizer.load_state_dict(saved)
    assert {group["lr_multiplier"] for group in optimizer.param_groups} == {3 * factor for factor in found}
    with pytest.raises(ValueError, match=r"has \d+ groups, this one 3; build it with the same groups"):
        dmuon.Muon(build(), **OPTIONS).load_state_dict(saved)


def test_groups_that_dcp_merges_or_divides_are_refused() -> None:
    """Of several saved groups it gives one the options of the last; of one saved group, the last of several."""
    model = build()
    plain, multiplied = (dmuon.Muon(model, **OPTIONS, lr_multipliers=some) for some in (None, MULTIPLIERS))
    with pytest.raises(ValueError, match=r"group 0 has lr_multiplier=\S+ in the saved optimizer, None in this one"):
        set_optimizer_state_dict(model, plain, get_optimizer_state_dict(model, multiplied))
    with pytest.raises(ValueError, match="group 0 has state but no options in the saved optimizer"):
        set_optimizer_state_dict(model, multiplied, get_optimizer_state_dict(model, plain))


# -- a function of one's own -----------------------------------------------------------------------------------------


def of_another_shape(x: Tensor) -> Tensor:
    return x.mT if x.shape[1] != x.shape[2] else x


def in_half(x: Tensor) -> Tensor:
    return x.bfloat16()


def nothing(x: Tensor) -> None:
    return None


def failing(x: Tensor) -> Tensor:
    raise ArithmeticError("no convergence")


WRONG = [
    (of_another_shape, ValueError, r"orthogonalize=of_another_shape returned a torch.float32 tensor of shape \(1, "),
    (in_half, ValueError, "orthogonalize=in_half returned a torch.bfloat16 tensor"),
    (nothing, TypeError, "orthogonalize=nothing returned NoneType; return a torch.float32 tensor of shape"),
    (failing, ArithmeticError, "no convergence"),
]


def failing_on_one_rank(x: Tensor) -> Tensor:
    return failing(x) if torch.distributed.get_rank() == 1 else x


@pytest.mark.parametrize("layout", ["fsdp2-2", "1d"])
@on_ranks("layout")
def test_a_function_that_returns_something_else_or_fails_changes_nothing(rank: int, world: int, layout: str) -> None:
    """On all ranks that share matrices: those that own none of a shape, or have no fault, hear of it."""
    # Nothing must be called before the step.
    cases = [(*of_function, {"overlap_backward": True}) for of_function in WRONG]
    if layout == "fsdp2-2":
        cases.append((failing_on_one_rank, ArithmeticError, "no convergence", {"strategy": "replicated"}))
    for function, kind, says, options in cases:
        laid = lay(layout, build())
        optimizer = laid.optimizer(orthogonalize=function, **options)
        laid.backward(0)
        before = full_state(laid.network)
        with pytest.raises((kind, RuntimeError), match=f"{says}|cannot take this step"):
            optimizer.step()
        assert_equal_weights(full_state(laid.network), before, 0.0)


@on_ranks(2)
def test_ranks_with_other_functions_are_told(rank: int, world: int) -> None:
    laid = lay("fsdp2-2", build())
    optimizer = laid.optimizer(orthogonalize=(polar, torch.clone)[rank])
    laid.backward(0)
    with pytest.raises(RuntimeError, match="orthogonalize of group 0"):
        optimizer.step()


def rate(shape: tuple[int, int]) -> float:
    return 0.2 * max(shape) ** 0.5


def test_functions_are_named_and_stay_with_the_optimizer() -> None:
    model = build()
    functions: dict[str, Any] = {"orthogonalize": polar, "adjust_lr_fn": rate}
    optimizer = dmuon.Muon(model, **OPTIONS, **functions)
    train(model, optimizer, [0])
    assert {*optimizer.last_step.variants.values()} == {"polar"}
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    for name, function in functions.items():
        assert saved["param_groups"][0][name] == f"function {function.__name__}", "no file holds a function"
        assert optimizer.param_groups[0][name] is function


# -- second moments of rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["row", "element"])
@on_ranks(2)
def test_one_number_for_each_output_or_element_is_state(rank: int, world: int, kind: str) -> None:
    laid, key = lay("fsdp2-2", build()), f"{kind}_second_moment"
    optimizer = laid.optimizer(second_moment=kind)
    laid.backward(0)
    optimizer.step()
    for name, param in laid.network.named_parameters():
        if is_matrix(name):
            found = optimizer.state[param][key]
            shape = (len(param), 1) if kind == "row" else param.shape
            assert found.shape == shape and found.placements == param.placements and found.full_tensor().any()
    saved = optimizer.state_dict()
    assert key in saved["state"][0]
    nbytes = sum(local_tensor(values[key]).nbytes for values in saved["state"].values() if key in values)
    assert f"{key} {nbytes / 2**20:.1f} MiB" in dmuon.explain(laid.network, optimizer)
    plain = laid.optimizer()
    says = f"group 0 has second_moment='{kind}' in the saved optimizer, None in this one"
    with pytest.raises(ValueError, match=says):
        plain.load_state_dict(saved)
    optimizer.load_state_dict(plain.state_dict() | {"param_groups": saved["param_groups"]})
    assert not optimizer.state[optimizer.param_groups[0]["params"][0]][key].any()
    optimizer.param_groups[0]["second_moment"] = None
    with pytest.raises((RuntimeError, ValueError), match="second_moment of group 0 was edited"):
        optimizer.step()


@on_ranks(2)
def test_a_rank_without_an_input_has_the_moments_of_all_rows(rank: int, world: int) -> None:
    """Of two ranks one has the only input, and both have a copy of one number for each output."""
    mesh, gradient = init_device_mesh("cpu", (world,)), torch.arange(1.0, 7.0).view(6, 1)
    moments = []
    for strategy in (None, "owner", "sharded", "replicated"):  # the first is of one rank
        param = parameter(torch.zeros(6, 1), mesh if strategy else None, [Shard(1)])
        options = {"strategy": strategy} if strategy else {}
        optimizer = dmuon.Muon([{"params": [param], "use_muon": True, "second_moment": "row", **options}])
        give(param, gradient)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
        moments.append(optimizer.state[param]["row_second_moment"])
    for found in moments[1:]:
        assert found.shape == (6, 1) and found.placements == (Replicate(),)
        torch.testing.assert_close(local_tensor(found), moments[0])


ON_SPHERE = {"weight_decay_mode": "hyperball"}


@on_ranks(2)
def test_matrices_that_only_a_users_functions_know_are_refused(rank: int, world: int) -> None:
    weights = Weights()
    weights.shard(0, (6, 4), init_device_mesh("cpu", (world,)), [Shard(0)])
    for options in ({"second_moment": "row"}, {"second_moment": "element"}, ON_SPHERE):
        with pytest.raises(ValueError, match="in a UserRound dmuon does not know where the rows"):
            weights.optimizer(checkpoints.by_functions(), **options)


# -- signs of momentum ---------------------------------------------------------------------------------------------


@on_ranks(2)
def test_signs_are_exact_where_parts_travel_in_half(rank: int, world: int) -> None:
    """In fp16, where norms of signs are joined before: as one process, which sends nothing."""
    options = {**OPTIONS, **MEMBERS["adamuon"], "ns_dtype": torch.float16}
    for momentum_dtype in (None, torch.bfloat16):
        laid, alone = lay("fsdp2-2", build()), build()
        optimizers = [laid.optimizer(**options, momentum_dtype=momentum_dtype)]
        optimizers.append(dmuon.Muon(alone, **options, momentum_dtype=momentum_dtype))
        laid.train(optimizers[0], range(STEPS))
        train(alone, optimizers[1], range(STEPS))
        assert_equal_weights(full_state(laid.network), dict(alone.state_dict()), 1e-3)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_signs_do_not_hide_what_is_not_finite(value: float) -> None:
    model = build()
    optimizer = dmuon.Muon(model, **MEMBERS["adamuon"])
    loss_of(model, *batch(0)).backward()
    model.blocks[1].up.weight.grad[0, 0] = value
    optimizer.step()
    assert optimizer.last_step.nonfinite == ("blocks.1.up.weight",)
    assert not model.blocks[1].up.weight.isfinite().any()


# -- weights of a constant norm --------------------------------------------------------------------------------------


def test_norms_stay_and_lr_is_the_part_of_them_that_a_step_takes() -> None:
    model = build()
    weights = {name: param for name, param in model.named_parameters() if is_matrix(name)}
    optimizer = dmuon.Muon(model, lr=0.02, **ON_SPHERE)
    for step in range(STEPS):
        before = {name: weight.detach().double() for name, weight in weights.items()}
        optimizer.zero_grad()
        loss_of(model, *batch(step)).backward()
        asked = optimizer.record_next_step()
        optimizer.step()
        for name, stats in asked.local().items():
            old, new = before[name], weights[name].detach().double()
            assert abs(float(new.norm() / old.norm()) - 1) < 1e-7
            assert float((new - old).norm() / old.norm()) == pytest.approx(stats.update_ratio, rel=1e-4)
            assert 0.5 < stats.update_ratio / 0.02 < 1.1 and stats.effective_lr == pytest.approx(0.02)
    optimizer.param_groups[0]["lr"] = 0.0
    last = [weight.detach().clone() for weight in weights.values()]
    optimizer.step()
    assert all(map(torch.equal, weights.values(), last))


@on_ranks(2)
def test_matrices_of_zeros_get_a_norm_by_their_first_step(rank: int, world: int) -> None:
    weights = Weights(twin=paper("hyperball", 0.02))
    for i, scale in enumerate((0.0, 1.0)):
        weights.shard(i, (6, 4), init_device_mesh("cpu", (world,)), [Shard(0)], scale=scale)
    optimizer = weights.optimizer(create_dtensor_config(costs="flops"), **ON_SPHERE)
    weights.train(optimizer, STEPS)
    weights.check(optimizer)


def test_an_edit_after_which_the_norm_of_weights_would_not_stay_is_refused() -> None:
    half = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer = dmuon.Muon([{"params": [half], "use_muon": True}])
    half.grad = torch.ones_like(half)
    optimizer.param_groups[0]["weight_decay_mode"] = "hyperball"
    with pytest.raises(ValueError, match="rounding would let their norm grow"):
        optimizer.step()
    assert half.eq(1).all()


# -- bytes -----------------------------------------------------------------------------------------------------------


def test_momentum_is_converted_by_a_load() -> None:
    wide, narrow = (dmuon.Muon(build(), **OPTIONS, momentum_dtype=dtype) for dtype in (None, torch.bfloat16))
    for param in wide.param_groups[0]["params"]:
        wide.state[param]["momentum_buffer"].copy_(torch.randn_like(param))
    saved = wide.state_dict()
    narrow.load_state_dict(saved)
    assert narrow.param_groups[0]["momentum_dtype"] is torch.bfloat16
    again = narrow.state_dict()
    for i, values in again["state"].items():
        if "momentum_buffer" in values:
            assert values["momentum_buffer"].dtype == torch.bfloat16
            assert torch.equal(values["momentum_buffer"], saved["state"][i]["momentum_buffer"].bfloat16())
    wide.load_state_dict(again)
    assert wide.param_groups[0].get("momentum_dtype") is None
    for i, values in wide.state_dict()["state"].items():
        if "momentum_buffer" in values:
            assert values["momentum_buffer"].dtype == torch.float32
            assert torch.equal(values["momentum_buffer"], again["state"][i]["momentum_buffer"].float())


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("flatten_optimizer_state_dict", {"momentum_dtype": torch.bfloat16}),
        ("flatten_optimizer_state_dict", {"orthogonalize": polar}),
        ("full_state_dict", {"adjust_lr_fn": lambda shape: 0.5}),
    ],
)
def test_torch_saves_options_that_are_no_numbers(form: str, options: dict[str, Any]) -> None:
    chosen = StateDictOptions(**{form: True})
    models = [build(), build()]
    optimizers = [dmuon.Muon(model, **{**OPTIONS, **options}) for model in models]
    train(models[0], optimizers[0], [7])
    saved = get_optimizer_state_dict(models[0], optimizers[0], options=chosen)
    models[1].load_state_dict(models[0].state_dict())
    set_optimizer_state_dict(models[1], optimizers[1], saved, options=chosen)
    name, value = next(iter(options.items()))
    assert optimizers[1].param_groups[0][name] == value
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, [7])
    assert_equal_weights(dict(models[1].state_dict()), dict(models[0].state_dict()))
