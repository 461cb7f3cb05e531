"""Matrices that tensor parallelism splits: their parts travel to the rank that orthogonalizes them, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard

from dmuon.comm import Comm
from dmuon.entry import TensorSharding

__all__ = ["Split", "collect", "distribute", "even_parts"]


@dataclass(frozen=True, slots=True)
class Split:
    """``count`` matrices of one shape ``(m, n)``, split alike, with one owner."""

    count: int
    shape: tuple[int, int]
    sharding: TensorSharding

    def part(self, t: int, size: int) -> tuple[int, int, int]:
        """Shape ``(count, m, n)`` of what tensor-parallel rank ``t`` of ``size`` holds."""
        rows, cols = self.shape
        match self.sharding.placement:
            case Shard(dim=0):
                rows = even_parts(rows, size)[t]
            case Shard():
                cols = even_parts(cols, size)[t]
        return self.count, rows, cols

    @property
    def dim(self) -> int | None:
        """The dimension of ``(count, m, n)`` along which parts are cut; None for copies."""
        placement = self.sharding.placement
        return placement.dim + 1 if isinstance(placement, Shard) else None

    def numel(self, t: int, size: int) -> int:
        count, rows, cols = self.part(t, size)
        return count * rows * cols


def even_parts(length: int, size: int) -> list[int]:
    """Lengths of the parts of ``Shard``: ``ceil(length / size)`` each while they last."""
    part = -(-length // size)
    return [max(0, min(part, length - i * part)) for i in range(size)]


def collect(parts: Sequence[Tensor], splits: Sequence[Split], comm: Comm) -> dict[int, Tensor]:
    """Gather whole matrices on their owners. Collective over the tensor-parallel ranks.

    Args:
        parts: this rank's part of each of ``splits``, one dtype.

    Returns:
        By position in ``splits``, ``(count, m, n)`` of those that this rank orthogonalizes.
    """
    me, size = comm.at.t, comm.topology.tensor
    sent: list[list[Tensor]] = [[] for _ in range(size)]
    received = [0] * size
    for part, split in zip(parts, splits, strict=True):
        if split.dim is None:
            continue  # the owner has it whole
        sent[split.sharding.owner].append(part.reshape(-1))
        if split.sharding.owner == me:
            for t in range(size):
                received[t] += split.numel(t, size)
    arrived = _exchange(sent, received, parts[0], comm, "gather of tensor-parallel matrices")
    whole: dict[int, Tensor] = {}
    for i, (part, split) in enumerate(zip(parts, splits, strict=True)):
        if split.sharding.owner != me:
            continue
        if split.dim is None:
            whole[i] = part
            continue
        pieces = [_take(arrived, t, split.part(t, size)) for t in range(size)]
        whole[i] = torch.cat(pieces, split.dim)
    return whole


def distribute(whole: dict[int, Tensor], splits: Sequence[Split], comm: Comm, like: Tensor) -> list[Tensor]:
    """The reverse of :func:`collect`: each rank's part of every result. Collective.

    Args:
        like: has the dtype and the device of the results, also where this rank made none.
    """
    me, size = comm.at.t, comm.topology.tensor
    sent: list[list[Tensor]] = [[] for _ in range(size)]
    received = [0] * size
    for i, split in enumerate(splits):
        received[split.sharding.owner] += split.numel(me, size)
        if i in whole:
            cut = even_parts(split.shape[split.dim - 1], size) if split.dim is not None else []
            pieces = whole[i].split(cut, split.dim) if split.dim is not None else [whole[i]] * size
            for t, piece in enumerate(pieces):
                sent[t].append(piece.reshape(-1))
    arrived = _exchange(sent, received, like, comm, "scatter of tensor-parallel updates")
    return [_take(arrived, split.sharding.owner, split.part(me, size)) for split in splits]


class _Arrived:
    """What each rank sent, taken off piece by piece."""

    def __init__(self, flat: Tensor, sizes: Sequence[int]) -> None:
        self.parts: list[Tensor] = list(flat.split(list(sizes)))


def _take(arrived: _Arrived, source: int, shape: tuple[int, int, int]) -> Tensor:
    numel = shape[0] * shape[1] * shape[2]
    flat = arrived.parts[source]
    arrived.parts[source] = flat[numel:]
    taken: Tensor = flat[:numel].view(shape)
    return taken


def _exchange(
    sent: Sequence[Sequence[Tensor]], received: Sequence[int], like: Tensor, comm: Comm, what: str
) -> _Arrived:
    flat = [piece.to(like.dtype) for pieces in sent for piece in pieces]
    outgoing = torch.cat(flat) if flat else like.new_empty(0)
    incoming = like.new_empty(sum(received))
    sizes = [sum(piece.numel() for piece in pieces) for pieces in sent]
    with comm.monitor.watch(what):
        dist.all_to_all_single(incoming, outgoing, list(received), sizes, group=comm.tensor)
    return _Arrived(incoming, received)
