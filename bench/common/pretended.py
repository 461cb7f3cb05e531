"""One rank of many, alone: torch's fake process group, in which collectives return at once, and what is said of others.

What this rank gathers of the others it has said itself. Where that cannot be so it is made up: they stand on hosts of
``PER_HOST`` ranks each, and within :func:`dissent` they were all given something else than this rank. Results of
collectives mean nothing, so nothing that is computed does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from socket import gethostname
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

PER_HOST = 8
DIGEST = 64  # letters of the digests that ranks compare
TOLD = 8  # differences that each other rank tells of
COUNTED = (
    "all_gather_into_tensor",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all_single",
    "broadcast",
    "broadcast_object_list",
    "reduce",
    "reduce_scatter_tensor",
    "reduce_scatter",
    "scatter",
)


def pretend(world: int) -> Counter[str]:
    """Be rank 0 of ``world`` from now on, in this process.

    Returns:
        How often each collective is started from now on.
    """
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    gather = dist.all_gather_object

    def gather_object(items: list[Any], item: object, group: dist.ProcessGroup | None = None) -> None:
        gather(items, item, group=group)
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        items[:] = [_said_by(rank, item) for rank, item in zip(ranks, items, strict=True)]

    def all_to_all(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output.zero_()  # what lies in new memory may be slow to compute with
        return dist.group.WORLD.barrier()

    dist.all_gather_object = gather_object
    dist.all_to_all_single = all_to_all
    counts: Counter[str] = Counter()
    for name in COUNTED:
        setattr(dist, name, _counting(getattr(dist, name), name, counts))
    return counts


_dissenting = False


@contextmanager
def dissent() -> Iterator[None]:
    """Inside, all other ranks were given something else than this one wherever they compare it."""
    global _dissenting
    _dissenting = True
    try:
        yield
    finally:
        _dissenting = False


def _said_by(rank: int, item: Any) -> Any:
    """What ``rank`` would say where rank 0 says ``item``: where it stands, and its own number."""
    if _dissenting and rank and isinstance(item, str) and len(item) == DIGEST:
        return item[::-1]
    if _dissenting and rank and item == []:  # how this rank, the first one, differs from itself
        return [(f"{rank * TOLD + i}", f"something of rank {rank}", "something else") for i in range(TOLD)]
    if item == gethostname():
        return f"host {rank // PER_HOST}"
    if isinstance(item, tuple):
        if len(item) == 3 and item[0] == gethostname() and item[1] == [0]:
            return _said_by(rank, item[0]), [rank], item[2]  # a seat without tensor parallelism
        return tuple(_said_by(rank, part) for part in item)
    return item


def _counting(function: Callable[..., Any], name: str, counts: Counter[str]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return function(*args, **kwargs)

    return call
