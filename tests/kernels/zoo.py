"""Matrices that Newton–Schulz must survive, as fp32, small side first; names say what is hard about each."""

from __future__ import annotations

import torch
from torch import Tensor


def relative(found: Tensor, exact: Tensor) -> float:
    """The error in the Frobenius norm."""
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def gaussian(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def commuting(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two different polynomials of one symmetric matrix each, ``(..., m, m)``: they commute but for rounding."""
    x = gaussian(*shape, dtype=torch.float64, seed=seed) / shape[-1] ** 0.5
    s = x + x.mT
    identity = torch.eye(shape[-1], dtype=torch.float64)
    return (s @ s - 0.3 * s).to(dtype), (0.5 * s @ s + s + 0.1 * identity).to(dtype)


def _orthogonal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """``(rows, columns)`` with orthonormal columns."""
    gaussian = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(gaussian).Q


def with_spectrum(m: int, n: int, spectrum: Tensor, seed: int = 0) -> Tensor:
    """An ``(m, n)`` matrix, ``m <= n``, with these ``m`` singular values and random singular vectors."""
    generator = torch.Generator().manual_seed(seed)
    u, v = _orthogonal(m, m, generator), _orthogonal(n, m, generator)
    return (u * spectrum.double() @ v.T).float()


def real_gradient(m: int, n: int, seed: int = 0) -> Tensor:
    """The gradient of a hidden weight of a small network in training: a quickly decaying spectrum."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(64, n, generator=generator) * torch.logspace(0, -2, n)
    weight = torch.randn(m, n, generator=generator) / n**0.5
    target = torch.randn(64, m, generator=generator)
    for _ in range(20):
        weight -= 0.1 * (torch.tanh(inputs @ weight.T) - target).T @ inputs / 64
    return (torch.tanh(inputs @ weight.T) - target).T @ inputs / 64


def matrices(m: int, n: int, seed: int = 0) -> dict[str, Tensor]:
    """One of each kind, ``(m, n)`` with ``m <= n``."""
    generator = torch.Generator().manual_seed(seed)
    gaussian = torch.randn(m, n, generator=generator)
    spiked = gaussian * 1e-3
    spiked[m // 2, n // 3] = 1.0
    sparse = torch.where(torch.rand(m, n, generator=generator) < 0.02, gaussian, 0.0)
    low_rank = torch.randn(m, 4, generator=generator) @ torch.randn(4, n, generator=generator)
    dead_rows = gaussian.clone()
    dead_rows[::2] = 0
    outlier_rows = gaussian * torch.logspace(0, -4, m)[:, None]
    return {
        "gaussian": gaussian,
        "orthogonal": with_spectrum(m, n, torch.ones(m), seed),
        "condition_10": with_spectrum(m, n, torch.logspace(0, -1, m), seed),
        "condition_1e3": with_spectrum(m, n, torch.logspace(0, -3, m), seed),
        "condition_1e6": with_spectrum(m, n, torch.logspace(0, -6, m), seed),
        "one_dominant": with_spectrum(m, n, torch.cat([torch.ones(1), torch.full((m - 1,), 1e-3)]), seed),
        "half_null": with_spectrum(m, n, torch.cat([torch.ones(m // 2), torch.zeros(m - m // 2)]), seed),
        "rank_one": torch.outer(torch.randn(m, generator=generator), torch.randn(n, generator=generator)),
        "rank_four": low_rank,
        "rank_four_noisy": low_rank + 1e-3 * gaussian,
        "ones": torch.ones(m, n),
        "spike": spiked,
        "identity": torch.eye(m, n),
        "sparse": sparse,
        "dead_rows": dead_rows,
        "outlier_rows": outlier_rows,
        "duplicate_rows": gaussian[:1].repeat(m, 1) + 1e-4 * gaussian,
        "heavy_tail": gaussian / torch.rand(m, n, generator=generator).clamp(min=1e-4),
        "real_gradient": real_gradient(m, n, seed),
    }
