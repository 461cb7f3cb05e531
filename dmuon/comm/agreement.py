"""Votes, and what else all ranks must agree on before any of them communicates."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dmuon.comm.monitor import LANE, OPTION, CollectiveError, Monitor
from dmuon.comm.process_groups import broadcast_object, gather_objects, named, ranks_of
from dmuon.kernels import streams_of
from dmuon.layout.topology import GlobalRank
from dmuon.platform.streams import HostCopy, Stream, pinned_like


@dataclass(frozen=True, slots=True)
class Vote:
    """What one rank says before a step goes on. An elementwise maximum of all votes tells each rank what all said.

    A vote is small and needs no tensor that a device has yet to compute, so that ranks which are out of step find out
    before gradients or weights of different parameters are mixed.

    Attributes:
        flags: by parameter, whether it has a gradient on this rank; or other small numbers.
        digest: 31 bits of the collectives that this rank has issued so far (:attr:`dmuon.comm.monitor.Monitor.digest`).
        changed: this rank's parameters, or how they lie, have changed.
        fault: this rank, if it found a fault among other ranks and takes no step.
    """

    flags: Sequence[int]
    digest: int
    changed: bool = False
    fault: GlobalRank | None = None

    def encode(self) -> Tensor:
        """What travels, on the host: int32 ``(5 + flags,)``. Of a number and its negative the maxima show the range."""
        fault = -1 if self.fault is None else self.fault
        return torch.tensor(
            [fault, self.changed, -self.changed, self.digest, -self.digest, *self.flags], dtype=torch.int32
        )

    @staticmethod
    def decode(maxima: Sequence[int]) -> Verdict:
        """What all ranks said, from the elementwise maximum of their encoded votes."""
        fault, any_changed, none_changed, greatest, least, *flags = maxima
        return Verdict(
            flags=tuple(flags),
            same_collectives=greatest == -least,
            same_change=any_changed == -none_changed,
            fault=None if fault < 0 else GlobalRank(fault),
        )

    @staticmethod
    def nbytes(flags: int) -> int:
        """Bytes of an encoded vote on so many parameters."""
        return 4 * (5 + flags)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks said in one vote.

    Attributes:
        flags: by parameter, whether any rank has a gradient of it; of other numbers, the largest of all ranks.
        same_collectives: all have issued the same collectives so far.
        same_change: parameters have changed on all of them or on none.
        fault: the last rank that found a fault elsewhere; None if none did.
    """

    flags: tuple[int, ...]
    same_collectives: bool
    same_change: bool
    fault: GlobalRank | None


class Election:
    """The votes of all ranks of a group, on their way. Collective; the host waits for them when it asks.

    Args:
        vote: of this rank.
        monitor: knows these ranks' collectives.
        what: names the election in messages.
        compared: blocks that ran, if the digest holds more than the monitor's, or something else.

    Attributes:
        immediate: asking never waits.
    """

    def __init__(
        self,
        vote: Vote,
        group: dist.ProcessGroup,
        monitor: Monitor,
        device: torch.device,
        what: str,
        compared: str = "",
    ) -> None:
        self._group, self._monitor, self._device, self._compared = group, monitor, device, compared
        self.immediate = streams_of(device) is None
        votes = vote.encode()
        if not self.immediate:
            votes = pinned_like(votes).copy_(votes).to(device, non_blocking=True, copy=True)
        with monitor.watch(what):
            dist.all_reduce(votes, dist.ReduceOp.MAX, group=group)
            self._copy = HostCopy(votes)

    def verdict(self) -> Verdict:
        """What all ranks said.

        Raises:
            CollectiveError: on all of them, if they issued different collectives before.
        """
        verdict = Vote.decode(self._copy.tolist())
        if not verdict.same_collectives:
            self._tell_difference()
        return verdict

    def _tell_difference(self) -> NoReturn:
        """All ranks have the same verdict at the same place, and so can tell each other why."""
        noted = self._monitor.noted() | ({_RAN: self._compared} if self._compared else {})
        found: list[Difference] = []
        with suppress(CollectiveError), Stream(self._device, priority=-1).alone():  # nothing may wait for a stuck fill
            found = _told_apart(self._group, noted, (f"{LANE}vote", OPTION, _RAN, f"{LANE}step"))
        if not found:
            self._monitor.disagree("which ones is not known", of_options=False)
        of_options = found[0].name.startswith(OPTION)
        told = []
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


_RAN = "blocks that ran"
_TOLD = 8  # differences that a rank tells the others of, and faults that a message repeats


@dataclass(frozen=True, slots=True)
class Difference:
    """What one rank says otherwise than the first one; None is nothing."""

    name: str
    rank: GlobalRank
    value: str | None
    first: str | None


def require_no_fault(group: dist.ProcessGroup, error: Exception | str | None, device: torch.device) -> None:
    """:func:`agree` where that is asked often, and there is nothing but faults to exchange: one number for each rank.

    Raises:
        ValueError, CollectiveError: as :func:`agree`.
    """
    faulty = torch.tensor(error is not None, dtype=torch.int32, device=device)
    try:
        with named(f"the exchange of whether ranks {list(ranks_of(group))} have a fault"):
            dist.all_reduce(faulty, dist.ReduceOp.MAX, group=group)
            found = bool(faulty)
    except CollectiveError as fault:
        if error is None:
            raise
        raise CollectiveError(f"{fault}. This rank would have reported: {error}") from fault.__cause__
    if found:
        agree(group, error)


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
    return _told_apart(group, items, kinds)


def _told_apart(group: dist.ProcessGroup, items: Mapping[str, str], kinds: Sequence[str] = ()) -> list[Difference]:
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


def require_same(
    group: dist.ProcessGroup,
    ranks: Sequence[GlobalRank],
    error: Exception | None,
    description: list[tuple[str, str]],
    payload: _Payload | None,
) -> list[_Payload]:
    """Raise on every rank unless all have the same description and no error; every rank's payload, in rank order."""
    digest = hashlib.sha256(repr(description).encode()).hexdigest()
    answers = agree(group, error, (digest, payload))
    if len({digest for digest, _ in answers}) == 1:
        return [payload for _, payload in answers]
    for one in _told_apart(group, dict(description)):
        value, first = ("absent" if said is None else said for said in (one.value, one.first))
        raise ValueError(
            f"{one.name} is {value} on rank {one.rank} and {first} on rank {ranks[0]}; build the same model with the "
            "same options on every rank"
        )
    raise ValueError("the parameters come in another order on some ranks; build the same model on every rank")


def require_same_in_turn(
    asked: Sequence[tuple[dist.ProcessGroup, Sequence[GlobalRank], list[tuple[str, str]]]], fault: Exception | None
) -> None:
    """:func:`require_same` of a description in each of several groups, one after the other.

    A fault ends the ranks of all of them: what one group finds the next ones hear, and those before in a second turn.
    """
    for _ in range(2):
        for group, ranks, description in asked:
            try:
                require_same(group, ranks, fault, description, None)
            except CollectiveError:
                raise
            except Exception as error:
                fault = fault or error
    if fault is not None:
        raise fault
