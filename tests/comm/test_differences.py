"""What ranks were given is compared by digests; what differs is told on all of them, and never all of it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from harness.on_ranks import on_ranks

from dmuon.comm.agreement import Difference, agree, differences, require_same
from dmuon.layout.topology import listed

MANY = 3000
SEED = [(f"parameter {i}", "whole") for i in range(MANY)]


def gathered_bytes(what: Any) -> int:
    """Of the objects that ``what`` gathers from the ranks or is sent, on this one."""
    nbytes = 0
    gather, broadcast = dist.all_gather_object, dist.broadcast_object_list

    def counted_gather(items: list[Any], *args: Any, **options: Any) -> None:
        nonlocal nbytes
        gather(items, *args, **options)
        nbytes += len(repr(items))

    def counted_broadcast(items: list[Any], *args: Any, **options: Any) -> None:
        nonlocal nbytes
        broadcast(items, *args, **options)
        nbytes += len(repr(items))

    with (
        mock.patch.object(dist, "all_gather_object", counted_gather),
        mock.patch.object(dist, "broadcast_object_list", counted_broadcast),
    ):
        what()
    return nbytes


@pytest.mark.pitfall("P79")
@on_ranks(3)
def test_what_is_the_same_costs_a_digest_of_each_rank(rank: int, world: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    assert gathered_bytes(lambda: differences(group, None, dict(SEED))) < 300 * world
    assert gathered_bytes(lambda: require_same(group, range(world), None, SEED, None)) < 300 * world


@pytest.mark.pitfall("P80")
@on_ranks(3)
def test_what_differs_is_the_same_on_all_ranks_and_short(rank: int, world: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    items = dict(SEED)
    if rank == 1:
        items["parameter 7"] = "sharded"
        items["a new one"] = "whole"
        del items["parameter 2999"]
    if rank == 2:
        items = dict.fromkeys(items, "absent")
    found: list[Difference] = []
    nbytes = gathered_bytes(lambda: found.extend(differences(group, None, items)))
    assert nbytes < len(repr(dict(SEED))) + 4000, "the first rank's items, and a few of each other rank's"
    assert len(set(map(tuple, agree(group, None, [str(one) for one in found])))) == 1
    assert [one for one in found if one.rank == 1] == [
        Difference("parameter 7", 1, "sharded", "whole"),
        Difference("parameter 2999", 1, None, "whole"),
        Difference("a new one", 1, "whole", None),
    ]
    of_last = [one for one in found if one.rank == 2]
    assert 1 <= len(of_last) <= 8 and all((one.value, one.first) == ("absent", "whole") for one in of_last)
    with pytest.raises(ValueError, match="parameter 7 is sharded on rank 1 and whole on rank 0; build the same model"):
        require_same(group, range(world), None, list(items.items()), None)


@on_ranks(2)
def test_an_order_that_differs_is_told(rank: int, world: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    with pytest.raises(ValueError, match="the parameters come in another order on some ranks"):
        require_same(group, range(world), None, SEED[:: -1 if rank else 1], None)


def test_a_message_names_some_of_many_ranks() -> None:
    assert listed([0, 2, 5]) == "0, 2, 5"
    assert listed(range(1000), " ") == f"{' '.join(map(str, range(16)))} … 999 (1000 in all)"
