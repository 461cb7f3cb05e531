"""One block's owned matrices: a flat buffer, its state machine, and the reduction of its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.profiler import record_function

from dmuon._torch import local_tensor
from dmuon.comm import Comm
from dmuon.owned_tensor import owned_tensor

__all__ = ["GradReduction", "OwnedEntry", "OwnerGroup", "Residence"]

_ALIGN_BYTES = 256  # of each matrix in a flat buffer, so that every view suits vectorized loads


class Residence(Enum):
    """Where the weights of a block are. Only ``READY`` may be freed or entered; only ``FREED`` may be filled."""

    FREED = "buffer empty, modules hold the resting form"
    FILLING = "buffer allocated, broadcasts under way, modules hold the resting form"
    READY = "buffer holds whole weights, modules hold the resting form"
    FORWARD = "modules hold whole weights for a forward"
    BACKWARD = "modules hold whole weights for a backward"
    SUMMONED = "modules hold whole weights for the user, inside summon_full_params()"


@dataclass(slots=True, eq=False)
class OwnedEntry:
    """One owned matrix at run time.

    Attributes:
        sites: every ``(module, attribute)`` that holds it.
        rest: what the modules hold outside forward and backward; its local tensor is the fp32 master.
        full: what they hold inside; a view of the block's buffer in communication dtype. Created once.
        unreduced: the gradient in ``full`` has not been reduced yet (backward without synchronization).
        empty_grad: the gradient on ranks that do not own it; one serves all steps.
        placeholder_grad: stands in ``rest.grad`` meanwhile: whoever clears it has dropped the unreduced part too.
    """

    fqn: str
    shape: torch.Size
    owner: int
    sites: tuple[tuple[nn.Module, str], ...]
    rest: nn.Parameter
    full: nn.Parameter
    unreduced: bool = False
    empty_grad: Tensor | None = None
    placeholder_grad: Tensor | None = None

    @property
    def master(self) -> Tensor:
        """fp32 ``(m, n)`` on the owner, ``(0, n)`` elsewhere."""
        return local_tensor(self.rest)

    def drop_unreduced(self) -> None:
        self.full.grad = None
        self.unreduced = False
        if self.placeholder_grad is not None and self.rest.grad is self.placeholder_grad:
            self.rest.grad = None
        self.placeholder_grad = None

    def as_grad(self, comm: Comm, local: Tensor) -> Tensor:
        return owned_tensor(local, comm.mesh, self.shape, fqn=f"{self.fqn}.grad", owner=self.owner)

    def set_grad(self, comm: Comm, local: Tensor) -> None:
        """Add ``local`` (``(m, n)`` on the owner, ``(0, n)`` elsewhere) to the gradient of the resting parameter."""
        if self.rest.grad is not None and self.rest.grad is not self.placeholder_grad:
            local_tensor(self.rest.grad).add_(local)
        elif self.owner == comm.rank:
            self.rest.grad = self.as_grad(comm, local)
        else:
            if self.empty_grad is None:
                self.empty_grad = self.as_grad(comm, local)
            self.rest.grad = self.empty_grad
        self.placeholder_grad = None


class OwnerGroup:
    """Owned matrices of one block.

    Args:
        name: canonical name of the block.
        weights: ``(fqn, param, sites, owner)`` per matrix, in forward order; initial values are read from ``param``.
        comm_dtype: dtype of the buffer, of the broadcasts, and of forward and backward.
        reduce_dtype: dtype of gradient reductions.
        keep: leave whole weights in the buffer after forward and backward (``reshard_after_forward=False``).
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        weights: Sequence[tuple[str, nn.Parameter, tuple[tuple[nn.Module, str], ...], int]],
        comm: Comm,
        *,
        comm_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        keep: bool,
    ) -> None:
        self.name = name
        self.module = module
        self.comm = comm
        self.reduce_dtype = reduce_dtype
        self.keep = keep
        self.state = Residence.FREED
        self.generation = -1  # of the weights in the buffer
        self.backward: int | None = None  # the backward pass that entered this block
        self.calls = 0  # forwards whose backward boundary has not been reached
        self.awaits_backward = False
        self._works: list[dist.Work] = []
        align = max(1, _ALIGN_BYTES // comm_dtype.itemsize)
        offset = 0
        spans: dict[int, tuple[int, int]] = {}  # owner -> [start, end) in the buffer
        layout: list[tuple[str, nn.Parameter, tuple[tuple[nn.Module, str], ...], int, int]] = []
        for fqn, param, sites, owner in sorted(weights, key=lambda w: w[3]):
            start = offset
            offset += -(-param.numel() // align) * align
            layout.append((fqn, param, sites, owner, start))
            spans[owner] = (spans.get(owner, (start, 0))[0], offset)
        self._buffer = torch.empty(offset, dtype=comm_dtype, device=comm.device)
        self._nbytes = offset * comm_dtype.itemsize
        self._segments = [(owner, self._buffer[a:b]) for owner, (a, b) in spans.items()]
        self.entries: list[OwnedEntry] = []
        self._owned_slots: list[tuple[OwnedEntry, Tensor]] = []
        for fqn, param, sites, owner, start in layout:
            slot = self._buffer[start : start + param.numel()].view(param.shape)
            master = _initial_master(param, owner, comm)
            rest = nn.Parameter(
                owned_tensor(master, comm.mesh, param.shape, fqn=fqn, owner=owner),
                requires_grad=param.requires_grad,
            )
            # `.data` gives the view a version counter of its own: filling the buffer must not look to autograd like
            # an edit of the weights that it saved.
            full = nn.Parameter(slot.data, requires_grad=param.requires_grad)
            full._dmuon_rest = rest  # type: ignore[attr-defined]
            entry = OwnedEntry(fqn, param.shape, owner, sites, rest, full)
            self.entries.append(entry)
            if owner == comm.rank:
                self._owned_slots.append((entry, slot))
            place(entry, rest)
        self._buffer.untyped_storage().resize_(0)

    # -- weights ---------------------------------------------------------------------------------------------------

    @property
    def buffer_nbytes(self) -> int:
        """Bytes that the buffer holds now."""
        return self._buffer.untyped_storage().nbytes()

    def start_fill(self, generation: int) -> None:
        """Allocate the buffer and start one broadcast per owner; returns at once."""
        if self.state is Residence.READY:
            self.free()
        self._require(Residence.FREED)
        self._buffer.untyped_storage().resize_(self._nbytes)
        # With one rank nothing travels, so nobody would wait for another stream.
        beside = self.comm.streams.fill() if self.comm.world > 1 else nullcontext()
        with record_function(f"dmuon::fill {self.name}"), torch.no_grad(), beside:
            if self._owned_slots:
                slots = [slot for _, slot in self._owned_slots]
                torch._foreach_copy_(slots, [entry.master for entry, _ in self._owned_slots])
            if self.comm.world > 1:
                self._works = [
                    _started(
                        dist.broadcast(segment, src=self.comm.ranks[owner], group=self.comm.fill_group, async_op=True)
                    )
                    for owner, segment in self._segments
                ]
        self.state = Residence.FILLING
        self.generation = generation

    def finish_fill(self) -> None:
        self._require(Residence.FILLING)
        with record_function(f"dmuon::wait_fill {self.name}"):
            self._wait()
        self.state = Residence.READY

    def enter(self, phase: Residence) -> None:
        """Put whole weights into the modules."""
        self._require(Residence.READY)
        for entry in self.entries:
            for module, name in entry.sites:
                if module._parameters.get(name) is not entry.rest:
                    raise RuntimeError(
                        f"parameter {entry.fqn!r} was replaced in its module after dedicate_params; edit it under "
                        "dmuon.summon_full_params(model) instead"
                    )
            if entry.full.requires_grad != entry.rest.requires_grad:
                entry.full.requires_grad_(entry.rest.requires_grad)
            place(entry, entry.full)
        self.state = phase

    def leave(self) -> None:
        """Put the resting form back into the modules."""
        self._require(Residence.FORWARD, Residence.BACKWARD)
        for entry in self.entries:
            place(entry, entry.rest)
        self.state = Residence.READY

    def summon(self, wholes: Sequence[nn.Parameter]) -> None:
        """Put ``wholes``, one per entry, into the modules for the user."""
        if self.state is not Residence.FREED:
            self.free()
        for entry, whole in zip(self.entries, wholes, strict=True):
            place(entry, whole)
        self.state = Residence.SUMMONED

    def dismiss(self) -> None:
        """End :meth:`summon`."""
        self._require(Residence.SUMMONED)
        for entry in self.entries:
            place(entry, entry.rest)
        self.state = Residence.FREED

    def free(self) -> None:
        """Give the buffer's memory back."""
        self._require(Residence.READY, Residence.FILLING)
        self._wait()
        self._buffer.untyped_storage().resize_(0)
        self.state = Residence.FREED

    def reset(self) -> None:
        """Back to rest from any state, without gradients that were not reduced."""
        if self.state in (Residence.FORWARD, Residence.BACKWARD):
            self.leave()
        if self.state is not Residence.FREED:
            self.free()
        for entry in self.entries:
            entry.drop_unreduced()
        self.backward, self.calls, self.awaits_backward = None, 0, False

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []

    def _require(self, *states: Residence) -> None:
        if self.state not in states:
            wanted = " or ".join(s.name for s in states)
            raise RuntimeError(f"block {self.name!r} is {self.state.name}, expected {wanted}: {self.state.value}")

    # -- gradients -------------------------------------------------------------------------------------------------

    def start_reduction(self) -> GradReduction:
        """Pack the gradients per owner (zeros where there is none) and start averaging each pack to its owner."""
        return GradReduction(self)


class GradReduction:
    """Gradients of one block on their way to the owners."""

    def __init__(self, group: OwnerGroup) -> None:
        comm = group.comm
        self.group = group
        self.entries = [e for e in group.entries if e.full.requires_grad]
        self.used = {id(e): e.full.grad is not None for e in self.entries}
        self._works: list[dist.Work] = []
        self._local: dict[int, Tensor] = {}
        owners: dict[int, list[OwnedEntry]] = {}
        for entry in self.entries:
            owners.setdefault(entry.owner, []).append(entry)
        with record_function(f"dmuon::reduce {group.name}"), torch.no_grad():
            packs = {owner: self._pack(entries) for owner, entries in owners.items()}
            if comm.world > 1:
                with comm.streams.reduce():
                    for owner, pack in packs.items():
                        work = dist.reduce(
                            pack, comm.ranks[owner], dist.ReduceOp.AVG, group=comm.reduce_group, async_op=True
                        )
                        self._works.append(_started(work))
        self._packs = packs  # held until the collectives have finished

    def _pack(self, entries: list[OwnedEntry]) -> Tensor:
        group = self.group
        pack = torch.empty(sum(e.full.numel() for e in entries), dtype=group.reduce_dtype, device=group.comm.device)
        slots = [s.view(e.shape) for s, e in zip(pack.split([e.full.numel() for e in entries]), entries, strict=True)]
        grads = [(slot, e.full.grad) for slot, e in zip(slots, entries, strict=True)]
        present = [(slot, grad) for slot, grad in grads if grad is not None]
        if present:
            torch._foreach_copy_([slot for slot, _ in present], [grad for _, grad in present])
        for slot, grad in grads:
            if grad is None:
                slot.zero_()
        for entry, slot in zip(entries, slots, strict=True):
            entry.full.grad = None
            entry.unreduced = False
            if entry.owner == group.comm.rank:
                self._local[id(entry)] = slot
        return pack

    def discard(self) -> None:
        """Wait, and forget the result."""
        for work in self._works:
            work.wait()
        self._works, self._packs, self._local = [], {}, {}

    def finish(self) -> list[tuple[OwnedEntry, Tensor]]:
        """Wait, and set ``rest.grad`` of what got a gradient here.

        Returns:
            ``(entry, local gradient)`` of what got none on this rank: whether another rank used it is not known yet.
        """
        with record_function(f"dmuon::wait_reduce {self.group.name}"):
            for work in self._works:
                work.wait()
        self._works, self._packs = [], {}
        undecided = []
        for entry in self.entries:
            slot = self._local.get(id(entry))
            master = entry.master
            local = master.new_empty(master.shape) if slot is None else slot.to(master.dtype)
            if self.used[id(entry)]:
                entry.set_grad(self.group.comm, local)
            else:
                undecided.append((entry, local))
        return undecided


def place(entry: OwnedEntry, param: nn.Parameter) -> None:
    """Register ``param`` wherever the modules hold this entry."""
    for module, name in entry.sites:
        module._parameters[name] = param


def _initial_master(param: nn.Parameter, owner: int, comm: Comm) -> Tensor:
    """Rank 0's initial value of ``param``, fp32 or wider, whole on ``owner`` and empty elsewhere."""
    dtype = torch.promote_types(param.dtype, torch.float32)
    with torch.no_grad():
        value = param.detach().to(comm.device, copy=True).contiguous()
        if comm.world > 1:
            dist.broadcast(value, src=comm.ranks[0], group=comm.fill_group)
        if owner == comm.rank:
            return value.to(dtype)
        return torch.empty((0, param.shape[1]), dtype=dtype, device=comm.device)


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "an asynchronous collective returns its work"
    return work
