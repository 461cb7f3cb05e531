"""What `import dmuon` does to a process, and what it does without."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from harness.limits import PROGRAM_SECONDS

IMPORT = """
    import multiprocessing, os, sys, threading
    import torch, torch.distributed as dist
    import torch.distributed.fsdp, torch.distributed.tensor, torch.distributed.checkpoint
    {before}
    def tasks():
        return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else threading.active_count()
    environment, threads, modules = dict(os.environ), tasks(), set(sys.modules)
    patched = {{(m, n): v for m in ("torch", "torch.distributed", "torch.nn", "torch.optim", "torch.Tensor")
               for n, v in vars(eval(m)).items()}}
    generator = torch.get_rng_state()
    import dmuon
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


def run_python(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=PROGRAM_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "" and done.stderr == "", "an import prints nothing"


def test_import_has_no_side_effects() -> None:
    run_python(IMPORT.format(before="", after=""))


@pytest.mark.pitfall("P51", "P47")
def test_works_without_a_solver_and_without_triton() -> None:
    after = """
    matrices = [dmuon.solver.Matrix(f"m{i}", 64, 64 + i, "b") for i in range(6)]
    table = dmuon.solver.CostTable.from_flops({m.shape for m in matrices})
    plan = dmuon.solver.plan(matrices, 2, table)
    assert len(plan.owners) == 6
    x = torch.randn(3, 8, 12)
    u = dmuon.kernels.orthogonalize(x)
    assert (torch.linalg.svdvals(u) - 1).abs().max() < 0.5
    """
    run_python(
        IMPORT.format(
            before="sys.modules['pulp'] = sys.modules['triton'] = None", after=textwrap.indent(after, "")
        ).replace("set(sys.modules) - modules", "{n for n, m in sys.modules.items() if m is not None} - modules")
    )
