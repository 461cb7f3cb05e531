"""How many neighbouring blocks should communicate together, by how long a message takes to go around."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from dmuon.comm.context import Comm
from dmuon.comm.lines import Line, gather, scratch
from dmuon.layout.buffer import lay_spans
from dmuon.platform.log import logger

_log = logger(__name__)

_MOST_BLOCKS = 8  # whole weights of one more merged unit are in memory while another computes
_PROBES = 5  # of each size, after one that sets up what is slow at first
_PROBE_BYTES = 2**22
_IN_VAIN = 1.1  # where bytes take longer than the computation, latency adds at most a tenth to them


class LineTimes(NamedTuple):
    """How long the weights of one block pass along a line of ranks: a row, or the columns side by side.

    Attributes:
        lap_s: seconds in which a message of no length goes around it.
        bytes_s: seconds that the weights take over its slowest link, without latency.
    """

    lap_s: float
    bytes_s: float


def blocks_to_merge(lines: Sequence[LineTimes], compute_s: float) -> int:
    """The fewest blocks whose computation hides the collective of the next ones on every line; at most 8.

    The weights of ``n`` blocks are on their way for ``lap_s + n * bytes_s`` while ``n`` blocks compute. Where bytes
    take longer than that on some line, they set the pace, and latency adds at most a tenth to it.

    Args:
        compute_s: seconds of one block's forward.
    """
    pace = max([compute_s, *(_IN_VAIN * line.bytes_s for line in lines)])
    needed = [math.ceil(line.lap_s / (pace - line.bytes_s)) for line in lines if pace > line.bytes_s]
    return min(_MOST_BLOCKS, max([1, *needed]))


def merge_bytes(block_bytes: int, lines: Sequence[LineTimes], compute_s: float) -> int:
    """``CommOptions(merge_bytes=…)`` for :func:`blocks_to_merge` blocks of ``block_bytes``; 0 merges nothing."""
    blocks = blocks_to_merge(lines, compute_s)
    return blocks * block_bytes if blocks > 1 else 0


def measured_merge_bytes(comm: Comm, block_bytes: int) -> int:
    """:func:`merge_bytes` by what the ranks of ``comm`` measure. Collective.

    How long blocks compute is not known: as long as their bytes pass the row and then the columns, it is taken to be.

    Args:
        block_bytes: weights of the largest block.
    """
    shards = comm.topology.shards
    lines = [(lanes.weights, part) for lanes, part in ((comm.row, 1), (comm.column, shards)) if lanes is not None]
    if not lines or not block_bytes:
        return 0
    times = [[_fastest(comm, line, nbytes) for nbytes in (1, _PROBE_BYTES)] for line, _ in lines]
    rates = [(short, max(long - short, 0.0) / _PROBE_BYTES) for short, long in times]
    measured = torch.tensor(rates, dtype=torch.float64, device=comm.device)
    with comm.monitor.watch("agreement on the time of a message"):
        dist.all_reduce(measured, dist.ReduceOp.MAX, group=comm.control)
    agreed = [(_rounded(lap_s), _rounded(byte_s)) for lap_s, byte_s in measured.tolist()]
    passing = [
        LineTimes(lap_s, byte_s * block_bytes / of) for (lap_s, byte_s), (_, of) in zip(agreed, lines, strict=True)
    ]
    found = merge_bytes(block_bytes, passing, sum(line.bytes_s for line in passing))
    if comm.position == 0:
        seconds = ", ".join(f"{lap_s:.3g} s and a byte {byte_s:.3g} s" for lap_s, byte_s in agreed)
        _log.info("a message takes %s: blocks merge up to %d bytes", seconds, found)
    return found


def _rounded(seconds: float) -> float:
    """To a power of two, so that noise does not make one run's blocks differ from another's."""
    return float(2.0 ** round(math.log2(max(seconds, 2.0**-60))))


def _fastest(comm: Comm, line: Line, nbytes: int) -> float:
    """Seconds of one broadcast along ``line``."""
    spans = lay_spans("broadcast", {0: nbytes}, len(line.ranks))
    region, parts = scratch("broadcast", spans, torch.uint8, comm.device)
    send = partial(gather, "broadcast", region, parts, line)
    best = math.inf
    for probe in range(_PROBES + 1):
        comm.monitor.synchronize()
        start = time.perf_counter()
        with comm.monitor.watch("measurement of a broadcast"):
            comm.monitor.start(None, "measurement of a broadcast", send).wait()
            comm.monitor.synchronize()
        if probe:
            best = min(best, time.perf_counter() - start)
    return best
