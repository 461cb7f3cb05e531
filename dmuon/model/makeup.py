"""What one parameter is to Muon, by the modules that hold it: which matrices, several that look like one, or none."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch.nn as nn
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from dmuon.model.fused_layouts import RULES, Rule, Unknown
from dmuon.model.matrix_spec import MatrixSpec
from dmuon.platform.host import all_living

Holder = tuple[nn.Module, str]  # a module, and the name under which it holds another one or a parameter

# What stands between a layer and the module that was written to hold it: of compiled, checkpointed and adapted layers.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "base_layer"})
_DEPTH = 4


_IN_PLACE = (nn.Dropout, nn.Identity, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, _BatchNorm)
_FACTORS = ("lora_A", "lora_B")  # modules of these, one for each adapter of a layer


class Adapter(NamedTuple):
    """One of two factors whose product is added to the weight of a layer.

    Attributes:
        layer: what it is added to.
        behind: the factor that gives what the layer gives, and not the one that takes what the layer takes.
        experts: of how many, if the weight is a stack, all factors lie in one tensor: those that take one below the
            other, those that give by turns, column by column.
    """

    layer: Holder
    behind: bool
    experts: int

    @staticmethod
    def of(holder: nn.Module, behind: bool) -> Adapter:
        base = holder
        while isinstance(inner := getattr(base, "base_layer", None), nn.Module):
            base = inner
        usual = "in_proj_weight" if isinstance(base, nn.MultiheadAttention) else "weight"
        return Adapter((base, getattr(holder, "parameter_name", usual)), behind, getattr(holder, "num_experts", 1))


@dataclass(frozen=True, slots=True)
class Layer:
    """One use of a weight.

    Attributes:
        key: the same for layers that share a weight.
        takes, gives: features, or channels.
        spatial: a convolution, of whose output a linear layer takes all positions at once.
    """

    key: int
    takes: int
    gives: int
    spatial: bool

    @staticmethod
    def of(module: nn.Module, weight: Tensor) -> Layer:
        """The layer that ``module`` is with this weight of two dimensions or more."""
        first, second = weight.shape[0], weight.shape[1]
        bias = getattr(module, "bias", None)
        transposed = first != second and getattr(bias, "shape", ()) == (second,)  # (in, out), as Conv1D of GPT-2
        takes, gives = (first, second) if transposed else (second, first)
        return Layer(
            id(weight),
            _size(module, ("in_features", "in_channels"), takes),
            _size(module, ("out_features", "out_channels"), gives),
            weight.ndim > 2,
        )


def _size(module: nn.Module, names: Iterable[str], otherwise: int) -> int:
    sizes = (getattr(module, name, None) for name in names)
    return next((size for size in sizes if isinstance(size, int)), otherwise)


class ModuleTree:
    """What holds each module; several may, such as a model and a list that a framework keeps of its layers.

    Attributes:
        adapters: by ``id``, what a module is to a layer that ``peft`` adapts.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._holders: dict[int, list[Holder]] = {}
        self._layers: dict[int, list[Layer]] = {}
        self._above: dict[tuple[int, str], list[Holder]] = {}
        self.adapters: dict[int, Adapter] = {}
        for module in modules:
            children = module.__dict__.get("_modules", {})  # none before Module.__init__
            for name, child in children.items():
                if child is not None:
                    self._holders.setdefault(id(child), []).append((module, name))
            for name in _FACTORS if "base_layer" in children else ():
                factors = (children.get(name) or nn.Module()).children()
                self.adapters |= {id(factor): Adapter.of(module, name == "lora_B") for factor in factors}

    def above(self, module: nn.Module, name: str) -> list[Holder]:
        """``module`` and what holds it, upwards, each with the path from it to the parameter ``name``.

        Wrappers around layers are left out of paths, and are nobody themselves.
        """
        found = self._above.setdefault((id(module), name), [])
        level = [] if found else [(module, name)]
        for _ in range(_DEPTH):
            found += level
            level = [
                (holder, f"{attribute}.{path}") for module, path in level for holder, attribute in self._holding(module)
            ]
        return found

    def layers(self, module: nn.Module) -> list[Layer]:
        """The layers below ``module``, in order."""
        if id(module) not in self._layers:
            held = [(sub, sub.__dict__.get("_parameters", {}).get("weight")) for sub in module.modules()]
            self._layers[id(module)] = [Layer.of(*one) for one in held if one[1] is not None and _is_layer(*one)]
        return self._layers[id(module)]

    def beside(self, module: nn.Module) -> Iterator[tuple[nn.Module, Layer, list[Layer], list[Layer]]]:
        """For each module that holds the layer ``module``: it, the layer, and the layers before and behind that."""
        key = id(getattr(module, "weight", None))
        for parent, path in self.above(module, "weight"):
            layers = self.layers(parent) if path.count(".") == 1 else []
            for i, layer in enumerate(layers):
                if layer.key == key:
                    yield parent, layer, layers[:i], layers[i + 1 :]

    def _holding(self, module: nn.Module) -> Iterator[Holder]:
        for holder, attribute in self._holders.get(id(module), ()):
            if attribute in _WRAPPERS:
                yield from self._holding(holder)
            else:
                yield holder, attribute


def longest_path(holders: Iterable[Holder]) -> str:
    """Of the paths to one parameter."""
    return max((path for _, path in holders), key=lambda path: path.count("."))


def sites_of(parameters: Iterable[Tensor]) -> tuple[ModuleTree, dict[int, tuple[Holder, ...]]]:
    """The modules of parameters that came without a model, found among all modules that live.

    A parameter remembers no module, but a module holds its parameters, and the collector of garbage knows every module.

    Returns:
        The tree of all modules, and by ``id`` of each parameter the modules that hold it under a name; nothing for one
        that no module holds.
    """
    wanted = {id(parameter) for parameter in parameters}
    modules = all_living(nn.Module)
    sites: dict[int, list[Holder]] = {}
    for module in modules:
        for name, parameter in module.__dict__.get("_parameters", {}).items():
            if id(parameter) in wanted and parameter is not None:
                sites.setdefault(id(parameter), []).append((module, name))
    return ModuleTree(modules), {key: tuple(found) for key, found in sites.items()}


# -- which matrices a tensor is made of, by the class of its module ----------------------------------------------------

_BY_PATH: dict[str, list[Rule]] = {}
for _rule in RULES:
    for _path in _rule.paths.split():
        _BY_PATH.setdefault(_path, []).append(_rule)


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
    rows = param.shape[form.dim if param.ndim == 3 and not form.flattened else form.dim - 1]
    adapter = tree.adapters.get(id(module)) if tree.adapters else None
    if adapter is not None and adapter.experts > 1:
        return None if adapter.behind else MatrixSpec(num_heads=adapter.experts)
    if adapter is not None and adapter.behind:
        module, name = adapter.layer
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


def _listed(tree: ModuleTree, module: nn.Module, name: str) -> tuple[nn.Module, Rule] | None:
    """What is known of the classes that hold it, be the sizes as they should or not."""
    for owner, path in reversed(tree.above(module, name)):
        kind: Any = type(owner)
        numbered = ".".join("#" if part.isdigit() else part for part in path.split("."))
        for rule in _BY_PATH.get(numbered, ()):
            if _is_of(kind, rule):
                return owner, rule
    return None


def _halves_of_glu(
    tree: ModuleTree, module: nn.Module, name: str, param: Tensor, form: MatrixSpec
) -> MatrixSpec | None:
    """Of a layer that comes before ``nn.GLU`` in a ``Sequential``: what is gated, and its gates."""
    if name != "weight" or form.num_heads != 1 or not isinstance(module, (nn.Linear, _ConvNd)):
        return None
    features = {-1} if isinstance(module, nn.Linear) else {1, 1 - param.ndim}
    for unit in _following(tree, module):
        if isinstance(unit, nn.GLU) and unit.dim in features and param.shape[0] % 2 == 0:
            return replace(form, parts=(param.shape[0] // 2,) * 2)
    return None


def _following(tree: ModuleTree, module: nn.Module) -> Iterator[nn.Module]:
    """What comes next in each ``Sequential`` that holds ``module``, behind what leaves each feature where it is."""
    for holder, path in tree.above(module, "weight"):
        if isinstance(holder, nn.Sequential) and path.count(".") == 1:
            layers = [layer for layer in holder if not isinstance(layer, _IN_PLACE)]
            yield from [after for layer, after in pairwise(layers) if layer is module]


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
        transposed = any(base.__name__ == "Conv1D" for base in type(module).__mro__)  # of GPT-2, which stores (in, out)
        return MatrixSpec(transposed=name == "weight" and transposed)
    return MatrixSpec() if param.ndim == 3 else None


def is_depthwise(module: nn.Module) -> bool:
    """Whether each output of a convolution has an input of its own, so that its kernel is no matrix."""
    return isinstance(module, _ConvNd) and module.in_channels == module.groups


@cache
def _is_of(kind: Any, rule: Rule) -> bool:
    """Whether this is one of the rule's classes, or made from one, as FSDP2 and users do."""
    return any(
        fnmatchcase(base.__name__, pattern) and f"{base.__module__}.".startswith(rule.package)
        for base in kind.__mro__
        for pattern in _patterns(rule.classes)
    )


@cache
def _patterns(classes: str) -> list[str]:
    return classes.split()


# -- which matrices, or why none --------------------------------------------------------------------------------------

_NORMS = (nn.LayerNorm, nn.RMSNorm)  # their weights have as many dimensions as what they normalize
# Classes of others whose 2-D weight multiplies no input: norms, tables, mixed kernels, angles of rotations.
_NO_LAYERS = re.compile(r"^(?!.*(Linear|Conv|Dense|Proj)).*(Norm|Embedding$)|CondConv2d$|OFTRotationModule$")
RECURRENT = (nn.RNNBase, nn.RNNCellBase)
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
INPUT_EMBEDDING, OUTPUT_HEAD = "input embedding", "output head"
_DECLARED = (("get_input_embeddings", INPUT_EMBEDDING), ("get_output_embeddings", OUTPUT_HEAD))
_BARE, _NO_STACK = "bare parameter", "not known to be a stack of matrices"
_ATTENTION_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
_COUNTS = ("num_experts", "n_experts", "num_local_experts", "n_routed_experts", "num_routed_experts")
_NO_WEIGHTS = ("bias", "scale", "norm", "_log")  # parts of names of what stands beside matrices
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
    unfit = next((why for why in reasons if why is not None), None)
    if not param.is_floating_point():
        unfit = f"{param.dtype}, not floating point"
    elif param.numel() == 0:
        unfit = "empty"
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
            weight = getattr(getattr(model, getter)(), "weight", None)
        except (AttributeError, NotImplementedError, RuntimeError, TypeError):
            continue  # not there, not the method that these models have, or a weight that peft cannot merge from shards
        if weight is not None:
            declared.append((weight, reason))
    return declared


def _why_no_layer(tree: ModuleTree, module: nn.Module, name: str, param: Tensor, *, is_known: bool) -> str | None:
    """Why the parameter ``name`` of ``module`` is no layer's matrix, or stack of them; ``None`` if it is."""
    kind = type(module).__name__
    if isinstance(module, _NORMS):
        return f"weight of {kind}"
    if isinstance(module, RECURRENT):
        return f"recurrent weight of {kind}"
    if is_known:
        return None
    adapter = tree.adapters.get(id(module)) if tree.adapters else None
    if adapter is not None and adapter.behind and adapter.experts > 1:
        return f"factors of {adapter.experts} experts by turns, no dimension of which is the output of one"
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
        of_class: Any = type(module)
        return f"weight of {kind}, which multiplies no input" if _is_no_layer(of_class) else None
    if param.ndim == 3 and _is_of_experts(tree, module, name, param):
        return None
    if param.ndim > 2:
        return f"{param.ndim}-D, {_NO_STACK}"
    return f"{_BARE} of {kind}, not the weight of a layer"


def _is_layer(module: nn.Module, weight: Tensor) -> bool:
    """Whether it multiplies what it takes by this ``weight``, or by kernels that are matrices."""
    of_class: Any = type(module)
    if is_lazy(weight) or isinstance(module, EMBEDDINGS) or _is_no_layer(of_class):
        return False
    return weight.ndim == 2 or (isinstance(module, _ConvNd) and stored_form(module, "weight", weight) is not None)


@cache
def _is_no_layer(kind: Any) -> bool:
    return not issubclass(kind, (nn.Linear, _ConvNd)) and _NO_LAYERS.search(kind.__name__) is not None


def is_table(module: nn.Module) -> bool:
    """Whether rows of its weight are looked up, also where a user wrote the class."""
    if isinstance(module, EMBEDDINGS):
        return True
    kind: Any = type(module)
    if not (_is_no_layer(kind) and kind.__name__.endswith("Embedding")):
        return False
    rows = module._parameters.get("weight")
    return rows is not None and rows.ndim == 2


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
    if min(param.shape[1:]) < 2 or any(word in name.lower() for word in _NO_WEIGHTS + _TABLES):
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


# -- what looks like several of which nothing is known: names are refused, sizes alone are told ------------------------

# A name decides only together with a shape that is not square, and never says where the parts lie. Words of a few
# letters begin with one that no other letter precedes.
_FUSED = re.compile(
    "qkv|query_key_value|queries_keys_values|(?<![a-z])(c_attn|key_value|keys_values|to_kv|kv_proj|kv_[ab]_proj|wkv_[ab])"
)
_UNLESS_TAKEN = re.compile(r"(?<![a-z])(in_proj|gate_up(?![a-z])|up_gate|w12|w13|w1_w3)")  # whole by a later layer
_TOLD = re.compile(  # not refused; the latter of what a block is conditioned on
    r"(?<![a-z])(w?kv|qk|fused_|ada(?!pt)|film|gru|lstm)|_fused|adaln|modulation|scale_shift|shift_scale"
)
_GLU = re.compile(r"(?i:glu|gated_?linear_?unit)(?![a-z])")  # in names of classes, where it begins no other word
SHARES = (2, 3, 4)  # gate and up, or keys and values; queries, keys and values; those and a gate


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
    names = _names(tree, module, name)
    return (
        _is_meant(tree, module, name, param, form)
        or (any(map(_TOLD.search, names)) and not _is_square(param, form) and not _is_taken(tree, module))
        or (param.ndim == 3 and not form.flattened and _is_halved(module, name, param))
        or any(_GLU.search(type(unit).__name__) for unit in _following(tree, module))
        or any(_is_shared_out(layer, before, behind) for _, layer, before, behind in tree.beside(module))
    )


def _form(module: nn.Module, name: str, param: Tensor) -> MatrixSpec | None:
    form = stored_form(module, name, param)
    return None if form is None or form.num_heads != 1 or "bias" in name else form


def _is_meant(tree: ModuleTree, module: nn.Module, name: str, param: Tensor, form: MatrixSpec) -> bool:
    """Whether who wrote the class must have meant several matrices, be it listed with other sizes or named so."""
    adapter = tree.adapters.get(id(module)) if tree.adapters else None
    if adapter is not None and adapter.behind:
        module, name = adapter.layer
    if _listed(tree, module, name) is not None or _is_of_glu(tree, module):
        return True
    names = [] if _is_square(param, form) else _names(tree, module, name)
    return any(map(_FUSED.search, names)) or (any(map(_UNLESS_TAKEN.search, names)) and not _is_taken(tree, module))


def _is_square(param: Tensor, form: MatrixSpec) -> bool:
    return (param.ndim == 2 or form.flattened) and param.shape[0] == prod(param.shape[1:])


def _names(tree: ModuleTree, module: nn.Module, name: str) -> list[str]:
    """What a parameter or its layer is called, and modules and their classes that have no other layer."""
    if name != "weight":
        return [name.lower()]
    found = []
    for parent, path in tree.above(module, name):
        held, _, rest = path.partition(".")
        found += [type(parent).__name__] if len(tree.layers(parent)) < 2 else []
        found += [held] if rest == name or (rest and len(tree.layers(getattr(parent, held))) < 2) else []
    return [one.lower() for one in found]


def _is_of_glu(tree: ModuleTree, module: nn.Module) -> bool:
    """Whether it is the first layer of a gated linear unit that has no other one for its gates."""
    for unit, layer, before, behind in tree.beside(module):
        if _GLU.search(type(unit).__name__) and not before and layer.gives % 2 == 0:
            sides = layer.takes, layer.gives
            return all((other.takes, other.gives) != sides and other.takes != layer.gives for other in behind)
    return False


def _is_taken(tree: ModuleTree, module: nn.Module) -> bool:
    """Whether a later layer beside it takes all that it gives."""
    return any(other.takes == layer.gives for _, layer, _, behind in tree.beside(module) for other in behind)


def _is_shared_out(layer: Layer, before: Sequence[Layer], behind: Sequence[Layer]) -> bool:
    """Whether a later layer gives back what this one takes, of an equal part of what it gives, and none takes all.

    Of the next layer it may be any part: queries beside fewer keys and values, or beside a layer that feeds forward.
    """
    if layer.takes == layer.gives or any(other.takes == layer.gives for other in (*before, *behind)):
        return False
    shares = [layer.gives / max(1, other.takes) if other.gives == layer.takes else 0.0 for other in behind]
    return any(share in SHARES for share in shares) or any(share > 1 for share in shares[:1])


def _is_halved(module: nn.Module, name: str, param: Tensor) -> bool:
    """Whether another stack of the module takes half of what a stack gives, whichever way they are stored."""
    others = [p for n, p in module._parameters.items() if p is not None and p.ndim == 3 and n != name]
    for out, into in ((1, 2), (2, 1)):
        taken = {(other.shape[into], other.shape[out]) for other in others}
        whole = any(takes == param.shape[out] for takes, _ in taken)
        if (param.shape[out] / 2, param.shape[into]) in taken and not whole:
            return True
    return False
