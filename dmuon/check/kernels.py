"""The kernels as they ship, against fp64: products, Newton–Schulz in each form, the passes of the update."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from dmuon.check.report import Reading
from dmuon.check.stage import Stage
from dmuon.kernels import (
    MIXED,
    Squares,
    Storage,
    Variant,
    apply_update_,
    backend_fault,
    coefficient_sequence,
    drop_graphs,
    muon_update_,
    normalized_momentum,
    orthogonalize,
    symmetric_product,
)
from dmuon.planning.profiler import nearly_singular

# Of the largest entry: one rounding to the dtype; in fp32 one chain of sums an element, which grows with its length.
_PRODUCT = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-5}
# Of Newton–Schulz on Gaussian matrices, of the whole: half precision is amplified where singular values are small.
_ORTHOGONAL: dict[Storage, float] = {torch.float16: 2e-2, torch.bfloat16: 5e-2, torch.float32: 2e-4, MIXED: 2e-2}
_SQUARES: dict[Storage, float] = {torch.float16: 4e-2, torch.float32: 2e-4}
_GROWTH = 0.06  # of the largest singular value over that of fp64
_VECTORS, _POWERS = 4, 30
_PASS = 1e-6
_UPDATE = {torch.float16: 2e-2, torch.float32: 1e-4}
_SHAPES = ((1024, 1024), (1000, 1536), (1024, 4096), (4096, 1024))
_FACTORS = ((2, 1024, 1024), (2, 1000, 1000), (1, 777, 1999), (3, 1024, 4096))
Backend = Literal["torch", "split", "triton"]
Method = Literal["standard", "gram"]
Check = Callable[[], list[Reading]]


def check_kernels(stage: Stage) -> None:
    """The section: on every rank's device, without communication."""
    scale = 16 if stage.device.type == "cpu" else 1
    for where, check in _checks(stage.device, scale):
        if stage.fits(where):
            stage.board.judge("kernels", where, check)


def _checks(device: torch.device, scale: int) -> Iterator[tuple[str, Check]]:
    """What each is of, and the check; what carries the most comes first."""
    methods: tuple[Method, ...] = ("standard", "gram")
    for (m, n), dtype, method in product(_SHAPES, _ORTHOGONAL, methods):
        if (dtype == torch.bfloat16 and method == "gram") or (dtype == MIXED and device.type != "cpu"):
            continue  # no rule takes it
        m, n = m // scale, n // scale
        for backend in _backends(device, dtype):
            yield (
                f"{method} {_name(dtype)} {backend} {m}x{n}",
                partial(_orthogonal, device, m, n, dtype, method, backend),
            )
    for (m, n), dtype in product(_SHAPES, _SQUARES):
        m, n = m // scale, n // scale
        for backend in _backends(device, dtype):
            yield (
                f"squares {_name(dtype)} {backend} {m}x{n}",
                partial(_orthogonal, device, m, n, dtype, "gram", backend, "squares"),
            )
    m, n = 1000 // scale, 3001 // scale
    for dtype in _UPDATE:
        yield f"update {_name(dtype)}", partial(_update, device, m, n, dtype)
    for dtype in _PRODUCT:
        yield f"passes, gradients in {_name(dtype)}", partial(_passes, device, m, n, dtype)
    if device.type == "cuda":
        yield "replay of a graph", partial(replays, device, 64, 192)
    for (k, m, p), dtype in product(_FACTORS, _PRODUCT):
        m, p = m // scale, p // scale
        for backend in _backends(device, dtype):
            yield f"product {_name(dtype)} {backend} {k}x{m}x{p}", partial(_product, device, k, m, p, dtype, backend)


def _backends(device: torch.device, dtype: Storage) -> list[Backend]:
    """Those that run there."""
    backends: tuple[Backend, ...] = ("torch", "split", "triton")
    return [backend for backend in backends if backend_fault(backend, device, dtype) is None]


def _gaussian(device: torch.device, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def _orthogonal(
    device: torch.device,
    m: int,
    n: int,
    dtype: Storage,
    method: Method,
    backend: Backend,
    preset: str = "polar_express",
) -> list[Reading]:
    """Distance to the polynomial in fp64, and the largest singular value, that of stress matrices included."""
    x, exact = _stressed(device, m, n, preset)
    found = orthogonalize(x, coefficients=preset, method=method, backend=backend, dtype=dtype)
    limit = (_SQUARES if preset == "squares" else _ORTHOGONAL)[dtype]
    most, largest = (_largest_singular_value(each.float()) for each in (exact, found))
    return [
        Reading("kernels", "against fp64", _relative(found[:2], exact[:2]), limit, "relative error"),
        Reading("kernels", "stress matrices", largest, most + _GROWTH, "largest singular value"),
    ]


@lru_cache(maxsize=1)  # of one shape: many checks of it follow each other
def _stressed(device: torch.device, m: int, n: int, preset: str) -> tuple[Tensor, Tensor]:
    """Two Gaussian and three nearly singular matrices, and what fp64 makes of them."""
    x = torch.cat([_gaussian(device, 2, m, n), *nearly_singular((m, n), device)])
    exact = _newton_schulz(x.double().mT, preset).mT if m > n else _newton_schulz(x.double(), preset)
    return x, exact


def _largest_singular_value(x: Tensor) -> float:
    """Of all matrices ``(k, m, n)``, by a block of power iterations, which takes seconds less than a decomposition."""
    v = _gaussian(x.device, len(x), x.shape[2], _VECTORS)
    for _ in range(_POWERS):
        v = torch.linalg.qr(x.mT @ (x @ v)).Q
    return float((x @ v).norm(dim=1).max())


def _product(device: torch.device, k: int, m: int, p: int, dtype: torch.dtype, backend: Backend) -> list[Reading]:
    """``X Xᵀ``, and what Newton–Schulz makes of its results: ``α R² + β R``."""
    x = (_gaussian(device, k, m, p) / p**0.5).to(dtype)
    lower = (x.double() @ x.double().mT).to(dtype).tril()
    r = lower + lower.tril(-1).mT
    readings = []
    for name, a, b, c in (("X Xᵀ", x, x.mT, None), ("R R + R", r, r, r)):
        exact = 0.5 * (a.double() @ b.double())
        exact = exact if c is None else exact - 1.5 * c.double()
        beta = 0.0 if c is None else -1.5
        symmetric = c is not None
        found = symmetric_product(a, b, c, alpha=0.5, beta=beta, b_symmetric=symmetric, backend=backend)
        error = float((found.double() - exact).abs().max() / exact.abs().max())
        readings.append(Reading("kernels", name, error, _PRODUCT[dtype], "error over the largest entry"))
        unequal = int((found != found.mT).sum())
        readings.append(Reading("kernels", f"{name}: entries that differ from the transpose's", unequal, 0))
    return readings


def _passes(device: torch.device, m: int, n: int, dtype: torch.dtype) -> list[Reading]:
    """Momentum, norms and normalized matrices, then weights."""
    grads = list(_gaussian(device, 3, m, n).to(dtype).unbind(0))
    momentum = _gaussian(device, 3, m, n, seed=1)
    exact = torch.stack(grads).double()
    average = torch.lerp(momentum.double(), exact, 0.05)
    wanted = torch.lerp(exact, average, 0.95)
    norms = wanted.flatten(1).norm(dim=1)
    x, found = normalized_momentum(grads, momentum, beta=0.95, nesterov=True, storage=torch.float32)
    params = [_gaussian(device, m, n, seed=i).to(dtype) for i in range(3)]
    update = _gaussian(device, 3, m, n, seed=9).half().to(torch.float32 if device.type == "cpu" else torch.float16)
    weights = torch.stack(params).double() * (1 - 0.02 * 0.1) - 0.02 * 0.5 * update.double()
    apply_update_(params, update, lr=0.02, weight_decay=0.1, scale=0.5)
    rounding = _PASS if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    return [
        Reading("kernels", "momentum", _relative(momentum, average), _PASS, "relative error"),
        Reading("kernels", "norms", _relative(found, norms), _PASS, "relative error"),
        Reading("kernels", "normalized", _relative(x, wanted / norms[:, None, None]), _PASS, "relative error"),
        Reading("kernels", "weights", _relative(torch.stack(params), weights), rounding, "relative error"),
    ]


def replays(device: torch.device, m: int, n: int) -> list[Reading]:
    """Batches by a CUDA graph, bitwise as by single launches: at once, and in a backward after all graphs were dropped.

    Raises:
        UserWarning: nothing was captured.
    """
    eager = Variant("standard", (), "torch", 4)
    x = [_gaussian(device, 2, m, n, seed=seed) for seed in range(2)]
    found: list[Tensor] = []

    def replay(_gradient: object = None) -> None:
        found.extend(orthogonalize(each, variant=replace(eager, replay=True)) for each in x)

    leaf = torch.ones(1, device=device, requires_grad=True)
    leaf.register_post_accumulate_grad_hook(replay)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        replay()
        drop_graphs()
        (2 * leaf).sum().backward()
    drop_graphs()
    unequal = sum(
        int((one != orthogonalize(each, variant=eager)).sum()) for one, each in zip(found, 2 * x, strict=True)
    )
    return [Reading("kernels", "entries that differ from single launches'", unequal, 0)]


def _update(device: torch.device, m: int, n: int, dtype: torch.dtype) -> list[Reading]:
    """A whole update of three matrices, as a step runs it."""
    params = [_gaussian(device, m, n, seed=i) for i in range(3)]
    grads = [_gaussian(device, m, n, seed=3 + i) for i in range(3)]
    momentum = _gaussian(device, 3, m, n, seed=9)
    g, w = torch.stack(grads).double(), torch.stack(params).double()
    x = torch.lerp(g, torch.lerp(momentum.double(), g, 0.05), 0.95)
    exact = -0.5 * _newton_schulz(x)
    muon_update_(params, grads, momentum, lr=0.5, weight_decay=0.0, beta=0.95, nesterov=True, scale=1.0, dtype=dtype)
    change = torch.stack(params).double() - w
    return [Reading("kernels", "change of the weights", _relative(change, exact), _UPDATE[dtype], "relative error")]


def _newton_schulz(x: Tensor, preset: str = "polar_express") -> Tensor:
    """In fp64, by its formula."""
    x = x / x.flatten(1).norm(dim=1)[:, None, None]
    sequence = coefficient_sequence(preset, 5)
    if isinstance(sequence, Squares):
        for block in sequence.blocks:
            stored = [x @ x.mT]
            for one in block:
                added = sum(factor * s for factor, s in zip(one.addends, stored, strict=False))
                identity = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
                stored.append(one.square * stored[-1] @ stored[-1] + added + one.identity * identity)
            x = stored[-1] @ x
        return x
    for a, b, c in sequence:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def _relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def _name(dtype: Storage) -> str:
    return str(dtype).removeprefix("torch.")
