"""How many neighbouring blocks should communicate together, by how long a message takes to go around."""

from __future__ import annotations

import math
import time
from functools import partial

import torch
import torch.distributed as dist

from dmuon.comm.context import Comm
from dmuon.comm.lines import gather, scratch
from dmuon.layout.buffer import lay_spans
from dmuon.platform.log import logger

_log = logger(__name__)

_MOST_BLOCKS = 8  # whole weights of one more merged unit are in memory while another computes
_PROBES = 5  # of each size, after one that sets up what is slow at first
_PROBE_BYTES = 2**22
_IN_VAIN = 1.1  # where bytes take longer than the computation, latency adds at most a tenth to them


def blocks_to_merge(lap_s: float, bytes_s: float, compute_s: float) -> int:
    """The fewest blocks whose computation hides the collective of the next ones; at most 8.

    The weights of ``n`` blocks are on their way for ``lap_s + n * bytes_s`` while ``n`` blocks compute.

    Args:
        lap_s: seconds in which a message of no length goes around the ranks that shard.
        bytes_s: seconds that the weights of one block take over the slowest link, without latency.
        compute_s: seconds of one block's forward.
    """
    spare = max(compute_s, _IN_VAIN * bytes_s) - bytes_s
    return min(_MOST_BLOCKS, max(1, math.ceil(lap_s / spare))) if spare > 0 else 1


def merge_bytes(block_bytes: int, lap_s: float, bytes_s: float, compute_s: float) -> int:
    """``CommOptions(merge_bytes=…)`` for :func:`blocks_to_merge` blocks of ``block_bytes``; 0 merges nothing."""
    blocks = blocks_to_merge(lap_s, bytes_s, compute_s)
    return blocks * block_bytes if blocks > 1 else 0


def measured_merge_bytes(comm: Comm, block_bytes: int) -> int:
    """:func:`merge_bytes` by what the ranks of ``comm`` measure, whatever blocks compute meanwhile. Collective.

    Args:
        block_bytes: weights of the largest block.
    """
    line = comm.row or comm.column
    if line is None or not block_bytes:
        return 0
    short, long = (_fastest(comm, nbytes) for nbytes in (1, _PROBE_BYTES))
    measured = torch.tensor([short, max(long - short, 0.0) / _PROBE_BYTES], dtype=torch.float64, device=comm.device)
    with comm.monitor.watch("agreement on the time of a message"):
        dist.all_reduce(measured, dist.ReduceOp.MAX, group=comm.control)
    # Rounded, so that noise does not make one run's blocks differ from another's.
    lap_s, byte_s = (2.0 ** round(math.log2(max(value, 2.0**-60))) for value in measured.tolist())
    found = merge_bytes(block_bytes, lap_s, block_bytes * byte_s, 0.0)
    if comm.position == 0:
        _log.info("a message takes %.3g s and a byte %.3g s: blocks merge up to %d bytes", lap_s, byte_s, found)
    return found


def _fastest(comm: Comm, nbytes: int) -> float:
    """Seconds of one broadcast along the line of weights; of two levels a part of it along each rail, as blocks do."""
    lanes = comm.row or comm.column
    assert lanes is not None, "weights travel"
    line = lanes.weights
    spans = lay_spans("broadcast", dict.fromkeys(line.firsts, math.ceil(nbytes / len(line.firsts))), len(line.ranks))
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
