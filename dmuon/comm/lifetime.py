"""Process groups that live as long as what communicates over them.

A back end keeps threads, connections and keys in the rendezvous store for each group until that is destroyed. With gloo
each rank does so by itself, as soon as the last user is gone: perhaps in a garbage collection, at another time than the
others. With NCCL its ranks must come together for it, so it waits until they make groups again
(:func:`dmuon.comm.agreement.destroy_released`).
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache

import torch.distributed as dist

from dmuon.comm.process_groups import ranks_of
from dmuon.layout.topology import GlobalRank
from dmuon.platform.host import keep_for_ever
from dmuon.platform.torch_private import backends_of, default_store, has_group, keys_in

_PATIENCE = 2.0  # seconds for what is under way to arrive when its users are gone


class Groups:
    """Process groups of one user, such as a dedicated model, that are released with the last reference to this."""

    def __init__(self) -> None:
        self._made: list[dist.ProcessGroup] = []
        self._works: list[dist.Work] = []
        _users.add(self)
        self._release = weakref.finalize(self, _release, self._made, self._works)
        self._release.atexit = False  # whatever is alive at exit ends with the process

    def keep(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """``group``, of :func:`dmuon.comm.process_groups.make_group`, is released with the others."""
        _prepare_exit()
        self._made.append(group)
        assert dist.group.WORLD is not None
        _homes[group] = weakref.ref(dist.group.WORLD)
        _forget_keys()
        return group

    def leave(self, works: Iterable[dist.Work]) -> None:
        """Keep collectives that nobody will wait for: their groups may not be destroyed before they end."""
        self._works[:] = [work for work in [*self._works, *works] if not work.is_completed()]

    def release(self) -> None:
        """No one uses the groups any more, whatever still refers to them."""
        self._release()


@dataclass(frozen=True, slots=True, eq=False)
class _Released:
    """Groups without a user, and collectives over them that may not have ended."""

    groups: list[dist.ProcessGroup]
    works: list[dist.Work]

    def destroy(self) -> None:
        """Destroy each group of which a rank may do so by itself, unless something is under way."""
        self.works[:] = [work for work in self.works if not work.is_completed()]
        for group in [] if self.works else list(self.groups):
            if not has_group(group):  # somebody has destroyed it, or all of them
                self.groups.remove(group)
            elif ends_alone(group):
                self.groups.remove(group)
                _destroy(group)


_released: list[_Released] = []
_users: weakref.WeakSet[Groups] = weakref.WeakSet()
# The default group by each of these: names recur after another has been initialized, perhaps on another store.
_homes: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[dist.ProcessGroup]] = weakref.WeakKeyDictionary()
_destroyed: list[tuple[weakref.ref[dist.ProcessGroup], str, int]] = []  # homes, names and sizes; keys are in the store


@cache
def _prepare_exit() -> None:
    """Once, however many groups there are."""
    atexit.register(_keep_unfinished)


def _keep_unfinished() -> None:
    """Collectives that are under way at exit are never freed: [Note: who keeps a tensor alive] does not end there."""
    for works in [*(user._works for user in _users), *(released.works for released in _released)]:
        keep_for_ever(works)


def _release(made: list[dist.ProcessGroup], works: list[dist.Work]) -> None:
    deadline = time.monotonic() + _PATIENCE
    for work in works:
        with suppress(Exception):  # it has failed, or does not end in time
            work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
    _released.append(_Released(made, works))
    for released in list(_released):
        released.destroy()
    _released[:] = [released for released in _released if released.groups]


def _destroy(group: dist.ProcessGroup) -> None:
    _destroyed.append((_homes[group], group.group_name, group.size()))
    dist.destroy_process_group(group)


def ends_alone(group: dist.ProcessGroup) -> bool:
    """Whether each rank of ``group`` may destroy it by itself: nothing that another rank does waits for that."""
    return backends_of(group) == {"gloo"}


def released_among(ranks: Collection[GlobalRank]) -> dict[str, tuple[GlobalRank, ...]]:
    """By name, the ranks of groups without users that still exist; of those that lie within ``ranks``."""
    groups = [group for released in _released for group in released.groups if has_group(group)]
    lines = {group.group_name: ranks_of(group) for group in groups}
    return {name: line for name, line in lines.items() if set(line) <= set(ranks)}


def destroy(names: Sequence[str]) -> None:
    """Destroy groups of :func:`released_among`, in this order. Collective over their ranks."""
    groups = {str(group.group_name): (released, group) for released in _released for group in released.groups}
    for name in names:
        released, group = groups[name]
        released.groups.remove(group)
        _destroy(group)
    _released[:] = [released for released in _released if released.groups]


def _forget_keys() -> None:
    """Delete what destroyed groups have left in the store: the last rank of each group does.

    Not when they are destroyed, perhaps after a fault: the host of the store may not answer. Who makes a group needs it
    anyway.
    """
    destroyed = [(name, size) for home, name, size in _destroyed if home() is dist.group.WORLD]
    _destroyed.clear()
    store = default_store()
    with suppress(RuntimeError, NotImplementedError):  # a store of another kind, that keeps them
        finished = [name for name, size in destroyed if store.add(f"{name}/released", 1) == size]
        for key in keys_in(store) if finished else []:
            if key.startswith(tuple(f"{name}/" for name in finished)):
                store.delete_key(key)
