"""Norms of tensors that ranks hold together: what each tensor, or a part of it, adds to one, and how ranks join that.

A term is what one tensor, or a part of it, adds to the norm: for an infinite order its largest or smallest magnitude,
for order 0 the number of elements that are not zero, otherwise the sum of powers. Terms are fp64: joining them then
neither overflows nor rounds where torch's norm in a single process does not.

Norms are collective: one collective for all of a list that lie alike. Torch's clipping asks for the norms of lists. A
rank without elements takes part, since it holds a placeholder.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from dmuon.comm.monitor import waiting
from dmuon.comm.process_groups import named, ranks_of
from dmuon.kernels import streams_of
from dmuon.model.matrix_spec import NAME
from dmuon.platform.torch_private import local_tensor, without_torch_function


def local_terms(tensors: Sequence[Tensor], order: float, foreach: bool | None) -> Tensor:
    """What each of ``n`` tensors of one device and dtype adds, ``(n,)``."""
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    # In place of no elements, one that adds nothing: its power, or its share of a largest or smallest magnitude.
    nothing = math.inf if order < 0 else 0.0
    filled = [tensor if tensor.numel() else tensor.new_full((1,), nothing) for tensor in tensors]
    if foreach is False:
        norms = [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in filled]
    else:
        norms = list(torch._foreach_norm(filled, order, dtype=dtype))
    terms = torch.stack(norms).double()
    return terms.pow(order) if order != 0 and math.isfinite(order) else terms


def join_terms(terms: Tensor, order: float) -> Tensor:
    """The term of several whole tensors together, ``()``, for a positive order."""
    return terms.amax() if math.isinf(order) else terms.sum()


def norms_of(terms: Tensor, order: float) -> Tensor:
    """The norms that belong to terms of whole tensors."""
    return terms.pow(1.0 / order) if order != 0 and math.isfinite(order) else terms


def reduce_terms(terms: Tensor, order: float, group: dist.ProcessGroup, said: Sequence[object] = ()) -> None:
    """Join the terms of parts that lie on different ranks, ``(n,)``, in place; NaN wins.

    For an infinite order they may be any numbers, of which the largest or the smallest is found.

    Args:
        said: what tells the tensors from others, the same on all ranks. A digest travels beside the terms: the sums of
            it and of its square are so many times what one rank has, or its largest and smallest value are that, only
            if all have the same.

    Raises:
        RuntimeError: ranks have said otherwise. On an accelerator, which nobody waits for, terms are NaN then.
    """
    digest = zlib.crc32(repr(said).encode()) & 0xFFFF
    count, marks, op, both = group.size(), (digest, digest**2), dist.ReduceOp.SUM, terms
    sign = math.copysign(1.0, order)
    if not math.isfinite(order):
        # MAX and MIN of floats may drop NaN, as gloo's do: whether there is one is asked beside, by another number.
        count, marks, op = 1, (digest, -digest), dist.ReduceOp.MAX
        unknown = terms.isnan()
        both = torch.cat([torch.where(unknown, -math.inf, terms * sign), unknown.double()])
    both = torch.cat([both, *(both.new_full((1,), number) for number in marks)])
    all_reduce(both, op, group, "norm")
    differs = (both[-2] != count * marks[0]) | (both[-1] != count * marks[1])
    if streams_of(both.device) is None and differs.tolist():
        raise RuntimeError(
            f"ranks {list(ranks_of(group))} join norms of different tensors, this one of {len(said)} such as "
            f"{list(said[:3])}: pass the same ones on all of them, and make such calls in one order"
        )
    found = both[: len(terms)]
    if not math.isfinite(order):
        found = torch.where(both[len(terms) : -2] > 0, math.nan, found * sign)
    terms.copy_(found.masked_fill(differs, math.nan))


def all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup, what: str) -> None:
    """As ``dist.all_reduce``, over a group that may be the user's.

    Args:
        what: is asked for, for the message of a failure.
    """
    ranks = ranks_of(group)
    with (
        waiting(f"the {what} of tensors", f"{group.group_name} {what}", ranks),
        named(f"the {what} of tensors that ranks {list(ranks)} hold together"),
    ):
        dist.all_reduce(tensor, op, group=group)


# -- of tensors that lie on several ranks ------------------------------------------------------------------------------


def require_summed(tensors: Sequence[Tensor], what: str) -> None:
    """Raise RuntimeError for a tensor of which ranks hold addends."""
    for tensor in tensors:
        if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
            name = named_tensor(tensor)
            raise RuntimeError(f"{what}: {name} is {tensor.placements}: reduce what is Partial before it")


def named_tensor(tensor: Tensor) -> str:
    """A tensor, for messages."""
    fqn = getattr(tensor, "fqn", getattr(tensor, NAME, None))
    return f"{'a tensor' if fqn is None else repr(fqn)} of shape {tuple(tensor.shape)}"


class WholeNorm(Tensor):
    """A number that every rank knows, a plain tensor but for this: norms of other DTensors may be stacked with it."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with without_torch_function():
            if func is torch.stack and args:
                args = (_whole(args[0]), *args[1:])  # which may lie on several meshes
            args, kwargs = tree_map_only(WholeNorm, lambda norm: norm.as_subclass(Tensor), (args, kwargs or {}))
            out = func(*args, **kwargs)
        return out.as_subclass(cls) if func is Tensor.to else out  # which comes before torch stacks them

    def full_tensor(self, **_: Any) -> Tensor:
        """As a plain tensor: no rank has a part of the number."""
        return self.clone()

    to_local = full_tensor

    def redistribute(self, *_: Any, **__: Any) -> WholeNorm:
        """This norm."""
        return self


def _whole(norms: Sequence[Tensor]) -> list[Tensor]:
    """``norms`` with plain tensors in place of DTensors. Collective: once for all that lie alike."""
    alike: dict[Any, list[int]] = {}
    for i, norm in enumerate(norms):
        if isinstance(norm, DTensor):
            alike.setdefault((norm.device_mesh, norm.placements, norm.dtype), []).append(i)
    whole = list(norms)
    for places in alike.values():
        stacked = torch.stack([norms[i] for i in places])
        assert isinstance(stacked, DTensor)
        summed: Tensor = stacked.full_tensor()
        if any(placement.is_partial("max") or placement.is_partial("min") for placement in stacked.placements):
            # Back ends may drop NaN where they take the largest number of several ranks.
            unknown = local_tensor(stacked).isnan().float()
            for group in split_over(stacked):
                all_reduce(unknown, dist.ReduceOp.MAX, group, "norm")
            summed = torch.where(unknown > 0, math.nan, summed)
        for i, norm in zip(places, summed.unbind(), strict=True):
            whole[i] = norm
    return whole


def by_kind(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Local tensors by device and dtype, which one foreach kernel can take together."""
    return [[local_tensor(tensors[i]) for i in same] for same in _kinds(tensors, range(len(tensors)))]


def split_over(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Over which groups, one after the other, local tensors are parts of the whole; none if this rank has all of it.

    Raises:
        ValueError: it lies on a mesh without this rank.
    """
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    if mesh.get_coordinate() is None:
        raise ValueError(f"{named_tensor(tensor)} lies on {mesh}, which is without this rank: leave it out here")
    dims = [i for i, p in enumerate(tensor.placements) if not p.is_replicate() and mesh.size(i) > 1]
    return tuple(mesh.get_group(dim) for dim in dims)


def whole_terms(
    tensors: Sequence[Tensor],
    order: float,
    foreach: bool | None,
    device: torch.device,
    absent: Collection[int] = (),
    names: Sequence[str] = (),
) -> Tensor:
    """The terms of ``n`` tensors of any kinds, ``(n,)`` on ``device``. Collective: once a layout.

    Args:
        absent: numbers of those that only lie as others do, of which this rank lacks its part: they add nothing.
        names: if given, of all tensors that lie alike there is one term, which tells ranks with others from this one.
    """
    by_split: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_split.setdefault(split_over(tensor), []).append(i)
    whole: dict[int, Tensor] = {}
    for groups, members in by_split.items():
        kinds = _kinds(tensors, members)
        terms = []
        for same in kinds:
            parts = [local_tensor(tensors[i]) for i in same]
            if absent:
                parts = [part.new_empty(0) if i in absent else part for i, part in zip(same, parts, strict=True)]
            terms.append(local_terms(parts, order, foreach).to(device))
        term, numbers = torch.cat(terms), [i for same in kinds for i in same]
        said: Sequence[object] = [tuple(tensors[i].shape) for i in numbers]
        if names:  # in whatever order they come
            said = sorted(names[i] for i in numbers)
            term, numbers = join_terms(term, order).reshape(1), numbers[:1]
        for group in groups:
            reduce_terms(term, order, group, said)
        whole |= zip(numbers, term.split(1), strict=True)
    return torch.cat([whole[i] for i in sorted(whole)])


def answer_norm(args: Sequence[Any], kwargs: dict[str, Any], refuse: Callable[[str], Exception]) -> Any:
    """What ``_foreach_norm``, ``linalg_vector_norm`` or ``norm`` returns, of tensors of which one is owned.

    Args:
        args: beginning with the tensor, or the list of tensors.
        refuse: makes the exception of what is not available.
    """
    several = isinstance(args[0], (list, tuple))
    given = dict(zip(["ord", "dtype"] if several else ["ord", "dim", "keepdim", "dtype"], args[1:], strict=False))
    given |= kwargs
    order = given.get("ord", given.get("p"))
    order = 2.0 if order is None else float(order)
    if math.isnan(order):
        raise refuse("a norm of order NaN")
    if several:
        return _norms(args[0], order, given.get("dtype"))
    tensor = args[0]
    dims = given.get("dim") or range(tensor.ndim)
    if given.get("keepdim") or sorted(dim % tensor.ndim for dim in dims) != list(range(tensor.ndim)):
        raise refuse(f"a norm over dim={given.get('dim')}, keepdim={given.get('keepdim', False)}")
    return _norms([tensor], order, given.get("dtype"))[0]


def _norms(tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None) -> list[Tensor]:
    """The norm of each tensor, ``()``. Collective."""
    require_summed(tensors, "norm")
    norms = norms_of(whole_terms(tensors, order, None, local_tensor(tensors[0]).device), order).unbind()
    pairs = zip(tensors, norms, strict=True)
    return [_number(norm, tensor, (dtype or tensor.dtype).to_real()) for tensor, norm in pairs]


def _number(value: Tensor, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of a number of ``tensor``: views of one tensor may not be results of several functions."""
    number = value.to(local_tensor(tensor).device, dtype, copy=True)
    return number.as_subclass(WholeNorm) if isinstance(tensor, DTensor) else number


def check_and_unscale(func: Any, grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Torch's function of that name for ``GradScaler``, on gradients of any kinds. Collective.

    Afterwards all ranks that hold parts of them have found the same, so that all of them skip a step or none does.

    Args:
        func: the operation on plain tensors.
        found_inf: becomes 1 if any rank has an element that is not finite.
    """
    require_summed(grads, "GradScaler")
    for same in by_kind(grads):
        func(same, found_inf, inv_scale)
    # After the last check: what one rank found travels along each dimension in turn.
    for group in dict.fromkeys(group for grad in grads for group in split_over(grad)):
        all_reduce(found_inf, dist.ReduceOp.MAX, group, "check for infinities")


def _kinds(tensors: Sequence[Tensor], members: Sequence[int]) -> list[list[int]]:
    """Of some of ``tensors``, those of one device and dtype."""
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i in members:
        local = local_tensor(tensors[i])
        kinds.setdefault((local.device, local.dtype), []).append(i)
    return list(kinds.values())
