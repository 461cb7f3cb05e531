"""Modules whose attributes gather the shards that they store, by a collective whenever one is read, as SimpleFSDP's."""

from __future__ import annotations

import torch.nn as nn
from harness.assertions import assert_equal_weights
from harness.dtensors import whole
from harness.network import loss_of, shard
from harness.on_ranks import on_ranks
from harness.oracle import reference_weights
from harness.toy import OPTIONS, batch, build, take_steps
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import dmuon


def gathered(name: str) -> property:
    def read(module: nn.Module) -> Tensor:
        param = module._parameters[name]
        assert isinstance(param, DTensor)
        return param.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    return property(read)


def gather_when_read(model: nn.Module, mesh: DeviceMesh) -> None:
    for module in list(model.modules()):
        params = dict(module.named_parameters(recurse=False))
        for name, param in params.items():
            module.register_parameter(name, nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(0)])))
        kind = type(module)
        module.__class__ = type(f"Gathered{kind.__name__}", (kind,), {name: gathered(name) for name in params})


@on_ranks(2)
def test_no_rank_reads_what_it_would_gather_alone(rank: int, world: int) -> None:
    """As where the first one looks whether weights that were taken whole may be several, which only it tells."""
    model = build()
    gather_when_read(model, init_device_mesh("cpu", (world,)))
    optimizer = dmuon.Muon(model, **OPTIONS)
    take_steps(optimizer, lambda step: loss_of(model, *shard(batch(step), rank, world)) / world, range(3))
    assert_equal_weights({name: whole(param) for name, param in model.named_parameters()}, reference_weights(3))
