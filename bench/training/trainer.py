"""One rank's training: the strategies, the loop, and stock distributed checkpoints."""

from __future__ import annotations

import math
import resource
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from common import results
from common.clock import Clock
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

import dmuon
from training import report
from training.data import EVALUATION_WINDOWS, load_corpus
from training.gather import GatherMuon
from training.model import GPT
from training.settings import Job, Settings

BETAS = (0.9, 0.95)
MAX_NORM = 1.0
FLUSH_EVERY = 10  # steps between exchanges of losses and times, which are not part of any step
EVALUATIONS = 8
PLAN = "plan.json"  # in the folder of a checkpoint, which is renamed as a whole


@dataclass(frozen=True, slots=True)
class Built:
    """A strategy's optimizers, and its plan where it is kept with a checkpoint."""

    optimizers: list[torch.optim.Optimizer]
    plan: dmuon.OwnerPlan | None = None


def sharded(fully_shard: Callable[..., object], model: GPT, **options: Any) -> GPT:
    """``model`` itself, every block and then the rest by torch's ``fully_shard`` or dmuon's."""
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def adamw(params: Iterable[Tensor], lr: float, weight_decay: float = 0.1) -> torch.optim.AdamW:
    """Norms are not decayed."""
    groups: dict[bool, list[Tensor]] = {True: [], False: []}
    for param in params:
        groups[param.ndim >= 2].append(param)
    decayed = {"params": groups[True], "weight_decay": weight_decay}
    rest = {"params": groups[False], "weight_decay": 0.0}
    return torch.optim.AdamW([decayed, rest], lr=lr, betas=BETAS, fused=True)


def build_adamw(model: GPT, mesh: DeviceMesh, settings: Settings, checkpoint: Path | None) -> Built:
    """FSDP2 with torch's fused AdamW."""
    sharded(fully_shard, model, mesh=mesh, mp_policy=mixed_precision(settings))
    return Built([adamw(model.parameters(), settings.lr_adamw, settings.weight_decay)])


def build_gather(model: GPT, mesh: DeviceMesh, settings: Settings, checkpoint: Path | None) -> Built:
    """FSDP2 with Muon that gathers block matrices on every rank, and AdamW as above for everything else."""
    sharded(fully_shard, model, mesh=mesh, mp_policy=mixed_precision(settings))
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if all(p is not q for q in matrices)]
    muon = GatherMuon(matrices, settings.lr_dmuon, settings.weight_decay)
    return Built([muon, adamw(rest, settings.lr_adamw, settings.weight_decay)])


def build_dmuon(model: GPT, mesh: DeviceMesh, settings: Settings, checkpoint: Path | None) -> Built:
    """FSDP2 with dmuon's optimizer: one line of the program above."""
    sharded(fully_shard, model, mesh=mesh, mp_policy=mixed_precision(settings))
    return Built([muon(model, settings)])


def build_dedicated(model: GPT, mesh: DeviceMesh, settings: Settings, checkpoint: Path | None) -> Built:
    """A model that dmuon lays out: block matrices on their owners, everything else sharded by FSDP2.

    A run that goes on from a checkpoint keeps that run's owners: another plan would batch otherwise, which moves the
    last bits.
    """
    policy = mixed_precision(settings)
    plan = dmuon.dedicate_params(model, mesh, mp_policy=policy, plan=checkpoint / PLAN if checkpoint else None)
    sharded(dmuon.fully_shard, model, mesh=mesh, mp_policy=policy)
    return Built([muon(model, settings)], plan)


def muon(model: GPT, settings: Settings) -> dmuon.Muon:
    return dmuon.Muon(
        model,
        lr=settings.lr_dmuon,
        weight_decay=settings.weight_decay,
        adamw_lr=settings.lr_adamw,
        adamw_betas=BETAS,
    )


def mixed_precision(settings: Settings) -> MixedPrecisionPolicy:
    """Compute in `settings.dtype`; weights, gradients and optimizer state stay fp32."""
    return MixedPrecisionPolicy(param_dtype=getattr(torch, settings.dtype), reduce_dtype=torch.float32)


STRATEGIES: dict[str, Callable[[GPT, DeviceMesh, Settings, Path | None], Built]] = {
    "adamw": build_adamw,
    "gather": build_gather,
    "dmuon": build_dmuon,
    "dedicated": build_dedicated,
}


def lr_factor(step: int, steps: int) -> float:
    """Linear warm-up over the first tenth (at most 100 steps), then a cosine to one tenth."""
    warmup = min(100, max(1, steps // 10))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


class Trainer:
    """The training state of one rank, as stock `torch.distributed.checkpoint` saves and loads it."""

    def __init__(self, rank: int, settings: Settings, job: Job) -> None:
        self.rank, self.settings, self.job = rank, settings, job
        self.device = torch.device(settings.device, rank if settings.device == "cuda" else None)
        self.corpus = load_corpus(Path(settings.data) if settings.data else None, settings.context)
        self._memory_before = _peak_bytes(self.device)
        torch.manual_seed(job.seed)
        self.model = GPT(settings.model).to(self.device)
        mesh = init_device_mesh(settings.device, (settings.world,))
        self.built = STRATEGIES[job.optimizer](self.model, mesh, settings, job.resume_from)
        self.optimizers = self.built.optimizers
        self.schedulers = [LambdaLR(one, lambda step: lr_factor(step, settings.steps)) for one in self.optimizers]
        self.clock = Clock(self.device)
        self.step = 0
        self.train_seconds = 0.0
        self._marks: list[tuple[Tensor, Tensor, float, tuple[Any, Any], Any, Any]] = []

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
        plan = self.built.plan
        shown = self.rank == 0 and sys.stderr.isatty()
        if self.rank == 0 and self.job.resume_from is not None:
            origin = "" if plan is None else f"; {plan.summary()}"
            print(f"{self.job.optimizer} goes on from step {self.step}{origin}", file=sys.stderr, flush=True)
        if self.rank == 0:
            self._record({"event": "start", **results.origin()})
        with tqdm(
            desc=f"{self.job.optimizer} seed {self.job.seed}",
            total=steps,
            initial=self.step,
            disable=not shown,
            mininterval=0.5,
            dynamic_ncols=True,
        ) as bar:
            if self.step == 0:
                self._evaluate(bar)
            while self.step < steps:
                self._train_step()
                bar.update()
                save = self.step % self.job.checkpoint_every == 0 or self.step == steps
                if self.step % FLUSH_EVERY == 0 or self.step in evaluate_at or save:
                    self._flush(bar)
                if self.step in evaluate_at:
                    self._evaluate(bar)
                if save:
                    self._save()
        self._record({"event": "result", "balance": None if plan is None else plan.balance, "peak_mb": self._peak_mb()})

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
        self._marks.append((loss.detach(), norm, lr, (start, end), before, after))

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
        took = torch.tensor(self.clock.milliseconds(start, self.clock.mark()), device=self.device)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return float(took)

    def _peak_mb(self) -> float:
        """Of the rank that needs most, above what its process had before the model was built."""
        peak = torch.tensor(float(_peak_bytes(self.device) - self._memory_before), device=self.device)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        return float(peak) / 1e6

    def _flush(self, bar: tqdm) -> None:
        """Exchanges and records what the steps since the last flush measured: mean loss, slowest rank."""
        rows = []
        for loss, _, _, (start, end), before, after in self._marks:
            times = self.clock.milliseconds(start, end), self.clock.milliseconds(before, after)
            rows.append((loss.item(), *times))
        mine = torch.tensor(rows, dtype=torch.float64, device=self.device)  # (steps, 3)
        parts = [torch.empty_like(mine) for _ in range(self.settings.world)]
        dist.all_gather(parts, mine)
        everyone = torch.stack(parts)  # (world, steps, 3)
        losses = everyone[..., 0].mean(0).tolist()
        times_ms = everyone[..., 1:].amax(0).tolist()
        first = self.step - len(rows) + 1
        records = []
        for i, ((_, norm, lr, *_), loss, (step_ms, optimizer_ms)) in enumerate(
            zip(self._marks, losses, times_ms, strict=True)
        ):
            self.train_seconds += step_ms / 1e3
            records.append(
                {
                    "event": "step",
                    "step": first + i,
                    "loss": loss,
                    "lr": lr,
                    "grad_norm": full(norm).item(),
                    "step_ms": step_ms,
                    "optimizer_ms": optimizer_ms,
                    "train_seconds": self.train_seconds,
                }
            )
        self._marks.clear()
        if self.step % (2 * FLUSH_EVERY) == 0 or self.step == self.settings.steps:
            records[-1]["bare_ms"] = self._time_without_optimizer()
        self._record(*records)
        bar.set_postfix(loss=f"{losses[-1]:.3f}", ms=f"{times_ms[-1][0]:.0f}", refresh=False)
        for record in records:
            if not math.isfinite(record["loss"]):
                raise RuntimeError(f"the loss is {record['loss']} at step {record['step']}; lower the lr")

    @torch.no_grad()
    def _evaluate(self, bar: tqdm) -> None:
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
        dist.all_reduce(total)
        self.model.train()
        loss = total.item() / EVALUATION_WINDOWS
        self._record({"event": "eval", "val_loss": loss, "train_seconds": self.train_seconds})
        if not bar.disable:
            bar.write(f"{self.job.optimizer} step {self.step}: validation loss {loss:.4f}", file=sys.stderr)

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
            if self.built.plan is not None:
                self.built.plan.save(temporary / PLAN)
            if final.exists():  # of a run that was resumed from further back
                _remove(final)
            temporary.rename(final)
            for other in folder.iterdir():
                if other != final:
                    _remove(other)
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


def _remove(folder: Path) -> None:
    """Delete a checkpoint, which is none any more as soon as that begins: an interrupt leaves no half of it."""
    if folder.name.startswith("step-"):
        gone = folder.with_name(f"gone-{folder.name}")
        shutil.rmtree(gone, ignore_errors=True)
        folder = folder.rename(gone)
    shutil.rmtree(folder, ignore_errors=True)


def full(x: Tensor) -> Tensor:
    """The plain tensor behind a (sharded) norm."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x
