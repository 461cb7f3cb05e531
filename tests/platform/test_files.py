"""What is written is whole, where the user meant it, and nobody else's; what is read is a file of bounded size."""

from __future__ import annotations

import errno
import os
import resource
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dmuon import OwnerPlan
from dmuon.platform.files import read_bytes, write_bytes
from dmuon.tools.cli import require_target


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# -- what is written -----------------------------------------------------------------------------------------------


@pytest.mark.pitfall("P72")
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_a_new_file_has_what_the_umask_leaves_and_an_old_one_keeps_its_mode(
    tmp_path: Path, umask: int, mode: int
) -> None:
    before = os.umask(umask)
    try:
        write_bytes(tmp_path / "new", b"1")
        (tmp_path / "old").touch(0o600)
        (tmp_path / "old").chmod(0o640)
        write_bytes(tmp_path / "old", b"2")
    finally:
        os.umask(before)
    assert (mode_of(tmp_path / "new"), mode_of(tmp_path / "old")) == (mode, 0o640)
    assert (tmp_path / "new").read_text() + (tmp_path / "old").read_text() == "12"


@pytest.mark.pitfall("P72")
def test_a_link_is_not_followed_whoever_planted_it(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    link = tmp_path / "plan.json"
    link.symlink_to("precious")
    with pytest.raises(OSError, match=r"is a symbolic link, and is not followed; name the file that it .*plan\.json"):
        write_bytes(link, b"new")
    assert (tmp_path / "precious").read_text() == "precious" and link.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["plan.json", "precious"]


def fifo(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.pitfall("P72")
@pytest.mark.parametrize(
    "make",
    [fifo, Path.mkdir, lambda path: path.symlink_to("/dev/null")],
    ids=["a pipe", "a folder", "a link to a device"],
)
def test_what_is_no_file_is_neither_replaced_nor_written(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "out"
    make(path)
    before = os.lstat(path), os.stat("/dev/null").st_ino
    with pytest.raises(OSError, match=r"is (no regular file|a symbolic link), and is not .*out"):
        write_bytes(path, b"new")
    with pytest.raises(Exception, match=r"--json .*(no regular file|a symbolic link|is a folder)"):
        require_target("--json", path)
    after = os.lstat(path), os.stat("/dev/null").st_ino
    assert (after[0].st_ino, after[0].st_mode, after[1]) == (before[0].st_ino, before[0].st_mode, before[1])
    assert os.listdir(tmp_path) == ["out"]


def write_too_much(path: Path) -> None:
    """In a process that may write 4 KiB to a file."""
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            write_bytes(path, bytes(100_000))
        except OSError as error:
            os._exit(error.errno if error.filename == str(path) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == errno.EFBIG


@pytest.mark.pitfall("P49", "P72")
def test_a_file_that_does_not_fit_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_bytes(path, b"old")
    write_too_much(path)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["plan.json"]


# -- what is read --------------------------------------------------------------------------------------------------


READERS: dict[str, Callable[[Path], object]] = {
    "bytes": read_bytes,
    "plan": OwnerPlan.load,
}


@pytest.mark.pitfall("P71")
@pytest.mark.timeout(20)
@pytest.mark.parametrize("reader", READERS.values(), ids=list(READERS))
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, reader: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "link", Path("/dev/zero"), Path("/dev/full")):
        begin = time.monotonic()
        with pytest.raises(ValueError, match="not a file"):
            reader(path)
        assert time.monotonic() - begin < 5.0, path


@pytest.mark.pitfall("P71")
def test_a_file_larger_than_any_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "huge.json"
    path.touch()
    os.truncate(path, 1 << 40)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for reader in READERS.values():
        with pytest.raises(ValueError, match="larger than 67108864 bytes"):
            reader(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 1 << 15, "KiB"
    assert read_bytes(Path("/proc/self/status")), "which says that it is empty"
    with pytest.raises(ValueError, match="larger than 10 bytes"):
        read_bytes(Path("/proc/self/status"), 10)
    with pytest.raises(ValueError, match="no such file"):
        read_bytes(tmp_path / "none")
