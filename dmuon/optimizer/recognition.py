"""Which matrices parameters consist of that came without their model: found from the modules that hold them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dmuon.dedicated.owned_tensor import OwnedTensor
from dmuon.model.fused_hints import refusal
from dmuon.model.makeup import Makeup, makeup_of
from dmuon.model.matrix_spec import is_remembered, remember_spec
from dmuon.model.module_tree import Holder, ModuleTree, sites_of


def recognize(tensors: Sequence[Tensor]) -> dict[int, Makeup]:
    """What the modules that hold ``tensors`` say of them, by ``id``.

    Nothing is said of a tensor that no module holds, nor of one that was decided before: that dmuon owns, or that was
    routed with its model.
    """
    tree, sites = _sites([t for t in tensors if t.ndim > 1 and not _is_decided(t)])
    return {id(t): makeup_of(tree, t, sites[id(t)]) for t in tensors if id(t) in sites}


def remember_makeups(tensors: Sequence[Tensor]) -> None:
    """Let Muon take ``tensors`` by the matrices that the modules that hold them are known to make of them.

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
        for module, name in () if makeup.known else holders:
            path = max((path for _, path in tree.above(module, name)), key=lambda path: path.count("."))
            fault = refusal(tree, module, name, tensor, path)
            if fault is not None:
                raise ValueError(
                    f"parameter {path!r} {fault}. That needs the model: dmuon.Muon(model, select=…), or groups of "
                    "dmuon.param_groups(model, select=…)"
                )
        if makeup.known or makeup.unfit is None:
            remember_spec(tensor, makeup.spec)


def _is_decided(tensor: Tensor) -> bool:
    return isinstance(tensor, OwnedTensor) or is_remembered(tensor)


def _sites(tensors: Sequence[Tensor]) -> tuple[ModuleTree, dict[int, tuple[Holder, ...]]]:
    return sites_of(tensors) if tensors else (ModuleTree([]), {})
