"""What nothing public shows or sets, of dmuon and of torch: each in one place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import dmuon
from dmuon.dedicated import replicated


@contextmanager
def buckets_of(nbytes: int) -> Iterator[None]:
    """Inside, replicated gradients are averaged in buckets of so many bytes: several of a toy, as of any embedding."""
    with mock.patch.object(replicated, "_BUCKET_BYTES", nbytes):
        yield


def exchange_of(optimizer: dmuon.Muon) -> Any:
    exchange = optimizer._exchange
    assert exchange is not None, "nothing is exchanged"
    return exchange


def default_store() -> dist.Store:
    """That of the default group, of which another can be made when it is gone."""
    store: dist.Store = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    return store


def limit_of(group: dist.ProcessGroup) -> timedelta:
    """How long its collectives wait."""
    limit: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return limit


def group_names() -> set[str]:
    """Of all process groups that this process has."""
    return set(dist.distributed_c10d._world.pg_names.values())
