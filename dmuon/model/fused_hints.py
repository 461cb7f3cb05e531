"""What looks like several matrices in one tensor of which nothing is known: names are refused, sizes alone are told."""

from __future__ import annotations

from math import prod

import torch.nn as nn
from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from dmuon.model.families import is_listed, stored_form
from dmuon.model.matrix_spec import MatrixSpec
from dmuon.model.module_tree import ModuleTree

# A name decides only together with a shape that is not square, and never says where the parts lie.
_FUSED = (
    *("qkv", "c_attn", "query_key_value", "queries_keys_values"),
    *("key_value", "keys_values", "to_kv", "kv_proj", "kv_a_proj", "kv_b_proj", "wkv_a", "wkv_b"),
    *("gate_up", "up_gate", "w12", "w13", "w1_w3"),
    "in_proj",  # of state spaces: gates, inputs, states and time steps
)
_CONDITIONING = ("adaln", "modulation", "scale_shift", "shift_scale")  # of models of one's own: told, not refused
_SHARES = (2, 3, 4)  # gate and up, or keys and values; queries, keys and values; those and a gate


def refusal(tree: ModuleTree, module: nn.Module, name: str, param: Tensor, fqn: str) -> str | None:
    """Why a tensor of unknown make is not orthogonalized as it is, and what to write; ``None`` if it may be.

    Args:
        fqn: the name of the parameter from its model, or what is known of that.
    """
    form = _form(module, name, param)
    if form is None or not _is_meant(tree, module, name, param, form):
        return None
    stored = ", transposed=True" if form.transposed else ", flattened=True" if form.flattened else ""
    layers = fqn.split(".")
    tail = ".".join(layers[1 + max((i for i, layer in enumerate(layers) if layer.isdigit()), default=-1) :])
    pattern = fqn if tail == fqn else f"*.{tail}"
    return (
        f"of shape {tuple(param.shape)} looks like several projections fused into one tensor, and dmuon does not know "
        "how this class lays them out; orthogonalizing it whole is not what Muon does to its parts. Say which these "
        f"are: select=lambda fqn, module, param: dmuon.MatrixSpec(parts=(…){stored}) if fqn.endswith({tail!r}) else "
        f"... (repeats=heads if each head has such parts; dmuon.MatrixSpec({stored.lstrip(', ')}) if it is one "
        f"matrix), or keep it on AdamW: exclude=[{pattern!r}]"
    )


def looks_fused(tree: ModuleTree, module: nn.Module, name: str, param: Tensor) -> bool:
    """Whether a tensor of unknown make is named so, or has as many outputs as several parts that another one takes."""
    form = _form(module, name, param)
    if form is None:
        return False
    if _is_meant(tree, module, name, param, form) or _is_named(tree, module, name, param, form, _CONDITIONING):
        return True
    if param.ndim == 3 and not form.flattened:
        return _is_halved(module, name, param)
    return isinstance(module, nn.Linear) and any(
        path.count(".") == 1 and _is_shared_out(parent, module) for parent, path in tree.above(module, name)
    )


def _form(module: nn.Module, name: str, param: Tensor) -> MatrixSpec | None:
    form = stored_form(module, name, param)
    return None if form is None or form.num_heads != 1 or "bias" in name else form


def _is_meant(tree: ModuleTree, module: nn.Module, name: str, param: Tensor, form: MatrixSpec) -> bool:
    """Whether who wrote the class must have meant several matrices, be it listed with other sizes or named so."""
    return (
        is_listed(tree, module, name) or _is_named(tree, module, name, param, form, _FUSED) or _is_of_glu(tree, module)
    )


def _is_named(
    tree: ModuleTree, module: nn.Module, name: str, param: Tensor, form: MatrixSpec, hints: tuple[str, ...]
) -> bool:
    if (param.ndim == 2 or form.flattened) and param.shape[0] == prod(param.shape[1:]):
        return False
    names = [name] if name != "weight" else _names(tree, module)
    return any(hint in held.lower() for hint in hints for held in names)


def _names(tree: ModuleTree, module: nn.Module) -> list[str]:
    """What a layer is called, and what modules are called in which it is the only one, such as one with its norm."""
    found = []
    for parent, path in tree.above(module, "weight"):
        name, _, rest = path.partition(".")
        inner = parent._modules[name].modules() if rest else ()  # type: ignore[union-attr]
        if rest == "weight" or sum(isinstance(layer, (nn.Linear, _ConvNd)) for layer in inner) == 1:
            found.append(name)
    return found


def _is_of_glu(tree: ModuleTree, module: nn.Module) -> bool:
    """Whether it is the layer of a gated linear unit that has no other one for its gates."""
    if not isinstance(module, nn.Linear) or module.out_features % 2:
        return False
    for unit, path in tree.above(module, "weight"):
        if path.count(".") == 1 and "glu" in type(unit).__name__.lower():
            others = [layer for layer in _linears(unit) if layer is not module]
            alike = any((m.in_features, m.out_features) == (module.in_features, module.out_features) for m in others)
            return not alike and not any(layer.in_features == module.out_features for layer in others)
    return False


def _is_shared_out(parent: nn.Module, module: nn.Linear) -> bool:
    """Whether a later layer below ``parent`` takes an equal part of what this one gives, and none takes all."""
    linears = _linears(parent)
    if any(layer.in_features == module.out_features and layer is not module for layer in linears):
        return False
    later = {(layer.in_features, layer.out_features) for layer in linears[linears.index(module) + 1 :]}
    return any((module.out_features / share, module.in_features) in later for share in _SHARES)


def _linears(parent: nn.Module) -> list[nn.Linear]:
    return [layer for layer in parent.modules() if isinstance(layer, nn.Linear)]


def _is_halved(module: nn.Module, name: str, param: Tensor) -> bool:
    """Whether another stack of the module takes half of what a stack gives, whichever way they are stored."""
    others = [p for n, p in module._parameters.items() if p is not None and p.ndim == 3 and n != name]
    for out, into in ((1, 2), (2, 1)):
        taken = {(other.shape[into], other.shape[out]) for other in others}
        whole = any(takes == param.shape[out] for takes, _ in taken)
        if (param.shape[out] / 2, param.shape[into]) in taken and not whole:
            return True
    return False
