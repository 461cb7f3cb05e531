"""The program of a quarantine's process: updates one batch of each shape with a variant, and tells what came of it."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

from dmuon.planning.profiler import trial_fault


def main(job: str, told: str) -> None:
    """A line for each shape of the pickled ``job``, as soon as it is known: its sides, what is wrong or ``null``."""
    device, options, variants = pickle.loads(Path(job).read_bytes())
    with Path(told).open("a") as file:
        for shape, variant in variants:
            try:
                fault = trial_fault(shape, device, options, variant)
            except Exception as error:  # whatever a compiler or a driver may raise
                fault = f"failed ({type(error).__name__}: {error})"
            file.write(json.dumps([*shape, fault]) + "\n")
            file.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
