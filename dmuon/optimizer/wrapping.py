"""What users wrap around a model before or after they build its optimizer: DDP copies it, FSDP2 replaces parameters."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon.comm.process_groups import this_rank
from dmuon.model.module_tree import sites_of
from dmuon.platform.log import logger
from dmuon.platform.torch_private import reduced_by_ddp, replicate_group
from dmuon.step.residency import like_param, part_like

_Sites = dict[int, tuple[weakref.ref[nn.Module], str]]  # by id of a parameter, a module and its name there
_Replaced = tuple[list[Tensor], int, DTensor]  # a list of parameters, the index of the old one, and the new one

_log = logger(__name__)


def replicated_by_ddp(params: object) -> dict[int, dist.ProcessGroup]:
    """The group over which ``DistributedDataParallel`` or ``replicate`` averages a parameter's gradient, by ``id``."""
    return _copied_by(params.modules()) if isinstance(params, nn.Module) else {}


def replicated_by_any(tensors: Iterable[Tensor]) -> dict[int, dist.ProcessGroup]:
    """The same of parameters, by whichever module that lives: they may have been given alone, or been wrapped since.

    The collector of garbage knows all modules. Where nothing communicates it is not asked.
    """
    wanted = {id(tensor) for tensor in tensors if not isinstance(tensor, DTensor)}
    if not wanted or not dist.is_initialized() or dist.get_world_size() == 1:
        return {}

    def found() -> dict[int, dist.ProcessGroup]:
        modules = (module for module in gc.get_objects() if issubclass(type(module), nn.Module))
        return {key: group for key, group in _copied_by(modules).items() if key in wanted}

    if not found():
        return {}
    gc.collect()  # it may be by a module that nobody can reach any more
    return found()


def _copied_by(modules: Iterable[nn.Module]) -> dict[int, dist.ProcessGroup]:
    copies: dict[int, dist.ProcessGroup] = {}
    for module in modules:
        group = replicate_group(module)
        if group is None or not _is_alive(group):
            continue
        copies |= {id(param): group for param in reduced_by_ddp(module)}
    return copies


def _is_alive(group: dist.ProcessGroup) -> bool:
    try:
        return dist.get_rank(group) >= 0
    except (RuntimeError, ValueError):  # it was destroyed
        return False


class Wrapping:
    """What happens to a model between the building of its optimizer and the first step.

    Args:
        params: what the optimizer was given; a module is asked alone where its parameters are.
        groups: of the optimizer.
        copies: of plain parameters, over which group DDP copies them; what is found is added. None where that does
            not matter.
    """

    def __init__(
        self, params: object, groups: Iterable[Mapping[str, Any]], copies: dict[int, dist.ProcessGroup] | None
    ) -> None:
        self._copies = copies
        self._sites = _sites_in(params, [param for group in groups for param in group["params"]])
        self._find_copies(groups)
        self._tell_copies(groups)

    def follow(
        self, groups: Iterable[Mapping[str, Any]], names: Mapping[int, str], state: MutableMapping[Any, dict[str, Any]]
    ) -> bool:
        """Look once more. Puts new parameters into ``groups`` and ``state``; tells whether anything was found.

        Args:
            names: of parameters, by ``id``.
        """
        copies = self._find_copies(groups)
        cut = list(_sharded_since(self._sites, groups))
        self._sites = {}
        for params, index, new in cut:
            old = params[index]
            params[index] = new
            values = state.pop(old, None)
            if values is not None:
                state[new] = {key: _cut(new, old, value, names[id(old)]) for key, value in values.items()}
        first = [dist.get_process_group_ranks(group)[0] for group in copies.values()]
        first += [int(new.device_mesh.mesh.flatten()[0]) for _, _, new in cut]
        if first and this_rank() == first[0]:  # one of the ranks concerned tells the log
            _log.info(
                "Muon: since it was built, %d of its matrices were wrapped in DistributedDataParallel and %d "
                "parameters were sharded; from now on each matrix that several ranks hold has one owner",
                sum(id(p) in copies for group in groups if group["use_muon"] for p in group["params"]),
                len(cut),
            )
        return bool(first)

    def _tell_copies(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """One of the ranks that hold the copies tells the log."""
        copies = self._copies or {}
        found = [copies[id(p)] for group in groups if group["use_muon"] for p in group["params"] if id(p) in copies]
        if found and dist.get_world_size(found[0]) > 1 and dist.get_rank(found[0]) == 0:
            _log.info(
                "Muon: %d of its matrices are copied by DistributedDataParallel; each of them has one owner", len(found)
            )

    def _find_copies(self, groups: Iterable[Mapping[str, Any]]) -> dict[int, dist.ProcessGroup]:
        """What was not known before, by ``id``."""
        if self._copies is None:
            return {}
        params = (param for group in groups for param in group["params"])
        found = replicated_by_any(p for p in params if not isinstance(p, DTensor) and id(p) not in self._copies)
        self._copies.update(found)
        return found


def _sites_in(params: object, tensors: Sequence[Tensor]) -> _Sites:
    """Where modules hold the plain parameters among ``tensors``, as far as one may still shard them."""
    plain = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter) and not isinstance(tensor, DTensor)]
    if not plain or not dist.is_initialized():
        return {}
    if isinstance(params, nn.Module):
        wanted = set(map(id, plain))
        held = ((module, *item) for module in params.modules() for item in module._parameters.items())
        return {id(param): (weakref.ref(module), name) for module, name, param in held if id(param) in wanted}
    _, sites = sites_of(plain)
    return {key: (weakref.ref(holders[0][0]), holders[0][1]) for key, holders in sites.items()}


def _sharded_since(sites: _Sites, groups: Iterable[Mapping[str, Any]]) -> Iterator[_Replaced]:
    """What ``fully_shard`` or tensor parallelism has put into the place of a parameter."""
    for group in groups:
        params: list[Tensor] = group["params"]
        for index, param in enumerate(params):
            reference, name = sites.get(id(param), (None, ""))
            module = None if reference is None else reference()
            now: Any = None if module is None else module._parameters.get(name)
            if isinstance(now, DTensor) and now is not param and now.shape == param.shape:
                yield params, index, now


def _cut(new: Tensor, old: Tensor, value: Any, name: str) -> Any:
    """``value``, of a whole parameter ``old``, as ``new`` is cut."""
    if not isinstance(value, Tensor) or value.shape != old.shape or not value.ndim:
        return value
    return like_param(new, part_like(new, value, name).clone())
