"""Files that are whole or absent, JSON that is read strictly, and pictures, for which matplotlib is optional."""

from __future__ import annotations

import errno
import io
import json
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

_MAX_BYTES = 1 << 26
_MAX_LINKS = 40  # as Linux allows on one path
_NAME = 40  # characters of a file's name in that of its temporary one; a name may have 255 bytes
_SUFFIX = ".dmuon-tmp"
_STALE_SECONDS = 3600.0  # after which no writer still writes
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def write_text(path: Path, text: str) -> None:
    """:func:`write_bytes` of ``text`` in UTF-8."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Replace the file at ``path`` in one step: readers, other writers and a crash leave the old file or the new one.

    A new file has the permissions that the umask leaves, another keeps its own. What a symbolic link leads to is
    replaced, and the link stays.

    Raises:
        OSError: the folder cannot be written or is full, or :func:`check_target` refuses the path; what was there is
            left as it is.
    """
    target = check_target(path)
    with _about(path):
        folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _remove_stale(folder, target.name)
            _replace(folder, target, data)
            with suppress(OSError):  # not every file system can, and the file is there
                os.fsync(folder)  # the rename itself survives a crash only if the folder is synced
        finally:
            os.close(folder)


def check_target(path: Path) -> Path:
    """Where what is written at ``path`` goes: ``path`` without symbolic links.

    Raises:
        OSError: something that is no regular file is there, which a new file would replace: a device, a pipe, a
            folder; or another user's link in a folder that others may write, which could lead to any file of this user.
    """
    target = _followed(path)
    with _about(path), suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(target).st_mode):
            raise OSError(errno.EINVAL, "is no regular file, and is not replaced; name a file")
    return target


def _followed(path: Path) -> Path:
    """``path`` without symbolic links, whether or not anything is there."""
    left = list(reversed(path.absolute().parts[1:]))  # what is still to be walked, the next part last
    place, links = Path("/"), 0
    while left:
        part = left.pop()
        if part == "..":
            place = place.parent
            continue
        try:
            about = os.lstat(place / part)
        except OSError:  # it is to be written, or the next call says what is wrong
            place /= part
            continue
        if not stat.S_ISLNK(about.st_mode):
            place /= part
            continue
        if len(place.parts) > 2 and place.parts[1] == "proc":  # /dev/stdout leads here
            raise OSError(errno.EINVAL, "is what a process has open, and no regular file; name a file", str(path))
        links += 1
        if links > _MAX_LINKS:
            raise OSError(errno.ELOOP, "leads through too many symbolic links; name a file", str(path))
        if about.st_uid not in (0, os.geteuid()) and os.lstat(place).st_mode & _OTHERS_WRITE:
            raise OSError(
                errno.EPERM,
                f"leads through {place / part}, a link of another user in a folder that others may write; name the "
                "file that it stands for",
                str(path),
            )
        onward = Path(os.readlink(place / part))
        place = Path("/") if onward.is_absolute() else place
        left += reversed(onward.parts[1:] if onward.is_absolute() else onward.parts)
    return place


@contextmanager
def _about(path: Path) -> Iterator[None]:
    """Errors name ``path``, whatever the file that failed was called."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _replace(folder: int, target: Path, data: bytes) -> None:
    """Write beside ``target``, in ``folder``, and rename."""
    temporary = f".{target.name[:_NAME]}.{secrets.token_hex(8)}{_SUFFIX}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o666, dir_fd=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            with suppress(FileNotFoundError):
                old = os.lstat(target)
                with suppress(OSError):  # another's file becomes this user's, unless root writes it
                    os.fchown(descriptor, old.st_uid, old.st_gid)
                os.fchmod(descriptor, old.st_mode & 0o777)
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        os.replace(target.parent / temporary, target)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)
        raise


def _remove_stale(folder: int, name: str) -> None:
    """Remove what writers of ``name`` have left that were killed."""
    prefix, latest = f".{name[:_NAME]}.", time.time() - _STALE_SECONDS
    for other in os.listdir(folder):
        if other.startswith(prefix) and other.endswith(_SUFFIX):
            with suppress(OSError):  # another writer was faster, or it is not ours
                about = os.stat(other, dir_fd=folder, follow_symlinks=False)
                if stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid() and about.st_mtime < latest:
                    os.unlink(other, dir_fd=folder)


class UnreadableFile(ValueError):
    """Says why there is nothing to read at a path."""


def read_bytes(path: Path, most: int = _MAX_BYTES) -> bytes:
    """What the file at ``path`` holds. Opens nothing else than a file, and waits for no one.

    Raises:
        UnreadableFile: nothing is there, or it is not a file, or not ours to read.
        ValueError: it holds more than ``most`` bytes.
    """
    try:
        _require_file(os.stat(path))  # to open a device may do something already
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY), "rb") as file:
            about = os.fstat(file.fileno())
            _require_file(about)
            data = file.read(most + 1) if about.st_size <= most else b""
    except FileNotFoundError:
        raise UnreadableFile("no such file") from None
    except OSError as error:
        raise UnreadableFile(f"cannot be read ({error.strerror})") from error
    if max(about.st_size, len(data)) > most:
        raise ValueError(f"larger than {most} bytes")
    return data


def _require_file(about: os.stat_result) -> None:
    if not stat.S_ISREG(about.st_mode):
        raise UnreadableFile("not a file")  # a pipe would never end


def read_json(path: Path) -> Any:
    """What the file at ``path`` holds; a field that appears twice is refused.

    NaN and infinities are floats, as ``json`` writes them: whoever reads a field checks it.

    Raises:
        UnreadableFile: nothing is there, or it is not a file, or not ours to read.
        ValueError: what is wrong with the content, for a message that names the file.
    """
    return parse_json(read_bytes(path))


def parse_json(data: bytes) -> Any:
    """What ``data`` holds, read as strictly as :func:`read_json` reads."""
    try:
        return json.loads(data.decode(), object_pairs_hook=_unique)
    except _RepeatedField as error:
        raise ValueError(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"corrupt or truncated JSON ({error})") from None


class _RepeatedField(Exception):
    """Well-formed JSON, of which readers would take this field or that."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise _RepeatedField(f"field {next(n for n in names if names.count(n) > 1)!r} appears twice")
    return result


def new_figure(width: float, height: float, *, layout: Literal["constrained", "tight"] = "constrained") -> Any:
    """An empty ``matplotlib.figure.Figure`` of so many inches, which knows no window and no other figure.

    Args:
        layout: who keeps labels apart, as ``Figure`` takes it.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("drawing needs matplotlib; install it with pip install 'dmuon[bench]'") from None
    return Figure(figsize=(width, height), layout=layout)


def save_png(figure: Any, path: Path) -> None:
    """Replace the file at ``path`` by the picture, in one step.

    Raises:
        OSError: the folder cannot be written; what was there is left as it is.
    """
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110)
    write_bytes(path, image.getvalue())
