"""One rank of a training program that saves, loads and evaluates, with a fault on its way; forked for each job."""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import json
import os
import shutil
import signal
import sys
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor._dispatch
import torch.nn.functional as F
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness.topologies import LAYOUTS, lay
from harness.toy import HIDDEN, OPTIONS, SIZE, batch

import dmuon
from dmuon.check.model import Network, Size
from dmuon.check.topologies import full_state
from dmuon.dedicated.dedication import dedications
from programs.chaos_faults import Injector
from programs.chaos_forks import serve
from programs.chaos_rounds import EVALUATED_AFTER, SAVED_AFTER, STEPS

MAX_NORM = 0.5
EVALUATION = 50  # the batch
ROOT = Path(dmuon.__file__).parents[1]


class Ordered(Network):
    """Blocks in the order ``order``."""

    order: tuple[int, ...] = (0, 1, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for i in self.order:
            x = self.blocks[i](x)
        return self.head(self.norm(x))


def build(hidden: int = HIDDEN) -> Ordered:
    torch.manual_seed(0)
    return Ordered(Size(SIZE.width, hidden, SIZE.layers, SIZE.vocabulary))


class Trainer:
    """What a user's program holds. Every phase of it is a place for a fault."""

    def __init__(self, job: dict[str, Any], faults: Injector) -> None:
        self.job, self.faults = job, faults
        self.rank, self.folder = job["rank"], Path(job["checkpoints"])
        last = max(self.folder.glob("step-*"), default=None)  # what is not whole has another name
        dedicated, variant = LAYOUTS[job["layout"]].dedicated, job["variant"]
        self.network = build(*faults.hidden())
        with faults.phase("construct", 0):
            options: dict[str, Any] = {"costs": "flops", **faults.planning()}
            if dedicated:
                transport = {"transport": "single"} if variant == "single" else {}
                options["comm"] = dmuon.CommOptions(timeout=timedelta(seconds=job["timeout"]), **transport)
                if last is not None and job["resume"] == "same":
                    options.update(plan=str(last / "plan.json"), costs=None)
            self.laid = lay(job["layout"], self.network, keep=variant == "keep", **options)
            muon = {**faults.options(OPTIONS), "overlap_backward": variant == "overlap"}
            self.optimizer = self.laid.optimizer(**muon)
        self.plan = dedications(self.network)[0].plan if dedicated else None
        self.step = 0
        if last is not None:
            self.load(faults.seen(last))

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.laid.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.laid.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        self.step = state["step"]

    def load(self, folder: Path) -> None:
        dcp.load({"trainer": self}, storage_reader=dcp.FileSystemReader(folder))
        assert folder.name == f"step-{self.step}", (folder, self.step)

    def save(self) -> None:
        temporary, final = self.folder / f"tmp-{self.step}", self.folder / f"step-{self.step}"
        if self.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        dist.barrier()
        dcp.save({"trainer": self}, storage_writer=self.faults.writer(temporary))
        if self.rank == 0:
            if self.plan is not None:
                self.plan.save(temporary / "plan.json")
            Path(self.job["out"], f"digest-{final.name}").write_text(digest_of(temporary))
            temporary.rename(final)
        dist.barrier()

    def loss(self, step: int) -> torch.Tensor:
        """Of this rank's part; zero of an empty one."""
        tokens, targets = self.faults.data(step, self.laid.mine(batch(step)))
        with self.faults.phase("forward", step):
            logits = self.laid.model(tokens)
        if not targets.numel():
            return logits.sum() * 0.0
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def train_step(self) -> None:
        step = self.step
        self.optimizer.zero_grad()
        self.faults.before_forward(self, step)
        loss = self.faults.loss(step, self.loss(step))
        print(f"LOSS {step} {loss.item()!r}", flush=True)
        with self.faults.phase("backward", step):
            loss.backward()
            self.laid.reduce()
        with self.faults.phase("clip", step):
            dmuon.clip_grad_norm_(self.laid.model.parameters(), MAX_NORM)
        if not self.faults.skips_step(self, step):
            with self.faults.phase("step", step):
                self.optimizer.step()

    def evaluate(self) -> None:
        self.faults.before_evaluation(self)
        self.laid.model.eval()
        tokens, targets = self.laid.mine(batch(EVALUATION))
        with torch.no_grad(), self.faults.phase("evaluate", self.step - 1):
            loss = F.cross_entropy(self.laid.model(tokens).flatten(0, 1), targets.flatten())
        self.laid.model.train()
        if self.faults.after_evaluation(self):
            print(f"EVALUATION {loss.item()!r}", flush=True)

    def train(self) -> None:
        while self.step < STEPS:
            if not self.faults.skips_batch(self.step):
                self.train_step()
            self.step += 1
            if self.step == EVALUATED_AFTER:
                self.evaluate()
            if self.step in SAVED_AFTER:
                try:
                    with self.faults.phase("save", self.step - 1):
                        self.save()
                except (Exception, CheckpointException):
                    if not self.faults.goes_on():
                        raise
                    print(f"NOT SAVED {traceback.format_exc()}", flush=True)
                    continue
                if self.step == SAVED_AFTER[0]:
                    with self.faults.phase("load", self.step - 1):
                        self.load(self.folder / f"step-{self.step}")


def digest_of(folder: Path) -> str:
    """Of all files of a checkpoint."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def join(job: dict[str, Any]) -> None:
    """The default process group; every group has the same short timeout, torch's meshes have no option for it."""
    limit = timedelta(seconds=job["timeout"])
    distributed_c10d.default_pg_timeout = limit
    rank, world, port = job["rank"], job["world"], Path(job["out"]) / "port"
    if job["port"]:
        store = dist.TCPStore("127.0.0.1", job["port"], is_master=False, timeout=limit)
    elif rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
        port.with_suffix(".tmp").write_text(str(store.port))
        port.with_suffix(".tmp").rename(port)
    else:
        while not port.exists():
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)


def tell_the_end(
    faults: Injector, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """The traceback, and a line for the checker: what was raised, and through whose files it came."""
    with suppress(Exception):
        faults.lift()
    sys.__excepthook__(kind, error, trace)
    files = [Path(frame.filename) for frame in traceback.extract_tb(trace)]
    parts = [ROOT / part for part in ("dmuon", "solver", "kernels")]
    ours = [
        any(file.is_relative_to(part) for part in parts) and not file.is_relative_to(ROOT / "dmuon" / "check")
        for file in files
    ]  # the toy itself lies in dmuon.check
    end = {
        "kind": kind.__name__,
        "message": str(error)[:4000],
        "through_dmuon": any(ours),
        "from_dmuon": ours[-1] if ours else False,
    }
    print("END " + json.dumps(end), file=sys.stderr, flush=True)


def run(job: dict[str, Any]) -> None:
    descriptor = os.dup(2)
    faulthandler.enable(file=descriptor)
    faulthandler.register(signal.SIGUSR1, file=descriptor, all_threads=True)
    torch.set_num_threads(1)
    out = Path(job["out"])
    faults = Injector(job["fault"], out, job["rank"], ROOT)
    sys.excepthook = lambda *raised: tell_the_end(faults, *raised)
    faults.prepare()
    join(job)
    trainer = Trainer(job, faults)
    print(f"STARTS {trainer.step}", flush=True)
    trainer.train()
    faults.settle()
    whole = full_state(trainer.laid.model)
    digest = hashlib.sha256()
    for name in sorted(whole):
        digest.update(name.encode() + whole[name].contiguous().numpy().tobytes())
    if job["rank"] == 0:
        torch.save(whole, out / "weights.tmp")
        (out / "weights.tmp").rename(out / "weights.pt")
    print(f"DIGEST {digest.hexdigest()}", flush=True)
    (out / f"calls-{job['rank']}.json").write_text(json.dumps(faults.calls))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    gc.freeze()  # what is there is never looked at again
    given = serve()
    if given is not None:
        run(given)
