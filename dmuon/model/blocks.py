"""The blocks of a model, which are the layers that communicate as units: names, and shapes of matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace

import torch.nn as nn


@dataclass(frozen=True, slots=True)
class MatrixShape:
    """The shape of one matrix inside a block.

    Attributes:
        name: canonical name of the parameter.
        rows, cols: sides of the matrix, as ``nn.Linear`` stores it: (out features, in features).
        block: canonical name of its block.
    """

    name: str
    rows: int
    cols: int
    block: str


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
        found = _stack_elements(model, "", _Container(in_list=False, repeated=repeated, holders=holders))
        return [e for e in found if _holds(e.module, holders)]

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


@dataclass(frozen=True, slots=True)
class _Container:
    """Where an element was found, or is looked for.

    Attributes:
        in_list: in a list, which says itself that it is a stack; or only in ``Sequential``s.
        repeated: a ``Sequential`` in which nothing repeats is no stack.
        holders: ids of the modules that hold matrices.
    """

    in_list: bool
    repeated: bool
    holders: Set[int]


@dataclass(frozen=True, slots=True)
class _Element:
    name: str
    module: nn.Module
    in_list: bool


def _stack_elements(module: nn.Module, prefix: str, within: _Container) -> Iterator[_Element]:
    """Elements of the outermost containers below ``module``, those of containers inside containers included."""
    elements = list(module.named_children())
    if not _is_list(module):
        for name, child in elements:
            yield from _stack_elements(child, f"{prefix}{name}.", within)
        return
    elements = [(n, c) for n, c in elements if _is_composite(c)]
    if isinstance(module, nn.Sequential):
        elements = _between_stem_and_head(elements, within.repeated)
    else:
        within = replace(within, in_list=True)
    for name, child in elements:
        yield from _element_blocks(child, f"{prefix}{name}", within)


def _element_blocks(element: nn.Module, name: str, within: _Container) -> Iterator[_Element]:
    """The element itself, or, if it only groups others, what it groups."""
    inner = unwrapped(element)
    if not _is_callable(inner):  # nobody calls it, so it cannot be a block; each of its layers is called
        for name_in, child in inner.named_children():
            yield from _element_blocks(child, f"{name}.{name_in}", within)
    elif isinstance(inner, nn.Sequential) and _groups(inner, within.holders):
        for name_in, child in inner.named_children():
            if _is_composite(child):
                yield from _element_blocks(child, f"{name}.{name_in}", within)
    else:
        yield _Element(canonical_fqn(name), element, within.in_list)


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
    """Map ``id(submodule)`` to the blocks that contain it (more than one only for a shared submodule)."""
    table: dict[int, list[NamedModule]] = {}
    seen: set[int] = set()
    for fqn, block in blocks:
        if id(block) in seen:
            continue
        seen.add(id(block))
        for sub in block.modules():
            table.setdefault(id(sub), []).append((fqn, block))
    return table
