"""Hooks by which owned matrices leave state dicts as ordinary even DTensors, and come back."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeGuard, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon.comm.agreement import Difference, differences
from dmuon.dedicated.block import Phase
from dmuon.dedicated.even_dtensor import even_to_owned, in_rounds, owned_to_even
from dmuon.dedicated.matrix import OwnedMatrix
from dmuon.dedicated.runtime import Runtime
from dmuon.dedicated.state_shard import is_of_another_rank, mark_shards
from dmuon.layout.topology import GlobalRank, listed
from dmuon.model.blocks import canonical_fqn
from dmuon.platform.log import logger

_log = logger(__name__)
_Matrices = dict[str, OwnedMatrix]  # of one module, by attribute
_K = TypeVar("_K", bound=Hashable)


def hook_state_dicts(roots: Sequence[nn.Module], runtime: Runtime) -> None:
    """Make ``state_dict()`` and ``load_state_dict()`` of every module that holds an owned matrix convert it.

    Both become collective: call them on all ranks.
    """
    by_module: WeakKeyDictionary[nn.Module, _Matrices] = WeakKeyDictionary()  # modules own their hooks
    for matrix in runtime.matrices():
        for module, name in matrix.sites:
            by_module.setdefault(module, {})[name] = matrix
    saving, loading = _Saving(runtime, by_module), _Loading(runtime, by_module)
    for root in roots:
        root.register_state_dict_pre_hook(saving.begin)
        root.register_load_state_dict_pre_hook(loading.begin)
        root.register_load_state_dict_post_hook(loading.end)
    for module, matrices in by_module.items():
        module.register_state_dict_post_hook(partial(saving.convert, matrices))
        module.register_load_state_dict_pre_hook(partial(loading.convert, matrices))
    for root in roots:
        root.register_state_dict_post_hook(partial(saving.end))  # torch writes on what it is given


def is_dense(value: Any) -> TypeGuard[Tensor]:
    """Whether it is a tensor of which every element has its place; of sparse ones some have none."""
    return isinstance(value, Tensor) and value.layout is torch.strided


def describe(value: Any, shape: torch.Size, meshes: MutableMapping[int, bool]) -> str | None:
    """What kind of value a rank has, comparable across ranks; None if it cannot be loaded.

    Args:
        meshes: what was found of the meshes of other values, for :func:`is_of_another_rank`.
    """
    if not is_dense(value) or value.shape != shape or is_of_another_rank(value, meshes):
        return None
    return "sharded" if isinstance(value, DTensor) else "whole"


def _resting(module: nn.Module, matrices: _Matrices) -> _Matrices:
    """The matrices that ``module`` holds in their resting form; torch saves whole ones (``summon_full_params``)."""
    return {name: matrix for name, matrix in matrices.items() if matrix.is_rest(module._parameters[name])}


class _Rounds(Generic[_K]):
    """Matrices that are converted ahead of their turn, together with the first one of their round.

    Args:
        keys: of all of them, with their matrices, in one order on all ranks.
        convert: those of one round.
    """

    def __init__(
        self, keys: Sequence[tuple[_K, OwnedMatrix]], convert: Callable[[list[tuple[_K, OwnedMatrix]]], list[Tensor]]
    ) -> None:
        self._convert = convert
        self._round_of = {key: some for some in in_rounds(keys, lambda one: one[1]) for key, _ in some}
        self._ready: dict[_K, Tensor] = {}

    def take(self, key: _K) -> Tensor | None:
        """What was made of a matrix, once. Collective where it is the first of its round. None: it is none of these."""
        some = self._round_of.get(key, [])
        for other, _ in some:
            del self._round_of[other]
        self._ready.update(zip((other for other, _ in some), self._convert(some) if some else (), strict=True))
        return self._ready.pop(key, None)


class _Saving:
    """``state_dict()`` of one dedicated model. In a call that starts below, each module converts its own matrices."""

    def __init__(self, runtime: Runtime, by_module: MutableMapping[nn.Module, _Matrices]) -> None:
        self.runtime = runtime
        self.by_module = by_module
        self._rounds: _Rounds[int] | None = None
        self._warned = False
        self._generation = -1  # of the weights that it is of: a call that failed leaves it behind

    def begin(self, model: nn.Module, _prefix: str, _keep_vars: bool) -> None:
        """Save no weights if the ranks issued different collectives, or trained with different options."""
        if any(block.phase is Phase.REST for block in self.runtime.blocks):  # one rank may save what was summoned
            self.runtime.gradients.compare_now()
        self._verify()
        if self.runtime.strangers and not self._warned:
            self._warned = True
            _log.warning(
                "%r and its like are other weights on ranks %s, by the same names: make them DTensors over the "
                "expert-parallel dimension, or save what each group holds to a folder of its own",
                next(self.runtime.matrices()).fqn,
                listed(self.runtime.strangers),
            )
        resting = (m for module in model.modules() for m in _resting(module, self.by_module.get(module, {})).values())
        matrices = {id(matrix): matrix for matrix in resting}
        self._rounds = _Rounds(list(matrices.items()), self._convert)
        self._generation = self.runtime.generation

    def convert(
        self, matrices: _Matrices, module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any
    ) -> None:
        """Put even shards where torch has put what owners hold."""
        ahead = self._rounds if self._generation == self.runtime.generation else None
        if ahead is None:
            self._verify()
        for name, matrix in _resting(module, matrices).items():
            even = None if ahead is None else ahead.take(id(matrix))
            state_dict[prefix + name] = self._convert([(id(matrix), matrix)])[0] if even is None else even

    def _verify(self) -> None:
        self.runtime.at_rest("state_dict()", summoned=True)
        self.runtime.gradients.verify()  # of a part of the model, which nothing else compares

    def _convert(self, some: list[tuple[int, OwnedMatrix]]) -> list[Tensor]:
        with torch.no_grad():
            return [*owned_to_even([(matrix.master, matrix) for _, matrix in some], self.runtime.comm)]

    def end(self, _model: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
        """What FSDP2 shards beside owned matrices is no more the whole than they are."""
        self._rounds = None
        mark_shards(state_dict, prefix)


_ABSENT, _UNFIT = "absent", "unfit"


def _kind(state_dict: dict[str, Any], key: str, matrix: OwnedMatrix, meshes: MutableMapping[int, bool]) -> str:
    if key not in state_dict:
        return _ABSENT
    return describe(state_dict[key], matrix.shape, meshes) or _UNFIT


@dataclass(slots=True)
class _Call:
    """One ``load_state_dict()`` of a whole model.

    Attributes:
        errors: the list in which torch collects faults; no other call has it.
        before: how many of these, of keys that are missing and of unexpected ones there were, told of other modules.
        values: what it got on this rank, by key.
        kinds: of these.
        differences: between what it got on the ranks, the first one of each key; then none of them loads a matrix.
        rounds: of the values that can be loaded.
    """

    errors: list[str]
    before: tuple[int, ...] = (0, 0, 0)
    values: dict[str, Any] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    differences: dict[str, Difference] = field(default_factory=dict)
    rounds: _Rounds[str] | None = None

    def knows(self, errors: list[str], key: str, value: Any) -> bool:
        return self.errors is errors and key in self.values and self.values[key] is value


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
        """Compare what kinds of values ranks got for the whole model."""
        call = _Call(further[-1], tuple(len(further[i]) for i in (-1, -3, -2)))
        fault: Exception | None = None
        meshes: dict[int, bool] = {}
        loadable: list[tuple[str, OwnedMatrix]] = []
        try:
            self._require_loadable(metadata)
            for path, module in model.named_modules(remove_duplicate=False):
                for name, matrix in _resting(module, self.by_module.get(module, {})).items():
                    key = prefix + (f"{path}.{name}" if path else name)
                    # A wrapper between ``model`` and ``module`` may yet rename what has a canonical name in the dict.
                    source = key if key in state_dict else prefix + canonical_fqn(key[len(prefix) :])
                    call.kinds[key] = kind = _kind(state_dict, source, matrix, meshes)
                    call.values[key] = state_dict.get(source, _ABSENT)
                    if kind not in (_ABSENT, _UNFIT):
                        loadable.append((key, matrix))
        except (RuntimeError, ValueError) as error:
            fault = error
        call.differences = self._compared(fault, call.kinds)
        call.rounds = _Rounds(loadable, partial(self._convert, call.values))
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
        matrices = _resting(module, matrices)
        if not matrices:
            return
        errors: list[str] = further[-1]
        keys = {prefix + name: matrix for name, matrix in matrices.items()}
        values = {key: state_dict.get(key, _ABSENT) for key in keys}
        call, rounds = self.call, None
        if call is not None and all(call.knows(errors, key, value) for key, value in values.items()):
            kinds, found, rounds = call.kinds, call.differences, call.rounds
        else:
            meshes: dict[int, bool] = {}
            kinds = {key: _kind(state_dict, key, matrix, meshes) for key, matrix in keys.items()}
            fault: Exception | None = None
            try:
                self._require_loadable(metadata)
            except (RuntimeError, ValueError) as error:
                fault = error  # the others hear of it
            found = self._compared(fault, kinds)
        for key, matrix in keys.items():
            if key in found:
                errors.append(_told(found[key], self.runtime.comm.topology.ranks[0], matrix))
            elif kinds[key] == _UNFIT:
                errors.append(f"{key}: {_unfit(self.runtime.comm.topology.ranks[0], matrix)}")
            if found and key not in found and kinds[key] not in (_ABSENT, _UNFIT):
                state_dict[key] = matrix.rest  # it stays: the call is going to fail
            elif found or kinds[key] in (_ABSENT, _UNFIT):
                state_dict.pop(key, None)  # torch then reports the key as missing
            else:
                local = None if rounds is None else rounds.take(key)
                if local is None:
                    local = self._convert(values, [(key, matrix)])[0]
                # Torch copies what stands there; nothing to nothing, of a matrix that is another rank's.
                state_dict[key] = matrix.like_rest(local, matrix.fqn) if local.numel() else matrix.rest

    def _compared(self, fault: Exception | None, kinds: dict[str, str]) -> dict[str, Difference]:
        """How ranks differ in what they got; of each key, the first difference."""
        return {one.name: one for one in reversed(differences(self.runtime.comm.control, fault, kinds))}

    def _convert(self, values: Mapping[str, Any], some: list[tuple[str, OwnedMatrix]]) -> list[Tensor]:
        with torch.no_grad():
            return even_to_owned([(values[key], matrix) for key, matrix in some], self.runtime.comm)

    def end(self, _model: nn.Module, incompatible: Any) -> None:
        """Tell every rank what others lack, what they have too many, and what they could not load."""
        call, self.call = self.call, None
        if call is None:
            return  # a module that loads itself its own way
        missing, unexpected = incompatible.missing_keys, incompatible.unexpected_keys
        texts = zip(_KINDS, (call.errors, missing, unexpected), call.before, strict=True)
        said = {kind + text: "" for kind, some, first in texts for text in some[first:]}
        faults: list[str] = []
        lacking: list[str] = []
        too_many: list[str] = []
        for one in differences(self.runtime.comm.control, None, said, _KINDS):
            has, lacks = _who(one, self.runtime.comm.topology.ranks[0])
            if one.name.startswith(_LACKS):
                key = one.name.removeprefix(_LACKS)
                faults.append(f"{key}: missing on rank {has}, not on rank {lacks}")
                lacking.append(key)
            elif one.name.startswith(_TOO_MANY):
                too_many.append(one.name.removeprefix(_TOO_MANY))
            elif one.name not in said:
                faults.append(f"rank {has}: {one.name.removeprefix(_FAILS)}")
        more = [f"and {len(faults) - _TOLD} more on these and other ranks"] if len(faults) > _TOLD else []
        _extend(call.errors, faults[:_TOLD] + more)
        _extend(missing, lacking)
        _extend(unexpected, too_many)

    def _require_loadable(self, metadata: dict[str, Any]) -> None:
        self.runtime.at_rest("load_state_dict()", summoned=True)
        if metadata.get("assign_to_params_buffers", False):
            raise ValueError("load_state_dict(assign=True) would replace parameters that dmuon owns; use assign=False")


_TOLD = 64  # faults of others that a message repeats
# What a rank says of a load. A failure, and then a key that others have, decide that all raise: none of these may be
# hidden by keys that are too many, which a load that is not strict allows.
_KINDS = _FAILS, _LACKS, _TOO_MANY = "fails: ", "lacks: ", "has too many: "


def _who(one: Difference, first: GlobalRank) -> tuple[GlobalRank, GlobalRank]:
    """Who says it, and who does not."""
    return (first, one.rank) if one.value is None else (one.rank, first)


def _told(one: Difference, first: GlobalRank, matrix: OwnedMatrix) -> str:
    """What is wrong with the values of a matrix, which differ."""
    of = {one.value: one.rank, one.first: first}
    if _UNFIT in of:
        return f"{one.name}: {_unfit(of[_UNFIT], matrix)}"
    if _ABSENT in of:
        return f"{one.name}: missing on rank {of[_ABSENT]} only"
    return f"{one.name}: some ranks hold a sharded tensor and some a whole one"


def _unfit(rank: GlobalRank, matrix: OwnedMatrix) -> str:
    return (
        f"rank {rank} holds a value that is not a dense tensor of shape {tuple(matrix.shape)}, or the rows of another "
        "rank, which alone wrote them to a file"
    )


def _extend(items: list[str], more: list[str]) -> None:
    known = set(items)
    items.extend(item for item in dict.fromkeys(more) if item not in known)
