"""Hooks by which owned matrices leave state dicts as ordinary even DTensors, and come back."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon.comm.agreement import agree
from dmuon.dedicated.even_dtensor import even_to_owned, owned_to_even
from dmuon.dedicated.matrix import OwnedMatrix
from dmuon.dedicated.runtime import Runtime
from dmuon.model.names import canonical_fqn

__all__ = ["describe", "hook_state_dicts"]

_Held = dict[str, OwnedMatrix]  # what one module holds, by attribute


def hook_state_dicts(model: nn.Module, runtime: Runtime) -> None:
    """Make ``state_dict()`` and ``load_state_dict()`` of every module that holds an owned matrix convert it.

    Both become collective: call them on all ranks.
    """
    held: dict[int, tuple[nn.Module, _Held]] = {}
    for entry in runtime.entries():
        for module, name in entry.sites:
            held.setdefault(id(module), (module, {}))[1][name] = entry
    loading = _Loading(runtime, {key: entries for key, (_, entries) in held.items()})
    model.register_load_state_dict_pre_hook(loading.begin)
    model.register_load_state_dict_post_hook(loading.end)
    for module, entries in held.values():
        module.register_state_dict_post_hook(partial(_after_state_dict, runtime, entries))
        module.register_load_state_dict_pre_hook(partial(loading.convert, entries))


def describe(value: Any, shape: torch.Size) -> str | None:
    """What kind of value a rank holds, comparable across ranks; None when it cannot be loaded."""
    if not isinstance(value, Tensor) or value.shape != shape:
        return None
    return "sharded" if isinstance(value, DTensor) else "whole"


def _resting(module: nn.Module, entries: _Held) -> _Held:
    """The entries that ``module`` holds in their resting form; whole weights (``summon_full_params``) need no help."""
    return {name: entry for name, entry in entries.items() if entry.is_rest(module._parameters[name])}


def _after_state_dict(
    runtime: Runtime, entries: _Held, module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any
) -> None:
    runtime.at_rest("state_dict()", summoned=True)
    runtime.gradients.verify()  # do not save weights if the ranks issued different collectives
    with torch.no_grad():
        for name, entry in _resting(module, entries).items():
            state_dict[prefix + name] = owned_to_even(entry.master, entry, runtime.comm)


_ABSENT, _UNFIT = "absent", "unfit"


def _kind(state_dict: dict[str, Any], key: str, entry: OwnedMatrix) -> str:
    if key not in state_dict:
        return _ABSENT
    return describe(state_dict[key], entry.shape) or _UNFIT


@dataclass(slots=True)
class _Call:
    """One ``load_state_dict()`` of a whole model, and what every rank was given.

    Attributes:
        errors: the list in which torch collects faults; no other call has it.
        values: what this rank was given, by key.
        kinds: by key, of every rank.
    """

    errors: list[str]
    values: dict[str, Any] = field(default_factory=dict)
    kinds: dict[str, list[str]] = field(default_factory=dict)

    def knows(self, errors: list[str], key: str, value: Any) -> bool:
        return self.errors is errors and key in self.kinds and self.values.get(key, _ABSENT) is value


class _Loading:
    """``load_state_dict()`` of one dedicated model: a fault on one rank is raised on all of them.

    A call that starts at the model, or above it, compares what ranks were given once before anything is loaded and
    once behind; below it, every module that holds an owned matrix compares on its own.

    Args:
        held: by the identity of modules.
    """

    def __init__(self, runtime: Runtime, held: dict[int, _Held]) -> None:
        self.runtime = runtime
        self.held = held
        self.call: _Call | None = None

    def begin(
        self,
        model: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        _strict: bool,
        _missing: list[str],
        _unexpected: list[str],
        errors: list[str],
    ) -> None:
        """Exchange what ranks were given for the whole model."""
        call = _Call(errors)
        fault: Exception | None = None
        mine: dict[str, str] = {}
        try:
            self._require_loadable(metadata)
            for path, module in model.named_modules(remove_duplicate=False):
                for name, entry in _resting(module, self.held.get(id(module), {})).items():
                    key = prefix + (f"{path}.{name}" if path else name)
                    # A wrapper between here and the module may yet rename what the dict holds under a canonical name.
                    given = key if key in state_dict else prefix + canonical_fqn(key[len(prefix) :])
                    mine[key] = _kind(state_dict, given, entry)
                    call.values[key] = state_dict.get(given, _ABSENT)
        except (RuntimeError, ValueError) as error:
            fault = error
        everywhere = agree(self.runtime.comm.control, fault, mine)
        call.kinds = {key: [kinds[key] for kinds in everywhere] for key in mine}
        self.call = call

    def convert(
        self,
        entries: _Held,
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        _strict: bool,
        _missing: list[str],
        _unexpected: list[str],
        errors: list[str],
    ) -> None:
        """Replace values by what the owner of each holds, unless some rank's cannot be loaded."""
        self._require_loadable(metadata)
        entries = _resting(module, entries)
        if not entries:
            return
        comm, call = self.runtime.comm, self.call
        keys = {prefix + name: entry for name, entry in entries.items()}
        if call is not None and all(call.knows(errors, key, state_dict.get(key, _ABSENT)) for key in keys):
            everyone = {key: call.kinds[key] for key in keys}
        else:
            everywhere = agree(comm.control, None, {key: _kind(state_dict, key, e) for key, e in keys.items()})
            everyone = {key: [kinds[key] for kinds in everywhere] for key in keys}
        for key, entry in keys.items():
            kinds = everyone[key]
            if len(set(kinds)) == 1 and kinds[0] not in (_ABSENT, _UNFIT):
                with torch.no_grad():
                    local = even_to_owned(state_dict[key], entry, comm, entry.master.dtype)
                state_dict[key] = entry.like_rest(local, entry.fqn)
                continue
            # No rank loads what some rank cannot: torch's own report of a missing key or a size then names it here.
            if _UNFIT in kinds:
                rank = kinds.index(_UNFIT)
                errors.append(f"{key}: rank {rank} holds a value that is not a tensor of shape {tuple(entry.shape)}")
            elif _ABSENT not in kinds:
                errors.append(f"{key}: some ranks hold a sharded tensor and some a whole one")
            elif len(set(kinds)) > 1:
                errors.append(f"{key}: missing on rank {kinds.index(_ABSENT)} only")
            state_dict.pop(key, None)

    def end(self, _model: nn.Module, incompatible: Any) -> None:
        """Tell every rank what the others lack, have too much, and could not load."""
        call, self.call = self.call, None
        if call is None:
            return  # a module that loads itself its own way
        said = (incompatible.missing_keys, incompatible.unexpected_keys, call.errors)
        everywhere = agree(self.runtime.comm.control, None, said)
        known = set(call.errors)
        for rank, (missing, unexpected, errors) in enumerate(everywhere):
            lacking = [key for key in missing if not all(key in others for others, *_ in everywhere)]
            _extend(call.errors, [f"{key}: missing on rank {rank}, not on all" for key in lacking])
            _extend(call.errors, [f"rank {rank}: {error}" for error in errors if error not in known])
            _extend(incompatible.missing_keys, missing)
            _extend(incompatible.unexpected_keys, unexpected)

    def _require_loadable(self, metadata: dict[str, Any]) -> None:
        self.runtime.at_rest("load_state_dict()", summoned=True)
        if metadata.get("assign_to_params_buffers", False):
            raise ValueError("load_state_dict(assign=True) would replace parameters that dmuon owns; use assign=False")


def _extend(items: list[str], more: list[str]) -> None:
    items.extend(item for item in more if item not in items)
