"""What dmuon says in its log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heard(level: int = logging.WARNING) -> Iterator[list[str]]:
    """Messages of this level and above."""
    told: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("dmuon")
    before = log.level
    log.addHandler(handler)
    log.setLevel(level)
    try:
        yield told
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
