"""What looks like several matrices in one tensor, though nothing is known of it, and what it probably is made of."""

from __future__ import annotations

from math import prod

import torch.nn as nn
from torch import Tensor

from dmuon.model.families import stored_form
from dmuon.model.matrix_spec import MatrixSpec
from dmuon.model.module_tree import ModuleTree

# A hint alone decides nothing; together with a shape that is not square it makes a layout ambiguous.
_QUERIES_KEYS_VALUES = ("qkv", "c_attn", "query_key_value", "queries_keys_values")
_KEYS_VALUES = ("key_value", "keys_values", "to_kv", "kv_proj", "kv_a_proj", "kv_b_proj", "wkv_a", "wkv_b")
_GATED = ("gate_up", "up_gate", "w13", "w1_w3")
_OTHER = ("in_proj",)  # of state spaces: gates, inputs, states and time steps
_HINTS = _QUERIES_KEYS_VALUES + _KEYS_VALUES + _GATED + _OTHER
_FUSED_PARTS = (2, 3, 4)  # gate and up, or keys and values; queries, keys and values; those and a gate


def fused_look(tree: ModuleTree, module: nn.Module, name: str, param: Tensor) -> MatrixSpec | None:
    """What a tensor of unknown make looks to be made of; ``None`` if it does not look fused.

    The parts are empty where neither its shape nor what stands beside it says how long they are.
    """
    form = stored_form(module, name, param)
    if form is None or form.num_heads != 1 or "bias" in name:
        return None
    if param.ndim == 3 and not form.flattened:
        return _fused_stack(module, name, param)
    rows, cols = (param.shape[1], param.shape[0]) if form.transposed else (param.shape[0], prod(param.shape[1:]))
    holders = _names_around(tree, module, name)
    count = _split_after(tree, module)
    if count is None and not (rows != cols and any(hint in holder for hint in _HINTS for holder in holders)):
        return None
    parts: tuple[int, ...] = () if count is None else (rows // count,) * count
    if any(hint in holder for hint in _QUERIES_KEYS_VALUES for holder in holders):
        shared = (rows - cols) // 2
        parts = (cols, shared, shared) if shared > 0 and rows == cols + 2 * shared else parts
    elif not parts and any(hint in holder for hint in _GATED for holder in holders) and rows % 2 == 0:
        parts = (rows // 2, rows // 2)
    return MatrixSpec(parts, transposed=form.transposed, flattened=form.flattened)


def _names_around(tree: ModuleTree, module: nn.Module, name: str) -> list[str]:
    """The names under which the layer is held, or the name of the parameter if it is no layer's weight."""
    if name != "weight":
        return [name.lower()]
    return [path.split(".")[0].lower() for _, path in tree.above(module, name) if path.count(".") == 1]


def _split_after(tree: ModuleTree, layer: nn.Module) -> int | None:
    """Of 2, 3 or 4 equal parts of the layer's output, how many: if a later sibling takes one, and none takes all."""
    if not isinstance(layer, nn.Linear):
        return None
    for parent, path in tree.above(layer, ""):
        if path.count(".") != 1:
            continue
        linears = tree.linears_below(parent)
        if linears.others_take(layer):
            continue
        places: list[tuple[int, int]] = []
        for parts in _FUSED_PARTS:
            width, rest = divmod(layer.out_features, parts)
            place = None if rest else linears.first_after(layer, width, layer.in_features)
            if place is not None:
                places.append((place, parts))
        if places:
            return min(places)[1]
    return None


def _fused_stack(module: nn.Module, name: str, param: Tensor) -> MatrixSpec | None:
    """Gates beside what they gate, in a stack of which another one takes half of the output."""
    others = [p for n, p in module._parameters.items() if p is not None and p.ndim == 3 and n != name]
    for transposed in (False, True):
        out, into = (2, 1) if transposed else (1, 2)
        taken = {(other.shape[into], other.shape[out]) for other in others}
        half = param.shape[out] // 2
        whole = any(takes == param.shape[out] for takes, _ in taken)
        if param.shape[out] == 2 * half and (half, param.shape[into]) in taken and not whole:
            return MatrixSpec((half, half), transposed=transposed)
    if any(hint in name.lower() for hint in _HINTS):
        return MatrixSpec()
    return None


def refusal(tree: ModuleTree, module: nn.Module, name: str, param: Tensor, fqn: str) -> str | None:
    """Why a tensor of unknown make is not orthogonalized as it is, and what to write; ``None`` if it may be.

    Args:
        fqn: the name of the parameter from its model, or what is known of that.
    """
    look = fused_look(tree, module, name, param)
    if look is None:
        return None
    form = "transposed=True" if look.transposed else "flattened=True" if look.flattened else ""
    parts = f"parts={look.parts}" if look.parts else "parts=(…)"
    layers = fqn.split(".")
    tail = ".".join(layers[1 + max((i for i, layer in enumerate(layers) if layer.isdigit()), default=-1) :])
    return (
        f"of shape {tuple(param.shape)} looks like {len(look.parts) or 'several'} projections fused into one tensor, "
        "and its class is not known; orthogonalizing it whole is not what Muon does to its parts. Say which these are: "
        f"select=lambda fqn, module, param: dmuon.MatrixSpec({', '.join(filter(None, (parts, form)))}) if "
        f"fqn.endswith({tail!r}) else ... (repeats=heads if each head has such parts; dmuon.MatrixSpec({form}) if it "
        "is one matrix)"
    )
