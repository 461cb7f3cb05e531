"""Running the rounds of a step: the next ones travel while one is orthogonalized."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from dmuon.platform.timing import PhaseTimer
from dmuon.step.rounds import Round
from dmuon.step.update import Done

__all__ = ["drive", "started_first"]


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
    first = started_first([r.lane for r in exchanged], prefetch)
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
            start(first[turn])
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


def started_first(domains: Sequence[int], prefetch: int) -> list[list[int]]:
    """Which rounds have started when each one computes, itself included.

    These are the next ones, whatever their domain, and the next ones of its own domain. The former alone would start a
    round sooner on a rank that has fewer rounds in between, and so before a scatter that it follows elsewhere.

    Args:
        domains: of each round.
    """
    lanes: dict[int, list[int]] = {}
    for turn, domain in enumerate(domains):
        lanes.setdefault(domain, []).append(turn)
    place = {turn: i for lane in lanes.values() for i, turn in enumerate(lane)}
    return [
        sorted(
            {*range(turn, min(turn + prefetch + 1, len(domains)))}
            | {*lanes[domain][place[turn] : place[turn] + prefetch + 1]}
        )
        for turn, domain in enumerate(domains)
    ]
