"""The blocks of a model, which are the repeated layers that communicate as units: names, and shapes of matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

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

BlockPredicate = Callable[[str, nn.Module], bool]


def canonical_fqn(name: str) -> str:
    """``name`` without the components that wrappers (compile, activation checkpointing) insert."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def find_blocks(
    model: nn.Module, blocks: Sequence[nn.Module] | BlockPredicate | None
) -> Sequence[tuple[str, nn.Module]]:
    if blocks is None:
        # A Sequential without any repetition is a stack of one layer only where nothing else is a stack.
        return list(_stack_elements(model, "", True)) or list(_stack_elements(model, "", False))
    named = [(canonical_fqn(n), m) for n, m in model.named_modules() if n]
    if callable(blocks) and not isinstance(blocks, nn.Module):
        chosen = [(n, m) for n, m in named if blocks(n, m)]
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
    return chosen


def _is_callable(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _unwrapped(module: nn.Module) -> nn.Module:
    for prefix in _WRAPPERS:
        inner = module._modules.get(prefix)
        if inner is not None:
            return _unwrapped(inner)
    return module


def _is_composite(module: nn.Module) -> bool:
    return any(True for _ in _unwrapped(module).children())


def _is_list(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleDict):  # a list whose keys survive when pipeline stages drop some
        return len(module) > 0 and all(key.isdigit() for key in module)
    return isinstance(module, (nn.ModuleList, nn.Sequential))


def _stack_elements(module: nn.Module, prefix: str, repeated: bool) -> Iterator[tuple[str, nn.Module]]:
    """Blocks below ``module``: elements of its outermost containers, those of containers inside containers included.

    Args:
        repeated: a ``Sequential`` in which nothing repeats is no stack.
    """
    elements = list(module.named_children())
    if not _is_list(module):
        for name, child in elements:
            yield from _stack_elements(child, f"{prefix}{name}.", repeated)
        return
    elements = [(n, c) for n, c in elements if _is_composite(c)]
    if isinstance(module, nn.Sequential):
        elements = _between_stem_and_head(elements, repeated)
    for name, child in elements:
        yield from _element_blocks(child, f"{prefix}{name}", repeated)


def _element_blocks(element: nn.Module, name: str, repeated: bool) -> Iterator[tuple[str, nn.Module]]:
    """The element itself, or, if it only groups others, what it groups."""
    inner = _unwrapped(element)
    if not _is_callable(inner):  # nobody calls it, so it cannot be a block; each of its layers is called
        for name_in, child in inner.named_children():
            yield from _element_blocks(child, f"{name}.{name_in}", repeated)
    elif isinstance(inner, nn.Sequential) and any(_is_composite(child) for child in inner.children()):
        yield from _stack_elements(inner, f"{name}.", False)
    else:
        yield canonical_fqn(name), element


def _between_stem_and_head(elements: list[tuple[str, nn.Module]], repeated: bool) -> list[tuple[str, nn.Module]]:
    """In a Sequential that mixes a stem, blocks and a head, the blocks span from the first to the last that repeats."""
    kinds = [_kind(m) for _, m in elements]
    positions = [i for i, kind in enumerate(kinds) if kinds.count(kind) > 1]
    if positions:
        return elements[positions[0] : positions[-1] + 1]
    return [] if repeated else elements


def _kind(module: nn.Module) -> tuple[type, frozenset[object]]:
    """What makes two elements of a stack alike: their class, and for a plain container what it contains."""
    module = _unwrapped(module)
    inside = module.children() if _is_list(module) else ()
    return type(module), frozenset(_kind(child) for child in inside)


def blocks_by_module(blocks: Iterable[tuple[str, nn.Module]]) -> dict[int, list[tuple[str, nn.Module]]]:
    """Map ``id(submodule)`` to the blocks that contain it (more than one only for a shared submodule)."""
    table: dict[int, list[tuple[str, nn.Module]]] = {}
    seen: set[int] = set()
    for fqn, block in blocks:
        if id(block) in seen:
            continue
        seen.add(id(block))
        for sub in block.modules():
            table.setdefault(id(sub), []).append((fqn, block))
    return table
