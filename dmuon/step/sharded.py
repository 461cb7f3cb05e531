"""Matrices that ranks orthogonalize together, a slice each: strategy ``"sharded"``, tensor-parallel Newton-Schulz.

Pieces travel by one all-to-all to slices along the long side, ``(m, n / g)`` with ``m <= n``, and back by another, to
all copies. Where pieces are such slices, as those of tensor parallelism over the long side, and where ranks have
copies, nothing travels before. The Gram matrix ``R = XXᵀ`` is the sum of those of the slices: one all-reduce of ``m²``
elements a restart block, in fp32 or wider; where storage is half, each rank's part is rounded to it before, and the sum
after. What is ``m × m`` every rank computes for itself, and ``QX`` is of its slice. In fp32 and wider there is no such
part where slices are thinner than ``m / 2``: of them ``aX + R (bX + cRX)`` takes less than ``R²``. Norms are joined
before, for all rounds of a step together.

The ``g`` ranks are all of the domain, or a *team*: neighbours, of which the other ranks go on with other matrices. All
their pieces come from one copy then. A team sums over a group of its own, which the ranks of the domain make together
when the optimizer is built. Its sums stand where those of the whole domain would stand, between the end of a round's
gather and the start of its scatter. So all collectives of a domain and its teams have one order, in which each rank
starts those that it takes part in: the first one that has not ended waits for no later one, and nothing hangs.

Communication, of ``g`` ranks: each gets ``mn / g`` elements before and after, and sums ``m²`` in each of the restart
blocks: two with all presets in fp32 and fp16, or all five steps where slices are thinner than ``1.5 m``, and in bf16.

Break-even: products with ``X``, ``2 m² n`` multiply-adds a block, are divided by ``g``, those of ``m × m`` are not.
With thin slices a matrix takes ``(2 n / (g m) + 1) / (2 n / m + 1)`` of its time, or ``3 n / (g m)`` in place of the
first, and five all-reduces. That gains where ranks would wait for one that has a large matrix, but never where owners
have enough matrices to share evenly.

To divide ``R²`` by rows and gather it would save ``m³ (1 / 2 - 1 / g)`` multiply-adds a step, as a symmetric product
takes half of a whole one and rows of it do not, and bring ``m² (1 - 1 / g)`` elements. For ``m`` of 4096 in fp16 on 8
H100 that is 108 µs less for 79 µs more over NVLink and 32 µs of latency; over a network 638 µs more, and with two ranks
there is nothing to save. It would gain from about 8192 on, a fifth of such a matrix, over NVLink alone.
"""

from __future__ import annotations

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
    """Batches of which all ranks of the domain, or those of a team, orthogonalize slices; some may be empty."""

    has_owners = False
    joins_norms = True

    def orthogonalize(
        self, numerics: Numerics, batch: Batch, run_of: tuple[int, int], x: Tensor, norms: Tensor, timer: PhaseTimer
    ) -> tuple[Tensor, Done]:
        """The update of slices, ``(k, …)``, of matrices with these ``norms``."""
        assert isinstance(batch, SharedBatch)
        variant = variant_of(numerics, batch, x.device)
        total = partial(_add_up_over, self.domain, len(batch.parcel.team), f"Gram matrices of {self._what}")
        wide = batch.shape[0] <= batch.shape[1]
        with timer.phase("ns"):
            update = run(x if wide else x.mT, variant, numerics.sequence, numerics.storage, total)
        return update if wide else update.mT, Done(batch.labels, batch.shape, variant, norms)


def variant_of(numerics: Numerics, batch: Batch, device: torch.device) -> Variant:
    """How Newton–Schulz runs on slices: on all ranks with as many restarts."""
    assert isinstance(batch, SharedBatch)
    slices = len(batch.parcel.team or batch.parcel.spread.holders)
    return sliced_variant(batch.shape, batch.count, slices, numerics.sequence, numerics.storage, device)


def _add_up_over(domain: Domain, size: int, what: str, gram: Tensor) -> None:
    """Over this rank's team of that ``size``, or the domain for 0."""
    group, lane = (domain.teams[size].group, None) if size else (domain.group, domain.lane)
    domain.monitor.start(lane, what, partial(dist.all_reduce, gram, group=group, async_op=True)).wait()
