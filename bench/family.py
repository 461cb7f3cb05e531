"""Members of Muon's family and formats of its state: the byte-level GPT in one process, the same batches for each.

    python bench/family.py [--steps 150] [--seeds 0,1,2] [--members muon,normuon,…]
    python bench/family.py --seeds 0,1,2,3,4,5,6,7 --members classic,torch
    python bench/family.py --members muon,muon@4e-3,muon@1.6e-2,adamw,adamw@3e-3,adamw@6e-3

Prints the validation loss of each seed, and the mean difference from the first member's, with its p-value: of all ways
to change signs of the seeds' differences, the part whose mean is as far from zero. ``member@lr`` is one with another
learning rate of its matrices; AdaMuon and hyperball have the best of five by default, the others Muon's. ``fp16`` is
what CUDA runs with whole products, ``halves`` with symmetric products computed by halves and mirrored, both emulated;
``standard`` is fp32 in the standard form. ``torch`` is torch.optim.Muon, beside torch's AdamW. The last three have
weights in bf16: with fp32 masters, rounded stochastically, and rounded to the nearest.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
import torch.nn.functional as F
from common.harness import Record, run
from common.options import Options, option
from common.results import columns
from torch import Tensor
from torch.func import functional_call
from training.data import EVALUATION_WINDOWS, Corpus, load_corpus
from training.model import GPT, GPTConfig
from training.trainer import adamw, lr_factor, matrices_and_rest

import dmuon
from dmuon.kernels import orthogonalize

HALVES = {"dtype": torch.float16, "method": "gram", "backend": "split"}
MEMBERS: dict[str, dict[str, Any]] = {
    "muon": {},
    "cautious": {"weight_decay_mode": "cautious"},
    "independent": {"weight_decay_mode": "independent", "weight_decay": 8e-4, "adamw_weight_decay": 0.1},
    "l2": {"weight_decay_mode": "l2", "weight_decay": 1e-4, "adamw_weight_decay": 0.1},
    "normuon": {"second_moment": "row"},
    "adamuon": {"second_moment": "element", "nesterov": False},
    "hyperball": {"weight_decay_mode": "hyperball", "adamw_weight_decay": 0.1},
    "bf16": {"momentum_dtype": torch.bfloat16},
    "masters": {"master_weights": True},
    "stochastic": {"bf16_stochastic_round": True},
    "nearest": {},
    "fp16": {"ns_dtype": torch.float16},
    "squares": {"ns_coefficients": "squares"},
    "classic": {"ns_coefficients": "classic"},
    "standard": {"orthogonalize": partial(orthogonalize, method="standard", backend="torch")},
    "halves": {"orthogonalize": partial(orthogonalize, **HALVES)},
    "halves-squares": {"orthogonalize": partial(orthogonalize, coefficients="squares", **HALVES)},
}
WEIGHTS_IN_BF16 = ("masters", "stochastic", "nearest")
OTHERS = ("torch", "adamw")
LR, ADAMW_LR = 8e-3, 1.5e-3


def optimizers_of(member: str, model: GPT) -> list[torch.optim.Optimizer]:
    """As ``member`` names them, ``name`` or ``name@lr``."""
    name, _, lr = member.partition("@")
    if name not in OTHERS:
        return [dmuon.Muon(model, lr=float(lr or LR), adamw_lr=ADAMW_LR, **MEMBERS[name])]
    if name == "adamw":
        return [adamw(model.parameters(), float(lr or ADAMW_LR))]
    matrices, rest = matrices_and_rest(model)
    muon = torch.optim.Muon(matrices, lr=float(lr or LR), adjust_lr_fn="match_rms_adamw", eps=1e-7)
    return [muon, adamw(rest, ADAMW_LR)]


def p_value(differences: Sequence[float]) -> float:
    """Of a paired sign-flip test, exact: how often a mean is as far from zero if each sign is a coin's."""
    flipped = (
        map(float.__mul__, differences, signs) for signs in itertools.product((1.0, -1.0), repeat=len(differences))
    )
    means = [abs(sum(one)) for one in flipped]
    return sum(mean >= abs(sum(differences)) * (1 - 1e-9) for mean in means) / len(means)


def train(member: str, seed: int, config: GPTConfig, steps: int, batch: int) -> float:
    """The validation loss behind all steps, by one thread of this process."""
    torch.set_num_threads(1)
    corpus = load_corpus()
    torch.manual_seed(seed)
    model = GPT(config)
    if member.partition("@")[0] in WEIGHTS_IN_BF16:
        model.bfloat16()
    optimizers = optimizers_of(member, model)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: lr_factor(step, steps)) for one in optimizers]
    for step in range(steps):
        tokens, targets = corpus.batch(seed, step, 0, batch, config.context)
        model.zero_grad()
        loss_of(model, tokens, targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for one in (*optimizers, *schedulers):
            one.step()
    return validation_loss(model, corpus, config.context)


@torch.no_grad()
def validation_loss(model: GPT, corpus: Corpus, context: int) -> float:
    tokens, targets = corpus.evaluation_batch(torch.arange(0, EVALUATION_WINDOWS, 8), context)
    return float(loss_of(model, tokens, targets))


def loss_of(model: GPT, tokens: Tensor, targets: Tensor) -> Tensor:
    """Computed in fp32 also of weights in bf16, whose gradients are rounded to that: few CPUs multiply bf16."""
    weights = {name: param.float() for name, param in model.named_parameters()}
    return F.cross_entropy(functional_call(model, weights, (tokens,)).flatten(0, 1), targets.flatten())


@dataclass(frozen=True, slots=True)
class Settings(Options):
    steps: int = 150
    seeds: tuple[int, ...] = option((0, 1, 2), least=0)
    members: tuple[str, ...] = (
        *("muon", "cautious", "independent", "l2", "normuon", "adamuon@1.6e-2", "hyperball@8e-2", "bf16"),
        *WEIGHTS_IN_BF16,
    )
    width: int = 128
    layers: int = 3


def measure(settings: Settings) -> Record:
    config = GPTConfig(settings.layers, settings.width, 4, 64)
    rows: dict[str, Record] = {}
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        runs = {
            member: [pool.submit(train, member, seed, config, settings.steps, 16) for seed in settings.seeds]
            for member in settings.members
        }
        losses_of = {member: [run_.result() for run_ in of_member] for member, of_member in runs.items()}
    for member, losses in losses_of.items():
        first = rows[settings.members[0]]["losses"] if rows else losses
        differences = [a - b for a, b in zip(losses, first, strict=True)]
        rows[member] = {"losses": losses, "loss": statistics.mean(losses), "spread": statistics.pstdev(losses)}
        rows[member] |= {"difference": statistics.mean(differences), "p": p_value(differences)}
    return {"corpus": load_corpus().name, "rows": rows}


def table(record: Record) -> str:
    shown = {
        name: {**row, "by seed": ", ".join(f"{loss:.3f}" for loss in row["losses"])}
        for name, row in record["rows"].items()
    }
    return columns(shown, {"loss": ".4f", "difference": "+.4f", "p": ".3f", "by seed": ""}, "member")


def fault(settings: Settings) -> str:
    unknown = [m for m in settings.members if m.partition("@")[0] not in (*MEMBERS, *OTHERS)]
    return f"--members: {unknown[0]} is none of {', '.join((*MEMBERS, *OTHERS))}" if unknown else ""


if __name__ == "__main__":
    sys.exit(run(Settings, __doc__, measure, table, fault=fault))
