"""What a byte costs that an all-to-all brings, measured."""

from __future__ import annotations

import math
import time

import torch
import torch.distributed as dist

from dmuon.comm.domain import Domain

_PROBE_BYTES = 2**20
_PROBE_BYTES_PER_RANK = 2**16  # with less, latency would count as cost of bytes
_PROBES = 3


def link_ns_per_byte(domain: Domain) -> float:
    """Measured cost of a byte that an all-to-all brings, as a power of two. Collective; rank 0's is what counts."""
    part = max(_PROBE_BYTES // domain.world, _PROBE_BYTES_PER_RANK) // 4
    sent = torch.zeros(part * domain.world, dtype=torch.float32, device=domain.device)
    received = torch.empty_like(sent)
    best = math.inf
    for probe in range(_PROBES + 1):
        domain.monitor.synchronize()
        start = time.perf_counter()
        with domain.monitor.watch("measurement of an all-to-all"):
            dist.all_to_all_single(received, sent, group=domain.group)
            domain.monitor.synchronize()
        if probe:  # the first one sets up connections
            best = min(best, time.perf_counter() - start)
    per_byte = 1e9 * best / max(1, sent.numel() * 4)
    # Rounded, so that plans do not differ from run to run by noise.
    return float(2.0 ** round(math.log2(max(per_byte, 2**-20))))
