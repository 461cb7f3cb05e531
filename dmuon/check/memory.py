"""What a rank holds between steps of a larger model, against the formulas."""

from __future__ import annotations

import gc
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

import dmuon
from dmuon.check.accounting import expected_nbytes, found_nbytes, storages
from dmuon.check.model import batch, is_matrix
from dmuon.check.report import Reading
from dmuon.check.speed import Program, Speed, dedicated, exchanged
from dmuon.dedicated.dedication import dedications
from dmuon.platform.torch_private import local_tensor

_DIFFERENCE = 0.05  # of the formula
_SLACK_BYTES = 64 << 20  # workspaces of cuBLAS
_STEPS = 2


def allocated_when_dedicated(speed: Speed, device: torch.device, timeout: timedelta) -> list[Reading]:
    """What a rank holds of a dedicated model. Collective."""
    return _held(lambda: dedicated(speed, device, timeout), _of_owned, speed, device)


def allocated_when_exchanged(speed: Speed, device: torch.device) -> list[Reading]:
    """What a rank holds of one that FSDP2 shards. Collective."""
    return _held(lambda: exchanged(speed, device), _of_sharded, speed, device)


def _held(
    make: Callable[[], Program], formula: Callable[[Program], int], speed: Speed, device: torch.device
) -> list[Reading]:
    """On CUDA what the allocator says, elsewhere the storages of weights and state."""
    gc.collect()
    before = _allocated(device)
    program = make()
    rows = batch(speed.size, speed.rows, speed.context, dist.get_rank(), device)
    for _ in range(_STEPS):
        program.step(rows, True)
    for dedication in dedications(program.model):
        for buffer in dedication.runtime.buffers:
            buffer.free()  # what the step has fetched for the next forward
    del rows
    slack = 0
    if device.type == "cuda":
        found, slack = _allocated(device) - before, _SLACK_BYTES
        peak = torch.cuda.max_memory_allocated(device) / 1e6
        how = f"allocated between steps, most at once since the start {peak:.0f} MB"
    else:
        found, how = _in_storages(program), "in storages between steps"
    expected = formula(program)
    text = f"{found / 1e6:.1f} MB {how}, formula {expected / 1e6:.1f} MB"
    excess = max(0, abs(found - expected) - slack) / expected
    unit = f"difference beyond {slack >> 20} MiB of workspaces" if slack else "difference"
    return [Reading("memory", text, excess, _DIFFERENCE, unit)]


def _allocated(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


def _in_storages(program: Program) -> int:
    held: list[Tensor] = list(program.model.parameters())
    held += [v for state in program.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    owned = sum(found_nbytes(each, _muon(program))["copies"] for each in dedications(program.model))
    return owned + storages(local_tensor(tensor) for tensor in held)


def _muon(program: Program) -> dmuon.Muon:
    assert isinstance(program.optimizer, dmuon.Muon)
    return program.optimizer


def _of_owned(program: Program) -> int:
    """Masters, momentum and copies of what is owned; weights and two moments of the rest."""
    owned = dmuon.owned_parameters(program.model)
    rest = [local_tensor(p) for p in program.model.parameters() if p not in owned]
    formula = sum(sum(expected_nbytes(each).values()) for each in dedications(program.model))
    return formula + 3 * sum(t.nbytes for t in rest)


def _of_sharded(program: Program) -> int:
    """This rank's shards: weights and momentum of matrices, weights and two moments of the rest."""
    return sum(
        (2 if is_matrix(name) else 3) * local_tensor(param).nbytes for name, param in program.model.named_parameters()
    )
