"""What dmuon says in its log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def _handled(level: int, emit: Callable[[logging.LogRecord], None]) -> Iterator[None]:
    handler = logging.Handler(level)
    handler.emit = emit  # type: ignore[method-assign]
    log = logging.getLogger("dmuon")
    before = log.level
    log.addHandler(handler)
    log.setLevel(level)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


@contextmanager
def recorded(level: int = logging.WARNING) -> Iterator[list[logging.LogRecord]]:
    """Records of this level and above."""
    records: list[logging.LogRecord] = []
    with _handled(level, records.append):
        yield records


@contextmanager
def heard(level: int = logging.WARNING) -> Iterator[list[str]]:
    """Messages of this level and above."""
    told: list[str] = []
    with _handled(level, lambda record: told.append(record.getMessage())):
        yield told
