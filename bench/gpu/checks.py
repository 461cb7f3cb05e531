"""Are the kernels right? Errors against fp64, each with the limit that it must keep."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from common.stress import MARGIN, SMALL, stress_set
from common.stress import Batch as Stress
from numerics import polynomial
from torch import Tensor

from dmuon.kernels import apply_update_, backend_fault, coefficient_sequence, normalized_momentum, orthogonalize
from dmuon.kernels.symmetric_tiles import TileConfig
from dmuon.kernels.symmetric_triton import symmetric_product
from dmuon.planning.profiler import nearly_singular
from gpu.journal import Journal
from gpu.settings import Settings, relative

POLAR = coefficient_sequence("polar_express", 5)
# A device adds the products of one element one by one: in fp32 a long diagonal of XXᵀ is off by 3e-6 then.
LIMITS = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-5}
# Even and odd numbers of tile rows, ragged ones, and what descriptors cannot read.
PRODUCTS = ((1024, 1024, 2), (1000, 1000, 2), (1112, 1112, 2), (777, 1999, 1), (1024, 4096, 3))
SUM = (1.5, -0.5, 0.25, -2.0)  # weights of addends
SHAPES = ((1024, 1024), (1024, 1536), (1024, 4096), (4096, 1024))
# Hard spectra of bench/common/stress.py: (m, n, seed, every how many kinds).
STRESS = ((96, 224, 9, 1), (128, 512, 13, 2), (256, 512, 15, 3))
DRY_STRESS = ((16, 32, 9, 5), (32, 48, 13, 9))


@dataclass(frozen=True)
class Found:
    """An error, and whether the result was symmetric if it should be."""

    error: float
    symmetric: bool = True
    where: str = ""


@dataclass(frozen=True)
class Check:
    """``measure`` computes, on the device."""

    what: str
    limit: float
    measure: Callable[[], Found] = field(repr=False)


def check(settings: Settings, journal: Journal) -> None:
    """Run all checks; a line for each that is wrong, and one for each kind."""
    for kind, checks in (
        ("products", products(settings)),
        ("update passes", passes(settings)),
        ("whole runs", whole_runs(settings)),
        ("stress matrices", stress(settings)),
    ):
        count = wrong = 0
        with journal.guarded(f"preparing checks of {kind}"):
            for one in checks:
                with journal.guarded(one.what):
                    found = one.measure()
                    ok = bool(found.error <= one.limit and found.symmetric)
                    row = {"what": one.what, "error": found.error, "limit": one.limit, "symmetric": found.symmetric}
                    text = f"WRONG {one.what}: {found.error:.3g}, limit {one.limit:.3g} {found.where}"
                    journal.add("checks", {**row, "where": found.where, "ok": ok}, "" if ok else text)
                    count, wrong = count + 1, wrong + (not ok)
        print(f"{kind}: {count} results against fp64, {wrong} wrong", flush=True)


def check_builds(settings: Settings, journal: Journal) -> None:
    """Kernels that do not build or launch here, without a C compiler for one, are faults: others would run instead."""
    reasons = {"the symmetric product": backend_fault("triton", settings.device, torch.float16)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        x = torch.ones(1, 8, 8, device=settings.device)
        apply_update_([x[0].clone()], x, lr=0.1, weight_decay=0.1, scale=1.0)
    reasons["the fused passes"] = "; ".join(str(warning.message) for warning in caught) or None
    for what, reason in reasons.items():
        if reason is not None:
            journal.add("faults", {"what": what, "fault": reason, "ours": True}, f"FAILED {what}: {reason}")


def products(settings: Settings) -> Iterator[Check]:
    for dtype, limit in LIMITS.items() if settings.tiles else ():
        if settings.device.type == "cpu" and dtype == torch.bfloat16:
            continue  # the interpreter's bf16 is not the hardware's
        for m, p, k in PRODUCTS:
            m, p = max(8, m // settings.scale), max(8, p // settings.scale)
            factors = cache(partial(_factors, settings, (k, m, p), dtype))
            for config in settings.configs(m, p, dtype):
                if config.descriptors and (m * dtype.itemsize % 16 or p * dtype.itemsize % 16):
                    continue
                for name in ("XXᵀ", "RS+R", "S²+ΣS+I"):
                    what = f"{name} {k}x{m}x{p} {dtype} {config}"
                    yield Check(what, limit, partial(_product, factors, name, config))


def _factors(settings: Settings, shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x = (settings.gaussian(*shape) / shape[-1] ** 0.5).to(dtype)
    r = (x.double() @ x.double().mT).to(dtype)
    s = (r.double() @ r.double()).to(dtype)
    return x, r, torch.tril(s) + torch.tril(s, -1).mT


def _product(factors: Callable[[], tuple[Tensor, Tensor, Tensor]], name: str, config: TileConfig) -> Found:
    x, r, s = factors()
    if name == "S²+ΣS+I":
        return _sum(r, s, config)
    a, b, c = (x, x.mT, None) if name == "XXᵀ" else (r, s, r)
    exact = 0.5 * (a.double() @ b.double())
    exact = exact if c is None else exact - 1.5 * c.double()
    exact = torch.tril(exact) + torch.tril(exact, -1).mT  # fp16 factors commute nearly only
    d = symmetric_product(a, b, c, alpha=0.5, beta=-1.5, b_symmetric=c is not None, config=config)
    return _against(d, exact)


def _sum(r: Tensor, s: Tensor, config: TileConfig) -> Found:
    """What blocks of squares compute: four addends and the identity, written over one of them."""
    kept = s.clone()
    addends = (r, s, r, kept)
    exact = 0.5 * (s.double() @ s.double()) + 0.3 * torch.eye(s.shape[-1], dtype=torch.float64, device=s.device)
    exact += sum(weight * c.double() for weight, c in zip(SUM, addends, strict=True))
    return _against(
        symmetric_product(
            s, s, addends, alpha=0.5, beta=SUM, identity=0.3, out=kept, b_symmetric=True, config=config
        ),
        exact,
    )  # fmt: skip


def _against(d: Tensor, exact: Tensor) -> Found:
    error = ((d.double() - exact).abs().max() / exact.abs().max()).item()
    return Found(error, torch.equal(d, d.mT))


def passes(settings: Settings) -> Iterator[Check]:
    """The passes before and after Newton–Schulz, whatever runs them here."""
    for dtype in (torch.float32, torch.bfloat16):
        for what in ("momentum", "norms", "normalized"):
            yield Check(f"{what} {dtype}", 1e-6, partial(_momentum, settings, dtype, what))
    yield Check("weights", 1e-6, partial(_weights, settings))


def _pass_shape(settings: Settings) -> tuple[int, int, int]:
    return 3, max(8, 1000 // settings.scale), max(8, 3001 // settings.scale)


def _momentum(settings: Settings, dtype: torch.dtype, what: str) -> Found:
    shape = _pass_shape(settings)
    grads = list(settings.gaussian(*shape, dtype=dtype).unbind(0))
    momentum = settings.gaussian(*shape, seed=1)
    exact = torch.stack(grads).double()
    average = torch.lerp(momentum.double(), exact, 0.05)
    wanted = torch.lerp(exact, average, 0.95)
    norms = wanted.flatten(1).norm(dim=1)
    x, found = normalized_momentum(grads, momentum, beta=0.95, nesterov=True, storage=torch.float32)
    pairs = {"momentum": (momentum, average), "norms": (found, norms), "normalized": (x, wanted / norms[:, None, None])}
    return Found(relative(*pairs[what]))


def _weights(settings: Settings) -> Found:
    k, m, n = _pass_shape(settings)
    params = [settings.gaussian(m, n, seed=i) for i in range(k)]
    update = settings.gaussian(k, m, n, dtype=torch.float16, seed=9)
    wanted = torch.stack(params).double() * (1 - 0.02 * 0.1) - 0.02 * 0.5 * update.double()
    apply_update_(params, update, lr=0.02, weight_decay=0.1, scale=0.5)
    return Found(relative(torch.stack(params), wanted))


def whole_runs(settings: Settings) -> Iterator[Check]:
    """In fp16: distance to the fp64 standard form, and the largest singular value."""
    for m, n in SHAPES:
        m, n = max(8, m // settings.scale), max(8, n // settings.scale)
        inputs = cache(partial(_inputs, settings, (m, n)))
        for backend, method in _forms(settings):
            run = cache(partial(_run, inputs, backend, method))
            name = f"{method} {backend} {m}x{n}"
            yield Check(f"{name} error", 2e-2, lambda run=run, x=inputs: Found(relative(run()[:1], x()[1])))
            yield Check(f"{name} largest singular value", 1.18, lambda run=run: _largest(run()))


def _forms(settings: Settings) -> list[tuple[str, str]]:
    backends = ("torch", "triton") if settings.tiles else ("torch",)
    return [(backend, method) for backend in backends for method in ("standard", "gram")]


def _inputs(settings: Settings, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """A gaussian matrix before others, and what the first becomes in fp64."""
    x = torch.cat([settings.gaussian(1, *shape), *nearly_singular(shape, settings.device)])
    return x, orthogonalize(x[:1].double(), method="standard")


def _run(inputs: Callable[[], tuple[Tensor, Tensor]], backend: str, method: str) -> Tensor:
    found: Tensor = orthogonalize(inputs()[0], method=method, backend=backend, dtype=torch.float16)  # type: ignore[arg-type]
    return found


def _largest(x: Tensor) -> Found:
    return Found(torch.linalg.matrix_norm(x.double(), 2).max().item())


def stress(settings: Settings) -> Iterator[Check]:
    """Near-null directions, where rounding is amplified: singular values as docs/benchmarks.md says of fp16."""
    for plan in DRY_STRESS if settings.scale > 1 else STRESS:
        matrices = cache(partial(_stress, plan))
        for backend, method in _forms(settings):
            run = cache(partial(_stressed, settings, matrices, backend, method))
            name = f"{method} {backend} {plan[0]}x{plan[1]} stress"
            above = partial(_above, matrices, run)
            yield Check(f"{name}, largest singular value above the exact one", MARGIN, above)
            yield Check(f"{name}, smallest singular value below the exact one", MARGIN, partial(_below, matrices, run))


def _stress(plan: tuple[int, int, int, int]) -> Stress:
    return stress_set((plan,))[0]


def _stressed(settings: Settings, matrices: Callable[[], Stress], backend: str, method: str) -> Tensor:
    """On the CPU, where singular values of many small matrices come fast."""
    x = matrices().x.float().to(settings.device)
    found: Tensor = orthogonalize(x, method=method, backend=backend, dtype=torch.float16)  # type: ignore[arg-type]
    return found.double().cpu()


def _above(matrices: Callable[[], Stress], run: Callable[[], Tensor]) -> Found:
    found, batch = run(), matrices()
    if not found.isfinite().all():
        return Found(float("inf"), where="not finite")
    largest, index = torch.linalg.matrix_norm(found, 2).max(dim=0)
    return Found(largest.item() - polynomial(batch.sigma, POLAR).max().item(), where=batch.names[int(index)])


def _below(matrices: Callable[[], Stress], run: Callable[[], Tensor]) -> Found:
    """Of directions that are not lost in rounding to begin with."""
    worst = Found(0.0)
    found, batch = run(), matrices()
    for name, matrix, sigma, u in zip(batch.names, found.nan_to_num(), batch.sigma, batch.u, strict=True):
        kept = sigma >= SMALL
        smallest = torch.linalg.svdvals(u[:, kept].mT @ matrix).min().item()
        error = polynomial(sigma[kept], POLAR).min().item() - smallest
        worst = max(worst, Found(error, where=name), key=lambda one: one.error)
    return worst
