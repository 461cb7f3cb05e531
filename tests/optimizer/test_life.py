"""An optimizer as long as it lives: its model is wrapped, cut or replaced, a step is refused and repeated."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness.assertions import about, assert_equal_weights
from harness.checkpoints import start
from harness.dtensors import local_tensor
from harness.heard import heard
from harness.network import Network, full_state, is_matrix, loss_of, shard_blocks, tensor_parallel
from harness.on_ranks import on_ranks, over_ranks
from harness.oracle import reference_weights
from harness.toy import OPTIONS, batch, build, train
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import dmuon

# -- wrapped or cut at any step ------------------------------------------------------------------------------------


def by_fsdp(model: Network, mesh: DeviceMesh | None = None) -> nn.Module:
    shard_blocks(model, mesh or init_device_mesh("cpu", (2,)))
    return model


def by_tp(model: Network, mesh: DeviceMesh | None = None) -> Network:
    tensor_parallel(model, mesh or init_device_mesh("cpu", (2,)))
    return model


# By what a model is wrapped, and steps that the optimizer takes before; None: it is built later, of the inner model.
# And whether the optimizer is given groups.
WRAPS: list[tuple[Callable[[Network], nn.Module], int | None, bool]] = [
    (DistributedDataParallel, None, False),
    (DistributedDataParallel, 2, True),
    (replicate, 2, False),
]


@pytest.mark.pitfall("P76", "P88")
@pytest.mark.parametrize(("wrap", "before", "grouped"), WRAPS)
@on_ranks(2)
def test_a_model_that_is_wrapped_at_any_time_trains_on_and_each_matrix_has_one_owner(
    rank: int, world: int, wrap: Callable[[Network], nn.Module], before: int | None, grouped: bool
) -> None:
    """The optimizer may have been built before there were process groups. What was found is told once."""
    model = build(hidden=28)
    program = model if before is not None else wrap(model)
    with mock.patch.object(dist, "is_initialized", lambda: before is None):
        optimizer = dmuon.Muon(dmuon.param_groups(model) if grouped else model, **OPTIONS)
    with heard(logging.INFO) as told:
        train(program, optimizer, range(before or 0))
        program = program if before is None else wrap(model)
        train(program, optimizer, range(before or 0, 4), rank, world)
    assert_equal_weights(full_state(model), reference_weights(4, hidden=28))
    assert over_ranks(optimizer.last_step.ns_matrices) == len(optimizer.exchanged()) == 9, "no rank repeats another's"
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()} == {id(p) for p in optimizer.state}
    found = [text for text in told if "since it was built, 9 of its matrices were wrapped in Distributed" in text]
    assert wrap is replicate or len(found) == (rank == 0 and before is not None), told


@pytest.mark.pitfall("P88")
@on_ranks(2)
def test_a_model_that_is_cut_later_is_refused_by_name(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    cases: list[tuple[Network, Callable[[Network], nn.Module], str]] = [
        *((build(hidden=28), cut, after) for cut in (by_fsdp, by_tp) for after in ("nothing", "a step")),
        (by_tp(build(hidden=28), mesh["tp"]), partial(by_fsdp, mesh=mesh["dp"]), "tensor parallelism"),
    ]
    for model, cut, after in cases:
        optimizer = dmuon.Muon(model, **OPTIONS)
        if after == "a step":
            train(model, optimizer, [0])
        cut(model)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"'\S+' was cut by fully_shard.*build the optimizer after that"):
                train(model, optimizer, [1])


@pytest.mark.pitfall("P88")
@pytest.mark.parametrize("stale", [False, True])
def test_parameters_that_were_replaced_are_named(stale: bool) -> None:
    """With gradients left in those that the optimizer has, or none. A step without any gradient is none's fault."""
    model = build()
    optimizer = dmuon.Muon(model, **OPTIONS)
    train(model, optimizer, [0])
    if not stale:
        optimizer.zero_grad()
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loss_of(model, *batch(1)).backward()
    with pytest.raises(RuntimeError, match=r"'\S+' is no longer the one that its module holds.*build the opt"):
        optimizer.step()
    assert_equal_weights(dict(model.state_dict()), before, 0.0)
    again = dmuon.Muon(model, **OPTIONS)
    again.zero_grad()
    again.step()
    assert_equal_weights(dict(model.state_dict()), before, 0.0)


@pytest.mark.pitfall("P88")
@pytest.mark.parametrize(("cut", "some"), [(by_fsdp, "blocks.1."), (by_tp, "")])
@on_ranks(2)
def test_shards_that_were_replaced_are_named(
    rank: int, world: int, cut: Callable[[Network], nn.Module], some: str
) -> None:
    """FSDP2 goes on with what took their place."""
    model = build(hidden=28)
    cut(model)
    optimizer = dmuon.Muon(model, **OPTIONS)
    train(model, optimizer, [0])
    new = {name: value.clone() for name, value in model.state_dict().items() if name.startswith(some)}
    model.load_state_dict(new, assign=True, strict=False)
    with pytest.raises(RuntimeError, match=rf"'{some or 'embed.'}\S+' is no longer the one that its module holds"):
        train(model, optimizer, [1])


@pytest.mark.pitfall("P24")
@on_ranks(2, fresh=True)
def test_a_step_whose_process_groups_were_destroyed_changes_nothing(rank: int, world: int) -> None:
    """A plain optimizer of the same model goes on from the state of this one."""
    model = build()
    program = DistributedDataParallel(model)
    optimizer = dmuon.Muon(program, **OPTIONS)
    train(program, optimizer, range(2), rank, world)
    optimizer.zero_grad()
    dist.destroy_process_group()
    loss_of(model, *batch(2)).backward()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"ranks 0 1 exchange was destroyed since the optimizer was built"):
            optimizer.step()
    after = dmuon.Muon(model, **OPTIONS)
    after.load_state_dict(optimizer.state_dict())
    after.step()
    assert_equal_weights(dict(model.state_dict()), reference_weights(3))


# -- a step that is refused changes nothing ------------------------------------------------------------------------


def one_shape(shape: tuple[int, int]) -> float:
    if shape[0] < shape[1]:
        raise LookupError(f"no scale for {shape}")
    return 1.0


def with_option(name: str, value: Any) -> Callable[[dmuon.Muon], Callable[[], None]]:
    def plant(optimizer: dmuon.Muon) -> Callable[[], None]:
        group = optimizer.param_groups[0]
        kept, group[name] = group[name], value
        return lambda: group.update({name: kept})

    return plant


def with_momentum(change: Callable[[torch.Tensor], Any]) -> Callable[[dmuon.Muon], Callable[[], None]]:
    """Of the last matrix; that of the first is cleared."""

    def plant(optimizer: dmuon.Muon) -> Callable[[], None]:
        params = optimizer.param_groups[0]["params"]
        kept = [dict(optimizer.state[p]) for p in params]
        optimizer.state[params[0]].clear()
        momentum = optimizer.state[params[-1]]["momentum_buffer"]
        optimizer.state[params[-1]]["momentum_buffer"] = change(momentum)

        def mend() -> None:
            for param, values in zip(params, kept, strict=True):
                optimizer.state[param].update(values)

        return mend

    return plant


def with_gradient(of_group: int) -> Callable[[dmuon.Muon], Callable[[], None]]:
    """As a DTensor over another mesh."""

    def plant(optimizer: dmuon.Muon) -> Callable[[], None]:
        param = optimizer.param_groups[of_group]["params"][-1]
        kept = param.grad
        mesh = init_device_mesh("cpu", (1, 2))
        param.grad = distribute_tensor(torch.ones(param.shape), mesh, [Replicate(), Replicate()])

        def mend() -> None:
            param.grad = kept

        return mend

    return plant


FAULTS: dict[str, tuple[Callable[[dmuon.Muon], Callable[[], None]], str]] = {
    "option": (with_option("nesterov", 3), "group 0 of the optimizer was edited"),
    "scale": (with_option("adjust_lr_fn", one_shape), "no scale for"),
    "shape": (with_momentum(lambda momentum: torch.zeros(2, 2)), r"momentum of .* is \(2, 2\) of \S+, not a dense"),
    "gradient of a matrix": (with_gradient(0), "the gradient of .* is a DTensor over .*; lay it out as the"),
    "gradient of AdamW's": (with_gradient(2), "the gradient of .* is a DTensor over .*; lay it out as the"),
}


@pytest.mark.pitfall("P89")
@on_ranks(2)
def test_a_step_that_was_refused_is_repeated_with_the_same_numbers(rank: int, world: int) -> None:
    """Where one rank finds a fault, all raise at once; matrices are sharded and replicated in turn."""
    for fault, layout in zip(FAULTS, cycle(("fsdp", "ddp")), strict=False):
        with about(f"{fault} in {layout}"):
            repeat(rank, world, fault, layout)


def repeat(rank: int, world: int, fault: str, layout: str) -> None:
    model = build()
    program = by_fsdp(model) if layout == "fsdp" else DistributedDataParallel(model)
    optimizer = dmuon.Muon(program, **OPTIONS)
    train(program, optimizer, [0], rank, world)
    step, optimizer.step = optimizer.step, lambda: None  # type: ignore[method-assign]
    train(program, optimizer, [1], rank, world)
    optimizer.step = step  # type: ignore[method-assign]
    before = {name: value.clone() for name, value in full_state(model).items()}
    plant, says = FAULTS[fault]
    everywhere = fault in ("option", "scale")  # which ranks compare before each step, and do not go on if they differ
    mend = plant(optimizer) if rank == 1 or everywhere or "gradient" in fault else None
    for _ in range(2):
        with pytest.raises(Exception, match=says if mend else "rank 1, one of ranks 0 1, cannot take this step"):
            optimizer.step()
    if mend is not None:
        mend()
    assert_equal_weights(full_state(model), before, 0.0)
    optimizer.step()
    train(program, optimizer, [2], rank, world)
    assert_equal_weights(full_state(model), reference_weights(3))


# -- uneven inputs -------------------------------------------------------------------------------------------------


@pytest.mark.pitfall("P90")
@on_ranks(2, timeout=20)
def test_uneven_inputs_are_refused_at_the_first_step(rank: int, world: int) -> None:
    """Of whatever the optimizer was built; where inputs are even it trains."""
    model = build()
    program = DistributedDataParallel(model)
    optimizers = [dmuon.Muon(program, **OPTIONS), dmuon.Muon(dmuon.param_groups(program), **OPTIONS)]
    for optimizer in optimizers:
        with (
            pytest.raises(RuntimeError, match=r"inside DistributedDataParallel.*same number of batches"),
            Join([program]),
        ):
            train(program, optimizer, range(3 + rank), rank, world)
    with program.join(enable=False):
        train(program, optimizers[0], range(3), rank, world)
    assert_equal_weights(full_state(model), reference_weights(3))


# -- state of what trains, where the parameter is, and of no parameter that no group holds any more ------------------


def shard_under(optimizer: dmuon.Muon, model: nn.Module, world: int) -> None:
    """What accelerate does with FSDP2: the model is sharded, and its new parameters are put into the groups."""
    names = {id(p): name for name, p in model.named_parameters()}
    held = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    shard_blocks(model, init_device_mesh("cpu", (world,)))
    params = dict(model.named_parameters())
    for group, of_group in zip(optimizer.param_groups, held, strict=True):
        group["params"] = [params[name] for name in of_group]


@pytest.mark.parametrize("steps", [0, 1])
@on_ranks(2)
def test_parameters_that_are_replaced_are_followed(rank: int, world: int, steps: int) -> None:
    model = build()
    optimizer = dmuon.Muon(model, **OPTIONS)
    train(model, optimizer, range(steps))  # every rank the whole batch
    old = weakref.ref(optimizer.param_groups[0]["params"][0])
    shard_under(optimizer, model, world)
    state = get_optimizer_state_dict(model, optimizer)["state"]
    assert set(state) == {name for name, _ in model.named_parameters()}
    assert set(optimizer.state) <= {p for group in optimizer.param_groups for p in group["params"]}
    gc.collect()
    assert steps or old() is None, "neither state nor layouts hold what no group holds, only the last step's figures"
    assert {e.name for e in optimizer.exchanged()} == set(filter(is_matrix, state))
    if not steps:
        train(model, optimizer, range(5), rank, world)
        assert_equal_weights(full_state(model), reference_weights())
        assert optimizer.last_step.ns_matrices < 9, "others orthogonalize the rest"


@pytest.mark.pitfall("P31")
@pytest.mark.parametrize("layout", ["fsdp2-2", "1d"])
@on_ranks("layout")
def test_parameters_that_change_groups_begin_anew(rank: int, world: int, layout: str) -> None:
    """From Muon to AdamW and back; what dmuon owns is Muon's for ever, so there a head goes the other way and back."""
    run = start(layout)
    name = "head.weight" if layout == "1d" else "blocks.1.up.weight"
    param = getattr(run.model, "module", run.model).get_parameter(name)
    run.train(range(1))
    for step in range(1, 3):
        group = next(g for g in run.optimizer.param_groups if any(p is param for p in g["params"]))
        group["params"] = [p for p in group["params"] if p is not param]
        run.optimizer.add_param_group({"params": [param], "use_muon": not group["use_muon"]})
        keys = {"exp_avg", "exp_avg_sq", "step"} if group["use_muon"] else {"momentum_buffer"}
        state = run.optimizer.state[param]
        assert set(state) == keys and not any(local_tensor(t).any() for t in state.values())
        run.train(range(step, step + 1))
        assert set(run.optimizer.state[param]) == keys
