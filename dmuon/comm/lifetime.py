"""Process groups that are made once, and collectives that nobody waits for any more.

A back end keeps threads and connections for each group, an accelerator's also memory, and ranks would have to come
together to destroy one. So nothing of dmuon's is destroyed before the default group is: as with the groups of a
``DeviceMesh``, the same ranks get the same group for the same purpose, whichever model or optimizer asks. Several of
them may be alive at once: their collectives come in one order on all ranks, which their votes compare
(:class:`dmuon.comm.monitor.Monitor`).

Behind a failure groups are not used again: what some ranks have started there may still wait for the others.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Hashable, Iterable

import torch.distributed as dist

from dmuon.platform.host import keep_for_ever

# By the default group, and by what a group is for. Another default group, perhaps on another store, has none yet.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, dist.ProcessGroup]] = weakref.WeakKeyDictionary()
_left: list[dist.Work] = []


def groups_made() -> dict[Hashable, dist.ProcessGroup]:
    """The groups that were made under the present default group, by what they are for."""
    assert dist.group.WORLD is not None
    return _made.setdefault(dist.group.WORLD, {})


def forget_groups() -> None:
    """Make all groups anew from now on. Whoever has one keeps it."""
    if dist.group.WORLD is not None:
        groups_made().clear()


def leave(works: Iterable[dist.Work], *, patience: float) -> None:
    """Keep collectives that nobody will wait for, until they end.

    Args:
        patience: seconds in which they should; what lasts longer, and what it uses, is kept until others are left.
    """
    works = list(works)
    deadline = time.monotonic() + patience
    while not all(work.is_completed() for work in works) and time.monotonic() < deadline:
        time.sleep(0.001)
    _left[:] = [work for work in [*_left, *works] if not work.is_completed()]


def keep_left() -> None:
    """At exit: what is under way is never freed.

    [Note: who keeps a tensor alive] does not end here: a thread of a back end that drops the last reference to a tensor
    needs the interpreter for it, and aborts the process if that has ended.
    """
    keep_for_ever(_left)
