"""State dicts on their way in: what is wrong with one, and the options and states that it lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dmuon.dedicated.state_dict import is_dense
from dmuon.optimizer.options import check_options
from dmuon.platform.options import is_number
from dmuon.platform.torch_private import local_tensor
from dmuon.step.update import new_adamw_state

_ADAMW_STATE = ("step", "exp_avg", "exp_avg_sq")


def loading_fault(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> str | None:
    """Why an optimizer with ``groups`` cannot load ``state_dict``, apart from momentum; None if it can."""
    saved, states = state_dict.get("param_groups"), state_dict.get("state")
    if (
        not (isinstance(saved, (list, tuple)) and isinstance(states, Mapping))
        or not all(isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple)) for group in saved)
        or not all(isinstance(states.get(key, {}), Mapping) for group in saved for key in group["params"])
    ):
        return "the state dict has no param_groups and state; pass what an optimizer's state_dict() returned"
    fault = _group_mismatch(saved, groups)
    for index, (theirs, ours) in enumerate(zip(saved, groups, strict=False)):
        fault = fault or _option_fault(index, {**completed(theirs, ours), "params": ours["params"]})
        if fault is None and not ours["use_muon"]:
            rows = zip(theirs["params"], ours["params"], strict=True)
            faults = (_state_fault(states.get(key, {}), param) for key, param in rows)
            fault = next((f"group {index}: {found}" for found in faults if found is not None), None)
    return fault


def _group_mismatch(saved: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> str | None:
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


def _option_fault(index: int, group: Mapping[str, Any]) -> str | None:
    try:
        check_options(group)
    except (TypeError, ValueError) as fault:
        return f"group {index} of the saved optimizer: {fault}"
    return None


def _state_fault(state: Mapping[str, Any], param: Tensor) -> str | None:
    missing = [name for name in _ADAMW_STATE if state.get(name) is None]
    if 0 < len(missing) < len(_ADAMW_STATE):
        return f"{missing[0]} is missing in the saved state, which has others; remove these too, or save it again"
    step = state.get("step", 0.0)
    if (step.numel() != 1) if isinstance(step, Tensor) else not is_number(step):
        return f"step in the saved state is {step!r}, not one number"
    for name in ("exp_avg", "exp_avg_sq"):
        value = state.get(name)
        if value is not None and not (is_dense(value) and value.shape == param.shape):
            return f"{name} in the saved state is {kind_of(value)}, not a dense tensor of shape {tuple(param.shape)}"
    return None


def kind_of(value: Any) -> str:
    """What was given in place of a dense tensor of some shape."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return str(tuple(value.shape)) if value.layout is torch.strided else str(value.layout)


def completed(saved: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """A saved group; what it lacks, such as options that torch's own optimizers do not know, is as it was."""
    return {**{name: value for name, value in group.items() if name != "params"}, **saved}


def savable(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group for a state dict, without a function, which files cannot hold: who loads it keeps its own."""
    return {name: value for name, value in group.items() if name != "adjust_lr_fn" or not callable(value)}


def adopt_adamw_state(optimizer: torch.optim.Optimizer) -> None:
    """After a load: make the state that AdamW's parameters lack, and ``step`` a tensor on their device."""
    for group in optimizer.param_groups:
        for param in [] if group["use_muon"] else group["params"]:
            if "step" not in optimizer.state.get(param, ()) and not param.requires_grad:
                optimizer.state.pop(param, None)  # what is frozen gets no state
                continue
            state = optimizer.state[param]
            if "step" not in state:
                state.update(new_adamw_state(param))
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32).to(local_tensor(param).device)
