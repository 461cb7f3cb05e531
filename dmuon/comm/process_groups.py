"""Process groups of dmuon's own, and the grid that given ones form: which ranks meet along which dimension."""

from __future__ import annotations

import atexit
import hashlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as OutOfTime
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from itertools import combinations
from math import prod
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dmuon.comm.monitor import LATE, CollectiveError, first_line, forget_groups, groups_made, settle_at_exit
from dmuon.layout.topology import ROLES, GlobalRank, RankGrid
from dmuon.platform.host import keep_what_was_raised, let_threads_rest, logger
from dmuon.platform.streams import group_options
from dmuon.platform.torch_private import (
    all_gather_single,
    declared_backend,
    default_timeout,
    has_group,
    new_named_group,
    reduce_scatter_single,
)

_T = TypeVar("_T")
_log = logger(__name__)

_SLACK_SECONDS = 5.0  # for a process group to be made, beyond the time limit of its collectives


def this_rank() -> GlobalRank:
    """The rank of this process; 0 of a process on its own."""
    return GlobalRank(dist.get_rank() if dist.is_initialized() else 0)


def ranks_of(group: dist.ProcessGroup | None) -> tuple[GlobalRank, ...]:
    """The ranks of ``group``, by position in it; of the default group for None."""
    return tuple(map(GlobalRank, dist.get_process_group_ranks(group)))


@contextmanager
def named(what: str) -> Iterator[None]:
    """Around communication before there is a model whose monitor could report on it.

    Raises:
        CollectiveError: it failed; says ``what``.
    """
    try:
        yield
    except (CollectiveError, torch.OutOfMemoryError):
        raise
    except RuntimeError as fault:
        forget_groups()
        raise CollectiveError(f"rank {this_rank()}: {what} failed: {first_line(fault)}. {LATE}") from fault


def make_group(
    device: torch.device,
    ranks: Iterable[GlobalRank],
    purpose: str,
    timeout: timedelta | None,
    *,
    urgent: bool = False,
) -> dist.ProcessGroup:
    """A process group of dmuon's own over ``ranks``, in this order, for tensors of ``device`` and for objects.

    The same one as before if it was made for the same purpose with the same options; :mod:`dmuon.comm.monitor` says
    why. It has the back end of that device alone: of ``"cpu:gloo,cuda:nccl"``, gloo would connect every rank with every
    other one for each group, for nothing. Collective over ``ranks``, and over no others.

    Args:
        timeout: of its collectives; None is that of the default group.
        urgent: on an accelerator its collectives run before others that wait.
    """
    _prepare_exit()
    members = list(ranks)
    timeout = default_timeout(device.type) if timeout is None else timeout
    kept = groups_made()
    key = purpose, tuple(members), device, timeout, urgent
    if key in kept and has_group(kept[key]):  # it, or all of them, may have been destroyed
        return kept[key]
    pg_options, backend = group_options(device.type, urgent, timeout), declared_backend(device.type)
    assert dist.group.WORLD is not None
    made = _counts.setdefault(dist.group.WORLD, Counter())
    kind = f"dmuon_{purpose}_{hashlib.sha256(repr(members).encode()).hexdigest()[:16]}"
    name = f"{kind}_{made[kind]}"
    with named(f"making process group {name!r} of ranks {members}"):
        group = _in_time(
            backend,
            timeout,
            lambda: new_named_group(members, name, backend, timeout, pg_options, f"dmuon_{purpose}"),
        )
    made[kind] += 1  # now that all its ranks have made it
    _log.debug("made process group %r of ranks %s", name, members)
    _devices[group] = device
    kept[key] = group
    return group


def _in_time(backend: str, timeout: timedelta, make: Callable[[], _T]) -> _T:
    """What ``make`` returns, in a thread of its own: gloo waits for ever if the host of the store has stopped.

    Raises:
        RuntimeError: it takes longer than ``timeout`` allows each of its parts.
    """
    if backend != "gloo":  # an accelerator's back end goes by the current device of the thread
        return make()
    made: Future[_T] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    Thread(target=run, name="dmuon-group", daemon=True).start()
    try:
        return made.result(timeout.total_seconds() + _SLACK_SECONDS)
    except OutOfTime:
        raise RuntimeError(f"it was not made within {timeout.total_seconds() + _SLACK_SECONDS:g} s") from None


def connect(
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    exchanges: bool = False,
    gathers: bool = False,
    reduces: bool = False,
) -> None:
    """Use ``group`` for the first time. Collective; ranks that have several groups call this in one order.

    A back end connects ranks when a group is first used, and perhaps again for each kind of collective. Until all have
    come, the host of each waits: in training, where others may wait for this one elsewhere, perhaps for ever.

    Args:
        exchanges: it is for all-to-alls too.
        gathers: it is for broadcasts and all-gathers too.
        reduces: it is for reductions to single ranks too, and reduce-scatters.
    """
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    if gathers:
        value = torch.zeros(1, device=device)
        dist.broadcast(value, group_src=0, group=group)  # one root connects the ring for all
        all_gather_single(torch.zeros(group.size(), device=device), value, group=group)
    if reduces:
        value = torch.zeros(1, device=device)
        dist.reduce(value, group_dst=0, op=dist.ReduceOp.AVG, group=group)
        reduce_scatter_single(value, torch.zeros(group.size(), device=device), op=dist.ReduceOp.AVG, group=group)
    if exchanges:
        sent = torch.zeros(group.size(), device=device)
        dist.all_to_all_single(torch.empty_like(sent), sent, group=group)


@cache
def _prepare_exit() -> None:
    """Once, however many groups there are."""
    atexit.register(let_threads_rest)
    atexit.register(keep_what_was_raised)
    atexit.register(settle_at_exit)


# Of dmuon's own groups, the device of the model: torch sends objects by the current one, on which another rank may be.
_devices: weakref.WeakKeyDictionary[dist.ProcessGroup, torch.device] = weakref.WeakKeyDictionary()


def gather_objects(value: _T, group: dist.ProcessGroup, what: str) -> list[_T]:
    """What each rank of ``group`` gives, in their order. Collective; on the device that the group was made for.

    Raises:
        CollectiveError: it failed; says ``what``.
    """
    values: list[Any] = [None] * group.size()
    with named(what), _on_device_of(group):
        dist.all_gather_object(values, value, group=group)
    return values


def broadcast_object(value: _T, group: dist.ProcessGroup, what: str) -> _T:
    """What the first rank of ``group`` gives; as :func:`gather_objects`."""
    sent = [value]
    with named(what), _on_device_of(group):
        dist.broadcast_object_list(sent, group_src=0, group=group)
    return sent[0]


def _on_device_of(group: dist.ProcessGroup) -> AbstractContextManager[object]:
    device = _devices.get(group) or group.bound_device_id
    if device is None or device.type == "cpu":
        return nullcontext()
    current: AbstractContextManager[object] = torch.get_device_module(device.type).device(device)
    return current


# How many of a name, by the default group. The ranks of a group have made as many, however many others each has made.
_counts: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()


# -- a grid of groups ------------------------------------------------------------------------------------------------


def grid_of_groups(groups: Mapping[str, dist.ProcessGroup | None]) -> RankGrid:
    """The grid whose lines are process groups; collective over every group given.

    Args:
        groups: by role. Groups that are None or have one rank are left out. Stages of a pipeline, ``"pp"``, are
            independent and no part of the grid.

    Raises:
        TypeError, ValueError: before anything communicates, for something else than a group, an unknown role, and a
            group without this rank.
        ValueError: on all ranks alike, for groups that are not the lines of a grid.
    """
    checked = _checked(groups)
    along = {role: group for role, group in checked.items() if role != "pp"}
    lines = {role: ranks_of(group) for role, group in checked.items()}
    sizes = tuple(len(lines[role]) for role in along)
    views: list[tuple[GlobalRank, str]] = _gathered((this_rank(), _overlap(lines)), along.values())
    grid = RankGrid(tuple(along), sizes, tuple(rank for rank, _ in views))
    # A rank whose view all ranks in it share has seen all that the groups join. So either all of them share one view
    # or none finds that they do, and what one raises they all raise.
    digests = _gathered(hashlib.sha256(repr((grid, views)).encode()).hexdigest(), along.values())
    fault = next((fault for _, fault in views if fault), "")
    if not fault and (len(set(grid.ranks)) < prod(sizes) or len(set(digests)) > 1):
        told = " and ".join(f"{role}_pg with ranks {list(line)}" for role, line in lines.items())
        fault = (
            f"{told} are not lines of one grid: {len(set(grid.ranks))} ranks {sorted(set(grid.ranks))} where "
            f"extents {sizes} make {prod(sizes)}, or ranks with other groups"
        )
    if "pp" in checked:
        of_stages = _gathered(fault, [checked["pp"]])
        fault = next((one for one in [fault, *of_stages] if one), "")
    if fault:
        raise ValueError(f"{fault}; any two groups of a rank must share that rank only, as those of a DeviceMesh do")
    return grid


def _checked(groups: Mapping[str, dist.ProcessGroup | None]) -> dict[str, dist.ProcessGroup]:
    """The groups of several ranks in the order of ``ROLES``."""
    for role, group in groups.items():
        if role not in ROLES:
            raise ValueError(f"role {role!r} of a process group is none of {', '.join(ROLES)}")
        if group is None:
            continue
        member: object = group
        if member == dist.GroupMember.NON_GROUP_MEMBER or (
            isinstance(member, dist.ProcessGroup) and dist.get_rank(member) < 0
        ):
            raise ValueError(
                f"{role}_pg does not contain this rank, {this_rank()}; give each rank the group that it is in"
            )
        if not isinstance(member, dist.ProcessGroup):
            raise TypeError(f"{role}_pg must be a torch.distributed ProcessGroup, got {type(member).__name__}")
    ordered = {role: groups.get(role) for role in ROLES}
    return {role: group for role, group in ordered.items() if group is not None and group.size() > 1}


def _overlap(lines: Mapping[str, tuple[GlobalRank, ...]]) -> str:
    """What is wrong where two groups share another rank than this one; empty if nothing is."""
    for (role, line), (other, of_other) in combinations(lines.items(), 2):
        shared = sorted(set(line) & set(of_other))
        if len(shared) > 1:
            return (
                f"{role}_pg holds ranks {list(line)} and {other}_pg ranks {list(of_other)} on rank {this_rank()}: "
                f"both hold {shared}"
            )
    return ""


def _gathered(value: _T, groups: Iterable[dist.ProcessGroup]) -> list[_T]:
    """``value`` of each rank of a grid, in row-major order; ``groups`` from the outermost dimension inwards."""
    values = [value]
    for group in reversed(list(groups)):
        of_ranks = gather_objects(values, group, f"the comparison of process groups of ranks {list(ranks_of(group))}")
        values = [one for of_rank in of_ranks for one in of_rank]
    return values
