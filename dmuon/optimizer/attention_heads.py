"""Where the attention modules of a model make their queries and keys, by what they call the layers that do."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from dmuon.model.blocks import canonical_fqn
from dmuon.model.fused_layouts import Unknown, size
from dmuon.model.makeup import ModuleTree, known_spec, stored, stored_form
from dmuon.model.matrix_spec import is_remembered, spec_of
from dmuon.platform.torch_private import flattened_by_fsdp1

# What attention modules call that which makes queries and keys: of MLA; apart; fused, queries first and keys next.
_LATENT = (("q_b_proj", "kv_b_proj"), ("q_proj", "kv_b_proj"), ("wq_b", "wkv_b"), ("wq", "wkv_b"))
_APART = (("q_proj", "k_proj"), ("query", "key"), ("wq", "wk"), ("to_q", "to_k"), ("q_lin", "k_lin"), ("q", "k"))
_CROSS = (("q_attn", "c_attn[0]"),)  # whose fused layer has keys and values alone
_FUSED = tuple((f"{n}[0]", f"{n}[1]") for n in ("c_attn", "query_key_value", "qkv_proj", "qkv", "Wqkv", "to_qkv"))
_FUSED_LATER = (("to_qkv[0]", "to_qkv[1]"), ("to_q", "to_kv[0]"))  # of diffusers, which keeps what it has fused
_OTHERWISE = ("CodeGen",)  # classes with the same names and another order
_HEAD_DIM = "head_dim|attention_head_size|head_size|dim_head|key_value_proj_dim"
_NUM_HEADS = "num_heads|num_attention_heads|n_heads|n_head|heads"
_NORM = re.compile(r"(q|k|qk|query|key)_?(layer|rms)?_?(norm|ln)|(layer)?_?(norm|ln)_?(q|k|query|key)", re.IGNORECASE)
_QUERIES_KEYS = frozenset({"q", "k", "qkv", "query", "key", "queries", "keys"})  # words of names of what makes them
_ATTENDS = re.compile("attention|attn|mha|mhsa|multi_?head", re.IGNORECASE)  # in names of classes
_MAKES_QUERIES = re.compile("(^|_)w?(q|qk|qkv|query|queries)(_|$)", re.IGNORECASE)  # in names of layers
SAY_WHERE = "heads={'name of the module': dmuon.AttentionHeads(query=…, key=…, num_heads=…)}"


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """Where an attention module makes its queries and keys.

    Args:
        query, key: names, in the module, of the layers or parameters that make them, such as ``"q_proj"``. Parts of a
            fused one have numbers, as in its :class:`dmuon.MatrixSpec`: ``"qkv[0]"`` and ``"qkv[1]"``.
        num_heads: of queries, in the whole model.
        num_kv_heads: of keys; ``None``: as many.
        shared_rotary: how many of the last rows of each head of queries meet a key that all heads share, as in MLA.
    """

    query: str
    key: str
    num_heads: int
    num_kv_heads: int | None = None
    shared_rotary: int = 0

    @property
    def keys(self) -> int:
        """Heads of keys."""
        return self.num_kv_heads or self.num_heads


AttentionModules = dict[str, tuple[nn.Module, AttentionHeads]]


def attention_modules(model: nn.Module, heads: Mapping[str, AttentionHeads] | None) -> AttentionModules:
    """By name, those of ``heads`` or all that are known, which must be all that there are."""
    found: AttentionModules = {}
    tree = ModuleTree(model.modules())
    named = {canonical_fqn(name): module for name, module in model.named_modules()}
    for name, module in named.items():
        if heads is None:
            spec = _known_heads(tree, module)
        else:
            spec = next((one for pattern, one in heads.items() if fnmatchcase(name, pattern)), None)
        if spec is not None:
            found[name] = module, spec
            other = _other_source(module, spec) if heads is None else None
            if other is not None:
                raise ValueError(
                    f"QKClip: {name!r} ({type(module).__name__}) makes queries or keys by {other!r} too, and would be "
                    f"scaled at {spec.query!r} and {spec.key!r} alone; name what is to be clipped: {SAY_WHERE}"
                )
        for child, norm in module.named_modules() if spec is not None and not spec.shared_rotary else ():
            if _NORM.fullmatch(child.rpartition(".")[2]) and not isinstance(norm, nn.Identity):
                raise ValueError(
                    f"QKClip: {name!r} normalizes queries or keys by {child!r}, which undoes any scaling of their rows "
                    f"and bounds logits by itself; leave the module out, by naming the others: {SAY_WHERE}"
                )
    for name, module in named.items() if heads is None else ():
        if name not in found and _may_attend(module, [known for known, _ in found.values()]):
            raise ValueError(f"QKClip: nothing is known of {name!r} ({type(module).__name__}); say where: {SAY_WHERE}")
    unmet = [pattern for pattern in heads or () if not any(fnmatchcase(name, pattern) for name in named)]
    if unmet or not found:
        what = f"called {unmet[0]!r}" if unmet else "known as attention"
        raise ValueError(f"QKClip: no module of {type(model).__name__} is {what}; say where it is: {SAY_WHERE}")
    return found


def _may_attend(module: nn.Module, known: Sequence[nn.Module]) -> bool:
    """Whether a class is named after attention and has layers that may make queries and keys: its own, or none known.

    A class of another name may attend too if one of its layers makes queries, and it is no part of known attention.

    Args:
        known: attention modules of which that is known.
    """
    layers = [name for name, layer in module.named_children() if getattr(stored(layer, "weight"), "ndim", 0) > 1]
    if not _ATTENDS.search(type(module).__name__):
        makes_queries = any(map(_MAKES_QUERIES.search, layers))
        return makes_queries and not any(module is sub for one in known for sub in one.modules())
    has_matrix = any(param.ndim > 1 for param in module.parameters())
    return bool(layers) or (has_matrix and not any(one is sub for one in known for sub in module.modules()))


def _other_source(module: nn.Module, spec: AttentionHeads) -> str | None:
    """A layer or bias beside those of ``spec`` that is named after queries or keys, such as for a second input."""
    known = {path.partition("[")[0] for path in (spec.query, spec.key)}
    if _is_fused_later(module):
        known |= {"to_q", "to_k", "add_q_proj", "add_k_proj"}  # which it does not use any more
    for name, held in (*module.named_children(), *module.named_parameters(recurse=False)):
        words = set(name.lower().split("_"))
        source = held if isinstance(held, nn.Parameter) else stored(held, "weight")
        is_source = source is not None and source.ndim < 3 and not _NORM.fullmatch(name)
        is_latent = spec.shared_rotary > 0 and "a" in words  # of which queries are made
        if is_source and words & _QUERIES_KEYS and name not in known and not is_latent:
            return name
    return None


def _is_fused_later(module: nn.Module) -> bool:
    return getattr(module, "fused_projections", False) is True


def _known_heads(tree: ModuleTree, module: nn.Module) -> AttentionHeads | None:
    """Of a module that names its layers as known families do; None of others, which may be no attention."""
    if any(base.__name__.startswith(_OTHERWISE) for base in type(module).__mro__):
        return None
    for query, key in _FUSED_LATER if _is_fused_later(module) else (*_LATENT, *_APART, *_CROSS, *_FUSED):
        try:
            (_, _, rows), (_, _, key_rows) = (layer_of(module, path, tree) for path in (query, key))
            if query.endswith("[0]") and len(_parts_of(module, query, tree)[2]) != 3:
                continue  # keys and values alone, or two sets of queries and keys
            rotary = size(module, "qk_rope_head_dim") if (query, key) in _LATENT else 0
        except (Unknown, ValueError):
            continue
        try:
            length = size(module, "qk_nope_head_dim" if rotary else _HEAD_DIM)
        except Unknown:
            try:
                length = len(rows) // size(module, _NUM_HEADS)
            except Unknown:
                return None
        return AttentionHeads(query, key, len(rows) // (length + rotary), len(key_rows) // length, rotary)
    return None


def layer_of(module: nn.Module, path: str, tree: ModuleTree | None = None) -> tuple[Tensor, Tensor | None, Tensor]:
    """Weight and bias of what ``path`` names in ``module``, and its outputs that are meant, in order.

    Args:
        tree: of the model, to know by its class what a layer is made of before anybody remembers that.
    """
    weight, bias, parts = _parts_of(module, path, tree)
    number = int(path.rstrip("]").partition("[")[2] or 0)
    if number >= len(parts):
        raise ValueError(f"QKClip: {type(module).__name__} has no matrix {path!r}; say where it has: {SAY_WHERE}")
    return weight, bias, torch.cat([torch.arange(*run) for run in parts[number]])


def _parts_of(
    module: nn.Module, path: str, tree: ModuleTree | None
) -> tuple[Tensor, Tensor | None, Sequence[Sequence[tuple[int, int]]]]:
    """Weight and bias of what ``path`` names, and runs of outputs of each of its matrices; none if it is no matrix."""
    holder: Any = module
    *above, last = path.partition("[")[0].split(".")
    for one in above:
        holder = getattr(holder, one, None)
    if isinstance(layer := getattr(holder, "_modules", {}).get(last), nn.Module):
        holder, last = layer, "weight"
    weight: Any = stored(holder, last)
    bias = stored(holder, last.replace("weight", "bias")) if last.endswith("weight") else None
    parts: Sequence[Sequence[tuple[int, int]]] = ()
    if weight is not None and weight.ndim < 2 and flattened_by_fsdp1(weight):
        raise ValueError("QKClip: FSDP1 cuts weights at any element, through rows; use torch's fully_shard (FSDP2)")
    if weight is not None and weight.ndim == 2:
        found = spec_of(weight)
        if tree is not None and not is_remembered(weight):
            found = known_spec(tree, holder, last, weight) or stored_form(holder, last, weight) or found
        spec = replace(found, num_heads=1)
        parts = spec.runs(spec.matrix_shape(weight.shape)[spec.dim])
    return weight, bias, parts
