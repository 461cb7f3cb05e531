"""One training step over the blocks of a model: fill, free, reduce, publish. Hooks only, no patching.

[Note: one order of collectives]
A back end matches the collectives of a process group by their order alone, whatever they carry. If one rank skips one,
or swaps two, the others wait forever or take its data for something else. So which collectives a group gets, and in
which order, follows only from what is the same on all ranks: the order in which blocks ran forward, the options, and
the generation. What differs between ranks must not decide. A rank without a gradient for a matrix reduces zeros and
votes afterwards (``Gradients``); buckets of replicated gradients leave when backward ends
(``GradAverager``); a publication waits for its turn in the order of forward even if it is ready (``Publications``).
``Monitor`` names every collective before it starts; with the next vote, ranks compare what they have issued.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dmuon.comm.agreement import require_no_fault
from dmuon.comm.context import Comm
from dmuon.comm.monitor import run_all
from dmuon.dedicated.block import AT_WORK, Block, ExecutionOrder, OrderCheck, Phase, mark_boundary
from dmuon.dedicated.buffer import BufferState, GradState, OwnedBuffer, Publications
from dmuon.dedicated.gradients import Gradients
from dmuon.dedicated.matrix import OwnedMatrix
from dmuon.dedicated.nesting import Covered
from dmuon.dedicated.owned_state import even_whole, own_part
from dmuon.dedicated.owned_tensor import OwnedTensor
from dmuon.dedicated.saved_tensors import SavedTensors, storages_of, tell_of_hooks
from dmuon.layout.topology import GlobalRank
from dmuon.model.blocks import canonical_fqn
from dmuon.planning.owner_plan import OwnerPlan
from dmuon.platform.streams import Origin
from dmuon.platform.torch_private import (
    current_backward,
    even_shape,
    may_push_saved_tensor_hooks,
    on_backward_end,
    outside_compile,
)
from dmuon.step.residency import Residency


class Runtime:
    """The blocks of one dedicated model and the order in which their weights and gradients move.

    It is the :class:`Keeper` of the owned parameters.

    Args:
        roots: the model, or several modules that were dedicated together, none of which begins a forward; by the
            prefix of the names of what each holds.

    Attributes:
        buffers: in the order of the model.
        generation: version of the masters, see [Note: what a generation is].
        plan: who owns what, in batches of what size.
        sync: backward reduces gradients; otherwise they accumulate where they arise.
        all_reduce: backward reduces gradients across replicas too.
        members: of this model, in some optimizer.
        strangers: ranks of a model around this one that hold other matrices by these names, and not these.
        was_entered: a backward came through a block that trains, since the last step or clearing of gradients.
    """

    def __init__(
        self,
        roots: Mapping[str, nn.Module],
        blocks: Sequence[Block],
        comm: Comm,
        plan: OwnerPlan,
    ) -> None:
        self.blocks = list(blocks)
        self.buffers = list(dict.fromkeys(block.buffer for block in self.blocks))
        self.comm = comm
        self.plan = plan
        self.generation = 0
        self.sync = True
        self.all_reduce = True
        self.members: weakref.WeakSet[Residency] = weakref.WeakSet()
        self.strangers: tuple[GlobalRank, ...] = ()
        self.was_entered = False
        self.order = ExecutionOrder(self.blocks)
        self.gradients = Gradients(comm, list(self.matrices()), weakref.WeakMethod(self._gradient_arrived))
        self.order_check = OrderCheck(comm, self.blocks, is_list="" not in roots)
        of_module: dict[int, list[Block]] = {}  # one for each dtype
        for block in self.blocks:
            of_module.setdefault(id(block.module), []).append(block)
        # The first of them hooks what the graph saves, of the whole weights of all.
        self._alike = {alike[0]: (alike, storages_of(one.buffer for one in alike)) for alike in of_module.values()}
        self._backwards: set[int] = set()
        self.publications = Publications(comm)
        self._covered = Covered(roots)  # which it does not hold: modules own their hooks, and so this
        self._has_root = "" in roots
        if self._has_root:
            roots[""].register_forward_pre_hook(self._root_pre_forward)
            roots[""].register_forward_hook(self._root_post_forward)
        self._by_rest = {id(matrix.rest): matrix for matrix in self.matrices()}
        self._buffer_of = {key: buffer for buffer in self.buffers for key in buffer.params}
        self._by_name = {matrix.fqn: matrix for matrix in self.matrices()}
        for matrix in self.matrices():
            matrix.rest.keeper = self
        for block in self.blocks:
            module = block.module
            assert module is not None
            module.register_forward_pre_hook(partial(self._pre_forward, block), with_kwargs=True)
            module.register_forward_hook(partial(self._post_forward, block), always_call=True)
            # Weak references, since the collector cannot see through such hooks and would never free the model.
            hook = partial(_notice, weakref.ref(self), weakref.ref(block))
            for matrix in block.matrices:
                matrix.full.register_post_accumulate_grad_hook(hook)

    def matrices(self) -> Iterator[OwnedMatrix]:
        """All owned matrices, in the order of the buffers."""
        for buffer in self.buffers:
            yield from buffer.matrices

    def param_ids(self) -> set[int]:
        """Of everything that the model has."""
        return {id(p) for _, p in self._covered.named_parameters(self.blocks)} | self._by_rest.keys()

    def unclaimed(self, claimed: set[int]) -> list[str]:
        """Names of tensors of two dimensions or more that have a gradient and are not among the ids ``claimed``."""
        named: list[tuple[str, Tensor]] = [(matrix.fqn, matrix.rest) for matrix in self.matrices()]
        others = self._covered.named_parameters(self.blocks)
        named += [(canonical_fqn(n), p) for n, p in others if not isinstance(p, OwnedTensor)]
        return [name for name, p in named if p.ndim >= 2 and p.grad is not None and id(p) not in claimed]

    @property
    def name(self) -> str:
        """The same on all ranks, and of no other dedicated model."""
        return self.comm.monitor.name

    def matrix_of(self, param: Tensor) -> OwnedMatrix:
        """The matrix whose resting form ``param`` is."""
        return self._by_rest[id(param)]

    def waiting_grad(self, param: OwnedTensor) -> Tensor | None:
        """The gradient of ``param`` that waits for a backward with synchronization; None of an alias."""
        buffer = self._buffer_of.get(id(param))
        waits = buffer is not None and buffer.gradients is GradState.WAITING
        return self._by_rest[id(param)].waiting_grad if waits else None

    def drop_waiting(self, param: OwnedTensor) -> None:
        """Forget that: the user has cleared or replaced the gradient."""
        self.was_entered = False
        buffer = self._buffer_of.get(id(param))
        if buffer is not None and buffer.gradients is GradState.WAITING:
            self._by_rest[id(param)].drop_waiting()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # Hooks hold the runtime, so copying or pickling a model meets it before its parameters.
        return next(self.matrices()).rest.__deepcopy__(memo)  # raises, with the remedy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return next(self.matrices()).rest.__reduce_ex__(protocol)

    # -- weights ---------------------------------------------------------------------------------------------------

    def before_write(self) -> None:
        """Masters are about to change: what is queued from now on runs after whoever reads them."""
        self.comm.fill_stream.join()
        self.comm.publish_stream.join()

    def weights_changed(self) -> None:
        """Masters have changed, or will: whatever is in a buffer is out of date."""
        self.generation += 1
        self.was_entered = False

    def write_even(self, param: OwnedTensor, shard: Tensor) -> None:
        """Make the even shards of all ranks the value of ``param``. Collective.

        Raises:
            ValueError, RuntimeError: on every rank, if some rank cannot.
        """
        matrix = self._by_name[param.fqn]  # ``param`` may be an alias
        fault: Exception | str | None = None
        try:
            self.at_rest("a write to to_local()")
        except RuntimeError as error:
            fault = error
        shape = even_shape(param.shape, param.device_mesh, param.placements)
        if shard.shape != shape:
            fault = f"{param.fqn}: an even shard has shape {tuple(shape)} here, not {tuple(shard.shape)}"
        require_no_fault(self.comm.control, fault, self.comm.device)
        self.before_write()
        with torch.no_grad():
            matrix.master.copy_(own_part(even_whole(param, shard), matrix))
        self.weights_changed()

    def begin_update(self, params: Iterable[Tensor]) -> None:
        """Before the masters of ``params`` change: raise the generation, and publish what none of them delays.

        :meth:`Publications.updated` and :meth:`end_update` publish the rest, each buffer as soon as this rank's masters
        of it are up to date, in the order in which the next forward needs them. Buffers that are kept are then filled
        too; of the others, as many as are prefetched.
        """
        monitor = self.comm.monitor  # the other ranks must take the step, too, before the next gradients are used
        monitor.note("step", f"step {monitor.step} of the optimizer")
        self.before_write()
        self.weights_changed()
        for block in self.blocks:  # graphs of forwards that never ran backward are void now
            block.forget_graph()
        outdated = self._by_rest.keys() & map(id, params)
        self.publications.begin(self.order.buffers(), outdated, self.generation)

    def end_update(self) -> None:
        """All masters have their new values."""
        self.publications.end()
        self.comm.monitor.step += 1

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
        block.buffer.start_fill(self.generation)
        if block.buffer.state is BufferState.FILLING:
            block.buffer.finish_fill()

    def _leave(self, block: Block, successor: Block | None) -> None:
        """Leave ``block``, and free its buffer unless the next block needs it too."""
        block.leave()
        buffer = block.buffer
        if not (buffer.keep or buffer.users) and (successor is None or successor.buffer is not buffer):
            buffer.free()

    def _prefetch(self, block: Block, *, backward: bool) -> None:
        """Start filling the buffers that come next."""
        buffers = self.order.buffers(block, backward=backward)
        for buffer in islice(buffers, 1, 1 + self.comm.options.prefetch):  # the first is the block's own
            if backward and not buffer.awaited:
                return
            if not buffer.users:
                buffer.start_fill(self.generation)

    # -- forward ---------------------------------------------------------------------------------------------------

    @outside_compile
    def _root_pre_forward(self, _module: nn.Module, _args: Any) -> None:
        self._recover()
        self._start_pass()
        self.order_check.restart()
        self._prepare()

    def _start_pass(self) -> None:
        """No block is at work yet, unless a Ctrl-C has ended the last pass, of which torch tells no forward hook."""
        self.order.last = None  # the next block that runs follows no other
        for block in self.blocks:
            if block.phase is Phase.FORWARD and current_backward() is None:
                block.abandon()

    @outside_compile
    def _root_post_forward(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self.order_check.end(trains=torch.is_grad_enabled())

    @outside_compile
    def _pre_forward(
        self, block: Block, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if block.phase is Phase.BACKWARD:  # recomputation: backward has filled the block already
            self._begin_saving(block)
            return None
        self._recover()
        recomputation = current_backward() is not None
        begins = not (recomputation or self._has_root) and self.order.first is block
        if begins or not self.gradients.averager.looked:
            self._prepare()
        if not recomputation:
            if begins:
                self._start_pass()
            self.order_check.run(block, trains=torch.is_grad_enabled())
        self.order.record(block, first=not recomputation)
        self._ensure_ready(block)
        block.enter(Phase.FORWARD)
        if not recomputation:  # which goes backward from this block
            self._prefetch(block, backward=False)
        if not torch.is_grad_enabled():
            return None
        # Without a boundary, where no input needs a gradient, the end of the backward pass releases the block.
        given = (args, *kwargs.values())
        passed, is_marked = mark_boundary(given, partial(self._post_backward, block))
        if is_marked and not recomputation:  # the graph of a recomputation may never be differentiated
            block.calls += 1
        self._begin_saving(block)
        return (passed[0], dict(zip(kwargs, passed[1:], strict=True))) if is_marked else None

    def _begin_saving(self, block: Block) -> None:
        """What the graph saves from now on comes back by way of the block: [Note: how backward enters a block]."""
        if block in self._alike and torch.is_grad_enabled() and not block.buffer.keep and may_push_saved_tensor_hooks():
            alike, storages = self._alike[block]
            block.saving.append(SavedTensors(storages, partial(self._enter_by_saved, alike, self.generation)))

    @outside_compile
    def _post_forward(self, block: Block, _module: nn.Module, _args: Any, output: Any) -> Any:
        error = sys.exc_info()[1] if output is None else None  # the hook runs whatever the forward came to
        if block.saving:
            saved = block.saving.pop()
            saved.end()
            for one in self._alike[block][0] if error is None and saved.any else ():
                one.buffer.awaited.add(one.name)
            if error is not None:
                tell_of_hooks(error, block.name)
        # Without gradients somebody may keep a view; but operations on DTensors leave garbage that refers to weights.
        block.buffer.was_read = block.buffer.was_read or torch.is_grad_enabled() or self.comm.tensor is None
        if block.phase is not Phase.FORWARD:
            return None
        if error is not None or not torch.is_grad_enabled():
            self._leave(block, self.order.following.get(block))
            return None
        returned: list[Tensor] = []
        devices: set[torch.device] = set()
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                returned.append(leaf)
                devices.add(leaf.device)
        self._leave(block, self.order.following.get(block))
        if returned:
            block.buffer.awaited.add(block.name)
        block.generation = self.generation
        hook = partial(self._pre_backward, block, self.generation)
        if len(devices) > 1:
            # A thread for each device would enter the block, on each rank in another order.
            return mark_boundary(output, hook)[0]
        for tensor in returned:
            tensor.register_hook(hook)
        return None

    def _prepare(self) -> None:
        """Where a pass begins: average what nobody shards, as far as the model has it now."""
        if not self._has_root:
            self.order_check.compare_places()
        if torch.is_grad_enabled():
            self.gradients.averager.look(self._covered, self.blocks)

    # -- backward --------------------------------------------------------------------------------------------------

    def _pre_backward(self, block: Block, generation: int, _grad: Tensor | None = None) -> None:
        if block.phase is Phase.BACKWARD:
            return
        self._check_graph(block, generation)
        block.backward = self._in_backward()
        for matrix in block.matrices:
            self.was_entered = self.was_entered or matrix.rest.requires_grad
        self.order.last = None  # the next block that runs follows no other
        self._ensure_ready(block)
        block.enter(Phase.BACKWARD)
        self._prefetch(block, backward=True)

    def _enter_by_saved(self, blocks: Sequence[Block], generation: int) -> None:
        """The graph asks back what a forward of ``blocks``, which are one module's, has saved."""
        for block in blocks:
            if block.phase in AT_WORK and generation == self.generation:
                continue
            if current_backward() is None:
                raise RuntimeError(
                    f"what block {block.name!r} has saved for backward was read outside of one, and its weights have "
                    "been freed; pass reshard_after_forward=False to dedicate_params to look at it"
                )
            self._pre_backward(block, generation)

    def _check_graph(self, block: Block, generation: int) -> None:
        """Raise RuntimeError for a backward that cannot be right, of a forward of ``generation``."""
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

    def _post_backward(self, block: Block) -> None:
        if block.phase is not Phase.BACKWARD:
            return
        block.calls = max(0, block.calls - 1)
        if block.calls == 0:  # otherwise an earlier call of the same block still needs the weights
            self._end_block(block)

    def _end_block(self, block: Block) -> None:
        """All gradients of ``block`` are there: reduce them, together with those of its neighbours in the buffer."""
        buffer = block.buffer
        if block.phase is Phase.BACKWARD:
            before = self.order.preceding.get(block)
            if self.gradients.origins:  # what made them has read the weights, whose memory may be freed now
                self.gradients.join(block.matrices)
            self._leave(block, before if before is not None and before.name in before.buffer.awaited else None)
        block.forget_graph()
        # Without shards there is nothing to reduce but across replicas.
        if not self.sync or not (self.all_reduce or self.comm.row is not None or self.comm.column is None):
            if buffer.gradients is GradState.NONE:
                buffer.gradients = GradState.WAITING
            return
        buffer.gradients = GradState.READY
        if not buffer.awaited:
            self._reduce(buffer)

    def _reduce(self, buffer: OwnedBuffer) -> None:
        """Start the reduction of all that the buffer's matrices have, of earlier backwards too."""
        self.gradients.reduce(buffer, along_column=self.all_reduce)
        buffer.gradients = GradState.NONE if self._whole_sync else GradState.WAITING

    def _in_backward(self) -> int:
        """Identity of the running backward pass, whose end is hooked on first sight."""
        backward = current_backward()
        assert backward is not None, "gradient hooks run inside a backward pass"
        if backward not in self._backwards:
            self._backwards.add(backward)
            on_backward_end(partial(self._root_post_backward, backward))
        return backward

    def _gradient_arrived(self) -> bool:
        self._in_backward()
        return self._whole_sync

    @property
    def _whole_sync(self) -> bool:
        """Whether gradients are to be whole when backward returns."""
        return self.sync and (self.all_reduce or self.comm.column is None)

    def _root_post_backward(self, backward: int) -> None:
        """All gradients are reduced and visible when ``backward()`` returns."""
        for block in self.blocks:
            if block.backward == backward:
                self._end_block(block)
        whole = self._whole_sync
        for buffer in self.buffers:
            # Either a block of it did not run, or a backward before this one has left something.
            if buffer.gradients is GradState.READY or (whole and buffer.gradients is GradState.WAITING):
                self._reduce(buffer)
            # Or it was prefetched, and nothing came.
            is_idle = buffer.state is not BufferState.FREED and not (buffer.keep or buffer.users)
            if is_idle and self._backwards == {backward}:
                buffer.free()
        if self.sync:
            self.gradients.finish(settle=whole)
        self._backwards.discard(backward)  # last: after an exception above there is something to recover from

    # -- recovery --------------------------------------------------------------------------------------------------

    def drop_gradients(self) -> None:
        """Forget gradients that were not reduced yet."""
        self._recover()
        self.was_entered = False
        for buffer in self.buffers:
            if buffer.gradients is not GradState.NONE:
                self._forget_gradients(buffer)

    def _forget_gradients(self, buffer: OwnedBuffer) -> None:
        for matrix in buffer.matrices:
            matrix.drop_waiting()
        buffer.gradients = GradState.NONE

    def _recover(self) -> None:
        """Clean up after a backward that raised: nothing more of it may reach a gradient.

        Blocks that it had reduced before keep what they got, as ordinary parameters do; gradients accumulated without
        synchronization are dropped.
        """
        if not self._backwards or current_backward() is not None:
            return
        self._backwards.clear()
        self.publications.forget_fills()
        for block in self.blocks:
            block.abandon()
            block.forget_graph()
        for buffer in self.buffers:
            self._forget_gradients(buffer)
        self.weights_changed()
        run_all([self.gradients.discard, *(buffer.free for buffer in self.buffers)])


def _notice(of_runtime: weakref.ref[Runtime], of_block: weakref.ref[Block], whole: Tensor) -> None:
    """``whole``, a weight of a block, has a gradient, perhaps by a way that the block's hooks did not see."""
    runtime, block = of_runtime(), of_block()
    if runtime is None or block is None:
        return
    if runtime.gradients.origins is not None:
        runtime.gradients.origins[id(whole)] = Origin(runtime.comm.device)
    if block.backward is None:
        runtime._check_graph(block, block.generation)
        block.backward = runtime._in_backward()


def runtime_of(param: Tensor) -> Runtime | None:
    """The runtime that moves the weights of ``param``; None if it is not owned."""
    keeper = param.keeper if isinstance(param, OwnedTensor) else None
    return keeper if isinstance(keeper, Runtime) else None
