"""The optimizer's state on its way out of and into state dicts; both are collective on owned matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon.comm.agreement import agree
from dmuon.comm.process_groups import this_rank
from dmuon.dedicated.even_dtensor import even_to_owned, owned_to_even
from dmuon.dedicated.owned_tensor import OwnedTensor
from dmuon.dedicated.runtime import runtime_of
from dmuon.dedicated.state_dict import describe
from dmuon.layout.parameters import place_dtensor
from dmuon.layout.ranks import position_in
from dmuon.platform.torch_private import local_tensor
from dmuon.step.adamw import init_adamw_state
from dmuon.step.batches import Batch, like_param

if TYPE_CHECKING:
    from dmuon.optimizer.muon import Muon

__all__ = ["MOMENTUM", "adopt_loaded_state", "even_momentum", "load_momentum", "show_momentum"]

MOMENTUM = "momentum_buffer"


def _momentum_view(param: Tensor, local: Tensor) -> Tensor:
    runtime = runtime_of(param)
    if runtime is None:
        return like_param(param, local)
    entry = runtime.entry_of(param)
    return entry.like_rest(local, f"{entry.fqn}.{MOMENTUM}")


def _momentum_dtype(param: Tensor) -> torch.dtype:
    return torch.promote_types(param.dtype, torch.float32)


def show_momentum(optimizer: Muon, group: dict[str, Any], batches: Sequence[Batch]) -> None:
    """Make ``state`` show the rows of the stacks, in the order of the group: ranks own different ones."""
    rows = _momentum_rows(batches)
    for param in group["params"]:
        row = rows.get(id(param))
        if row is None:
            local = local_tensor(param)
            row = local.new_empty(local.shape, dtype=_momentum_dtype(param))
        view = _momentum_view(param, row)
        optimizer.state[param][MOMENTUM] = optimizer._shown[id(param)] = view


def adopt_replaced_momentum(optimizer: Muon, group: dict[str, Any], batches: Sequence[Batch]) -> None:
    """Take over momentum that was put into ``state`` instead of being edited there; cleared state is zero.

    Collective for DTensors that lie otherwise than their parameters.

    Raises:
        ValueError: it has another shape.
    """
    replaced = [p for p in group["params"] if optimizer.state[p].get(MOMENTUM) is not optimizer._shown.get(id(p))]
    if not replaced:
        return
    rows = _momentum_rows(batches)
    for param in replaced:
        _store(param, optimizer.state[param].get(MOMENTUM), rows.get(id(param)), _name(optimizer, param))
    show_momentum(optimizer, group, batches)


def _momentum_rows(batches: Sequence[Batch]) -> dict[int, Tensor]:
    """By ``id`` of the parameter, its momentum, shaped as what lies here."""
    rows: dict[int, Tensor] = {}
    for batch in batches:
        if batch.span is not None:
            assert batch.stack is not None
            rows[id(batch.params[0])] = batch.stack
        else:
            rows.update((id(p), row) for p, row in zip(batch.params, batch.momentum, strict=True))
    return rows


def keep_momentum(params: Sequence[Tensor], batches: Sequence[Batch], kept: Mapping[int, Tensor | None]) -> None:
    """Put momentum of before into new batches; where the layout of its parameter changed, it follows. Collective."""
    rows = _momentum_rows(batches)
    for param in params:
        old = kept.get(id(param))
        if old is not None:
            _store(param, old, rows.get(id(param)), f"a parameter of shape {tuple(param.shape)}")


def _store(param: Tensor, value: Tensor | None, row: Tensor | None, name: str) -> None:
    """Make ``value``, zero if there is none, the momentum in ``row``, which is None where nothing lies."""
    part = None if value is None else _part_here(param, value, name)
    if row is not None:
        row.zero_() if part is None else row.copy_(part)


def _part_here(param: Tensor, value: Tensor, name: str) -> Tensor:
    """This rank's part of momentum: of a DTensor or a whole tensor, or the part itself.

    Collective for DTensors that lie otherwise than ``param``, also on ranks where nothing of them lies.

    Raises:
        ValueError: it has another shape.
    """
    here = local_tensor(param)
    if value.shape != param.shape and (isinstance(value, DTensor) or value.shape != here.shape):
        raise ValueError(f"momentum of {name} has shape {tuple(value.shape)}, not {tuple(param.shape)}")
    if isinstance(param, OwnedTensor):
        if isinstance(value, OwnedTensor) and value.owner == param.owner:
            return local_tensor(value)
        if value.shape != param.shape:
            return value
        runtime = runtime_of(param)
        assert runtime is not None
        return even_to_owned(value, runtime.entry_of(param), runtime.comm, _momentum_dtype(param))
    if isinstance(value, DTensor):
        if _layout(value) == _layout(param):
            return local_tensor(value)
        value = value.full_tensor()  # by way of no other placements: torch does not convert into strided shards
    if value.shape == here.shape:
        return value
    assert isinstance(param, DTensor)  # of anything else all of it lies here
    placed = place_dtensor(param, name, this_rank())
    part = value.new_empty(here.shape)
    for local, there in placed.layout.pieces[position_in(placed.ranks, this_rank())].blocks():
        part[local] = value[there]
    return part


def _layout(tensor: Tensor) -> object:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def even_momentum(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """On the way out owned momentum is an even row-sharded DTensor, and the rest lies as it does. Collective."""
    muon = cast("Muon", optimizer)
    for group, batches in zip(muon.param_groups, muon._batches, strict=True):
        if group["use_muon"]:
            adopt_replaced_momentum(muon, group, batches)
    params = [p for group in muon.param_groups for p in group["params"]]
    state = {}
    for index, param in enumerate(params):  # in one order on all ranks, for us and for whoever gathers the result
        values = muon.state.get(param)
        if values is None:
            continue
        momentum = values.get(MOMENTUM)
        runtime = runtime_of(param)
        if runtime is not None:
            momentum = owned_to_even(local_tensor(momentum), runtime.entry_of(param), runtime.comm)
        elif momentum is not None:
            momentum = momentum.clone()  # not a view that saves the whole stack
        state[index] = values if momentum is None else {**values, MOMENTUM: momentum}
    return {**state_dict, "state": state}


def load_momentum(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """On the way in momentum goes straight into the stacks; what has none begins at zero. Collective.

    ``torch.optim.Optimizer`` would cast it to the dtype of the parameter, which may be a half.
    """
    muon = cast("Muon", optimizer)
    saved_groups = state_dict["param_groups"]
    fault = _group_mismatch(saved_groups, muon.param_groups)
    # State is keyed by position among the saved groups' parameters, which DCP replaces by names.
    loads = [
        (param, key, state_dict["state"].get(key, {}).get(MOMENTUM))
        for saved, group in zip(saved_groups, muon.param_groups, strict=False)
        if group["use_muon"] and fault is None
        for key, param in zip(saved["params"], group["params"], strict=True)
    ]
    _require_loadable(muon, fault, [(param, value) for param, _, value in loads])
    rows = {key: row for batches in muon._batches for key, row in _momentum_rows(batches).items()}
    state = dict(state_dict["state"])
    for param, key, value in loads:
        _store(param, value, rows.get(id(param)), _name(muon, param))
        state[key] = {name: other for name, other in state.get(key, {}).items() if name != MOMENTUM}
    groups = [_completed(s, g) for s, g in zip(saved_groups, muon.param_groups, strict=True)]
    return {**state_dict, "state": state, "param_groups": groups}


def _require_loadable(muon: Muon, fault: str | None, loads: Sequence[tuple[Tensor, Any]]) -> None:
    """Raise ValueError on all ranks for what any of them was given. Collective over the ranks that share parameters."""
    kinds = {id(param): "absent" if value is None else describe(value, param.shape) for param, value in loads}
    for param, value in loads:
        if kinds[id(param)] is None:
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            fault = f"momentum of {_name(muon, param)} is {found}, not a tensor of shape {tuple(param.shape)}"
            if not isinstance(param, DTensor) and muon._exchange is not None:
                fault += "; into plain shards each rank loads its own part"
            break
    shared = [(runtime.comm.control, {id(entry.rest) for entry in runtime.entries()}) for runtime in muon._runtimes]
    if muon._exchange is not None:
        shared += [(domain.group, {id(p) for p in members}) for domain, members in muon._exchange.domains]
    for group, members in shared * 2:  # the second time those hear of it who share nothing with the faulty rank
        mine = [(_name(muon, param), kinds[id(param)]) for param, _ in loads if id(param) in members]
        try:
            everywhere = agree(group, fault, mine)
        except ValueError as error:
            fault = fault or str(error)
            continue
        ranks = dist.get_process_group_ranks(group)
        for (name, first), *others in zip(*everywhere, strict=False):
            for rank, (_, kind) in zip(ranks[1:], others, strict=True):
                if kind != first and fault is None:
                    fault = f"momentum of {name} is {first} on rank {ranks[0]} and {kind} on rank {rank}"
    if fault is not None:
        raise ValueError(fault)


def _group_mismatch(saved: list[dict[str, Any]], groups: list[dict[str, Any]]) -> str | None:
    counts = [sum(len(g["params"]) for g in some) for some in (saved, groups)]
    if counts[0] != counts[1]:
        return f"the saved optimizer has {counts[0]} parameters, this one {counts[1]}; build it over the same model"
    if len(saved) != len(groups):
        return f"the saved optimizer has {len(saved)} groups, this one {len(groups)}; build it with the same groups"
    for index, (theirs, ours) in enumerate(zip(saved, groups, strict=True)):
        sizes = len(theirs["params"]), len(ours["params"])
        if sizes[0] != sizes[1]:
            return f"group {index} has {sizes[0]} parameters in the saved optimizer and {sizes[1]} in this one"
        if theirs.get("use_muon", ours["use_muon"]) != ours["use_muon"]:
            return f"group {index} has use_muon={theirs['use_muon']} in the saved optimizer, the opposite in this one"
    return None


def _completed(saved: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
    """A saved group; options that ``torch.optim.Muon`` and ``torch.optim.AdamW`` do not know keep their values."""
    return {**{name: value for name, value in group.items() if name != "params"}, **saved}


def _name(optimizer: Muon, param: Tensor) -> str:
    return repr(optimizer._name_of(param))


def adopt_loaded_state(optimizer: torch.optim.Optimizer) -> None:
    """Show the loaded momentum again, and make missing AdamW state anew."""
    muon = cast("Muon", optimizer)
    for group, batches in zip(muon.param_groups, muon._batches, strict=True):
        if group["use_muon"]:
            show_momentum(muon, group, batches)
            continue
        for param in group["params"]:
            state = muon.state[param]
            if "step" not in state:
                init_adamw_state(param, state)
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32).to(local_tensor(param).device)
