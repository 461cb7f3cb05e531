"""What travels in a step and what is held after it, counted, against what the layout and the plan say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import dmuon
from dmuon.check.report import Reading
from dmuon.comm.agreement import Vote
from dmuon.comm.context import Comm
from dmuon.dedicated.dedication import Dedication
from dmuon.dedicated.matrix import OwnedMatrix
from dmuon.dedicated.owned_tensor import OwnedTensor
from dmuon.dedicated.runtime import Runtime
from dmuon.platform.torch_private import TorchDispatchMode, local_tensor
from dmuon.report.accounting import expected_exchange, expected_memory, expected_traffic


@dataclass(frozen=True, slots=True)
class Amount:
    """Operations, and bytes of the regions that they gather or reduce."""

    operations: int = 0
    nbytes: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.operations + other.operations, self.nbytes + other.nbytes)

    def __str__(self) -> str:
        return f"{self.operations} of {self.nbytes} bytes"


class Traffic(TorchDispatchMode):
    """Counts the collectives of this rank while it is entered, by process group and by operator of the back end."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._amounts: dict[tuple[str, str], Amount] = {}  # by name of the group and operator

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            operator = func.overloadpacket.__name__
            key = next((name for name in map(_group_name, args) if name), ""), operator
            self._amounts[key] = self._amounts.get(key, Amount()) + Amount(1, _region_nbytes(operator, args))
        return func(*args, **(kwargs or {}))

    def over(self, *groups: dist.ProcessGroup, votes: bool = True) -> Amount:
        """What went over some groups, all-reduces (``votes``) included or not."""
        names = {group.group_name for group in groups}
        counted = {key: a for key, a in self._amounts.items() if votes or not key[1].startswith("allreduce")}
        return sum((amount for (name, _), amount in counted.items() if name in names), Amount())

    def operations(self) -> dict[str, int]:
        """How many there were, by operator of ``torch.ops.c10d``."""
        return {operator: amount.operations for operator, amount in self.by_operator().items()}

    def by_operator(self) -> dict[str, Amount]:
        """What went over any group, by operator of ``torch.ops.c10d``, such as ``broadcast_``."""
        found: dict[str, Amount] = {}
        for (_, operator), amount in sorted(self._amounts.items(), key=lambda item: item[0][1]):
            found[operator] = found.get(operator, Amount()) + amount
        return found

    def of(self, comm: Comm) -> dict[str, Amount]:
        """What went over dmuon's own groups for owned matrices, by purpose, without votes."""
        purposes: dict[str, list[dist.ProcessGroup]] = {"fill": [], "publish": [], "reduce": [], "exchange": []}
        for lane, purpose in ((comm.row, "fill"), (comm.column, "publish")):
            if lane is not None:
                purposes[purpose].append(lane.weights.group)
                purposes["reduce"].append(lane.gradients.group)
        if comm.tensor is not None:
            purposes["exchange"].append(comm.tensor.group)
        return {purpose: self.over(*groups, votes=False) for purpose, groups in purposes.items()}


def compare_traffic(found: dict[str, Amount], runtime: Runtime) -> Reading:
    """One whole step in the middle of training, against the formula."""
    expected = expected_traffic(runtime)
    wrong, right = [], []
    for purpose, amount in found.items():
        want = Amount(expected.calls.get(purpose, 0), expected.nbytes.get(purpose, 0))
        if amount != want:
            wrong.append(f"{purpose}: {amount}, expected {want}")
        elif amount.operations:
            right.append(f"{purpose} {amount}")
    return Reading("collectives", "; ".join(wrong) or ", ".join(right) or "none", len(wrong), 0)


def owned_once(optimizer: dmuon.Muon) -> Reading:
    """Every exchanged matrix was orthogonalized by its owner, and by nobody else."""
    mine = sum(one.count for one in optimizer.exchanged() if one.owner == dist.get_rank())
    found = optimizer.last_step.ns_matrices
    text = f"{found} matrices orthogonalized on this rank, which owns {mine} of {len(optimizer.exchanged())}"
    owners = " ".join(str(one.owner) for one in optimizer.exchanged())
    return Reading("placement", text, abs(found - mine), 0, same=owners)


def compare_exchange(traffic: Traffic, optimizer: dmuon.Muon) -> Reading:
    """The exchanges of one step, against the formula."""
    expected = expected_exchange(optimizer)
    exchange = optimizer._exchange
    domains = [] if exchange is None else exchange.domains
    votes = [] if exchange is None else [Vote.nbytes(size) for size in exchange.vote_sizes()]
    lines = [line for domain, _ in domains for line in domain.lines.values() if line is not None]
    groups = {domain.group for domain, _ in domains} | {line.group for line in lines}
    amount = traffic.over(*groups)
    nbytes = expected.received_before + expected.received_after + expected.copied + sum(votes)
    want = Amount(expected.calls + len(votes), nbytes)
    text = f"exchange {amount}, the vote on gradients included"
    return Reading("collectives", text if amount == want else f"{text}; expected {want}", int(amount != want), 0)


def _region_nbytes(name: str, args: Sequence[Any]) -> int:
    """Bytes of the larger side, which gathers fill and reductions read; of an all-to-all those that arrive."""
    arriving = _nbytes(args[0])
    return arriving if name.startswith("alltoall") else max(arriving, _nbytes(args[1]))


def _group_name(value: Any) -> str:
    if not isinstance(value, torch.ScriptObject):
        return ""
    try:
        name: str = dist.ProcessGroup.unbox(value).group_name
    except RuntimeError:  # another kind of object, such as a reduction
        return ""
    return name


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, (list, tuple)):
        return sum(map(_nbytes, value))
    return 0


def placement(dedication: Dedication) -> list[Reading]:
    """One owner per matrix, nothing elsewhere, and no buffer left behind; to be read between backward and step."""
    runtime, plan = dedication.runtime, dedication.plan
    comm = runtime.comm
    wrong = 0
    for entry in runtime.matrices():
        here = 0
        for part in entry.parts:
            at = comm.topology.coordinates[plan.owners[f"{entry.fqn}[{part.number}]" if entry.is_split else entry.fqn]]
            owner = comm.topology.rank_at(at.r, at.s, comm.at.t)
            here += part.numel if owner == comm.ranks[comm.position] else 0
        wrong += entry.master.numel() != here
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
    return {"masters": storages(masters), "momentum": storages(momentum), "copies": copies}


def _updates(entry: OwnedMatrix, dedication: Dedication) -> int:
    at = dedication.runtime.comm.at
    return sum(part.parcel is None or part.parcel.owner == at.t for part in entry.mine)


def storages(tensors: Iterable[Tensor]) -> int:
    """Bytes of what lies beneath them, each counted once."""
    found: dict[int, int] = {}
    for tensor in tensors:
        storage: torch.UntypedStorage = tensor.untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())
