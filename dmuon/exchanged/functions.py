"""The three functions of generated configurations, which users may call, wrap and replace as their own.

They keep nothing. What the parameters' layouts are stands in the ``state`` that each of them gets, where ``assign_fn``
puts it, so that one configuration serves several optimizers. ``dmuon.Muon`` recognizes a ``gather_fn`` and a
``redistribute_fn`` of one recipe, and exchanges many matrices at once by the same layouts, instead of calling them for
one parameter after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dmuon.comm.process_groups import this_rank
from dmuon.comm.redistribution import start_redistribution
from dmuon.exchanged.assignment import plan, planned_owners, whole_parcel
from dmuon.exchanged.config import LAYOUTS
from dmuon.exchanged.layouts import Layouts, lay_out
from dmuon.exchanged.recipe import LayoutRecipe
from dmuon.layout.ranks import GlobalRank
from dmuon.platform.torch_private import local_tensor

__all__ = ["AssignByLayout", "GatherByLayout", "RedistributeByLayout"]

_SINGLE = "layout_of_update"  # in ``state``, of a tensor that was gathered without an assignment


@dataclass(frozen=True, slots=True, eq=False)
class AssignByLayout:
    """``assign_fn(params, state)``: find where the parameters lie, and plan who owns them.

    Collective over the ranks that share parameters, and over all ranks of the process groups of the configuration.

    Returns:
        Index to the owner; of a stack of matrices, to that of its first matrix.
    """

    recipe: LayoutRecipe

    def __call__(self, params: Sequence[Tensor], state: dict[str, Any]) -> dict[int, GlobalRank]:
        names = list(state.get("param_names", ()))
        if len(names) != len(params):
            names = [str(i) for i in range(len(params))]
        last: Layouts | None = state.get(LAYOUTS)
        state[LAYOUTS] = plan(lay_out(self.recipe, params, names, last=last), last)
        return planned_owners(state[LAYOUTS], this_rank())


@dataclass(frozen=True, slots=True, eq=False)
class GatherByLayout:
    """``gather_fn(update, dst_rank, state)``: the whole of a parameter's tensor on ``dst_rank``, None elsewhere.

    Collective over the ranks that hold the parameter. ``update`` is this rank's part, or a DTensor. Without
    ``state["current_param_idx"]``, or without an assignment, it lies as it says itself.

    Raises:
        ValueError: ``dst_rank`` does not hold the parameter.
        RuntimeError: ``update`` is not shaped as this rank's part.
    """

    recipe: LayoutRecipe

    def __call__(self, update: Tensor, dst_rank: GlobalRank, state: dict[str, Any]) -> Tensor | None:
        local = local_tensor(update).detach()
        layouts, index = _under_way(state) or self._single(update, state)
        expected = local_tensor(layouts.params[index]).shape
        if local.shape != expected:
            raise RuntimeError(
                f"gather_fn got a tensor of shape {tuple(local.shape)} for parameter {index} on rank {this_rank()}, "
                f"whose part here is {tuple(expected)}"
            )
        placed = layouts.placed[index]
        if placed is None:
            return local
        parcel = whole_parcel(placed, dst_rank, "update")
        domain, like, what = layouts.domains[placed.ranks], local.new_empty(0), "gather of one matrix"
        wholes = start_redistribution([parcel.to_owner], {0: local[None]}, domain, like, what).wait()
        return wholes[0][0] if wholes else None

    def _single(self, update: Tensor, state: dict[str, Any]) -> tuple[Layouts, int]:
        last, _ = state.get(_SINGLE, (None, 0))
        layouts = lay_out(self.recipe, [update], ["update"], last=last)
        state[_SINGLE] = layouts, 0
        return layouts, 0


@dataclass(frozen=True, slots=True, eq=False)
class RedistributeByLayout:
    """``redistribute_fn(update, src_rank, state)``: this rank's part of what ``src_rank`` has whole.

    Collective over the ranks that hold the parameter. ``update`` is the whole tensor on ``src_rank``, None elsewhere.

    Raises:
        RuntimeError: called before ``gather_fn``, which learns where the tensor lies.
    """

    recipe: LayoutRecipe

    def __call__(self, update: Tensor | None, src_rank: GlobalRank, state: dict[str, Any]) -> Tensor:
        layouts, index = _under_way(state) or state.get(_SINGLE, (None, 0))
        if layouts is None:
            raise RuntimeError("redistribute_fn was called before gather_fn, which learns where the tensor lies")
        placed, local = layouts.placed[index], local_tensor(layouts.params[index])
        if placed is None:
            assert update is not None
            return update
        domain, parcel = layouts.domains[placed.ranks], whole_parcel(placed, src_rank, "update")
        whole = {0: update[None]} if update is not None and domain.position == parcel.owner else {}
        like, what = local.new_empty(0), "scatter of one matrix"
        parts = start_redistribution([parcel.from_owner], whole, domain, like, what).wait()
        return parts[0][0].to(local.dtype) if parts else local.new_empty(local.shape)


def _under_way(state: Mapping[str, Any]) -> tuple[Layouts, int] | None:
    """The layouts of all parameters, and which of them a call is about; None without an assignment."""
    index: int | None = state.get("current_param_idx")
    layouts: Layouts | None = state.get(LAYOUTS)
    return None if index is None or layouts is None else (layouts, index)
