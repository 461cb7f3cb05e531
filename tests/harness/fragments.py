"""Runs Python fragments of the documentation, each after the set-up of ``example.py``, on every rank of a group."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

SETS_UP = re.compile(r"^\s*optimizer = |dedicate_params\(", re.MULTILINE)
PROCESSES, MODEL, DEDICATION, LOOP = "cuda = ", "model = Model()", "dmuon.dedicate_params(", "torch.manual_seed("


def run_fragments(
    rank: int, world: int, program: str, fragments: Mapping[str, str], folder: str
) -> dict[str, str | None]:
    """By name, the traceback of a fragment that failed, or None; nothing of those after one that failed on any rank.

    What stands before a fragment: everything that ``example.py`` does up to its training loop, if the fragment neither
    dedicates a model nor builds an optimizer; otherwise what it does up to its model. Beside the names of
    ``example.py`` a fragment finds ``batches``, two pairs ``(x, y)`` of this rank, and ``loss_fn(output, y)``.

    Args:
        program: ``example.py``.
        folder: the current one of the fragments, shared by the ranks.
    """
    os.chdir(folder)
    definitions, model, setup = _parts(program)
    common: dict[str, Any] = {"__name__": "fragment", "device": "cpu", "loss_fn": nn.functional.cross_entropy}
    exec(compile(definitions, "example.py", "exec"), common)
    common["mesh"] = init_device_mesh("cpu", (world,))
    faults: dict[str, str | None] = {}
    for name, fragment in fragments.items():
        torch.manual_seed(rank)
        names = common | {"batches": [(torch.randn(8, 64), torch.randint(10, (8,))) for _ in range(2)]}
        exec(compile(model if SETS_UP.search(fragment) else model + setup, "example.py", "exec"), names)
        try:
            exec(compile(fragment, name, "exec", dont_inherit=True), names)
            faults[name] = None
        except Exception:
            faults[name] = traceback.format_exc()
        outcomes: list[Any] = [None] * world
        dist.all_gather_object(outcomes, faults[name])
        if any(outcomes):
            break  # what a rank left half done would disturb the next one
    return faults


def _parts(program: str) -> tuple[str, str, str]:
    """What ``example.py`` does before it has processes, to make a model, and to dedicate it and build the optimizer."""
    definitions, rest = program.split(PROCESSES, 1)
    model, rest = rest.split(MODEL)[1].split(DEDICATION)
    return definitions, MODEL + model, DEDICATION + rest.split(LOOP)[0]
