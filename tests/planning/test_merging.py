"""How many blocks communicate together: the least that hide a lap, by hand and by search."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmuon.planning.merging import LineTimes, blocks_to_merge, merge_bytes

ROW = (1.0, 1.0)


@pytest.mark.parametrize(
    ("lines", "compute", "blocks"),
    [
        ([ROW], 3.0, 1),  # one block computes for 3 while 2 pass
        ([(3.0, 1.0)], 3.0, 2),  # 4 for one, 5 for two, which compute for 6
        ([(100.0, 1.0)], 3.0, 8),  # no more than 8
        ([(0.2, 1.0)], 0.5, 2),  # bytes alone take longer: latency adds a tenth
        ([(0.0, 1.0)], 0.5, 1),
        ([(1.0, 0.0)], 0.0, 1),  # nothing to hide behind, nothing to send
        ([], 3.0, 1),
        ([ROW, (7.0, 0.5)], 3.0, 3),  # replicas are many: 8 for two, 8.5 for three, which compute for 9
        ([(7.0, 0.5), ROW], 3.0, 3),
        ([(0.2, 1.0), (0.2, 2.0)], 0.5, 1),  # the slower line sets the pace: it takes 2.2 for one, the other 1.2
    ],
)
def test_merged_blocks_by_hand(lines: list[tuple[float, float]], compute: float, blocks: int) -> None:
    times = [LineTimes(*line) for line in lines]
    assert blocks_to_merge(times, compute) == blocks
    assert merge_bytes(10, times, compute) == (10 * blocks if blocks > 1 else 0)


times = st.floats(1e-6, 1e3)


@given(st.lists(st.builds(LineTimes, times, times), min_size=1, max_size=2), times)
def test_no_fewer_blocks_hide_the_laps(lines: list[LineTimes], compute: float) -> None:
    pace = max(compute, 1.1 * max(line.bytes_s for line in lines))

    def hidden(n: int, rounding: float) -> bool:
        return all(line.lap_s + n * line.bytes_s <= n * pace * (1 + rounding) for line in lines)

    n = blocks_to_merge(lines, compute)
    assert hidden(n, 1e-9) or n == 8
    assert n == 1 or not hidden(n - 1, -1e-9) or max(line.lap_s for line in lines) < 1e-9
