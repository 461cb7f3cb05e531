"""Times the real Muon update of a batch of matrices on one device."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from dmuon.kernels import (
    HALF,
    MIXED,
    Storage,
    Variant,
    alternatives,
    batch_size,
    choose_variant,
    coefficient_sequence,
    drop_graphs,
    muon_update_,
    orthogonalize,
    storage_dtype,
)
from dmuon.planning.cost_cache import Timing
from dmuon.planning.device_key import NsOptions
from dmuon.planning.quarantine import Rivals, proven_kinds
from dmuon.planning.repetition import product_fault
from dmuon.solver import Shape

MAX_BATCH = 64  # an owner of more runs several batches: by then launches are long hidden
_SPREAD = 0.03  # (p90 - p10) / median that counts as settled
_ROUND = 9  # samples that a spread is judged by
_MAX_ROUNDS = 4  # on a machine that never settles, more rounds do not help
_TRIALS = 3  # samples that a variant is judged by
_CLEARLY = 0.95  # less of a gain is noise, and another form rounds otherwise
_AGREEMENT: Mapping[Storage, float] = {
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
    MIXED: 1e-1,
    torch.float32: 1e-4,
    torch.float64: 1e-9,
}
_ROUNDED = (*HALF, MIXED)
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
    trial_s: float = 0.0,
    kinds: Collection[str] | None = None,
    progress: Callable[[Shape, int], None] | None = None,
    too_large: Callable[[Shape, int], None] | None = None,
) -> dict[Shape, dict[int, Timing]]:
    """Time momentum, Newton–Schulz and weight update together, for each shape and batch size in ``work``.

    Every shape's smallest batch is timed before any shape's next. What does not fit ``budget_s`` or the device's memory
    is left out. Forms, back ends and tiles of Newton–Schulz are tried first, in half of a batch's share of the budget;
    the fastest is timed, and named in the result. Medians do not fall with batch size. On the CPU one thread works;
    the setting is restored.

    Args:
        work: shape (small side, large side) to batch sizes.
        trial_s: beside the budget, what may be spent on processes that try kernels which no GPU has run, or a minute
            for each kind of them if that is more; 0 starts none, and then these are no rivals.
        kinds: which of them are tried; ``None``: all.
        progress: called with shape and batch size after each is timed or left out.
        too_large: called with shape and batch size where the device's memory ran out; larger ones are not tried.
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
    proven = _proven(work, device, options, trial_s, kinds) if trial_s > 0 else frozenset()
    deadline = time.perf_counter() + budget_s
    with _clock(device) as clock:
        calibration = (256, 256) if device.type == "cpu" else (2048, 2048)
        rate = _rate(calibration, device, options, clock)  # operations per ns
        for index, (k, flops, shape) in enumerate(items):
            remaining = (deadline - time.perf_counter()) * 1e9
            if shape not in full and remaining > 2 * k * flops / rate:
                share = remaining / (len(items) - index)
                timing = _time_best(shape, k, device, options, clock, share, k * flops / rate, proven)
                if timing is not None:
                    rate = max(rate, k * flops / timing.median_ns)
                    result.setdefault(shape, {})[k] = timing
                else:
                    full.add(shape)
                    if too_large is not None:
                        too_large(shape, k)
            if progress is not None:
                progress(shape, k)
    return {shape: _isotonic(timings) for shape, timings in sorted(result.items())}


def _proven(
    work: Mapping[Shape, Sequence[int]],
    device: torch.device,
    options: NsOptions,
    seconds: float,
    kinds: Collection[str] | None,
) -> frozenset[tuple[Shape, str]]:
    """The shapes that kernels which no GPU has run have updated rightly, in a process of their own."""
    candidates: dict[str, list[tuple[Shape, Rivals]]] = {}
    for shape, sizes in sorted(work.items()):
        for kind, rivals in unproven_variants(shape, sizes, device, options).items():
            if kinds is None or kind in kinds:
                candidates.setdefault(kind, []).append((shape, rivals))
    return proven_kinds(candidates, device, options, seconds) if candidates else frozenset()


def unproven_variants(
    shape: Shape, sizes: Sequence[int], device: torch.device, options: NsOptions
) -> dict[str, dict[int, list[Variant]]]:
    """For each kind of kernels that no GPU has run, and that could on ``device``, all variants with that kind alone.

    Of one matrix and of the largest of the batch ``sizes``: there a multiprocessor computes several tiles in turn.
    """
    sequence = coefficient_sequence(options.coefficients, options.steps)
    dtype = storage_dtype(torch.float32, device, options.dtype)
    found: dict[str, dict[int, list[Variant]]] = {}
    for k in sorted({1, max(sizes)}):
        forms, tiles, _, replays = alternatives(shape, k, sequence, dtype, device)
        for form in forms(choose_variant(shape, k, sequence, dtype, device)):
            for tiled in (form, *tiles(form)):
                for rival in (tiled, *replays(tiled)) if len(tiled.unproven) == 1 else ():
                    (kind,) = rival.unproven
                    found.setdefault(kind, {}).setdefault(k, []).append(rival)
    return found


def trial_fault(shape: Shape, device: torch.device, options: NsOptions, rivals: Rivals) -> str | None:
    """What is wrong with updates of batches of ``shape``, upright and transposed, or ``None``; the host waits.

    Of kernels that no GPU has run, also with products that are repeated. A batch that does not fit the device's memory
    is halved.
    """
    for k, variants in sorted(rivals.items()):
        for sides in dict.fromkeys((shape, shape[::-1])):
            for variant in variants:
                fault = _fault(sides, k, device, options, variant)
                if fault is not None:
                    return f"{fault} ({k} of {sides[0]}x{sides[1]} by {variant})"
    return None


def _fault(shape: Shape, k: int, device: torch.device, options: NsOptions, variant: Variant) -> str | None:
    while True:
        try:
            batch = _Batch(shape, k, device)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                batch.update(options, variant)()
                agrees = _agrees(batch, options, variant)
                repeated = _repeated_fault(batch, options, variant) if agrees and variant.unproven else None
            break
        except torch.OutOfMemoryError:
            if k == 1:
                raise
        k //= 2
    # A product that quack's own check refuses is left to another kernel, and so agrees.
    refused = [str(w.message) for w in told if "not used" in str(w.message)]
    return repeated if agrees and not refused else f"says: {'; '.join(refused) or 'differs'}"


def _repeated_fault(batch: _Batch, options: NsOptions, variant: Variant) -> str | None:
    dtype = storage_dtype(torch.float32, batch.device, options.dtype)
    x = batch.momentum if batch.shape[0] <= batch.shape[1] else batch.momentum.mT
    return product_fault(x, variant, dtype) if isinstance(dtype, torch.dtype) else None


def touch(device: torch.device) -> None:
    """Write and read a number on ``device``: raises where an error has taken it from this process."""
    torch.ones((), device=device).item()


def fastest_variant(shape: Shape, k: int, device: torch.device, options: NsOptions, *, seconds: float) -> Variant:
    """How ``k`` matrices of ``shape`` are updated fastest on ``device``, as far as ``seconds`` allow to try."""
    with _clock(device) as clock:
        return _fastest(_Batch(shape, k, device), options, clock, seconds * 1e9, 0.0)[0]


def settled(timing: Timing) -> bool:
    """Whether the samples spread so little that measuring again would tell nothing new."""
    return timing.p90_ns - timing.p10_ns < _SPREAD * timing.median_ns


@contextmanager
def timing_bar(work: Mapping[Shape, Sequence[int]], device_name: str) -> Iterator[Callable[[Shape, int], None]]:
    """A progress bar on stderr, if that is a terminal; yields what :func:`measure` takes as ``progress``."""
    from tqdm import tqdm  # not where nothing shows progress: the GPU bench runs without

    total = sum(len(set(sizes)) for sizes in work.values())
    # disable=None: not where stderr is a file, which a bar would fill with one line per batch.
    with tqdm(total=total, desc=f"timing on {device_name}", unit="batch", leave=False, disable=None) as bar:

        def progress(shape: Shape, k: int) -> None:
            bar.set_postfix_str(f"{shape[0]}x{shape[1]} x{k}", refresh=False)
            bar.update()

        yield progress


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
    proven: frozenset[tuple[Shape, str]] = frozenset(),
) -> Timing | None:
    """The time of the fastest variant, or ``None`` where one batch does not fit the device's memory."""
    started = time.perf_counter()
    try:
        batch = _Batch(shape, k, device)
        best, tried = _fastest(batch, options, clock, share_ns / 2, expected_ns, proven)
        spent_ns = (time.perf_counter() - started) * 1e9
        named = str(best) if tried else ""
        return _time_batch(batch.update(options, best), clock, share_ns - spent_ns, named)
    except torch.OutOfMemoryError:
        return None


def _fastest(
    batch: _Batch,
    options: NsOptions,
    clock: Clock,
    limit_ns: float,
    expected_ns: float,
    proven: frozenset[tuple[Shape, str]] = frozenset(),
) -> tuple[Variant, bool]:
    """What a tuner finds within ``limit_ns``, and whether it tried anything.

    That is the rule's variant, unless a rival is clearly faster and computes the same. Kernels that no GPU has run are
    rivals if they are ``proven`` on this shape.
    """
    started = time.perf_counter()
    sequence = coefficient_sequence(options.coefficients, options.steps)
    dtype = storage_dtype(torch.float32, batch.device, options.dtype)
    best = choose_variant(batch.shape, batch.k, sequence, dtype, batch.device)
    # What trying one rival takes, in runs of the batch: four looks, and what ``_agrees`` runs.
    runs = 4 * (_TRIALS + 1) + 3 + (2 * len(_LEVELS) / batch.k if dtype in _ROUNDED else 0)

    def quick(variant: Variant) -> int:
        update = batch.update(options, variant)
        clock(update)  # no sample: it may compile kernels
        return min(clock(update) for _ in range(_TRIALS))

    best_ns: int | None = None
    for rivals in alternatives(batch.shape, batch.k, sequence, dtype, batch.device):
        for rival in rivals(best):
            spent_ns = (time.perf_counter() - started) * 1e9
            if not all((batch.shape, kind) in proven for kind in rival.unproven):
                continue
            if rival == best or spent_ns + runs * (best_ns or expected_ns) > limit_ns:
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
    if dtype in _ROUNDED:
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


def time_product(device: torch.device) -> int:
    """Median ns of a product of two matrices on ``device``: in fp16, as Newton–Schulz runs; in fp32 on a CPU."""
    side, dtype = (256, torch.float32) if device.type == "cpu" else (4096, torch.float16)
    a = torch.ones((side, side), dtype=dtype, device=device).div_(side)
    out = torch.empty_like(a)

    def product() -> None:
        torch.mm(a, a, out=out)

    with _clock(device) as clock:
        samples = [clock(product) for _ in range(3 + 2 * _ROUND)]
    return _summary(samples[3:], "").median_ns


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

        def cpu_time(function: Callable[[], None]) -> int:
            cache.zero_()
            # CPU time of this thread: other processes on the machine do not count.
            start = time.thread_time_ns()
            function()
            return max(1, time.thread_time_ns() - start)

        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # spinning threads would time each other
        try:
            yield cpu_time
        finally:
            torch.set_num_threads(threads)
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
