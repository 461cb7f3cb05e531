"""What dmuon does not own in a dedicated model: which it is, and the averages of gradients that nobody else reduces.

Modules that were dedicated on their own, inside a model that is dedicated after them, keep all that they hold. Groups
of experts are such: these have other owners, and other weights, than what all ranks share.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from dmuon.comm.agreement import agree
from dmuon.comm.context import Comm
from dmuon.comm.monitor import Pending
from dmuon.dedicated.block import Block
from dmuon.dedicated.matrix import OwnedMatrix
from dmuon.dedicated.owned_tensor import OwnedTensor
from dmuon.layout.parameters import ranks_of_mesh
from dmuon.model.blocks import canonical_fqn
from dmuon.platform.host import all_living
from dmuon.platform.torch_private import divide_factor, local_tensor, managed_by_ddp, managed_by_fsdp, reduced_by_ddp

_BUCKET_BYTES = 25 * 2**20
# By the modules that ``dedicate_params`` was called with, as long as they live, what it made of them.
dedicated_roots: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


def excluded_modules(model: nn.Module) -> set[nn.Module]:
    """The modules in ``model``, which was not dedicated, that belong to what was."""
    return {module for root in model.modules() if root in dedicated_roots for module in root.modules()}


def shared_with(model: nn.Module) -> nn.Module | None:
    """A module that lies in what was dedicated in ``model`` before, and outside of it too; None without."""
    roots = {module for module in model.modules() if module in dedicated_roots}
    outside = {module for _, module in model.named_modules(memo=roots)}  # which passes by what is in there
    return next((module for module in excluded_modules(model) if module in outside), None)


def holder_of(module: nn.Module) -> nn.Module | None:
    """A dedicated model that has ``module`` in it; None without."""
    return next((root for root in dedicated_roots if any(module is one for one in root.modules())), None)


def held_by(modules: Iterable[nn.Module]) -> set[int]:
    """The parameters and buffers that ``modules`` themselves hold, by ``id``."""
    stores = ((module._parameters, module._buffers) for module in modules)
    return {id(tensor) for parameters, buffers in stores for tensor in (*parameters.values(), *buffers.values())}


class ManagedModules:
    """What is dedicated together: modules, without those that were dedicated in them before. Holds none of them.

    Args:
        roots: by the prefix of the names of what each holds; ``""`` for a single one.
        blocks: of them; what is left where nothing else is.
    """

    def __init__(self, roots: Mapping[str, nn.Module], blocks: Sequence[Block]) -> None:
        self._roots = {prefix: weakref.ref(root) for prefix, root in roots.items()}
        self._excluded = weakref.WeakSet(module for root in roots.values() for module in excluded_modules(root))
        self._blocks = blocks

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """All of them, each once."""
        alive = {prefix.rstrip("."): root for prefix, of in self._roots.items() if (root := of()) is not None}
        if not alive:
            alive = {str(i): block.module for i, block in enumerate(self._blocks) if block.module is not None}
        memo = set(self._excluded)
        for prefix, root in alive.items():
            yield from root.named_modules(memo, prefix)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All that they hold, each once."""
        found: set[int] = set()
        for name, module in self.named_modules():
            for key, param in module._parameters.items():
                if param is not None and id(param) not in found:
                    found.add(id(param))
                    yield f"{name}.{key}".lstrip("."), param


_Tensor = TypeVar("_Tensor", bound=Tensor)


def in_buckets(tensors: Iterable[_Tensor], nbytes: int, kind: Callable[[_Tensor], Hashable]) -> list[list[_Tensor]]:
    """``tensors`` of one kind together, until they have ``nbytes``; the same on all ranks.

    Whole tensors count: tensor-parallel ranks, whose parts may differ, make the same buckets.
    """
    buckets: list[list[_Tensor]] = []
    growing: dict[Hashable, tuple[int, int]] = {}
    for tensor in tensors:
        key = kind(tensor)
        index, size = growing.get(key, (-1, nbytes))
        if size >= nbytes:
            index, size = len(buckets), 0
            buckets.append([])
        buckets[index].append(tensor)
        growing[key] = (index, size + tensor.numel() * tensor.element_size())
    return buckets


def _kind(param: Tensor) -> Hashable:
    return param.dtype, local_tensor(param).device


class _Bucket:
    """The gradients of ``params`` on their way."""

    def __init__(self, params: Sequence[nn.Parameter], comm: Comm) -> None:
        with torch.no_grad():
            locals_ = [local_tensor(param) for param in params]
            flat = locals_[0].new_empty(sum(local.numel() for local in locals_))
            parts = flat.split([local.numel() for local in locals_])
            slots = [part.view(local.shape) for part, local in zip(parts, locals_, strict=True)]
            pairs = list(zip(params, slots, strict=True))
            self._present = [(local_tensor(p.grad), slot) for p, slot in pairs if p.grad is not None]
            self._absent = [(param, slot) for param, slot in pairs if param.grad is None]
            if self._absent:
                flat.zero_()
            if self._present:
                torch._foreach_copy_([slot for _, slot in self._present], [grad for grad, _ in self._present])
        op = dist.ReduceOp.AVG
        with comm.reduce_stream.beside():
            what = f"average of {len(params)} replicated gradients, {sum(p.numel() for p in params)} elements"
            self._pending: Pending = comm.monitor.start(
                "average", what, lambda: [dist.all_reduce(flat, op, group=comm.averages, async_op=True)]
            )

    def finish(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Wait and write the averages back; returns ``(param, average)`` of what got no gradient on this rank."""
        self._pending.wait()
        if self._present:
            with torch.no_grad():
                torch._foreach_copy_([grad for grad, _ in self._present], [slot for _, slot in self._present])
        return [(param, slot.clone()) for param, slot in self._absent]


class GradAverager:
    """Data parallelism for replicated parameters.

    All buckets leave when a backward ends, in one order, where what is missing counts as zero. A bucket that left as
    soon as its gradients are there would leave at another place among the reductions, which have communicators of their
    own, on a rank that lacks one of them ([Note: one order of collectives]).

    What is averaged is what all ranks have agreed on. A parameter that a forward finds for the first time, or that is
    trained again, is averaged behind the vote of the next backward, which compares what the ranks have found; one that
    is gone or frozen takes part, with zeros, until then.

    A gradient accumulates without a second tensor: the average of ``previous average + new gradient`` is right, because
    the previous average is the same on all ranks.

    Args:
        owned: all that dmuon owns in the model.
        managed: the modules of the model.
        hook: called with a parameter whose gradient arrives.

    Attributes:
        params: on which all ranks agree, in registration order; plain, or DTensors that tensor parallelism split, whose
            parts are averaged.
        names: of what this rank has found.
        looked: whether any forward has.
        changed: this rank has found others than all ranks have agreed on.
        waiting: by ``id``, what has a gradient of this rank that no backward has averaged yet.
    """

    def __init__(
        self,
        comm: Comm,
        owned: Sequence[OwnedMatrix],
        managed: ManagedModules,
        hook: Callable[[Tensor], None],
    ) -> None:
        self.params: list[nn.Parameter] = []
        self.names: dict[int, str] = {}
        self.looked = False
        self._found: dict[int, tuple[nn.Parameter, RemovableHandle]] = {}  # in the last forward that trained
        # Not ours, by ``id``. FSDP2 puts several tensors into one place by turns, and keeps all of them.
        self._others: dict[int, Tensor] = {id(form): form for matrix in owned for form in (matrix.rest, matrix.full)}
        self._comm = comm
        self._managed = managed
        self._hook = hook
        self.changed = False
        self.waiting: set[int] = set()
        self._buckets: list[list[nn.Parameter]] = []

    # -- what is averaged ------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Find what the model trains now and nobody else averages."""
        held: dict[int, nn.Parameter] = {}
        for _, module in self._managed.named_modules():
            for param in module._parameters.values():
                if param is None or id(param) in self._others:
                    continue
                trains = param.requires_grad or id(param) in self.waiting  # what waits is averaged, frozen or not
                if trains and (self._comm.world > 1 or isinstance(param, DTensor)):
                    held[id(param)] = param
        if held.keys() == self._found.keys() and self.looked:
            return
        if not self.looked or not held.keys() <= self._found.keys():
            self._leave_to_others(held.values())
        self.looked = True
        for key in self._found.keys() - held.keys():
            self._found.pop(key)[1].remove()
        ours = {key: param for key, param in held.items() if key not in self._others}
        self._found = {
            key: self._found.get(key) or (param, param.register_post_accumulate_grad_hook(self._hook))
            for key, param in ours.items()
        }
        self.names = {id(p): canonical_fqn(n) for n, p in self._managed.named_parameters() if id(p) in ours}
        self.changed = [*self._found] != [*map(id, self.params)]

    def _leave_to_others(self, new: Iterable[nn.Parameter]) -> None:
        """Remember what of ``new`` FSDP2 or DDP averages, or autograd: a DTensor over several of our ranks.

        Raises:
            RuntimeError: DistributedDataParallel manages an owned parameter, or FSDP2 does not average.
        """
        for tensor in managed_by_ddp().values():
            if isinstance(tensor, OwnedTensor):
                raise RuntimeError(
                    f"parameter {tensor.fqn!r} is owned by dmuon and managed by DistributedDataParallel too; call the "
                    "dedicated model without it: dmuon averages all gradients over the mesh"
                )
        modules = [module for _, module in self._managed.named_modules()]
        for module in modules:
            factor = divide_factor(module) if isinstance(module, FSDPModule) else None
            if factor not in (None, self._comm.world):
                raise RuntimeError(
                    f"set_gradient_divide_factor({factor}) of FSDP2 in a model that was dedicated over "
                    f"{self._comm.world} ranks, of which dmuon averages the gradients that FSDP2 does not shard: leave "
                    "it out, and scale the loss of each rank so that the average over ranks is meant"
                )
        theirs = {id(p) for module in modules for p in reduced_by_ddp(module)}
        # Of modules around this model too: their hooks may have put whole weights into it by now.
        theirs.update(id(p) for module in all_living(FSDPModule) for p in managed_by_fsdp(module))
        for param in new:
            ranks = ranks_of_mesh(param.device_mesh) if isinstance(param, DTensor) else ()
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
        agree(self._comm.control, self._difference(new))
        self.params, self.changed = found, False
        self._buckets = in_buckets(new, _BUCKET_BYTES, _kind)
        undecided = self.finish()
        self._buckets = in_buckets(found, _BUCKET_BYTES, _kind)
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
            dist.all_reduce(both, dist.ReduceOp.MAX, group=self._comm.averages)
        greatest, negated_least = both.chunk(2)
        differ = (greatest != -negated_least).tolist()
        names = [self.names[id(param)] for param, other in zip(params, differ, strict=True) if other]
        if not names:
            return None
        return (
            f"parameter {names[0]!r} has other values on other ranks, as do {len(names) - 1} more of those that dmuon "
            "averages the gradients of: seed all ranks alike where such parameters are made, or broadcast them"
        )

    # -- a backward ------------------------------------------------------------------------------------------------

    def arrived(self, param: Tensor) -> None:
        """The gradient of ``param`` is there."""
        self.waiting.add(id(param))
        grad = param.grad
        if isinstance(grad, DTensor) and isinstance(param, DTensor) and grad.placements != param.placements:
            # At once, so that this collective is issued in the order of the graph, as those of tensor parallelism are.
            param.grad = grad.redistribute(placements=param.placements)
        if grad is not None and grad.layout is torch.sparse_coo:
            param.grad = grad.to_dense()  # buckets are, and which rows others have used no rank knows

    def finish(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Average all gradients, and write the averages back.

        At the end of a backward: autograd has let the stream that called it wait for all on which gradients came.

        Returns:
            ``(param, average)`` of what got no gradient on this rank.
        """
        launched = [_Bucket(params, self._comm) for params in self._buckets]
        return [item for bucket in launched for item in bucket.finish()]
