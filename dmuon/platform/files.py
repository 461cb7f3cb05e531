"""Files that are whole or absent, JSON that is read strictly, and pictures, for which matplotlib is optional."""

from __future__ import annotations

import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any, Literal

_MAX_BYTES = 1 << 26


def write_text(path: Path, text: str) -> None:
    """:func:`write_bytes` of ``text`` in UTF-8."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Replace the file at ``path`` in one step: readers, other writers and a crash leave the old file or the new one.

    Raises:
        OSError: the folder cannot be written; what was there is left as it is.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    folder = os.open(path.parent, os.O_RDONLY)  # the rename itself survives a crash only if the folder is synced
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class UnreadableFile(ValueError):
    """Says why there is nothing to read at a path."""


def read_json(path: Path) -> Any:
    """What the file at ``path`` holds; a field that appears twice is refused.

    NaN and infinities are floats, as ``json`` writes them: whoever reads a field checks it.

    Raises:
        UnreadableFile: nothing is there, or it is not a file, or not ours to read.
        ValueError: what is wrong with the content, for a message that names the file.
    """
    try:
        if path.exists() and not path.is_file():
            raise UnreadableFile("not a file")  # a pipe would never end
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise UnreadableFile("no such file") from None
    except OSError as error:
        raise UnreadableFile(f"cannot be read ({error.strerror})") from error
    if len(data) > _MAX_BYTES:
        raise ValueError(f"larger than {_MAX_BYTES} bytes")
    return parse_json(data)


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
