"""Make, train and delete as many models as told, one after the other, on two ranks: COUNT KIND FOLDER.

KIND is ``dedicated``, of blocks alone, or ``exchanged``, on FSDP2. Each rank prints what it has before and after.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness.inside import default_store, group_names
from harness.toy import LR, build, train

import dmuon

WORLD = 2


def live(rank: int, mesh: DeviceMesh, kind: str) -> None:
    """One model and one optimizer, from their beginning to their end."""
    model = build()
    if kind == "dedicated":
        dmuon.dedicate_params(model, mesh, costs="flops")
        optimizer = dmuon.Muon(model, lr=LR)
    else:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = dmuon.Muon(model, lr=LR, distributed_config=dmuon.create_dtensor_config(costs="flops"))
    train(model, optimizer, range(2), rank, WORLD)


def holdings() -> dict[str, int]:
    """What the process has."""
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "groups": len(group_names()),
        "keys": default_store().num_keys(),
        "tensors": sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects()),
    }


def main() -> None:
    count, kind, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    rank = int(os.fork() == 0)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    live(rank, mesh, kind)  # what a first one leaves stays
    gc.collect()
    dist.barrier()
    first = holdings()
    if kind == "dedicated":
        gc.disable()  # FSDP2's own modules and states refer to each other
    for _ in range(count):
        live(rank, mesh, kind)
    if kind != "dedicated":
        gc.collect()
    dist.barrier()
    print(rank, {name: (first[name], value) for name, value in holdings().items()}, flush=True)
    dist.destroy_process_group()
    if rank == 0:
        os.wait()


if __name__ == "__main__":
    main()
