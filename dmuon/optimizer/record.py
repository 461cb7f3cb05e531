"""What a step did, in numbers: of this rank, and matrix by matrix for whoever asked for a record of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, prod

import torch
import torch.distributed as dist
from torch import Tensor

from dmuon.comm.norm import all_reduce
from dmuon.model.matrix_spec import Names
from dmuon.step.residency import Residency
from dmuon.step.update import Done, Terms


@dataclass(frozen=True, slots=True)
class StepStats:
    """What the last ``step()`` did on this rank.

    Attributes:
        ns_matrices: matrices that were orthogonalized.
        ns_batches: batched Newton-Schulz calls that took.
        seconds: per phase: ``momentum``, ``ns``, ``apply``, ``publish``, ``adamw``; ``exchange`` of what several
            ranks hold; ``momentum in backward`` and ``ns in backward`` with ``overlap_backward``.
        overlapped: batches among them that ran during backward and were still right.
        variants: per shape, small side first, how Newton-Schulz ran: form, restarts, back end, matrices at once.
        nonfinite: the matrices whose momentum holds NaN or infinity; their weights do now too, nobody else's.
        qk_logits: with ``qk_clip``, by attention module, the largest logit of each head over all ranks that share it;
            ``-inf`` of a head of which nobody noted any.
        qk_max_logit: the largest of these; NaN if there is one.
        qk_clipped: heads among them that passed the threshold, those left out that are NaN or infinite.
    """

    ns_matrices: int
    ns_batches: int
    seconds: dict[str, float]
    overlapped: int
    variants: dict[tuple[int, int], str]
    nonfinite: tuple[str, ...]
    qk_logits: dict[str, tuple[float, ...]] = field(default_factory=dict)
    qk_max_logit: float = -inf
    qk_clipped: int = 0


def step_stats(done: Sequence[Done], seconds: dict[str, float], overlapped: int, names: Names) -> StepStats:
    """Of the updates ``done``. Waits for an accelerator."""
    variants: dict[tuple[int, int], str] = {}
    nonfinite = []
    for one in done:
        small, large = sorted(one.shape)
        variants[small, large] = str(one.variant)
        finite = one.norms.isfinite().tolist()
        nonfinite += [label for label, ok in zip(one.matrices, finite, strict=True) if not ok]
    return StepStats(
        ns_matrices=sum(len(one.matrices) for one in done),
        ns_batches=len(done),
        seconds=seconds,
        overlapped=overlapped,
        variants=dict(sorted(variants.items())),
        nonfinite=tuple(_name(names, *label) for label in nonfinite),
    )


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


class MatrixRecord:
    """What one step did to each matrix: as ``dmuon.Muon.record_next_step`` returns it, filled by the next step.

    The step computes norms on the device and waits for nothing. Reading waits for an accelerator.
    """

    def __init__(self) -> None:
        self._step: Sequence[Terms] | None = None
        self._residencies: Sequence[Residency] = ()
        self._names: Names = {}

    def fill(self, step: Sequence[Terms], residencies: Sequence[Residency], names: Names) -> None:
        """A step has been taken."""
        self._step, self._residencies, self._names = step, list(residencies), names

    def local(self) -> dict[str, MatrixStats]:
        """By name, of the matrices that this rank has whole. Communicates nothing.

        Those are what dmuon owns here, what this rank has alone, and what it has copies of. A matrix of a parameter
        that is made of several is called ``name[number]``.

        Raises:
            RuntimeError: the step has not been taken yet, or has failed.
        """
        terms = [one for one in self._terms() if one.numel == one.shape[0] * one.shape[1]]
        if not terms:
            return {}
        matrices = [(param, number, one.shape) for one in terms for param, number in one.labels]
        return self._named(matrices, torch.cat([one.columns for one in terms], 1))

    def gather(self) -> dict[str, MatrixStats]:
        """By name, of all matrices that this rank shares with others, and of those that it has alone.

        Collective over the ranks that share matrices: call it on all of them, or on none. All must have asked for a
        record of this step.

        Raises:
            RuntimeError: the step has not been taken yet, or has failed.
            CollectiveError: some of the ranks did not take part.
        """
        terms = self._terms()
        found = self.local()
        for residency in self._residencies:
            for shared in residency.shared():
                places = {(id(param), number): i for i, (param, number, _) in enumerate(shared.matrices)}
                summed = torch.zeros(4, len(places), dtype=torch.float64, device=shared.device)
                own = [one for one in terms if (id(one.labels[0][0]), one.labels[0][1]) in places]
                if own:
                    at = [places[id(param), number] for one in own for param, number in one.labels]
                    summed[:, torch.tensor(at, device=shared.device)] = torch.cat([one.columns for one in own], 1).to(
                        shared.device
                    )
                if dist.get_world_size(shared.group) > 1:
                    all_reduce(summed, dist.ReduceOp.SUM, shared.group, "statistics")
                found |= self._named(shared.matrices, summed)
        return found

    def _terms(self) -> Sequence[Terms]:
        if self._step is None:
            raise RuntimeError(
                "this record is empty: record_next_step() is for the step that follows, which was not taken or failed"
            )
        return self._step

    def _named(
        self, matrices: Sequence[tuple[Tensor, int | None, tuple[int, int]]], columns: Tensor
    ) -> dict[str, MatrixStats]:
        """By name, of those that were updated."""
        stats = [_stats_of(column, matrix[2]) for column, matrix in zip(columns.T.tolist(), matrices, strict=True)]
        pairs = zip(matrices, stats, strict=True)
        return {_name(self._names, *matrix[:2]): one for matrix, one in pairs if one is not None}


def _name(names: Names, param: Tensor, number: int | None) -> str:
    name = names.get(id(param), "a parameter that no group holds")
    return name if number is None else f"{name}[{number}]"


def _stats_of(total: Sequence[float], shape: tuple[int, int]) -> MatrixStats | None:
    """Of one matrix, whatever the number of copies; None of one that was not updated.

    Args:
        total: a column of :class:`Terms`, over all ranks that hold parts.
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
