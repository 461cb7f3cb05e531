"""One training step over the blocks of a model: fill, free, reduce, publish. Hooks only, no patching."""

from __future__ import annotations

import atexit
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from dmuon.comm.context import Comm, tensor_domain
from dmuon.comm.monitor import run_all
from dmuon.dedicated.block import Block, Phase
from dmuon.dedicated.buffer import BufferState, OwnedBuffer
from dmuon.dedicated.execution_order import ExecutionOrder
from dmuon.dedicated.gradients import Gradients
from dmuon.dedicated.matrix import OwnedMatrix
from dmuon.dedicated.owned_tensor import OwnedTensor
from dmuon.dedicated.replicated import GradAverager
from dmuon.platform.torch_private import current_backward, managed_by_ddp, on_backward_end, outside_compile

__all__ = ["Runtime"]

_running: weakref.WeakSet[Runtime] = weakref.WeakSet()


def _settle_at_exit() -> None:
    for runtime in _running:
        for group in runtime.groups:
            group.settle_at_exit()


class Runtime:
    """The blocks of one dedicated model and the order in which their weights and gradients move.

    ``generation`` counts the versions of the weights. A buffer of an older generation is never used: a step, a load
    or any edit of a resting parameter raises it.

    Attributes:
        sync: backward reduces gradients; otherwise they accumulate where they arise.
        all_reduce: backward reduces gradients across replicas too.
        tensor_domain: the tensor-parallel ranks at this rank's coordinate; None without.
        write_even: puts every rank's even shard of a resting parameter into its master; set by the state-dict hooks.
    """

    write_even: Callable[[OwnedTensor, Tensor], None]

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[OwnedBuffer],
        comm: Comm,
        chunks: dict[tuple[int, int], int],
        variants: dict[tuple[int, int], dict[int, str]],
    ) -> None:
        self.groups = list(groups)
        self.comm = comm
        self.chunks = chunks
        self.variants = variants
        self.generation = 0
        self.sync = True
        self.all_reduce = True
        self.blocks = [block for group in self.groups for block in group.blocks]
        self.order = ExecutionOrder(self.blocks)
        self.tensor_domain = tensor_domain(comm)
        self.gradients = Gradients(comm, list(self.entries()))
        self._backwards: set[int] = set()
        self._closed: dict[int, OwnedBuffer] = {}  # groups with gradients whose reduction has not started
        self._waiting: dict[int, OwnedBuffer] = {}  # groups with gradients that earlier backwards did not make whole
        self._due: deque[OwnedBuffer] = deque()  # groups that this step has yet to publish, in forward order
        self._updating: set[int] = set()  # resting parameters that this step has yet to update
        self._to_fill = 0
        atexit.unregister(_settle_at_exit)  # once, however many runtimes there are
        atexit.register(_settle_at_exit)
        _running.add(self)
        self._model = model
        # Not of what dmuon owns: `Module.to` swaps tensor subclasses, which no weak reference may watch.
        self._replicated = {id(p): weakref.ref(p) for p in model.parameters() if not isinstance(p, OwnedTensor)}
        model.register_forward_pre_hook(self._start_of_model)
        self._by_rest = {id(entry.rest): entry for entry in self.entries()}
        for entry in self.entries():
            entry.rest.runtime = self  # type: ignore[attr-defined]
        for block in self.blocks:
            block.module.register_forward_pre_hook(partial(self._before_forward, block), with_kwargs=True)
            block.module.register_forward_hook(partial(self._after_forward, block), always_call=True)

    def entries(self) -> Iterator[OwnedMatrix]:
        for group in self.groups:
            yield from group.entries

    @property
    def name(self) -> str:
        """The same on all ranks, and of no other dedicated model."""
        return str(self.comm.control.group_name)

    def entry_of(self, param: Tensor) -> OwnedMatrix:
        """The entry whose resting form ``param`` is."""
        return self._by_rest[id(param)]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # Hooks hold the runtime, so copying or pickling a model meets it before its parameters.
        return next(self.entries()).rest.__deepcopy__(memo)  # raises, with the remedy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return next(self.entries()).rest.__reduce_ex__(protocol)

    # -- weights ---------------------------------------------------------------------------------------------------

    def weights_changed(self) -> None:
        """Masters were edited: whatever is in a buffer is out of date."""
        self.generation += 1

    def begin_update(self, params: Iterable[Tensor]) -> None:
        """Before the masters of ``params`` change: raise the generation, and publish what none of them delays.

        :meth:`updated` and :meth:`end_update` publish the rest, each group as soon as this rank's masters of it are up
        to date, in the order in which the next forward wants them. Buffers are filled as far as they are due: all that
        are kept, otherwise as many as are prefetched.
        """
        self.comm.monitor.begin_step()
        self.comm.fill_stream.join()
        self.comm.publish_stream.join()
        self.weights_changed()
        for block in self.blocks:  # graphs of forwards that never ran backward are void now
            block.forget_graph()
        self._updating = {id(p) for p in params if id(p) in self._by_rest}
        self._due = deque(self.order.groups())
        self._to_fill = self.comm.options.prefetch
        self._publish_what_is_ready()

    def updated(self, params: Iterable[Tensor]) -> None:
        """The masters of ``params`` have their new values."""
        self._updating.difference_update(id(p) for p in params)
        self._publish_what_is_ready()

    def end_update(self) -> None:
        """All masters have their new values."""
        self._updating.clear()
        self._publish_what_is_ready()
        self.comm.monitor.end_step()

    def _publish_what_is_ready(self) -> None:
        while self._due and not any(id(entry.rest) in self._updating for entry in self._due[0].entries):
            group = self._due.popleft()
            group.start_publication(self.generation)
            if (group.keep or self._to_fill > 0) and not self.fills_wait:
                self._to_fill -= 1
                group.start_fill(self.generation)

    @property
    def fills_wait(self) -> bool:
        """On the CPU a fill that follows a publication waits for it; the next forward starts it, not the step."""
        return self.comm.column is not None and self.comm.row is not None and self.comm.device.type == "cpu"

    def at_rest(self, doing: str, *, summoned: bool = False) -> None:
        """Raise unless every block is outside forward, backward and ``summon_full_params``.

        First cleans up after a backward that did not finish.

        Args:
            summoned: allow ``summon_full_params``.
        """
        self._recover()
        for block in self.blocks:
            if block.phase is not Phase.REST and not (summoned and block.phase is Phase.SUMMONED):
                raise RuntimeError(f"{doing} while block {block.name!r} is {block.phase.name}: {block.phase.value}")

    def _ensure_ready(self, block: Block) -> None:
        if block.phase is not Phase.REST:
            raise RuntimeError(f"forward or backward of block {block.name!r} while {block.phase.value}")
        block.group.start_fill(self.generation)
        if block.group.state is BufferState.FILLING:
            block.group.finish_fill()

    def _release(self, block: Block, successor: Block | None) -> None:
        """Leave, and free the buffer unless the next block needs it too."""
        block.leave()
        group = block.group
        if not group.keep and not group.at_work and (successor is None or successor.group is not group):
            group.free()

    # -- forward ---------------------------------------------------------------------------------------------------

    @outside_compile
    def _start_of_model(self, _module: nn.Module, _args: Any) -> None:
        self._recover()
        self.order.restart()
        self._find_replicated()

    @outside_compile
    def _before_forward(
        self, block: Block, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if block.phase is Phase.BACKWARD:
            return None  # recomputation: backward has filled the block already
        self._recover()
        self._find_replicated()
        self.order.record(block, first=current_backward() is None)
        self._ensure_ready(block)
        block.enter(Phase.FORWARD)
        if current_backward() is None:  # a recomputation goes backward from here
            self._prefetch(block, backward=False)
        if not torch.is_grad_enabled():
            return None
        return self._mark_boundary(block, args, kwargs)

    @outside_compile
    def _after_forward(self, block: Block, _module: nn.Module, _args: Any, output: Any) -> None:
        if block.phase is not Phase.FORWARD:
            return
        self._release(block, self.order.after(block))
        if not torch.is_grad_enabled():
            return
        hook = partial(self._before_backward, block, self.generation)
        for leaf in tree_flatten(output)[0]:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(hook)
                block.awaits_backward = True

    def _mark_boundary(
        self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Pass all inputs that need gradients through one function: its backward runs after the block's own."""
        leaves, spec = tree_flatten((args, kwargs))
        where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not where:
            return None  # the end of the backward pass releases the block
        if current_backward() is None:  # the graph of a recomputation may never be differentiated
            block.calls += 1
        marked = _BackwardBoundary.apply(  # type: ignore[no-untyped-call]
            partial(self._after_backward, block), *(leaves[i] for i in where)
        )
        for i, tensor in zip(where, marked, strict=True):
            leaves[i] = tensor
        new_args, new_kwargs = tree_unflatten(leaves, spec)
        return new_args, new_kwargs

    def _prefetch(self, block: Block, *, backward: bool) -> None:
        """Start filling the groups that come next."""
        coming = self.order.groups_from(block, backward=backward)
        for _ in range(self.comm.options.prefetch):
            group = next(coming, None)
            if group is None or (backward and not any(b.awaits_backward for b in group.blocks)):
                return
            if not group.at_work:
                group.start_fill(self.generation)

    # -- backward --------------------------------------------------------------------------------------------------

    def _before_backward(self, block: Block, generation: int, _grad: Tensor) -> None:
        if block.phase is Phase.BACKWARD:
            return
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"backward(create_graph=True) through block {block.name!r}: a second derivative would read weights "
                "that have been freed; keep the block out of it, or exclude its matrices with select=…"
            )
        if generation != self.generation:
            raise RuntimeError(
                f"the weights of block {block.name!r} changed between its forward and its backward; run backward "
                "before step(), load_state_dict() or edits"
            )
        block.backward = self._in_backward()
        self.order.restart()
        self._ensure_ready(block)
        for entry in block.group.entries:  # not the block's alone: the group is reduced as a whole
            # Gradients of unsynchronized passes that zero_grad() has dropped since, whoever called it.
            if entry.was_dropped:
                entry.drop_unreduced()
        block.enter(Phase.BACKWARD)
        self._prefetch(block, backward=True)

    def _after_backward(self, block: Block) -> None:
        if block.phase is not Phase.BACKWARD:
            return
        block.calls = max(0, block.calls - 1)
        if block.calls == 0:  # otherwise an earlier call of the same block still needs the weights
            self._close(block)

    def _close(self, block: Block) -> None:
        before = self.order.before(block)
        self._release(block, before if before is not None and before.awaits_backward else None)
        block.forget_graph()
        group = block.group
        # Without shards there is nothing to reduce but across replicas.
        if not self.sync or not (self.all_reduce or self.comm.row is not None or self.comm.column is None):
            for entry in block.entries:
                if entry.full.requires_grad:
                    entry.hold()
            self._waiting[id(group)] = group
            return
        self._closed[id(group)] = group
        if not any(other.awaits_backward for other in group.blocks):
            self._reduce(group)

    def _reduce(self, group: OwnedBuffer) -> None:
        self._closed.pop(id(group), None)
        self._waiting.pop(id(group), None)
        self.gradients.reduce(group, along_column=self.all_reduce)
        if not self._whole_sync:
            self._waiting[id(group)] = group

    def _in_backward(self) -> int:
        """Identity of the running backward pass, whose end is hooked on first sight."""
        backward = current_backward()
        assert backward is not None, "gradient hooks run inside a backward pass"
        if backward not in self._backwards:
            self._backwards.add(backward)
            on_backward_end(partial(self._end_of_backward, backward))
        return backward

    def _gradient_arrived(self) -> bool:
        self._in_backward()
        return self._whole_sync

    @property
    def _whole_sync(self) -> bool:
        """Whether gradients are to be whole when backward returns."""
        return self.sync and (self.all_reduce or self.comm.column is None)

    def _end_of_backward(self, backward: int) -> None:
        """All gradients are reduced and visible when ``backward()`` returns."""
        for block in self.blocks:
            if block.phase is Phase.BACKWARD and block.backward == backward:
                self._close(block)
        for group in list(self._closed.values()):
            self._reduce(group)
        if self._whole_sync:  # what earlier micro-batches left and this one did not run
            for group in [g for g in self.groups if id(g) in self._waiting]:
                for entry in group.entries:
                    if entry.was_dropped:
                        entry.drop_unreduced()
                self._reduce(group)
        if self._backwards == {backward}:
            self._free_unused_prefetches()
        if self.sync:
            self.gradients.finish(settle=self._whole_sync)
        self._backwards.discard(backward)  # not before: after an exception in here there is something to recover from

    def _free_unused_prefetches(self) -> None:
        for group in self.groups:
            if group.state is not BufferState.FREED and not group.keep and not group.at_work:
                group.free()

    def _find_replicated(self) -> None:
        """What nobody shards is averaged. Known at the first forward only: FSDP2 may be applied until then.

        FSDP2 may have put whole weights into its modules by now, but never the very tensors that were there before.
        """
        if self.gradients.averager is not None:
            return
        for param in managed_by_ddp().values():
            if isinstance(param, OwnedTensor):
                raise RuntimeError(
                    f"parameter {param.fqn!r} is owned by dmuon and managed by DistributedDataParallel too; call the "
                    "dedicated model without it: dmuon averages all gradients over the mesh"
                )
        owned = {id(e.rest) for e in self.entries()} | {id(e.full) for e in self.entries()}
        params: dict[int, nn.Parameter] = {}
        sharded: set[int] = set()
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                sharded.update(id(m) for m in module.modules())
            for param in module.parameters(recurse=False):
                original = self._replicated.get(id(param))
                ours = original is not None and original() is param
                if id(param) in owned or (isinstance(param, DTensor) and not ours):
                    continue
                if id(module) not in sharded or ours:
                    params[id(param)] = param
        several = [p for p in params.values() if self.comm.world > 1 or isinstance(p, DTensor)]
        self.gradients.averager = GradAverager(several, self.comm, self._gradient_arrived)
        self._replicated.clear()

    # -- recovery --------------------------------------------------------------------------------------------------

    def drop_gradients(self) -> None:
        """Forget gradients that were not reduced yet."""
        self._recover()
        self._waiting.clear()
        for entry in self.entries():
            entry.drop_unreduced()

    def unreduced(self) -> str | None:
        """Name of a parameter whose gradient was left unreduced by a backward without synchronization."""
        return next((e.fqn for e in self.entries() if e.unreduced and not e.was_dropped), None)

    def _recover(self) -> None:
        """Clean up after a backward that raised: nothing more of it may reach a gradient.

        Blocks that it had reduced before keep what they got, as ordinary parameters do; gradients accumulated without
        synchronization are dropped.
        """
        if not self._backwards or current_backward() is not None:
            return
        self._backwards.clear()
        self._closed.clear()
        self._waiting.clear()
        for block in self.blocks:
            block.reset()
        self.weights_changed()
        run_all([self.gradients.discard, *(group.free for group in self.groups)])


class _BackwardBoundary(torch.autograd.Function):
    """Identity on its inputs; its backward tells that everything after them has been differentiated."""

    @staticmethod
    def forward(ctx: Any, reached: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.reached = reached
        ctx.set_materialize_grads(False)
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ctx.reached()
        return (None, *grads)
