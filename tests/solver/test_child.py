"""A solver that hangs, prints without end, lies, dies or leaves processes behind costs its time limit and no more."""

from __future__ import annotations

import os
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from instances import GRAHAM, linear_costs, make_matrices, search_here

from dmuon.solver import Plan, SolveOptions, child, exact, plan

LIMIT = 1.0
SPARE = 12.0  # a busy machine; what has no limit takes for ever
# 10 ns and two of 7 ns over two ranks: the envelope says 12, the optimum is 14, and only a MILP can tell.
OPTIONS = SolveOptions(gap_target=0.0, time_limit_s=LIMIT)
ANSWER = "answer = sys.argv[sys.argv.index('-solution') + 1]"
ACTS = {
    "ignores signals": "[signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; time.sleep(1000)",
    "floods its answer": "file = open(answer, 'w'); [file.write('x' * 65536) for _ in iter(int, 1)]",
    "answers nonsense": "open(answer, 'w').write('Optimal - objective value 0\\n 0 X0 nan 0\\n')",
    "kills its parent": "os.kill(os.getppid(), 9); time.sleep(1000)",
    "makes children": "[os.fork() for _ in range(3)]; time.sleep(1000)",
    "leaves a child": "os.fork() and sys.exit(3); time.sleep(1000)",
}
QUICK = ("makes children",)


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """In the command line of a CBC that another file plays, and of all its children. None of them is left."""
    monkeypatch.setattr(exact, "run_search", child.run_search)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    # The child imports this PuLP, which is the installed one with another CBC.
    (tmp_path / "pulp").mkdir()
    (tmp_path / "pulp" / "__init__.py").write_text(
        f"import sys; sys.path.remove({str(tmp_path)!r}); del sys.modules['pulp']; import pulp\n"
        f"pulp.PULP_CBC_CMD.pulp_cbc_path = {str(tmp_path / 'cbc')!r}\n"
    )
    yield str(tmp_path / "cbc")
    deadline = time.monotonic() + 2.0
    while (left := running(str(tmp_path / "cbc"))) and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert not left
    assert not os.listdir(tmp_path / "temporary"), "solvers' files are removed"


def running(mark: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            pass
    return found


def play(mark: str, act: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(mark).write_text(f"#!{sys.executable} -IS\nimport os, signal, sys, time\n{ANSWER}\n{act}\n")
    Path(mark).chmod(stat.S_IRWXU)
    monkeypatch.syspath_prepend(str(Path(mark).parent))


def solve() -> Plan:
    return plan(make_matrices([1, 2]), 2, linear_costs(10, 7), OPTIONS)


@pytest.mark.pitfall("P51", "P71")
@pytest.mark.timeout(90)
@pytest.mark.parametrize("act", [a if a in QUICK else pytest.param(a, marks=pytest.mark.slow) for a in ACTS])
def test_whatever_a_solver_does_the_heuristic_plan_comes_in_time_with_a_warning(
    mark: str, act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(mark, ACTS[act], monkeypatch)
    begin = time.monotonic()
    with pytest.warns(UserWarning, match=r"the MILP (failed: |stopped).*The plan is the best so far"):
        result = solve()
    assert time.monotonic() - begin < LIMIT + SPARE
    assert (result.bound_ns, result.makespan_ns) == (12, 14)
    while running(mark) and time.monotonic() - begin < LIMIT + SPARE:
        time.sleep(0.02)  # the kernel ends what was killed
    assert not running(mark), "nothing that it has started is left"


@pytest.mark.usefixtures("mark", "lpt_alone")
def test_the_child_finds_what_the_search_finds_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """LPT takes 11 ns, where 9 ns is possible."""
    options = SolveOptions(gap_target=0.0)
    there = plan(*GRAHAM, options)
    monkeypatch.setattr(exact, "run_search", search_here)
    here = plan(*GRAHAM, options)
    assert there == here and (there.makespan_ns, there.stage) == (9, "patterns")


@pytest.mark.pitfall("P51")
@pytest.mark.parametrize(("counts", "bound"), [([[1, 2], [0, 1]], 12), ([[1, 0], [0, 2]], 15), ([[1, 0], [0, 2]], 11)])
def test_an_answer_that_does_not_hold_is_not_believed(
    counts: list[list[int]], bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = exact.Solution(np.array(counts), bound, "patterns")
    monkeypatch.setattr(exact, "run_search", lambda question, seconds: (answer, ""))
    with pytest.warns(UserWarning, match="the MILP failed: its answer does not hold"):
        result = solve()
    assert (result.bound_ns, result.makespan_ns) == (12, 14)
