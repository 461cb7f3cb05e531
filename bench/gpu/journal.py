"""Results as they come: each is printed and on disk before the next one is computed, and a failure is a result too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from common.results import write_json

SECTIONS = ("products", "shapes", "models", "faults")


class DeviceLost(RuntimeError):
    """After an illegal access, say, nothing runs on the device any more in this process."""


class Journal:
    """A document that grows by rows.

    Args:
        path: of the JSON file that is written anew with every row; None: none is.
        head: what it begins with.
    """

    def __init__(self, path: Path | None, head: dict[str, Any]) -> None:
        self._path = path
        self.document: dict[str, Any] = {**head, **{section: [] for section in SECTIONS}}
        print(", ".join(f"{key} {value}" for key, value in head.items()), flush=True)
        self._write()

    def add(self, section: str, row: dict[str, Any], line: str) -> None:
        self.document[section].append(row)
        if line:
            print(line, flush=True)
        self._write()

    @contextmanager
    def guarded(self, what: str, ours: bool = True) -> Iterator[None]:
        """What fails inside is a row of ``faults``.

        Args:
            ours: whether it would be a fault of dmuon's; want of memory never is.

        Raises:
            DeviceLost: nothing will run any more.
        """
        try:
            yield
        except Exception as error:  # whatever a compiler or a driver may raise
            ours = ours and not isinstance(error, torch.OutOfMemoryError)
            text = f"{type(error).__name__}: {error}"
            self.add("faults", {"what": what, "fault": text, "ours": ours}, f"FAILED {what}: {text[:300]}")
        else:
            return
        if torch.cuda.is_available():
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except RuntimeError as error:
                raise DeviceLost(f"{what}: {error}") from None

    def note(self, **values: Any) -> None:
        self.document |= values
        self._write()

    @property
    def wrong(self) -> bool:
        """Whether something of dmuon's failed."""
        return any(row["ours"] for row in self.document["faults"])

    def _write(self) -> None:
        if self._path is not None:
            write_json(self._path, self.document)
