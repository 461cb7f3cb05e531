"""Models in ``FullyShardedDataParallel`` (FSDP1), whose shards are pieces of flat tensors: training and state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from harness.assertions import about, assert_equal_weights
from harness.fused import LAYERS, FusedModel, by_spec, fused_loss, fused_reference
from harness.hand_laid import SPLITS
from harness.network import Block, Network, loss_of, shard
from harness.on_ranks import assert_same_over_ranks, on_ranks, over_ranks
from harness.oracle import reference_weights
from harness.pool import RankPool
from harness.topologies import orthogonalized
from harness.toy import CPU, OPTIONS, batch, build, take_steps, train
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullOptimStateDictConfig, MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import dmuon
from dmuon import create_dtensor_config, create_processgroup_config

BLOCKS = ModuleWrapPolicy({Block})


def wrapped(model: nn.Module, strategy: str = "FULL_SHARD", **options: Any) -> FSDP:
    return FSDP(model, use_orig_params=True, sharding_strategy=ShardingStrategy[strategy], device_id=CPU, **options)


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Weights on every rank. Collective."""
    with FSDP.summon_full_params(model, writeback=False):
        pairs = model.named_parameters(remove_duplicate=False)
        named = {name.replace("_fsdp_wrapped_module.", ""): p for name, p in pairs}
        return {name: p.detach().clone() for name, p in named.items()}


# -- training -------------------------------------------------------------------------------------------------------


def copies_and_shards(world: int) -> dict[str, Any]:
    return {"device_mesh": init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))}


def groups_across(_world: int) -> dict[str, Any]:
    """Shards on ranks 0 and 2, 1 and 3."""
    shards, copies = [dist.new_group([i, i + 2]) for i in (0, 1)], [dist.new_group([i, i + 1]) for i in (0, 2)]
    return {"process_group": (shards[dist.get_rank() % 2], copies[dist.get_rank() // 2])}


def of_world(_world: int) -> dict[str, Any]:
    return {}


CASES: list[tuple[str, Callable[[int], dict[str, Any]], bool]] = [  # strategy, groups, each block on its own
    ("FULL_SHARD", of_world, True),
    ("FULL_SHARD", of_world, False),
    ("SHARD_GRAD_OP", of_world, True),
    ("NO_SHARD", of_world, True),
    ("HYBRID_SHARD", copies_and_shards, True),
    ("_HYBRID_SHARD_ZERO2", groups_across, False),
]


@pytest.mark.parametrize("world", [3, 4])
@on_ranks(timeout=180)
def test_every_strategy_equals_one_process(rank: int, world: int) -> None:
    for strategy, groups, nested in CASES[4:] if world == 4 else CASES[:4]:
        policy = {"auto_wrap_policy": BLOCKS} if nested else {}
        model = wrapped(build(tied=not nested), strategy, **policy, **groups(world))
        optimizer = dmuon.Muon(model, **OPTIONS)

        def backward(step: int, model: nn.Module = model) -> None:
            loss_of(model, *shard(batch(step), rank, world)).backward()

        calls, weights = orthogonalized(optimizer, backward, 2), whole(model)
        assert_equal_weights(weights, reference_weights(2, tied=not nested))
        assert_same_over_ranks(weights)
        assert [over_ranks(of_step) for of_step in calls] == [9] * 2, (strategy, nested)
        shapes = {p.shape == optimizer.state[p]["momentum_buffer"].shape for p in optimizer.param_groups[0]["params"]}
        assert shapes == {True}


EACH = ModuleWrapPolicy({Block, nn.Linear})  # units within units, and some that hold nothing themselves


def frozen() -> Network:
    """A whole block, one matrix of another, and a table."""
    model = build()
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(("blocks.0.", "blocks.1.mix", "embed")))
    return model


def nothing(_model: nn.Module, _step: int) -> None:
    pass


def clipped(model: nn.Module, step: int) -> None:
    """In the last step nobody has a gradient of one matrix."""
    if isinstance(model, FSDP):
        model.clip_grad_norm_(0.1)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for name, param in model.named_parameters():
        if step == 2 and name.replace("_fsdp_wrapped_module.", "") == "blocks.0.up.weight":
            param.grad = None


def thawed(model: nn.Module, step: int) -> None:
    """One matrix is trained from the second step on."""
    for name, param in model.named_parameters():
        if name.replace("_fsdp_wrapped_module.", "") == "blocks.1.up.weight":
            param.requires_grad_(step >= 1)


Change = Callable[[nn.Module, int], None]
# A network, what happens before a forward and before a step, and how it is wrapped.
PROGRAMS: dict[str, tuple[Callable[[], Network], Change, Change, dict[str, Any]]] = {
    "frozen, in one flat tensor": (frozen, nothing, nothing, {}),
    "trained later": (build, thawed, nothing, {"auto_wrap_policy": BLOCKS}),
    "clipped": (build, nothing, clipped, {"auto_wrap_policy": EACH}),
}


@on_ranks(2, timeout=180)
def test_frozen_nested_and_accumulated_equal_one_process(rank: int, world: int) -> None:
    for program, (network, change, finish, options) in PROGRAMS.items():
        plain, model = network(), wrapped(network(), **options)
        reference, optimizer = (dmuon.Muon(dmuon.param_groups(m), **OPTIONS) for m in (plain, model))
        for step in range(3):
            for one, owner, parts in ((plain, reference, (0, 1)), (model, optimizer, (rank, world))):
                change(one, step)
                owner.zero_grad()
                with one.no_sync() if isinstance(one, FSDP) and step != 1 else torch.enable_grad():
                    (0.5 * loss_of(one, *shard(batch(2 * step), *parts))).backward()
                (0.5 * loss_of(one, *shard(batch(2 * step + 1), *parts))).backward()
                finish(one, step)
                owner.step()
        with about(program):
            assert_equal_weights(whole(model), dict(plain.named_parameters()))


@on_ranks(2)
def test_mixed_precision_trains_as_autocast(rank: int, world: int) -> None:
    """Gradients may stay in half precision."""
    for keeps in (False, True):
        precision = MixedPrecision(torch.bfloat16, None if keeps else torch.float32, keep_low_precision_grads=keeps)
        model = wrapped(build(), auto_wrap_policy=BLOCKS, mixed_precision=precision)
        train(model, dmuon.Muon(model, **OPTIONS), range(3), rank, world)
        start, exact = dict(build().named_parameters()), reference_weights(3)
        for name, weight in whole(model).items():
            assert weight.dtype == torch.float32
            if name.startswith("blocks") and weight.ndim == 2:
                assert (weight - exact[name]).norm() <= 0.3 * (exact[name] - start[name]).norm(), name


# -- what matrices a tensor is made of ------------------------------------------------------------------------------


@on_ranks(3)
def test_fused_tensors_kernels_and_stacks_are_cut_anywhere(rank: int, world: int) -> None:
    splits = SPLITS[::2]
    model = wrapped(FusedModel(splits))
    optimizer = dmuon.Muon(model, select=by_spec(splits), **OPTIONS)
    take_steps(optimizer, lambda step: fused_loss(model, step, rank, world), range(2))
    shapes = [shape for split in splits for shape in split.spec.matrices(split.shape)]
    assert over_ranks(optimizer.last_step.ns_matrices) == LAYERS * len(shapes)
    assert "sharded as one row (FSDP1) on ranks" in dmuon.explain(model, optimizer)
    assert_equal_weights(whole(model), fused_reference(2, splits))


# -- configurations -------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_generated_configurations_take_it(rank: int, world: int) -> None:
    for config in (create_processgroup_config(fsdp_pg=dist.group.WORLD), create_dtensor_config()):
        model = wrapped(build(), auto_wrap_policy=BLOCKS)
        optimizer = dmuon.Muon(model, distributed_config=config, **OPTIONS)
        train(model, optimizer, range(2), rank, world)
        assert_equal_weights(whole(model), reference_weights(2))


# -- state ----------------------------------------------------------------------------------------------------------

FULL = StateDictOptions(full_state_dict=True)


def resumed(rank: int, world: int, kind: str, path: Path, steps: tuple[int, ...], load: bool) -> dict[str, Tensor]:
    """Train some steps after what ``path`` holds, and save it there."""
    mesh = {"device_mesh": init_device_mesh("cpu", (world,))} if kind == "sharded" else {}
    model = wrapped(build(seed=int(load)), auto_wrap_policy=BLOCKS, **mesh)
    optimizer = dmuon.Muon(model, **OPTIONS)
    if load and kind == "fsdp":
        saved = torch.load(path / "fsdp.pt", weights_only=False)
        set_model_state_dict(model, saved["model"], options=FULL)
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, saved["optimizer"]))
    elif load:
        state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=path / "sharded")
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    train(model, optimizer, steps, rank, world)
    if kind == "fsdp":
        # On a CPU, where offloading to the CPU copies nothing, torch would return one state under all names.
        config = FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=False)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, optim_state_dict_config=config):
            moments = FSDP.optim_state_dict(model, optimizer)
        state = {"model": get_model_state_dict(model, options=FULL), "optimizer": moments}
        if rank == 0:
            torch.save(state, path / "fsdp.pt")
    else:
        state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=path / "sharded")
    own = optimizer.state_dict()  # of this rank alone
    optimizer.load_state_dict(own)
    dist.barrier()
    return whole(model)


@pytest.mark.parametrize("kind", ["fsdp", "sharded"])
def test_checkpoints_continue_on_other_numbers_of_ranks(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    for number, world in enumerate((2, 3)):
        steps = (2 * number, 2 * number + 1)
        for weights in ranks(world, resumed, kind, tmp_path, steps, number > 0):
            assert_equal_weights(weights, reference_weights(2 * number + 2))


# -- refusals -------------------------------------------------------------------------------------------------------


def built_inside_summon() -> None:
    model = wrapped(build())
    with FSDP.summon_full_params(model):
        dmuon.Muon(model)


def stepped_inside_summon() -> None:
    model = wrapped(build())
    optimizer = dmuon.Muon(model)
    loss_of(model, *batch(0)).backward()
    with FSDP.summon_full_params(model, with_grads=True):
        optimizer.step()


def wrapped_later() -> None:
    model = build()
    optimizer = dmuon.Muon(model)
    model = wrapped(model)
    loss_of(model, *batch(0)).backward()
    optimizer.step()


def clipped_by_parts() -> None:
    model = wrapped(build())
    dmuon.Muon(model)
    loss_of(model, *batch(0)).backward()
    dmuon.clip_grad_norm_(model.parameters(), 1.0)


def with_option(name: str, value: str) -> None:
    dmuon.Muon(wrapped(build()), **{name: value})


def step_without_reduction() -> None:
    model = wrapped(build())
    optimizer = dmuon.Muon(model)
    with model.no_sync():
        loss_of(model, *batch(0)).backward()
    optimizer.step()


REFUSALS: list[tuple[Callable[[], None], type[Exception], str]] = [
    (
        lambda: dmuon.Muon(FSDP(build(), use_orig_params=False, device_id=CPU)),
        ValueError,
        "FSDP1.*use_orig_params=True",
    ),
    (built_inside_summon, ValueError, "outside of forward, backward and summon_full_params"),
    (stepped_inside_summon, ValueError, "outside of forward, backward and summon_full_params"),
    (wrapped_later, ValueError, "wrapped in .*FSDP1.* since the optimizer was built; build the optimizer after that"),
    (
        partial(with_option, "second_moment", "row"),
        ValueError,
        "second_moment for 'blocks.*, of which FSDP1 has a flat shard",
    ),
    (clipped_by_parts, ValueError, "call clip_grad_norm_ of the FSDP1 model itself"),
    (step_without_reduction, ValueError, "gradient of .* is "),
]


@on_ranks(2)
def test_what_cannot_be_is_refused(rank: int, world: int) -> None:
    for program, error, message in REFUSALS:
        with pytest.raises(error, match=message):
            program()
        dist.barrier()
