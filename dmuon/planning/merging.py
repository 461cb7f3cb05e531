"""How many neighbouring blocks should communicate together, by how long a message takes to go around."""

from __future__ import annotations

import math

_MOST_BLOCKS = 8  # whole weights of one more merged unit are in memory while another computes
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
