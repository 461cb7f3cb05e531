"""What `import dmuon` does to a process, and what it does without."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest
from harness.limits import PROGRAM_SECONDS

IMPORT = """
    {before}
    def tasks():
        return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else threading.active_count()
    environment, threads, modules = dict(os.environ), tasks(), set(sys.modules)
    patched = {{(m, n): v for m in ("torch", "torch.distributed", "torch.nn", "torch.optim", "torch.Tensor")
               for n, v in vars(eval(m)).items()}}
    generator = torch.get_rng_state()
    import dmuon
    assert not [name for name in sys.modules if name.startswith("dmuon.")]
    from dmuon import *
    assert all(name in dir(dmuon) and globals()[name] is getattr(dmuon, name) for name in dmuon.__all__)
    assert not hasattr(dmuon, "Moun") and not hasattr(dmuon, "rebalanced_plan")
    assert not dist.is_initialized()
    assert tasks() == threads and not multiprocessing.active_children()
    assert dict(os.environ) == environment
    assert not torch.cuda.is_initialized()
    assert torch.equal(torch.get_rng_state(), generator)
    changed = [k for k, v in patched.items() if vars(eval(k[0])).get(k[1]) is not v]
    assert not changed, f"patched {{changed}}"
    heavy = {{"pulp", "triton", "matplotlib", "tqdm", "multiprocessing.pool"}} & (set(sys.modules) - modules)
    assert not heavy, f"imported {{heavy}}"
    {after}
"""
WITHOUT = """
    matrices = [dmuon.solver.Matrix(f"m{i}", 64, 64 + i, "b") for i in range(6)]
    table = dmuon.solver.CostTable.from_flops({m.shape for m in matrices})
    plan = dmuon.solver.plan(matrices, 2, table)
    assert len(plan.owners) == 6
    x = torch.randn(3, 8, 12)
    u = dmuon.kernels.orthogonalize(x)
    assert (torch.linalg.svdvals(u) - 1).abs().max() < 0.5
"""
PROGRAMS = {
    "import": IMPORT.format(before="", after=""),
    "without": IMPORT.format(
        before="sys.modules['pulp'] = sys.modules['triton'] = None", after=textwrap.indent(WITHOUT, "")
    ).replace("set(sys.modules) - modules", "{n for n, m in sys.modules.items() if m is not None} - modules"),
    "plan": """
    sys.modules["pulp"] = None
    from dmuon.solver import plan, CostTable, Matrix
    p = plan([Matrix(str(i), 4, 4, "b") for i in range(4)], 2, CostTable({(4, 4): {1: 5}}))
    assert p.makespan_ns == 10
    others = {name.split(".")[1] for name in sys.modules if name.startswith("dmuon.")}
    assert others == {"solver"}, others
    """,
}

# Each program in a fork of a process that has imported torch, which takes seconds, and nothing of dmuon.
FORKS = """
    import json, multiprocessing, os, sys, threading
    import torch, torch.distributed as dist
    import torch.distributed.fsdp, torch.distributed.tensor, torch.distributed.checkpoint
    found = {}
    for name, program in json.load(sys.stdin).items():
        ours, theirs = os.pipe()
        pid = os.fork()
        if not pid:
            os.dup2(theirs, 1)
            os.dup2(theirs, 2)
            os.close(theirs)
            exec(program, globals())
            sys.exit()
        os.close(theirs)
        with os.fdopen(ours) as pipe:
            said = pipe.read()
        found[name] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def ended() -> dict[str, list[object]]:
    """Of each program its exit status, and what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", textwrap.dedent(FORKS)],
        input=json.dumps({name: textwrap.dedent(program) for name, program in PROGRAMS.items()}),
        capture_output=True,
        text=True,
        timeout=PROGRAM_SECONDS,
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr[-3000:]
    found: dict[str, list[object]] = json.loads(done.stdout)
    return found


def assert_silent(ended: list[object]) -> None:
    status, said = ended
    assert (status, said) == (0, ""), said


def test_import_has_no_side_effects(ended: dict[str, list[object]]) -> None:
    """It prints nothing either."""
    assert_silent(ended["import"])


@pytest.mark.pitfall("P51", "P47")
def test_works_without_a_solver_and_without_triton(ended: dict[str, list[object]]) -> None:
    assert_silent(ended["without"])


@pytest.mark.pitfall("P51")
def test_planning_needs_no_pulp_until_a_milp_is_solved(ended: dict[str, list[object]]) -> None:
    assert_silent(ended["plan"])
