"""The blocks of a model, which are the layers that communicate as units, and where no layer repeats its end layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from itertools import pairwise
from typing import NamedTuple

import torch.nn as nn

from dmuon.model.makeup import INPUT_EMBEDDING, RECURRENT, SHARES, Layer, Makeup, ModuleTree, is_table

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")

# Their forward, or a fast path of it, computes with their children's weights without calling them.
_COMPUTE_FOR_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)

WHOLE_MODEL = "(model)"  # the name of the block that is the model itself

BlockPredicate = Callable[[str, nn.Module], bool]
NamedModule = tuple[str, nn.Module]


def canonical_fqn(name: str) -> str:
    """``name`` without the components that wrappers (compile, activation checkpointing) insert."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def given_blocks(model: nn.Module, blocks: Sequence[nn.Module] | BlockPredicate) -> list[NamedModule]:
    """The blocks that the user names.

    Raises:
        TypeError, ValueError: no modules of the model, blocks inside blocks, or a block that nobody calls.
    """
    named = [(canonical_fqn(n), m) for n, m in model.named_modules()]
    if callable(blocks) and not isinstance(blocks, nn.Module):
        chosen = [(n, m) for n, m in named[1:] if blocks(n, m)]
    else:
        if not isinstance(blocks, Iterable):
            raise TypeError(
                f"blocks must be a list of modules or a function of (fqn, module), got {type(blocks).__name__}"
            )
        names = {id(m): n for n, m in named}
        for module in blocks:
            if id(module) not in names:
                raise ValueError(f"blocks: {type(module).__name__} is not a submodule of the model; pass modules of it")
        chosen = [(names[id(m)], m) for m in blocks]
    for name, module in chosen:
        if not _is_callable(module):
            raise ValueError(
                f"blocks: {name!r} is a {type(module).__name__}, which nobody calls, so that its weights would never "
                "be fetched; pass its elements"
            )
        inside = {id(sub) for sub in module.modules()} - {id(module)}
        for other_name, other in chosen:
            if id(other) in inside:
                raise ValueError(f"blocks: {other_name!r} lies inside {name!r}; pass one of them")
    return [(name or WHOLE_MODEL, module) for name, module in chosen]


def stacked_blocks(model: nn.Module, holders: Set[int]) -> list[NamedModule]:
    """The elements of the outermost stacks of ``model``; none if nothing repeats.

    A ``Sequential`` is a stack if its elements repeat, there or in another one, and are found nowhere else. Where
    nothing is a list and nothing repeats, one that holds a single layer of some class is a stack of one.

    Args:
        holders: ids of the modules that hold matrices. Elements without any are no blocks.
    """

    def stacks(repeated: bool) -> list[_Element]:
        found = _stack_elements(model, "", holders, repeated)
        return [element for element in found if _holds(element.module, holders)]

    repeated = stacks(True)
    if repeated:
        kinds = {_kind(e.module) for e in repeated}
        found = [e for e in stacks(False) if _kind(e.module) in kinds]
    else:
        found = [e for e in stacks(False) if not isinstance(unwrapped(e.module), nn.Sequential)]
    if not any(element.in_list for element in found) and _others_alike(model, found, holders):
        return []
    return [(e.name, e.module) for e in found]


def own_blocks(model: nn.Module, uses: Iterable[Sequence[nn.Module]]) -> list[NamedModule]:
    """The blocks of a model without stacks: its layers. Where several share a matrix, the model is one block.

    Args:
        uses: the modules that hold a matrix, for each matrix.
    """
    called: dict[int, NamedModule] = {}  # of each module, what is called when its weights are used

    def visit(name: str, module: nn.Module, unit: NamedModule | None, wrapped: bool) -> None:
        inside = wrapped or (unit is not None and isinstance(unit[1], _COMPUTE_FOR_CHILDREN))
        if not inside and _is_callable(module):
            unit = (canonical_fqn(name) or WHOLE_MODEL, module)
        if unit is not None:
            called.setdefault(id(module), unit)
        for child_name, child in module.named_children():
            visit(f"{name}.{child_name}" if name else child_name, child, unit, child_name in _WRAPPERS)

    visit("", model, None, wrapped=False)
    found: dict[int, NamedModule] = {}
    for holders in uses:
        units = {id(unit[1]): unit for module in holders if (unit := called.get(id(module))) is not None}
        if len(units) > 1 and _is_callable(model):
            return [(WHOLE_MODEL, model)]
        found |= units
    inside = {id(sub) for _, block in found.values() for sub in block.modules() if sub is not block}
    return [block for key, block in found.items() if key not in inside]


def _is_callable(module: nn.Module) -> bool:
    """Whether it has a ``forward``, of its class or, as compiled modules do, of its own."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside of what compiling and activation checkpointing wrap around it."""
    for prefix in _WRAPPERS:
        inner = module._modules.get(prefix)
        if inner is not None:
            return unwrapped(inner)
    return module


def _is_composite(module: nn.Module) -> bool:
    return any(True for _ in unwrapped(module).children())


def _is_list(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleDict):  # a list whose keys survive when pipeline stages drop some
        return len(module) > 0 and all(key.isdigit() for key in module)
    return isinstance(module, (nn.ModuleList, nn.Sequential))


class _Element(NamedTuple):
    """``in_list``: of a list, which says itself that it is a stack; not only of ``Sequential``s."""

    name: str
    module: nn.Module
    in_list: bool


def _stack_elements(module: nn.Module, prefix: str, holders: Set[int], repeated: bool) -> Iterator[_Element]:
    """Elements of the outermost containers below ``module``, those of containers inside containers included.

    Args:
        repeated: a ``Sequential`` in which nothing repeats is no stack.
    """
    elements = list(module.named_children())
    if not _is_list(module):
        for name, child in elements:
            yield from _stack_elements(child, f"{prefix}{name}.", holders, repeated)
        return
    elements = [(n, c) for n, c in elements if _is_composite(c)]
    in_list = not isinstance(module, nn.Sequential)
    for name, child in elements if in_list else _between_stem_and_head(elements, repeated):
        yield from _element_blocks(child, f"{prefix}{name}", holders, in_list)


def _element_blocks(element: nn.Module, name: str, holders: Set[int], in_list: bool) -> Iterator[_Element]:
    """The element itself, or, if it only groups others, what it groups."""
    inner = unwrapped(element)
    is_group = isinstance(inner, nn.Sequential) and _groups(inner, holders)
    if _is_callable(inner) and not is_group:
        yield _Element(canonical_fqn(name), element, in_list)
        return
    for name_in, child in inner.named_children():
        # What nobody calls cannot be a block; each of its layers is called.
        if not is_group or _is_composite(child):
            yield from _element_blocks(child, f"{name}.{name_in}", holders, in_list)


def _groups(module: nn.Sequential, holders: Set[int]) -> bool:
    """Whether all matrices of ``module`` lie in children that have children."""
    holding = [child for child in module.children() if _holds(child, holders)]
    return bool(holding) and all(map(_is_composite, holding))


def _holds(module: nn.Module, holders: Set[int]) -> bool:
    return any(id(sub) in holders for sub in module.modules())


def _between_stem_and_head(elements: list[NamedModule], repeated: bool) -> list[NamedModule]:
    """In a Sequential that mixes a stem, blocks and a head, the blocks span from the first to the last that repeats."""
    kinds = [_kind(m) for _, m in elements]
    positions = [i for i, kind in enumerate(kinds) if kinds.count(kind) > 1]
    if positions:
        return elements[positions[0] : positions[-1] + 1]
    return [] if repeated else elements


def _kind(module: nn.Module) -> tuple[type, frozenset[object]]:
    """What makes two elements of a stack alike: their class, and for a plain container what it contains."""
    module = unwrapped(module)
    inside = module.children() if _is_list(module) else ()
    return type(module), frozenset(_kind(child) for child in inside)


def _others_alike(model: nn.Module, found: Sequence[_Element], holders: Set[int]) -> bool:
    """Whether modules with matrices, of the kind of these elements, lie elsewhere: then they are no stack."""
    inside = {id(sub) for element in found for sub in element.module.modules()}
    kinds = {_kind(element.module) for element in found}
    return any(
        id(module) not in inside
        and _kind(module) in kinds
        and _holds(module, holders)
        and not any(id(sub) in inside for sub in module.modules())  # what contains them is no other one
        for module in model.modules()
    )


def blocks_by_module(blocks: Iterable[NamedModule]) -> dict[int, list[NamedModule]]:
    """Map ``id(submodule)`` to the blocks that contain it: several of a shared submodule, or of a block that is one."""
    table: dict[int, list[NamedModule]] = {}
    for fqn, block in blocks:
        for sub in block.modules():
            table.setdefault(id(sub), []).append((fqn, block))
    return table


# -- the ends of a model in which no layer repeats, told by what its layers take and give -----------------------------

INPUT_LAYER, OUTPUT_LAYER = "input layer", "output layer"
_CHANNELS = 8  # images have fewer; of wider layers two may be joined, also where a decoder is registered first


class Widths(NamedTuple):
    """How many features the parts of a model take and give."""

    layers: list[Layer]  # in the order of the model
    embedded: set[int]  # widths of embeddings; a model that has some need not have an input layer
    heads: set[int]  # keys of layers that are known to be output layers; if there are any, no other one is
    vocabularies: set[int]  # how many rows embeddings have
    others: set[int]  # sides of tensors that are no layers, which may multiply what a layer gives


def widths_of(model: nn.Module, makeups: Mapping[int, Makeup], embeddings: Mapping[int, str]) -> Widths:
    """Those of ``model``, of whose tensors we know the makeup and which are embeddings or tied to one, by id."""
    found = Widths([], set(), set(), set(), set())
    for module in model.modules():
        if isinstance(module, RECURRENT):
            found.embedded.update({module.hidden_size, 2 * module.hidden_size})
        for param in module.parameters(recurse=False):
            if is_table(module):
                found.embedded.update(param.shape[-1:])  # of an embedding of one's own, which may have vectors too
                found.vocabularies.update(param.shape[:-1])
            elif param.ndim > 1 and makeups[id(param)].is_layer:
                layer = Layer.of(module, param)
                if embeddings.get(id(param)) == INPUT_EMBEDDING:
                    found.embedded.add(layer.gives)
                    continue
                found.layers.append(layer)
                if id(param) in embeddings:
                    found.heads.add(id(param))
            elif param.ndim > 1:
                found.others.update(param.shape[-2:])
    return found


def find_end_layers(widths: Widths) -> dict[int, str]:
    """Which layers take what goes into a model, and which give what comes out of it.

    The output layer is the last one, unless others take what it gives, and it feeds one that feeds none. The input
    layer is the first whose features no other layer gives; where widths tell nothing, the first one. Layers beside
    them are of their kind: those that take as many features as the input layer, if nothing gives so many, and those
    that take as many as the output layer and give as many, or fewer than they take and a number met nowhere else.

    Returns:
        ``"input layer"`` or ``"output layer"``, by key.
    """
    layers, embedded, heads, _, _ = widths
    if not layers:
        return {}
    ends = dict.fromkeys(heads, OUTPUT_LAYER)
    last = _last(layers)
    if not heads:
        ends |= {layer.key: OUTPUT_LAYER for layer in layers if layer is last or _is_beside(layer, last, layers)}
    within = [layer for layer in layers if layer.key not in ends]
    first = _first(layers, within, embedded) or (None if embedded else layers[0])
    if first is not None:
        given = {layer.gives for layer in within} | set(embedded)
        ends = {
            layer.key: INPUT_LAYER
            for layer in layers
            if layer is first or (layer.takes == first.takes and layer.takes not in given)
        } | ends
    return ends


def find_ends_in_blocks(
    model: nn.Module, widths: Widths, tree: ModuleTree, blocks: Sequence[NamedModule]
) -> dict[int, str]:
    """The same for stacks, whose blocks may hold what takes the input, and heads.

    Convolutions are input layers that take what the first one takes. A block that is a chain of layers may be an MLP
    beside others, such as a critic, or a head: its last layer is an output layer if it gives less than it takes, and
    nobody takes that. Its first one then is an input layer if nobody gives what it takes.
    What gives a feature for each row of an embedding, more than it takes, is an output layer if nobody takes these.
    So is a layer like no other one where ``model`` is a list, which nobody calls: of stages of a pipeline, one may have
    the head.
    """
    layers = widths.layers
    if not layers:
        return {}
    last = _last(layers)
    within = [layer for layer in layers if layer is not last]
    first = _first(within, within, widths.embedded) if any(layer.spatial for layer in within) else None
    chains = [chain for _, block in blocks if (chain := _chain(tree, block))]
    before = {layer.key for chain in chains for layer in chain[:-1]}  # what these give the next one takes
    behind = {layer.key for chain in chains for layer in chain[1:]}
    ends = {}
    if first is not None and first.spatial and first.takes < first.gives:  # wider ones are joined from other layers
        ends = {layer.key: INPUT_LAYER for layer in within if layer.spatial and layer.takes == first.takes}
    taken = {layer.takes for layer in layers if layer.key not in behind | ends.keys()} | widths.embedded | widths.others
    given = {layer.gives for layer in layers if layer.key not in before} | widths.embedded
    final = [chain[-1] for chain in chains]
    final += [layer for layer in layers if layer.gives in widths.vocabularies and layer.gives > layer.takes]
    alike = Counter((layer.takes, layer.gives) for layer in layers)
    if len(blocks) > 1 and not _is_callable(model):
        final += [layer for layer in layers if alike[layer.takes, layer.gives] == 1]
    outputs = {layer.key: OUTPUT_LAYER for layer in final if not any(_feeds(layer.gives, n) for n in taken)}
    for start, end in ((chain[0], chain[-1]) for chain in chains):
        if end.key in outputs and not any(_feeds(n, start.takes) for n in given):
            ends[start.key] = INPUT_LAYER
    return ends | outputs


def _chain(tree: ModuleTree, block: nn.Module) -> list[Layer]:
    """The layers of a block that may be a head: a chain of them and nothing else, which ends narrower than before."""
    layers = tree.layers(block)
    ends_narrower = layers and layers[-1].gives < layers[-1].takes
    if not ends_narrower or any(a.gives != b.takes for a, b in pairwise(layers)):
        return []
    held = [(isinstance(holder, nn.ModuleList), part) for holder in block.modules() for part in holder.children()]
    is_flat = all(len(tree.layers(part)) < 2 for in_list, part in held if in_list or not _is_list(part))  # no experts
    return layers if is_flat and len(layers) == sum(param.ndim > 1 for param in block.parameters()) else []


def _feeds(gives: int, takes: int) -> bool:
    """Whether a layer may take what another one gives: all, one of a few shares, or that of several together."""
    small, large = sorted((gives, takes))
    return small == large or (small >= _CHANNELS and large % small == 0 and (small == gives or large <= 16 * small))


def _last(layers: Sequence[Layer]) -> Layer:
    taken, end = Counter(layer.takes for layer in layers), layers[-1]
    unused = [layer for layer in layers if taken[layer.gives] == (layer.takes == layer.gives)]
    fitting = [] if end in unused else [layer for layer in unused if layer.takes == end.gives]
    return (fitting or [end])[-1]


def _first(layers: Sequence[Layer], givers: Sequence[Layer], embedded: Collection[int]) -> Layer | None:
    """The first layer whose features no other of ``givers`` gives, nor two alike, embeddings, or gates before it."""
    given = Counter(layer.gives for layer in givers)
    before = 0
    for layer in layers:
        n = layer.takes
        others = given[n] - (layer in givers and layer.gives == n)
        joined = given[n // 2] if n >= _CHANNELS and n % 2 == 0 else 0
        gated, before = before == 2 * n, layer.gives
        if not (others or joined or gated) and all(n % width for width in embedded if width > 1):
            return layer
    return None


def _is_beside(layer: Layer, last: Layer, layers: Sequence[Layer]) -> bool:
    if layer.takes != last.takes:
        return False
    if layer.gives == last.gives:
        return layer.gives != layer.takes
    others = {size for other in layers if other is not layer for size in (other.takes, other.gives)}
    return layer.gives < layer.takes and layer.gives not in others


def with_known_widths(
    bare: Sequence[tuple[str, nn.Parameter]], widths: Collection[int]
) -> list[tuple[str, nn.Parameter]]:
    """Those that lead from features to features: others may be tables of positions, or states.

    Args:
        widths: of layers. So many features have bare matrices as well, if several have them.
    """
    sides = {(fqn.rpartition(".")[2], side) for fqn, param in bare for side in param.shape[-2:]}
    shared = {side for side, count in Counter(side for _, side in sides).items() if count > 1}
    known = shared.union(*({width * share for share in (1, *SHARES)} for width in widths))
    return [(fqn, param) for fqn, param in bare if known.issuperset(param.shape[-2:])]
