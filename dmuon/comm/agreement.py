"""Votes, and what else all ranks must agree on before any of them communicates.

[Note: how a fault of one rank ends all]
A rank that raises while others go into a collective leaves them there until a time limit. So there are three cases:

1. *Before anything travels*, in what all ranks call together (``dedicate_params``, ``Muon(…)``, a load): a fault is
   kept, not raised, and every rank comes to :func:`agree`, where all learn of it and raise. Whoever is behind the
   exchange may communicate, since nobody has a fault. What lies over several groups is agreed on in each of them; then
   once more, for those that came to their exchange before another group told of a fault. An interrupt is no fault that
   others hear of: they end with the process, or at the time limit of the group.
2. *While training*, nobody waits for an exchange of objects. What may differ between ranks (which gradients there are,
   options, the collectives so far) is a few integers in a :class:`Vote`, a collective that is issued anyway. If these
   differ, all ranks see it in the same result, and so may tell each other why, by further collectives.
3. *A collective that fails*, or whose other ranks never come, raises where it is waited for, on each rank by itself.
   Nothing tells the others. The ``Monitor`` of the model then starts nothing more, since what some ranks have sent may
   still be taken for something else, and groups are made anew for other models.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from dmuon.comm.monitor import LANE, OPTION, CollectiveError, FirstError, Monitor
from dmuon.comm.process_groups import broadcast_object, gather_objects, ranks_of
from dmuon.kernels import streams_of
from dmuon.layout.topology import GlobalRank
from dmuon.platform.streams import HostCopy, Stream, pinned_like


@dataclass(frozen=True, slots=True)
class VoteResult:
    """What all ranks said in one vote.

    Attributes:
        flags: of each place, the largest number of all ranks; of flags, whether any rank has set it.
        same_change: parameters have changed on all ranks or on none.
        faulty: the last rank that found an error and takes no step; None if none did.
    """

    flags: tuple[int, ...]
    same_change: bool
    faulty: GlobalRank | None


class Vote:
    """The consistency check before a step goes on, on its way: one all-reduce of what each rank says.

    What travels is int32 ``(5 + flags,)``. Its elementwise maximum tells each rank what all said: of a number and its
    negative the maxima show whether all have the same one. It is small and needs no tensor that a device has yet to
    compute, so that ranks which are out of step find out before gradients or weights of different parameters are mixed.
    Collective; the host waits for the others when it asks for the :meth:`result`.

    Args:
        flags: of this rank, such as whether it has a gradient of each parameter; or other small numbers.
        monitor: knows these ranks' collectives, of which the digest is compared.
        what: names the vote in messages.
        changed: this rank's parameters, or how they lie, have changed.
        faulty: this rank, if it found an error among other ranks and takes no step.

    Attributes:
        immediate: asking never waits.
    """

    def __init__(
        self,
        flags: Sequence[int],
        group: dist.ProcessGroup,
        monitor: Monitor,
        what: str,
        *,
        changed: bool = False,
        faulty: GlobalRank | None = None,
    ) -> None:
        self._group, self._monitor, self._what, digest = group, monitor, what, monitor.digest
        said = [-1 if faulty is None else faulty, changed, -changed, digest, -digest, *flags]
        votes = torch.tensor(said, dtype=torch.int32)
        self.immediate = streams_of(monitor.device) is None
        if not self.immediate:
            votes = pinned_like(votes).copy_(votes).to(monitor.device, non_blocking=True, copy=True)
        launch = partial(dist.all_reduce, votes, dist.ReduceOp.MAX, group=group, async_op=True)
        monitor.start(None, what, launch).wait()
        self._copy = HostCopy(votes)

    def result(self) -> VoteResult:
        """What all ranks said.

        Raises:
            CollectiveError: on all of them, if they issued different collectives before.
        """
        with self._monitor.waiting(self._what):  # for an accelerator here, not where the vote was launched
            faulty, any_changed, none_changed, greatest, least, *flags = self._copy.tolist()
        if greatest != -least:
            self._tell_difference()
        return VoteResult(tuple(flags), any_changed == -none_changed, None if faulty < 0 else GlobalRank(faulty))

    def _tell_difference(self) -> NoReturn:
        """All ranks have the same result at the same place, and so can tell each other why."""
        noted = self._monitor.noted()
        found: list[Difference] = []
        # On a stream of its own: nothing may wait for an all-gather that is stuck.
        with suppress(CollectiveError), Stream(self._monitor.device, priority=-1).alone():
            found = _differing(self._group, noted, (f"{LANE}vote", OPTION, f"{LANE}step"))
        of_options = bool(found) and found[0].name.startswith(OPTION)
        told = [] if found else ["which ones is not known"]
        for one in found if of_options else found[:1]:  # an option may differ in consequence of one that was changed
            if one.name.startswith(OPTION) == of_options:
                value, first = ("nothing more" if said is None else said for said in (one.value, one.first))
                told.append(f"{value!r} on rank {one.rank} where rank {ranks_of(self._group)[0]} has {first!r}")
        self._monitor.disagree(", ".join(told), of_options=of_options)


def agree(group: dist.ProcessGroup, error: Exception | str | None, payload: Any = None) -> list[Any]:
    """Exchange one status per rank, so that a fault on one rank ends all of them before any data moves.

    Args:
        error: what is wrong on this rank, or None. This rank raises its own exception as it is, so that its type and
            its traceback survive.
        payload: any picklable object.

    Returns:
        Every rank's payload, in rank order.

    Raises:
        ValueError: on every rank when any of them reported an error; names the rank.
        CollectiveError: the exchange failed.
    """
    report = error
    if isinstance(error, Exception):
        report = str(error) if isinstance(error, (TypeError, ValueError)) else f"{type(error).__name__}: {error}"
    ranks = ranks_of(group)
    try:
        statuses = gather_objects((report, payload), group, f"the exchange of what ranks {list(ranks)} were given")
    except CollectiveError as fault:
        if report is None:
            raise
        raise CollectiveError(f"{fault}. This rank would have reported: {report}") from fault.__cause__
    faults = [f"rank {rank}: {fault}" for rank, (fault, _) in zip(ranks, statuses, strict=True) if fault is not None]
    if isinstance(error, Exception):
        raise error
    if faults:
        more = [f"and {len(faults) - _TOLD} more ranks"] if len(faults) > _TOLD else []
        told = "; ".join([*faults[:_TOLD], *more])
        raise ValueError(report if report is not None and len(faults) == len(statuses) else told)
    return [status[1] for status in statuses]


_TOLD = 8  # differences that a rank tells the others of, and faults that a message repeats


@dataclass(frozen=True, slots=True)
class Difference:
    """What one rank says otherwise than the first one; None is nothing."""

    name: str
    rank: GlobalRank
    value: str | None
    first: str | None


def differences(
    group: dist.ProcessGroup,
    error: Exception | str | None,
    items: Mapping[str, str],
    kinds: Sequence[str] = (),
) -> list[Difference]:
    """How the ranks differ in ``items``: by name, whatever must be the same on all of them. Collective.

    A digest travels; only if one differs do the first rank's items, and a few of what each other one says otherwise.

    Args:
        kinds: with which names begin that are told before others, in this order. Of a few differences, those that
            decide what all ranks do must not be left out for those that do not.

    Returns:
        On all ranks the same: nothing if they agree; a few differences of each rank, in rank order, if they do not.

    Raises:
        As :func:`agree`.
    """
    digest = hashlib.sha256(repr(sorted(items.items())).encode()).hexdigest()
    if len(set(agree(group, error, digest))) == 1:
        return []
    return _differing(group, items, kinds)


def _differing(group: dist.ProcessGroup, items: Mapping[str, str], kinds: Sequence[str] = ()) -> list[Difference]:
    ranks = ranks_of(group)
    theirs = broadcast_object(dict(items), group, f"the comparison with what rank {ranks[0]} was given")
    names = dict.fromkeys(name for name in [*theirs, *items] if items.get(name) != theirs.get(name))
    told = sorted(names, key=lambda name: [not name.startswith(kind) for kind in kinds])[:_TOLD]
    mine = [(name, items.get(name), theirs.get(name)) for name in told]
    of_ranks = agree(group, None, mine)
    return [
        Difference(name, rank, *both) for rank, of_rank in zip(ranks, of_ranks, strict=True) for name, *both in of_rank
    ]


_Payload = TypeVar("_Payload")
_SAME_MODEL = "build the same model with the same options on every rank"


def require_same(
    group: dist.ProcessGroup,
    error: Exception | None,
    description: list[tuple[str, str]],
    payload: _Payload | None,
    remedy: str = _SAME_MODEL,
) -> list[_Payload]:
    """Raise on every rank unless all have the same description and no error; every rank's payload, in rank order."""
    digest = hashlib.sha256(repr(description).encode()).hexdigest()
    answers = agree(group, error, (digest, payload))
    if len({digest for digest, _ in answers}) == 1:
        return [payload for _, payload in answers]
    for one in _differing(group, dict(description)):
        value, first = ("absent" if said is None else said for said in (one.value, one.first))
        raise ValueError(f"{one.name} is {value} on rank {one.rank} and {first} on rank {ranks_of(group)[0]}; {remedy}")
    raise ValueError("the parameters come in another order on some ranks; build the same model on every rank")


def require_same_in_turn(
    asked: Sequence[tuple[dist.ProcessGroup, list[tuple[str, str]]]],
    fault: Exception | None,
    remedy: str = _SAME_MODEL,
) -> None:
    """:func:`require_same` of a description in each of several groups, one after the other.

    A fault ends the ranks of all of them: what one group finds the next ones hear, and those before in a second turn.
    """
    first = FirstError(fault, through=(CollectiveError,))
    for _ in range(2):
        for group, description in asked:
            with first:
                require_same(group, first.error, description, None, remedy)
    first.throw()
