"""What a step did, in numbers: of this rank, and matrix by matrix for whoever asked for a record of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import torch
import torch.distributed as dist

from dmuon.comm.norm import all_reduce
from dmuon.model.matrix_spec import Names
from dmuon.step.residency import Residency
from dmuon.step.update import Done, MatrixStats, StepRecord, Terms, stats_of


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
        nonfinite=tuple(
            names.get(id(p), "a parameter that no group holds") + ("" if i is None else f"[{i}]") for p, i in nonfinite
        ),
    )


class MatrixRecord:
    """What one step did to each matrix: as ``dmuon.Muon.record_next_step`` returns it, filled by the next step.

    The step computes norms on the device and waits for nothing. Reading waits for an accelerator.
    """

    def __init__(self) -> None:
        self._step: StepRecord | None = None
        self._residencies: Sequence[Residency] = ()
        self._names: Names = {}

    def fill(self, step: StepRecord, residencies: Sequence[Residency], names: Names) -> None:
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
        columns = torch.cat([one.columns for one in terms], 1).T.tolist()
        shapes = [(label, one.shape) for one in terms for label in one.labels]
        found = {}
        for ((param, number), shape), column in zip(shapes, columns, strict=True):
            stats = stats_of(column, shape)
            assert stats is not None, "it was updated"
            found[self._name(id(param), number)] = stats
        return found

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
                for (param, number, shape), column in zip(shared.matrices, summed.T.tolist(), strict=True):
                    stats = stats_of(column, shape)
                    if stats is not None:
                        found[self._name(id(param), number)] = stats
        return found

    def _terms(self) -> list[Terms]:
        if self._step is None:
            raise RuntimeError(
                "this record is empty: record_next_step() is for the step that follows, which was not taken or failed"
            )
        return self._step.terms

    def _name(self, param: int, number: int | None) -> str:
        name = self._names.get(param, "a parameter that no group holds")
        return name if number is None else f"{name}[{number}]"
