"""Times the real Muon update of a batch of matrices on one device."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from dmuon.kernels import (
    HALF,
    Variant,
    alternatives,
    batch_size,
    choose_variant,
    coefficient_sequence,
    drop_graphs,
    muon_update_,
    orthogonalize,
    storage_dtype,
    streams_of,
)
from dmuon.planning.cost_cache import Timing
from dmuon.planning.device_key import NsOptions
from dmuon.solver import Shape

MAX_BATCH = 64  # an owner of more runs several batches: by then launches are long hidden
_SPREAD = 0.03  # (p90 - p10) / median that counts as settled
_ROUND = 9  # samples that a spread is judged by
_MAX_ROUNDS = 4  # on a machine that never settles, more rounds do not help
_TRIALS = 3  # samples that a variant is judged by
_CLEARLY = 0.95  # less of a gain is noise, and another form rounds otherwise
_AGREEMENT: Mapping[torch.dtype, float] = {
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
    torch.float32: 1e-4,
    torch.float64: 1e-9,
}
_GROWTH = 0.06  # of the largest singular value over the standard form's
_POWERS = 30
_LEVELS = (0.0, 1e-3, 1e-2)  # of noise in nearly singular matrices
_CACHE_BYTES = 1 << 28  # above every current device's L2
_CPU_CACHE_BYTES = 1 << 25  # above a core's L2 and its share of the L3
_MAX_BATCH_ELEMENTS = 1 << 28  # 1 GiB of fp32: far beyond where batching still helps
Clock = Callable[[Callable[[], None]], int]  # runs a function and returns its time in ns


def useful_batch_sizes(shape: Shape, limit: int, device: torch.device) -> tuple[int, ...]:
    """Powers of two up to ``limit`` that are worth timing for ``shape``: as many as the device takes at once."""
    most = min(batch_size(shape, limit, device), MAX_BATCH, max(1, _MAX_BATCH_ELEMENTS // (shape[0] * shape[1])))
    return tuple(1 << i for i in range(most.bit_length()))


def measure(
    work: Mapping[Shape, Sequence[int]],
    *,
    device: torch.device,
    options: NsOptions | None = None,
    budget_s: float = 10.0,
) -> dict[Shape, dict[int, Timing]]:
    """Time momentum, Newton–Schulz and weight update together, for each shape and batch size in ``work``.

    Every shape's smallest batch is timed before any shape's next. What does not fit ``budget_s`` or the device's memory
    is left out. Forms and back ends of Newton–Schulz are tried first, in half of a batch's share of the budget; the
    fastest is timed, and named in the result. Medians do not fall with batch size. On the CPU as many threads work as
    torch is set to. Call :func:`build_kernels` before: compiling counts like anything else.

    Args:
        work: shape (small side, large side) to batch sizes.
    """
    options = options or NsOptions()
    items = sorted(
        ((k, options.flops(shape, device), shape) for shape, sizes in work.items() for k in set(sizes)),
        key=lambda item: (item[0], item[0] * item[1], item[2]),
    )
    result: dict[Shape, dict[int, Timing]] = {}
    full: set[Shape] = set()
    if not items or budget_s <= 0:
        return result
    with _clock(device) as clock:
        calibration = (256, 256) if device.type == "cpu" else (2048, 2048)
        rate = _rate(calibration, device, options, clock)  # operations per ns
        deadline = time.perf_counter() + budget_s
        for index, (k, flops, shape) in enumerate(items):
            remaining = (deadline - time.perf_counter()) * 1e9
            if shape not in full and remaining > 2 * k * flops / rate:
                share = remaining / (len(items) - index)
                timing = _time_best(shape, k, device, options, clock, share, k * flops / rate)
                if timing is not None:
                    rate = max(rate, k * flops / timing.median_ns)
                    result.setdefault(shape, {})[k] = timing
                else:
                    full.add(shape)  # larger batches do not fit either
    return {shape: _isotonic(timings) for shape, timings in sorted(result.items())}


def build_kernels(
    work: Mapping[Shape, Sequence[int]], *, device: torch.device, options: NsOptions | None = None
) -> None:
    """Run what :func:`measure` may try once, so that kernels are compiled before its budget counts. Not on the CPU.

    A product takes a second to compile, and is loaded in no time by other ranks of the host.
    """
    module = streams_of(device)
    if module is None:
        return
    options = options or NsOptions()
    sequence = coefficient_sequence(options.coefficients, options.steps)
    dtype = storage_dtype(torch.float32, device, options.dtype)
    run = partial(orthogonalize, coefficients=options.coefficients, steps=options.steps, dtype=options.dtype)
    for shape, k in sorted((shape, k) for shape, sizes in work.items() for k in set(sizes)):
        rule = choose_variant(shape, k, sequence, dtype, device)
        forms = next(alternatives(shape, k, sequence, dtype, device))
        for variant in dict.fromkeys((rule, *forms(rule))):
            with suppress(Exception):  # what fails here fails where it is tried, and is told there
                batch = _Batch(shape, k, device)
                batch.update(options, variant)()
                run(batch.momentum[:1], variant=variant)
    module.current_stream(device).synchronize()


def fastest_variant(shape: Shape, k: int, device: torch.device, options: NsOptions, *, seconds: float) -> Variant:
    """How ``k`` matrices of ``shape`` are updated fastest on ``device``, as far as ``seconds`` allow to try."""
    with _clock(device) as clock:
        return _fastest(_Batch(shape, k, device), options, clock, seconds * 1e9, 0.0)[0]


def settled(timing: Timing) -> bool:
    """Whether the samples spread so little that measuring again would tell nothing new."""
    return timing.p90_ns - timing.p10_ns < _SPREAD * timing.median_ns


def _rate(shape: Shape, device: torch.device, options: NsOptions, clock: Clock) -> float:
    update = _Batch(shape, 1, device).update(options)
    clock(update)
    return options.flops(shape, device) / min(clock(update) for _ in range(2))


def _time_best(
    shape: Shape,
    k: int,
    device: torch.device,
    options: NsOptions,
    clock: Clock,
    share_ns: float,
    expected_ns: float,
) -> Timing | None:
    """The time of the fastest variant, or ``None`` where one batch does not fit the device's memory."""
    started = time.perf_counter()
    try:
        batch = _Batch(shape, k, device)
        best, tried = _fastest(batch, options, clock, share_ns / 2, expected_ns)
        spent_ns = (time.perf_counter() - started) * 1e9
        return _time_batch(batch.update(options, best), clock, share_ns - spent_ns, str(best) if tried else "")
    except torch.OutOfMemoryError:
        return None


def _fastest(
    batch: _Batch, options: NsOptions, clock: Clock, limit_ns: float, expected_ns: float
) -> tuple[Variant, bool]:
    """What a tuner finds within ``limit_ns``: the rule's variant, unless a rival is clearly faster and is right.

    Returns:
        the variant, and whether any rival was tried.
    """
    started = time.perf_counter()
    sequence = coefficient_sequence(options.coefficients, options.steps)
    dtype = storage_dtype(torch.float32, batch.device, options.dtype)
    best = choose_variant(batch.shape, batch.k, sequence, dtype, batch.device)
    # What trying one rival takes, in runs of the batch: four looks, and what ``_agrees`` runs.
    runs = 4 * (_TRIALS + 1) + 3 + (2 * len(_LEVELS) / batch.k if dtype in HALF else 0)

    def quick(variant: Variant) -> int:
        update = batch.update(options, variant)
        clock(update)  # no sample: it may compile kernels
        return min(clock(update) for _ in range(_TRIALS))

    best_ns: int | None = None
    for rivals in alternatives(batch.shape, batch.k, sequence, dtype, batch.device):
        for rival in rivals(best):
            spent_ns = (time.perf_counter() - started) * 1e9
            cost_ns = runs * (best_ns or expected_ns)
            if rival == best or spent_ns + cost_ns > limit_ns:
                continue
            best_ns = quick(best) if best_ns is None else best_ns
            try:
                # A second look at both: the faster of two noisy times is fast by chance half the time.
                if quick(rival) < _CLEARLY * best_ns and _agrees(batch, options, rival):
                    best_ns, rival_ns = min(best_ns, quick(best)), quick(rival)
                    if rival_ns < _CLEARLY * best_ns:
                        best, best_ns = rival, rival_ns
            except Exception as error:  # a kernel that does not build or fit here is no reason not to train
                warnings.warn(f"Newton–Schulz variant {rival} failed ({type(error).__name__}: {error}); not used")
    return best, best_ns is not None


def _agrees(batch: _Batch, options: NsOptions, variant: Variant) -> bool:
    """Whether ``variant`` computes what the standard form with whole products does; warns where it does not.

    On matrices that are nearly orthogonal already: all forms are accurate there, so that what differs is a mistake.
    In half precision also on nearly singular ones, where forms differ, but singular values must not grow.
    """
    run = partial(orthogonalize, coefficients=options.coefficients, steps=options.steps, dtype=options.dtype)
    plain = partial(run, method="standard", backend="torch")
    x = plain(batch.momentum)
    expected, result = plain(x), run(x, variant=variant)
    error = float(((result - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)).max())
    dtype = storage_dtype(torch.float32, batch.device, options.dtype)
    if not error <= _AGREEMENT[dtype]:
        warnings.warn(f"Newton–Schulz variant {variant} differs from the standard form by {error:.2g}; not used")
        return False
    if dtype in HALF:
        for x in nearly_singular(batch.shape, batch.device):
            most, largest = (_largest_singular_value(form(x)) for form in (plain, partial(run, variant=variant)))
            if not largest <= most + _GROWTH:
                warnings.warn(
                    f"Newton–Schulz variant {variant} gives singular values up to {largest:.2f}, the standard form "
                    f"{most:.2f}; not used"
                )
                return False
    return True


def nearly_singular(shape: Shape, device: torch.device) -> Iterator[Tensor]:
    """Three matrices, one by one and ``(1, m, n)`` each: half of the directions are small or null, none is an axis.

    There rounding is amplified most, and what commutes in exact arithmetic does not.
    """
    m, n = shape
    rank = max(1, min(shape) // 2)
    generator = torch.Generator(device).manual_seed(0)
    for level in _LEVELS:
        left, right, noise = (
            torch.randn(1, *sides, device=device, generator=generator) for sides in ((m, rank), (rank, n), shape)
        )
        yield left @ right / math.sqrt(rank) + level * noise


def _largest_singular_value(x: Tensor) -> float:
    """Of all matrices ``(k, m, n)``, from below by a few percent at most: power iteration."""
    generator = torch.Generator(x.device).manual_seed(0)
    v = torch.randn(x.shape[0], x.shape[2], 1, device=x.device, generator=generator)
    for _ in range(_POWERS):
        v = x.mT @ (x @ v)
        v = v / v.norm(dim=1, keepdim=True)
    return float((x @ v).norm(dim=1).max())


def _time_batch(update: Callable[[], None], clock: Clock, share_ns: float, variant: str = "") -> Timing:
    """Rounds of samples until one settles or the share of the budget is spent; the one of least p90 counts."""
    clock(update)  # no sample: it may compile kernels
    started = time.perf_counter()
    samples = [clock(update)]
    best = _summary(samples, variant)
    for _ in range(_MAX_ROUNDS):
        while len(samples) < _ROUND and (time.perf_counter() - started) * 1e9 + best.median_ns < share_ns:
            samples.append(clock(update))
        if not samples:
            break
        timing = _summary(samples, variant)
        if timing.n > best.n or (timing.n == best.n and timing.p90_ns < best.p90_ns):
            best = timing
        if timing.n < _ROUND or settled(timing):
            break
        samples = []
    return best


class _Batch:
    """``k`` random matrices of ``shape`` with gradients and momentum."""

    def __init__(self, shape: Shape, k: int, device: torch.device) -> None:
        self.shape, self.k, self.device = shape, k, device
        generator = torch.Generator(device).manual_seed(0)  # the global one belongs to the user's program

        def gaussian() -> Tensor:
            return torch.randn(k, *shape, device=device, generator=generator)

        self.params, self.grads, self.momentum = list(gaussian().unbind(0)), list(gaussian().unbind(0)), gaussian()

    def update(self, options: NsOptions, variant: Variant | None = None) -> Callable[[], None]:
        """A function that updates the batch once."""
        return partial(
            muon_update_,
            self.params,
            self.grads,
            self.momentum,
            lr=1e-3,
            weight_decay=0.1,
            beta=0.95,
            nesterov=True,
            scale=1.0,
            coefficients=options.coefficients,
            steps=options.steps,
            dtype=options.dtype,
            variant=variant,
        )


def _summary(samples: Sequence[int], variant: str) -> Timing:
    ordered = sorted(samples)
    last = len(ordered) - 1
    low, middle, high = (max(1, ordered[round(last * q)]) for q in (0.1, 0.5, 0.9))
    return Timing(middle, low, high, len(ordered), variant)


def _isotonic(timings: Mapping[int, Timing]) -> dict[int, Timing]:
    result: dict[int, Timing] = {}
    floor = 0
    for k, t in sorted(timings.items()):
        floor = max(floor, t.median_ns)
        result[k] = replace(t, median_ns=floor, p90_ns=max(t.p90_ns, floor))
    return result


@contextmanager
def _clock(device: torch.device) -> Iterator[Clock]:
    if device.type == "cpu":
        cache = torch.empty(_CPU_CACHE_BYTES, dtype=torch.uint8)  # as below
        # CPU time of this thread, where it is alone: other processes on the machine do not count.
        now = time.thread_time_ns if torch.get_num_threads() == 1 else time.perf_counter_ns

        def cpu_time(function: Callable[[], None]) -> int:
            cache.zero_()
            start = now()
            function()
            return max(1, now() - start)

        yield cpu_time
        return
    module = torch.get_device_module(device.type)
    with module.device(device):
        # Written before each sample, so that none finds its inputs in cache: in a step, other matrices have taken it.
        cache = torch.empty(_CACHE_BYTES, dtype=torch.uint8, device=device)

        def accelerator_time(function: Callable[[], None]) -> int:
            start, stop = module.Event(enable_timing=True), module.Event(enable_timing=True)
            cache.zero_()  # also keeps the device busy while the launches queue up
            start.record()
            function()
            stop.record()
            stop.synchronize()
            milliseconds: float = start.elapsed_time(stop)
            return max(1, round(milliseconds * 1e6))

        try:
            yield accelerator_time
        finally:
            drop_graphs()  # graphs that were tried keep memory
