"""Rank 1 raises in a forward while fills are under way; the others leave as the argument says. Run with env://."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness.network import loss_of
from harness.topologies import lay
from harness.toy import batch, build

import dmuon


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    model = build()
    laid = lay("1d-two-lines", model, comm=dmuon.CommOptions(prefetch=2, timeout=timedelta(seconds=20)))
    optimizer = dmuon.Muon(model)
    try:
        for step in range(4):
            if rank == 1 and step == 2:
                model.blocks[0].norm.register_forward_pre_hook(mistake)
            optimizer.zero_grad()
            loss_of(model, *laid.mine(batch(step))).backward()
            optimizer.step()
    finally:
        print("in finally", flush=True)
        if os.environ["LEAVE"] == "destroy":
            optimizer.zero_grad()
            dist.destroy_process_group()


def mistake(*_: object) -> None:
    raise ValueError("the user's own mistake")


if __name__ == "__main__":
    main()
