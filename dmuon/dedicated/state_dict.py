"""Hooks by which owned matrices leave state dicts as ordinary even DTensors, and come back."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon.comm.agreement import agree
from dmuon.dedicated.block import Phase
from dmuon.dedicated.even_dtensor import even_to_owned, owned_to_even
from dmuon.dedicated.matrix import OwnedMatrix
from dmuon.dedicated.runtime import Runtime
from dmuon.dedicated.state_shard import mark_shards
from dmuon.model.blocks import canonical_fqn

_Matrices = dict[str, OwnedMatrix]  # of one module, by attribute


def hook_state_dicts(model: nn.Module, runtime: Runtime) -> None:
    """Make ``state_dict()`` and ``load_state_dict()`` of every module that holds an owned matrix convert it.

    Both become collective: call them on all ranks.
    """
    by_module: WeakKeyDictionary[nn.Module, _Matrices] = WeakKeyDictionary()  # modules own their hooks
    for matrix in runtime.matrices():
        for module, name in matrix.sites:
            by_module.setdefault(module, {})[name] = matrix
    loading = _Loading(runtime, by_module)
    model.register_state_dict_pre_hook(partial(_before_state_dict, runtime))
    model.register_state_dict_post_hook(_after_whole_state_dict)
    model.register_load_state_dict_pre_hook(loading.begin)
    model.register_load_state_dict_post_hook(loading.end)
    for module, matrices in by_module.items():
        module.register_state_dict_post_hook(partial(_after_state_dict, runtime, matrices))
        module.register_load_state_dict_pre_hook(partial(loading.convert, matrices))


def describe(value: Any, shape: torch.Size) -> str | None:
    """What kind of value a rank has, comparable across ranks; None if it cannot be loaded."""
    if not isinstance(value, Tensor) or value.shape != shape:
        return None
    return "sharded" if isinstance(value, DTensor) else "whole"


def _resting(module: nn.Module, matrices: _Matrices) -> _Matrices:
    """The matrices that ``module`` holds in their resting form; torch saves whole ones (``summon_full_params``)."""
    return {name: matrix for name, matrix in matrices.items() if matrix.is_rest(module._parameters[name])}


def _before_state_dict(runtime: Runtime, _model: nn.Module, _prefix: str, _keep_vars: bool) -> None:
    """Save no weights if the ranks issued different collectives, or trained with different options."""
    if any(block.phase is Phase.REST for block in runtime.blocks):  # what was summoned, one rank alone may save
        runtime.gradients.compare_now()


def _after_state_dict(
    runtime: Runtime, matrices: _Matrices, module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any
) -> None:
    runtime.at_rest("state_dict()", summoned=True)
    runtime.gradients.verify()  # of a part of the model, which nothing else compares
    with torch.no_grad():
        for name, matrix in _resting(module, matrices).items():
            state_dict[prefix + name] = owned_to_even(matrix.master, matrix, runtime.comm)


def _after_whole_state_dict(_model: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """What FSDP2 shards beside owned matrices is no more the whole than they are."""
    mark_shards(state_dict, prefix)


_ABSENT, _UNFIT = "absent", "unfit"


def _kind(state_dict: dict[str, Any], key: str, matrix: OwnedMatrix) -> str:
    if key not in state_dict:
        return _ABSENT
    return describe(state_dict[key], matrix.shape) or _UNFIT


@dataclass(slots=True)
class _Call:
    """One ``load_state_dict()`` of a whole model, and what it got on every rank.

    Attributes:
        errors: the list in which torch collects faults; no other call has it.
        values: what it got on this rank, by key.
        kinds: of the values on every rank, by key.
    """

    errors: list[str]
    values: dict[str, Any] = field(default_factory=dict)
    kinds: dict[str, list[str]] = field(default_factory=dict)

    def knows(self, errors: list[str], key: str, value: Any) -> bool:
        return self.errors is errors and key in self.kinds and self.values.get(key, _ABSENT) is value


class _Loading:
    """``load_state_dict()`` of one dedicated model: a fault on one rank is raised on all of them.

    A call that starts at the model, or above it, compares what ranks got once before anything is loaded, and their
    faults once afterwards. In a call that starts below, every module that holds an owned matrix compares on its own.
    """

    def __init__(self, runtime: Runtime, by_module: MutableMapping[nn.Module, _Matrices]) -> None:
        self.runtime = runtime
        self.by_module = by_module
        self.call: _Call | None = None

    def begin(
        self, model: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *further: Any
    ) -> None:
        """Exchange what kinds of values ranks got for the whole model."""
        call = _Call(errors=further[-1])
        fault: Exception | None = None
        kinds: dict[str, str] = {}
        try:
            self._require_loadable(metadata)
            for path, module in model.named_modules(remove_duplicate=False):
                for name, matrix in _resting(module, self.by_module.get(module, {})).items():
                    key = prefix + (f"{path}.{name}" if path else name)
                    # A wrapper between ``model`` and ``module`` may yet rename what has a canonical name in the dict.
                    source = key if key in state_dict else prefix + canonical_fqn(key[len(prefix) :])
                    kinds[key] = _kind(state_dict, source, matrix)
                    call.values[key] = state_dict.get(source, _ABSENT)
        except (RuntimeError, ValueError) as error:
            fault = error
        call.kinds = self._exchange(fault, kinds)
        self.call = call

    def convert(
        self,
        matrices: _Matrices,
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        *further: Any,
    ) -> None:
        """Replace each value by the owner's part of it, unless some rank's value cannot be loaded."""
        self._require_loadable(metadata)
        matrices = _resting(module, matrices)
        if not matrices:
            return
        comm, call = self.runtime.comm, self.call
        errors: list[str] = further[-1]
        keys = {prefix + name: matrix for name, matrix in matrices.items()}
        if call is not None and all(call.knows(errors, key, state_dict.get(key, _ABSENT)) for key in keys):
            kinds_of = call.kinds
        else:
            kinds_of = self._exchange(None, {key: _kind(state_dict, key, matrix) for key, matrix in keys.items()})
        for key, matrix in keys.items():
            kinds = kinds_of[key]
            if len(set(kinds)) == 1 and kinds[0] not in (_ABSENT, _UNFIT):
                with torch.no_grad():
                    local = even_to_owned(state_dict[key], matrix, comm, matrix.master.dtype)
                state_dict[key] = matrix.like_rest(local, matrix.fqn)
                continue
            # No rank loads what some rank cannot; torch then reports the key as missing.
            if _UNFIT in kinds:
                rank = kinds.index(_UNFIT)
                errors.append(f"{key}: rank {rank} holds a value that is not a tensor of shape {tuple(matrix.shape)}")
            elif _ABSENT not in kinds:
                errors.append(f"{key}: some ranks hold a sharded tensor and some a whole one")
            elif len(set(kinds)) > 1:
                errors.append(f"{key}: missing on rank {kinds.index(_ABSENT)} only")
            state_dict.pop(key, None)

    def end(self, _model: nn.Module, incompatible: Any) -> None:
        """Tell every rank which keys the others lack, which they have too many, and which they could not load."""
        call, self.call = self.call, None
        if call is None:
            return  # a module that loads itself its own way
        report = (incompatible.missing_keys, incompatible.unexpected_keys, call.errors)
        reports = agree(self.runtime.comm.control, None, report)
        own_errors = set(call.errors)
        for rank, (missing, unexpected, errors) in enumerate(reports):
            lacking = [key for key in missing if not all(key in others for others, *_ in reports)]
            _extend(call.errors, [f"{key}: missing on rank {rank}, not on all" for key in lacking])
            _extend(call.errors, [f"rank {rank}: {error}" for error in errors if error not in own_errors])
            _extend(incompatible.missing_keys, missing)
            _extend(incompatible.unexpected_keys, unexpected)

    def _exchange(self, fault: Exception | None, kinds: dict[str, str]) -> dict[str, list[str]]:
        """By key, the kinds of all ranks. Collective."""
        of_ranks = agree(self.runtime.comm.control, fault, kinds)
        return {key: [of_rank[key] for of_rank in of_ranks] for key in kinds}

    def _require_loadable(self, metadata: dict[str, Any]) -> None:
        self.runtime.at_rest("load_state_dict()", summoned=True)
        if metadata.get("assign_to_params_buffers", False):
            raise ValueError("load_state_dict(assign=True) would replace parameters that dmuon owns; use assign=False")


def _extend(items: list[str], more: list[str]) -> None:
    items.extend(item for item in more if item not in items)
