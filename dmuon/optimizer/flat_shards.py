"""What FSDP1 has flattened: where the pieces lie, and parameters of the shapes before, by which they are routed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel

from dmuon.comm.process_groups import grid_of_groups, ranks_of
from dmuon.model.matrix_spec import FlatShard, fault_of, flat_of, is_remembered, remember_flat, remember_spec, spec_of
from dmuon.platform.host import all_living
from dmuon.platform.torch_private import FlatUnit, flat_unit, flattened_by_fsdp1

_REMEDY = "wrap the model with use_orig_params=True, or use torch's fully_shard (FSDP2)"
_GATHERED = (
    "FullyShardedDataParallel (FSDP1) has gathered parameters: build the optimizer, and call step(), outside of "
    "forward, backward and summon_full_params"
)


def _units(params: Iterable[Tensor]) -> list[FlatUnit]:
    """What FSDP1 has made of ``params``, by whichever modules that live; in the order of the parameters."""
    order = {id(param): number for number, param in enumerate(filter(flattened_by_fsdp1, params))}
    if not order:
        return []
    found: dict[int, FlatUnit] = {}
    for unit in filter(None, map(flat_unit, all_living(FullyShardedDataParallel))):
        numbers = [order[id(param)] for param, *_ in unit.members if id(param) in order]
        if numbers:
            found[min(numbers)] = unit
    return [found[number] for number in sorted(found)]


def note_flat_shards(params: Iterable[Tensor]) -> None:
    """Let those of ``params`` that FSDP1 has cut know of what they are pieces.

    Collective where ranks hold copies of shards and no mesh says which.

    Raises:
        ValueError: FSDP1 does not keep the parameters, or they are DTensors.
    """
    flattened = list(filter(flattened_by_fsdp1, params))
    known: set[int] = set()
    rows: dict[tuple[dist.ProcessGroup, dist.ProcessGroup | None], tuple[tuple[int, ...], ...]] = {}
    for unit in _units(flattened):
        known |= {id(param) for param, *_ in unit.members}
        if unit.tensor_parallel:
            raise ValueError(
                "parameters of FullyShardedDataParallel (FSDP1) over tensor parallelism are DTensors cut as one row; "
                "use torch's fully_shard (FSDP2)"
            )
        for param, shape, begin, _ in unit.members if unit.sharded else ():
            if flat_of(param) is None:
                groups = unit.group, unit.copies
                if groups not in rows:
                    rows[groups] = _rows(unit)
                remember_flat(param, FlatShard(shape, begin, unit.length, rows[groups]))
    for tensor in flattened:
        if id(tensor) not in known:
            raise ValueError(
                f"a parameter of shape {tuple(tensor.shape)} was flattened by FullyShardedDataParallel (FSDP1), which "
                f"does not say of which matrices it is made: {_REMEDY}"
            )


def _rows(unit: FlatUnit) -> tuple[tuple[int, ...], ...]:
    if unit.copies is None:
        return (ranks_of(unit.group),)
    if unit.rows is not None:
        return tuple(map(tuple, unit.rows))
    ranks, shards = grid_of_groups({"fsdp": unit.group, "dp": unit.copies}).ranks, unit.group.size()
    copies = len(ranks) // shards
    return tuple(tuple(ranks[shard * copies + copy] for shard in range(shards)) for copy in range(copies))


def fault_of_flat(params: Iterable[Tensor]) -> ValueError | None:
    """Why those of ``params`` that FSDP1 has flattened cannot be laid out; None if they can."""
    for unit in _units(params):
        for param, *_ in unit.members if unit.sharded else ():
            if flat_of(param) is None:
                return ValueError(
                    "the model was wrapped in FullyShardedDataParallel (FSDP1) since the optimizer was built; build "
                    "the optimizer after that"
                )
            if param.ndim != 1:
                return ValueError(_GATHERED)
    return None


@contextmanager
def in_original_shapes(params: Iterable[Tensor]) -> Iterator[dict[int, Tensor]]:
    """While inside, modules hold parameters of the shapes before in the place of those of ``params`` that are cut.

    They have no memory. What is remembered of them is, behind, remembered of those whose place they took.

    Returns:
        By ``id`` of either, the other one.

    Raises:
        ValueError: modules hold others at the moment.
    """
    swap: dict[int, Tensor] = {}
    held: list[tuple[nn.Module, str, nn.Parameter]] = []
    pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
    for unit in _units(params):
        for param, shape, _, sites in unit.members if unit.sharded else ():
            stand_in = nn.Parameter(torch.empty(shape, dtype=param.dtype, device="meta"), param.requires_grad)
            if is_remembered(param):
                remember_spec(stand_in, spec_of(param), fault_of(param))
            swap |= {id(param): stand_in, id(stand_in): param}
            held += [(module, name, param) for module, name in sites]
            pairs.append((param, stand_in))
    if any(module._parameters.get(name) is not param or param.ndim != 1 for module, name, param in held):
        raise ValueError(_GATHERED)
    try:
        for module, name, param in held:
            module._parameters[name] = swap[id(param)]  # type: ignore[assignment]
        yield swap
    finally:
        for module, name, param in held:
            module._parameters[name] = param
        for param, stand_in in pairs:
            if is_remembered(stand_in):
                remember_spec(param, spec_of(stand_in), fault_of(stand_in))
