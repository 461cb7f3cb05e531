"""Does fp16 Newton–Schulz train as well as fp32? The byte-level GPT, 300 steps, the same batches in each precision.

    python bench/half_precision.py [--steps 300] [--seeds 0,1,2] [--json bench/results/NAME.json]

``fp32`` is the standard form with whole products. ``fp16`` is what CUDA runs with whole products, ``fp16 halves`` with
symmetric products computed by halves and mirrored, ``fp16 squares`` that with the preset of two blocks of squares; all
emulated on the CPU, where every result is rounded to fp16.
Prints the validation loss over the steps per seed, and the difference from fp32 beside the spread over seeds.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from common.harness import Record, run
from common.options import Options
from torch import Tensor, nn
from tqdm import tqdm
from training.data import EVALUATION_WINDOWS, Corpus, load_corpus
from training.model import GPT, GPTConfig
from training.trainer import lr_factor

from dmuon.kernels import choose_variant, coefficient_sequence, muon_update_, update_scale

CPU = torch.device("cpu")
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": torch.float32, "method": "standard", "backend": "torch"},
    "fp16": {"dtype": torch.float16, "method": "gram", "backend": "torch"},
    "fp16 halves": {"dtype": torch.float16, "method": "gram", "backend": "split"},
    "fp16 squares": {"dtype": torch.float16, "method": "gram", "backend": "split", "coefficients": "squares"},
}
LR, LR_ADAMW, DECAY, BETA = 2e-3, 2e-3, 0.1, 0.95


class Muon:
    """Muon for the matrices of the blocks in one precision, torch's AdamW for the rest."""

    def __init__(self, model: GPT, precision: str, lr: float) -> None:
        options = PRECISIONS[precision]
        self.lr = lr
        self.dtype = options["dtype"]
        self.coefficients = options.get("coefficients", "polar_express")
        sequence = coefficient_sequence(self.coefficients, 5)
        self.shapes: dict[tuple[int, int], list[nn.Parameter]] = {}
        for param in model.blocks.parameters():
            if param.ndim == 2:
                self.shapes.setdefault((param.shape[0], param.shape[1]), []).append(param)
        taken = {id(p) for params in self.shapes.values() for p in params}
        self.rest = torch.optim.AdamW(
            [p for p in model.parameters() if id(p) not in taken], lr=LR_ADAMW, betas=(0.9, BETA), weight_decay=0.0
        )
        self.momentum = {shape: torch.zeros(len(params), *shape) for shape, params in self.shapes.items()}
        self.variants = {
            shape: choose_variant(
                shape, len(params), sequence, self.dtype, CPU, method=options["method"], backend=options["backend"]
            )
            for shape, params in self.shapes.items()
        }

    def step(self, factor: float) -> None:
        for shape, params in self.shapes.items():
            grads = [p.grad for p in params if p.grad is not None]
            muon_update_(
                [p.detach() for p in params],
                grads,
                self.momentum[shape],
                lr=self.lr * factor,
                weight_decay=DECAY,
                beta=BETA,
                nesterov=True,
                scale=update_scale("match_rms_adamw", shape),
                coefficients=self.coefficients,
                dtype=self.dtype,
                variant=self.variants[shape],
            )
        for group in self.rest.param_groups:
            group["lr"] = LR_ADAMW * factor
        self.rest.step()


def train(
    precision: str, seed: int, config: GPTConfig, corpus: Corpus, steps: int, batch: int, lr: float = LR
) -> list[float]:
    """Validation losses at every tenth of the run, the untrained one first."""
    torch.manual_seed(seed)
    model = GPT(config)
    optimizer = Muon(model, precision, lr)
    losses = [validation_loss(model, corpus, config.context)]
    for step in tqdm(range(steps), desc=f"{precision} seed {seed}", leave=False, disable=None):
        tokens, targets = corpus.batch(seed, step, 0, batch, config.context)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(lr_factor(step, steps))
        if (step + 1) % max(1, steps // 10) == 0:
            losses.append(validation_loss(model, corpus, config.context))
    return losses


@torch.no_grad()
def validation_loss(model: GPT, corpus: Corpus, context: int) -> float:
    index: Tensor = torch.arange(0, EVALUATION_WINDOWS, 8)
    tokens, targets = corpus.evaluation_batch(index, context)
    return float(F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()))


def compare(curves: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Final losses against fp32's: the mean difference, and what another seed changes."""
    final = {name: [curve[-1] for curve in of_seeds] for name, of_seeds in curves.items()}
    spread = statistics.stdev(final["fp32"]) if len(final["fp32"]) > 1 else float("nan")
    half = len(curves["fp32"][0]) // 2
    return {
        "final": final,
        "seed_spread": spread,
        "difference": {
            name: statistics.mean(a - b for a, b in zip(values, final["fp32"], strict=True))
            for name, values in final.items()
            if name != "fp32"
        },
        "largest_in_second_half": {
            name: max(
                abs(a - b)
                for mine, theirs in zip(curves[name], curves["fp32"], strict=True)
                for a, b in zip(mine[half:], theirs[half:], strict=True)
            )
            for name in curves
            if name != "fp32"
        },
    }


@dataclass(frozen=True, slots=True)
class Settings(Options):
    steps: int = 300
    seeds: tuple[int, ...] = (0, 1, 2)
    layers: int = 2
    width: int = 128
    context: int = 64
    batch: int = 16
    precisions: tuple[str, ...] = tuple(PRECISIONS)
    squares_lr: float = 1.0


def measure(settings: Settings) -> Record:
    torch.set_num_threads(1)
    config = GPTConfig(settings.layers, settings.width, 4, settings.context)
    corpus = load_corpus(None, config.context)
    rates = dict.fromkeys(PRECISIONS, LR) | {"fp16 squares": LR * settings.squares_lr}
    curves = {
        precision: [
            train(precision, seed, config, corpus, settings.steps, settings.batch, rates[precision])
            for seed in settings.seeds
        ]
        for precision in settings.precisions
    }
    return {"corpus": corpus.name, "curves": curves, **compare(curves)}


def table(record: Record) -> str:
    lines = []
    for name, of_seeds in record["curves"].items():
        for seed, curve in zip(record["settings"]["seeds"], of_seeds, strict=True):
            lines.append(f"{name:<12} seed {seed}  " + " ".join(f"{loss:.3f}" for loss in curve))
    lines.append(f"final losses of fp32 differ over seeds by {record['seed_spread']:.4f} (standard deviation)")
    for name, difference in record["difference"].items():
        largest = record["largest_in_second_half"][name]
        lines.append(
            f"{name}: {difference:+.4f} from fp32 on average, at most {largest:.4f} in the second half of a run"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    def fault(settings: Settings) -> str:
        return "" if "fp32" in settings.precisions else "--precisions: fp32 must be among them"

    choices = {"precisions": PRECISIONS}
    return run(Settings, __doc__, argv, measure, table, choices=choices, least={"steps": 1}, fault=fault)


if __name__ == "__main__":
    sys.exit(main())
