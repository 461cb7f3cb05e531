"""Which parameters Muon takes, and which block each belongs to. Pure: no communication, nothing is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch.nn as nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from dmuon.model.blocks import (
    BlockPredicate,
    NamedModule,
    blocks_by_module,
    canonical_fqn,
    given_blocks,
    own_blocks,
    stacked_blocks,
)
from dmuon.model.end_layers import INPUT_LAYER, OUTPUT_LAYER, Layer, find_end_layers, find_input_convolution
from dmuon.model.matrix_spec import MatrixSpec

UNINITIALIZED = "of a lazy module has no shape yet; run one forward before this, which gives it one"

Select = Callable[[str, nn.Module, nn.Parameter], "bool | MatrixSpec"]
_Blocks = Sequence[nn.Module] | BlockPredicate | None
_Sites = tuple[tuple[nn.Module, str], ...]
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_INSIDE = "matrix inside a block"
_INPUT_EMBEDDING = "input embedding"
_NORMS = (nn.LayerNorm, nn.RMSNorm)  # their weights have as many dimensions as what they normalize
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_ATTENTION_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
# A hint alone decides nothing; together with a shape that is not square it makes a layout ambiguous.
_FUSED_HINTS = (
    "qkv", "c_attn", "query_key_value", "key_value", "to_kv", "kv_proj", "in_proj", "gate_up", "up_gate",
)  # fmt: skip
_FUSED_PARTS = (2, 3, 4)  # gate and up, or keys and values; queries, keys and values; those and a gate


@dataclass(frozen=True, slots=True)
class Route:
    """Where one parameter goes, and why.

    Attributes:
        fqn: canonical name of the parameter (its first site).
        param: the parameter itself.
        sites: every ``(module, attribute)`` that holds it.
        muon: whether Muon takes it.
        reason: one phrase for people.
        block: canonical name of its block; ``None`` where Muon does not take it, and where blocks do not matter.
        block_module: the block itself, or ``None``.
        spec: which matrices the parameter is made of.
    """

    fqn: str
    param: nn.Parameter
    sites: tuple[tuple[nn.Module, str], ...]
    muon: bool
    reason: str
    block: str | None = None
    block_module: nn.Module | None = None
    spec: MatrixSpec = field(default_factory=MatrixSpec)


def route_parameters(model: nn.Module, select: Select | None = None) -> list[Route]:
    """Route every parameter of ``model`` to Muon or AdamW, in the order of ``named_parameters``.

    By default Muon takes every trainable matrix that is the ``weight`` of a hidden layer. Where layers repeat, those
    are the layers inside blocks: the elements of the outermost ``ModuleList``s, ``Sequential``s and ``ModuleDict``s
    with keys 0, 1, … that have children of their own; a ``Sequential``'s stem and head, which do not repeat, are none,
    and a convolution that takes the model's input is not hidden in any.
    Where nothing repeats, they are all but the input and output layers (:func:`find_end_layers`); if these are all
    that there is, Muon takes the input layers. Embeddings, tied or declared output heads, norms, recurrent weights,
    other bare parameters (tables, stacked biases, state matrices) and 1-D parameters stay on AdamW.

    Args:
        select: ``select(fqn, module, param)`` decides instead of the default rule: ``True``, ``False``, or the
            :class:`MatrixSpec` by which Muon takes the parameter.

    Raises:
        TypeError: ``select`` returned something else.
        ValueError: no matrix was selected, a selected parameter is no matrix or stack or does not fit its spec, or a
            parameter has a fused layout that the shape alone does not settle; an embedding has sparse gradients.
    """
    routes, _ = _route(model, select, None)
    _require_some(routes, select, None)
    return routes


def route_to_blocks(
    model: nn.Module,
    select: Select | None = None,
    blocks: Sequence[nn.Module] | BlockPredicate | None = None,
) -> list[Route]:
    """As :func:`route_parameters`, and every matrix of Muon has a block, which is called when its weight is used.

    Args:
        blocks: the blocks themselves, or ``blocks(fqn, module) -> bool``; they are also what is inside blocks. By
            default the elements of stacks, and where nothing repeats, the model's layers (:func:`own_blocks`).

    Raises:
        TypeError, ValueError: as :func:`route_parameters`, and for a selected parameter that lies in no block or in
            two, and blocks that overlap or are never called.
    """
    routes, found = _route(model, select, blocks)
    _require_some(routes, select, blocks)
    if found is None:
        found = own_blocks(model, [[module for module, _ in r.sites] for r in routes if r.muon])
    table = blocks_by_module(found)
    placed = []
    for route in routes:
        if route.muon:
            name, block = _single_block(route.fqn, route.sites, table)
            route = replace(route, block=name, block_module=block)
        placed.append(route)
    return placed


_Named = tuple[str, nn.Parameter, _Sites]  # canonical name, parameter, everything that holds it


def _route(model: nn.Module, select: Select | None, blocks: _Blocks) -> tuple[list[Route], list[NamedModule] | None]:
    """Routes without blocks, and the blocks that are given or repeat; None if there are none."""
    if isinstance(model, ScriptModule):
        raise ValueError(
            "this model was compiled by torch.jit.script, which hides its layers: give dmuon the module that it was "
            "made of, whose parameters it shares, or give dmuon.Muon groups with use_muon"
        )
    params: list[_Named] = list(_parameters_with_sites(model))
    for fqn, param, sites in params:
        if is_lazy(param):
            raise ValueError(f"parameter {fqn!r} {UNINITIALIZED}")
        _refuse_sparse(fqn, param, sites)
    embeddings = _embedding_ids(model)
    fit = [s for _, p, s in params if _why_never(p, s, embeddings) is None and _why_unfit(p, s) is None]
    stacks = stacked_blocks(model, {id(module) for sites in fit for module, _ in sites}) or None
    found = stacks if blocks is None else given_blocks(model, blocks)
    whole = found is not None and [block for _, block in found] == [model]  # which leaves nothing outside
    layers, embedded, heads = _layers(model, params, embeddings)
    if blocks is not None and not whole:
        within, left = _INSIDE, _outside(params, found or [])
    elif stacks is not None:
        within, left = _INSIDE, find_input_convolution(layers, embedded) | _outside(params, stacks)
    else:
        within, left = "matrix of a hidden layer", find_end_layers(layers, embedded, heads)
    hidden = _hidden(params, embeddings, within, left)
    parents = {id(child): module for module in model.modules() for child in module.children()}
    routes = []
    for fqn, param, sites in params:
        (muon, reason), spec = hidden[id(param)], MatrixSpec()
        if select is not None:
            chosen = select(fqn, sites[0][0], param)
            if not isinstance(chosen, (bool, MatrixSpec)):
                raise TypeError(f"select({fqn!r}, …) returned {chosen!r}; return True or False, or a dmuon.MatrixSpec")
            if isinstance(chosen, MatrixSpec):
                spec = chosen
            muon = chosen is not False
            if muon:
                _require_selectable(fqn, param, sites, spec)
            reason = "chosen by select" if muon else "excluded by select"
        if muon:
            _refuse_reparametrized(fqn, sites)
            if select is None:
                _refuse_fused(fqn, sites[0], param, parents)
        routes.append(Route(fqn, param, sites, muon, reason, spec=spec))
    return routes, found


def _require_some(routes: Sequence[Route], select: Select | None, blocks: _Blocks) -> None:
    if any(route.muon for route in routes):
        return
    adamw = "or train this model with torch.optim.AdamW"
    if select is not None:
        why, remedy = "select returned False for every parameter", f"let it return True for a 2-D weight, {adamw}"
    elif blocks is not None:
        why, remedy = "no trainable layer with a 2-D weight lies inside the given blocks", "name others, or none"
    else:
        left = [r for r in routes if r.reason in (INPUT_LAYER, OUTPUT_LAYER) and _why_unfit(r.param, r.sites) is None]
        why, remedy = "no trainable layer has a 2-D weight", "train this model with torch.optim.AdamW"
        if left:
            names = ", ".join(f"{route.fqn!r} is an {route.reason}" for route in left[:3])
            why = f"no layer is hidden ({names}{', …' if len(left) > 3 else ''})"
            remedy = f"choose matrices with select=lambda fqn, module, param: fqn == {left[0].fqn!r}, {adamw}"
    raise ValueError(f"no matrix was selected for Muon: {why}; {remedy}")


def _embedding_ids(model: nn.Module) -> dict[int, str]:
    """``id(param) -> reason`` for embeddings, what is tied to them, and declared input and output embeddings."""
    reasons: dict[int, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, _EMBEDDINGS):
            reasons[id(module.weight)] = f"embedding {canonical_fqn(name) or type(module).__name__}"
    for getter, reason in (
        ("get_input_embeddings", _INPUT_EMBEDDING),
        ("get_output_embeddings", "output head"),
    ):
        try:
            module = getattr(model, getter)()
        except (AttributeError, NotImplementedError, TypeError):
            continue  # not there, or not the method that Hugging Face models have
        weight = getattr(module, "weight", None)
        if weight is not None:
            reasons.setdefault(id(weight), reason)
    return reasons


def _parameters_with_sites(model: nn.Module) -> Iterator[_Named]:
    sites: dict[int, list[tuple[nn.Module, str]]] = {}
    first: dict[int, tuple[str, nn.Parameter]] = {}
    for module_name, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            fqn = canonical_fqn(f"{module_name}.{name}" if module_name else name)
            sites.setdefault(id(param), []).append((module, name))
            first.setdefault(id(param), (fqn, param))
    for key, (fqn, param) in first.items():
        yield fqn, param, tuple(sites[key])


def _hidden(
    params: Sequence[_Named], embeddings: Mapping[int, str], within: str, left: Mapping[int, str]
) -> dict[int, tuple[bool, str]]:
    """The default rule: whether Muon takes a parameter and why, by id.

    Args:
        within: why a matrix is hidden.
        left: why others are not, by id.
    """
    decided: dict[int, tuple[bool, str]] = {}
    inputs: list[int] = []
    for _, param, sites in params:
        never, unfit = _why_never(param, sites, embeddings), _why_unfit(param, sites)
        reason = never or left.get(id(param)) or unfit
        decided[id(param)] = (reason is None, reason or within)
        if reason == INPUT_LAYER and unfit is None:
            inputs.append(id(param))
    if not any(muon for muon, _ in decided.values()):
        decided |= dict.fromkeys(inputs, (True, f"{INPUT_LAYER} of a model without hidden layers"))
    return decided


def _outside(params: Sequence[_Named], blocks: Sequence[NamedModule]) -> dict[int, str]:
    inside = blocks_by_module(blocks)
    return {id(p): "outside blocks" for _, p, sites in params if any(id(module) not in inside for module, _ in sites)}


def _layers(
    model: nn.Module, params: Sequence[_Named], embeddings: Mapping[int, str]
) -> tuple[list[Layer], set[int], set[int]]:
    """What :func:`find_end_layers` asks for: layers in the order of the model, widths of embeddings, known heads."""
    order = {id(module): i for i, module in enumerate(model.modules())}
    layers: list[tuple[int, Layer]] = []
    embedded: set[int] = set()
    heads: set[int] = set()
    for _, param, sites in params:
        for module, name in sites:
            if isinstance(module, _RECURRENT):
                embedded |= {module.hidden_size, 2 * module.hidden_size}
            if isinstance(module, _EMBEDDINGS):
                embedded.add(param.shape[1])
            elif param.ndim >= 2 and _why_no_layer(module, name) is None:
                layer = Layer.of(module, param)
                if embeddings.get(id(param)) == _INPUT_EMBEDDING:
                    embedded.add(layer.gives)
                    continue
                layers.append((order[id(module)], layer))
                if id(param) in embeddings:
                    heads.add(id(param))
    return [layer for _, layer in sorted(layers, key=lambda item: item[0])], embedded, heads


def _why_never(param: nn.Parameter, sites: _Sites, embeddings: Mapping[int, str]) -> str | None:
    """Why this is nothing for Muon wherever it lies."""
    if param.ndim < 2:
        return f"{param.ndim}-D"
    if id(param) in embeddings:
        return f"{'tied to ' if len(sites) > 1 else ''}{embeddings[id(param)]}"
    return None


def _why_unfit(param: nn.Parameter, sites: _Sites) -> str | None:
    """Why a tensor of two dimensions or more is not a matrix that Muon takes."""
    if param.ndim != 2:
        return f"{param.ndim}-D, not one matrix"
    if not param.is_floating_point():
        return f"{param.dtype}, not floating point"
    if not param.requires_grad:
        return "frozen"
    if param.numel() == 0:
        return "empty"
    return next((why for why in (_why_no_layer(module, name) for module, name in sites) if why is not None), None)


def _why_no_layer(module: nn.Module, name: str) -> str | None:
    """Why the parameter ``name`` of ``module`` is not the matrix of a linear layer; None if it is."""
    kind = type(module).__name__
    if isinstance(module, _NORMS):
        return f"weight of {kind}"
    if isinstance(module, _RECURRENT):
        return f"recurrent weight of {kind}"
    if name == "weight" or (isinstance(module, nn.MultiheadAttention) and name in _ATTENTION_WEIGHTS):
        return None
    if _reparametrized(module, name) is not None:
        return None  # is refused
    return f"bare parameter of {kind}, not the weight of a layer"


def _reparametrized(module: nn.Module, name: str) -> str | None:
    """What computes the layer's weight from this parameter, if anything does."""
    if isinstance(module, ParametrizationList):
        return ", ".join(type(m).__name__ for m in module)
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, (WeightNorm, SpectralNorm)) and name.startswith(f"{hook.name}_"):
            return type(hook).__name__
    return None


def _require_selectable(fqn: str, param: nn.Parameter, sites: _Sites, spec: MatrixSpec) -> None:
    if param.ndim < 2 or not param.is_floating_point() or param.numel() == 0:
        raise ValueError(
            f"select chose {fqn!r} of shape {tuple(param.shape)} and {param.dtype}; Muon takes 2-D floating-point "
            "matrices that are not empty, and tensors made of such: return False for it"
        )
    try:
        spec.matrix_shape(param.shape)
    except ValueError as fault:
        raise ValueError(f"select chose {fqn!r}: {fault}") from None
    for module, _ in sites:
        if isinstance(module, nn.RNNBase):  # it computes with a list of its own, not with its registered parameters
            raise ValueError(
                f"select chose {fqn!r} of a {type(module).__name__}, which keeps references to its weights and would "
                "not see new ones: return False for it"
            )


def _single_block(fqn: str, sites: _Sites, table: Mapping[int, Sequence[NamedModule]]) -> NamedModule:
    if any(id(module) not in table for module, _ in sites):
        raise ValueError(f"select chose {fqn!r}, which lies outside every block; name its block with blocks=[…]")
    holders = {id(block): (name, block) for module, _ in sites for name, block in table[id(module)]}
    if len(holders) > 1:
        names = sorted(name for name, _ in holders.values())
        raise ValueError(
            f"parameter {fqn!r} is shared by blocks {', '.join(names)}; untie it, keep it on AdamW with select=…, or "
            "name one block that contains both with blocks=[…]"
        )
    return next(iter(holders.values()))


def _refuse_sparse(fqn: str, param: nn.Parameter, sites: _Sites) -> None:
    for module, _ in sites:
        if param.requires_grad and isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ValueError(
                f"parameter {fqn!r} is that of {type(module).__name__}(sparse=True), whose gradient is sparse; Muon "
                "and AdamW update whole tensors: build it with sparse=False, or freeze it"
            )


def _refuse_reparametrized(fqn: str, sites: _Sites) -> None:
    for module, name in sites:
        source = _reparametrized(module, name)
        if source is not None:
            raise ValueError(
                f"parameter {fqn!r} is parametrized by {source}: what Muon makes orthogonal would not be the layer's "
                "weight. Remove the parametrization, or keep it on AdamW with select=…"
            )


def _refuse_fused(fqn: str, site: tuple[nn.Module, str], param: nn.Parameter, parents: dict[int, nn.Module]) -> None:
    module, name = site
    rows, cols = param.shape
    holder = fqn.lower().split(".")[-2] if "." in fqn else ""
    hinted = rows != cols and any(hint in holder for hint in _FUSED_HINTS)
    attention = isinstance(module, nn.MultiheadAttention) and name == "in_proj_weight"
    if hinted or attention or _is_split_after(module, parents):
        raise ValueError(
            f"parameter {fqn!r} of shape {(rows, cols)} looks like several projections fused into one tensor; "
            "orthogonalizing it whole is not what Muon does to its parts. Split the layer, or say which matrices Muon "
            "takes with select=lambda fqn, module, param: …"
        )


def _is_split_after(layer: nn.Module, parents: dict[int, nn.Module]) -> bool:
    """Whether a later sibling takes one of 2, 3 or 4 equal parts of the layer's output, and none takes all of it."""
    parent = parents.get(id(layer))
    if not isinstance(layer, nn.Linear) or parent is None:
        return False
    linears = [m for m in parent.modules() if isinstance(m, nn.Linear)]
    if any(m.in_features == layer.out_features for m in linears if m is not layer):
        return False
    later = linears[linears.index(layer) + 1 :]
    return any(
        m.out_features == layer.in_features and layer.out_features == parts * m.in_features
        for m in later
        for parts in _FUSED_PARTS
    )
