"""What a step does to single matrices, in numbers that stay on the device until somebody asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from dmuon.comm.norm import local_terms

Label = tuple[Tensor, int | None]  # a parameter, and the number of a matrix in it if it is more than one


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """Of some matrices, of each of which this rank has a part with ``numel`` elements.

    Attributes:
        factor: by which the orthogonal factor was multiplied: the learning rate, scaled by shape.
        update: squared norms of the parts of the update without that factor, ``(k,)``, fp64.
        weight: squared norms of the parts of the new weights, ``(k,)``, fp64.
    """

    labels: tuple[Label, ...]
    shape: tuple[int, int]
    numel: int
    factor: float
    update: Tensor
    weight: Tensor


class StepRecord:
    """Terms of all matrices that one step updates, as they come. Nothing waits for an accelerator."""

    def __init__(self) -> None:
        self.terms: list[Terms] = []

    def note(
        self,
        labels: Sequence[Label],
        shape: tuple[int, int],
        factor: float,
        updates: Sequence[Tensor],
        weights: Sequence[Tensor],
    ) -> None:
        """Of ``k`` matrices.

        Args:
            shape: of each whole matrix.
            updates: what was subtracted ``factor`` times, this rank's part of each.
            weights: the parts of the new weights.
        """
        if not labels or not updates or not updates[0].numel():
            return
        numel = updates[0].numel()
        of_update = local_terms(list(updates), 2.0, None)
        of_weight = local_terms(list(weights), 2.0, None)
        self.terms.append(Terms(tuple(labels), shape, numel, factor, of_update, of_weight))


@dataclass(frozen=True, slots=True)
class MatrixStats:
    """What one step did to one matrix.

    Attributes:
        update_rms: root mean square of the elements of the update, without weight decay:
            ``‖W_new - (1 - lr · weight_decay) · W_old‖ / √(mn)``.
        effective_lr: what the orthogonal factor of the momentum was multiplied by: ``lr``, scaled by shape as
            ``adjust_lr_fn`` says.
        weight_norm: ``‖W_new‖``, the Frobenius norm after the step.
        update_ratio: the norm of the update over that of the weight.
    """

    update_rms: float
    effective_lr: float
    weight_norm: float
    update_ratio: float


def totals(terms: Sequence[Terms]) -> Tensor:
    """``(4, k)``, fp64: what parts add to squared norms of update and weight, elements, and those times the factor.

    Sums of them over ranks divided by the elements of the whole matrix are of as many copies as there are.
    """
    columns = []
    for one in terms:
        numel = one.update.new_full((len(one.labels),), float(one.numel))
        columns.append(torch.stack([one.update * one.factor**2, one.weight, numel, numel * one.factor]))
    return torch.cat(columns, 1)


def stats_of(total: Sequence[float], shape: tuple[int, int]) -> MatrixStats | None:
    """Of one matrix, whatever the number of copies; None of one that was not updated.

    Args:
        total: a column of :func:`totals`, over all ranks that hold parts.
    """
    update, weight, elements, weighted = total
    if not elements:
        return None
    copies = elements / prod(shape)
    update_norm, weight_norm = (update / copies) ** 0.5, (weight / copies) ** 0.5
    if weight_norm:
        ratio = update_norm / weight_norm
    else:
        ratio = float("inf") if update_norm else 0.0
    return MatrixStats(update_norm / prod(shape) ** 0.5, weighted / elements, weight_norm, ratio)
