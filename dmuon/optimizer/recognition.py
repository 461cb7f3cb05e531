"""What parameters are that came without their model: found from the modules that hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from dmuon.dedicated.owned_tensor import OwnedTensor
from dmuon.model.fused_hints import refusal
from dmuon.model.makeup import EMBEDDINGS, Makeup, declared_embeddings, makeup_of
from dmuon.model.matrix_spec import is_remembered, remember_spec
from dmuon.model.module_tree import Holder, ModuleTree, longest_path, sites_of


def recognize(tensors: Sequence[Tensor]) -> dict[int, Makeup]:
    """What the modules that hold ``tensors`` say of them, by ``id``.

    Nothing is said of a tensor that no module holds, nor of one that was decided before: that dmuon owns, or that was
    routed with its model.
    """
    tree, sites = _sites([t for t in tensors if t.ndim > 1 and not _is_decided(t)])
    return {id(t): makeup_of(tree, t, sites[id(t)]) for t in tensors if id(t) in sites}


def remember_makeups(tensors: Sequence[Tensor]) -> list[str]:
    """Let Muon take ``tensors`` by the matrices that the modules that hold them are known to make of them.

    Returns:
        What to call the embeddings among them, and the output heads that are tied to one or declared to be such. Of
        other heads a tensor does not say what it is for.

    Raises:
        ValueError: one looks fused, and its class is not known.
    """
    undecided = [t for t in tensors if t.ndim > 1 and not _is_decided(t)]
    tree, sites = _sites(undecided)
    for tensor in undecided:
        holders = sites.get(id(tensor), ())
        if not holders:
            continue
        makeup = makeup_of(tree, tensor, holders)
        # A stack is what the group says, and a warning tells what looks fused.
        for module, name in () if makeup.known or tensor.ndim == 3 else holders:
            path = longest_path(tree.above(module, name))
            fault = refusal(tree, module, name, tensor, path)
            if fault is not None:
                raise ValueError(
                    f"parameter {path!r} {fault}. That needs the model: dmuon.Muon(model, select=…), or groups of "
                    "dmuon.param_groups(model, select=…)"
                )
        if makeup.known or makeup.unfit is None:
            remember_spec(tensor, makeup.spec)
    return _embeddings(tree, sites)


def _embeddings(tree: ModuleTree, sites: Mapping[int, Sequence[Holder]]) -> list[str]:
    above = {key: [above for site in holders for above in tree.above(*site)] for key, holders in sites.items()}
    models = {id(module): module for holders in above.values() for module, _ in holders}
    declared = {id(weight): reason for model in models.values() for weight, reason in declared_embeddings(model)}
    found = []
    for key, holders in above.items():
        held = any(isinstance(module, EMBEDDINGS) for module, _ in sites[key])
        kind = "embedding" if held else declared.get(key)
        if kind is not None:
            found.append(f"{longest_path(holders)!r} is an {kind}")
    return found


def _is_decided(tensor: Tensor) -> bool:
    return isinstance(tensor, OwnedTensor) or is_remembered(tensor)


def _sites(tensors: Sequence[Tensor]) -> tuple[ModuleTree, dict[int, tuple[Holder, ...]]]:
    return sites_of(tensors) if tensors else (ModuleTree([]), {})
