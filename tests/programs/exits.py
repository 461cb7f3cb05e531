"""Start two ranks as often as told and print how many processes ended with which status: COUNT LAST FOLDER.

LAST is ``step``, ``forward`` or ``state``: what a rank does before it ends. The process that starts them imports torch
once and has one thread, so that each rank is a fork that ends as an interpreter does.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness.toy import LR, batch, build

import dmuon
from dmuon.check.model import loss_of, shard
from dmuon.check.topologies import full_state

WORLD = 2


def train_and_end(rank: int, store: Path, last: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    model = build()
    mesh = init_device_mesh("cpu", (WORLD,))
    dmuon.dedicate_params(model, mesh, costs="flops")
    for block in model.blocks:
        dmuon.fully_shard(block, mesh=mesh)
    dmuon.fully_shard(model, mesh=mesh)
    optimizer = dmuon.Muon(model, lr=LR)
    sys.setswitchinterval(1000)  # a thread that waits for the interpreter gets it when this one lets go, not before
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, *shard(batch(step), rank, WORLD)).backward()
        optimizer.step()
    if last == "forward":
        with torch.no_grad():
            loss_of(model, *shard(batch(2), rank, WORLD))
    elif last == "state":
        full_state(model)
    dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    count, last, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    statuses: Counter[int] = Counter()
    for number in range(count):
        ranks = []
        for rank in range(WORLD):
            process = os.fork()
            if process == 0:
                train_and_end(rank, folder / str(number), last)
                return
            ranks.append(process)
        for process in ranks:
            statuses[os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])] += 1
    print(dict(statuses))


if __name__ == "__main__":
    main()
