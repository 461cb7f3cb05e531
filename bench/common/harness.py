"""How every bench runs: options, the measurement, one record, and tables that are printed from the record alone."""

from __future__ import annotations

import inspect
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from common.options import Options, RankOptions, parse
from common.ranks import run_ranks
from common.results import head, told, write_json

S = TypeVar("S", bound=Options)
R = TypeVar("R", bound=RankOptions)
Record = dict[str, Any]


def run(
    kind: type[S],
    text: str | None,
    measure: Callable[[S], Record],
    table: Callable[[Record], str],
    argv: Sequence[str] | None = None,
    *,
    fault: Callable[[S], str] | None = None,
) -> int:
    """Measure and print, or print what was measured before.

    Args:
        measure: what it returns is the record's, beside command, machine, versions, commit, date, seconds and settings.
        table: the record as text.
        fault: what is wrong with the settings, if its fields do not say it themselves.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser, settings = parse(kind, text, argv)
    if settings.read is not None:
        record = json.loads(Path(settings.read).read_text())
    else:
        if fault is not None and (problem := fault(settings)):
            parser.error(problem)
        begun = time.perf_counter()
        found = measure(settings)
        chosen = {name: value for name, value in asdict(settings).items() if name not in ("json", "read")}
        about = {**head(Path(inspect.getfile(kind)).name, argv), "seconds": round(time.perf_counter() - begun, 1)}
        record = json.loads(json.dumps({**about, "settings": chosen, **found}))  # as it will be read
        if settings.json is not None:
            write_json(settings.json, record)
    print(f"{told(record)}\n\n{table(record)}", flush=True)
    return 0


def on_ranks(worker: Callable[[int, R], Record | None]) -> Callable[[R], Record]:
    """A measurement: what ``worker(rank, settings)`` returns on rank 0 of ``settings.world`` ranks."""

    def measure(settings: R) -> Record:
        found: Record = run_ranks(settings.world, worker, settings)
        return found

    return measure
