"""Locks between processes, by a file that nothing is written to, and waited for within a deadline."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_POLL_SECONDS = 0.02


@contextmanager
def hold_lock(path: Path, seconds: float) -> Iterator[None]:
    """Hold the lock file at ``path``, made where it is missing; the system drops it when the process ends.

    Args:
        seconds: to wait for another process that holds it, perhaps suspended.

    Raises:
        OSError: it was not free in that time; or what is there is no regular file, or a link; or no file can be made.
    """
    with suppress(FileNotFoundError):
        _require_lock_file(os.lstat(path), path)  # to open a device may do something already
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # it may be another's: no O_TRUNC
    descriptor = os.open(path, flags, 0o666)
    try:
        _require_lock_file(os.fstat(descriptor), path)
        _take(descriptor, path, time.monotonic() + seconds, seconds)
        try:
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that was forked meanwhile has the descriptor too
    finally:
        os.close(descriptor)


def _require_lock_file(about: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(about.st_mode):
        raise OSError(errno.EINVAL, "is no regular file, so it cannot be a lock; remove it", str(path))


def _take(descriptor: int, path: Path, deadline: float, seconds: float) -> None:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                says = f"another process has held this lock for {seconds:g} s; end that process, or resume it"
                raise OSError(errno.EWOULDBLOCK, says, str(path)) from None
        time.sleep(_POLL_SECONDS)
