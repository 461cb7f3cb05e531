"""Commands run in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest

from dmuon.tools.hardware import HARDWARE


@dataclass(frozen=True)
class Ended:
    status: int
    out: str
    err: str

    def row(self, name: str) -> str:
        """The first line of the output that begins with this word."""
        return next(line for line in self.out.splitlines() if line.startswith(f"{name} "))


@pytest.fixture
def ended(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """``ended(main, *arguments)``: the exit status, whether argparse or the command decides it, and what was said."""

    def run(main: Callable[[Sequence[str]], int], *arguments: object) -> Ended:
        capsys.readouterr()
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as end:
            assert isinstance(end.code, int)
            status = end.code
        return Ended(status, *capsys.readouterr())

    return run


@pytest.fixture
def preset(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``preset(device={"memory": 3e9}, inter=…)``: the default device with these figures in place of its own."""
    shipped = HARDWARE["h200"]

    def change(**parts: dict[str, float]) -> None:
        changed = {part: replace(getattr(shipped, part), **figures) for part, figures in parts.items()}
        monkeypatch.setitem(HARDWARE, "h200", replace(shipped, **changed))

    return change
