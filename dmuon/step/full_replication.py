"""Matrices whose momentum every rank with a part of them keeps whole: strategy ``"full_replication"``.

Gradients travel instead of updates, by an all-to-all in which all send to all. Each rank folds whole gradients into
whole momentum, orthogonalizes, and keeps its part: nothing comes back. Its part of the momentum is written to where
state shows it, as by any other strategy. After a load, or an edit of any rank's part, the next step gathers momentum
as well.

Communication, of ``g`` ranks with equal parts of an ``(m, n)`` matrix: each gets ``mn (g - 1) / g`` elements in the
dtype of momentum, and in the step after a load twice as many.

Break-even: none. ``"replicated"`` sends as much, or half where Newton–Schulz begins in half precision, keeps ``mn / g``
elements of momentum instead of ``mn (1 + 1 / g)``, and folds ``1 / g`` of the gradients. It is there to be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from dmuon.comm.domain import AllToAll, Redistribution
from dmuon.kernels import carrier_dtype, normalized_momentum
from dmuon.step.batches import Bundle, SharedBatch
from dmuon.step.replicated import ReplicatedRound
from dmuon.step.rounds import Step
from dmuon.step.update import Numerics, in_rows, kernel_of


class FullReplicationRound(ReplicatedRound):
    """Batches of which each rank with parts of them keeps the momentum of whole matrices.

    Attributes:
        momenta: by number of the batch, ``(count, m, n)``; None until a step has gathered them from all ranks.
    """

    def __init__(self, index: int, batches: Sequence[SharedBatch], what: str) -> None:
        super().__init__(index, batches, what)
        self.momenta: dict[int, Tensor] | None = None
        self._coming: Redistribution | None = None
        self._parts = [AllToAll([after], self.domain) for _, after in self.routes]  # this rank's, of what it has whole

    def fold(self, step: Step) -> None:
        self._coming = None  # a step before may have failed
        if self.momenta is None:
            parts: dict[int, Tensor] = {}
            for bundle in self.bundles:
                momentum = bundle.joint.momentum(0, len(bundle.joint.params))
                parts |= zip(bundle.numbers, momentum.split(bundle.counts), strict=True)
            with step.timer.phase("exchange"):
                self._coming = Redistribution(self._before, parts, self._like, f"momentum of {self._what}")

    def run(self, step: Step) -> Iterator[bool]:
        stages = super().run(step)
        next(stages, None)
        yield False

        if self._coming is not None:
            with step.timer.phase("exchange"):
                gathered = self._coming.wait().items()
            dtypes = [batch.momenta[0].dtype for batch in self.batches]
            self.momenta = {i: momentum.to(dtypes[i], copy=True) for i, momentum in gathered}
            self._coming = None
        yield from stages

    def _sent(self, step: Step, bundle: Bundle, numerics: Numerics, norms: Sequence[Tensor] | None) -> Tensor:
        """Gradients, which have not gone anywhere yet."""
        batch = bundle.joint
        return torch.stack(batch.gradients(0, len(batch.params), step.options[self.index]["l2"])).to(batch.dtype)

    def _begun(
        self, step: Step, number: int, x: Tensor, numerics: Numerics, norms: Sequence[Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Whole gradients go into whole momentum, and this rank's part of that to where state shows it."""
        group, batch = step.options[self.index], self.batches[number]
        assert self.momenta is not None, "the same step has gathered them"
        kept = self.momenta[number]
        kernel = partial(kernel_of(group, normalized_momentum), eps=group["eps"])
        kernel = partial(kernel, beta=group["momentum"], nesterov=group["nesterov"])
        runs = batch.runs(step.present)
        found, norms_of_runs = [], []
        for start, end in runs:
            rows = slice(start * batch.each, end * batch.each)
            momentum = kept[rows].to(batch.dtype)
            of_run, norms_of_run = kernel(list(x[rows].unbind(0)), momentum, storage=numerics.storage)
            kept[rows] = momentum
            found.append(of_run)
            norms_of_runs.append(norms_of_run)
        [part] = Redistribution(self._parts[number], {0: kept}, kept, "nothing").wait().values()
        batch.put_momentum(0, len(batch.params), part)
        update = in_rows(found, batch, runs, x.shape, carrier_dtype(x.device, numerics.storage))
        return update, in_rows(norms_of_runs, batch, runs, (len(x),), torch.float64)
