"""Matrices that ranks orthogonalize together, a slice each: strategy ``"sharded"``, tensor-parallel Newton-Schulz.

Pieces travel by one all-to-all to slices along the long side, ``(m, n / g)`` with ``m <= n``, and back by another, to
all copies. Where pieces are such slices, as those of tensor parallelism over the long side, and where ranks have
copies, nothing travels before. The Gram matrix ``XXᵀ`` is the sum of those of the slices: one all-reduce of ``m²``
elements a restart block, in fp32 or wider; where storage is half, each rank's part is rounded to it before, and the sum
after. What is ``m × m`` every rank computes for itself, and ``QX`` is of its slice. Norms are joined before, for all
rounds of a step together.

Communication, of ``g`` ranks: each gets ``mn / g`` elements before and after, and sums ``m²`` in each of the restart
blocks: two with all presets in fp32 and fp16, or all five steps where slices are thinner than ``1.5 m``, and in bf16.

Break-even: products with ``X``, ``2 m² n`` multiply-adds a block, are divided by ``g``, those of ``m × m`` are not.
With thin slices a matrix takes ``(2 n / (g m) + 1) / (2 n / m + 1)`` of its time, and five all-reduces. That gains
where one matrix is alone on the slowest rank, but never where owners have enough matrices to share evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from dmuon.comm.domain import Domain
from dmuon.kernels import Variant, run, sliced_variant
from dmuon.platform.streams import PhaseTimer
from dmuon.step.batches import Batch, SharedBatch
from dmuon.step.rounds import ExchangedRound
from dmuon.step.update import Done, Numerics


class ShardedRound(ExchangedRound):
    """Batches of each matrix of which all ranks of the domain orthogonalize a slice; of some it may be empty."""

    has_owners = False
    joins_norms = True

    def __init__(self, index: int, batches: Sequence[SharedBatch], what: str) -> None:
        super().__init__(index, batches, what)
        self._total = partial(_add_up_over, self.domain, f"Gram matrices of {what}")

    def orthogonalize(
        self, numerics: Numerics, batch: Batch, run_of: tuple[int, int], x: Tensor, norms: Tensor, timer: PhaseTimer
    ) -> tuple[Tensor, Done]:
        """The update of slices, ``(k, …)``, of matrices with these ``norms``."""
        variant = variant_of(numerics, batch, x.device)
        wide = batch.shape[0] <= batch.shape[1]
        with timer.phase("ns"):
            update = run(x if wide else x.mT, variant, numerics.sequence, numerics.storage, self._total)
        return update if wide else update.mT, Done(batch.labels, batch.shape, variant, norms)


def variant_of(numerics: Numerics, batch: Batch, device: torch.device) -> Variant:
    """How Newton–Schulz runs on slices: on all ranks with as many restarts."""
    assert isinstance(batch, SharedBatch)
    slices = len(batch.parcel.holders)
    return sliced_variant(batch.shape, batch.count, slices, numerics.sequence, numerics.storage, device)


def _add_up_over(domain: Domain, what: str, gram: Tensor) -> None:
    launch = partial(dist.all_reduce, gram, group=domain.group, async_op=True)
    domain.monitor.start(domain.lane, what, launch).wait()
