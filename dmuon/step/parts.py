"""This rank's parts of tensors that lie as torch says: as DTensors, or whole."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon.comm.process_groups import this_rank
from dmuon.layout.parameters import place_dtensor
from dmuon.layout.ranks import position_in
from dmuon.platform.torch_private import local_tensor


def like_param(param: Tensor, local: Tensor) -> Tensor:
    """``local``, which lies as ``param`` does, as a DTensor if that is one. Shares its storage."""
    if not isinstance(param, DTensor):
        return local
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def part_like(param: Tensor, value: Tensor, name: str) -> Tensor:
    """What this rank holds of ``value`` if it lies as ``param`` does.

    Collective for a DTensor that lies otherwise, also on ranks that hold nothing of it.

    Args:
        value: a DTensor or plain tensor shaped as ``param``, or this rank's part already.
        name: of ``param``, for errors.
    """
    local = local_tensor(param)
    if isinstance(value, DTensor):
        if isinstance(param, DTensor) and (value.device_mesh, value.placements) == (
            param.device_mesh,
            param.placements,
        ):
            return local_tensor(value)
        value = value.full_tensor()  # by way of no other placements: torch does not convert into strided shards
    if value.shape == local.shape:
        return value
    assert isinstance(param, DTensor)  # this rank has all of anything else
    placed = place_dtensor(param, name, this_rank())
    part = value.new_empty(local.shape)
    for block, of_whole in placed.layout.pieces[position_in(placed.ranks, this_rank())].blocks():
        part[block] = value[of_whole]
    return part
