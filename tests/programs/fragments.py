"""Runs Python fragments of the documentation, each after the set-up of ``example.py``, on every rank of a torchrun job.

    torchrun … fragments.py JOB.json RESULTS

``JOB.json`` holds the program and ``{name: fragment}``. Every rank writes ``RESULTS.<rank>.json``: by name, the
traceback of a fragment that failed, or None.

What stands before a fragment: everything that ``example.py`` does up to its training loop, if the fragment neither
dedicates a model nor builds an optimizer; otherwise what it does up to its model. Beside the names of ``example.py`` a
fragment finds ``batches``, two pairs ``(x, y)`` of this rank, and ``loss_fn(output, y)``.
"""

from __future__ import annotations

import json
import re
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

SETS_UP = re.compile(r"^\s*optimizer = |dedicate_params\(", re.MULTILINE)
MODEL, DEDICATION, LOOP = "model = Model()", "dmuon.dedicate_params(", "torch.manual_seed("


def parts(program: str) -> tuple[str, str, str]:
    """What ``example.py`` does before it has a model, to make one, and to dedicate it and build the optimizer."""
    start, rest = program.split(MODEL)
    model, rest = rest.split(DEDICATION)
    return start, MODEL + model, DEDICATION + rest.split(LOOP)[0]


def main(job: Path, results: str) -> None:
    content = json.loads(job.read_text())
    start, model, setup = parts(content["program"])
    common: dict[str, Any] = {"__name__": "fragment"}
    exec(compile(start, "example.py", "exec"), common)
    faults: dict[str, str | None] = {}
    for name, fragment in content["fragments"].items():
        torch.manual_seed(dist.get_rank())
        batches = [(torch.randn(8, 64), torch.randint(10, (8,))) for _ in range(2)]
        names = common | {"batches": batches, "loss_fn": nn.functional.cross_entropy}
        exec(compile(model if SETS_UP.search(fragment) else model + setup, "example.py", "exec"), names)
        try:
            exec(compile(fragment, name, "exec"), names)
            faults[name] = None
        except Exception:
            faults[name] = traceback.format_exc()
        failed: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(failed, faults[name])
        if any(failed):
            break  # what a rank left half done would disturb the next one
    Path(f"{results}.{dist.get_rank()}.json").write_text(json.dumps(faults))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
