"""Says which ranks have not come, where this one waits long for a collective."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from dmuon.platform.log import logger
from dmuon.platform.torch_private import default_store

_SECONDS = 30.0  # of waiting, before it is told
_POLL_SECONDS = 5.0
_OURS = Path(__file__).parents[1]
_TORCH = Path(torch.__file__).parent
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


def _of_torch() -> str | None:
    """The collective of FSDP2 or of a checkpoint in which the main thread stands.

    One that the program calls itself, such as a barrier, may take as long as it likes.
    """
    inner = frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None or not Path(frame.f_code.co_filename).is_relative_to(_TORCH / "distributed"):
        return None
    name = frame.f_code.co_name
    while frame.f_back and any(map(Path(frame.f_code.co_filename).is_relative_to, (_TORCH, _OURS))):
        inner, frame = frame, frame.f_back
    if inner is None or Path(inner.f_code.co_filename).name in ("c10d_logger.py", "distributed_c10d.py"):
        return None
    return f"{name}() of torch.distributed, for {Path(frame.f_code.co_filename).name}:{frame.f_lineno},"


def _watch() -> None:
    marked: set[Wait] = set()
    clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
    used, of_torch = time.clock_gettime(clock), None
    while True:
        time.sleep(_POLL_SECONDS)
        with suppress(Exception):  # of a store whose host is gone, or of a default group that is
            # A thread that has waited all the time has computed nothing.
            before, used = used, time.clock_gettime(clock)
            what = _of_torch() if used - before < 0.02 * _POLL_SECONDS and not _waits - {of_torch} else None
            if of_torch is not None and of_torch.what != what:
                end(of_torch)
                of_torch = None
            if of_torch is None and what is not None:
                of_torch = begin(what, what, range(dist.get_world_size()))
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
