"""Weights in half precision: masters, wherever the weights lie, against one process in fp64; stochastic rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from harness import checkpoints
from harness.assertions import assert_close, assert_equal_weights, assert_same_tensors
from harness.dtensors import give, noise, whole
from harness.hand_laid import SPLITS, Weights
from harness.network import is_matrix, loss_of
from harness.on_ranks import assert_same_over_ranks, on_ranks, slowly
from harness.paper import Paper, trained_by
from harness.pool import RankPool
from harness.topologies import LAYOUTS, lay
from harness.toy import DECAY, OPTIONS, batch, build
from harness.trees import linear, node
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

import dmuon
from dmuon import create_dtensor_config

STEPS = 3
HALF = torch.bfloat16
MASTERS: dict[str, Any] = {"master_weights": True}
ROUNDED: dict[str, Any] = {"bf16_stochastic_round": True}


class HalfWeights(Weights):
    """In bf16, and so are gradients; the twin begins as they do, and goes on in fp64."""

    def add(self, seed: int, shape: Any, part: Callable[[Tensor], Tensor] = torch.clone, *args: Any) -> nn.Parameter:
        added = super().add(seed, shape, lambda value: part(value.to(HALF)), *args)
        for param in self.twin.params[-1]:
            param.data = param.data.to(HALF).double()
        return added

    def give(self, scale: float = 1.0) -> list[Tensor | None]:
        grads = [noise(1000 * (self.steps + 1) + seed, *shape).to(HALF) for seed, shape, _ in self.laid]
        for param, grad, (_, _, part) in zip(self.params, grads, self.laid, strict=True):
            if isinstance(param, DTensor):
                give(param, grad)
            else:
                param.grad = part(grad)
        return [grad.double() for grad in grads]

    def check(self, optimizer: dmuon.Muon | None = None) -> None:
        assert optimizer is not None
        expected = self.twin.weights()
        for i, param in enumerate(self.params):
            master = optimizer.state[param]["master_weight"]
            assert master.dtype == torch.float32 and master.shape == param.shape
            assert not isinstance(param, DTensor) or master.placements == param.placements
            self.check_one(master, i, expected[i], "master", 1e-5)
            assert torch.equal(whole(param), whole(master).to(HALF)), "rounded to the nearest"


FAMILY: dict[str, dict[str, Any]] = {
    "muon": {},
    "hyperball": {"weight_decay_mode": "hyperball"},
    "normuon": {"second_moment": "row", "second_moment_beta": 0.9},
}
ANY = [(2, "hyperball", "owner"), (2, "muon", "sharded"), (2, "muon", "functions")]
LATER = [(2, "normuon", "owner"), (4, "muon", "owner")]


@pytest.mark.parametrize(("world", "member", "strategy"), [*ANY, *slowly(*LATER)])
@on_ranks()
def test_masters_of_any_matrices_on_any_placements(rank: int, world: int, member: str, strategy: str) -> None:
    """By any strategy, or by functions of the user's own: then on some placements."""
    weights = HalfWeights(twin=Paper(0.02, DECAY, **FAMILY[member]))
    some = slice(None, None, 3 if world == 4 else 1 if strategy == "owner" else 2)
    weights.shard_everywhere(world, ((split.shape, split) for split in SPLITS), some)
    config, options = create_dtensor_config(costs="flops"), {**FAMILY[member], "strategy": strategy}
    if strategy == "functions":
        config, options = checkpoints.by_functions(), {}
    optimizer = weights.optimizer(config, **options, **MASTERS)
    weights.train(optimizer, STEPS)
    weights.check(optimizer)


def gradients(named: Iterable[tuple[str, Tensor]], step: int) -> dict[str, Tensor]:
    """Whole ones, by name."""
    return {name: noise(100 * step + i, *param.shape).to(HALF) for i, (name, param) in enumerate(named)}


def in_one_process(steps: int) -> dict[str, Tensor]:
    """The masters of the toy in fp32."""
    model = build().to(HALF).float()
    named = dict(model.named_parameters())

    def backward(step: int) -> None:
        for name, grad in gradients(named.items(), step).items():
            named[name].grad = grad.float()

    return trained_by(Paper(), model, backward, steps)


PLACES = ("fsdp2-2", "tp-alone", "1d")


@pytest.mark.parametrize(
    ("layout", "strategy"),
    [
        *product(PLACES, ["owner"]),
        ("fsdp2-2", "fused"),
        *slowly(("cp-mesh", "owner")),
    ],
)
@on_ranks("layout")
def test_masters_of_models_as_users_lay_them_out(rank: int, world: int, layout: str, strategy: str) -> None:
    """Of a dedicated model the matrices have none in the state, and no gradients here."""
    model = build().to(HALF)
    optimizer = lay(layout, model).optimizer(**MASTERS, strategy=strategy)
    named = dict(model.named_parameters())
    owned = dmuon.owned_parameters(model) if LAYOUTS[layout].dedicated else set()
    for step in range(STEPS):
        for name, grad in gradients(named.items(), step).items():
            if named[name] not in owned:
                give(named[name], grad)
        optimizer.step()
    optimizer.flush()
    expected, found = in_one_process(STEPS), {}
    for name, param in named.items():
        assert ("master_weight" in optimizer.state[param]) == (param not in owned)
        if param not in owned:
            master = found[name] = whole(optimizer.state[param]["master_weight"])
            assert torch.equal(whole(param), master.to(HALF))
            assert all(
                optimizer.state[param].get(key, master).dtype == torch.float32 for key in ("exp_avg", "exp_avg_sq")
            )
    assert_equal_weights(found, {name: expected[name] for name in found}, 1e-5)
    assert_same_over_ranks(found)


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("experts on 3, bf16", "copies on 2, bf16"),
        ("rows on 2, bf16", "experts on 3, bf16"),
    ],
)
def test_masters_go_on_anywhere(ranks: RankPool, tmp_path: Path, source: str, target: str) -> None:
    ranks(checkpoints.world_of(source), checkpoints.save_after_steps, str(tmp_path), source, False, MASTERS)
    ranks(checkpoints.world_of(target), goes_on, str(tmp_path), target)


def goes_on(rank: int, world: int, path: str, name: str) -> None:
    run = checkpoints.resumed(path, name, MASTERS)
    twin = Paper()
    for value in checkpoints.Experts.noise(99):
        twin.add((1.0 + value.to(HALF)).to(HALF))
    for step in range(checkpoints.TOTAL):
        twin.step([grad.to(HALF) for grad in checkpoints.Experts.noise(step)])
    for param, expected in zip(run.model.weights, twin.weights(), strict=True):
        master = whole(run.optimizer.state[param]["master_weight"])
        assert_close(master, expected.reshape(master.shape).float(), "master", 1e-5)
        assert torch.equal(whole(param), master.to(HALF))


@pytest.mark.parametrize(
    ("layout", "options"),  # what dmuon owns has masters
    [*product(["fsdp2-2"], (MASTERS, ROUNDED)), ("1d", MASTERS)],
)
@on_ranks("layout")
def test_a_restart_goes_on_with_the_same_bits(
    rank: int, world: int, layout: str, options: dict[str, Any], tmp_path: Path
) -> None:
    run = checkpoints.start(f"{layout}, bf16", member=options)
    run.train(range(checkpoints.SAVED))
    checkpoints.save(run, str(tmp_path))
    run.train(range(checkpoints.SAVED, checkpoints.TOTAL))
    again = checkpoints.resumed(str(tmp_path), f"{layout}, bf16", options)
    assert_same_tensors(again.local_tensors(), run.local_tensors())


def test_states_with_and_without_masters_load_into_each_other() -> None:
    plain, kept = (dmuon.Muon(build().to(HALF), **OPTIONS, master_weights=masters) for masters in (False, True))
    for optimizer in (plain, kept):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        optimizer.step()
    saved = kept.state_dict(), plain.state_dict()
    for optimizer, state in zip((plain, kept), saved, strict=True):
        optimizer.load_state_dict(state)
    for group in plain.param_groups:
        assert not any("master_weight" in plain.state[param] for param in group["params"])
        assert all(plain.state[p]["exp_avg"].dtype == HALF for p in group["params"] if not group["use_muon"])
    for param in (param for group in kept.param_groups for param in group["params"]):
        assert torch.equal(kept.state[param]["master_weight"], param.float()), "they begin as the weights"
    deepcopy(kept.state_dict())  # which torch refuses of what has a history
    kept.step()


# -- edits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_muon", [True, False])
def test_a_weight_that_somebody_changes_counts(use_muon: bool) -> None:
    """Where it is changed; elsewhere masters stay."""
    param = nn.Parameter(noise(0, 6, 4).to(HALF))
    optimizer = dmuon.Muon([{"params": [param], "use_muon": use_muon}], lr=0.0, weight_decay=0.0, **MASTERS)
    optimizer.state[param]["master_weight"] += 1e-4
    master = optimizer.state[param]["master_weight"].clone()
    with torch.no_grad():
        param.copy_(master)
        param[2] *= 3
        param[3, 1] = float("nan")
    expected = master.clone()
    expected[2], expected[3] = param[2].float(), torch.where(param[3].isnan(), param[3].float(), master[3])
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert torch.equal(optimizer.state[param]["master_weight"].nan_to_num(7), expected.nan_to_num(7))
    optimizer.state[param].pop("master_weight")
    optimizer.step()
    assert torch.equal(optimizer.state[param]["master_weight"].nan_to_num(7), param.float().nan_to_num(7))


# -- refusals ----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_masters_of_flat_shards_are_refused(rank: int, world: int) -> None:
    model = FullyShardedDataParallel(build().to(HALF), use_orig_params=True, device_id=torch.device("cpu"))
    for options in (MASTERS, ROUNDED):
        with pytest.raises(ValueError, match=r"for parameter '.* use its MixedPrecision, which keeps fp32 shards"):
            dmuon.Muon(model, **options)


@on_ranks(2)
def test_stochastic_rounding_of_what_has_masters_is_refused(rank: int, world: int) -> None:
    model = build().to(HALF)
    lay("1d-two-lines", model)
    with pytest.raises(
        ValueError, match=r"parameter 'blocks.0.mix.weight', of which its owner has an fp32 master: leave"
    ):
        dmuon.Muon(model, **ROUNDED)
    groups = dmuon.param_groups(model)
    for group in groups:
        group["bf16_stochastic_round"] = not group["use_muon"]
    optimizer = dmuon.Muon(groups, **OPTIONS)
    loss_of(model, *batch(0)).backward()
    optimizer.step()
    assert_same_over_ranks({name: p.detach() for name, p in model.named_parameters() if p.dtype == HALF})


def test_qk_clip_scales_masters() -> None:
    found = []
    for dtype in (HALF, torch.float32):
        torch.manual_seed(0)
        model = nn.Sequential(node(q_proj=linear(8, 8), k_proj=linear(8, 8))).to(HALF).to(dtype)
        clip = dmuon.QKClip(model, threshold=1.0, heads={"0": dmuon.AttentionHeads("q_proj", "k_proj", 2, 2)})
        groups = [{"params": list(model.parameters()), "use_muon": True}]
        optimizer = dmuon.Muon(groups, lr=1e-3, qk_clip=clip, master_weights=dtype == HALF)
        for step in range(STEPS):
            for i, param in enumerate(model.parameters()):
                param.grad = noise(10 * step + i, 8, 8).to(HALF).to(dtype) if step < 2 else None
            clip.report("0", torch.tensor([2.0, 0.5]))
            optimizer.step()
        for param in model.parameters():
            found.append(param.detach() if dtype == torch.float32 else optimizer.state[param]["master_weight"])
            assert dtype == torch.float32 or torch.equal(param, found[-1].to(HALF))
    for master, weight in zip(found[:2], found[2:], strict=True):
        assert_close(master, weight, "master", 1e-6)


# -- stochastic rounding -----------------------------------------------------------------------------------------------


def updated(use_muon: bool, times: int, shape: tuple[int, ...] = (40, 24), lr: float = 2e-3) -> tuple[Tensor, Tensor]:
    """What the same update makes of the same weights in bf16, many times, ``(times, …)``; and in fp32."""
    start, grad = 1.5 + 0.2 * noise(3, *shape).to(HALF), noise(4, *shape).to(HALF)
    found = []
    for dtype in (torch.float32, HALF):
        param = nn.Parameter(start.to(dtype, copy=True))
        groups = [{"params": [param], "use_muon": use_muon}]
        optimizer = dmuon.Muon(groups, lr=lr, bf16_stochastic_round=dtype == HALF)
        fresh = deepcopy(optimizer.state_dict()["state"])
        for _ in range(times if dtype == HALF else 1):
            optimizer.load_state_dict({**optimizer.state_dict(), "state": fresh})
            with torch.no_grad():
                param.copy_(start)
            param.grad = grad.to(dtype)
            optimizer.step()
            found.append(param.detach().double())
    return torch.stack(found[1:]), found[0]


@pytest.mark.parametrize("use_muon", [True, False])
def test_rounding_up_or_down_has_the_right_mean(use_muon: bool) -> None:
    times = 400
    found, exact = updated(use_muon, times)
    low, high = found.amin(0), found.amax(0)
    gap = 2.0 ** (exact.abs().log2().floor() - 7)
    assert ((found - exact).abs() < gap).all(), "one of the two neighbours"
    assert ((high - low) <= gap).all()
    part = ((exact - (exact / gap).floor() * gap) / gap).clamp(0, 1)
    error = (found.mean(0) - exact) / gap
    deviation = (part * (1 - part) / times).sqrt() + 1e-4
    assert (error.abs() <= 5 * deviation).all()
    assert 0.9 <= float((error / deviation)[part * (1 - part) > 0.01].square().mean()) <= 1.1, (
        "independent of each other"
    )
    assert abs(float(error.mean())) <= 4 / (12 * times * exact.numel()) ** 0.5
    single = found[0] - exact
    assert float(torch.linalg.matrix_norm(single, 2)) <= 1.2 * float(single.std()) * (40**0.5 + 24**0.5), "no pattern"


@pytest.mark.parametrize("layout", ["fsdp2-2", "ddp"])
@on_ranks("layout")
def test_rounding_is_the_same_on_every_topology(rank: int, world: int, layout: str) -> None:
    """AdamW's part to the bit. Updates of matrices may differ by how many are multiplied at once."""
    weights = []
    for laid in (None, lay(layout, build().to(HALF))):
        model = build().to(HALF) if laid is None else laid.network
        optimizer = dmuon.Muon(model, **OPTIONS, **ROUNDED) if laid is None else laid.optimizer(**ROUNDED)
        for step in range(STEPS):
            named = dict(model.named_parameters())
            for name, grad in gradients(named.items(), step).items():
                give(named[name], grad)
            optimizer.step()
        weights.append({name: whole(param) for name, param in model.named_parameters()})
    assert_same_over_ranks(weights[1])
    for name, alone in weights[0].items():
        differing = float((alone != weights[1][name]).double().mean())
        assert differing == 0.0 if not is_matrix(name) else differing < 0.005, name
