"""The order in which the pipeline starts collectives, and how many are under way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmuon.platform.streams import PhaseTimer
from dmuon.step.rounds import Round, Schedule, Step, prefetch_windows

Event = tuple[str, str]  # what happens, and to which round

ALONE = "."


class Recorded(Round):
    """A round of a domain, or of nobody else, that writes down what the pipeline does with it."""

    index = 0

    def __init__(self, name: str, events: list[Event], copied: bool) -> None:
        self.name = name
        self.copied = copied
        self.batches = []
        self.exchanged = name[0] != ALONE
        self.queue = ord(name[0])
        self._events = events

    def run(self, step: Step) -> Iterator[bool]:
        self._events.append(("gather", self.name))
        yield False
        self._events.append(("scatter", self.name))
        if self.copied:
            yield False
            self._events.append(("copies", self.name))
        yield True
        self._events.append(("finish", self.name))


def driven(domains: str, prefetch: int, copied: str = "") -> list[Event]:
    """What happens on a rank with these rounds, each named by its domain and its number within that.

    Args:
        copied: domains whose updates go on to copies.
    """
    events: list[Event] = []
    count: Counter[str] = Counter()
    rounds = []
    for domain in domains:
        rounds.append(Recorded(f"{domain}{count[domain]}", events, domain in copied))
        count[domain] += 1
    step = Step([{}], set(), PhaseTimer(torch.device("cpu")))
    done = [round_ for round_ in Schedule(rounds, prefetch).drive(step) if round_ is not None]
    assert sorted(r.name for r in done) == sorted(r.name for r in rounds)
    return events


def collectives(events: list[Event], domain: str) -> list[Event]:
    return [(what, name) for what, name in events if name[0] == domain and what != "finish"]


@st.composite
def two_ranks(draw: st.DrawFn) -> tuple[str, str]:
    """Rounds of two ranks, which share ``a`` and ``b`` in one order; each has others of its own, and rounds alone."""
    common = draw(st.text("ab", min_size=1, max_size=6))
    ranks = []
    for own in ("cd", "ef"):
        between = [draw(st.text(own + ALONE, max_size=3)) for _ in range(len(common) + 1)]
        ranks.append(between[0] + "".join(a + b for a, b in zip(common, between[1:], strict=True)))
    return ranks[0], ranks[1]


@given(two_ranks(), st.integers(0, 4), st.sampled_from(["", "a", "ab", "acf", "abcdef"]))
@settings(max_examples=400, deadline=None)
def test_two_ranks_start_the_collectives_of_a_domain_in_one_order(
    ranks: tuple[str, str], prefetch: int, copied: str
) -> None:
    """With prefetching, that is each domain's own order; without, also that of domains among each other."""
    first, second = (driven(domains, prefetch, copied) for domains in ranks)
    for domain in "ab":
        assert collectives(first, domain) == collectives(second, domain)
    if prefetch == 0:
        common = [[event for event in events if event[1][0] in "ab"] for events in (first, second)]
        assert common[0] == common[1]


@given(st.text("abc" + ALONE, max_size=10), st.integers(0, 4))
@settings(max_examples=400, deadline=None)
def test_no_more_rounds_are_under_way_than_the_window_says(domains: str, prefetch: int) -> None:
    """Before a round computes, at most the ``prefetch`` next ones of any domain, and of its own, have started."""
    exchanged = [domain for domain in domains if domain != ALONE]
    windows = prefetch_windows([ord(domain) for domain in exchanged], prefetch)
    assert all(window[0] == turn for turn, window in enumerate(windows))
    names = [f"{domain}{exchanged[:turn].count(domain)}" for turn, domain in enumerate(exchanged)]
    waiting: set[str] = set()  # gathered, and not computed
    unfinished = 0
    turn = 0
    for what, name in driven(domains, prefetch):
        if what == "gather":
            waiting.add(name)
        elif what == "scatter":
            waiting.remove(name)
            unfinished += 1
            turn += name[0] != ALONE
        else:
            unfinished -= 1
        each = Counter(one[0] for one in waiting)
        assert all(count <= prefetch + 1 for count in each.values())
        ahead = {names[i] for window in windows[: turn + 1] for i in window} | {*names[turn : turn + prefetch]}
        assert {one for one in waiting if one[0] != ALONE} <= ahead
        assert unfinished <= (2 if prefetch else 1)


@pytest.mark.parametrize(
    ("domains", "prefetch", "windows"),
    [
        ("aa", 1, [[0, 1], [1]]),
        ("aba", 1, [[0, 1, 2], [1, 2], [2]]),
        ("abba", 0, [[0], [1], [2], [3]]),
        ("abbba", 2, [[0, 1, 2, 4], [1, 2, 3], [2, 3, 4], [3, 4], [4]]),
    ],
)
def test_windows_count_the_next_rounds_and_those_of_the_same_domain(
    domains: str, prefetch: int, windows: list[list[int]]
) -> None:
    assert prefetch_windows([ord(domain) for domain in domains], prefetch) == windows
