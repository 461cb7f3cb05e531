"""Which parameters Muon takes, and which block each belongs to. Pure: no communication, nothing is changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from types import EllipsisType

import torch.nn as nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from dmuon.model.blocks import (
    INPUT_LAYER,
    OUTPUT_LAYER,
    BlockPredicate,
    NamedModule,
    blocks_by_module,
    canonical_fqn,
    find_end_layers,
    find_ends_in_blocks,
    given_blocks,
    own_blocks,
    stacked_blocks,
    widths_of,
    with_known_widths,
)
from dmuon.model.makeup import (
    EMBEDDINGS,
    Makeup,
    ModuleTree,
    declared_embeddings,
    makeup_of,
    refusal,
    reparametrized,
    stored,
)
from dmuon.model.matrix_spec import MatrixSpec

UNINITIALIZED = "of a lazy module has no shape yet; run one forward before this, which gives it one"
Exclude = Callable[[str, nn.Module, nn.Parameter], bool] | Sequence[str]
_Predicate = Callable[[str, nn.Module, nn.Parameter], bool]
Select = Callable[[str, nn.Module, nn.Parameter], "bool | MatrixSpec | EllipsisType"]
_Blocks = Sequence[nn.Module] | BlockPredicate | None
_Sites = tuple[tuple[nn.Module, str], ...]
_INSIDE = "inside a block"
_EXCLUDED = "excluded by exclude"
_VECTOR = Makeup(MatrixSpec(), known=False, is_layer=False, unfit=None)  # refused by its dimensions


@dataclass(frozen=True, slots=True)
class Route:
    """Where one parameter goes, and why.

    Attributes:
        fqn: canonical name of the parameter (its first site).
        param: the parameter itself.
        sites: every ``(module, attribute)`` that holds it.
        muon: whether Muon takes it.
        reason: one phrase for people.
        block: canonical name of its block; ``None`` where Muon does not train it, and where blocks do not matter.
        block_module: the block itself, or ``None``.
        spec: which matrices the parameter is made of.
        fault: why Muon cannot train it, should that frozen parameter be unfrozen; ``None`` if it can.
        bare: a matrix by shape and place, which AdamW takes only because no layer holds it.
        strategy: of a model that is dedicated, who orthogonalizes it; ``"auto"`` until that is planned.
    """

    fqn: str
    param: nn.Parameter
    sites: tuple[tuple[nn.Module, str], ...]
    muon: bool
    reason: str
    block: str | None = None
    block_module: nn.Module | None = None
    spec: MatrixSpec = field(default_factory=MatrixSpec)
    fault: str | None = None
    bare: bool = False
    strategy: str = "owner"


def route_parameters(model: nn.Module, select: Select | None = None, exclude: Exclude | None = None) -> list[Route]:
    """Route every parameter of ``model`` to Muon or AdamW, in the order of ``named_parameters``.

    A frozen parameter goes where its place in the model sends it: it may be unfrozen later.

    By default Muon takes every matrix that is the ``weight`` of a hidden layer: also those of a fused tensor
    whose class is known (:func:`known_spec`), those of a stack of experts, and the kernels of convolutions. Where
    layers repeat, hidden layers are those inside blocks: the elements of the outermost ``ModuleList``s,
    ``Sequential``s and ``ModuleDict``s with keys 0, 1, … that have children of their own; a ``Sequential``'s stem and
    head, which do not repeat, are none, and of blocks what takes the input and heads are not hidden
    (:func:`find_ends_in_blocks`). Where nothing repeats, they are all but the input and output layers
    (:func:`find_end_layers`); if these are all that there is, Muon takes the input layers. Embeddings, tied or declared
    output heads, norms, recurrent weights, depthwise kernels, other bare parameters (tables, stacked biases, state
    matrices) and 1-D parameters stay on AdamW.

    Args:
        select: ``select(fqn, module, param)`` decides instead of the default rule: ``True``, ``False``, the
            :class:`MatrixSpec` by which Muon takes the parameter, or ``...``, which leaves it to the default rule.
        exclude: ``exclude(fqn, module, param) -> bool``, or patterns of names (:func:`exclusion`): what stays on AdamW,
            whatever ``select`` or the default rule say.

    Raises:
        TypeError: ``select`` or ``exclude`` returned something else.
        ValueError: the user's choice leaves Muon no matrix, or all that are hidden are bare or parametrized; a selected
            parameter is no matrix or stack or does not fit its spec, a parameter looks fused and its class is not
            known, a pattern names nothing; an embedding has sparse gradients.
    """
    return _route(model, select, None, exclude)[0]


def route_to_blocks(
    model: nn.Module,
    select: Select | None = None,
    blocks: Sequence[nn.Module] | BlockPredicate | None = None,
    exclude: Exclude | None = None,
    ignored: Collection[int] = (),
) -> list[Route]:
    """As :func:`route_parameters`, and every trained matrix of Muon has a block, called when its weight is used.

    Args:
        ignored: ids of parameters that somebody else routes.
        blocks: the blocks themselves, or ``blocks(fqn, module) -> bool``; they are also what is inside blocks. By
            default the elements of stacks, and where nothing repeats, the model's layers (:func:`own_blocks`).

    Raises:
        TypeError, ValueError: as :func:`route_parameters`, and for a selected parameter that lies in no block or in
            two, and blocks that overlap or are never called.
    """
    routes, found = _route(model, select, blocks, exclude, ignored)
    if found is None:
        found = own_blocks(model, [[module for module, _ in r.sites] for r in routes if _is_trained(r)])
    table = blocks_by_module(found)
    placed = []
    shared: list[tuple[str, list[str]]] = []
    for route in routes:
        if _is_trained(route):
            if any(id(module) not in table for module, _ in route.sites):
                raise ValueError(
                    f"select chose {route.fqn!r}, which lies outside every block; name its block with blocks=[…]"
                )
            named = [(n, b) for module, _ in route.sites for n, b in table[id(module)]]
            holding = list({id(b): (n, b) for n, b in reversed(named)}.values())  # by its first name
            if len(holding) > 1:
                shared.append((route.fqn, sorted(name for name, _ in holding)))
            name, block = holding[0]
            route = replace(route, block=name, block_module=block)
        placed.append(route)
    if shared:
        raise _shared(shared)
    return placed


def notice(routes: Sequence[Route]) -> str | None:
    """What to tell the user: that Muon trains nothing, and why; or that AdamW gets what look like matrices."""
    if not any(_is_trained(route) for route in routes):
        trained = sum(route.param.requires_grad for route in routes)
        return f"Muon trains no parameter: {_why_none(routes)}; AdamW trains {trained}"
    if any(route.bare for route in routes):
        bare, line = _bare_and_line(routes)
        return f"AdamW trains {bare}. To give them to Muon: {line}"
    return None


def _is_trained(route: Route) -> bool:
    return route.muon and route.param.requires_grad


def _why_none(routes: Sequence[Route]) -> str:
    frozen = sum(route.muon for route in routes)
    if frozen:
        return f"the {frozen} that its rule gives it are frozen"
    left = [route for route in routes if route.reason in (INPUT_LAYER, OUTPUT_LAYER)]
    if not left:
        return "no layer inside a block, or hidden otherwise, has a 2-D weight"
    names = ", ".join(f"{route.fqn!r}: {route.reason}" for route in left[:3])
    line = f"select=lambda fqn, module, param: fqn == {left[0].fqn!r}"
    return f"no layer is hidden ({names}{', …' if left[3:] else ''}; choose with {line})"


def _bare_and_line(routes: Sequence[Route]) -> tuple[str, str]:
    """Bare matrices in words, and the line by which Muon takes all of them, and of the rest what it takes anyway."""
    bare = [route.fqn for route in routes if route.bare]
    names = ", ".join(map(repr, bare[:3]))
    told = f"{len(bare)} bare parameters that may be matrices ({names}{', …' if bare[3:] else ''})"
    tails = tuple(dict.fromkeys(name.rpartition(".")[2] for name in bare))
    apart = not any(route.fqn.endswith(tails) for route in routes if not route.bare)
    which = f"fqn.endswith({tails})" if apart else f"fqn in {tuple(bare)}"
    return told, f"select=lambda fqn, module, param: True if {which} else ..."


_Named = tuple[str, nn.Parameter, _Sites]  # canonical name, parameter, everything that holds it


def _route(
    model: nn.Module,
    select: Select | None,
    blocks: _Blocks,
    exclude: Exclude | None,
    ignored: Collection[int] = (),
) -> tuple[list[Route], list[NamedModule] | None]:
    """Routes without blocks, and the blocks that are given or repeat; None if there are none."""
    if isinstance(model, ScriptModule):
        raise ValueError(
            "this model was compiled by torch.jit.script, which hides its layers: give dmuon the module that it was "
            "made of, whose parameters it shares, or give dmuon.Muon groups with use_muon"
        )
    params = _parameters_with_sites(model)
    for fqn, param, sites in params:
        if is_lazy(param):
            raise ValueError(f"parameter {fqn!r} {UNINITIALIZED}")
        for module, _ in sites:
            if param.requires_grad and isinstance(module, EMBEDDINGS) and module.sparse:
                raise ValueError(
                    f"parameter {fqn!r} is that of {type(module).__name__}(sparse=True), whose gradient is sparse; "
                    "Muon and AdamW update whole tensors: build it with sparse=False, or freeze it"
                )
    is_excluded = exclusion(exclude, [fqn for fqn, _, _ in params])
    embeddings = _embedding_ids(model)
    tree = ModuleTree(model.modules())
    makeups = {id(p): makeup_of(tree, p, sites) for _, p, sites in params if p.ndim > 1}
    ours = [named for named in params if _why_never(*named[1:], embeddings) is None]
    fit = [s for _, p, s in ours if makeups[id(p)].unfit is None or makeups[id(p)].bare]
    stacks = stacked_blocks(model, {id(module) for sites in fit for module, _ in sites}) or None
    found = stacks if blocks is None else given_blocks(model, blocks)
    whole = found is not None and [block for _, block in found] == [model]  # which leaves nothing outside
    widths = widths_of(model, makeups, embeddings)
    if blocks is not None and not whole:
        within, left = _INSIDE, _outside(params, found or [])
    elif stacks is not None:
        within, left = _INSIDE, find_ends_in_blocks(model, widths, tree, stacks) | _outside(params, stacks)
    else:
        within, left = "of a hidden layer", find_end_layers(widths)
    hidden = _hidden(params, makeups, embeddings, within, left)
    bare = [(fqn, p) for fqn, p, _ in ours if makeups[id(p)].bare and id(p) not in left]
    if found is None or any(muon for muon, _ in hidden.values()):
        bare = with_known_widths(bare, widths.embedded.union(*({layer.takes, layer.gives} for layer in widths.layers)))
    if not bare and not any(muon for muon, _ in hidden.values()):
        inputs = [id(p) for _, p, _ in ours if left.get(id(p)) == INPUT_LAYER and makeups[id(p)].unfit is None]
        hidden |= dict.fromkeys(inputs, (True, f"{INPUT_LAYER} of a model without hidden layers"))
    bare_ids = {id(param) for _, param in bare}
    default_takes = any(muon for key, (muon, _) in hidden.items() if key not in ignored)
    routes = []
    for fqn, param, sites in params:
        if id(param) in ignored:
            continue
        makeup = makeups.get(id(param), _VECTOR)
        (muon, reason), spec, guessed, fault = hidden[id(param)], makeup.spec, not makeup.known, None
        rule = reason
        if is_excluded(fqn, sites[0][0], param):
            muon, reason = False, _EXCLUDED
        elif select is not None:
            chosen = select(fqn, sites[0][0], param)
            if not isinstance(chosen, (bool, MatrixSpec, EllipsisType)):
                raise TypeError(
                    f"select({fqn!r}, …) returned {chosen!r}; return True or False, a dmuon.MatrixSpec, or ... for "
                    "the default rule"
                )
            if not isinstance(chosen, EllipsisType):
                spec = chosen if isinstance(chosen, MatrixSpec) else spec
                muon, guessed = chosen is not False, False
                reason = "chosen by select" if muon else "excluded by select"
                if muon:
                    _require_selectable(fqn, param, sites, spec)
        if muon:
            fault = _why_reparametrized(fqn, sites)
            for module, name in sites if guessed and fault is None else ():
                if fault is None and (why := refusal(tree, module, name, param, fqn)) is not None:
                    fault = f"parameter {fqn!r} {why}"
            if fault is not None and param.requires_grad:
                raise ValueError(fault)
        spec = spec if muon else MatrixSpec()
        is_bare = id(param) in bare_ids and reason is rule
        routes.append(Route(fqn, param, sites, muon, reason, spec=spec, fault=fault, bare=is_bare))
    if not any(route.muon for route in routes):
        _refuse_none(routes, blocks, default_takes=default_takes)
    return routes, found


def _refuse_none(routes: Sequence[Route], blocks: _Blocks, *, default_takes: bool) -> None:
    """Raise ValueError if it is probably by mistake that Muon gets nothing.

    Args:
        default_takes: it would, had the user chosen nothing.
    """
    kept = [route.fqn for route in routes if route.reason == _EXCLUDED and route.param.ndim > 1]
    parametrized = [route.fqn for route in routes if "parametrized by" in route.reason]
    adamw = "or train this model with torch.optim.AdamW"
    if default_takes and kept:
        names = ", ".join(map(repr, kept[:3]))
        why = f"exclude keeps every matrix away ({names}{', …' if kept[3:] else ''}); exclude less, {adamw}"
    elif default_takes:
        why = f"select returned True for no parameter; let it return True for a 2-D weight, {adamw}"
    elif blocks is not None:
        why = "no layer with a 2-D weight lies inside the given blocks; name others, or none"
    elif any(route.bare for route in routes):
        bare, line = _bare_and_line(routes)
        why = f"what is hidden are {bare}. Take them with {line}"
    elif parametrized:
        remedy = f"remove the parametrizations (torch.nn.utils.parametrize.remove_parametrizations), {adamw}"
        why = f"no layer has a 2-D weight, apart from those that are parametrized ({parametrized[0]!r}, …); {remedy}"
    else:
        return
    raise ValueError(f"no matrix was selected for Muon: {why}")


def _embedding_ids(model: nn.Module) -> dict[int, str]:
    """``id(param) -> reason`` for embeddings, what is tied to them, and declared input and output embeddings."""
    reasons: dict[int, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, EMBEDDINGS):
            reasons[id(stored(module, "weight"))] = f"embedding {canonical_fqn(name) or type(module).__name__}"
    for weight, reason in declared_embeddings(model):
        reasons.setdefault(id(weight), reason)
    return reasons


def _parameters_with_sites(model: nn.Module) -> list[_Named]:
    found: dict[int, tuple[str, nn.Parameter, list[tuple[nn.Module, str]]]] = {}
    for module_name, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            fqn = canonical_fqn(f"{module_name}.{name}" if module_name else name)
            found.setdefault(id(param), (fqn, param, []))[2].append((module, name))
    return [(fqn, param, tuple(sites)) for fqn, param, sites in found.values()]


def _hidden(
    params: Sequence[_Named],
    makeups: Mapping[int, Makeup],
    embeddings: Mapping[int, str],
    within: str,
    left: Mapping[int, str],
) -> dict[int, tuple[bool, str]]:
    """The default rule: whether Muon takes a parameter and why, by id.

    Args:
        within: where a matrix is hidden.
        left: why others are not, by id.
    """
    decided: dict[int, tuple[bool, str]] = {}
    for _, param, sites in params:
        makeup = makeups.get(id(param), _VECTOR)
        reason = _why_never(param, sites, embeddings) or left.get(id(param)) or makeup.unfit
        if reason is None:
            count = len(makeup.spec.matrices(param.shape))
            decided[id(param)] = True, f"{'matrix' if count == 1 else f'{count} matrices'} {within}"
        else:
            decided[id(param)] = False, reason
    return decided


def _outside(params: Sequence[_Named], blocks: Sequence[NamedModule]) -> dict[int, str]:
    inside = blocks_by_module(blocks)
    return {id(p): "outside blocks" for _, p, sites in params if any(id(module) not in inside for module, _ in sites)}


def _why_never(param: nn.Parameter, sites: _Sites, embeddings: Mapping[int, str]) -> str | None:
    """Why this is nothing for Muon wherever it lies."""
    if param.ndim < 2:
        return f"{param.ndim}-D"
    if id(param) in embeddings:
        return f"{'tied to ' if len(sites) > 1 else ''}{embeddings[id(param)]}"
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


def _shared(found: Sequence[tuple[str, list[str]]]) -> ValueError:
    """Of all parameters that lie in several blocks, so that one remedy does for them."""
    (fqn, names), others = found[0], len(found) - 1
    parts = [name.split(".") for name, _ in found]
    same = next(n for n in range(len(min(parts, key=len)), -1, -1) if len({tuple(part[:n]) for part in parts}) == 1)
    patterns = [".".join(parts[0][:same])] if same > len(names[0].split(".")) else [name for name, _ in found]
    return ValueError(
        f"parameter {fqn!r} is shared by blocks {', '.join(names)}{f', and so are {others} others' if others else ''}; "
        f"untie it, keep it on AdamW with exclude={patterns!r} or select=…, or name one block that contains both: "
        "blocks=[model], or several smaller modules that share nothing and hold all matrices"
    )


def _why_reparametrized(fqn: str, sites: _Sites) -> str | None:
    for module, name in sites:
        source = reparametrized(module, name)
        if source is None:
            continue
        removal, alike = "torch.nn.utils.parametrize.remove_parametrizations", ["*.parametrizations.*"]
        if not isinstance(module, ParametrizationList):
            removal = "torch.nn.utils.remove_weight_norm or remove_spectral_norm"
            alike = [f"*.{other}" for other in module._parameters if reparametrized(module, other) is not None]
        return (
            f"parameter {fqn!r} is parametrized by {source}: what Muon makes orthogonal would not be the layer's "
            f"weight. Remove the parametrization ({removal}), or keep it on AdamW with exclude={alike!r}, or with "
            "select=…"
        )
    return None


# -- patterns of names -----------------------------------------------------------------------------------------------


def exclusion(exclude: Exclude | None, names: Sequence[str]) -> _Predicate:
    """``exclude`` as a function that says whether it names a parameter.

    Args:
        exclude: such a function, or patterns of names as in a shell, where ``*`` stands for anything, dots too. A
            pattern names parameters and modules; a module means all that is in it.
        names: of all parameters. A pattern that names none is a mistake.

    Raises:
        TypeError, ValueError: neither, or a pattern that names nothing.
    """
    if exclude is None:
        return lambda fqn, module, param: False
    if callable(exclude):
        decide = exclude

        def predicate(fqn: str, module: nn.Module, param: nn.Parameter) -> bool:
            answer = decide(fqn, module, param)
            if not isinstance(answer, bool):
                raise TypeError(f"exclude({fqn!r}, …) returned {answer!r}; return True to keep it on AdamW, or False")
            return answer

        return predicate
    if isinstance(exclude, str) or not isinstance(exclude, Sequence) or not all(isinstance(p, str) for p in exclude):
        raise TypeError(
            f"exclude must be a function of (fqn, module, param) or a list of patterns of names, got {exclude!r}"
        )
    patterns = list(exclude)
    for pattern in patterns:
        if not any(_names(pattern, name) for name in names):
            raise ValueError(f"exclude: the pattern {pattern!r} names no parameter and no module of the model")
    return lambda fqn, module, param: any(_names(pattern, fqn) for pattern in patterns)


def _names(pattern: str, fqn: str) -> bool:
    parts = fqn.split(".")
    return any(fnmatchcase(".".join(parts[: i + 1]), pattern) for i in range(len(parts)))


def require_fitting(option: str, patterns: Iterable[str], names: Collection[str]) -> None:
    """Raise ValueError for the first of ``patterns`` that fits no name, and would be ignored.

    Args:
        names: of all parameters there are, whoever takes them.
    """
    for pattern in patterns if names else ():
        if not any(fnmatchcase(name, pattern) for name in names):
            like = ", ".join(map(repr, get_close_matches(pattern, names, 3, 0.0)))
            raise ValueError(
                f"{option}: the pattern {pattern!r} fits no parameter's name; names are those of "
                f"model.named_parameters(), without wrappers, or those that come with tensors, such as {like}"
            )
