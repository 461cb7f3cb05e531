"""Which matrices a stored tensor consists of, by the class of the module that holds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import torch.nn as nn
from torch import Tensor
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from dmuon.model.fused_layouts import RULES, Rule, Unknown
from dmuon.model.matrix_spec import MatrixSpec
from dmuon.model.module_tree import ModuleTree

_BY_PATH: dict[str, list[Rule]] = {}
for _rule in RULES:
    _BY_PATH.setdefault(_rule.path, []).append(_rule)


def known_spec(tree: ModuleTree, module: nn.Module, name: str, param: Tensor) -> MatrixSpec | None:
    """The matrices of the parameter ``name`` of ``module``, from its class and attributes and those above it.

    Nothing of any framework is imported: classes are known by their names and packages. What they say must agree with
    the shape of the parameter, and with the sizes that the module names.

    Returns:
        ``None`` if nothing is known of it, or if what is known does not agree.
    """
    form = stored_form(module, name, param)
    if form is None:
        return None
    rows = param.shape[1] if param.ndim == 3 and not form.flattened else _outputs(form, param.shape)
    found = _listed(tree, module, name)
    if found is None:
        return _halves_of_glu(tree, module, name, param, form)
    owner, rule = found
    try:
        spec = rule.layout(owner, rows)
        spec = replace(spec, transposed=spec.transposed or form.transposed, flattened=spec.flattened or form.flattened)
        spec.matrix_shape(param.shape)
    except (Unknown, ValueError):
        return None
    return spec


def is_listed(tree: ModuleTree, module: nn.Module, name: str) -> bool:
    """Whether it is known what the class holds there, be the sizes as they should or not."""
    return _listed(tree, module, name) is not None


def _listed(tree: ModuleTree, module: nn.Module, name: str) -> tuple[nn.Module, Rule] | None:
    for owner, path in reversed(tree.above(module, name)):
        numbered = ".".join("#" if part.isdigit() else part for part in path.split("."))
        for rule in _BY_PATH.get(numbered, ()):
            if _is_of(owner, rule):
                return owner, rule
    return None


def _halves_of_glu(
    tree: ModuleTree, module: nn.Module, name: str, param: Tensor, form: MatrixSpec
) -> MatrixSpec | None:
    """Of a layer that comes before ``nn.GLU`` in a ``Sequential``: what is gated, and its gates."""
    if name != "weight" or form.num_heads != 1 or not isinstance(module, (nn.Linear, _ConvNd)):
        return None
    features = {-1} if isinstance(module, nn.Linear) else {1, 1 - param.ndim}
    for holder, path in tree.above(module, name):
        if not isinstance(holder, nn.Sequential) or path.count(".") != 1:
            continue
        layers = [layer for layer in holder if not isinstance(layer, (nn.Dropout, nn.Identity))]
        following = dict(zip(map(id, layers), layers[1:], strict=False)).get(id(module))
        if isinstance(following, nn.GLU) and following.dim in features and param.shape[0] % 2 == 0:
            return replace(form, parts=(param.shape[0] // 2,) * 2)
    return None


def stored_form(module: nn.Module, name: str, param: Tensor) -> MatrixSpec | None:
    """How a layer stores its weight if nothing is fused in it; ``None`` for what is no matrix and no stack of them.

    A kernel of several groups is one matrix for each: the groups share no input.
    """
    if isinstance(module, _ConvTransposeNd):
        return None  # (in, out / groups, …): no dimension of it is the output alone
    if isinstance(module, _ConvNd):
        if name != "weight" or param.ndim < 3 or is_depthwise(module):
            return None
        return MatrixSpec(flattened=True, num_heads=module.groups)
    if param.ndim == 2:
        return MatrixSpec(transposed=name == "weight" and is_transposed_linear(module))
    return MatrixSpec() if param.ndim == 3 else None


def is_depthwise(module: nn.Module) -> bool:
    """Whether each output of a convolution has an input of its own, so that its kernel is no matrix."""
    return isinstance(module, _ConvNd) and module.in_channels == module.groups


def is_transposed_linear(module: nn.Module) -> bool:
    """Whether a layer stores its weight ``(in, out)``: ``Conv1D`` of GPT-2."""
    return any(base.__name__ == "Conv1D" for base in type(module).__mro__) and not isinstance(module, _ConvNd)


def _outputs(form: MatrixSpec, shape: Sequence[int]) -> int:
    if form.flattened:
        return shape[0]
    return shape[1] if form.transposed else shape[0]


def _is_of(owner: nn.Module, rule: Rule) -> bool:
    """Whether ``owner`` is of one of the rule's classes, or made from one, as FSDP2 and users do."""
    return any(
        fnmatchcase(base.__name__, pattern) and _is_from(base, rule.package)
        for base in type(owner).__mro__
        for pattern in rule.classes
    )


def _is_from(base: type, package: str) -> bool:
    return not package or f"{base.__module__}.".startswith(package)
