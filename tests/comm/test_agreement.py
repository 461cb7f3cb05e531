"""What one vote of all ranks tells each of them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from dmuon.comm.agreement import Vote
from dmuon.layout.topology import GlobalRank

DIGESTS = st.sampled_from([0, 1, 2**31 - 2, 2**31 - 1])  # 31 bits, with both ends: digests and their negatives travel


@st.composite
def elections(draw: st.DrawFn) -> list[Vote]:
    """One vote per rank, on as many parameters each."""
    world, count = draw(st.integers(1, 5)), draw(st.integers(0, 4))
    return [
        Vote(
            flags=draw(st.lists(st.booleans(), min_size=count, max_size=count)),
            digest=draw(DIGESTS),
            changed=draw(st.booleans()),
            fault=draw(st.sampled_from([None, GlobalRank(rank)])),
        )
        for rank in range(world)
    ]


@given(elections())
def test_the_maximum_of_all_votes_tells_what_all_ranks_said(votes: list[Vote]) -> None:
    encoded = [vote.encode() for vote in votes]
    assert {numbers.nbytes for numbers in encoded} == {Vote.nbytes(len(votes[0].flags))}
    verdict = Vote.decode(torch.stack(encoded).amax(0).tolist())
    assert verdict.flags == tuple(map(any, zip(*(vote.flags for vote in votes), strict=True)))
    assert verdict.same_collectives == (len({vote.digest for vote in votes}) == 1)
    assert verdict.same_change == (len({vote.changed for vote in votes}) == 1)
    assert verdict.fault == max((vote.fault for vote in votes if vote.fault is not None), default=None)
