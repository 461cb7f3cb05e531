"""Files that are whole or absent, and JSON that is read strictly."""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

_MAX_BYTES = 1 << 26
_NAME = 40  # characters of a file's name in that of its temporary one; a name may have 255 bytes


def write_bytes(path: Path, data: bytes) -> None:
    """Replace the file at ``path`` in one step: readers, other writers and a crash leave the old file or the new one.

    A new file has the permissions that the umask leaves, another keeps its own.

    Raises:
        OSError: the folder cannot be written or is full, or :func:`check_target` refuses the path; what was there is
            left as it is.
    """
    target = check_target(path)
    temporary = target.with_name(f".{target.name[:_NAME]}.{secrets.token_hex(8)}.dmuon-tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
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
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error  # names it, whichever file failed


def check_target(path: Path) -> Path:
    """``path``, if a file may be written there.

    Raises:
        OSError: something that is no regular file is there, which a new file would replace: a device, a pipe, a
            folder; or a symbolic link, which somebody else could have planted to have a file of this user replaced.
    """
    with suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            told = "is a symbolic link, and is not followed; name the file that it stands for"
            raise OSError(errno.EINVAL, told, str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "is no regular file, and is not replaced; name a file", str(path))
    return path


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
    data = read_bytes(path)
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
