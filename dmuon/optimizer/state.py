"""The state of an optimizer, momentum and AdamW's moments: what users see of it, and state dicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon.comm.agreement import require_same_in_turn
from dmuon.comm.process_groups import ranks_of
from dmuon.dedicated.owned_tensor import OwnedTensor
from dmuon.dedicated.state_dict import describe
from dmuon.layout.parameters import ranks_of_mesh
from dmuon.layout.topology import Ranks, listed
from dmuon.model.matrix_spec import Names, flat_of
from dmuon.optimizer.options import RARE, STRATEGY, check_options
from dmuon.platform.host import logger
from dmuon.platform.options import is_number
from dmuon.platform.torch_private import local_tensor
from dmuon.step.adamw import MOMENTS, as_step, new_adamw_state
from dmuon.step.half_weights import MASTER, has_master
from dmuon.step.residency import MATRIX_STATE, MOMENTUM, Alone, Residency, like_param, misfit, needs_gather
from dmuon.step.scaling import Scaling

_log = logger(__name__)

_State = MutableMapping[Any, Any]  # `optimizer.state`: a dict of values by parameter
_OF_MUON = (*MATRIX_STATE, MASTER)
_ADAMW_STATE = ("step", *MOMENTS)
_AS_TORCH_SAYS = Alone(())  # where state of AdamW's lies


@dataclass(slots=True, eq=False)
class _Row:
    """The momentum of one parameter, the second moment of its updates, or its master.

    Attributes:
        key: in the state.
        like: has its shape and layout: the parameter, or what is shown of such a moment or master.
        name: of the parameter, quoted.
        local: this rank's part, shaped as the local tensor. Without elements if it has none. On the meta device as long
            as a frozen parameter has none.
    """

    param: Tensor
    name: str
    residency: Residency
    local: Tensor
    key: str
    like: Tensor

    @property
    def what(self) -> str:
        """Names it."""
        return f"{'momentum' if self.key == MOMENTUM else self.key} of {self.name}"

    @property
    def is_trained(self) -> bool:
        """What is frozen gets no state, except what dmuon owns: a state dict of that is collective."""
        return self.param.requires_grad or isinstance(self.param, OwnedTensor)

    def check(self, value: Any) -> None:
        """Raise ValueError if ``value`` cannot be the momentum; None is zeros."""
        fault = None if value is None else misfit(self.like, self.local, value)
        if fault is not None:
            raise ValueError(f"{self.what} {fault}")

    def make_room(self) -> None:
        if self.local.is_meta:
            self.local = torch.zeros_like(self.local, device=local_tensor(self.param).device)
            self.begin()

    def begin(self) -> None:
        """As it is where no state says otherwise."""
        if self.key == MASTER:
            self.local.copy_(local_tensor(self.param).detach())  # a load may be under way with gradients on
        else:
            self.local.zero_()


# What a state dict has of a parameter: that, what has the shape and layout of the value, what names it, and the value.
_Item = tuple[Tensor, Tensor, str, Any]


def _store(values: Sequence[tuple[_Row, Tensor | None]]) -> None:
    """Make each value the momentum of its row, or begin that if there is none. Collective where a layout differs."""
    for row, value in values:  # before anything is written
        row.check(value)
    stacks = {row.local.untyped_storage().data_ptr() for row, _ in values if row.local.numel()}
    # A user may put what is shown of one parameter into another's place: it is read before anything is written.
    apart: list[Tensor | None] = []
    for _, value in values:
        local = None if value is None else local_tensor(value)
        shared = local is not None and local.numel() and local.untyped_storage().data_ptr() in stacks
        apart.append(value.clone() if value is not None and shared else value)
    for (row, _), value in zip(values, apart, strict=True):
        if value is not None or row.is_trained:
            row.make_room()
        if value is None:
            row.begin()
            continue
        part = row.residency.part_of(row.like, value, row.name)
        if part.numel():
            row.local.copy_(part)


class Momentum:
    """The momentum of all matrices, which lies in the stacks of the batches.

    ``optimizer.state`` shows it parameter by parameter, as views of the stacks. Users may edit these in place, replace
    them or clear the state: :meth:`check` finds and :meth:`adopt` takes over what they put there. It holds no
    optimizer, so that dropping an optimizer frees its memory at once.

    Attributes:
        shown: by ``id`` of the parameter, or of what is ``like`` a second moment or a master, what ``state`` shows. Its
            version counts the edits of the momentum.
        replaced: what :meth:`check` has found, and :meth:`adopt` has not taken over yet.
    """

    def __init__(self) -> None:
        self.shown: dict[int, Tensor] = {}
        self._rows: list[_Row] = []
        self._names: Names = {}
        self.replaced: list[tuple[_Row, Tensor | None]] = []
        self._residencies: list[Residency] = []
        self._loaded: dict[Tensor, dict[str, Any]] = {}  # state of AdamW, which may be wider than its parameter

    def lay_out(
        self,
        residencies: Sequence[Residency],
        groups: Sequence[Mapping[str, Any]],
        names: Names,
        stacked: Mapping[int, Tensor],
        second_moments: Mapping[int, Scaling],
        masters: Mapping[int, Tensor],
        state: _State,
    ) -> None:
        """Move what ``state`` has into new stacks. Collective where the layout of a parameter changed.

        Args:
            groups: of the optimizer, in an order which is the same on all ranks.
            stacked: by ``id``, this rank's momentum, for all parameters of which it has any.
            second_moments: by number of the group, if it has them.
            masters: by ``id``, this rank's, for all parameters that have one.
        """
        residency_of = {id(param): residency for residency in residencies for param in residency.params}
        moments = {i: (one.key, moment) for one in second_moments.values() for i, moment in one.moments.items()}
        rows: list[_Row] = []
        kept: list[tuple[_Row, Tensor | None]] = []
        muon = [group for group in groups if group["use_muon"]]
        for param, dtype in ((param, group.get("momentum_dtype")) for group in muon for param in group["params"]):
            local = stacked.get(id(param))
            if local is None:
                local = local_tensor(param)
                dtype = dtype or torch.promote_types(param.dtype, torch.float32)
                local = local.new_empty(local.shape, dtype=dtype, device="meta")
            name, residency = repr(names[id(param)]), residency_of[id(param)]
            of_param = [_Row(param, name, residency, local, MOMENTUM, param)]
            if id(param) in moments:
                key, local = moments[id(param)]
                of_param.append(_Row(param, name, residency, local, key, residency.shown_moment(param, local, key)))
            if id(param) in masters:
                local = masters[id(param)]
                of_param.append(_Row(param, name, residency, local, MASTER, like_param(param, local)))
            for row in of_param:
                if row.is_trained:
                    row.make_room()
                rows.append(row)
                value = state[param].get(row.key) if param in state else None
                if value is not None:
                    kept.append((row, value))
        _store(kept)
        self._residencies, self._rows, self._names, self.replaced = list(residencies), rows, names, []
        self.shown.clear()
        self._show([row for row in rows if row.key in state.get(row.param, ()) or row.is_trained], state)

    def _show(self, rows: Sequence[_Row], state: _State) -> None:
        for row in rows:
            state[row.param][row.key] = self.shown[id(row.like)] = row.residency.shown(row.like, row.local)

    def check(self, state: _State) -> None:
        """Look for momentum that was put into ``state`` instead of being edited there. Changes nothing."""
        self.replaced = []
        for row in self._rows:
            value, shown = state.get(row.param, {}).get(row.key), self.shown.get(id(row.like))
            if value is not shown or (shown is None and row.is_trained):
                row.check(value)
                self.replaced.append((row, value))

    def versions(self) -> list[tuple[int, int]]:
        """What counts the changes of momentum, by users, loads and steps: of what is shown, and of what that shows."""
        shown = [(row.local, self.shown.get(id(row.like))) for row in self._rows]
        return [(local._version, 0 if one is None else one._version) for local, one in shown]

    def adopt(self, state: _State) -> None:
        """Take over what :meth:`check` has found; zeros where momentum was cleared.

        Collective for DTensors that lie otherwise than their parameters.
        """
        replaced, self.replaced = self.replaced, []
        _store(replaced)
        self._show([row for row, _ in replaced], state)  # not the others: what is shown of them counts its edits

    # -- hooks of state dicts ----------------------------------------------------------------------------------------

    def save(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """On the way out momentum is a copy, of owned matrices what this rank owns. Nothing travels.

        Collective only for DTensors that somebody put into the state, and that lie otherwise than their parameters.
        """
        self.check(optimizer.state)
        self.adopt(optimizer.state)
        rows = {(id(row.param), row.key): row for row in self._rows}
        params = [param for group in optimizer.param_groups for param in group["params"]]
        # In one order on all ranks, for whoever gathers the result.
        held = [optimizer.state.get(param) for param in params]
        state = {i: dict(values) for i, values in enumerate(held) if values is not None}
        for i, values in state.items():
            for key in _OF_MUON:
                if key in values:  # a master of AdamW's has no row
                    row, value = rows.get((id(params[i]), key)), values[key]
                    values[key] = value.clone() if row is None else row.residency.saved(row.like, value)
            if values and flat_of(params[i]) is not None:
                state[i] = _complete(params[i], values)
        groups = [savable(group) for group in state_dict["param_groups"]]
        return {**state_dict, "state": state, "param_groups": groups}

    def load(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """On the way in momentum goes straight into the stacks; what has none begins at zero. Collective.

        ``torch.optim.Optimizer`` would cast it to the dtype of the parameter, which may be a half.

        Raises:
            ValueError: on all ranks that share parameters, if any of them cannot load what it was given.
        """
        fault = next(_loading_faults(state_dict, optimizer.param_groups), None)
        saved_groups = state_dict["param_groups"] if fault is None else []
        # State is keyed by position among the saved groups' parameters, which DCP replaces by names.
        pairs = list(zip(saved_groups, optimizer.param_groups, strict=False))
        keys = {id(p): key for s, g in pairs for key, p in zip(s["params"], g["params"], strict=True)}
        others = [(p, group) for _, group in pairs if not group["use_muon"] for p in group["params"]]
        saved = {key: state_dict["state"].get(key, {}) for key in keys.values()}
        loads = [(row, saved[keys[id(row.param)]].get(row.key)) for row in self._rows if id(row.param) in keys]
        items: list[_Item] = [(row.param, row.like, row.what, value) for row, value in loads]
        for param, _ in others:
            of_param = saved[keys[id(param)]]
            where = f"of {self._names[id(param)]!r} in the saved state"
            items += [(param, param, f"{key} {where}", of_param.get(key)) for key in (*MOMENTS, MASTER)]
        self._require_loadable(fault, items)
        state = dict(state_dict["state"])
        stored: list[tuple[_Row, Tensor | None]] = [*loads]
        for param, group in others:
            of_param, name = state.pop(keys[id(param)], {}), repr(self._names[id(param)])
            begins = of_param.get("step") is None
            if begins and not param.requires_grad:
                continue  # the frozen get no state
            # Of its own: torch would let two optimizers, of which one has loaded the other's state dict, share memory.
            fresh = self._loaded[param] = {**_others_in(of_param), **new_adamw_state(param, group)}
            if begins:
                continue
            fresh["step"] = as_step(of_param["step"], param)
            for key in (*MOMENTS, MASTER):
                if key in fresh and of_param.get(key) is not None:
                    row = _Row(param, name, _AS_TORCH_SAYS, local_tensor(fresh[key]), key, param)
                    stored.append((row, of_param[key]))
        _store(stored)
        for row, value in loads:
            key = keys[id(row.param)]
            kept = _others_in(state.pop(key, {}))
            if value is None and not row.is_trained:
                self.shown.pop(id(row.like), None)
            else:
                self.shown.setdefault(id(row.like), row.local)  # until the new state shows it
            if kept or id(row.param) in self.shown:
                state[key] = kept
        _log.debug("loaded momentum of %d of %d parameters", sum(v is not None for _, v in loads), len(self._rows))
        return {**state_dict, "state": state, "param_groups": [completed(s, g) for s, g in pairs]}

    def show_loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """Show what was loaded: torch has made a new state, in which all would have the dtype of the parameters."""
        optimizer.state.update(self._loaded)
        self._loaded.clear()
        for row in self._rows:
            shown = self.shown.get(id(row.like))
            if shown is row.local:
                self._show([row], optimizer.state)
            elif shown is not None:
                optimizer.state[row.param][row.key] = shown

    def _require_loadable(self, fault: str | None, items: Sequence[_Item]) -> None:
        """Raise ValueError on all ranks for what any of them was given. Collective over those that share parameters."""
        kinds: list[str | None] = []
        over: list[Ranks | None] = []  # the ranks that must all load it
        groups = [group for residency in self._residencies for group in residency.loading_groups()]
        for param, like, what, value in items:
            kind = "absent" if value is None else describe(value, like)
            kinds.append("" if flat_of(param) is not None else kind)  # each rank loads its own, some of nothing
            over.append(ranks_of_mesh(value.device_mesh) if needs_gather(like, value) else None)
            unfit = None if value is None else misfit(like, None, value)
            is_shared = any(id(param) in members for _, members in groups)
            if unfit is not None or kinds[-1] is None:
                fault = fault or f"{what} {unfit or 'was saved by another rank'}"
                if is_shared and not isinstance(param, DTensor):
                    fault += "; into plain shards each rank loads its own part"
            elif over[-1] and not is_shared and not any(over[-1] == tuple(sorted(ranks_of(g))) for g, _ in groups):
                fault = fault or (
                    f"{what} is a DTensor over ranks {listed(over[-1], ' ')}, and nothing says whether these load it "
                    "together: pass its full_tensor()"
                )
        asked = []
        for group, members in groups:
            shared = [(items[i][2], str(kind)) for i, kind in enumerate(kinds) if id(items[i][0]) in members]
            everyone = tuple(sorted(ranks_of(group)))
            gathered = [what for (_, _, what, _), ranks in zip(items, over, strict=True) if ranks == everyone]
            asked.append((group, [*shared, ("what these ranks gather of the saved state", str(gathered))]))
        require_same_in_turn(asked, None if fault is None else ValueError(fault), "give all ranks the same state dict")


def _others_in(saved: Mapping[str, Any]) -> dict[str, Any]:
    """What of the state of one parameter is neither route's."""
    return {name: value for name, value in saved.items() if name not in (*_OF_MUON, *_ADAMW_STATE)}


def _complete(param: Tensor, values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with zeros for what the other route has: FSDP1 gathers what all parameters of a flat tensor have."""
    wide = torch.promote_types(param.dtype, torch.float32)
    alike = dict.fromkeys((MOMENTUM, *MOMENTS), param.new_zeros((), dtype=wide).expand(param.shape))
    return alike | {name: value.to(wide) if name in alike else value for name, value in values.items()}


# -- state dicts on their way in ------------------------------------------------------------------------------------


def _loading_faults(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Why an optimizer with ``groups`` cannot load ``state_dict``, apart from the tensors in it."""
    saved, states = state_dict.get("param_groups"), state_dict.get("state")
    if (
        not (isinstance(saved, (list, tuple)) and isinstance(states, Mapping))
        or not all(isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple)) for group in saved)
        or not all(isinstance(states.get(key, {}), Mapping) for group in saved for key in group["params"])
    ):
        yield "the state dict has no param_groups and state; pass what an optimizer's state_dict() returned"
        return
    if len(saved) != len(groups):
        yield f"the saved optimizer has {len(saved)} groups, this one {len(groups)}; build it with the same groups"
    for index, (theirs, ours) in enumerate(zip(saved, groups, strict=False)):
        sizes = len(theirs["params"]), len(ours["params"])
        if sizes[0] != sizes[1]:
            what = f"group {index} has {sizes[0]} parameters in the saved optimizer, {sizes[1]} in this one"
            yield f"{what}; build it over the same model, with the same groups"
        if theirs.keys() == {"params"} and any(states.get(key) for key in theirs["params"]):  # DCP has matched groups
            yield f"group {index} has state but no options in the saved optimizer; build this one with the same groups"
        loaded = completed(theirs, ours)
        for name in ("second_moment", "lr_multiplier"):
            there, here = loaded.get(name), ours.get(name)
            if there != here and (name == "second_moment" or here is None):
                yield (
                    f"group {index} has {name}={there!r} in the saved optimizer, {here!r} in this one; "
                    "build it with the same, or change that in the saved group"
                )
        if loaded["use_muon"] != ours["use_muon"]:
            yield f"group {index} has use_muon={loaded['use_muon']} in the saved optimizer, the opposite in this one"
        try:
            check_options({**loaded, "params": ours["params"]})
        except (TypeError, ValueError) as error:
            yield f"group {index} of the saved optimizer: {error}"
        for key in theirs["params"]:
            if (fault := _state_fault(states.get(key, {}), ours["use_muon"])) is not None:
                yield f"group {index}: {fault}"


def _state_fault(state: Mapping[str, Any], use_muon: bool) -> str | None:
    foreign, own = (MOMENTS[0], MOMENTUM) if use_muon else (MOMENTUM, MOMENTS[0])
    if state.get(own) is None and state.get(foreign) is not None:  # of who has both, FSDP1 gathered those of all
        return (
            f"{foreign} is in the saved state of a parameter that {'Muon' if use_muon else 'AdamW'} takes here, and "
            f"{own} is not: leave out the state of such parameters, which begins anew, or route them as they were"
        )
    if use_muon:
        return None
    missing = [name for name in _ADAMW_STATE if state.get(name) is None]
    if 0 < len(missing) < len(_ADAMW_STATE):
        return f"{missing[0]} is missing in the saved state, which has others; remove these too, or save it again"
    step = state.get("step", 0.0)
    if (step.numel() != 1) if isinstance(step, Tensor) else not is_number(step):
        return f"step in the saved state is {step!r}, not one number"
    return None


_OWN = (  # what no load changes
    "momentum_dtype", "momentum_device", "orthogonalize", "master_weights", "bf16_stochastic_round", STRATEGY,
)  # fmt: skip
_FUNCTION, _DTYPE = "function ", "torch."  # how a saved text begins that stands for one


def completed(saved: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """A saved group; what it lacks, such as options that torch's own optimizers do not know, is as it was.

    So are functions, dtype and device of momentum, to which what was saved is converted, and strategies, by which
    matrices were laid out. What a group that dmuon saved lacks of rare options is as usual.
    """
    kept = {name: value for name, value in group.items() if name != "params"}
    if "use_muon" in saved:
        kept = {name: value for name, value in kept.items() if name not in RARE or name in _OWN}
    loaded = {name: value for name, value in saved.items() if name not in _OWN}
    for name, value in saved.items():
        if isinstance(value, str) and value.startswith(_FUNCTION):
            loaded.pop(name, None)
            kept[name] = group.get(name)
        elif name in loaded and isinstance(value, str) and value.startswith(_DTYPE):
            loaded[name] = getattr(torch, value.removeprefix(_DTYPE), value)
    return {**kept, **loaded}


def savable(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group for a state dict, with texts for functions, which files cannot hold, and dtypes, which torch gathers not.

    Every option stays: torch looks for each of a group in a flattened state dict.
    """
    saved = dict(group)
    for name, value in group.items():
        if isinstance(value, torch.dtype):
            saved[name] = str(value)
        elif callable(value):
            saved[name] = f"{_FUNCTION}{getattr(value, '__qualname__', type(value).__name__)}"
    return saved


def keep_state_of_route(group: Mapping[str, Any], state: MutableMapping[Tensor, dict[str, Any]]) -> None:
    """Forget what parameters have from a group of the other route, and begin the state of AdamW's."""
    for param in group["params"]:
        values = state.get(param)
        if values is not None:
            for name in _ADAMW_STATE if group["use_muon"] else MATRIX_STATE:
                values.pop(name, None)
            if MASTER in values and not has_master(group, param):
                del values[MASTER]
        if not group["use_muon"] and param.requires_grad and (values is None or values.keys() <= {MASTER}):
            state[param] = {**new_adamw_state(param, group), **(values or {})}
