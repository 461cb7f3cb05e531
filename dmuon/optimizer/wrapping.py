"""What users do to a model before or after they build its optimizer: DDP copies parameters, FSDP1 flattens them.

So it is here that an optimizer finds where its matrices live, and who averages the gradients of each trained
parameter over ranks: exactly one that is known, or the user hears of it.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from dmuon.comm.process_groups import grid_of_groups, ranks_of, this_rank
from dmuon.dedicated.dedication import averaged_by_dmuon, dedicated_residencies, left_to_others, planned_ns
from dmuon.dedicated.owned_tensor import OwnedTensor
from dmuon.dedicated.runtime import runtime_of
from dmuon.exchanged.config import DistributedConfig
from dmuon.exchanged.exchange import exchange_for
from dmuon.kernels import is_capturing
from dmuon.model.blocks import canonical_fqn
from dmuon.model.makeup import sites_of
from dmuon.model.matrix_spec import (
    FlatShard,
    Names,
    fault_of,
    flat_of,
    is_remembered,
    remember_flat,
    remember_spec,
    spec_of,
)
from dmuon.planning.cost_cache import NsOptions
from dmuon.platform.host import all_living, logger
from dmuon.platform.torch_private import (
    FlatUnit,
    current_backward,
    ddp_wraps,
    flat_unit,
    flattened_by_fsdp1,
    has_group,
    left_by_ddp,
    managed_by_fsdp,
    reduced_by_ddp,
    replicate_group,
    takes_uneven_inputs,
    unsharded_together,
)
from dmuon.step.residency import Alone, Residency

_Groups = Iterable[Mapping[str, Any]]
_Site = tuple[Tensor, weakref.ref[nn.Module], str]  # a parameter, a module that holds it, and its name there

_log = logger(__name__)


def replicated_by_ddp(tensors: Iterable[Tensor]) -> dict[int, dist.ProcessGroup]:
    """The group over which ``DistributedDataParallel`` or ``replicate`` averages a parameter's gradient, by ``id``.

    By whichever module that lives: parameters may have been given alone, or been wrapped since. The collector of
    garbage knows all modules. Where nothing communicates it is not asked.
    """
    wanted = {id(tensor) for tensor in tensors if not isinstance(tensor, DTensor)}
    if not wanted or not dist.is_initialized() or dist.get_world_size() == 1:
        return {}

    def found() -> dict[int, dist.ProcessGroup]:
        return {key: group for key, group in _copied_by(all_living(nn.Module)).items() if key in wanted}

    if not found():
        return {}
    gc.collect()  # it may be by a module that nobody can reach any more
    return found()


def _copied_by(modules: Iterable[nn.Module]) -> dict[int, dist.ProcessGroup]:
    copies: dict[int, dist.ProcessGroup] = {}
    for module in modules:
        unit = flat_unit(module)
        if unit is not None and not unit.sharded and unit.group.size() > 1:  # FSDP1 with NO_SHARD
            copies |= {id(param): unit.group for param, *_ in unit.members}
        group = replicate_group(module)
        if group is not None and has_group(group):
            copies |= {id(param): group for param in reduced_by_ddp(module)}
    return copies


def blocks_of_fsdp() -> dict[int, tuple[Any, nn.Module]]:
    """By ``id`` of the sharded parameter, what FSDP2 unshards it with, and the module."""
    modules = [module for module in all_living(nn.Module) if isinstance(module, FSDPModule)]
    groups = [(group, params, module) for module in modules for group, params in unsharded_together(module)]
    return {id(param): (group, module) for group, params, module in groups for param in params}


class Wrapping:
    """What happens to a model after the building of its optimizer, looked for in every step.

    Args:
        params: what the optimizer was given; a module is asked alone where its parameters are.
        by_user: a configuration says who averages gradients, so that copies are looked for once.

    Attributes:
        copies: by ``id``, over which group DDP copies plain parameters.
        ddp: modules that DDP has made around parameters of the groups.
    """

    def __init__(self, params: object, groups: _Groups, *, by_user: bool) -> None:
        self._model = weakref.ref(params) if isinstance(params, nn.Module) else None
        self.copies: dict[int, dist.ProcessGroup] = {}
        self._by_user = by_user
        self._sites: dict[int, _Site] = {}  # by ``id`` of the parameter
        self._wraps = -1  # as many as there were when copies were looked for
        self._frozen: list[Tensor] | None = None  # what nobody would average; None before anyone has looked
        self._told: set[int] = set()  # ids of what nobody averages
        self._newcomers: set[int] = set()  # ids of what the model has got since, of which a warning was given
        self.ddp: list[weakref.ref[nn.parallel.DistributedDataParallel]] = []
        self._find_copies(groups)

    def note(self, groups: _Groups) -> None:
        """Remember where modules hold the parameters of ``groups``: what takes their place there is found by it."""
        self._frozen = None
        held = {id(p): p for group in groups for p in group["params"] if isinstance(p, nn.Parameter)}
        held = {key: p for key, p in held.items() if not isinstance(p, OwnedTensor) and not flattened_by_fsdp1(p)}
        self._sites = {key: site for key, site in self._sites.items() if key in held}
        model = None if self._model is None else self._model()
        for module in [] if model is None else model.modules():
            for name, param in module._parameters.items():
                if param is not None and id(param) in held:
                    self._sites[id(param)] = param, weakref.ref(module), name
        others = [param for key, param in held.items() if key not in self._sites]
        found = sites_of(others)[1] if others else {}
        self._sites |= {key: (held[key], weakref.ref(at[0][0]), at[0][1]) for key, at in found.items()}

    def follow(self, groups: _Groups, names: Names) -> bool:
        """Look once more; tells whether DDP copies parameters that it did not copy before.

        Raises:
            RuntimeError: the model trains other parameters than those in ``groups``.
        """
        moved: dict[int, Tensor | None] = {}
        for key, (param, ref, name) in self._sites.items():
            module = ref()
            if module is not None and module._parameters.get(name) is not param:
                moved[key] = module._parameters.get(name)
        if not moved and (self._by_user or self._wraps == len(ddp_wraps())):
            return False
        if moved:
            self._require_held(moved, groups, names)
        copies = self._find_copies(groups)
        if not copies:
            return False
        if this_rank() == dist.get_process_group_ranks(next(iter(copies.values())))[0]:  # one of them tells the log
            _log.info(
                "Muon: since it was built, %d of its matrices were wrapped in DistributedDataParallel; from now on "
                "each matrix that several ranks hold has one owner",
                sum(id(p) in copies for group in groups if group["use_muon"] for p in group["params"]),
            )
        return True

    def _require_held(self, moved: Mapping[int, Tensor | None], groups: _Groups, names: Names) -> None:
        """Raise RuntimeError where a step would train nothing, or what no module holds, in place of the model."""
        held = {id(p): p for group in groups for p in group["params"]}
        for key, now in moved.items():
            if key in held and _dimensions(now) > _dimensions(held[key]):
                raise RuntimeError(
                    f"parameter {names[key]!r} was cut by fully_shard or tensor parallelism since the optimizer was "
                    "built, which would train what the model no longer holds: build the optimizer after that, and load "
                    "the state dict of this one into it; where a forward without backward came before it was built, "
                    "call model.reshard() in between; under reshard_after_forward=2, or more, where one came before "
                    "this step, call reshard() of each module of FSDP2 behind it"
                )
        lost = [key for key, now in moved.items() if key in held and _mesh_of(now) == _mesh_of(held[key])]
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

    def require_averaged(self, groups: _Groups, names: Names) -> None:
        """Look once for each layout, and when something is trained that was frozen and that nobody averages.

        Raises:
            RuntimeError: DistributedDataParallel holds a trained parameter that its reducer does not know.
        """
        if self._frozen is not None and not any(param.requires_grad for param in self._frozen):
            return
        params = [param for group in groups for param in group["params"]]
        self._told &= set(map(id, params))  # others may get the ids of those that are gone
        alone = [] if self._by_user else [p for p in params if not isinstance(p, DTensor) and flat_of(p) is None]
        if not dist.is_initialized() or dist.get_world_size() == 1:
            alone = []
        if alone:
            known = replicated_by_ddp(alone).keys() | averaged_by_dmuon()
            alone = [param for param in alone if id(param) not in known]
        trained = [param for param in alone if param.requires_grad and id(param) not in self._told]
        if trained:
            _tell(trained, {id(p) for p in params if isinstance(p, DTensor) and not isinstance(p, OwnedTensor)}, names)
            self._told.update(map(id, trained))
        self._frozen = [param for param in alone if not param.requires_grad]

    def tell_newcomers(self, groups: _Groups) -> None:
        """Say once of each what the model that the optimizer was given has got since: no step trains it."""
        model = None if self._model is None else self._model()
        held = {id(p) for group in groups for p in group["params"]} | self._newcomers
        named = () if model is None else model.named_parameters()
        new = {canonical_fqn(name): id(p) for name, p in named if id(p) not in held and p.grad is not None}
        if new:
            self._newcomers.update(new.values())
            _log.warning(
                "Muon: the model got %s after the optimizer was built, which does not train them: build it when they "
                "are there, or give them to add_param_group",
                listed_names([*new]),
            )

    def _find_copies(self, groups: _Groups) -> dict[int, dist.ProcessGroup]:
        """What was not known before, by ``id``. All modules are searched only if DDP has wrapped another one."""
        wraps = len(ddp_wraps())
        if self._wraps == wraps or (self._by_user and self._wraps >= 0):
            return {}
        self._wraps = wraps
        params = [param for group in groups for param in group["params"]]
        found = replicated_by_ddp(p for p in params if id(p) not in self.copies)
        self.copies.update(found)
        if self.copies:
            held, around = set(map(id, params)), all_living(nn.parallel.DistributedDataParallel)
            self.ddp = [weakref.ref(m) for m in around if any(id(p) in held for p in m.parameters())]
        return found


def _mesh_of(param: Tensor | None) -> DeviceMesh | None:
    """Between forward and backward FSDP2 shows parameters over another one, or over none."""
    return param.device_mesh if isinstance(param, DTensor) else None


def _dimensions(param: Tensor | None) -> int:
    """Of the mesh."""
    mesh = _mesh_of(param)
    return 0 if mesh is None else mesh.ndim


# -- what FSDP1 has flattened: where the pieces lie, and the shapes before, by which parameters are routed -------------

_REMEDY = "wrap the model with use_orig_params=True, or use torch's fully_shard (FSDP2)"
_GATHERED = (
    "FullyShardedDataParallel (FSDP1) has gathered parameters: build the optimizer, and call step(), outside of "
    "forward, backward and summon_full_params"
)


def _units(params: Iterable[Tensor]) -> list[FlatUnit]:
    """What FSDP1 has made of ``params``, by whichever modules that live; in the order of the parameters."""
    order = {id(param): number for number, param in enumerate(filter(flattened_by_fsdp1, params))}
    if not order:
        return []
    found: dict[int, FlatUnit] = {}
    for unit in filter(None, map(flat_unit, all_living(FullyShardedDataParallel))):
        numbers = [order[id(param)] for param, *_ in unit.members if id(param) in order]
        if numbers:
            found[min(numbers)] = unit
    return [found[number] for number in sorted(found)]


def note_flat_shards(params: Iterable[Tensor]) -> None:
    """Let those of ``params`` that FSDP1 has cut know of what they are pieces.

    Collective where ranks hold copies of shards and no mesh says which.

    Raises:
        ValueError: FSDP1 does not keep the parameters, or they are DTensors.
    """
    flattened = list(filter(flattened_by_fsdp1, params))
    known: set[int] = set()
    rows: dict[tuple[dist.ProcessGroup, dist.ProcessGroup | None], tuple[tuple[int, ...], ...]] = {}
    for unit in _units(flattened):
        known |= {id(param) for param, *_ in unit.members}
        if unit.tensor_parallel:
            raise ValueError(
                "parameters of FullyShardedDataParallel (FSDP1) over tensor parallelism are DTensors cut as one row; "
                "use torch's fully_shard (FSDP2)"
            )
        for param, shape, begin, _ in unit.members if unit.sharded else ():
            if flat_of(param) is None:
                groups = unit.group, unit.copies
                if groups not in rows:
                    rows[groups] = _rows(unit)
                remember_flat(param, FlatShard(shape, begin, unit.length, rows[groups]))
    for tensor in flattened:
        if id(tensor) not in known:
            raise ValueError(
                f"a parameter of shape {tuple(tensor.shape)} was flattened by FullyShardedDataParallel (FSDP1), which "
                f"does not say of which matrices it is made: {_REMEDY}"
            )


def _rows(unit: FlatUnit) -> tuple[tuple[int, ...], ...]:
    if unit.copies is None:
        return (ranks_of(unit.group),)
    if unit.rows is not None:
        return tuple(map(tuple, unit.rows))
    ranks, shards = grid_of_groups({"fsdp": unit.group, "dp": unit.copies}).ranks, unit.group.size()
    copies = len(ranks) // shards
    return tuple(tuple(ranks[shard * copies + copy] for shard in range(shards)) for copy in range(copies))


def fault_of_flat(params: Iterable[Tensor]) -> ValueError | None:
    """Why those of ``params`` that FSDP1 has flattened cannot be laid out; None if they can."""
    for unit in _units(params):
        for param, *_ in unit.members if unit.sharded else ():
            if flat_of(param) is None:
                return ValueError(
                    "the model was wrapped in FullyShardedDataParallel (FSDP1) since the optimizer was built; build "
                    "the optimizer after that"
                )
            if param.ndim != 1:
                return ValueError(_GATHERED)
    return None


@contextmanager
def in_original_shapes(params: Iterable[Tensor]) -> Iterator[dict[int, Tensor]]:
    """While inside, modules hold parameters of the shapes before in the place of those of ``params`` that are cut.

    They have no memory. What is remembered of them is, behind, remembered of those whose place they took.

    Returns:
        By ``id`` of either, the other one.
    """
    swap: dict[int, Tensor] = {}
    held: list[tuple[nn.Module, str, nn.Parameter]] = []
    pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
    for unit in _units(params):
        for param, shape, _, sites in unit.members if unit.sharded else ():
            stand_in = nn.Parameter(torch.empty(shape, dtype=param.dtype, device="meta"), param.requires_grad)
            if is_remembered(param):
                remember_spec(stand_in, spec_of(param), fault_of(param))
            swap |= {id(param): stand_in, id(stand_in): param}
            held += [(module, name, param) for module, name in sites]
            pairs.append((param, stand_in))
    if any(module._parameters.get(name) is not param or param.ndim != 1 for module, name, param in held):
        raise ValueError(_GATHERED)
    try:
        for module, name, param in held:
            module._parameters[name] = swap[id(param)]  # type: ignore[assignment]
        yield swap
    finally:
        for module, name, param in held:
            module._parameters[name] = param
        for param, stand_in in pairs:
            if is_remembered(stand_in):
                remember_spec(param, spec_of(stand_in), fault_of(stand_in))


# -- where matrices live ----------------------------------------------------------------------------------------------


def find_residencies(
    params: Sequence[Tensor],
    names: Names,
    config: DistributedConfig | None,
    copies: Mapping[int, dist.ProcessGroup],
    device: torch.device,
    ns: NsOptions,
    strategies: Mapping[int, str],
) -> list[Residency]:
    """Where the parameters of Muon live: those that dmuon owns first, and what is exchanged last.

    Collective, as building the optimizer is. Arguments are those of :func:`exchange_for`.
    """
    others = [p for p in params if not isinstance(p, OwnedTensor)]
    if (flat_fault := fault_of_flat(others)) is not None:
        raise flat_fault
    # Frozen, or without elements, which only a configuration, or FSDP1, tells from the shard of a matrix.
    shards = [p for p in others if flat_of(p) or not (config is None or isinstance(p, DTensor))]
    may_be_empty = set(map(id, shards))
    idle = [p for p in others if not p.requires_grad or (p.numel() == 0 and id(p) not in may_be_empty)]
    without = set(map(id, idle))
    others = [p for p in others if id(p) not in without]
    for fault in filter(None, map(fault_of, others)):
        raise ValueError(fault)
    labels = [names[id(p)] for p in others]
    if config is None and dist.is_initialized():
        left = left_to_others()
        copies = {**copies} | {id(p): left[id(p)][1] for p in others if id(p) in left and not isinstance(p, DTensor)}
    owned = planned_ns({runtime for param in params if (runtime := runtime_of(param)) is not None})
    exchange = exchange_for(config, copies, others, labels, device, ns, strategies, owned)
    alone = [*idle, *(others if exchange is None else exchange.alone())]
    dedicated = dedicated_residencies(params)
    return [*dedicated, *([Alone(alone)] if alone else []), *([] if exchange is None else [exchange])]


# -- who averages gradients -------------------------------------------------------------------------------------------
#
# FSDP2 and autograd do it for DTensors, DDP for what its reducer was given, and dmuon for all that a dedicated model
# holds. A rank has a parameter to itself where there is one process, or where the user says so by a configuration.
# Whole parameters beside those that tensor parallelism cuts have the same gradients on all of its ranks.

_NAMED = 3


def _tell(trained: Sequence[Tensor], dtensors: set[int], names: Names) -> None:
    gc.collect()
    modules = all_living(nn.Module)
    left = {id(param) for module in modules for param in left_by_ddp(module)}
    unknown = [names[id(param)] for param in trained if id(param) in left]
    if unknown:
        raise RuntimeError(
            f"DistributedDataParallel does not average the gradients of {listed_names(unknown)}: frozen when it "
            "wrapped the model, or later than that. Wrap it when they are there and trained; if your program averages "
            "them itself, let DDP ignore them (DistributedDataParallel._set_params_and_buffers_to_ignore_for_model)"
        )
    sharded = {id(p) for m in modules if isinstance(m, FSDPModule) for p in managed_by_fsdp(m)}
    if dtensors and not dtensors & sharded:
        return
    _log.warning(
        "Muon: nobody is known to average the gradients of %s over the %d ranks, so that each rank trains them by its "
        "own batch: shard or wrap what holds them (fully_shard, DistributedDataParallel), or call "
        "dmuon.dedicate_params; if your program averages them, or ranks shall differ, say so by "
        "distributed_config=dmuon.create_dtensor_config()",
        listed_names([names[id(param)] for param in trained]),
        dist.get_world_size(),
    )


def listed_names(names: Sequence[str]) -> str:
    """The first ones, quoted, and how many more there are."""
    more = f" and {len(names) - _NAMED} more parameters" if len(names) > _NAMED else ""
    return ", ".join(map(repr, names[:_NAMED])) + more


def check_moment(device: torch.device, wrapping: Wrapping, params: Set[int]) -> None:
    """Refuse a step where it would be recorded, be early, or wait for ranks that take none.

    Args:
        wrapping: of the model, in which DDP may average gradients, or let ranks leave a loop early.
        params: ids of what the optimizer trains.
    """
    if is_capturing(device):
        raise RuntimeError(
            "Muon.step() was called while a CUDA graph is being captured, which would replay this step's learning "
            "rate, votes and addresses for ever; capture forward and backward alone, and call step() outside"
        )
    if current_backward() is not None and (wrapping.copies or averaged_by_dmuon() & params):
        who = "DistributedDataParallel" if wrapping.copies else "dmuon"
        raise RuntimeError(
            f"Muon.step() was called inside backward, in which {who} has not averaged all gradients yet; call step() "
            "when backward() has returned"
        )
    if any((module := ref()) is not None and takes_uneven_inputs(module) for ref in wrapping.ddp):
        raise RuntimeError(
            "Muon.step() was called inside DistributedDataParallel.join(): ranks that run out of batches leave that "
            "loop, and the others would wait for them in every step; give all ranks the same number of batches"
        )
