"""Averages the gradients of parameters that nobody shards, in buckets, while backward runs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from dmuon.comm.agreement import require_no_fault
from dmuon.comm.context import Comm
from dmuon.comm.monitor import Pending, run_all
from dmuon.dedicated.block import Block
from dmuon.dedicated.matrix import OwnedMatrix
from dmuon.dedicated.nesting import Covered
from dmuon.dedicated.owned_tensor import OwnedTensor
from dmuon.model.blocks import canonical_fqn
from dmuon.platform.streams import Origin
from dmuon.platform.torch_private import local_tensor, managed_by_ddp, managed_by_fsdp, reduced_by_ddp

_BUCKET_BYTES = 25 * 2**20


class _Bucket:
    """The gradients of ``params`` on their way. Until they are back the parameters have none of this backward.

    What backward computes meanwhile, for a parameter that a reentrant checkpoint uses too, is added to the average,
    which is right: the backward that encloses that one averages once more.
    """

    def __init__(self, params: Sequence[nn.Parameter], comm: Comm, group: dist.ProcessGroup) -> None:
        self.params = params
        self._origin = Origin(comm.device)
        self._grads = [param.grad for param in params]
        for param in params:
            param.grad = None
        with torch.no_grad():
            first = local_tensor(params[0])
            self._flat = flat = first.new_empty(sum(local_tensor(p).numel() for p in params))
            pairs = [(slot, local_tensor(grad)) for slot, grad in self._filled()]
            if len(pairs) < len(params):
                flat.zero_()
            if pairs:
                torch._foreach_copy_([slot for slot, _ in pairs], [grad for _, grad in pairs])
        op = dist.ReduceOp.AVG
        with comm.reduce_stream.beside():
            what = f"average of {len(params)} replicated gradients, {sum(p.numel() for p in params)} elements"
            self._pending: Pending = comm.monitor.start(
                "average", what, lambda: [dist.all_reduce(flat, op, group=group, async_op=True)]
            )

    def finish(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Wait and write the averages back; returns ``(param, average)`` of what got no gradient on this rank."""
        self._pending.wait()
        pairs = [(local_tensor(grad), slot) for slot, grad in self._filled()]
        if pairs:
            with torch.no_grad():
                torch._foreach_copy_([grad for grad, _ in pairs], [slot for _, slot in pairs])
        slots = zip(self.params, self._slots(), self._grads, strict=True)
        undecided = [(param, slot.clone()) for param, slot, grad in slots if grad is None]
        self._give_back()
        return undecided

    def discard(self) -> None:
        """Wait, and forget the result."""
        self._pending.wait()
        self._give_back()

    def _give_back(self) -> None:
        self._origin.await_users()
        for param, grad in zip(self.params, self._grads, strict=True):
            if grad is not None:
                with torch.no_grad():
                    param.grad = grad if param.grad is None else grad.add_(param.grad)

    def _filled(self) -> list[tuple[Tensor, Tensor]]:
        return [(slot, grad) for slot, grad in zip(self._slots(), self._grads, strict=True) if grad is not None]

    def _slots(self) -> list[Tensor]:
        locals_ = [local_tensor(p) for p in self.params]
        parts = self._flat.split([t.numel() for t in locals_])
        return [part.view(t.shape) for part, t in zip(parts, locals_, strict=True)]


class GradAverager:
    """Data parallelism for replicated parameters.

    As in DDP, buckets are fixed: the last parameters come first, as backward reaches them. Buckets leave in that order,
    behind reductions of owned gradients as soon as all their gradients are there, and the rest at the end of backward,
    where what is missing counts as zero. So their communicator has one order of collectives on all ranks ([Note: one
    order of collectives]). When a bucket leaves does depend on what a rank has used. That is no deadlock, since nobody
    waits for an average before all reductions have been issued; where each collective is awaited at once, all buckets
    leave at the end.

    What is averaged is what all ranks have agreed on. A parameter that a forward finds for the first time, or that is
    trained again, is averaged behind the vote of the next backward, which compares what the ranks have found; one that
    is gone or frozen takes part, with zeros, until then. The process group is made then too.

    A gradient accumulates without a second tensor: the average of ``previous average + new gradient`` is right, because
    the previous average is the same on all ranks.

    Args:
        owned: all that dmuon owns in the model.
        on_gradient: called when a gradient arrives; tells whether this backward synchronizes. Of who holds this.

    Attributes:
        params: on which all ranks agree, in registration order; plain, or DTensors that tensor parallelism split, whose
            parts are averaged.
        names: of what this rank has found.
        looked: whether any forward has.
        changed: this rank has found others than all ranks have agreed on.
    """

    def __init__(
        self, comm: Comm, owned: Sequence[OwnedMatrix], on_gradient: weakref.WeakMethod[Callable[[], bool]]
    ) -> None:
        self.params: list[nn.Parameter] = []
        self.names: dict[int, str] = {}
        self.looked = False
        self._found: dict[int, tuple[nn.Parameter, RemovableHandle]] = {}  # in the last forward that trained
        # Not ours, by ``id``. FSDP2 puts several tensors into one place by turns, and keeps all of them.
        self._others: dict[int, Tensor] = {id(form): form for matrix in owned for form in (matrix.rest, matrix.full)}
        self._comm = comm
        self._group = comm.averages
        self._on_gradient = on_gradient
        self.changed = False
        self._build([])

    def _forget(self) -> None:
        """Nothing of a backward is there."""
        self._arrived: set[int] = set()
        self._missing = [len(bucket) for bucket in self._buckets]  # gradients, by bucket
        self._origins: list[Origin] = []  # of gradients
        self._launched: list[_Bucket] = []

    # -- what is averaged ------------------------------------------------------------------------------------------

    def look(self, covered: Covered, blocks: Sequence[Block]) -> None:
        """Find what the model trains now and nobody else averages."""
        held: dict[int, nn.Parameter] = {}
        for module in covered.modules(blocks):
            for param in module._parameters.values():
                if param is None or not param.requires_grad or id(param) in self._others:
                    continue
                if self._comm.world > 1 or isinstance(param, DTensor):
                    held[id(param)] = param
        if held.keys() == self._found.keys() and self.looked:
            return
        self.looked = True
        if not held.keys() <= self._found.keys():
            self._leave_to_others(held.values(), covered, blocks)
        for key in self._found.keys() - held.keys():
            self._found.pop(key)[1].remove()
        # A weak reference, since the collector cannot see through such hooks and would never free the model.
        hook = partial(_tell, weakref.ref(self))
        ours = {key: param for key, param in held.items() if key not in self._others}
        self._found = {
            key: self._found.get(key) or (param, param.register_post_accumulate_grad_hook(hook))
            for key, param in ours.items()
        }
        self.names = {id(p): canonical_fqn(n) for n, p in covered.named_parameters(blocks) if id(p) in ours}
        self.changed = [*self._found] != [*map(id, self.params)]

    def _leave_to_others(self, new: Iterable[nn.Parameter], covered: Covered, blocks: Sequence[Block]) -> None:
        """Remember what of ``new`` FSDP2 or DDP averages, or autograd: a DTensor over several of our ranks.

        Raises:
            RuntimeError: DistributedDataParallel manages an owned parameter.
        """
        for tensor in managed_by_ddp().values():
            if isinstance(tensor, OwnedTensor):
                raise RuntimeError(
                    f"parameter {tensor.fqn!r} is owned by dmuon and managed by DistributedDataParallel too; call the "
                    "dedicated model without it: dmuon averages all gradients over the mesh"
                )
        theirs = {id(p) for module in covered.modules(blocks) for p in reduced_by_ddp(module)}
        # Of modules around this model too: their hooks may have put whole weights into it by now.
        sharded = (module for module in gc.get_objects() if issubclass(type(module), FSDPModule))
        theirs.update(id(p) for module in sharded for p in managed_by_fsdp(module))
        for param in new:
            ranks = param.device_mesh.mesh.flatten().tolist() if isinstance(param, DTensor) else []
            if id(param) in theirs or len(set(ranks).intersection(self._comm.ranks)) > 1:
                self._others[id(param)] = param

    def described(self) -> dict[str, str]:
        """What all ranks must have found, by name; in order."""
        found = [param for param, _ in self._found.values()]
        return {self.names[id(p)]: f"True, {tuple(p.shape)} {p.dtype}" for p in found}

    def adopt(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Average from now on what this rank has found, as all ranks have; at once what is new. Collective.

        Returns:
            As :meth:`finish`, of what is new.

        Raises:
            ValueError: on all ranks, if something new has other values on some of them.
        """
        known = set(map(id, self.params))
        found = [param for param, _ in self._found.values()]
        new = [param for param in found if id(param) not in known]
        require_no_fault(self._comm.control, self._difference(new), self._comm.device)
        self.params, self.changed = found, False
        self._build(new)
        undecided = self.finish()
        self._build(found)
        return undecided

    def _difference(self, params: Sequence[nn.Parameter]) -> str | None:
        """What is wrong with the values of ``params``, which averages of gradients would never make alike."""
        if not params or self._comm.world == 1:
            return None
        # Sums of bytes, which have no rounding.
        values = [local_tensor(param).detach().flatten().view(torch.uint8) for param in params]
        sums = torch.stack([value.sum(dtype=torch.int64) for value in values])
        both = torch.cat([sums, -sums])
        with self._comm.monitor.watch(f"comparison of {len(params)} replicated parameters"):
            dist.all_reduce(both, dist.ReduceOp.MAX, group=self._made_group())
        greatest, negated_least = both.chunk(2)
        differ = (greatest != -negated_least).tolist()
        names = [self.names[id(param)] for param, other in zip(params, differ, strict=True) if other]
        if not names:
            return None
        return (
            f"parameter {names[0]!r} has other values on other ranks, as do {len(names) - 1} more of those that dmuon "
            "averages the gradients of: seed all ranks alike where such parameters are made, or broadcast them"
        )

    def _build(self, params: Sequence[nn.Parameter]) -> None:
        """Put ``params`` into buckets."""
        self._buckets: list[list[nn.Parameter]] = []
        self._bucket_of: dict[int, int] = {}
        open_buckets: dict[tuple[torch.dtype, torch.device], tuple[int, int]] = {}
        for param in reversed(params):
            key = (param.dtype, local_tensor(param).device)
            index, size = open_buckets.get(key, (-1, _BUCKET_BYTES))
            if size >= _BUCKET_BYTES:
                index, size = len(self._buckets), 0
                self._buckets.append([])
            self._buckets[index].append(param)
            self._bucket_of[id(param)] = index
            # The size of the whole parameter: tensor-parallel ranks, whose parts may differ, make the same buckets.
            open_buckets[key] = (index, size + param.numel() * param.element_size())
        self._forget()

    # -- a backward ------------------------------------------------------------------------------------------------

    def arrived(self, param: Tensor) -> None:
        grad = param.grad
        if isinstance(grad, DTensor) and isinstance(param, DTensor) and grad.placements != param.placements:
            # At once, so that this collective is issued in the order of the graph, as those of tensor parallelism are.
            param.grad = grad.redistribute(placements=param.placements)
        if grad is not None and grad.layout is torch.sparse_coo:
            param.grad = grad.to_dense()  # buckets are, and which rows others have used no rank knows
        on_gradient = self._on_gradient()
        if on_gradient is None or not on_gradient():
            return
        self._origins.append(Origin(self._comm.device))
        if id(param) in self._bucket_of and id(param) not in self._arrived:
            self._arrived.add(id(param))
            self._missing[self._bucket_of[id(param)]] -= 1

    def reduction_started(self) -> None:
        """A block's owned gradients leave: start averaging what is complete."""
        self._join()
        while self._comm.options.asynchronous and 0 in self._missing[len(self._launched) :][:1]:
            self._launch_next()

    def finish(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Average whatever is left and write the averages back.

        Returns:
            ``(param, average)`` of what got no gradient on this rank.
        """
        self._join()
        while len(self._launched) < len(self._buckets):
            self._launch_next()
        launched = self._launched
        self._forget()
        return [item for bucket in launched for item in bucket.finish()]

    def _join(self) -> None:
        """What is launched from here on comes behind the gradients that have arrived."""
        for origin in self._origins:
            origin.join()
        self._origins = []

    def _launch_next(self) -> None:
        bucket = self._buckets[len(self._launched)]
        self._launched.append(_Bucket(bucket, self._comm, self._made_group()))

    def _made_group(self) -> dist.ProcessGroup:
        if self._group is None:
            self._group = self._comm.average_group()
        return self._group

    def reset(self) -> None:
        """Forget a backward that did not finish."""
        launched = self._launched
        self._forget()
        run_all(bucket.discard for bucket in launched)


def _tell(averager: weakref.ref[GradAverager], param: Tensor) -> None:
    alive = averager()
    if alive is not None:
        alive.arrived(param)
