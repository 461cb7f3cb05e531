"""What is made of updates between their arrival and the weights, of matrices that lie anywhere.

A member of Muon's family is one :class:`Scaling`, a file each: ``dmuon/step/normuon.py``, ``dmuon/step/adamuon.py`` and
``dmuon/step/hyperball.py``. It is a generator that stops where ranks must add something up, such as norms of matrices
of which each has a part. So it is written once for whole matrices, where that adds up nothing, and for parts of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dmuon.comm.domain import Domain
from dmuon.step.batches import Batch, SharedBatch

EPS = 1e-8  # of the papers that divide by second moments


@dataclass(slots=True, eq=False)
class Arrived:
    """The update of a batch, as far as this rank has parts of the matrices.

    Attributes:
        update: ``(k, …)``; None where this rank has no part of any. It is replaced by what is made of it.
        span: range of the batch's parameters of which it is.
        runs: ranges in that of parameters that are updated.
    """

    batch: Batch
    update: Tensor | None
    span: tuple[int, int]
    runs: Sequence[tuple[int, int]]

    @property
    def count(self) -> int:
        """Matrices, on whichever ranks they lie."""
        return (self.span[1] - self.span[0]) * self.batch.each

    def rows(self, run: tuple[int, int]) -> slice:
        """Of the update, those of the parameters of ``run``."""
        return slice((run[0] - self.span[0]) * self.batch.each, (run[1] - self.span[0]) * self.batch.each)

    def weights(self) -> list[Tensor]:
        """This rank's part of each matrix: of the weights, or of their masters, or a copy of it."""
        return self.batch.split(self.batch.weights(*self.span))

    @property
    def is_joined(self) -> bool:
        """Whether ranks add up what they have of the matrices. The same on all that share them."""
        if not isinstance(self.batch, SharedBatch):
            return False
        return self.batch.parcel.spread.copies > 1 or len(self.batch.parcel.to_owner.senders) > 1

    @property
    def is_counted(self) -> bool:
        """Whether what this rank has counts in these sums: of copies those of the owner do."""
        return not self.is_joined or (
            isinstance(self.batch, SharedBatch) and self.batch.domain.position in self.batch.parcel.to_owner.senders
        )


class Scaling(ABC):
    """What is made of the updates of some groups.

    Attributes:
        key: of its moments in the optimizer's state.
        moments: by ``id`` of the parameter, this rank's; they begin as zeros. Empty if it has no state.
    """

    key = ""
    moments: Mapping[int, Tensor] = {}

    @abstractmethod
    def stages(self, group: Mapping[str, Any], arrived: Sequence[Arrived]) -> Iterator[tuple[Sequence[Tensor], str]]:
        """Replace the updates. It stops where tensors are to be summed over the domain, in place, and says which.

        They are the same on all ranks of the domain.
        """


def scale(
    scalings: Iterable[Scaling], group: Mapping[str, Any], arrived: Sequence[Arrived], domain: Domain | None = None
) -> None:
    """Replace the updates by what ``scalings`` make of them, one after the other. Collective over the domain."""
    for scaling in scalings:
        for sums, what in scaling.stages(group, arrived):
            if sums:
                assert domain is not None, "what one rank has alone adds up nothing"
                flat = torch.cat([one.reshape(-1) for one in sums])
                launch = partial(dist.all_reduce, flat, group=domain.group, async_op=True)
                domain.monitor.start(domain.lane, f"{what} of {len(sums)} batches", launch).wait()
                pairs = zip(flat.split([one.numel() for one in sums]), sums, strict=True)
                torch._foreach_copy_(list(sums), [part.view(one.shape) for part, one in pairs])


def joined(arrived: Sequence[Arrived], terms: Sequence[Tensor]) -> list[Tensor]:
    """Those of ``terms``, one of each batch, that ranks add up; zeros where what this rank has does not count."""
    return [
        of_batch if one.is_counted else of_batch.zero_()
        for one, of_batch in zip(arrived, terms, strict=True)
        if one.is_joined
    ]


def fold_moments(batch: Batch, moments: Sequence[Tensor], values: Tensor, beta: float) -> Tensor:
    """Fold ``values``, ``(k, …)``, into moments of some parameters, which lie as ``batch`` does; what they are then."""
    parts = batch.split(moments)
    if not parts:  # matrices of which this rank has nothing
        return values
    torch._foreach_lerp_(parts, list(values.unbind(0)), 1 - beta)
    batch.put(moments, parts)
    return torch.stack(parts)


def over_norms(shape: tuple[int, int], squared_norms: Tensor) -> Tensor:
    """By what matrices of ``shape`` are multiplied to have the norm of an orthogonal factor; zeros stay zeros."""
    norms = squared_norms.sqrt()
    return torch.where(norms == 0, 0.0, min(shape) ** 0.5 / norms)
