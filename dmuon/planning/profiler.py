"""Times the real Muon update of a batch of matrices on one device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import torch

from dmuon.kernels import batch_size, drop_graphs, muon_update_, step_variant, streams_of
from dmuon.planning.cost_cache import NsOptions, Timing
from dmuon.solver import Shape

MAX_BATCH = 64  # an owner of more runs several batches: by then launches are long hidden
_SPREAD = 0.03  # (p90 - p10) / median that counts as settled
_ROUND = 9  # samples that a spread is judged by
_MAX_ROUNDS = 4  # on a machine that never settles, more rounds do not help
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
    is left out. Newton–Schulz runs as it does in a step. On the CPU as many threads work as torch is set to.
    Call :func:`build_kernels` before: compiling counts like anything else.

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
        update = _update_of(calibration, 1, device, options)
        clock(update)
        rate = options.flops(calibration, device) / min(clock(update) for _ in range(2))  # operations per ns
        deadline = time.perf_counter() + budget_s
        for index, (k, flops, shape) in enumerate(items):
            remaining = (deadline - time.perf_counter()) * 1e9
            if shape not in full and remaining > 2 * k * flops / rate:
                share = remaining / (len(items) - index)
                try:
                    timing = _time_batch(_update_of(shape, k, device, options), clock, share)
                except torch.OutOfMemoryError:
                    full.add(shape)  # larger batches do not fit either
                    continue
                rate = max(rate, k * flops / timing.median_ns)
                result.setdefault(shape, {})[k] = timing
    return {shape: dict(sorted(timings.items())) for shape, timings in sorted(result.items())}


def build_kernels(
    work: Mapping[Shape, Sequence[int]], *, device: torch.device, options: NsOptions | None = None
) -> None:
    """Run what :func:`measure` times once, so that kernels are compiled before its budget counts. Not on the CPU.

    A product takes a second to compile, and is loaded in no time by other ranks of the host.
    """
    module = streams_of(device)
    if module is None:
        return
    for shape, k in sorted((shape, k) for shape, sizes in work.items() for k in set(sizes)):
        with suppress(Exception):  # what fails here fails where it is timed, and is told there
            _update_of(shape, k, device, options or NsOptions())()
    module.current_stream(device).synchronize()


def _time_batch(update: Callable[[], None], clock: Clock, share_ns: float) -> Timing:
    """Rounds of samples until one settles or the share of the budget is spent; the one of least p90 counts."""
    clock(update)  # no sample: it may compile kernels
    started = time.perf_counter()
    samples = [clock(update)]
    best = _summary(samples)
    for _ in range(_MAX_ROUNDS):
        while len(samples) < _ROUND and (time.perf_counter() - started) * 1e9 + best.median_ns < share_ns:
            samples.append(clock(update))
        if not samples:
            break
        timing = _summary(samples)
        if timing.n > best.n or (timing.n == best.n and timing.p90_ns < best.p90_ns):
            best = timing
        if timing.n < _ROUND or timing.p90_ns - timing.p10_ns < _SPREAD * timing.median_ns:
            break
        samples = []
    return best


def _update_of(shape: Shape, k: int, device: torch.device, options: NsOptions) -> Callable[[], None]:
    """A function that updates ``k`` random matrices of ``shape`` once, as a step does."""
    generator = torch.Generator(device).manual_seed(0)  # the global one belongs to the user's program
    coefficients, storage = options.check(device)
    params, grads, momentum = (torch.randn(k, *shape, device=device, generator=generator) for _ in range(3))
    return partial(
        muon_update_,
        list(params.unbind(0)),
        list(grads.unbind(0)),
        momentum,
        lr=1e-3,
        weight_decay=0.1,
        beta=0.95,
        nesterov=True,
        scale=1.0,
        coefficients=options.coefficients,
        steps=options.steps,
        dtype=options.dtype,
        variant=step_variant(shape, k, coefficients, storage, device),
    )


def _summary(samples: Sequence[int]) -> Timing:
    ordered = sorted(samples)
    last = len(ordered) - 1
    low, middle, high = (max(1, ordered[round(last * q)]) for q in (0.1, 0.5, 0.9))
    return Timing(middle, low, high, len(ordered))


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
            drop_graphs()  # those of batches that were timed keep memory
