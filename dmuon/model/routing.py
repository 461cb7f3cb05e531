"""Which parameters Muon takes, and which block each belongs to. Pure: no communication, nothing is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch.nn as nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from dmuon.model.blocks import BlockPredicate, blocks_by_module, canonical_fqn, find_blocks

UNINITIALIZED = "of a lazy module has no shape yet; run one forward before this, which gives it one"

Select = Callable[[str, nn.Module, nn.Parameter], bool]
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
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
        block: canonical name of its block, or ``None`` when Muon does not take it.
        block_module: the block itself, or ``None``.
        reason: one phrase for people.
    """

    fqn: str
    param: nn.Parameter
    sites: tuple[tuple[nn.Module, str], ...]
    block: str | None
    block_module: nn.Module | None
    reason: str

    @property
    def muon(self) -> bool:
        return self.block is not None


def route_parameters(
    model: nn.Module,
    select: Select | None = None,
    blocks: Sequence[nn.Module] | BlockPredicate | None = None,
) -> list[Route]:
    """Route every parameter of ``model`` to Muon or AdamW, in the order of ``named_parameters``.

    By default Muon takes every trainable matrix that is the ``weight`` of a layer inside a block. Blocks are the
    elements of the outermost ``ModuleList``s, ``Sequential``s and ``ModuleDict``s with keys 0, 1, … that have
    children of their own; a ``Sequential``'s stem and head, which do not repeat, are none. Embeddings, tied or
    declared output heads, norms, recurrent weights, other bare parameters (tables, stacked biases, state matrices),
    1-D parameters and everything outside blocks stay on AdamW.

    Args:
        select: ``select(fqn, module, param) -> bool`` decides instead of the default rule.
        blocks: the blocks themselves, or ``blocks(fqn, module) -> bool``; default as above.

    Raises:
        TypeError: ``select`` returned something that is not a bool.
        ValueError: no matrix was selected, a selected parameter lies in no block or in two, is not a matrix, or
            has a fused layout that the shape alone does not settle; blocks that overlap or are never called; an
            embedding has sparse gradients.
    """
    if isinstance(model, ScriptModule):
        raise ValueError(
            "this model was compiled by torch.jit.script, which hides its layers: give dmuon the module that it was "
            "made of, whose parameters it shares, or give dmuon.Muon groups with use_muon"
        )
    owner_block = blocks_by_module(find_blocks(model, blocks))
    embeddings = _embedding_ids(model)
    parents = {id(child): module for module in model.modules() for child in module.children()}
    routes = []
    for fqn, param, sites in _parameters_with_sites(model):
        if is_lazy(param):
            raise ValueError(f"parameter {fqn!r} {UNINITIALIZED}")
        _refuse_sparse(fqn, param, sites)
        reason = _why_not(fqn, param, sites, owner_block, embeddings)
        if select is not None:
            chosen = select(fqn, sites[0][0], param)
            if not isinstance(chosen, bool):
                raise TypeError(f"select({fqn!r}, …) returned {chosen!r}; return True or False")
            if chosen:
                _require_selectable(fqn, param, sites, owner_block)
            reason = None if chosen else "excluded by select"
        if reason is not None:
            routes.append(Route(fqn, param, sites, None, None, reason))
            continue
        _refuse_reparametrized(fqn, sites)
        if select is None:
            _refuse_fused(fqn, sites[0], param, parents)
        block_fqn, block = _single_block(fqn, sites, owner_block)
        why = "chosen by select" if select is not None else "matrix inside a block"
        routes.append(Route(fqn, param, sites, block_fqn, block, why))
    if not any(r.muon for r in routes):
        raise ValueError(
            f"no matrix was selected for Muon: {_why_none(select, blocks)}; name the blocks with blocks=[…] or the "
            "matrices with select=…"
        )
    return routes


def _why_none(select: Select | None, blocks: Sequence[nn.Module] | BlockPredicate | None) -> str:
    if select is not None:
        return "select returned False for every parameter"
    if blocks is not None:
        return "no trainable layer with a 2-D weight lies inside the given blocks"
    return (
        "no trainable layer with a 2-D weight lies inside a block (an element of a ModuleList or Sequential that has "
        "children of its own)"
    )


def _embedding_ids(model: nn.Module) -> dict[int, str]:
    """``id(param) -> reason`` for embeddings, what is tied to them, and declared input and output embeddings."""
    reasons: dict[int, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, _EMBEDDINGS):
            reasons[id(module.weight)] = f"embedding {canonical_fqn(name) or type(module).__name__}"
    for getter, reason in (
        ("get_input_embeddings", "input embedding"),
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


def _parameters_with_sites(
    model: nn.Module,
) -> Iterator[tuple[str, nn.Parameter, tuple[tuple[nn.Module, str], ...]]]:
    sites: dict[int, list[tuple[nn.Module, str]]] = {}
    first: dict[int, tuple[str, nn.Parameter]] = {}
    for module_name, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            fqn = canonical_fqn(f"{module_name}.{name}" if module_name else name)
            sites.setdefault(id(param), []).append((module, name))
            first.setdefault(id(param), (fqn, param))
    for key, (fqn, param) in first.items():
        yield fqn, param, tuple(sites[key])


def _why_not(
    fqn: str,
    param: nn.Parameter,
    sites: Sequence[tuple[nn.Module, str]],
    owner_block: dict[int, list[tuple[str, nn.Module]]],
    embeddings: dict[int, str],
) -> str | None:
    if param.ndim < 2:
        return f"{param.ndim}-D"
    if id(param) in embeddings:
        return f"{'tied to ' if len(sites) > 1 else ''}{embeddings[id(param)]}"
    if any(id(module) not in owner_block for module, _ in sites):
        return "outside blocks"
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


def _require_selectable(
    fqn: str,
    param: nn.Parameter,
    sites: Sequence[tuple[nn.Module, str]],
    owner_block: dict[int, list[tuple[str, nn.Module]]],
) -> None:
    if param.ndim != 2 or not param.is_floating_point() or param.numel() == 0:
        raise ValueError(
            f"select chose {fqn!r} of shape {tuple(param.shape)} and {param.dtype}; Muon takes 2-D floating-point "
            "matrices that are not empty: return False for it"
        )
    if any(id(module) not in owner_block for module, _ in sites):
        raise ValueError(f"select chose {fqn!r}, which lies outside every block; name its block with blocks=[…]")
    for module, _ in sites:
        if isinstance(module, nn.RNNBase):  # it computes with a list of its own, not with its registered parameters
            raise ValueError(
                f"select chose {fqn!r} of a {type(module).__name__}, which keeps references to its weights and would "
                "not see new ones: return False for it"
            )


def _single_block(
    fqn: str, sites: Sequence[tuple[nn.Module, str]], owner_block: dict[int, list[tuple[str, nn.Module]]]
) -> tuple[str, nn.Module]:
    holders = {id(block): (name, block) for module, _ in sites for name, block in owner_block[id(module)]}
    if len(holders) > 1:
        names = sorted(name for name, _ in holders.values())
        raise ValueError(
            f"parameter {fqn!r} is shared by blocks {', '.join(names)}; untie it, keep it on AdamW with select=…, or "
            "name one block that contains both with blocks=[…]"
        )
    return next(iter(holders.values()))


def _refuse_sparse(fqn: str, param: nn.Parameter, sites: Sequence[tuple[nn.Module, str]]) -> None:
    for module, _ in sites:
        if param.requires_grad and isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ValueError(
                f"parameter {fqn!r} is that of {type(module).__name__}(sparse=True), whose gradient is sparse; Muon "
                "and AdamW update whole tensors: build it with sparse=False, or freeze it"
            )


def _refuse_reparametrized(fqn: str, sites: Sequence[tuple[nn.Module, str]]) -> None:
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
