"""Costs for the planner: the user's cache, shipped profiles, measurements, of links too, and estimates."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from dmuon.comm.domain import Domain
from dmuon.comm.monitor import FirstError
from dmuon.planning.cost_cache import (
    CacheKey,
    CostCache,
    CostCacheError,
    Entries,
    NsOptions,
    Timing,
    device_key,
    merge_entries,
    shipped_profiles,
    user_cache_files,
    user_cache_path,
)
from dmuon.planning.profiler import build_kernels, measure, useful_batch_sizes
from dmuon.platform.files import check_target
from dmuon.platform.host import logger
from dmuon.solver import CostTable, Shape

Work: TypeAlias = Mapping[Shape, tuple[int, ...]]

_log = logger(__name__)

# What this process measured. The next call does not measure it again, also where the cache cannot be written; it does
# try what did not fit the budget or the memory.
_measured: dict[CacheKey, Entries] = {}

# Of an all-to-all that is measured.
_PROBE_BYTES = 2**20
_PROBE_BYTES_PER_RANK = 2**16  # with less, latency would count as cost of bytes
_PROBES = 3


@dataclass(frozen=True, slots=True)
class FoundCosts:
    """What planning needs to know of a device.

    Attributes:
        table: the planner's costs.
        source: where they came from, for people.
    """

    table: CostTable
    source: str


def find_costs(
    counts: Mapping[Shape, int],
    *,
    world: int,
    rank: int,
    device: torch.device,
    costs: str | os.PathLike[str] | None = None,
    options: NsOptions | None = None,
    budget_s: float = 10.0,
    share: Callable[[Callable[[], object]], list[object]] | None = None,
) -> FoundCosts:
    """Costs for ``counts`` matrices per shape over ``world`` ranks, and where they came from.

    Collective where ``share`` is given. Rank 0 reads the user's cache, then the shipped profiles; what they lack is
    divided among the ranks, measured, and written to the user's cache by rank 0: batches of powers of two, as
    :func:`useful_batch_sizes` has them, up to the most matrices of a shape that one owner can get. Nothing is measured
    twice. What the budget does not reach is scaled from measured shapes by FLOPs, the table says so, and the next call
    tries it again.

    Args:
        counts: shape (small side, large side) to number of matrices.
        costs: ``None`` as above; ``"flops"`` measures and reads nothing; a path is read instead, and must fit.
        options: the Newton–Schulz run to time.
        budget_s: seconds that each rank may measure.
        share: what a function returns on each rank, in rank order; the others wait for it. ``None`` in a single
            process.

    Raises:
        CostCacheError: on every rank, when the file that ``costs`` names is invalid or another device's.
        RuntimeError: on every rank, when measuring failed on one.
    """
    if costs == "flops":
        return FoundCosts(CostTable.from_flops(counts), "estimated from FLOPs")
    options = options or NsOptions()
    share = share or (lambda work: [work()])
    key = device_key(device, options)

    def look_up() -> tuple[CacheKey, str | None, tuple[Entries, Work, str] | None]:
        if rank != 0:
            return key, None, None
        try:
            return key, None, _known(counts, world, device, options, key, costs)
        except Exception as error:  # every rank must hear of it, whatever it is
            return key, str(error), None

    answers: list[Any] = share(look_up)
    _, fault, found = answers[0]
    if fault is not None:
        raise CostCacheError(fault)
    entries, missing, source = found
    if missing:
        keys = [answer[0] for answer in answers]
        measured = _measure_together(missing, keys, rank, device, options, budget_s, share)
        entries = merge_entries(entries, measured)
        if measured:
            source = ", ".join(
                filter(None, (source, f"{sum(map(len, measured.values()))} measured now on {key.device}"))
            )
            written = share(lambda: _keep(CostCache(key, measured)) if rank == 0 else None)[0]
            source += f", kept in user cache {written}" if written else ""
    table = cost_table(counts, entries, options, device)
    return FoundCosts(table, source or "estimated from FLOPs")


def cached_entries(key: CacheKey) -> tuple[Entries, str]:
    """What the user's cache and the shipped profiles hold for ``key``, the user's and the exact winning.

    Warns of invalid files and of costs measured with another driver, torch, CUDA or compiler.
    """
    entries: Entries = {}
    found: list[str] = []
    files = [(f"shipped profile dmuon.profiles/{path.name}", path) for path in shipped_profiles()]
    for name, path in [*files, *((f"user cache {path}", path) for path in user_cache_files(key))]:
        try:
            cache = CostCache.load(path)
        except CostCacheError as error:
            warnings.warn(f"{error}; not used")
            continue
        if cache.key.strict == key.strict:
            entries = merge_entries(entries, cache.entries_for(key, name))
            found.insert(0, name)
    return entries, ", ".join(found)


def _keep(cache: CostCache) -> str | None:
    """For this process's next call, and in the user's cache; the path, or None where that cannot be written."""
    _measured[cache.key] = merge_entries(_measured.get(cache.key, {}), cache.entries)
    path = user_cache_path(cache.key)
    try:
        try:
            cache.save(path)
        except CostCacheError:  # what is there is none, or of another key
            check_target(path).unlink()
            cache.save(path)
    except (OSError, CostCacheError) as error:
        warnings.warn(f"cost cache {path} cannot be written ({error}); costs will be measured again next time")
        return None
    return str(path)


def _known(
    counts: Mapping[Shape, int],
    world: int,
    device: torch.device,
    options: NsOptions,
    key: CacheKey,
    costs: str | os.PathLike[str] | None,
) -> tuple[Entries, Work, str]:
    """Entries, the work that is left to measure, and where the entries are from."""
    if costs is not None:
        return _explicit(costs, key, counts), {}, f"cost cache {os.fspath(costs)}"
    entries, source = cached_entries(key)
    entries = merge_entries(entries, _measured.get(key, {}))
    missing = {}
    for shape, most in _most_per_owner(counts, world, options, device).items():
        lacking = tuple(k for k in useful_batch_sizes(shape, most, device) if k not in entries.get(shape, {}))
        if lacking:
            missing[shape] = lacking
    wanted = {shape: entries[shape] for shape in counts if shape in entries}
    # Shapes measured for other models still serve to scale estimates from.
    if any(1 not in wanted.get(shape, {}) for shape in counts):
        wanted = dict(entries)
    if not source and wanted:
        source = f"measured earlier by this process on {key.device}"
    return wanted, missing, source if wanted else ""


def _most_per_owner(
    counts: Mapping[Shape, int], world: int, options: NsOptions, device: torch.device
) -> dict[Shape, int]:
    """How many matrices of each shape one owner may get: all that fit twice an even share of the whole work.

    Not twice an even share of the shape: beside owners of large matrices, another may get most of the small ones.
    """
    flops = {shape: options.flops(shape, device) for shape in counts}
    even = sum(count * flops[shape] for shape, count in counts.items()) / world
    share = 2 * max([even, *flops.values()])
    return {shape: min(count, math.ceil(share / flops[shape])) for shape, count in sorted(counts.items())}


def _explicit(path: str | os.PathLike[str], key: CacheKey, shapes: Iterable[Shape]) -> Entries:
    entries = CostCache.load(path).entries_for(key, f"cost cache {os.fspath(path)}")
    lacking = [f"{m}x{n}" for m, n in sorted(shapes) if 1 not in entries.get((m, n), {})]
    if lacking:
        warnings.warn(
            f"cost cache {os.fspath(path)}: no timing for {', '.join(lacking)}, estimated instead; "
            f"run dmuon-profile --shapes {','.join(lacking)}"
        )
    return entries


def _measure_together(
    missing: Work,
    keys: list[CacheKey],
    rank: int,
    device: torch.device,
    options: NsOptions,
    budget_s: float,
    share: Callable[[Callable[[], object]], list[object]],
) -> dict[Shape, dict[int, Timing]]:
    """Divide the work among the ranks whose device is rank 0's, measure, and merge."""
    workers = [r for r, key in enumerate(keys) if key == keys[0]]
    if rank == 0 and len(workers) < len(keys):
        other = next(r for r in range(len(keys)) if r not in workers)
        warnings.warn(f"rank {other} has another device than rank 0 ({keys[other]}); costs are those of rank 0's")
    load = dict.fromkeys(workers, 0)
    work: dict[Shape, list[int]] = {}
    cost = {(shape, k): k * options.flops(shape, device) for shape, sizes in missing.items() for k in sizes}
    for (shape, k), flops in sorted(cost.items(), key=lambda item: (-item[1], item[0])):
        worker = min(workers, key=lambda r: (load[r], r))
        load[worker] += flops
        if worker == rank:
            work.setdefault(shape, []).append(k)
    if rank == 0:
        name = keys[0].device
        _log.info("timing %d batches of the Muon update on %s, %g s per rank at most", len(cost), name, budget_s)
    fault: str | None = None
    entries: Entries = {}
    first = FirstError()  # the others wait in share
    with first:
        build_kernels(work, device=device, options=options)
    # All together before anybody's clock runs: to compile takes the host's processors, on which launches wait.
    share(lambda: None)
    with first:
        entries = measure({} if first.error else work, device=device, options=options, budget_s=budget_s)
    if (error := first.error) is not None:
        fault = f"rank {rank}: measuring Newton–Schulz on {device} failed: {type(error).__name__}: {error}"
    outcomes: list[Any] = share(lambda: (fault, entries))
    merged: dict[Shape, dict[int, Timing]] = {}
    for fault, entries in outcomes:
        if fault is not None:
            raise RuntimeError(f"{fault}; pass costs='flops' to plan without measuring")
        merged = merge_entries(merged, entries)
    return merged


def cost_table(counts: Mapping[Shape, int], entries: Entries, options: NsOptions, device: torch.device) -> CostTable:
    """Measured costs; a shape without one is scaled by FLOPs from the measured shape that is nearest in FLOPs."""
    medians = {
        shape: {k: t.median_ns for k, t in timings.items()} for shape, timings in entries.items() if 1 in timings
    }
    if not medians:
        return CostTable.from_flops(counts)

    flops = {shape: options.flops(shape, device) for shape in {*counts, *medians}}
    table, sources = {}, {}
    for shape in sorted(counts):
        if shape in medians:
            table[shape], sources[shape] = medians[shape], "measured"
        else:
            near = min(medians, key=lambda other: (abs(math.log(flops[other] / flops[shape])), other))
            table[shape] = {1: max(1, medians[near][1] * flops[shape] // flops[near])}
            sources[shape] = "estimated"
    return CostTable(table, sources)


def link_ns_per_byte(domain: Domain) -> float:
    """Measured cost of a byte that an all-to-all brings, as a power of two. Collective; rank 0's is what counts."""
    part = max(_PROBE_BYTES // domain.world, _PROBE_BYTES_PER_RANK) // 4
    sent = torch.zeros(part * domain.world, dtype=torch.float32, device=domain.device)
    received = torch.empty_like(sent)
    exchange = partial(dist.all_to_all_single, received, sent, group=domain.group)
    return _rounded(_least_ns(domain, "measurement of an all-to-all", exchange) / max(1, sent.numel() * 4))


def link_latency_ns(domain: Domain) -> float:
    """Measured cost of an all-reduce of one number, likewise."""
    number = torch.zeros(1, device=domain.device)
    return _rounded(
        _least_ns(domain, "measurement of an all-reduce", partial(dist.all_reduce, number, group=domain.group))
    )


def _least_ns(domain: Domain, what: str, collective: Callable[[], object]) -> float:
    best = math.inf
    for probe in range(_PROBES + 1):
        domain.monitor.synchronize()
        start = time.perf_counter()
        with domain.monitor.watch(what):
            collective()
            domain.monitor.synchronize()
        if probe:  # the first one sets up connections
            best = min(best, time.perf_counter() - start)
    return 1e9 * best


def _rounded(ns: float) -> float:
    """To a power of two, so that plans do not differ from run to run by noise."""
    return float(2.0 ** round(math.log2(max(ns, 2**-20))))
