"""A run under ``torchrun`` that saves every step and that kills one of its ranks: FOLDER STEPS [ATTEMPT:STEP:WHERE …].

WHERE is ``step`` (rank 1, inside the optimizer's step), ``collect`` (rank 1, while weights are collected for a save) or
``write`` (rank 0, when the data of a save are written, and the rest is not).
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness.network import full_state, loss_of, shard, shard_blocks
from harness.toy import LR, batch, build

import dmuon
from dmuon.dedicated.dedication import dedications


class Trainer:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        last = max(folder.glob("step-*"), default=None)  # what is not whole has another name
        self.model = build()
        mesh = init_device_mesh("cpu", (self.world,))
        plan = None if last is None else last / "plan.json"
        self.plan = dmuon.dedicate_params(self.model, mesh, costs=None if plan else "flops", plan=plan)
        shard_blocks(self.model, mesh, dmuon.fully_shard)
        self.optimizer = dmuon.Muon(self.model, lr=LR, ns_coefficients="classic")
        self.step = 0
        if last is not None:
            dcp.load({"trainer": self}, checkpoint_id=last)
            assert last.name == f"step-{self.step:04d}", (last, self.step)
        print(f"rank {self.rank} starts at step {self.step}", flush=True)

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = state["step"]

    def train_step(self) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model, *shard(batch(self.step), self.rank, self.world)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1

    def save(self) -> None:
        temporary, final = self.folder / f"tmp-{self.step:04d}", self.folder / f"step-{self.step:04d}"
        if self.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        dist.barrier()
        dcp.save({"trainer": self}, checkpoint_id=temporary)
        if self.rank == 0:
            self.plan.save(temporary / "plan.json")
            temporary.rename(final)
        dist.barrier()


def arm(trainer: Trainer, step: int, where: str) -> None:
    def kill(*_: Any, **__: Any) -> None:
        if trainer.step == step:
            print(f"rank {trainer.rank} is killed at step {step}: {where}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    if trainer.rank != (0 if where == "write" else 1):
        return
    match where:
        case "step":
            runtime = dedications(trainer.model)[0].runtime
            begin = runtime.publications.begin
            runtime.publications.begin = lambda *args: (begin(*args), kill())
        case "collect":
            trainer.model.blocks[1].up.register_state_dict_pre_hook(kill)
        case "write":
            finish = dcp.FileSystemWriter.finish
            dcp.FileSystemWriter.finish = lambda *args, **kwargs: (kill(), finish(*args, **kwargs))[1]


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trainer = Trainer(folder)
    for fault in sys.argv[3:]:
        attempt, step, where = fault.split(":")
        if attempt == os.environ.get("TORCHELASTIC_RESTART_COUNT"):
            arm(trainer, int(step), where)
    while trainer.step < steps:
        trainer.train_step()
        trainer.save()
    weights = full_state(trainer.model)
    if trainer.rank == 0:
        torch.save(weights, folder / "weights.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
