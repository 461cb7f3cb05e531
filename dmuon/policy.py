"""Which parameters Muon takes, and which block each belongs to. Pure: no communication, nothing is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch.nn as nn

__all__ = ["BlockPredicate", "Route", "Select", "canonical_fqn", "route_parameters"]

Select = Callable[[str, nn.Module, nn.Parameter], bool]
BlockPredicate = Callable[[str, nn.Module], bool]

_WRAPPER_PREFIXES = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
# A hint alone decides nothing; together with a shape that is not square it makes a layout ambiguous.
_FUSED_HINTS = ("qkv", "c_attn", "query_key_value", "in_proj", "gate_up")


@dataclass(frozen=True, slots=True)
class Route:
    """Where one parameter goes, and why.

    Attributes:
        fqn: canonical name of the parameter (its first site).
        param: the parameter itself.
        sites: every ``(module, attribute)`` that holds it.
        block: canonical name of its block, or ``None`` when Muon does not take it.
        block_module: the block itself, or ``None``.
        reason: one phrase for people.
    """

    fqn: str
    param: nn.Parameter
    sites: tuple[tuple[nn.Module, str], ...]
    block: str | None
    block_module: nn.Module | None
    reason: str

    @property
    def muon(self) -> bool:
        return self.block is not None


def canonical_fqn(name: str) -> str:
    """``name`` without the components that wrappers (compile, activation checkpointing) insert."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_PREFIXES)


def route_parameters(
    model: nn.Module,
    select: Select | None = None,
    blocks: Sequence[nn.Module] | BlockPredicate | None = None,
) -> list[Route]:
    """Route every parameter of ``model`` to Muon or AdamW, in the order of ``named_parameters``.

    By default Muon takes every trainable matrix inside a block. Blocks are the elements of the outermost
    ``ModuleList``s and ``Sequential``s that have children of their own. Embeddings, tied or declared output heads,
    1-D parameters and everything outside blocks stay on AdamW.

    Args:
        select: ``select(fqn, module, param) -> bool`` decides instead of the default rule.
        blocks: the blocks themselves, or ``blocks(fqn, module) -> bool``; default as above.

    Raises:
        TypeError: ``select`` returned something that is not a bool.
        ValueError: no matrix was selected, a selected parameter lies in no block or in two, is not a matrix, or
            has a fused layout that the shape alone does not settle.
    """
    block_modules = list(_find_blocks(model, blocks))
    owner_block = _innermost_block(model, block_modules)
    embeddings = _embedding_ids(model)
    routes = []
    for fqn, param, sites in _parameters_with_sites(model):
        reason = _why_not(fqn, param, sites, owner_block, embeddings)
        if select is not None:
            chosen = select(fqn, sites[0][0], param)
            if not isinstance(chosen, bool):
                raise TypeError(f"select({fqn!r}, …) returned {chosen!r}; return True or False")
            if chosen:
                _require_selectable(fqn, param, sites, owner_block)
            reason = None if chosen else "excluded by select"
        if reason is not None:
            routes.append(Route(fqn, param, sites, None, None, reason))
            continue
        if select is None:
            _refuse_fused(fqn, sites[0][0], param)
        block_fqn, block = _single_block(fqn, sites, owner_block)
        why = "chosen by select" if select is not None else "matrix inside a block"
        routes.append(Route(fqn, param, sites, block_fqn, block, why))
    if not any(r.muon for r in routes):
        raise ValueError(
            "no matrix was selected for Muon: "
            + (
                "select returned False for every parameter"
                if select is not None
                else "no trainable 2-D parameter lies inside a block (an element of a ModuleList or Sequential that has "
                "children of its own)"
            )
            + "; name the blocks with blocks=[…] or the matrices with select=…"
        )
    return routes


def _find_blocks(
    model: nn.Module, blocks: Sequence[nn.Module] | BlockPredicate | None
) -> Iterator[tuple[str, nn.Module]]:
    if blocks is None:
        yield from _container_elements(model, "")
        return
    named = [(canonical_fqn(n), m) for n, m in model.named_modules() if n]
    if callable(blocks):
        yield from ((n, m) for n, m in named if blocks(n, m))
        return
    names = {id(m): n for n, m in named}
    for module in blocks:
        if id(module) not in names:
            raise ValueError(f"blocks: {type(module).__name__} is not a submodule of the model; pass modules of it")
        yield names[id(module)], module


def _container_elements(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Elements of the outermost containers below ``module``; a container inside a container is descended into."""
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        inner = [(n, c) for n, c in module.named_children() if any(True for _ in c.children())]
        if isinstance(module, nn.Sequential):
            inner = _repeated(inner)
        for name, child in inner:
            fqn = canonical_fqn(f"{prefix}{name}")
            if isinstance(child, (nn.ModuleList, nn.Sequential)) and _holds_composites(child):
                yield from _container_elements(child, f"{prefix}{name}.")
            else:
                yield fqn, child
        return
    for name, child in module.named_children():
        yield from _container_elements(child, f"{prefix}{name}.")


def _holds_composites(module: nn.Module) -> bool:
    return any(any(True for _ in child.children()) for child in module.children())


def _repeated(elements: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """In a Sequential that mixes a stem, blocks and a head, the blocks are the elements whose class repeats."""
    classes = [type(m) for _, m in elements]
    repeated = [(n, m) for n, m in elements if classes.count(type(m)) > 1]
    return repeated or elements


def _innermost_block(
    model: nn.Module, blocks: Iterable[tuple[str, nn.Module]]
) -> dict[int, list[tuple[str, nn.Module]]]:
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


def _embedding_ids(model: nn.Module) -> dict[int, str]:
    """``id(param) -> reason`` for embeddings, what is tied to them, and declared input and output embeddings."""
    found: dict[int, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, _EMBEDDINGS):
            found[id(module.weight)] = f"embedding {canonical_fqn(name) or type(module).__name__}"
    for getter, reason in (
        ("get_input_embeddings", "input embedding"),
        ("get_output_embeddings", "output head"),
    ):
        try:
            module = getattr(model, getter)()
        except (AttributeError, NotImplementedError):
            continue
        weight = getattr(module, "weight", None)
        if weight is not None:
            found.setdefault(id(weight), reason)
    return found


def _parameters_with_sites(
    model: nn.Module,
) -> Iterator[tuple[str, nn.Parameter, tuple[tuple[nn.Module, str], ...]]]:
    sites: dict[int, list[tuple[nn.Module, str]]] = {}
    first: dict[int, tuple[str, nn.Parameter]] = {}
    for module_name, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            fqn = canonical_fqn(f"{module_name}.{name}" if module_name else name)
            sites.setdefault(id(param), []).append((module, name))
            first.setdefault(id(param), (fqn, param))
    for key, (fqn, param) in first.items():
        yield fqn, param, tuple(sites[key])


def _why_not(
    fqn: str,
    param: nn.Parameter,
    sites: Sequence[tuple[nn.Module, str]],
    owner_block: dict[int, list[tuple[str, nn.Module]]],
    embeddings: dict[int, str],
) -> str | None:
    if param.ndim < 2:
        return f"{param.ndim}-D"
    if id(param) in embeddings:
        tied = "" if isinstance(sites[0][0], _EMBEDDINGS) and len(sites) == 1 else "tied to "
        return tied + embeddings[id(param)]
    if any(id(module) not in owner_block for module, _ in sites):
        return "outside blocks"
    if param.ndim != 2:
        return f"{param.ndim}-D, not one matrix"
    if not param.is_floating_point():
        return f"{param.dtype}, not floating point"
    if not param.requires_grad:
        return "frozen"
    return None


def _require_selectable(
    fqn: str,
    param: nn.Parameter,
    sites: Sequence[tuple[nn.Module, str]],
    owner_block: dict[int, list[tuple[str, nn.Module]]],
) -> None:
    if param.ndim != 2 or not param.is_floating_point():
        raise ValueError(
            f"select chose {fqn!r} of shape {tuple(param.shape)} and {param.dtype}; Muon takes 2-D floating-point "
            "matrices: return False for it"
        )
    if any(id(module) not in owner_block for module, _ in sites):
        raise ValueError(f"select chose {fqn!r}, which lies outside every block; name its block with blocks=[…]")


def _single_block(
    fqn: str, sites: Sequence[tuple[nn.Module, str]], owner_block: dict[int, list[tuple[str, nn.Module]]]
) -> tuple[str, nn.Module]:
    holders = {id(block): (name, block) for module, _ in sites for name, block in owner_block[id(module)]}
    if len(holders) > 1:
        names = sorted(name for name, _ in holders.values())
        raise ValueError(
            f"parameter {fqn!r} is shared by blocks {', '.join(names)}; untie it, keep it on AdamW with select=…, or "
            "name one block that contains both with blocks=[…]"
        )
    return next(iter(holders.values()))


def _refuse_fused(fqn: str, module: nn.Module, param: nn.Parameter) -> None:
    rows, cols = param.shape
    leaf = ".".join(fqn.split(".")[-2:]).lower()
    if max(rows, cols) >= 1.5 * min(rows, cols) and any(hint in leaf for hint in _FUSED_HINTS):
        raise ValueError(
            f"parameter {fqn!r} of shape {(rows, cols)} looks like several projections fused into one tensor; "
            "orthogonalizing it whole is not what Muon does to its parts. Split the layer, or decide with "
            "select=lambda fqn, module, param: …"
        )
