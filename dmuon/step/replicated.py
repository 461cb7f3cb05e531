"""Matrices that every rank with a part of them orthogonalizes: strategy ``"replicated"``, NS replication elsewhere.

Momentum stays sharded. Each rank gets the update of a whole matrix by an all-to-all in which all send to all, which are
the bytes of an all-gather, and keeps its part of the result: nothing comes back, and a step waits for one exchange
instead of two. With copies each one gathers for itself, and only norms cross, where pieces travel in half precision.
What ranks compute twice is the same, bit for bit, on devices that are alike.

Communication, of ``g`` ranks with equal parts of an ``(m, n)`` matrix: each gets ``mn (g - 1) / g`` elements. By owners
it is the same for the owner alone, and ``mn / g`` back for the others.

Break-even: by owners each rank orthogonalizes ``1 / g`` of the matrices, here all of them. So it gains where
``(1 - 1 / g) · NS`` of all these matrices takes less time than a scatter, which is its latency if they are small.
"""

from __future__ import annotations

from dmuon.step.rounds import ExchangedRound


class ReplicatedRound(ExchangedRound):
    """Batches that each rank orthogonalizes whose parts are in them."""

    has_owners = False
