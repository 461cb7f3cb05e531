"""Running the rounds of a step: the next ones travel while one is orthogonalized."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from dmuon.platform.timing import PhaseTimer
from dmuon.step.rounds import Round
from dmuon.step.update import Done

__all__ = ["drive", "prefetch_windows"]


def drive(
    rounds: Sequence[Round],
    group_at: Callable[[int], Mapping[str, Any]],
    present: Collection[int],
    prefetch: int,
    timer: PhaseTimer,
    meanwhile: Callable[[], None],
) -> Iterator[tuple[Round, list[Done]]]:
    """Run all rounds; yields each with what it did here, when its weights are up to date.

    The gathers of up to ``prefetch`` rounds that come later are on their way while one computes, and the scatter of the
    one before; with none of them, every collective ends before the next thing begins. Collectives start in one order on
    all ranks that share them, whatever other rounds these ranks have.

    Args:
        prefetch: counts for the rounds of each domain on its own.
        meanwhile: what else is to do, while the last scatter is on its way.
    """
    exchanged = [r for r in rounds if r.exchanged]
    windows = prefetch_windows([r.queue for r in exchanged], prefetch)
    started: set[int] = set()
    turn = 0  # of the next round to exchange
    leaving: deque[tuple[Round, list[Done]]] = deque()

    def start(turns: Iterable[int]) -> None:
        for coming in turns:
            if coming not in started:
                started.add(coming)
                exchanged[coming].start(group_at(exchanged[coming].index), present, timer)

    def finished() -> tuple[Round, list[Done]]:
        round_, done = leaving.popleft()
        round_.finish(group_at(round_.index), timer)
        return round_, done

    for round_ in rounds:
        if round_.exchanged:
            start(windows[turn])
            turn += 1
            leaving.append((round_, round_.compute(group_at(round_.index), timer)))
            while len(leaving) > (1 if prefetch else 0):
                yield finished()
        else:
            start(range(turn, min(turn + prefetch, len(exchanged))))
            round_.start(group_at(round_.index), present, timer)
            done = round_.compute(group_at(round_.index), timer)
            round_.finish(group_at(round_.index), timer)
            yield round_, done
    meanwhile()
    while leaving:
        yield finished()


def prefetch_windows(domains: Sequence[int], prefetch: int) -> list[list[int]]:
    """For each round, the rounds that have started when it computes, itself included.

    These are the next ``prefetch`` rounds of whatever domain, and the next ``prefetch`` rounds of its own domain. The
    latter give the collectives of a domain one order on all its ranks, whatever other rounds each of them has. Say that
    ranks 0 and 1 share the domain ``a``, rank 1 has a round of another domain in between, and ``prefetch`` is 1::

        rank 0 with rounds a0 a1:      at a0  gather a0, gather a1,             compute, scatter a0
        rank 1 with rounds a0 b0 a1:   at a0  gather a0, gather b0, gather a1,  compute, scatter a0

    By the next round of whatever domain alone, rank 1 would start the gather of a1 at b0 only, after the scatter of a0,
    which follows it on rank 0: each rank would wait for a collective that the other one has not come to.

    Args:
        domains: of each round.
    """
    turns: dict[int, list[int]] = {}  # by domain
    for turn, domain in enumerate(domains):
        turns.setdefault(domain, []).append(turn)
    windows: list[list[int]] = [[] for _ in domains]
    for of_domain in turns.values():
        for number, turn in enumerate(of_domain):
            following = range(turn, min(turn + prefetch + 1, len(domains)))
            windows[turn] = sorted({*following, *of_domain[number : number + prefetch + 1]})
    return windows
