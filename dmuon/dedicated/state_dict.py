"""Hooks by which owned matrices leave state dicts box by box, and come back however their values lie."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon.comm.agreement import differences
from dmuon.dedicated.matrix import OwnedMatrix
from dmuon.dedicated.owned_state import OwnedState, lies_as, own_part, state_of
from dmuon.dedicated.owned_tensor import OwnedTensor
from dmuon.dedicated.runtime import Runtime
from dmuon.layout.topology import listed
from dmuon.model.blocks import canonical_fqn
from dmuon.platform.host import logger

_log = logger(__name__)
# Kinds of values, beside those of describe().
_ABSENT = "missing"
_UNFIT = "not a dense tensor of its shape, or the rows of another rank, which alone wrote them to a file"
_NEEDED, _TOO_MANY = "needed: ", "too many: "  # how names begin of what ranks compare


def hook_state_dicts(roots: Sequence[nn.Module], runtime: Runtime) -> None:
    """Make ``state_dict()`` and ``load_state_dict()`` of every module that holds an owned matrix convert it.

    The first needs no other rank. The second is collective: call it on all ranks.
    """
    hooks = _StateDicts(runtime)
    for root in roots:
        root.register_state_dict_pre_hook(hooks.begin_save)
        root.register_load_state_dict_pre_hook(hooks.begin_load)
    for module in nn.ModuleList(roots).modules():
        if hooks.resting(module):
            module.register_state_dict_post_hook(partial(hooks.save))  # torch sets an attribute of it
        module.register_load_state_dict_pre_hook(hooks.load)


def describe(value: Any, param: Tensor) -> str | None:
    """What kind of value a rank has for ``param``, comparable across ranks; None if it cannot be loaded."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.shape != param.shape:
        return None
    # Nobody pickled what shares its mesh with the parameter; to ask each mesh would take longer than all the rest.
    is_own = isinstance(value, DTensor) and isinstance(param, DTensor) and value.device_mesh is param.device_mesh
    if not is_own and is_of_another_rank(value):
        return None
    if isinstance(value, OwnedTensor) and isinstance(param, OwnedTensor):
        if lies_as(value, param):
            return "as it lies"
        return "sharded" if isinstance(value, OwnedState) else None  # nothing tells what others have of a copy
    return "sharded" if isinstance(value, DTensor) else "whole"


class _StateDicts:
    """``state_dict()`` of one dedicated model, which any rank may call alone, and ``load_state_dict()``.

    A fault of a load on one rank is raised on all, before anything is loaded. A call that starts at the model, or above
    it, compares once what ranks got for all of it. In a call that starts below, every module that holds an owned matrix
    compares on its own.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._warned = False
        self._errors: list[str] | None = None  # in which torch collects faults of the load that was compared

    def resting(self, module: nn.Module) -> dict[str, OwnedMatrix]:
        """By name, what ``module`` holds in the resting form; torch saves whole weights (``summon_full_params``)."""
        by_rest = self.runtime.by_rest
        return {name: by_rest[id(param)] for name, param in module._parameters.items() if id(param) in by_rest}

    def begin_save(self, _model: nn.Module, _prefix: str, _keep_vars: bool) -> None:
        """Save nothing inside a forward or backward, or after a collective failed or ranks went out of step."""
        self.runtime.at_rest("state_dict()", summoned=True)
        with self.runtime.comm.monitor.watch("state_dict()"):
            self.runtime.gradients.verify()
        if self.runtime.strangers and not self._warned:
            self._warned = True
            _log.warning(
                "%r and its like are other weights on ranks %s, by the same names: make them DTensors over the "
                "expert-parallel dimension, or save what each group holds to a folder of its own",
                next(self.runtime.matrices()).fqn,
                listed(self.runtime.strangers),
            )

    def save(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
        """Put copies of what this rank owns where torch has put the parameters."""
        self.runtime.at_rest("state_dict()", summoned=True)
        for name, matrix in self.resting(module).items():
            state_dict[prefix + name] = state = state_of(matrix.master, matrix, matrix.fqn)
            state.param = weakref.ref(matrix.rest)

    def begin_load(
        self, model: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *further: Any
    ) -> None:
        """Compare what ranks got for the whole model; a strict load fails on all for what any has too many."""
        owned: dict[str, OwnedMatrix] = {}
        others: dict[str, Tensor | None] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            matrices = self.resting(module)
            for name, tensor in _saved_by(module):
                key = prefix + (f"{path}.{name}" if path else name)
                if key not in state_dict:  # a wrapper may yet rename what has a canonical name in the dict
                    key = prefix + canonical_fqn(key[len(prefix) :])
                if name in matrices:
                    owned[key] = matrices[name]
                else:
                    others[key] = tensor
        _, _, unexpected, self._errors = further
        too_many = self._compare(state_dict, owned, others, metadata, prefix)
        unexpected += dict.fromkeys(key for key in too_many if key not in state_dict)  # torch finds this rank's own

    def load(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *further: Any
    ) -> None:
        """Replace each value by what the owner has of it."""
        keys = {prefix + name: matrix for name, matrix in self.resting(module).items()}
        errors: list[str] = further[-1]
        # Before what lies above them has been replaced.
        replaces = metadata.get("assign_to_params_buffers", False) and any(map(self.resting, module.modules()))
        if (keys or replaces) and self._errors is not errors:
            self._compare(state_dict, keys, {}, metadata)
        for key, matrix in keys.items():
            if key not in state_dict:
                continue
            value = state_dict[key]
            if describe(value, matrix.rest) is None:
                errors.append(f"{key} is {_UNFIT}; the model has shape {tuple(matrix.shape)}")
                del state_dict[key]
                continue
            with torch.no_grad():
                part = own_part(value, matrix)
            # Torch copies what stands there; nothing to nothing, of a matrix that is another rank's.
            state_dict[key] = matrix.rest.like(part) if part.numel() else matrix.rest

    def _compare(
        self,
        state_dict: Mapping[str, Any],
        owned: Mapping[str, OwnedMatrix],
        others: Mapping[str, Tensor | None],
        metadata: Mapping[str, Any],
        prefix: str | None = None,
    ) -> list[str]:
        """Raise on all ranks if they got different kinds of values. Collective.

        Args:
            others: what else the model has; None if it is no tensor.
            prefix: of the keys that something in the model must take; None does not look.

        Returns:
            Keys that some ranks have too many.
        """
        error: Exception | None = None
        told = {
            _NEEDED + key: _ABSENT if key not in state_dict else describe(state_dict[key], matrix.rest) or _UNFIT
            for key, matrix in owned.items()
        }
        for key, tensor in others.items():  # of which ranks may have different ones: only what is wrong counts
            misfit = _misfit(state_dict, key, tensor)
            if misfit is not None:
                told[_NEEDED + key] = misfit
        if prefix is not None:
            known = owned.keys() | others.keys()
            told |= {_TOO_MANY + key: "" for key in state_dict if key.startswith(prefix) and key not in known}
        try:
            self.runtime.at_rest("load_state_dict()", summoned=True)
            if metadata.get("assign_to_params_buffers", False):
                raise ValueError(
                    "load_state_dict(assign=True) would replace parameters that dmuon owns; use assign=False"
                )
        except (RuntimeError, ValueError) as fault:
            error = fault  # the others hear of it
        # A key too many is no fault of a load that is not strict, and may not hide one.
        found = differences(self.runtime.comm.control, error, told, (_NEEDED,))
        first = self.runtime.comm.topology.ranks[0]
        faults: dict[str, str] = {}
        for one in found:
            if one.name.startswith(_NEEDED):
                of_first, value = ("as it should be" if said is None else said for said in (one.first, one.value))
                key = one.name.removeprefix(_NEEDED)
                faults[key] = f"{key} is {of_first} on rank {first} and {value} on rank {one.rank}"
        if faults:
            raise RuntimeError(f"nothing was loaded: ranks were given different values: {'; '.join(faults.values())}")
        return [one.name.removeprefix(_TOO_MANY) for one in found]


def _saved_by(module: nn.Module) -> Iterable[tuple[str, Tensor | None]]:
    """What torch saves of a module itself, by the names that it gives it."""
    yield from ((name, param) for name, param in module._parameters.items() if param is not None)
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        yield "_extra_state", None


def _misfit(state_dict: Mapping[str, Any], key: str, tensor: Tensor | None) -> str | None:
    """What is wrong with a value that dmuon does not own, which torch loads where this rank has ``tensor``."""
    if key not in state_dict:
        return _ABSENT
    value = state_dict[key]
    if tensor is None or not isinstance(value, Tensor):
        return None if tensor is None else type(value).__name__
    if value.shape == tensor.shape and isinstance(value, DTensor) == isinstance(tensor, DTensor):
        return None
    what = "a DTensor" if isinstance(value, DTensor) else "a tensor"
    return f"{what} of shape {tuple(value.shape)} for {tuple(tensor.shape)}"


def is_of_another_rank(value: Tensor) -> bool:
    """Whether a DTensor was pickled by another rank: it keeps where that lies in the mesh."""
    at = value.device_mesh.get_coordinate() if isinstance(value, DTensor) else None
    return at is not None and isinstance(value, DTensor) and int(value.device_mesh.mesh[tuple(at)]) != dist.get_rank()
