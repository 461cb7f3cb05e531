"""Start two ranks as often as told and print how many processes ended with which status: COUNT LAST FOLDER [WAY].

LAST is ``step``, ``forward`` or ``state``: what a rank does before it ends. WAY is ``dedicated``, or ``stock`` for
FSDP2 + AdamW on the same network, in which nothing of dmuon's runs. The process that starts them imports torch once and
has one thread, so that each rank is a fork that ends as an interpreter does.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness.network import full_state, loss_of, shard, shard_blocks
from harness.toy import LR, batch, build, train

import dmuon

WORLD = 2


def train_and_end(rank: int, store: Path, last: str, way: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    model = build()
    mesh = init_device_mesh("cpu", (WORLD,))
    if way == "dedicated":
        dmuon.dedicate_params(model, mesh, costs="flops")
    shard_blocks(model, mesh, dmuon.fully_shard if way == "dedicated" else fully_shard)
    optimizer: torch.optim.Optimizer
    optimizer = dmuon.Muon(model, lr=LR) if way == "dedicated" else torch.optim.AdamW(model.parameters(), lr=LR)
    sys.setswitchinterval(1000)  # a thread that waits for the interpreter gets it when this one lets go, not before
    train(model, optimizer, range(2), rank, WORLD)
    if last == "forward":
        with torch.no_grad():
            loss_of(model, *shard(batch(2), rank, WORLD))
    elif last == "state":
        full_state(model)
    dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    count, last, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    way = sys.argv[4] if sys.argv[4:] else "dedicated"
    statuses: Counter[int] = Counter()
    for number in range(count):
        ranks = []
        for rank in range(WORLD):
            process = os.fork()
            if process == 0:
                train_and_end(rank, folder / str(number), last, way)
                return
            ranks.append(process)
        for process in ranks:
            statuses[os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])] += 1
    print(dict(statuses))


if __name__ == "__main__":
    main()
