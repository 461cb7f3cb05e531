"""Matrices with hard spectra, on which rounding noise in half precision is amplified, and what must hold on them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import zoo
from torch import Tensor

SMALL = 1e-3  # directions below this, relative to the Frobenius norm, need not reach one
MARGIN = 0.06  # how far above the exact maximum singular values may lie

# (m, n, seed, every how many kinds)
FULL_SET = (
    *((32, n, seed, 1) for n in (32, 48, 64, 96, 128) for seed in (0, 1, 2)),
    *((64, n, seed, 1) for n, seed in ((64, 3), (96, 4), (128, 5), (192, 6), (256, 7))),
    *((96, n, seed, 1) for n, seed in ((96, 8), (224, 9))),
    *((128, n, seed, 2) for n, seed in ((128, 10), (192, 11), (256, 12), (512, 13))),
    *((256, n, seed, 6) for n, seed in ((256, 14), (512, 15))),
    (512, 768, 16, 12),
)
QUICK_SET = ((32, 32, 0, 1), (32, 64, 1, 1), (64, 128, 2, 3), (96, 384, 3, 6))


def adversarial(m: int, n: int, seed: int) -> dict[str, Tensor]:
    """Matrices whose near-null directions amplify rounding, ``(m, n)``; not normalised."""
    generator = torch.Generator().manual_seed(seed + 1000)
    gaussian = torch.randn(m, n, generator=generator)
    found = {}
    for level in (3e-2, 1e-2, 5e-3, 2e-3, 1e-3, 5e-4, 2e-4, 1e-4, 1e-5):
        found[f"dominant_tail_{level:g}"] = _spectrum(m, n, [1.0], torch.full((m - 1,), level), seed)
    for level in (1e-3, 1e-4, 1e-5):
        found[f"clustered_{level:g}"] = _spectrum(m, n, [1.0] * (m // 2), torch.full((m - m // 2,), level), seed)
    for lower in (-2, -3, -5):
        spread = 10 ** (torch.rand(m - 4, generator=generator) * (lower + 1) - 1)
        found[f"loguniform_tail_1e{lower}"] = _spectrum(m, n, [1.0, 0.5, 0.3, 0.2], spread, seed)
    for power in (0.5, 1.0, 1.5, 2.0, 3.0, 4.0):
        found[f"power_law_{power:g}"] = _spectrum(m, n, [], torch.arange(1, m + 1) ** -power, seed)
    for rank, noise in ((1, 1e-4), (1, 1e-2), (2, 1e-3), (3, 3e-4), (4, 1e-4), (m // 4, 1e-3)):
        low = _low_rank(m, n, rank, generator)
        found[f"rank_{rank}_noise_{noise:g}"] = low / low.norm() + noise * gaussian / gaussian.norm()
    for rank in (1, 4, m // 4):
        low = _low_rank(m, n, rank, generator)
        found[f"rank_{rank}_fp16"] = (low / low.norm()).half().float()
        found[f"rank_{rank}_bf16"] = low.bfloat16().float()
    found["gradient_bf16"] = (1e-4 * zoo.real_gradient(m, n, seed)).bfloat16().float()
    found["gaussian_bf16"] = (30 * gaussian).bfloat16().float()
    return found


def _spectrum(m: int, n: int, head: list[float], tail: Tensor, seed: int) -> Tensor:
    matrix: Tensor = zoo.with_spectrum(m, n, torch.cat([torch.tensor(head, dtype=torch.float64), tail.double()]), seed)
    return matrix


def _low_rank(m: int, n: int, rank: int, generator: torch.Generator) -> Tensor:
    return torch.randn(m, rank, generator=generator) @ torch.randn(rank, n, generator=generator)


@dataclass(frozen=True, slots=True)
class Batch:
    """Stress matrices of one shape, with their fp64 singular value decompositions."""

    names: list[str]
    x: Tensor  # (k, m, n), fp64, Frobenius norm one
    u: Tensor  # (k, m, m)
    sigma: Tensor  # (k, m)
    vh: Tensor  # (k, m, n)


def stress_set(plan: Sequence[tuple[int, int, int, int]]) -> list[Batch]:
    """The matrices of ``plan``: ``(m, n, seed, stride)`` takes every ``stride``-th kind."""
    batches = []
    for (m, n), rows in itertools.groupby(plan, key=lambda row: row[:2]):
        chosen: dict[str, Tensor] = {}
        for _, _, seed, stride in rows:
            kinds = [*zoo.matrices(m, n, seed).items(), *adversarial(m, n, seed).items()]
            chosen |= {f"{name}/{m}x{n}/{seed}": x for name, x in kinds[seed % stride :: stride]}
        x = torch.stack([x.double() for x in chosen.values()])
        x /= torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
        batches.append(Batch(list(chosen), x, *torch.linalg.svd(x, full_matrices=False)))
    return batches
