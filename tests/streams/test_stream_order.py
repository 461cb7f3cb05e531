"""The order of streams on an accelerator, without one: dmuon's real code on pretended streams.

What the check knows to be wrong today stands in tables here, each entry with a reason. An entry that is met no more
fails its test: whoever mends a defect deletes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import combinations

import pytest
from harness.on_ranks import slowly
from harness.pool import RankPool

from streams import plants
from streams.clock import Site
from streams.collectives import Launched
from streams.plants import Plant
from streams.programs import PROGRAMS, Findings, Program, run

TIMEOUT = 110.0
QUICK_PROGRAMS = ("lines", "overlap", "uneven", "fsdp exchanged")

# -- races ------------------------------------------------------------------------------------------------------------

Pair = tuple[str, str, str]  # kind, function of the earlier access, function of the later one

EARLY = "by design: an early update may read what changes meanwhile; then it is dropped, by version counters"
ALLOWED: dict[str, dict[Pair, str]] = {
    "clipped overlap": {("memory", "_stacked", "clip_grad_norm_"): EARLY},
    "dropped graphs": {("memory", "_stacked", "clip_grad_norm_"): EARLY},
    "loaded early": {("memory", "EarlyUpdates._start", "_store"): EARLY},
}


def pairs(findings: Sequence[Findings]) -> set[Pair]:
    return {(race.kind, race.earlier.function, race.later.function) for found in findings for race in found.races}


# -- waits of the host ------------------------------------------------------------------------------------------------

# For dedicated models and for others, what the host waits for in an action; in any other action of training, nothing.
LAST_VOTE = Counter({Site("HostCopy.tolist", "Event.synchronize"): 1})  # that of the backward before
VOTE = LAST_VOTE + Counter({Site("Stream.alone", "Stream.synchronize"): 1})
AGREES = Counter(  # on what is averaged, behind the first backward
    {
        Site("HostCopy.tolist", "Event.synchronize"): 1,
        Site("GradAverager._difference", "tolist"): 1,
        Site("agree", "_local_scalar_dense"): 8,  # two for each rank, of which some programs have fewer
        # Ranks of a mesh, the first time that it is seen.
        Site("_line_of", "nonzero"): 2,
        Site("_line_of", "_local_scalar_dense"): 2,
        Site("_line_of", "tolist"): 2,
    }
)
WAITS = {True: {"backward": LAST_VOTE}, False: {"step": VOTE}}
# Whose step reads what the device has computed of gradients in the step before.
COPIES = ("ddp", "fsdp2-hsdp")
TRAINING = ("accumulate", "backward", "clip", "evaluate", "step", "zero", "zero-model")
SAVED = "a state dict compares, and waits for, what the next backward would wait for"
WAITS_BY_DESIGN = {
    "loaded early": SAVED,
    "dropped": SAVED,
    "auxiliary": "where a rank has no gradient, it waits for the vote on whether another one has",
    "functions": "ranks agree on what a user's function gave for the first time",
}


def assert_waits(program: Program, findings: Sequence[Findings]) -> None:
    """No action waits for more, and the last of each kind not for less."""
    table = {
        action: Counter({site: count * program.optimizers for site, count in waits.items()})
        for action, waits in WAITS[program.dedicated].items()
    }
    if program.layout in COPIES:
        table["step"] = table["step"] + LAST_VOTE
    for found in findings:
        training = [(action, waits) for action, waits in found.waits if action in TRAINING]
        first = next((i for i, (action, _) in enumerate(training) if action == "backward"), None)
        for i, (action, waits) in enumerate(training):
            agrees = Counter({site: count * program.optimizers for site, count in AGREES.items()})
            more = agrees if program.dedicated and i == first else Counter()
            assert waits <= table.get(action, Counter()) + more, f"{action}: the host waits {waits}"
        for action, waits in dict(training).items():
            assert waits == table.get(action, Counter()), f"{action}: the host waits {waits}, less than the table"


# -- the order of collectives -----------------------------------------------------------------------------------------


def first_difference(journals: Sequence[Sequence[Launched]]) -> str:
    """Where two ranks start the collectives of communicators that both have in another order; empty if nowhere."""
    for (a, first), (b, second) in combinations(enumerate(journals), 2):
        common = {entry.communicator for entry in first} & {entry.communicator for entry in second}
        ours, theirs = ([entry for entry in journal if entry.communicator in common] for journal in (first, second))
        for one, other in zip(ours, theirs, strict=False):
            if one != other:
                return f"rank {a} starts {one} where rank {b} starts {other}"
        if len(ours) != len(theirs):
            return f"rank {a} starts {len(ours)} collectives, rank {b} {len(theirs)}"
    return ""


# -- all of it, program by program ------------------------------------------------------------------------------------


def observed(ranks: RankPool, name: str, plant: Plant | None = None) -> list[Findings]:
    program = PROGRAMS[name]
    return ranks(program.world, run, program, plant, timeout=TIMEOUT)


@pytest.fixture(scope="module")
def seen(ranks: RankPool) -> Callable[[str], list[Findings]]:
    """The findings of a program, which several tests read and one of them asks for."""
    return cache(partial(observed, ranks))


def test_unequal_parts_travel_in_one_launch_on_nccl(seen: Callable[[str], list[Findings]]) -> None:
    """As ``transport="auto"`` decides there."""
    for found in seen("uneven"):
        assert {"2 at once", "broadcast", "reduce"} <= {entry.operation for entry in found.journal}


@pytest.mark.pitfall("P62", "P63", "P65")
@pytest.mark.parametrize("name", [*QUICK_PROGRAMS, *slowly(*(n for n in PROGRAMS if n not in QUICK_PROGRAMS))])
def test_operations_and_collectives_are_in_order(seen: Callable[[str], list[Findings]], name: str) -> None:
    """Races, waits of the host and the order of collectives are what the tables say, and no less."""
    program, findings = PROGRAMS[name], seen(name)
    races, allowed = pairs(findings), ALLOWED.get(name, {})
    details = sorted({str(race) for found in findings for race in found.races})
    assert races <= set(allowed), f"races that the table does not allow, among {details}"
    assert races == set(allowed), f"met no more, delete the entry: {set(allowed) - races}"
    assert first_difference([found.journal for found in findings]) == ""
    if name not in WAITS_BY_DESIGN:
        assert_waits(program, findings)


@pytest.mark.parametrize("name", ["lines", *slowly("tensor fsdp", "hsdp exchanged")])
def test_communicators_are_first_used_when_they_are_made(seen: Callable[[str], list[Findings]], name: str) -> None:
    """A back end connects on first use, which blocks the host until the other ranks come.

    That of averages is first used at the end of the first backward: behind all its reductions and its vote.
    """
    for found in seen(name):
        early = {entry.communicator for entry in found.journal[: found.before_training]}
        training = found.journal[found.before_training :]
        late = {name for name, _ in {entry.communicator for entry in training} - early if name.startswith("dmuon")}
        averages = {name for name in late if name.startswith("dmuon_average")}
        assert late - averages == set(), "used for the first time in training"
        for average in averages:
            sites = [entry.site for entry in training]
            vote = sites.index("Vote.__init__")
            first = next(i for i, entry in enumerate(training) if entry.communicator[0] == average)
            assert sites[first] == "GradAverager._difference" and first > vote
            assert "_Bucket.__init__" not in sites[:first]


# -- planted bugs -----------------------------------------------------------------------------------------------------

# Each place that waits or keeps memory, and the program that shows what happens without it.
PLANTS = {
    "comm.fill_stream.beside in OwnedBuffer.start_fill": "lines",
    "self._comm.reduce_stream.join_up_to in GradReduction._wait_for_all": "single",
    "self._pending.wait in Redistribution.wait": "fsdp exchanged",
    "self._arrived.synchronize in HostCopy.tolist": "lines",
    # -- the others are slow
    "self._pending.wait in Copying.wait": "hsdp exchanged",
    "work.wait in join_norms": "fsdp exchanged half",
    "domain.monitor.start(…).wait in _add_up_over": "fsdp sharded",
    "domain.monitor.start(…).wait in scale": "fsdp rows",
    "fill.wait in OwnedBuffer._settle": "lines",
    "publication.wait in OwnedBuffer._settle": "ddp",
    "tensor.record_stream in Stream.beside": "overlap",
    "work.wait in Pending.wait": "lines",
    "comm.publish_stream.beside in OwnedBuffer.start_publication": "single",
    "pending.wait in OwnedBuffer.start_fill": "single",
    "self._outgoing in OwnedBuffer._settle": "single",
    "comm.reduce_stream.beside in GradReduction.advance": "lines",
    "pending.wait in GradReduction._wait_for_all": "lines",
    "pending.wait in GradReduction._turn_into_column": "single",
    "self._in_flight in GradReduction.__init__": "single",
    "comm.reduce_stream.beside in _Bucket.__init__": "lines",
    "self._pending.wait in _Bucket.finish": "lines",
    "self.comm.fill_stream.join in Runtime.before_write": "lines",
    "self.comm.publish_stream.join in Runtime.before_write": "single",
    "work.wait in tensor_of": "functions",
    "self._early.join in Muon.step": "overlap",
    "self._side.beside in EarlyUpdates._start": "overlap",
    "self._side.join in EarlyUpdates.join": "overlap",
    "self._side.join in EarlyUpdates.forget": "dropped",
    "self._stream.wait_stream in Stream.beside": "lines",
    "self._module.current_stream(self._device).wait_stream in Stream.join": "overlap",
    "self._module.current_stream(self._device).wait_event in Stream.join_up_to": "single",
    "event.record in _recorded": "lines",
    "self._origin.await_users in OwnedBuffer.free": "evaluated beside",
    "self._outgoing_origin.await_users in OwnedBuffer._settle": "single beside",
    "self._stream.wait_stream in Origin.await_users": "evaluated beside",
    "current.wait_event in _replay": "two optimizers",
    "recording.source.record_stream in _replay": "dropped graphs",
    "current.record_event in _replay": "two optimizers",
    "current.wait_stream in Origin.join": "branches",
    "origin.join in GradReduction._pack": "towers",
    "origin.await_users in GradReduction._pack": "branches",
    "origins[id(matrix.full)].join in Gradients.join": "branches",
}
QUICK_PLANTS = tuple(PLANTS)[:4]

RESULT = "what it returns is needed, and somebody else inside waits for the stream"
IN_TURN = "asynchronous=False: the host waits for more than anybody needs"
TIMES = "it measures, and nothing follows from it"
GRAPH = "a graph can be captured on CUDA alone: tests/kernels/test_replay.py"
FSDP2 = "not tried: FSDP2's own streams, which are not pretended here"
HOST = "not tried: the pretended device has no memory beside the host's; tests/pretend compares values"
CONNECTS = "what it carries is read by nobody, and faults show early"
ENGINE = "what ends a backward runs behind everything that its hooks have queued, on whatever stream"
HARMLESS = {
    "domain.vote_stream.alone in Exchange.before_step": "reading the result waits for the same stream",
    "monitor.start(…).wait in Vote.__init__": "reading the result waits for the same stream",
    "Stream(self._monitor.device, priority=-1).alone in Vote._tell_difference": "reading what differs waits for it too",
    "self._stream.synchronize in Stream.alone": "reading the result waits for the same stream",
    "pending.wait in Monitor.start": IN_TURN,
    "self.synchronize in Monitor.start": IN_TURN,
    "Redistribution(…).wait in redistribute_all": RESULT,
    "self._coming.wait in FullReplicationRound.run": RESULT,
    "group.comm_ctx.all_gather_copy_in_stream.wait_stream in _unshard_behind": FSDP2,
    "group.comm_ctx.all_gather_stream.wait_stream in _unshard_behind": FSDP2,
    "Redistribution(…).wait in FullReplicationRound._begun": "nothing travels: each rank takes its own part",
    "gathering.wait in ExchangedRound.run": RESULT,
    "arriving.wait in ExchangedRound.run": RESULT,
    "arriving.wait in ExchangedRound.run (1)": RESULT,
    "arriving.wait in ExchangedRound.run (2)": RESULT,
    "Copying(…).wait in RedistributeByLayout.__call__": RESULT,
    "returned.wait in tensor_of": RESULT,
    "stream.wait_stream in CudaGraphs.record": GRAPH,
    "current.wait_stream in CudaGraphs.record": GRAPH,
    "self.monitor.synchronize in Comm.__init__": CONNECTS,
    "self._origin.await_users in GradReduction._wait_for_all": ENGINE,
    "self._origin.await_users in GradReduction.finish": ENGINE,
    "exchange.alone in find_residencies": "no stream: parameters that this rank has alone",
    "beside.beside in Batch.fetch": HOST,
    "self.stream.join_up_to in _Fetched.taken": HOST,
    "tensor.record_stream in Stream.handed_over": HOST,
    "module.current_stream(device).synchronize in await_device": HOST,
    "child.wait in tried": "no stream: a process that has ended or been killed",
    "end.synchronize in PhaseTimer.seconds": TIMES,
}


def test_whoever_waits_has_a_plant() -> None:
    """Whoever adds a wait, or keeps a reference for the sake of a stream, adds a plant, and a program that finds it."""
    places = {str(plant) for plant in plants.plants()}
    assert not PLANTS.keys() & HARMLESS.keys()
    assert places - PLANTS.keys() - HARMLESS.keys() == set(), "places without a plant"
    assert (PLANTS.keys() | HARMLESS.keys()) - places == set(), "plants without a place"


@pytest.mark.parametrize("place", [*QUICK_PLANTS, *slowly(*(p for p in PLANTS if p not in QUICK_PLANTS))])
def test_a_planted_bug_is_found(ranks: RankPool, place: str) -> None:
    plant = next(plant for plant in plants.plants() if str(plant) == place)
    races = pairs(observed(ranks, PLANTS[place], plant))
    assert races - set(ALLOWED.get(PLANTS[place], {})), "no race is found that would not be without the plant"
