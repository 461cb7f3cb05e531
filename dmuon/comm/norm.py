"""Norms over ranks: what each tensor, or a part of it, adds to a norm, and how ranks join that.

A term is what one tensor, or a part of it, adds to the norm: for an infinite order its largest or smallest magnitude,
for order 0 the number of elements that are not zero, otherwise the sum of powers. Terms are fp64: joining them then
neither overflows nor rounds where torch's norm in a single process does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dmuon.comm.monitor import begin_wait, end_wait
from dmuon.comm.process_groups import named, ranks_of

_LARGEST = torch.iinfo(torch.int64).max
_SIGN = torch.iinfo(torch.int64).min


def absent_term(order: float) -> float:
    """The term of no elements."""
    return math.inf if order == -math.inf else 0.0


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
    """The term of several whole tensors together, ``()``; for order 0 it counts tensors, as torch does."""
    if math.isinf(order):
        return terms.amax() if order > 0 else terms.amin()
    return terms.ne(0).double().sum() if order == 0 else terms.sum()


def norms_of(terms: Tensor, order: float) -> Tensor:
    """The norms that belong to terms of whole tensors."""
    return terms.pow(1.0 / order) if order != 0 and math.isfinite(order) else terms


def reduce_terms(terms: Tensor, order: float, group: dist.ProcessGroup) -> None:
    """Join the terms of parts that lie on different ranks, ``(n,)``, in place; NaN wins.

    For an infinite order they may be any numbers, of which the largest or the smallest is found.
    """
    if math.isfinite(order):
        all_reduce(terms, dist.ReduceOp.SUM, group, "norm")
        return
    # MAX and MIN of floats may drop NaN, as gloo's do. So the largest of integers is found that have the same order, of
    # which NaN is the largest: the bits of a float, and those of a negative one inverted below its sign.
    sign = math.copysign(1.0, order)
    bits = (terms * sign).view(torch.int64)
    ordered = torch.where(bits < 0, bits.bitwise_not() | _SIGN, bits)
    keys = torch.where(terms.isnan(), _LARGEST, ordered)
    all_reduce(keys, dist.ReduceOp.MAX, group, "largest element")
    bits = torch.where(keys < 0, (keys ^ _SIGN).bitwise_not(), keys)
    terms.copy_(torch.where(keys == _LARGEST, math.nan, bits.view(torch.float64) * sign))


def all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup, what: str) -> None:
    """As ``dist.all_reduce``, over a group that may be the user's.

    Args:
        what: is asked for, for the message of a failure.
    """
    ranks = ranks_of(group)
    wait = begin_wait(f"the {what} of tensors", f"{group.group_name} {what}", ranks)
    try:
        with named(f"the {what} of tensors that ranks {list(ranks)} hold together"):
            dist.all_reduce(tensor, op, group=group)
    finally:
        end_wait(wait)
