"""How many blocks communicate together: the least that hide a lap, by hand and by search."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmuon.planning.merging import blocks_to_merge, merge_bytes


@pytest.mark.parametrize(
    ("lap", "bytes_s", "compute", "blocks"),
    [
        (1.0, 1.0, 3.0, 1),  # one block computes for 3 while 2 pass
        (3.0, 1.0, 3.0, 2),  # 4 for one, 5 for two, which compute for 6
        (100.0, 1.0, 3.0, 8),  # no more than 8
        (0.2, 1.0, 0.5, 2),  # bytes alone take longer: latency adds a tenth
        (0.0, 1.0, 0.5, 1),
        (1.0, 0.0, 0.0, 1),  # nothing to hide behind, nothing to send
    ],
)
def test_merged_blocks_by_hand(lap: float, bytes_s: float, compute: float, blocks: int) -> None:
    assert blocks_to_merge(lap, bytes_s, compute) == blocks
    assert merge_bytes(10, lap, bytes_s, compute) == (10 * blocks if blocks > 1 else 0)


times = st.floats(1e-6, 1e3)


@given(times, times, times)
def test_no_fewer_blocks_hide_the_lap(lap: float, bytes_s: float, compute: float) -> None:
    def hidden(n: int, rounding: float) -> bool:
        return lap + n * bytes_s <= n * max(compute, 1.1 * bytes_s) * (1 + rounding)

    n = blocks_to_merge(lap, bytes_s, compute)
    assert hidden(n, 1e-9) or n == 8
    assert n == 1 or not hidden(n - 1, -1e-9) or lap < 1e-9
