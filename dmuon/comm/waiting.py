"""Says which ranks have not come, where this one waits long for a collective."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch.distributed as dist

from dmuon.platform.log import logger
from dmuon.platform.torch_private import default_store

_SECONDS = 30.0  # of waiting, before it is told
_POLL_SECONDS = 5.0
_log = logger(__name__)


@dataclass(slots=True, eq=False)
class Wait:
    """One collective for which the host waits.

    Attributes:
        key: of the store, the same on all ranks that wait for this.
        ranks: that take part, or some of them do.
    """

    what: str
    key: str
    ranks: Sequence[int]
    began: float = field(default_factory=time.monotonic)
    told: bool = False


_waits: set[Wait] = set()
_watcher: threading.Thread | None = None


def begin(what: str, key: str, ranks: Sequence[int]) -> Wait:
    """Note that this rank waits. A thread looks at what was noted every few seconds; a step pays for the note alone."""
    global _watcher
    wait = Wait(what, key, ranks)
    _waits.add(wait)
    if _watcher is None or not _watcher.is_alive():
        _watcher = threading.Thread(target=_watch, name="dmuon-waits", daemon=True)
        _watcher.start()
    return wait


def end(wait: Wait) -> None:
    _waits.discard(wait)


def _watch() -> None:
    marked: set[Wait] = set()
    while True:
        time.sleep(_POLL_SECONDS)
        with suppress(Exception):  # of a store whose host is gone, or of a default group that is
            for over in marked - _waits:
                marked.discard(over)
                default_store().delete_key(f"{over.key} {dist.get_rank()}")
            for wait in _waits.copy():
                waited = time.monotonic() - wait.began
                if waited >= _POLL_SECONDS and wait not in marked:
                    marked.add(wait)
                    default_store().set(f"{wait.key} {dist.get_rank()}", "")
                if waited >= _SECONDS and not wait.told:
                    wait.told = True
                    _tell(wait, waited)


def _tell(wait: Wait, seconds: float) -> None:
    """By the first of the ranks that wait."""
    there = [rank for rank in wait.ranks if default_store().check([f"{wait.key} {rank}"])]
    if there and there[0] == dist.get_rank():
        missing = [rank for rank in wait.ranks if rank not in there]
        named = " ".join(map(str, missing[:16])) + (" …" if missing[16:] else "")
        whom = f"ranks {named} do not wait for it too: let every rank come there" if missing else "all ranks have come"
        _log.warning("%s has waited for %.0f s, and %s", wait.what, seconds, whom)
