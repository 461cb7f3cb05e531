"""Kernels that no GPU has run are tried in a process of their own: one that hangs or crashes takes no other with it."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from dmuon.kernels import Variant
from dmuon.planning.device_key import NsOptions
from dmuon.solver import Shape

_PROGRAM = (sys.executable, "-m", "dmuon.planning.trial")
_ENDING_SECONDS = 10.0  # until a killed process is gone: a driver may have to stop its kernels first


def proven_kinds(
    candidates: Mapping[str, Sequence[tuple[Shape, Variant]]], device: torch.device, options: NsOptions, seconds: float
) -> frozenset[tuple[Shape, str]]:
    """Which shapes each kind has updated rightly, of those that stand there; warns of the others.

    Args:
        candidates: kind (``Variant.unproven``) to shapes, and a variant of that kind for each.
        seconds: for all together. What does not end in its share is killed, and what it has told by then counts.
    """
    proven: set[tuple[Shape, str]] = set()
    for kind, variants in candidates.items():
        answers, ending = _answers(variants, device, options, seconds / len(candidates))
        proven.update((shape, kind) for shape, fault in answers.items() if fault is None)
        faults = {shape: fault for shape, fault in answers.items() if fault is not None}
        faults |= {shape: ending for shape, _ in variants if shape not in answers}
        for (m, n), fault in faults.items():
            warnings.warn(f"{kind} is not tried on matrices of {m}x{n}: in a process of its own it {fault}")
    return frozenset(proven)


def _answers(
    variants: Sequence[tuple[Shape, Variant]], device: torch.device, options: NsOptions, seconds: float
) -> tuple[dict[Shape, str | None], str]:
    """What the process has told of each shape, ``None`` for no fault, and how it ended."""
    with tempfile.TemporaryDirectory(prefix="dmuon-trial-", ignore_cleanup_errors=True) as folder:
        job, told = Path(folder, "job"), Path(folder, "told")
        job.write_bytes(pickle.dumps((device, options, list(variants))))
        told.touch()
        try:
            process = subprocess.Popen(
                [*_PROGRAM, str(job), str(told)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # killed with all that it has started
            )
        except OSError as error:
            return {}, f"cannot be started ({error})"
        ending = _wait(process, seconds)
        lines = (line for line in told.read_text().splitlines(keepends=True) if line.endswith("\n"))
        return {(m, n): fault for m, n, fault in map(json.loads, lines)}, ending


def _wait(process: subprocess.Popen[bytes], seconds: float) -> str:
    """How ``process`` ended; no later than ``seconds`` it is killed."""
    try:
        status = process.wait(seconds)
        return f"ended with status {status}" if status >= 0 else f"was ended by signal {-status}"
    except subprocess.TimeoutExpired:
        return f"did not end in {seconds:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_ENDING_SECONDS)
