"""One rank's training: the strategies, the loop, and stock distributed checkpoints."""

from __future__ import annotations

import math
import resource
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from common import results
from common.clock import Clock
from common.ranks import over_ranks
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

import dmuon
from training import report
from training.data import EVALUATION_WINDOWS, load_corpus
from training.gather import GatherMuon
from training.model import GPT
from training.settings import Job, Settings

BETAS = (0.9, 0.95)
MAX_NORM = 1.0
WEIGHT_DECAY = 0.1
FLUSH_EVERY = 10  # steps between exchanges of losses and times, which are not part of any step
EVALUATIONS = 8
PLAN = "plan.json"  # in the folder of a checkpoint, which is renamed as a whole


Built = tuple[list[torch.optim.Optimizer], dmuon.OwnerPlan | None]  # and the plan, if that is kept with a checkpoint


def sharded(fully_shard: Callable[..., object], model: GPT, **options: Any) -> GPT:
    """``model`` itself, every block and then the rest by torch's ``fully_shard`` or dmuon's."""
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def matrices_and_rest(model: GPT) -> tuple[list[Tensor], list[Tensor]]:
    """What Muon takes of a model, and what AdamW."""
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    return matrices, [p for p in model.parameters() if all(p is not q for q in matrices)]


def adamw(params: Iterable[Tensor], lr: float) -> torch.optim.AdamW:
    """Norms are not decayed."""
    groups: dict[bool, list[Tensor]] = {True: [], False: []}
    for param in params:
        groups[param.ndim >= 2].append(param)
    decayed = {"params": groups[True], "weight_decay": WEIGHT_DECAY}
    rest = {"params": groups[False], "weight_decay": 0.0}
    return torch.optim.AdamW([decayed, rest], lr=lr, betas=BETAS, fused=True)


def build(name: str, model: GPT, mesh: DeviceMesh, settings: Settings, checkpoint: Path | None = None) -> Built:
    """Lays out ``model`` by FSDP2, or its block matrices on owners first, and makes the optimizers that go with it.

    Computation is in ``settings.dtype``; weights, gradients and optimizer state stay fp32. A run that goes on from a
    checkpoint keeps that run's owners: another plan would batch otherwise, which moves the last bits.

    Args:
        name: one of ``OPTIMIZERS``, or ``torch.optim.Muon``, which orthogonalizes every matrix on every rank.
    """
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, settings.dtype), reduce_dtype=torch.float32)
    plan = None
    if name == "dedicated":
        plan = dmuon.dedicate_params(model, mesh, mp_policy=policy, plan=checkpoint / PLAN if checkpoint else None)
    sharded(dmuon.fully_shard if plan is not None else fully_shard, model, mesh=mesh, mp_policy=policy)
    if name in ("dmuon", "dedicated"):
        lrs = {"lr": settings.lr_dmuon, "adamw_lr": settings.lr_adamw}
        return [dmuon.Muon(model, weight_decay=WEIGHT_DECAY, adamw_betas=BETAS, **lrs)], plan
    if name == "adamw":
        return [adamw(model.parameters(), settings.lr_adamw)], None
    matrices, rest = matrices_and_rest(model)
    if name == "gather":
        muon: torch.optim.Optimizer = GatherMuon(matrices, settings.lr_dmuon)
    else:
        assert name == "torch.optim.Muon", name
        muon = torch.optim.Muon(matrices, lr=settings.lr_dmuon, adjust_lr_fn="match_rms_adamw")
    return [muon, adamw(rest, settings.lr_adamw)], None


def lr_factor(step: int, steps: int) -> float:
    """Linear warm-up over the first tenth (at most 100 steps), then a cosine to one tenth."""
    warmup = min(100, max(1, steps // 10))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


class Trainer:
    """The training state of one rank, as stock `torch.distributed.checkpoint` saves and loads it."""

    def __init__(self, rank: int, job: Job) -> None:
        self.rank, self.settings, self.job = rank, job.settings, job
        settings = job.settings
        self.device = torch.device(settings.device, rank if settings.device == "cuda" else None)
        self.corpus = load_corpus()
        self._memory_before = _peak_bytes(self.device)
        torch.manual_seed(job.seed)
        self.model = GPT(settings.model).to(self.device)
        mesh = init_device_mesh(settings.device, (settings.world,))
        self.optimizers, self.plan = build(job.optimizer, self.model, mesh, settings, job.resume_from)
        self.schedulers = [LambdaLR(one, lambda step: lr_factor(step, settings.steps)) for one in self.optimizers]
        self.clock = Clock(self.device)
        self.step = 0
        self.train_seconds = 0.0
        self._marks: list[dict[str, Any]] = []  # of the steps since the last flush

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizers)
        return {
            "model": model,
            "optimizer": optimizer,
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "step": self.step,
            "train_seconds": self.train_seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizers,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        for scheduler, saved in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
        self.step = state["step"]
        self.train_seconds = state["train_seconds"]

    def train(self) -> None:
        """Trains from the current step to the last, with evaluations and checkpoints on the way."""
        if self.job.resume_from is not None:
            dcp.load({"trainer": self}, checkpoint_id=self.job.resume_from)
        steps = self.settings.steps
        evaluate_at = {steps * i // EVALUATIONS for i in range(EVALUATIONS + 1)}
        if self.rank == 0 and self.job.resume_from is not None:
            origin = "" if self.plan is None else f"; {self.plan.summary()}"
            print(f"{self.job.optimizer} goes on from step {self.step}{origin}", file=sys.stderr, flush=True)
        if self.rank == 0:
            self._record({"event": "start", **results.origin()})
        if self.step == 0:
            self._evaluate()
        while self.step < steps:
            self._train_step()
            save = self.step % self.settings.checkpoint_every == 0 or self.step == steps
            if self.step % FLUSH_EVERY == 0 or self.step in evaluate_at or save:
                self._flush()
            if self.step in evaluate_at:
                self._evaluate()
            if save:
                self._save()
        # Of the rank that needs most, above what its process had before the model was built.
        (peak_mb,) = over_ranks([(_peak_bytes(self.device) - self._memory_before) / 1e6])
        self._record(
            {"event": "result", "balance": None if self.plan is None else self.plan.balance, "peak_mb": peak_mb}
        )

    def _train_step(self) -> None:
        start = self.clock.mark()
        loss, norm = self._backward()
        before = self.clock.mark()
        for optimizer in self.optimizers:
            optimizer.step()
        after = self.clock.mark()
        lr = float(self.schedulers[0].get_last_lr()[0])
        for scheduler in self.schedulers:
            scheduler.step()
        self._zero_grad()
        end = self.clock.mark()
        self.step += 1
        mark = {"loss": loss.detach(), "norm": norm, "lr": lr, "start": start, "before": before, "after": after}
        self._marks.append({**mark, "end": end})

    def _backward(self) -> tuple[Tensor, Tensor]:
        """The loss of the next batch, and the norm to which gradients were clipped."""
        settings = self.settings
        tokens, targets = self.corpus.batch(self.job.seed, self.step, self.rank, settings.batch, settings.context)
        logits = self.model(tokens.to(self.device))
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.to(self.device).flatten())
        loss.backward()
        return loss, clip_grad_norm_(self.model.parameters(), MAX_NORM)

    def _zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def _time_without_optimizer(self) -> float:
        """Milliseconds of a step that ends before the optimizer; weights stay. The slowest rank's."""
        self._backward()  # waits for what the last step has published
        self._zero_grad()
        start = self.clock.mark()
        self._backward()
        self._zero_grad()
        return over_ranks([self.clock.milliseconds(start, self.clock.mark())])[0]

    def _flush(self) -> None:
        """Exchanges and records what the steps since the last flush measured: mean loss, slowest rank."""
        marks = self._marks
        losses = over_ranks([mark["loss"].item() for mark in marks], dist.ReduceOp.SUM)
        step_ms = over_ranks([self.clock.milliseconds(mark["start"], mark["end"]) for mark in marks])
        optimizer_ms = over_ranks([self.clock.milliseconds(mark["before"], mark["after"]) for mark in marks])
        records = []
        for i, mark in enumerate(marks):
            self.train_seconds += step_ms[i] / 1e3
            records.append(
                {
                    "event": "step",
                    "step": self.step - len(marks) + 1 + i,
                    "loss": losses[i] / self.settings.world,
                    "lr": mark["lr"],
                    "grad_norm": full(mark["norm"]).item(),
                    "step_ms": step_ms[i],
                    "optimizer_ms": optimizer_ms[i],
                    "train_seconds": self.train_seconds,
                }
            )
        marks.clear()
        if self.step % (2 * FLUSH_EVERY) == 0 or self.step == self.settings.steps:
            records[-1]["bare_ms"] = self._time_without_optimizer()
        self._record(*records)
        for record in records:
            if not math.isfinite(record["loss"]):
                raise RuntimeError(f"the loss is {record['loss']} at step {record['step']}; lower the lr")

    @torch.no_grad()
    def _evaluate(self) -> None:
        """The mean loss over the same validation windows for every optimizer, seed and world size."""
        batch, world = self.settings.batch, self.settings.world
        self.model.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for first in range(self.rank * batch, EVALUATION_WINDOWS + self.rank * batch, world * batch):
            index = torch.arange(first, first + batch)
            counted = (index < EVALUATION_WINDOWS).to(self.device)  # every rank runs the same number of batches
            tokens, targets = self.corpus.evaluation_batch(index % EVALUATION_WINDOWS, self.settings.context)
            logits = self.model(tokens.to(self.device)).float()
            losses = F.cross_entropy(logits.transpose(1, 2), targets.to(self.device), reduction="none")
            total += (losses.mean(1) * counted).sum()
        self.model.train()
        loss = over_ranks([total.item()], dist.ReduceOp.SUM)[0] / EVALUATION_WINDOWS
        self._record({"event": "eval", "val_loss": loss, "train_seconds": self.train_seconds})
        if self.rank == 0:
            print(f"  step {self.step}: validation loss {loss:.4f}", file=sys.stderr, flush=True)

    def _save(self) -> None:
        """Writes a checkpoint beside the last one and takes its place only when it is complete."""
        folder = self.job.checkpoints
        temporary, final = folder / f"tmp-{self.step:07d}", folder / f"step-{self.step:07d}"
        if self.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        dcp.save({"trainer": self}, checkpoint_id=temporary)
        if self.rank == 0:
            if self.plan is not None:
                self.plan.save(temporary / PLAN)
            temporary.rename(final)
            for other in folder.iterdir():  # of which an interrupt may leave a half: a run goes on from the last one
                if other != final:
                    shutil.rmtree(other)
        dist.barrier()

    def _record(self, *records: report.Record) -> None:
        if self.rank == 0:
            about = {"optimizer": self.job.optimizer, "seed": self.job.seed, "step": self.step}
            report.append(self.job.metrics, ({**about, **record} for record in records))


def _peak_bytes(device: torch.device) -> int:
    """What torch has allocated on a GPU at most, or the process had resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def full(x: Tensor) -> Tensor:
    """The plain tensor behind a (sharded) norm."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x
