"""Clocks, the pretended allocator and races, without torch."""

from __future__ import annotations

import pytest

from streams.clock import Access, Block, Clock, Memory, Race, Site, Stream

WRITE, READ = Site("writer", "write"), Site("reader", "read")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def memory(clock: Clock) -> Memory:
    return Memory(clock)


@pytest.fixture
def main() -> Stream:
    return Stream("main")


@pytest.fixture
def side() -> Stream:
    return Stream("side")


def test_a_read_on_another_stream_races_with_a_write_that_it_does_not_wait_for(
    clock: Clock, memory: Memory, main: Stream, side: Stream
) -> None:
    block = Block(None, WRITE)
    memory.access(block, main, 0, 8, True, WRITE)
    memory.access(block, side, 0, 8, False, READ)
    assert memory.races == {Race("memory", WRITE, READ): 1}


def test_waiting_orders_and_so_does_whoever_waits_for_whoever_has_waited(
    clock: Clock, memory: Memory, main: Stream, side: Stream
) -> None:
    third, block = Stream("third"), Block(None, WRITE)
    memory.access(block, main, 0, 8, True, WRITE)
    clock.wait(side, clock.moment(main))
    clock.wait(third, clock.moment(side))
    memory.access(block, side, 0, 8, False, READ)
    memory.access(block, third, 0, 8, False, READ)
    assert not memory.races


def test_an_event_orders_what_was_queued_before_it_was_recorded(
    clock: Clock, memory: Memory, main: Stream, side: Stream
) -> None:
    first, second = Block(None, WRITE), Block(None, WRITE)
    memory.access(first, main, 0, 8, True, WRITE)
    moment = clock.moment(main)
    memory.access(second, main, 0, 8, True, WRITE)
    clock.wait(side, moment)
    memory.access(first, side, 0, 8, False, READ)
    assert not memory.races
    memory.access(second, side, 0, 8, False, READ)
    assert memory.races == {Race("memory", WRITE, READ): 1}


def test_the_host_orders_what_it_queues_after_it_has_waited(
    clock: Clock, memory: Memory, main: Stream, side: Stream
) -> None:
    block = Block(None, WRITE)
    memory.access(block, main, 0, 8, True, WRITE)
    clock.wait_on_host(clock.moment(main))
    memory.access(block, side, 0, 8, True, WRITE)
    assert not memory.races


def test_operations_of_one_stream_are_in_order(memory: Memory, main: Stream) -> None:
    block = Block(None, WRITE)
    for _ in range(3):
        memory.access(block, main, 0, 8, True, WRITE)
    assert not memory.races and len(block.accesses) == 1


@pytest.mark.parametrize(
    ("span", "writes", "races"),
    [((0, 8), False, 1), ((7, 9), False, 1), ((8, 16), True, 0), ((4, 4), True, 0), ((-4, 0), True, 0)],
)
def test_only_bytes_in_common_race(
    memory: Memory, main: Stream, side: Stream, span: tuple[int, int], writes: bool, races: int
) -> None:
    block = Block(None, WRITE)
    memory.access(block, main, 0, 8, True, WRITE)
    memory.access(block, side, *span, writes, READ)
    assert sum(memory.races.values()) == races


def test_reads_do_not_race_with_reads_but_each_with_a_later_write(memory: Memory, main: Stream, side: Stream) -> None:
    block = Block(None, WRITE)
    memory.access(block, main, 0, 8, False, READ)
    memory.access(block, side, 0, 8, False, READ)
    assert not memory.races
    memory.access(block, Stream("third"), 0, 8, True, WRITE)
    assert memory.races == {Race("memory", READ, WRITE): 2}


def test_a_part_that_is_written_leaves_the_rest_to_be_checked(
    clock: Clock, memory: Memory, main: Stream, side: Stream
) -> None:
    block = Block(None, WRITE)
    memory.access(block, main, 0, 16, True, WRITE)
    moment = clock.moment(main)
    memory.access(block, main, 0, 8, True, WRITE)
    clock.wait(side, moment)
    memory.access(block, side, 8, 16, False, READ)
    assert not memory.races
    memory.access(block, side, 0, 8, False, READ)
    assert memory.races == {Race("memory", WRITE, READ): 1}


def test_new_memory_is_not_used_before_the_stream_that_allocated_it_is_waited_for(
    clock: Clock, memory: Memory, main: Stream, side: Stream
) -> None:
    """What that stream has queued on the memory before may still run."""
    made = Site("maker", "empty")
    memory.access(memory.allocate(main, 8, made), side, 0, 8, True, WRITE)
    assert memory.races == {Race("memory", made, WRITE): 1}
    block = memory.allocate(main, 8, made)
    clock.wait(side, clock.moment(main))
    memory.access(block, side, 0, 8, True, WRITE)
    assert sum(memory.races.values()) == 1


@pytest.mark.parametrize("remedy", ["nothing", "wait", "record", "another stream"])
def test_freed_memory_is_given_away_when_its_stream_has_waited_for_all_who_used_it(
    clock: Clock, memory: Memory, main: Stream, side: Stream, remedy: str
) -> None:
    made = Site("maker", "empty")
    block = memory.allocate(main, 8, made)
    clock.wait(side, clock.moment(main))
    memory.access(block, side, 0, 8, False, READ)
    if remedy == "record":
        memory.record(block, side)
    memory.free(block)
    if remedy == "wait":  # in time, though after the free
        clock.wait(main, clock.moment(side))
    memory.allocate(side if remedy == "another stream" else main, 8, made)
    assert memory.races == ({Race("reuse", READ, made): 1} if remedy == "nothing" else {})


def test_memory_that_nobody_gets_back_is_not_reused(memory: Memory, main: Stream, side: Stream) -> None:
    block = Block(None, WRITE)
    memory.access(block, side, 0, 8, False, READ)
    memory.free(block)
    memory.allocate(main, 8, WRITE)
    assert not memory.races


def test_the_host_reads_what_it_has_waited_for(clock: Clock, memory: Memory, main: Stream) -> None:
    block = Block(None, WRITE)
    memory.access(block, main, 0, 8, True, WRITE)
    memory.read_on_host(block, READ)
    assert memory.races == {Race("host", WRITE, READ): 1}
    clock.wait_on_host(clock.moment(main))
    memory.read_on_host(block, READ)
    assert sum(memory.races.values()) == 1


def test_an_access_is_forgotten_only_if_a_later_one_stands_for_it(main: Stream, side: Stream) -> None:
    def access(stream: Stream, start: int, end: int, writes: bool) -> Access:
        return Access(stream, 1, start, end, writes, READ)

    assert access(main, 0, 8, True).covers(access(side, 2, 8, True))
    assert access(main, 0, 8, True).covers(access(side, 2, 8, False))
    assert access(main, 0, 8, False).covers(access(main, 0, 8, False))
    assert not access(main, 0, 8, False).covers(access(side, 0, 8, False))
    assert not access(main, 0, 8, False).covers(access(main, 0, 8, True))
    assert not access(main, 0, 8, True).covers(access(main, 0, 9, False))
