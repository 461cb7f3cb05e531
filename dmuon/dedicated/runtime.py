"""One training step over the blocks of a model: fill, free, reduce, publish. Hooks only, no patching.

[Note: one order of collectives]
A back end matches the collectives of a process group by their order alone, whatever they carry. If one rank skips one,
or swaps two, the others wait forever or take its data for something else. So which collectives a group gets, and in
which order, follows only from what is the same on all ranks: the order in which blocks ran forward, the options, and
the generation. What differs between ranks must not decide. A rank without a gradient for a matrix reduces zeros and
votes afterwards (``Gradients``); buckets of replicated gradients leave in the order in which they were made
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
from torch.distributed.tensor import DTensor

from dmuon.comm.context import Comm
from dmuon.comm.monitor import run_all
from dmuon.dedicated.block import Block, ExecutionOrder, Phase, mark_boundary
from dmuon.dedicated.buffer import BufferState, OwnedBuffer
from dmuon.dedicated.even_dtensor import write_even
from dmuon.dedicated.gradients import Gradients
from dmuon.dedicated.matrix import OwnedMatrix
from dmuon.dedicated.nesting import Covered
from dmuon.dedicated.order_check import OrderCheck
from dmuon.dedicated.owned_tensor import OwnedTensor
from dmuon.dedicated.publication import Publications
from dmuon.dedicated.replicated import GradAverager, unsharded_parameters
from dmuon.layout.topology import GlobalRank
from dmuon.model.blocks import canonical_fqn
from dmuon.planning.owner_plan import OwnerPlan
from dmuon.platform.log import logger
from dmuon.platform.torch_private import current_backward, on_backward_end, outside_compile
from dmuon.step.residency import Residency

_log = logger(__name__)


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
    """

    def __init__(
        self,
        roots: Mapping[str, nn.Module],
        blocks: Sequence[Block],
        comm: Comm,
        plan: OwnerPlan,
    ) -> None:
        self.blocks = list(blocks)
        self.buffers = list(_buffers(self.blocks))
        self.comm = comm
        self.plan = plan
        self.generation = 0
        self.sync = True
        self.all_reduce = True
        self.members: weakref.WeakSet[Residency] = weakref.WeakSet()
        self.strangers: tuple[GlobalRank, ...] = ()
        self.order = ExecutionOrder(self.blocks)
        self.gradients = Gradients(comm, list(self.matrices()))
        self.order_check = OrderCheck(comm, self.blocks, is_list="" not in roots)
        self._neighbours = {buffer: [b for b in self.blocks if b.buffer is buffer] for buffer in self.buffers}
        self._backwards: set[int] = set()
        self._reducible: dict[OwnedBuffer, None] = {}  # an ordered set: with gradients, reduction not started
        self._leftovers: set[OwnedBuffer] = set()  # with gradients that earlier backwards did not make whole
        self._strays: dict[Block, int] = {}  # with gradients of a backward that did not enter them, and which
        self.publications = Publications(comm)
        self._warned: set[Block] = set()
        self._covered = Covered(roots)  # which it does not hold: modules own their hooks, and so this
        params = [param for _, param in self._named_parameters()]
        # Without what dmuon owns: `Module.to` swaps tensor subclasses, and fails if a weak reference watches one.
        self._replicated = {id(p): weakref.ref(p) for p in params if not isinstance(p, OwnedTensor)}
        self._trained = {id(p) for p in params if p.requires_grad}  # which all ranks have agreed on
        self._has_root = "" in roots
        if self._has_root:
            roots[""].register_forward_pre_hook(self._root_pre_forward)
            roots[""].register_forward_hook(self._root_post_forward)
        self._by_rest = {id(matrix.rest): matrix for matrix in self.matrices()}
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
        return {id(p) for _, p in self._named_parameters()} | self._by_rest.keys()

    def unclaimed(self, claimed: set[int]) -> list[str]:
        """Names of tensors of two dimensions or more that have a gradient and are not among the ids ``claimed``."""
        named: list[tuple[str, Tensor]] = [(matrix.fqn, matrix.rest) for matrix in self.matrices()]
        named += [(canonical_fqn(n), p) for n, p in self._named_parameters() if not isinstance(p, OwnedTensor)]
        return [name for name, p in named if p.ndim >= 2 and p.grad is not None and id(p) not in claimed]

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self._covered.named_parameters(self.blocks)

    @property
    def name(self) -> str:
        """The same on all ranks, and of no other dedicated model."""
        return str(self.comm.control.group_name)

    def matrix_of(self, param: Tensor) -> OwnedMatrix:
        """The matrix whose resting form ``param`` is."""
        return self._by_rest[id(param)]

    def waiting_grad(self, param: OwnedTensor) -> Tensor | None:
        """The gradient of ``param`` that waits for a backward with synchronization; None of an alias."""
        matrix = self._by_rest.get(id(param))
        return None if matrix is None else matrix.waiting_grad

    def drop_waiting(self, param: OwnedTensor) -> None:
        """Forget that: the user has cleared or replaced the gradient."""
        matrix = self._by_rest.get(id(param))
        if matrix is not None and matrix.waits:
            matrix.drop_unreduced()

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

    def write_even(self, param: OwnedTensor, shard: Tensor) -> None:
        """Make the even shards of all ranks the value of ``param``. Collective.

        Raises:
            ValueError, RuntimeError: on every rank, if some rank cannot.
        """
        matrix = self._by_name[param.fqn]  # ``param`` may be an alias
        fault: Exception | None = None
        try:
            self.at_rest("a write to to_local()")
        except RuntimeError as error:
            fault = error
        self.before_write()
        write_even(shard, param, matrix, self.comm, fault)
        self.weights_changed()

    def begin_update(self, params: Iterable[Tensor]) -> None:
        """Before the masters of ``params`` change: raise the generation, and publish what none of them delays.

        :meth:`updated` and :meth:`end_update` publish the rest, each buffer as soon as this rank's masters of it are up
        to date, in the order in which the next forward needs them. Buffers that are kept are then filled too; of the
        others, as many as are prefetched.
        """
        self.comm.monitor.begin_step()
        self.before_write()
        self.weights_changed()
        for block in self.blocks:  # graphs of forwards that never ran backward are void now
            lingered = block.lingers
            block.forget_graph()
            if lingered and not self._stays(block.buffer):
                block.buffer.free()
        outdated = {id(p) for p in params if id(p) in self._by_rest}
        self.publications.begin(_buffers(self.order.walk()), outdated, self.generation)

    def updated(self, params: Iterable[Tensor]) -> None:
        """The masters of ``params`` have their new values."""
        self.publications.updated(id(p) for p in params)

    def end_update(self) -> None:
        """All masters have their new values."""
        self.publications.end()
        self.comm.monitor.end_step()

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
        if not self._stays(buffer) and (successor is None or successor.buffer is not buffer):
            buffer.free()

    def _stays(self, buffer: OwnedBuffer) -> bool:
        """Whether its weights must not be freed now."""
        return buffer.keep or buffer.in_use or any(block.lingers for block in self._neighbours[buffer])

    def _prefetch(self, block: Block, *, backward: bool) -> None:
        """Start filling the buffers that come next."""
        buffers = _buffers(self.order.walk(block, backward=backward))
        for buffer in islice(buffers, 1, 1 + self.comm.options.prefetch):  # the first is the block's own
            if backward and not self._awaits_backward(buffer):
                return
            if not buffer.in_use:
                buffer.start_fill(self.generation)

    def _awaits_backward(self, buffer: OwnedBuffer) -> bool:
        return any(block.awaits_backward for block in self._neighbours[buffer])

    # -- forward ---------------------------------------------------------------------------------------------------

    @outside_compile
    def _root_pre_forward(self, _module: nn.Module, _args: Any) -> None:
        self._recover()
        self.order.restart()
        self.order_check.restart()
        self._prepare()

    @outside_compile
    def _root_post_forward(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self.order_check.end(trains=torch.is_grad_enabled())

    @outside_compile
    def _pre_forward(
        self, block: Block, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if block.phase is Phase.BACKWARD:
            return None  # recomputation: backward has filled the block already
        self._recover()
        self._prepare()
        recomputation = current_backward() is not None
        if not recomputation:
            if not self._has_root and self.order.begins_with(block):
                self.order.restart()
            self.order_check.run(block, trains=torch.is_grad_enabled())
        self.order.record(block, first=not recomputation)
        self._ensure_ready(block)
        block.enter(Phase.FORWARD)
        if not recomputation:  # which goes backward from this block
            self._prefetch(block, backward=False)
        if not torch.is_grad_enabled():
            return None
        # Without a boundary, where no input needs a gradient, the end of the backward pass releases the block.
        inputs = mark_boundary(args, kwargs, partial(self._post_backward, block))
        if inputs is not None and not recomputation:  # the graph of a recomputation may never be differentiated
            block.calls += 1
        return inputs

    @outside_compile
    def _post_forward(self, block: Block, _module: nn.Module, _args: Any, output: Any) -> Any:
        if block.phase is not Phase.FORWARD:
            return None
        raised = output is None and sys.exc_info()[1] is not None  # the hook runs whatever the forward came to
        if raised or not torch.is_grad_enabled():
            self._leave(block, self.order.after(block))
            return None
        returned, left = block.outputs.find(output)
        seen = bool(returned or left)
        if not seen and block.trains and not block.lingers:
            self._warn_of_unseen(block)
            block.lingers = True
        self._leave(block, self.order.after(block))
        block.awaits_backward = block.awaits_backward or seen
        block.generation = self.generation
        hook = partial(self._pre_backward, block, self.generation)
        for tensor in left:
            tensor.register_hook(hook)
        if len({tensor.device for tensor in returned}) > 1:
            # A thread for each device would enter the block, on each rank in another order.
            passed = mark_boundary((output,), {}, hook)
            return None if passed is None else passed[0][0]
        for tensor in returned:
            tensor.register_hook(hook)
        return None

    def _warn_of_unseen(self, block: Block) -> None:
        if block.buffer.keep or block in self._warned:
            return
        self._warned.add(block)
        _log.warning(
            "block %r: neither its output nor its attributes hold a tensor that needs a gradient, so its whole weights "
            "stay in memory until a backward has used them, or step(); run it under torch.no_grad() if none will",
            block.name,
        )

    def _prepare(self) -> None:
        """Average what nobody shards. The first forward tells what that is: FSDP2 may be applied until then."""
        if self.gradients.averager is not None:
            return
        self.order_check.compare_places()
        params = unsharded_parameters(self._covered.modules(self.blocks), list(self.matrices()), self._replicated)
        several = [p for p in params if self.comm.world > 1 or isinstance(p, DTensor)]
        arrived = weakref.WeakMethod(self._gradient_arrived)
        self.gradients.averager = GradAverager(several, self.comm, self._trained, arrived)
        self.gradients.names = {id(p): canonical_fqn(name) for name, p in self._named_parameters()}
        self._replicated.clear()

    # -- backward --------------------------------------------------------------------------------------------------

    def _pre_backward(self, block: Block, generation: int, _grad: Tensor | None = None) -> None:
        if block.phase is Phase.BACKWARD:
            return
        self._check_graph(block, generation)
        block.backward = self._in_backward()
        self.order.restart()
        self._ensure_ready(block)
        block.enter(Phase.BACKWARD)
        self._prefetch(block, backward=True)

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

    def gradient_comes(self, block: Block) -> None:
        """A whole weight of ``block`` has a gradient, perhaps by a way that its hooks did not see."""
        if block.phase is not Phase.BACKWARD and block not in self._strays:
            self._check_graph(block, block.generation)
            self._strays[block] = self._in_backward()

    def _post_backward(self, block: Block) -> None:
        if block.phase is not Phase.BACKWARD:
            return
        block.calls = max(0, block.calls - 1)
        if block.calls == 0:  # otherwise an earlier call of the same block still needs the weights
            self._end_block(block)

    def _end_block(self, block: Block) -> None:
        """All gradients of ``block`` are there: reduce them, together with those of its neighbours in the buffer."""
        if block.phase is Phase.BACKWARD:
            before = self.order.before(block)
            self.gradients.join(block.matrices)  # what made them has read the weights, whose memory may be freed now
            self._leave(block, before if before is not None and before.awaits_backward else None)
        self._strays.pop(block, None)
        block.forget_graph()
        buffer = block.buffer
        # Without shards there is nothing to reduce but across replicas.
        if not self.sync or not (self.all_reduce or self.comm.row is not None or self.comm.column is None):
            for matrix in block.matrices:
                matrix.unreduced = matrix.unreduced or matrix.full.grad is not None
            self._leftovers.add(buffer)
            return
        self._reducible[buffer] = None
        if not self._awaits_backward(buffer):
            self._reduce(buffer)

    def _reduce(self, buffer: OwnedBuffer) -> None:
        self._reducible.pop(buffer, None)
        self._leftovers.discard(buffer)
        self.gradients.reduce(buffer, along_column=self.all_reduce)
        if not self._whole_sync:
            self._leftovers.add(buffer)

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
            entered = block.phase is Phase.BACKWARD and block.backward == backward
            if entered or self._strays.get(block) == backward:
                self._end_block(block)
        for buffer in list(self._reducible):
            self._reduce(buffer)
        if self._whole_sync:  # what earlier micro-batches left and this one did not run
            for buffer in [buffer for buffer in self.buffers if buffer in self._leftovers]:
                self._reduce(buffer)
        if self._backwards == {backward}:
            self._free_unused_prefetches()
        if self.sync:
            self.gradients.finish(settle=self._whole_sync)
        self._backwards.discard(backward)  # last: after an exception above there is something to recover from

    def _free_unused_prefetches(self) -> None:
        for buffer in self.buffers:
            if buffer.state is not BufferState.FREED and not self._stays(buffer):
                buffer.free()

    # -- recovery --------------------------------------------------------------------------------------------------

    def drop_gradients(self) -> None:
        """Forget gradients that were not reduced yet."""
        self._recover()
        self._leftovers.clear()
        for matrix in self.matrices():
            matrix.drop_unreduced()

    def unreduced(self) -> str | None:
        """Name of a parameter whose gradient was left unreduced by a backward without synchronization."""
        return next((matrix.fqn for matrix in self.matrices() if matrix.waits), None)

    def _recover(self) -> None:
        """Clean up after a backward that raised: nothing more of it may reach a gradient.

        Blocks that it had reduced before keep what they got, as ordinary parameters do; gradients accumulated without
        synchronization are dropped.
        """
        if not self._backwards or current_backward() is not None:
            return
        self._backwards.clear()
        self._reducible.clear()
        self._strays.clear()
        self._leftovers.clear()
        self.publications.forget_fills()
        for block in self.blocks:
            block.reset()
        self.weights_changed()
        run_all([self.gradients.discard, *(buffer.free for buffer in self.buffers)])


def _notice(runtime: weakref.ref[Runtime], block: weakref.ref[Block], _param: Tensor) -> None:
    alive, entered = runtime(), block()
    if alive is not None and entered is not None:
        alive.gradient_comes(entered)


def runtime_of(param: Tensor) -> Runtime | None:
    """The runtime that moves the weights of ``param``; None if it is not owned."""
    keeper = param.keeper if isinstance(param, OwnedTensor) else None
    return keeper if isinstance(keeper, Runtime) else None


def _buffers(blocks: Iterable[Block]) -> Iterator[OwnedBuffer]:
    """The buffers of ``blocks``, each once."""
    visited: set[OwnedBuffer] = set()
    for block in blocks:
        if block.buffer not in visited:
            visited.add(block.buffer)
            yield block.buffer
