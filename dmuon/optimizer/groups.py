"""Parameter groups of the optimizer: which parameters they hold, under what names, and which route each takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from types import EllipsisType
from typing import Any

import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from dmuon.dedicated.dedication import dedication_of, dedications
from dmuon.dedicated.matrix import require_resting
from dmuon.dedicated.owned_tensor import OwnedTensor
from dmuon.dedicated.runtime import runtime_of
from dmuon.model.blocks import canonical_fqn
from dmuon.model.makeup import (
    EMBEDDINGS,
    Holder,
    ModuleTree,
    declared_embeddings,
    longest_path,
    makeup_of,
    refusal,
    sites_of,
)
from dmuon.model.matrix_spec import MatrixSpec, Names, is_remembered, remember_spec, shape_of, spec_of
from dmuon.model.routing import UNINITIALIZED, Exclude, Route, Select, notice, route_parameters
from dmuon.optimizer.wrapping import in_original_shapes, note_flat_shards, replicated_by_ddp
from dmuon.planning.cost_cache import NS_DEFAULTS
from dmuon.platform.host import logger
from dmuon.platform.torch_private import local_tensor, unwrapped_for_ddp

_log = logger(__name__)

Remembered = tuple[MatrixSpec, str | None]  # of a parameter, with why Muon cannot train it


def param_groups(
    model: nn.Module, select: Select | None = None, exclude: Exclude | None = None
) -> list[dict[str, Any]]:
    """Groups with ``use_muon`` flags, by the same policy as ``dmuon.Muon(model)``.

    Args:
        model: any; also one of which a child, or several, went through ``dedicate_params``. These stay as they were
            routed there.

    Returns:
        Up to three groups: matrices for Muon, frozen ones too; tensors of two or more dimensions for AdamW; the rest
        for AdamW with ``weight_decay=0``. A model without a matrix for Muon is AdamW's, and the log says so.

    Raises:
        ValueError: ``select`` or ``exclude`` leave Muon nothing, or all that is hidden are bare parameters; ``select``
            or ``exclude`` beside ``dedicate_params``, which has routed already; trained parameters outside what was
            dedicated, whose gradients nobody averages.
    """
    if dedications(model):
        for name, option in (("select", select), ("exclude", exclude)):
            if option is not None:
                raise ValueError(
                    f"{name}: dedicate_params has routed this model already; pass {name} to dedicate_params"
                )
        return _groups(_routed_around(model))
    note_flat_shards(model.parameters())
    with in_original_shapes(model.parameters()) as swap:
        routes = route_parameters(inside_ddp(model), select, exclude)
        if (told := notice(routes)) is not None:
            _log.warning("%s", told)
        _remember(routes)
    return _groups([(swap.get(id(route.param), route.param), route.muon) for route in routes])


def _remember(routes: Iterable[Route]) -> None:
    """Let matrices for Muon remember of what they are made."""
    for route in routes:
        if route.muon:
            remember_spec(route.param, route.spec, route.fault)


def _routed_around(model: nn.Module) -> list[tuple[Tensor, bool]]:
    """Every parameter of a dedicated model, or of one that holds some, and whether Muon takes it.

    There as dedication routed it, which did not own what was frozen; outside, and what came later, by policy.
    """
    dedicated = ((root, dedication_of(root)) for root in model.modules())
    routed = [route for root, one in dedicated if one is not None for route in one.routes(root)]
    _remember(routed)  # FSDP2 may have put other parameters there since
    inside = {id(route.param): route.muon for route in routed}
    free = {id(p) for p in model.parameters() if not isinstance(p, OwnedTensor)} - inside.keys()
    if not free:
        return [(p, inside.get(id(p), True)) for p in model.parameters()]
    _require_averaged(model)

    def choose(_fqn: str, _module: nn.Module, param: nn.Parameter) -> bool | MatrixSpec | EllipsisType:
        if id(param) in free:
            return ...
        return spec_of(param) if inside.get(id(param), True) else False

    routes = route_parameters(model, choose)
    _remember(route for route in routes if id(route.param) in free)
    return [(route.param, route.muon) for route in routes]


def _require_averaged(model: nn.Module) -> None:
    """Raise ValueError if parameters outside every dedicated model in it would become others on every rank."""
    inside = {id(p) for part in model.modules() if dedication_of(part) is not None for p in part.parameters()}
    outside = [(name, p) for name, p in model.named_parameters() if id(p) not in inside]
    ranks = max(len(dedication.runtime.comm.ranks) for dedication in dedications(model))
    copied = replicated_by_ddp(p for _, p in outside)
    alone = [n for n, p in outside if p.requires_grad and not isinstance(p, DTensor) and id(p) not in copied]
    if ranks > 1 and alone:
        raise ValueError(
            f"{len(alone)} parameters ({', '.join(map(repr, alone[:3]))}{', …' if len(alone) > 3 else ''}) lie outside "
            f"the part of this model that was dedicated, and nobody averages their gradients over its {ranks} ranks: "
            "call dedicate_params on the whole model; or dmuon.fully_shard(model, mesh=mesh), or "
            "DistributedDataParallel around the module that holds them; freeze what is not trained, such as a copy for "
            "averages (requires_grad_(False)); or pass groups, if your program averages them"
        )


def _groups(routed: Sequence[tuple[Tensor, bool]], names: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Of parameters, and whether Muon takes each; ``names`` are theirs if the user gave any."""
    groups: list[dict[str, Any]] = [
        {"params": [], "use_muon": True},
        {"params": [], "use_muon": False},
        {"params": [], "use_muon": False, "weight_decay": 0.0},
    ]
    for i, (param, use_muon) in enumerate(routed):
        group = groups[0 if use_muon else 1 if len(shape_of(param)) >= 2 else 2]
        group["params"].append(param)
        if names is not None:
            group.setdefault("param_names", []).append(names[i])
    return [group for group in groups if group["params"]]


def groups_from(
    params: nn.Module | Iterable[Tensor] | Iterable[Mapping[str, Any]],
    select: Select | None,
    exclude: Exclude | None,
    lr_multipliers: Mapping[str, float] | None,
    names: Names,
) -> list[dict[str, Any]]:
    """What the user passed to ``Muon``, as groups that each have a ``use_muon`` flag.

    Args:
        names: of parameters, by ``id``, as far as they are known.
    """
    if isinstance(params, nn.Module):
        return _multiplied(param_groups(params, select, exclude), lr_multipliers, names)
    for name, option in (("select", select), ("exclude", exclude)):
        if option is not None:
            raise ValueError(f"{name} needs the model: call Muon(model, {name}=…), or set use_muon in each group")
    if isinstance(params, Tensor):
        raise TypeError("params must be a module, an iterable of tensors or an iterable of groups, got one tensor")
    if isinstance(params, Set):
        params = _ordered(params)
    items = list(params)
    if not items:
        raise ValueError("params is empty: Muon got no parameters")
    if all(isinstance(item, Mapping) for item in items):
        if lr_multipliers is not None:
            raise ValueError("lr_multipliers is for a model or its tensors; write lr_multiplier=… into your groups")
        groups = [dict(item) for item in items if isinstance(item, Mapping)]
        for index, group in enumerate(groups):
            if not isinstance(group.get("use_muon"), bool):
                raise ValueError(
                    f"group {index} lacks use_muon; set it to True (Muon) or False (AdamW), or pass the model: "
                    "Muon(model) sorts its parameters, and dmuon.param_groups(model) gives the groups of that"
                )
        if not any(group["use_muon"] for group in groups):
            _log.warning("Muon trains no parameter: no group has use_muon=True; AdamW trains all")
        return groups
    return _multiplied(_by_dimension(*_named_apart(items)), lr_multipliers, names)


def _multiplied(
    groups: list[dict[str, Any]], lr_multipliers: Mapping[str, float] | None, names: Names
) -> list[dict[str, Any]]:
    """``groups``, of each of which the parameters that have one factor are a group with that ``lr_multiplier``."""
    if lr_multipliers is None:
        return groups
    if not isinstance(lr_multipliers, Mapping):
        raise TypeError(f"lr_multipliers must map patterns of names to factors, got {type(lr_multipliers).__name__}")
    known, result, met = names_in(groups, names), list[dict[str, Any]](), set[str]()
    for group in groups:
        members: dict[float, list[int]] = {}
        for i, param in enumerate(group["params"]):
            pattern = next((p for p in lr_multipliers if fnmatchcase(known[id(param)], p)), None)
            members.setdefault(1.0 if pattern is None else lr_multipliers[pattern], []).append(i)
            met |= set() if pattern is None else {pattern}
        for factor, some in members.items():
            part = {**group, "lr_multiplier": factor}
            part |= {key: [group[key][i] for i in some] for key in ("params", "param_names") if key in group}
            result.append(part)
    for pattern in lr_multipliers:
        if pattern not in met:
            raise ValueError(
                f"lr_multipliers: {pattern!r} is the first to fit no parameter's name; names are those of "
                "model.named_parameters(), without wrappers, or those that come with tensors"
            )
    return result


def routed_groups(group: dict[str, Any]) -> list[dict[str, Any]]:
    """``group`` as groups that each go one way: by its ``use_muon``, or without that by dimension. It is changed.

    Raises:
        TypeError, ValueError: its parameters are no tensors, or do not say which way they go.
    """
    if not isinstance(group, dict):
        raise TypeError(f"a parameter group must be a dict, got {type(group).__name__}")
    if "params" not in group:
        raise ValueError("a parameter group lacks params; give it a tensor or a list of tensors")
    group["params"], names = _named_apart(group["params"])
    if names is not None:
        group["param_names"] = names
    if "use_muon" in group:
        if not isinstance(group["use_muon"], bool):
            raise ValueError("a parameter group lacks use_muon; set it to True (Muon) or False (AdamW)")
        if group["use_muon"]:
            _take(group["params"])
        return [group]
    routed = _by_dimension(group["params"], group.get("param_names"))
    for part in routed:
        if part["use_muon"]:
            _take(part["params"])
    given = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    return [{**part, **given} for part in routed] or [{**group, "use_muon": False}]


def _take(tensors: Sequence[Tensor]) -> None:
    """Let Muon take ``tensors`` by the matrices that the modules that hold them are known to make of them.

    A warning names embeddings among them, and output heads that are tied to one or declared to be such. Of other heads
    a tensor does not say what it is for.
    """
    with in_original_shapes(tensors) as swap:
        original = [swap.get(id(tensor), tensor) for tensor in tensors]
        undecided = [tensor for tensor in original if tensor.ndim > 1 and not _is_decided(tensor)]
        tree, sites = _sites(undecided)
        for tensor in undecided:
            holders = sites.get(id(tensor), ())
            if not holders:
                continue
            makeup = makeup_of(tree, tensor, holders)
            # A stack is what the group says, and a warning tells what looks fused.
            for module, name in () if makeup.known or tensor.ndim == 3 else holders:
                path = longest_path(tree.above(module, name))
                fault = refusal(tree, module, name, tensor, path)
                if fault is not None:
                    raise ValueError(
                        f"parameter {path!r} {fault}. That needs the model: dmuon.Muon(model, select=…), or groups of "
                        "dmuon.param_groups(model, select=…)"
                    )
            if makeup.known or makeup.unfit is None:
                remember_spec(tensor, makeup.spec)
        embeddings = _embeddings(tree, sites)
    for embedding in embeddings:
        _log.warning(
            "Muon: %s, which Muon(model) leaves to AdamW; given as a tensor it goes to Muon, as any of two dimensions: "
            "pass the model, or a group with use_muon=False",
            embedding,
        )


def _named_apart(params: Any) -> tuple[list[Tensor], list[str] | None]:
    """Tensors, and their names where the user gave pairs, as ``named_parameters()`` does."""
    items = [params] if isinstance(params, Tensor) else _ordered(params) if isinstance(params, Set) else list(params)
    named = [item for item in items if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)]
    if named and len(named) < len(items):
        raise ValueError("params has tensors with names and others without; give all of them names, or none")
    tensors = [item[1] for item in named] if named else items
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"params holds {type(tensor).__name__} and mixes tensors, groups or other things; pass tensors only or "
                "groups only"
            )
        if is_lazy(tensor):
            raise ValueError(f"a parameter {UNINITIALIZED}")
    note_flat_shards(tensors)
    return tensors, [item[0] for item in named] if named else None


def _by_dimension(tensors: Sequence[Tensor], names: Sequence[str] | None) -> list[dict[str, Any]]:
    """Groups of tensors: matrices, stacks and kernels to Muon, the rest to AdamW."""
    with in_original_shapes(tensors) as swap:
        routed = _routed_by_dimension([swap.get(id(param), param) for param in tensors])
    return _groups([(swap.get(id(param), param), use_muon) for param, use_muon in routed], names)


def _routed_by_dimension(tensors: Sequence[Tensor]) -> list[tuple[Tensor, bool]]:
    tree, sites = _sites([p for p in tensors if p.ndim > 2 and not _is_decided(p)])
    makeups = {id(p): makeup_of(tree, p, sites[id(p)]) for p in tensors if id(p) in sites}
    vectors = sum(p.ndim < 2 for p in tensors)
    if vectors:
        _log.warning("Muon: %d tensors of fewer than two dimensions go to AdamW", vectors)
    routed = []
    for param in tensors:
        makeup = makeups.get(id(param))
        why = f"it is {param.dtype}" if param.is_complex() else None if makeup is None else makeup.unfit
        if param.ndim > 2 and makeup is None and why is None and not is_remembered(param):
            raise ValueError(
                f"a parameter has shape {tuple(param.shape)}: dmuon cannot tell whether that is a stack of matrices; "
                "pass groups, with use_muon=True for stacks (e, m, n) and use_muon=False for anything else"
            )
        if param.ndim > 1 and why is not None:
            _log.warning("Muon: a tensor of shape %s goes to AdamW: %s", tuple(param.shape), why)
        routed.append((param, param.ndim > 1 and why is None))
    return routed


class AdamWGroup(dict[str, Any]):
    """A group of AdamW, in which ``momentum`` is another name of ``betas[0]``.

    ``OneCycleLR`` and ``CyclicLR`` write either ``momentum`` or ``betas``, the same to all groups. Muon's have
    momentum. ``in``, iteration and state dicts do not show the other name.
    """

    def __missing__(self, name: str) -> Any:
        if name != "momentum":
            raise KeyError(name)
        return self["betas"][0]

    def __setitem__(self, name: str, value: Any) -> None:
        if name == "momentum":
            name, value = "betas", (value, *self["betas"][1:])
        super().__setitem__(name, value)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name == "momentum" else super().get(name, default)

    def setdefault(self, name: str, default: Any = None) -> Any:
        return self[name] if name == "momentum" else super().setdefault(name, default)


def as_group(group: dict[str, Any]) -> dict[str, Any]:
    """``group`` as the optimizer keeps it."""
    return group if group.get("use_muon", True) or isinstance(group, AdamWGroup) else AdamWGroup(group)


def names_of(params: object) -> dict[int, str]:
    """Canonical names of a module's parameters, by ``id``; empty for anything but a module."""
    if not isinstance(params, nn.Module):
        return {}
    return {id(p): canonical_fqn(name) for name, p in inside_ddp(params).named_parameters()}


def names_in(groups: Sequence[Mapping[str, Any]], names: Names) -> dict[int, str]:
    """A name for each parameter of ``groups``, by ``id``.

    Args:
        names: what :func:`names_of` knows.
    """
    named: dict[int, str] = {}
    for g, group in enumerate(groups):
        given = group.get("param_names", ())
        for i, param in enumerate(group["params"]):
            name = names.get(id(param), param.fqn if isinstance(param, OwnedTensor) else None)
            if name is None and len(given) == len(group["params"]):
                name = given[i]
            named[id(param)] = name or f"parameter {i} of group {g}"
    return named


def restore_specs(specs: Iterable[tuple[Tensor, Remembered]]) -> None:
    """Torch moves a module of DTensors by swapping what they hold, and swaps away what was remembered of them."""
    for param, remembered in specs:
        if not is_remembered(param):
            remember_spec(param, *remembered)


def carry_over(
    groups: Sequence[Mapping[str, Any]],
    before: Sequence[Sequence[int]],
    names: dict[int, str],
    specs: Mapping[int, Remembered],
) -> None:
    """Give a parameter that was put in the place of another one its name and matrices, which are the same.

    Args:
        before: ids of the parameters that the groups held.
        names: by ``id``; changed.
        specs: of those parameters, by ``id``.
    """
    known = {key for ids in before for key in ids}
    held = {id(param) for group in groups for param in group["params"]}
    for group, ids in zip(groups, before, strict=False):
        for param, old in zip(group["params"], ids, strict=False) if len(ids) == len(group["params"]) else ():
            if id(param) in known or old in held:  # they come in another order, or others have left and joined
                continue
            if id(param) not in names and old in names:
                names[id(param)] = names.pop(old)
            if old in specs:
                remember_spec(param, *specs[old])


def inside_ddp(model: nn.Module) -> nn.Module:
    """The module that a ``DistributedDataParallel`` wraps; any other module itself."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        inner: nn.Module = model.module
        return inner
    return model


def _ordered(params: Set[Any]) -> list[Tensor]:
    """``params`` in an order that all ranks share: a set has none, but owned parameters have names."""
    if not all(isinstance(p, OwnedTensor) for p in params):
        raise TypeError("params is a set, whose order differs between ranks; pass a list, or owned_parameters(model)")
    return sorted(params, key=lambda p: (p.keeper.comm.monitor.name, p.fqn))  # several dedicated models may share names


def inherit_ns(group: dict[str, Any]) -> None:
    """Take what ``dedicate_params`` was told of Newton–Schulz for what the group leaves open; defaults for the rest."""
    runtimes = dict.fromkeys(filter(None, map(runtime_of, group["params"])))
    for name, value in [item for runtime in runtimes for item in runtime.ns_options.items()]:
        if group[name] is not None and group[name] != value:
            raise ValueError(
                f"{name}={group[name]!r}, and dedicate_params was told {name}={value!r}, by which it chose owners; "
                "leave it out here, or write the same in both"
            )
        group[name] = value
    for name, value in NS_DEFAULTS.items():
        group[name] = value if group[name] is None else group[name]


def check_param(param: Tensor, use_muon: bool, *, shards: bool, flat: bool) -> None:
    """Raise ValueError for a parameter that the route of its group cannot take.

    Args:
        shards: plain tensors may be shards, whose shapes say nothing of the whole ones.
        flat: they may have one dimension, or any number: a user's own functions know of what they are.
    """
    require_resting([param])
    name = param.fqn if isinstance(param, OwnedTensor) else f"of shape {shape_of(param)}"
    if use_muon and unwrapped_for_ddp(param):
        raise ValueError(
            f"parameter {name} is the local part of a DTensor that was unwrapped for DDP over tensor parallelism; use "
            "fully_shard over a mesh with a replicate dimension instead"
        )
    if param.is_meta:
        raise ValueError(
            f"parameter {name} is on the meta device; materialize the model (to_empty and its initialization) before "
            "building the optimizer"
        )
    if param.device.type == "mps":
        raise ValueError(f"parameter {name} is on mps, which has neither streams nor fp64; train on CUDA or the CPU")
    local = local_tensor(param)
    if any(size > 1 and stride == 0 for size, stride in zip(local.shape, local.stride(), strict=True)):
        raise ValueError(f"parameter {name} is expanded, so that elements share memory: give it a clone() of its data")
    if use_muon and not param.is_floating_point():
        raise ValueError(
            f"parameter {name} is {param.dtype}; Muon takes real matrices in floating point: put it in a group with "
            "use_muon=False"
        )
    if not use_muon:
        if isinstance(param, OwnedTensor):
            raise ValueError(f"parameter {name!r} is owned by dmuon and cannot be in a group with use_muon=False")
        return
    spec, ndim = spec_of(param), len(shape_of(param))
    if ndim not in (2, 3) and not (spec.flattened and ndim > 3) and not (flat and not isinstance(param, DTensor)):
        raise ValueError(
            f"parameter {name} has {ndim} dimensions; Muon takes matrices, and stacks of them (e, m, n): put it "
            "in a group with use_muon=False, or let select return dmuon.MatrixSpec(flattened=True) for a kernel "
            "(out, in, …)"
        )
    if isinstance(param, DTensor) or not shards:
        try:
            spec.matrix_shape(shape_of(param))
        except ValueError as fault:
            raise ValueError(f"parameter {name}: {fault}") from None


# -- models and groups of others ------------------------------------------------------------------------------------


def _embeddings(tree: ModuleTree, sites: Mapping[int, Sequence[Holder]]) -> list[str]:
    above = {key: [above for site in holders for above in tree.above(*site)] for key, holders in sites.items()}
    models = {id(module): module for holders in above.values() for module, _ in holders}
    declared = {id(weight): reason for model in models.values() for weight, reason in declared_embeddings(model)}
    found = []
    for key, holders in above.items():
        held = any(isinstance(module, EMBEDDINGS) for module, _ in sites[key])
        kind = "embedding" if held else declared.get(key)
        if kind is not None:
            found.append(f"{longest_path(holders)!r} is an {kind}")
    return found


def _is_decided(tensor: Tensor) -> bool:
    return isinstance(tensor, OwnedTensor) or is_remembered(tensor)


def _sites(tensors: Sequence[Tensor]) -> tuple[ModuleTree, dict[int, tuple[Holder, ...]]]:
    return sites_of(tensors) if tensors else (ModuleTree([]), {})
