"""What one parameter is to Muon: which matrices it consists of, or why it is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn as nn
from torch import Tensor
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from dmuon.model.families import is_depthwise, known_spec, stored_form
from dmuon.model.matrix_spec import MatrixSpec
from dmuon.model.module_tree import Holder, ModuleTree

_NORMS = (nn.LayerNorm, nn.RMSNorm)  # their weights have as many dimensions as what they normalize
RECURRENT = (nn.RNNBase, nn.RNNCellBase)
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
INPUT_EMBEDDING, OUTPUT_HEAD = "input embedding", "output head"
_DECLARED = (("get_input_embeddings", INPUT_EMBEDDING), ("get_output_embeddings", OUTPUT_HEAD))
_BARE, _NO_STACK = "bare parameter", "not known to be a stack of matrices"
_ATTENTION_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
_COUNTS = ("num_experts", "n_experts", "num_local_experts", "n_routed_experts", "num_routed_experts")
_NO_WEIGHTS = ("bias", "scale", "norm")  # parts of names of what stands beside matrices
_TABLES = ("emb", "pos", "table", "token", "latent", "prompt")  # parts of names of what is looked up or begun with


@dataclass(frozen=True, slots=True)
class Makeup:
    """Which matrices a parameter consists of.

    Attributes:
        spec: by which Muon would take it.
        known: the class of its module says so; otherwise it is how such a layer stores one matrix.
        is_layer: it is what a layer multiplies its input by, be it for Muon or not.
        unfit: why Muon does not take it by default; ``None`` if nothing is in the way.
        bare: it has the shape of a matrix, or of several, and no layer that is known holds it.
    """

    spec: MatrixSpec
    known: bool
    is_layer: bool
    unfit: str | None
    bare: bool = False


def makeup_of(tree: ModuleTree, param: Tensor, sites: Sequence[Holder]) -> Makeup:
    """The matrices of a parameter of two dimensions or more, which ``sites`` hold under a name."""
    specs = [known_spec(tree, module, name, param) for module, name in sites]
    spec = next((s for s in specs if s is not None), None)
    reasons = [
        _why_no_layer(tree, module, name, param, is_known=found is not None)
        for (module, name), found in zip(sites, specs, strict=True)
    ]
    unfit = why_no_tensor(param) or next((why for why in reasons if why is not None), None)
    is_layer = any(
        isinstance(module, _ConvNd) or (param.ndim == 2 and why is None)
        for (module, _), why in zip(sites, reasons, strict=True)
    )
    form = stored_form(*sites[0], param) if sites else None
    bare = unfit is not None and any(_is_bare_matrix(*site, param, unfit) for site in sites)
    return Makeup(spec or form or MatrixSpec(), spec is not None, is_layer, unfit, bare)


def declared_embeddings(model: nn.Module) -> list[tuple[Tensor, str]]:
    """The weights that a model of Hugging Face declares to be its input embedding and its output head."""
    declared = []
    for getter, reason in _DECLARED:
        try:
            module = getattr(model, getter)()
        except (AttributeError, NotImplementedError, TypeError):
            continue  # not there, or not the method that these models have
        weight = getattr(module, "weight", None)
        if weight is not None:
            declared.append((weight, reason))
    return declared


def why_no_tensor(param: Tensor) -> str | None:
    """Why Muon would not take a tensor of any shape."""
    if not param.is_floating_point():
        return f"{param.dtype}, not floating point"
    return "empty" if param.numel() == 0 else None


def _why_no_layer(tree: ModuleTree, module: nn.Module, name: str, param: Tensor, *, is_known: bool) -> str | None:
    """Why the parameter ``name`` of ``module`` is no layer's matrix, or stack of them; ``None`` if it is."""
    kind = type(module).__name__
    if isinstance(module, _NORMS):
        return f"weight of {kind}"
    if isinstance(module, RECURRENT):
        return f"recurrent weight of {kind}"
    if is_known:
        return None
    source = reparametrized(module, name)
    if source is not None:  # a matrix is refused
        return f"{param.ndim}-D, parametrized by {source}" if param.ndim > 2 else None
    if isinstance(module, _ConvNd) and name == "weight":
        if isinstance(module, _ConvTransposeNd):
            return f"kernel of {kind}, no dimension of which is its output alone"
        return "kernel of a depthwise convolution, no matrix" if is_depthwise(module) else None
    if param.ndim == 2 and (
        name == "weight" or (isinstance(module, nn.MultiheadAttention) and name in _ATTENTION_WEIGHTS)
    ):
        return None
    if param.ndim == 3 and _is_of_experts(tree, module, name, param):
        return None
    if param.ndim > 2:
        return f"{param.ndim}-D, {_NO_STACK}"
    return f"{_BARE} of {kind}, not the weight of a layer"


def _is_bare_matrix(module: nn.Module, name: str, param: Tensor, unfit: str) -> bool:
    """Whether a module of the user's own may multiply by this parameter, or by each of several that it stacks."""
    return (
        unfit.startswith((_BARE, f"3-D, {_NO_STACK}"))
        and min(param.shape[-2:]) > 1
        and (param.ndim == 2 or 1 < param.shape[0] <= min(param.shape[1:]))  # otherwise a matrix in another form
        and not isinstance(module, nn.Bilinear)
        and not any(word in name.lower() for word in _NO_WEIGHTS + _TABLES)
    )


def _is_of_experts(tree: ModuleTree, module: nn.Module, name: str, param: Tensor) -> bool:
    """Whether a tensor of three dimensions holds one matrix for each of several experts."""
    if min(param.shape[1:]) < 2 or any(word in name.lower() for word in _NO_WEIGHTS):
        return False
    if any(getattr(module, count, None) == param.shape[0] for count in _COUNTS):
        return True
    names = [type(module).__name__, *(path for _, path in tree.above(module, name))]
    return any("expert" in name.lower() for name in names)


def reparametrized(module: nn.Module, name: str) -> str | None:
    """What computes the layer's weight from this parameter, if anything does."""
    if isinstance(module, ParametrizationList):
        return ", ".join(type(m).__name__ for m in module)
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, (WeightNorm, SpectralNorm)) and name.startswith(f"{hook.name}_"):
            return type(hook).__name__
    return None
