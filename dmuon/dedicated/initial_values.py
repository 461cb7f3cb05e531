"""The first rank's values become everyone's when a model is dedicated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dmuon.comm.context import Comm

BUCKET_BYTES = 2**28  # most that travels at once, unless one tensor has more
_ALIGN_BYTES = 16  # of each tensor in a bucket; its dtype needs less


def from_first_rank(tensors: Sequence[Tensor], comm: Comm, what: str) -> Iterator[Tensor]:
    """The first rank's value of each tensor, on the device of ``comm``. Collective over the data-parallel ranks.

    They travel in flat buckets. What is given is read on the first rank alone, and a part of a bucket, which keeps all
    of that alive: copy what shall stay.

    Args:
        tensors: alike on all ranks in shape and dtype.
        what: the broadcasts are, in messages.
    """
    if comm.world == 1:
        for tensor in tensors:
            yield tensor.detach().to(comm.device)
        return
    for some in _in_buckets(tensors):
        ends = _ends(some)
        flat = torch.empty(ends[-1], dtype=torch.uint8, device=comm.device)  # bytes: back ends lack some dtypes
        parts = [
            flat[end - _padded(tensor) :][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for tensor, end in zip(some, ends, strict=True)
        ]
        if comm.position == 0:
            for part, tensor in zip(parts, some, strict=True):
                part.copy_(tensor.detach())
        with comm.monitor.watch(what):
            dist.broadcast(flat, src=comm.ranks[0], group=comm.group)
        yield from parts


def _in_buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    some: list[Tensor] = []
    nbytes = 0
    for tensor in tensors:
        if some and nbytes + _padded(tensor) > BUCKET_BYTES:
            yield some
            some, nbytes = [], 0
        some.append(tensor)
        nbytes += _padded(tensor)
    if some:
        yield some


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _ends(tensors: Sequence[Tensor]) -> list[int]:
    ends: list[int] = []
    for tensor in tensors:
        ends.append((ends[-1] if ends else 0) + _padded(tensor))
    return ends
