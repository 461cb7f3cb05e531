"""Weights in half precision: what is updated in their place in fp32, and how they get it.

Masters are kept, and rounded to the nearest. Without them a weight in bf16 is widened, updated, and rounded to one of
its two neighbours, to each the more often the nearer it is, so that the mean is what was rounded. Which one a hash of
step, parameter and place in the whole tensor tells: the same for all copies, on every topology, and after a restart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon.comm.process_groups import this_rank
from dmuon.kernels import HALF, streams_of
from dmuon.layout.matrices import Region
from dmuon.layout.parameters import place_dtensor
from dmuon.layout.shards import Piece, Runs
from dmuon.layout.topology import position_in
from dmuon.model.matrix_spec import spec_of
from dmuon.platform.torch_private import local_tensor

MASTER = "master_weight"  # in the optimizer's state
ON_HOST = "cpu"  # as an option: masters of matrices are kept there
ROUNDING_STEP = "rounding_step"  # in a group: steps that were rounded
_32_BITS = 2**32 - 1
_CHUNK = 2**24  # elements that are rounded at once, for which there are 20 bytes each meanwhile


def has_master(group: Mapping[str, Any], param: Tensor) -> bool:
    """Whether the optimizer keeps a master of ``param``: wider weights are their own."""
    return bool(group.get("master_weights")) and param.dtype in HALF


def is_widened(group: Mapping[str, Any], param: Tensor) -> bool:
    """Whether what is updated is wider than ``param``."""
    return has_master(group, param) or is_rounded(group, param)


def is_rounded(group: Mapping[str, Any], param: Tensor) -> bool:
    """Whether ``param`` is rounded stochastically."""
    return bool(group.get("bf16_stochastic_round")) and param.dtype == torch.bfloat16


def new_master(param: Tensor, *, on_host: bool = False) -> Tensor:
    """This rank's part of a master as ``param`` is now."""
    local = local_tensor(param).detach()
    where: dict[str, Any] = {}
    if on_host and not local.is_meta:
        where = {"device": "cpu", "pin_memory": streams_of(local.device) is not None}
    return torch.empty_like(local, dtype=torch.float32, **where).copy_(local)


def new_masters(groups: Iterable[Mapping[str, Any]]) -> dict[int, Tensor]:
    """This rank's parts of the masters of Muon's matrices, by ``id``; of frozen ones without memory."""
    masters: dict[int, Tensor] = {}
    for group in groups:
        for param in group["params"] if group["use_muon"] and group.get("master_weights") else ():
            if has_master(group, param):
                local = local_tensor(param).detach()
                local = local if param.requires_grad else local.to("meta")
                masters[id(param)] = new_master(local, on_host=group["master_weights"] == ON_HOST)
    return masters


def take_edits(masters: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    """Let each master have what ``weights`` are, wherever they are not that master, rounded.

    Somebody has changed them there: a load of the model, a clip, an average that was put in their place.
    """
    for master, weight in zip(masters, weights, strict=True):
        torch.where(master.to(weight.dtype) == weight, master, weight, out=master)


# -- stochastic rounding ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where the elements of this rank's part of a parameter, or of a matrix in it, lie in the whole tensor.

    Attributes:
        rows: numbers of rows, shaped as all dimensions but the last; as the first of a kernel.
        columns: numbers in a row, shaped as the other dimensions.
    """

    name: str
    rows: Tensor
    columns: Tensor

    @classmethod
    def of(cls, param: Tensor, name: str) -> Place:
        local = local_tensor(param)
        runs = Piece.whole(local.shape).runs
        if isinstance(param, DTensor):
            placed = place_dtensor(param, name, this_rank())
            runs = placed.layout.pieces[position_in(placed.ranks, this_rank())].runs
        split = 1 if spec_of(param).flattened or param.ndim > 3 else max(0, param.ndim - 1)
        rows = _numbers(runs[:split], param.shape[:split], local.device)
        return cls(name, rows, _numbers(runs[split:], param.shape[split:], local.device))

    def matrices(self, region: Region | None) -> Iterator[Place]:
        """Of each that ``region`` takes of the local tensor; None is all of it."""
        if region is None:
            yield self
            return
        rows, columns = self.rows.reshape(region.stack[:2]), self.columns.flatten()
        here = [torch.arange(*run, device=rows.device) for run in region.runs]
        kept = torch.cat(here) if here else rows.new_empty(0)
        rows, columns = (rows[:, kept], columns) if region.dim == 1 else (rows, columns[kept])
        for matrix in range(*region.span):
            yield Place(self.name, rows[matrix], columns)

    def round(self, weight: Tensor, wide: Tensor, step: int) -> None:
        """Let ``weight`` have ``wide``, which changes. Infinities and what is no number stay."""
        seed = blake2b(f"{step} {self.name}".encode(), digest_size=8).digest()
        of_rows = _mixed(self.rows ^ int.from_bytes(seed[:4], "big"))
        of_columns = _mixed(self.columns ^ int.from_bytes(seed[4:], "big"))
        if not of_rows.ndim:
            weight, wide, of_rows = weight.unsqueeze(0), wide.unsqueeze(0), of_rows.unsqueeze(0)
        most = max(1, _CHUNK * len(wide) // max(1, wide.numel()))
        for start in range(0, len(wide), most):
            rows, part = of_rows[start : start + most], wide[start : start + most]
            bits = rows.view(*rows.shape, *(1,) * of_columns.ndim) ^ of_columns
            bits.mul_(0x7FEB352D).bitwise_and_(_32_BITS)
            bits.bitwise_xor_(bits >> 15).mul_(0x31848BAB).bitwise_right_shift_(16).bitwise_and_(0xFFFF)
            is_nan = part.isnan()
            part.view(torch.int32).add_(bits).bitwise_and_(-0x10000)  # the bits that bf16 has
            weight[start : start + most].copy_(part.masked_fill_(is_nan, float("nan")))


class Places:
    """Of parameters, as they lie now.

    Args:
        names: by ``id``.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._known: dict[int, Place] = {}

    def of(self, param: Tensor) -> Place:
        local, place = local_tensor(param), self._known.get(id(param))
        if (
            place is None
            or place.rows.device != local.device
            or (*place.rows.shape, *place.columns.shape) != local.shape
        ):
            place = self._known[id(param)] = Place.of(param, self._names[id(param)])
        return place


def _numbers(runs: Sequence[Runs], sizes: Sequence[int], device: torch.device) -> Tensor:
    """Of elements with all indices in ``runs``, in a tensor of these ``sizes``, row by row."""
    numbers = torch.zeros((), dtype=torch.int64, device=device)
    for of_dim, size in zip(runs, sizes, strict=True):
        along = [torch.arange(*run, device=device) for run in of_dim]
        numbers = numbers.unsqueeze(-1) * size + (torch.cat(along) if along else numbers.new_empty(0))
    return numbers


def _mixed(numbers: Tensor) -> Tensor:
    """32 bits of each, all of which depend on all of its own. No product has more than 63 bits."""
    numbers = numbers & _32_BITS
    for shift, factor in ((16, 0x7FEB352D), (15, 0x31848BAB)):
        numbers = ((numbers ^ (numbers >> shift)) * factor) & _32_BITS
    return numbers ^ (numbers >> 16)
