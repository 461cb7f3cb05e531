"""The ranks, and what they exchange through the rendezvous store, which works where collectives fail."""

from __future__ import annotations

import base64
import os
import pickle
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

_MINUTE = timedelta(minutes=1)


class Ranks:
    """All processes of the launch, or this one alone where nothing launched several.

    Args:
        backend: of process groups.
        timeout: of their collectives; :meth:`gather` waits three times as long for the slowest rank, or a minute.

    Raises:
        RuntimeError, ValueError: the processes did not find each other.
    """

    def __init__(self, backend: str, timeout: timedelta) -> None:
        self.rank = 0
        self.world = 1
        self._store: Store = dist.HashStore()  # type: ignore[attr-defined]
        if "RANK" in os.environ:
            self._store, self.rank, self.world = next(
                dist.rendezvous("env://", timeout=max(timeout, _MINUTE))  # type: ignore[attr-defined]
            )
        self._backend = backend
        self._timeout = timeout
        self._gathers = 0
        self._groups = 0

    def start_group(self) -> None:
        """Make a default process group. Names of groups recur, so each has a part of the store to itself."""
        store = PrefixStore(f"dmuon-check/group/{self._groups}", self._store)
        self._groups += 1
        dist.init_process_group(
            self._backend, store=store, rank=self.rank, world_size=self.world, timeout=self._timeout
        )

    def end_group(self) -> None:
        """Destroy it and all others: on NCCL each holds a communicator."""
        dist.destroy_process_group()

    def gather(self, item: Any) -> list[Any]:
        """Every rank's ``item``, by rank; all ranks make the same series of calls.

        Raises:
            RuntimeError: a rank did not come in time, or the store is gone with its process.
        """
        number, self._gathers = self._gathers, self._gathers + 1
        keys = [self._key(number, rank) for rank in range(self.world)]
        if self.rank != 0:
            self._store.set(keys[self.rank], _dumps(item))
            everyone: list[Any] = _loads(self._read(self._key(number, "all")))
            return everyone
        items = [item] + [_loads(self._read(key)) for key in keys[1:]]
        self._store.set(self._key(number, "all"), _dumps(items))
        if number > 0:  # everybody has read what came before, or would not be here
            for stale in ("all", *range(1, self.world)):
                self._store.delete_key(self._key(number - 1, stale))
        return items

    def _key(self, number: int, rank: int | str) -> str:
        return f"dmuon-check/gather/{number}/{rank}"

    def _read(self, key: str) -> bytes:
        self._store.wait([key], max(3 * self._timeout, _MINUTE))
        value: bytes = self._store.get(key)
        return value


def _dumps(item: Any) -> str:
    return base64.b64encode(pickle.dumps(item)).decode()


def _loads(data: bytes) -> Any:
    return pickle.loads(base64.b64decode(data))  # written by this program on another rank
