"""Members of Muon's family and formats of its state: the byte-level GPT in one process, the same batches for each.

    python bench/family.py [--steps 150] [--seeds 0,1,2] [--members muon,normuon,…]

Prints the validation loss of each seed, and the mean difference from Muon's. Learning rates are not tuned for each.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from half_precision import validation_loss
from training.data import Corpus, load_corpus
from training.model import GPT, GPTConfig
from training.trainer import lr_factor

import dmuon

MEMBERS: dict[str, dict[str, Any]] = {
    "muon": {},
    "cautious": {"weight_decay_mode": "cautious"},
    "independent": {"weight_decay_mode": "independent", "weight_decay": 8e-4, "adamw_weight_decay": 0.1},
    "l2": {"weight_decay_mode": "l2", "weight_decay": 1e-4, "adamw_weight_decay": 0.1},
    "normuon": {"second_moment": "row"},
    "bf16": {"momentum_dtype": torch.bfloat16},
}


def train(member: str, seed: int, config: GPTConfig, corpus: Corpus, steps: int, batch: int) -> float:
    """The validation loss behind all steps."""
    torch.manual_seed(seed)
    model = GPT(config)
    optimizer = dmuon.Muon(model, lr=8e-3, adamw_lr=1.5e-3, **MEMBERS[member])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, steps))
    for step in range(steps):
        tokens, targets = corpus.batch(seed, step, 0, batch, config.context)
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    return validation_loss(model, corpus, config.context)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--members", default=",".join(MEMBERS))
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    config = GPTConfig(args.layers, args.width, 4, 64)
    corpus = load_corpus(None, config.context)
    seeds, found = [int(seed) for seed in args.seeds.split(",")], dict[str, list[float]]()
    for member in args.members.split(","):
        found[member] = [train(member, seed, config, corpus, args.steps, 16) for seed in seeds]
        difference = statistics.mean(a - b for a, b in zip(found[member], next(iter(found.values())), strict=True))
        losses = ", ".join(f"{loss:.3f}" for loss in found[member])
        print(f"{member:12} {statistics.mean(found[member]):.3f} ({losses})  {difference:+.3f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
