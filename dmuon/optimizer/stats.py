"""What a step did, in numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from dmuon.step.update import Done


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


def step_stats(done: Sequence[Done], seconds: dict[str, float], overlapped: int, names: Mapping[int, str]) -> StepStats:
    """Of the updates ``done``. Waits for an accelerator.

    Args:
        names: of parameters, by ``id``.
    """
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
