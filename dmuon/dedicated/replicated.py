"""Averages the gradients of parameters that nobody shards, in buckets, while backward runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dmuon.comm.context import Comm
from dmuon.comm.monitor import Pending, run_all
from dmuon.dedicated.matrix import OwnedMatrix
from dmuon.dedicated.owned_tensor import OwnedTensor
from dmuon.platform.streams import Origin
from dmuon.platform.torch_private import local_tensor, managed_by_ddp

_BUCKET_BYTES = 25 * 2**20
_NOWHERE = 2**30  # in a vote: more than any number of reductions, as is its negative, so that no range is one place


class _Bucket:
    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        self.ready: dict[int, int] = {}  # by ``id``, behind how many reductions the gradient came
        self.late: set[int] = set()
        self.origins: list[Origin] = []  # of gradients
        self.used: dict[int, bool] = {}
        self.flat: Tensor | None = None
        self.pending: Pending | None = None
        self._origin: Origin | None = None

    @property
    def complete(self) -> bool:
        """Whether all gradients are there."""
        return len(self.ready) == len(self.params)

    def launch(self, comm: Comm, group: dist.ProcessGroup) -> None:
        for origin in self.origins:
            origin.join()
        self.origins = []
        self._origin = Origin(comm.device)
        with torch.no_grad():
            first = local_tensor(self.params[0])
            flat = first.new_empty(sum(local_tensor(p).numel() for p in self.params))
            slots = self._slots(flat)
            self.used = {id(p): p.grad is not None for p in self.params}
            present = [
                (slot, local_tensor(p.grad)) for slot, p in zip(slots, self.params, strict=True) if p.grad is not None
            ]
            if len(present) < len(slots):
                flat.zero_()
            if present:
                torch._foreach_copy_([slot for slot, _ in present], [grad for _, grad in present])
        op = dist.ReduceOp.AVG
        with comm.reduce_stream.beside():
            what = f"average of {len(self.params)} replicated gradients, {sum(p.numel() for p in self.params)} elements"
            self.pending = comm.monitor.start(
                "average", what, lambda: [dist.all_reduce(flat, op, group=group, async_op=True)]
            )
        self.flat = flat

    def finish(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Wait and write the averages back; returns ``(param, average)`` of what got no gradient on this rank."""
        assert self.flat is not None and self.pending is not None and self._origin is not None
        self.pending.wait()
        flat, self.flat = self.flat, None
        settled = [(p, s) for p, s in zip(self.params, self._slots(flat), strict=True) if id(p) not in self.late]
        pairs = [(local_tensor(p.grad), slot) for p, slot in settled if self.used[id(p)] and p.grad is not None]
        if pairs:
            with torch.no_grad():
                torch._foreach_copy_([grad for grad, _ in pairs], [slot for _, slot in pairs])
        undecided = [(p, slot.clone()) for p, slot in settled if not self.used[id(p)]]
        self._origin.await_users()
        return undecided

    def discard(self) -> None:
        """Wait, if it has left, and forget the result."""
        if self.pending is not None and self._origin is not None:
            self.pending.wait()
            self._origin.await_users()
        self.flat = None

    def _slots(self, flat: Tensor) -> list[Tensor]:
        locals_ = [local_tensor(p) for p in self.params]
        parts = flat.split([t.numel() for t in locals_])
        return [part.view(t.shape) for part, t in zip(parts, locals_, strict=True)]


class GradAverager:
    """Data parallelism for replicated parameters.

    Buckets leave in one order, behind reductions of owned gradients or at the end of backward, where what is missing
    counts as zero. Where must not depend on what this rank has used, since reductions and averages have communicators
    of their own ([Note: one order of collectives]). So a bucket leaves early only if by earlier votes all its gradients
    have always come on all ranks, once each and behind as many reductions; the others form the last buckets. The order
    differs between ranks in the one backward in which a gradient is missing or elsewhere for the first time. Where each
    collective is awaited at once, that would be a deadlock, and all buckets leave at the end. So they do until
    their process group is there: if it was not from the start, all ranks make it at the end of the first backward that
    averages anything.

    A gradient accumulates without a second tensor: the average of ``previous average + new gradient`` is right, because
    the previous average is the same on all ranks.

    Args:
        params: in registration order; plain, or DTensors that tensor parallelism split, whose parts are averaged.
        trained: ids of those that all ranks trained when they last agreed.
        on_gradient: called when a gradient arrives; tells whether this backward synchronizes. Of who holds this.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        comm: Comm,
        trained: set[int],
        on_gradient: weakref.WeakMethod[Callable[[], bool]],
    ) -> None:
        self.params = list(params)
        self._trained = trained
        self._comm = comm
        self._group = comm.averages
        self._on_gradient = on_gradient
        self._reductions = 0  # of this backward, so far
        self._places: dict[int, int] = {}  # by ``id``, behind how many of them the gradient came in the last backward
        self._ever_irregular: set[int] | None = None  # by ``id``, on any rank; None before the first vote is known
        self._bucket_of: dict[int, int] = {}
        self._buckets: list[list[nn.Parameter]] = []
        self._early_buckets = 0  # the first ones, which may leave before the end of backward
        self._active: list[_Bucket] = []
        self._next = 0
        self._build()
        for param in self.params:
            if param.requires_grad:  # one that is unfrozen later leaves with the rest at the end of backward
                # A weak reference, since the collector cannot see through such hooks and would never free the model.
                param.register_post_accumulate_grad_hook(partial(_tell, weakref.ref(self)))

    def _build(self) -> None:
        apart = self._ever_irregular or set()
        self._buckets = []
        backward = list(reversed(self.params))  # which reaches the last parameters first
        self._extend([param for param in backward if id(param) not in apart])
        early = self._ever_irregular is not None and self._comm.options.asynchronous
        self._early_buckets = len(self._buckets) if early else 0
        self._extend([param for param in backward if id(param) in apart])

    def _extend(self, params: Sequence[nn.Parameter]) -> None:
        """Put ``params`` into further buckets, in order."""
        open_buckets: dict[tuple[torch.dtype, torch.device], tuple[int, int]] = {}
        for param in params:
            key = (param.dtype, local_tensor(param).device)
            index, size = open_buckets.get(key, (-1, _BUCKET_BYTES))
            if size >= _BUCKET_BYTES:
                index, size = len(self._buckets), 0
                self._buckets.append([])
            self._buckets[index].append(param)
            self._bucket_of[id(param)] = index
            # The size of the whole parameter: tensor-parallel ranks, whose parts may differ, make the same buckets.
            open_buckets[key] = (index, size + param.numel() * param.element_size())

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
        if not self._active:
            self._start()
        bucket = self._active[self._bucket_of[id(param)]]
        if bucket.pending is not None:
            bucket.late.add(id(param))  # a second arrival after the bucket left: average it again at the end
            return
        bucket.ready[id(param)] = self._reductions
        bucket.origins.append(Origin(self._comm.device))

    def reduction_started(self) -> None:
        """A block's owned gradients leave, as on all ranks: start averaging what is complete, and leaves early."""
        self._reductions += 1
        if self._active and self._group is not None:
            while self._next < self._early_buckets and self._active[self._next].complete:
                self._launch_next()

    def places(self) -> list[int]:
        """What to vote on: where in the last backward each gradient came, twice a parameter, as a range."""
        found = [self._places.get(id(param)) for param in self.params]
        return [_NOWHERE if place is None else sign * place for sign in (1, -1) for place in found]

    def agreed(self, trained: set[int]) -> None:
        """All ranks trained the parameters of these ids."""
        self._trained = trained

    def learn(self, verdict: Sequence[int]) -> None:
        """From the maxima of all ranks' :meth:`places`, behind others: which may not leave early."""
        count = len(self.params)
        greatest, least = verdict[len(verdict) - 2 * count : len(verdict) - count], verdict[len(verdict) - count :]
        ranges = zip(self.params, greatest, least, strict=True)
        found = {id(param) for param, most, negated_least in ranges if most != -negated_least}
        if self._ever_irregular is None or not found <= self._ever_irregular:
            self._ever_irregular = found | (self._ever_irregular or set())
            self._build()

    def _start(self) -> None:
        # What is frozen now stays until all ranks have agreed on it, so that their buckets are alike.
        buckets = [[p for p in params if p.requires_grad or id(p) in self._trained] for params in self._buckets]
        self._active = [_Bucket(params) for params in buckets]
        self._next = 0

    def _launch_next(self) -> None:
        bucket = self._active[self._next]
        self._next += 1
        if bucket.params:
            bucket.launch(self._comm, self._made_group())

    def _made_group(self) -> dist.ProcessGroup:
        if self._group is None:
            self._group = self._comm.average_group()
        return self._group

    def finish(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Average whatever is left and write the averages back.

        Returns:
            ``(param, average)`` of what got no gradient on this rank.
        """
        if not self._active:
            self._start()
        while self._next < len(self._active):
            self._launch_next()
        active, self._active = self._active, []
        undecided = [item for bucket in active if bucket.params for item in bucket.finish()]
        late = {id(p): p for bucket in active for p in bucket.params if id(p) in bucket.late}
        for param in late.values():
            if param.grad is not None:
                self._average_late(local_tensor(param.grad))
        arrived = {key: place for bucket in active for key, place in bucket.ready.items()}
        self._places = {key: place for key, place in arrived.items() if key not in late}
        self._reductions = 0
        return undecided

    def _average_late(self, grad: Tensor) -> None:
        """Of a parameter of two checkpointed segments, the first time that its second gradient came late."""
        average, group = dist.ReduceOp.AVG, self._made_group()
        what = f"second average of a replicated gradient of {grad.numel()} elements"
        self._comm.monitor.start(
            "average", what, lambda: [dist.all_reduce(grad, average, group=group, async_op=True)]
        ).wait()

    def reset(self) -> None:
        """Forget a backward that did not finish."""
        active, self._active = self._active, []
        self._reductions = 0
        run_all(bucket.discard for bucket in active)


def unsharded_parameters(
    modules: Iterable[nn.Module], owned: Iterable[OwnedMatrix], originals: Mapping[int, weakref.ref[nn.Parameter]]
) -> list[nn.Parameter]:
    """The parameters that ``modules`` hold and that neither dmuon owns nor FSDP2 shards.

    FSDP2 may have put whole weights into its modules by now, but never the very tensors that were there before.

    Args:
        originals: by ``id``, the parameters that were there before.

    Raises:
        RuntimeError: DistributedDataParallel manages an owned parameter.
    """
    for tensor in managed_by_ddp().values():
        if isinstance(tensor, OwnedTensor):
            raise RuntimeError(
                f"parameter {tensor.fqn!r} is owned by dmuon and managed by DistributedDataParallel too; call the "
                "dedicated model without it: dmuon averages all gradients over the mesh"
            )
    forms = {id(form) for matrix in owned for form in (matrix.rest, matrix.full)}
    params: dict[int, nn.Parameter] = {}
    sharded: set[int] = set()
    for module in modules:
        if isinstance(module, FSDPModule):
            sharded.update(id(m) for m in module.modules())
        for param in module.parameters(recurse=False):
            original = originals.get(id(param))
            unchanged = original is not None and original() is param
            if id(param) in forms or (isinstance(param, DTensor) and not unchanged):
                continue
            if id(module) not in sharded or unchanged:
                params[id(param)] = param
    return list(params.values())


def _tell(averager: weakref.ref[GradAverager], param: Tensor) -> None:
    alive = averager()
    if alive is not None:
        alive.arrived(param)
