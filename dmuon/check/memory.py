"""Who holds which bytes, against what the plan says."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

import dmuon
from dmuon.check.report import Reading
from dmuon.dedicated.dedication import Dedication
from dmuon.dedicated.matrix import OwnedMatrix
from dmuon.dedicated.owned_tensor import OwnedTensor
from dmuon.platform.torch_private import local_tensor
from dmuon.report.accounting import expected_memory


def placement(dedication: Dedication) -> list[Reading]:
    """One owner per matrix, nothing elsewhere, and no buffer left behind; to be read between backward and step."""
    runtime, plan = dedication.runtime, dedication.plan
    comm = runtime.comm
    wrong = 0
    mine = 0
    for entry in runtime.matrices():
        at = comm.topology.coordinates[plan.owners[entry.fqn]]
        owner = comm.topology.rank_at(at.r, at.s, comm.at.t)
        here = owner == comm.ranks[comm.position]
        mine += here
        wrong += entry.master.shape != (entry.local_shape if here else (0, entry.local_shape[1]))
    left = sum(buffer.buffer_nbytes for buffer in runtime.buffers if not buffer.keep)
    text = f"{wrong} of {len(plan.owners)} matrices held otherwise than by one owner, {left} bytes left in buffers"
    balance = f"planned load: slowest rank over mean {plan.balance:.2f}"
    return [Reading("placement", f"{text}; {balance}", wrong + left, 0, same=plan.digest)]


def at_rest(dedication: Dedication, optimizer: dmuon.Muon, orthogonalized: int) -> Reading:
    """Masters, momentum and copies of this rank after a step; every matrix that it updates was orthogonalized once."""
    expected, found = expected_nbytes(dedication), found_nbytes(dedication, optimizer)
    wrong = [f"{name} {found[name]} bytes, expected {want}" for name, want in expected.items() if found[name] != want]
    updated = sum(_updates(entry, dedication) for entry in dedication.runtime.matrices())
    if orthogonalized != updated:
        wrong.append(f"{orthogonalized} matrices orthogonalized, expected {updated}")
    right = ", ".join(f"{name} {nbytes / 1e3:.0f} kB" for name, nbytes in found.items())
    return Reading("memory", "; ".join(wrong) or f"as planned: {right}", len(wrong), 0)


def expected_nbytes(dedication: Dedication) -> dict[str, int]:
    """Bytes of what dmuon holds on this rank between steps, without what is under way: from the formula."""
    memory = expected_memory(dedication.runtime)
    return {"masters": memory.masters, "momentum": memory.masters, "copies": memory.standins + memory.kept}


def found_nbytes(dedication: Dedication, optimizer: dmuon.Muon) -> dict[str, int]:
    """Bytes of the storages that hold them."""
    runtime = dedication.runtime
    masters = [entry.master for entry in runtime.matrices()]
    momentum = [
        local_tensor(state["momentum_buffer"])
        for param, state in optimizer.state.items()
        if isinstance(param, OwnedTensor)
    ]
    copies = sum(b.standin_nbytes + (b.buffer_nbytes if b.keep else 0) for b in runtime.buffers)
    return {"masters": _storages(masters), "momentum": _storages(momentum), "copies": copies}


def _updates(entry: OwnedMatrix, dedication: Dedication) -> bool:
    comm = dedication.runtime.comm
    return entry.owner == comm.position and (entry.tensor is None or entry.tensor.owner == comm.at.t)


def _storages(tensors: Iterable[Tensor]) -> int:
    storages: dict[int, int] = {}
    for tensor in tensors:
        storage: torch.UntypedStorage = tensor.untyped_storage()
        if storage.nbytes():
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
