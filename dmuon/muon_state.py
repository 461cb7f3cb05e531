"""The optimizer's state on its way out of and into state dicts; both are collective on owned matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon._torch import local_tensor
from dmuon.adamw import init_adamw_state
from dmuon.batches import Batch, like_param
from dmuon.comm import agree
from dmuon.even_dtensor import even_to_owned, owned_to_even
from dmuon.owned_tensor import OwnedTensor
from dmuon.placing import place_dtensor
from dmuon.state_dict import describe

if TYPE_CHECKING:
    from dmuon.muon import Muon

__all__ = ["MOMENTUM", "adopt_loaded_state", "even_momentum", "load_momentum", "show_momentum"]

MOMENTUM = "momentum_buffer"


def _momentum_view(param: Tensor, local: Tensor) -> Tensor:
    if not isinstance(param, OwnedTensor):
        return like_param(param, local)
    assert param.runtime is not None
    return param.runtime.entry_of(param).like_rest(local, f"{param.fqn}.{MOMENTUM}")


def show_momentum(optimizer: Muon, group: dict[str, Any], batches: Sequence[Batch]) -> None:
    """Make ``state`` show the rows of the stacks, in the order of the group: ranks own different ones."""
    rows = _momentum_rows(batches)
    for param in group["params"]:
        local = local_tensor(param)
        row = rows.get(id(param), local.new_empty(local.shape))
        view = _momentum_view(param, row)
        optimizer.state[param][MOMENTUM] = optimizer._shown[id(param)] = view


def adopt_replaced_momentum(optimizer: Muon, group: dict[str, Any], batches: Sequence[Batch]) -> None:
    """Take over momentum that was put into ``state`` instead of being edited there; cleared state is zero.

    Raises:
        ValueError: it has another shape.
    """
    replaced = [p for p in group["params"] if optimizer.state[p].get(MOMENTUM) is not optimizer._shown[id(p)]]
    if not replaced:
        return
    rows = _momentum_rows(batches)
    for param in replaced:
        value, row = optimizer.state[param].get(MOMENTUM), rows.get(id(param))
        if value is not None and value.shape != param.shape:
            raise ValueError(f"momentum of {_name(param, 'of a group')} has shape {tuple(value.shape)}")
        if row is not None:
            row.zero_() if value is None else row.copy_(local_tensor(value))
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
    """Put momentum of before into new batches; where the layout of its parameter changed, it follows.

    Raises:
        RuntimeError: the parameter has moved to another mesh.
    """
    rows = _momentum_rows(batches)
    for param in params:
        old, row = kept.get(id(param)), rows.get(id(param))
        if old is None:
            continue
        if isinstance(param, DTensor) and isinstance(old, DTensor) and not isinstance(param, OwnedTensor):
            if old.device_mesh != param.device_mesh:
                raise RuntimeError(
                    f"a parameter of shape {tuple(param.shape)} moved from mesh {old.device_mesh} to "
                    f"{param.device_mesh}; save its optimizer's state, and load it into a new one"
                )
            old = old.redistribute(placements=param.placements)
        if row is not None:
            row.copy_(local_tensor(old))


def _loaded_part(value: Tensor, param: Tensor, row: Tensor) -> Tensor:
    """This rank's part of loaded momentum: a DTensor, a whole tensor, or the part itself. Collective for DTensors."""
    if isinstance(value, DTensor):
        if not isinstance(param, DTensor):
            return value.full_tensor()
        if value.device_mesh == param.device_mesh:
            return local_tensor(value.redistribute(placements=param.placements))
        value = value.full_tensor()
    if value.shape == row.shape or not isinstance(param, DTensor):
        return value
    placed = place_dtensor(param, "momentum")
    piece = placed.layout.pieces[placed.ranks.index(dist.get_rank())]
    part = value.new_empty(row.shape)
    for local, there in piece.blocks():
        part[local] = value[there]
    return part


def even_momentum(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """On the way out owned momentum is an even row-sharded DTensor. Collective."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state = {}
    for index, param in enumerate(params):  # in one order on all ranks, for us and for whoever gathers the result
        values = state_dict["state"].get(index)
        if values is None:
            continue
        momentum = values.get(MOMENTUM)
        if isinstance(param, OwnedTensor):
            assert param.runtime is not None
            runtime = param.runtime
            momentum = owned_to_even(local_tensor(momentum), runtime.entry_of(param), runtime.comm)
        elif momentum is not None:
            momentum = momentum.clone()  # not a view that saves the whole stack
        state[index] = values if momentum is None else {**values, MOMENTUM: momentum}
    return {**state_dict, "state": state}


def load_momentum(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """On the way in momentum goes straight into the stacks. Collective.

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
    kinds = ["absent" if value is None else describe(value, param.shape) for param, _, value in loads]
    for (param, key, value), kind in zip(loads, kinds, strict=True):
        if kind is None:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            fault = f"momentum of {_name(param, key)} is {shape}, not a tensor of shape {tuple(param.shape)}"
            break
    for group in muon._control_groups():
        everywhere = agree(group, fault, kinds)
        for (param, key, _), found in zip(loads, zip(*everywhere, strict=True), strict=True):
            if len(set(found)) > 1:
                raise ValueError(f"momentum of {_name(param, key)} is {', '.join(map(str, found))} on ranks 0, 1, …")
    if fault is not None:
        raise ValueError(fault)
    rows = {key: row for batches in muon._batches for key, row in _momentum_rows(batches).items()}
    state = dict(state_dict["state"])
    for param, key, value in loads:
        row = rows.get(id(param))
        if value is None:
            whole = None
        elif isinstance(param, OwnedTensor):
            assert param.runtime is not None
            dtype = local_tensor(param).dtype
            whole = even_to_owned(value, param.runtime.entry_of(param), param.runtime.comm, dtype)
        else:
            whole = value if row is None else _loaded_part(value, param, row)
        if row is not None:
            row.zero_() if whole is None else row.copy_(whole)
        state[key] = {name: other for name, other in state.get(key, {}).items() if name != MOMENTUM}
    groups = [_completed(s, g) for s, g in zip(saved_groups, muon.param_groups, strict=True)]
    return {**state_dict, "state": state, "param_groups": groups}


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


def _name(param: Tensor, key: Any) -> str:
    return repr(param.fqn) if isinstance(param, OwnedTensor) else f"parameter {key!r}"


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
