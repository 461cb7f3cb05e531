"""What users do to a model before or after they build its optimizer: DDP copies parameters, FSDP2 replaces them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any, TypeGuard

import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon.comm.process_groups import this_rank
from dmuon.dedicated.owned_tensor import OwnedTensor
from dmuon.model.module_tree import sites_of
from dmuon.platform.log import logger
from dmuon.platform.torch_private import ddp_wraps, reduced_by_ddp, replicate_group, takes_uneven_inputs
from dmuon.step.residency import like_param, part_like

_Groups = Iterable[Mapping[str, Any]]
_Site = tuple[Tensor, weakref.ref[nn.Module], str]  # a parameter, a module that holds it, and its name there
_Cut = tuple[list[Tensor], int, DTensor]  # a list of parameters, the index of the old one, and the new one

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
    """What happens to a model after the building of its optimizer, looked for in every step.

    Args:
        params: what the optimizer was given; a module is asked alone where its parameters are.
        groups: of the optimizer.
        copies: of plain parameters, over which group DDP copies them; what is found is added. None where that does
            not matter.

    Attributes:
        ddp: modules that DDP has made around parameters of the groups.
    """

    def __init__(self, params: object, groups: _Groups, copies: dict[int, dist.ProcessGroup] | None) -> None:
        self._model = weakref.ref(params) if isinstance(params, nn.Module) else None
        self._copies = copies
        self._sites: dict[int, _Site] = {}  # by ``id`` of the parameter
        self._wraps = -1  # as many as there were when copies were looked for
        self.ddp: list[weakref.ref[nn.parallel.DistributedDataParallel]] = []
        self._find_copies(groups)

    def note(self, groups: _Groups) -> None:
        """Remember where modules hold the parameters of ``groups``: what takes their place there is found by it."""
        held = {id(p): p for group in groups for p in group["params"] if isinstance(p, nn.Parameter)}
        held = {key: param for key, param in held.items() if not isinstance(param, OwnedTensor)}
        self._sites = {key: site for key, site in self._sites.items() if key in held}
        model = None if self._model is None else self._model()
        for module in [] if model is None else model.modules():
            for name, param in module._parameters.items():
                if param is not None and id(param) in held:
                    self._sites[id(param)] = param, weakref.ref(module), name
        others = [param for key, param in held.items() if key not in self._sites]
        found = sites_of(others)[1] if others else {}
        self._sites |= {key: (held[key], weakref.ref(at[0][0]), at[0][1]) for key, at in found.items()}

    def is_uneven(self) -> bool:
        """Whether parameters are in a ``Join`` context."""
        for ref in self.ddp:
            module = ref()
            if module is not None and takes_uneven_inputs(module):
                return True
        return False

    def follow(self, groups: _Groups, names: Mapping[int, str], state: MutableMapping[Any, dict[str, Any]]) -> bool:
        """Look once more. Puts new parameters into ``groups`` and ``state``; tells whether anything was found.

        Args:
            names: of parameters, by ``id``.

        Raises:
            RuntimeError: the model trains other parameters than those in ``groups``.
        """
        moved: dict[int, Tensor | None] = {}
        for key, (param, ref, name) in self._sites.items():
            module = ref()
            if module is not None and module._parameters.get(name) is not param:
                moved[key] = module._parameters.get(name)
        if not moved and (self._copies is None or self._wraps == len(ddp_wraps())):
            return False
        cut = _cut_since(moved, groups) if moved else []
        if moved and not cut:
            self._require_held(moved, groups, names)
        copies = self._find_copies(groups)
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

    def _require_held(self, moved: Mapping[int, Tensor | None], groups: _Groups, names: Mapping[int, str]) -> None:
        """Raise RuntimeError where a step would train nothing, or what no module holds, in place of the model."""
        held = {id(p): p for group in groups for p in group["params"]}
        lost = [key for key in moved if key in held and not isinstance(held[key], DTensor)]
        found = [
            key for key in lost if (now := moved[key]) is not None and now.grad is not None and id(now) not in held
        ]
        gone = len(lost) == len(self._sites) and all(p.grad is None for p in held.values())
        for key in found or (lost if gone else []):
            raise RuntimeError(
                f"parameter {names[key]!r} is no longer the one that its module holds, so that the model would not be "
                "trained: something has replaced parameters since the optimizer was built, such as "
                "load_state_dict(assign=True) or a wrapper; build the optimizer after that"
            )

    def _find_copies(self, groups: _Groups) -> dict[int, dist.ProcessGroup]:
        """What was not known before, by ``id``. All modules are searched only if DDP has wrapped another one."""
        if self._copies is None or self._wraps == (wraps := len(ddp_wraps())):
            return {}
        self._wraps = wraps
        params = (param for group in groups for param in group["params"])
        found = replicated_by_any(p for p in params if not isinstance(p, DTensor) and id(p) not in self._copies)
        self._copies.update(found)
        if self._copies:
            model = None if self._model is None else self._model()
            held = {id(p) for group in groups for p in group["params"]}
            around = [m for m in ([] if model is None else model.modules()) if _is_ddp(m)]
            around = around or [m for m in gc.get_objects() if _is_ddp(m)]
            self.ddp = [weakref.ref(m) for m in around if any(id(p) in held for p in m.parameters())]
        return found


def _is_ddp(module: object) -> TypeGuard[nn.parallel.DistributedDataParallel]:
    return issubclass(type(module), nn.parallel.DistributedDataParallel)


def _cut_since(moved: Mapping[int, Tensor | None], groups: _Groups) -> list[_Cut]:
    """What ``fully_shard`` or tensor parallelism has put into the place of a parameter.

    Raises:
        RuntimeError: gradients were computed before.
    """
    cut: list[_Cut] = []
    late = early = False
    for group in groups:
        for index, param in enumerate(group["params"]):
            now = moved.get(id(param))
            if isinstance(now, DTensor) and now.shape == param.shape and _dimensions(now) > _dimensions(param):
                cut.append((group["params"], index, now))
                early, late = early or param.grad is not None, late or now.grad is not None
    if early and not late:
        raise RuntimeError(
            "the model was sharded between backward() and Muon.step(), and its gradients belong to the parameters "
            "from before; call zero_grad(), and run forward and backward again"
        )
    return cut


def _dimensions(param: Tensor) -> int:
    """Of the mesh. Between forward and backward FSDP2 shows parameters of fewer."""
    return param.device_mesh.ndim if isinstance(param, DTensor) else 0


def _cut(new: Tensor, old: Tensor, value: Any, name: str) -> Any:
    """``value``, of a parameter ``old``, as ``new`` is cut."""
    if not isinstance(value, Tensor) or value.shape != old.shape or not value.ndim:
        return value
    return like_param(new, part_like(new, value, name).clone())
