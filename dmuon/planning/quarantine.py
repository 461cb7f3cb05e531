"""Kernels that no GPU has run are tried in a process of their own: one that hangs or crashes takes no other with it."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import torch

from dmuon.kernels import Variant
from dmuon.planning.device_key import NsOptions
from dmuon.solver import Shape

Rivals: TypeAlias = Mapping[int, Sequence[Variant]]  # batch size → what to try

# By path, and isolated: neither the working folder nor a script's may stand before what this process has imported.
_PROGRAM = (sys.executable, "-I", str(Path(__file__).with_name("trial.py")))
_PACKAGE = __name__.partition(".")[0]
_STARTING_SECONDS = 120.0  # until it has imported torch and touched the device: a busy machine takes half a minute
_LEAST_SECONDS = 60.0  # to try one kind: each kernel is compiled first
_ENDING_SECONDS = 10.0  # until a killed process is gone: a driver may have to stop its kernels first
_POLL_SECONDS = 0.02
_TOLD_BYTES = 4096  # at the end of what a process has printed, where the last line is looked for
_TOLD_LETTERS = 300


def proven_kinds(
    candidates: Mapping[str, Sequence[tuple[Shape, Rivals]]],
    device: torch.device,
    options: NsOptions,
    seconds: float = 0.0,
) -> frozenset[tuple[Shape, str]]:
    """Which shapes each kind has updated rightly in all ways that stand there; warns of the others.

    Args:
        candidates: kind (``Variant.unproven``) to shapes, and what of that kind to try on each.
        seconds: for all together, starting of processes not counted; a minute for each kind, if that is more. What a
            kind leaves, the next ones have. What does not end in its share is killed, and what it has told counts.
    """
    proven: set[tuple[Shape, str]] = set()
    left = max(seconds, _LEAST_SECONDS * len(candidates))
    for index, (kind, trials) in enumerate(candidates.items()):
        outcome = _outcome(trials, device, options, left / (len(candidates) - index))
        left -= outcome.seconds
        for shape, fault in outcome.faults([shape for shape, _ in trials]).items():
            if fault is None:
                proven.add((shape, kind))
            else:
                m, n = shape
                warnings.warn(f"{kind} is not tried on matrices of {m}x{n}: in a process of its own it {fault}")
    return frozenset(proven)


@dataclass(slots=True)
class _Outcome:
    """How a process ended, after how many seconds of trying, and what it has told of each shape: ``None`` is no fault.

    Attributes:
        lost: the last of these faults took the device from the process.
        gone: nothing of it runs any more.
    """

    ending: str
    seconds: float = 0.0
    gone: bool = True
    told: dict[Shape, str | None] = field(default_factory=dict)
    lost: bool = False

    def faults(self, shapes: Sequence[Shape]) -> dict[Shape, str | None]:
        """What is wrong with each of ``shapes``, in their order: the first untold one is where the process ended."""
        if not self.gone:
            return dict.fromkeys(shapes, f"{self.ending}, and runs on though it was killed: its device is not to trust")
        result: dict[Shape, str | None] = dict(self.told)
        last = next(reversed(self.told), None) if self.lost else None
        for shape in shapes:
            if shape in result:
                continue
            if last is None:
                last, result[shape] = shape, self.ending
            else:
                result[shape] = f"was not tried after {last[0]}x{last[1]}"
        return result


def _outcome(
    trials: Sequence[tuple[Shape, Rivals]], device: torch.device, options: NsOptions, seconds: float
) -> _Outcome:
    """What came of the trials in a process that has so many seconds for them."""
    with tempfile.TemporaryDirectory(prefix="dmuon-trial-", ignore_cleanup_errors=True) as folder:
        place, job, told, printed = (Path(folder, name) for name in ("place", "job", "told", "printed"))
        place.write_text(json.dumps(_place(seconds)))
        job.write_bytes(pickle.dumps((device, options, list(trials))))
        told.touch()
        try:
            with printed.open("wb") as file:
                process = subprocess.Popen(
                    [*_PROGRAM, str(place), str(job), str(told)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=file,
                    start_new_session=True,  # killed with all that it has started
                )
        except OSError as error:
            return _Outcome(f"cannot be started ({error})")
        outcome = _wait(process, told, seconds)
        last = _last_line(printed)
        if last:
            outcome.ending += f" ({last})"
        lines = [json.loads(line) for line in told.read_text().splitlines(keepends=True) if line.endswith("\n")]
        outcome.told = {(line[0], line[1]): line[2] for line in lines if len(line) == 3}
        outcome.lost = ["lost"] in lines
        return outcome


def _place(seconds: float) -> dict[str, object]:
    """Where the process finds what this one has imported, and when it ends itself if this one no longer can."""
    folders = {
        name: [os.path.abspath(part) for part in module.__path__]
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == _PACKAGE
        and name.count(".") <= 1
        and getattr(module, "__file__", None)
        and hasattr(module, "__path__")
    }
    return {
        "path": [os.path.abspath(part) for part in sys.path if part],  # without the working folder
        "folders": folders,
        "parent": os.getpid(),
        "starting": int(_STARTING_SECONDS + 2 * _ENDING_SECONDS),
        "seconds": int(seconds + 2 * _ENDING_SECONDS),
    }


def _wait(process: subprocess.Popen[bytes], told: Path, seconds: float) -> _Outcome:
    """How ``process`` ended; it is killed ``seconds`` after it was ready, or where it does not become so."""
    started = begun = time.monotonic()
    ready, ending = False, ""
    try:
        while not ending:
            status, now = process.poll(), time.monotonic()
            if not ready and told.stat().st_size:
                ready, begun = True, now
            if status is not None:
                ending = f"ended with status {status}" if status >= 0 else f"was ended by signal {-status}"
            elif ready and now > begun + seconds:
                ending = f"did not end in {seconds:.0f} s"
            elif not ready and now > started + _STARTING_SECONDS:
                ending = f"was not ready in {_STARTING_SECONDS:.0f} s"
            else:
                time.sleep(_POLL_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_ENDING_SECONDS)
    return _Outcome(ending, time.monotonic() - begun if ready else 0.0, gone=process.returncode is not None)


def _last_line(printed: Path) -> str:
    """The last line that says something of what was printed; of a traceback that is the error."""
    with printed.open("rb") as file:
        file.seek(max(0, printed.stat().st_size - _TOLD_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip()[:_TOLD_LETTERS] for line in reversed(lines) if line.strip()), "")
