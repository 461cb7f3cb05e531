"""What a simulation of operations alone leaves out, as terms of their own, and how far predictions are off with them.

``python bench/simulate.py --fit`` finds these constants and writes how each case comes out to
``bench/results/simulation-fit.json``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Terms:
    """Jitter, contention and host time.

    Attributes:
        jitter: standard deviation of the logarithm of every computation's duration, independent by rank.
        contention: how much longer computation takes while a collective of owners is under way, as a part of the time
            of both, beyond what FSDP2's collectives do to it; the efficiency of forward and backward has those.
        host_module_s: of the host for a weight in forward, backward and AdamW, whatever shards it.
        host_weight_s: of the host for a dedicated weight in a step.
        host_call_s: of the host for a collective of dedicated weights.
        host_exchanged_s: of the host for an exchanged weight in ``step()``.

    Raises:
        ValueError: a term that is negative or not finite.
    """

    jitter: float = 0.0
    contention: float = 0.0
    host_module_s: float = 0.0
    host_weight_s: float = 0.0
    host_call_s: float = 0.0
    host_exchanged_s: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{field.name}={value!r} must be at least 0; fit it with bench/simulate.py --fit")


NO_TERMS = Terms()
FITTED = Terms(
    jitter=0.02,
    contention=0.15,
    host_module_s=7.31e-05,
    host_call_s=1.68e-05,
    host_exchanged_s=1.47e-05,
)
ERROR = 0.034  # of an overhead: root mean square over published cases, each predicted by terms fitted to the others


def verdict(overhead: float, error: float = ERROR) -> str:
    """An overhead with its error, or that there is none which could be told from 0.

    Args:
        overhead: of one predicted step over another, less 1.
    """
    return "equal" if abs(overhead) < error else f"{overhead:+.1%} ± {error:.1%}"
