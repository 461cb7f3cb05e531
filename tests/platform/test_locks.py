"""A lock is held by one process at a time, waited for no longer than was asked, and never harms what lies there."""

from __future__ import annotations

import fcntl
import os
import stat
import time
import warnings
from pathlib import Path

import pytest

from dmuon.planning import cost_cache
from dmuon.planning.cost_cache import CacheKey, CostCache, Timing, user_cache_path
from dmuon.planning.cost_lookup import cached_entries, store
from dmuon.platform.locks import hold_lock

CACHE = CostCache(
    CacheKey("Device of this test", 0, "", "2.13", "", "float32", "abc", "classic", 5),
    {(64, 64): {1: Timing(100_000, 100_000, 100_000, 9)}},
)


@pytest.mark.pitfall("P71")
def test_a_lock_that_another_process_keeps_is_waited_for_as_long_as_asked(tmp_path: Path) -> None:
    path = tmp_path / ".costs.lock"
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        with hold_lock(path, 1.0):
            os.write(writing, b"x")
            time.sleep(60)
        os._exit(0)
    try:
        os.read(reading, 1)
        begin = time.monotonic()
        says = r"another process has held this lock for 0.3 s.*\.costs\.lock"
        with pytest.raises(OSError, match=says), hold_lock(path, 0.3):
            pass
        assert 0.3 <= time.monotonic() - begin < 5.0
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)
    with hold_lock(path, 10.0), pytest.raises(OSError, match="held this lock for 0 s"), hold_lock(path, 0):
        pass


@pytest.mark.pitfall("P71")
def test_a_process_forked_while_a_lock_was_held_does_not_keep_it(tmp_path: Path) -> None:
    with hold_lock(tmp_path / "lock", 1.0):
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
    try:
        with hold_lock(tmp_path / "lock", 0):
            pass
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


@pytest.mark.pitfall("P71", "P72")
@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "folder", "device"])
def test_what_lies_in_a_locks_place_is_left_as_it_is(tmp_path: Path, kind: str) -> None:
    path, precious = tmp_path / "lock", tmp_path / "precious"
    match kind:
        case "link":
            precious.write_text("precious")
            path.symlink_to(precious)
        case "dangling link":
            path.symlink_to(precious)
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "device":
            if os.geteuid():
                pytest.skip("only root makes devices")
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
    says = r"is no regular file, so it cannot be a lock; remove it.*lock"
    with pytest.raises(OSError, match=says), hold_lock(path, 1.0):
        pass
    if kind == "link":
        assert precious.read_text() == "precious"
    else:
        assert not precious.exists()


@pytest.mark.pitfall("P71")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["held", "link", "pipe"])
def test_a_cost_cache_that_cannot_be_locked_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cost_cache, "_LOCK_SECONDS", 0.3)
    path = user_cache_path(CACHE.key)
    path.parent.mkdir()
    lock, precious = path.with_name(f".{path.name}.lock"), tmp_path / "precious"
    precious.write_text("precious")
    begin = time.monotonic()
    with open(lock if kind == "held" else tmp_path / "unused", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if kind == "link":
            lock.symlink_to(precious)
        elif kind == "pipe":
            os.mkfifo(lock)
        with pytest.warns(UserWarning, match="cannot be written .*lock.*; costs will be measured again next time"):
            assert store(CACHE) is None
    assert time.monotonic() - begin < 10.0
    assert precious.read_text() == "precious" and not path.exists()


@pytest.mark.pitfall("P71", "P72")
@pytest.mark.timeout(60)
def test_a_pipe_in_the_users_cache_is_named_left_and_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = user_cache_path(CACHE.key)
    path.parent.mkdir()
    os.mkfifo(path)
    with pytest.warns(UserWarning, match=f"cost cache {path}: not a file; .*; measuring anew"):
        assert cached_entries(CACHE.key) == ({}, "")
    with pytest.warns(UserWarning, match="cannot be written .*is no regular file"):
        assert store(CACHE) is None
    assert stat.S_ISFIFO(os.lstat(path).st_mode)
    path.unlink()
    path.write_bytes(b"junk")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store(CACHE) == str(path)
    assert CostCache.load(path) == CACHE
