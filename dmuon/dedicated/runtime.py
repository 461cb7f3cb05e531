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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, pairwise
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dmuon.comm.context import Comm
from dmuon.comm.monitor import run_all
from dmuon.dedicated.block import (
    Block,
    OrderCheck,
    Phase,
    SavedTensors,
    buffers_along,
    mark_boundary,
    storages_of,
    tell_of_hooks,
)
from dmuon.dedicated.buffer import BufferState, GradState, Publications
from dmuon.dedicated.gradients import Gradients
from dmuon.dedicated.matrix import OwnedMatrix
from dmuon.dedicated.owned_state import state_of
from dmuon.dedicated.owned_tensor import REDUCED_GRAD, OwnedTensor
from dmuon.dedicated.replicated import GradAverager, ManagedModules
from dmuon.kernels import is_capturing, streams_of
from dmuon.layout.topology import GlobalRank
from dmuon.planning.owner_plan import OwnerPlan
from dmuon.platform.streams import Origin
from dmuon.platform.torch_private import (
    current_backward,
    local_tensor,
    on_backward_end,
    outside_compile,
    saved_tensor_hooks_refusal,
)
from dmuon.step.residency import Residency


class Runtime:
    """The blocks of one dedicated model and the order in which their weights and gradients move.

    Owned parameters know it, weakly, as their ``keeper``: it hears what users do to them.

    Args:
        roots: the model, or several modules that were dedicated together, none of which begins a forward; by the
            prefix of the names of what each holds.

    Attributes:
        buffers: in the order of the model.
        generation: version of the masters, see [Note: what a generation is].
        plan: who owns what, in batches of what size.
        syncs: backward synchronizes, as far as replicas do.
        reduces: backward brings gradients to their owners; otherwise they accumulate where they arise.
        members: of this model, in some optimizer.
        by_rest, by_name: the matrices, by the ``id`` of their resting forms, and by name.
        backwards: that have come to a block and not ended yet.
        strangers: ranks of a model around this one that hold other matrices by these names, and not these.
        first: block of the last forward; until one has run, of the model.
        following: what ran after a block in the last forward, and so what to fetch next, and to publish first; until
            one has run, what follows it in the model.
        was_entered: a backward came through a block that trains, since the last step or clearing of gradients.
        may_wait: some gradients may wait for a backward that synchronizes; asked whenever a gradient is read.
    """

    def __init__(self, roots: Mapping[str, nn.Module], blocks: Sequence[Block], comm: Comm, plan: OwnerPlan) -> None:
        self.blocks = list(blocks)
        self.buffers = list(dict.fromkeys(block.buffer for block in self.blocks))
        self.comm = comm
        self.plan = plan
        self.ns_options: Mapping[str, Any] = {}  # that the optimizer takes from here
        self.generation = 0
        self.syncs = self._all_reduce = self.reduces = True
        self.members: weakref.WeakSet[Residency] = weakref.WeakSet()
        self.strangers: tuple[GlobalRank, ...] = ()
        self.was_entered = self.may_wait = False
        self.first = self.blocks[0] if self.blocks else None
        self.following = dict(pairwise(self.blocks))
        self._preceding: dict[Block, Block] = {}  # in forward; it comes after the other one in backward
        self._last: Block | None = None  # that ran in the present pass
        self.managed = ManagedModules(roots, self.blocks)
        # A weak reference, since the collector cannot see through such hooks and would never free the model.
        hook = partial(_tell, weakref.WeakMethod(self._gradient_arrived))
        matrices = list(self.matrices())
        self.gradients = Gradients(comm, matrices, GradAverager(comm, matrices, self.managed, hook))
        self.order_check = OrderCheck(comm)
        of_module: dict[int, list[Block]] = {}  # one for each dtype
        for block in self.blocks:
            of_module.setdefault(id(block.module), []).append(block)
        # The first of them hooks what the graph saves, of the whole weights of all.
        self._alike = {alike[0]: (alike, storages_of(alike)) for alike in of_module.values()}
        self.backwards: set[int] = set()
        self._has_looked = False  # for what is replicated, since the last backward: a program may never call the root
        self.publications = Publications(comm)
        self._has_root = "" in roots
        self._has_streams = streams_of(comm.device) is not None
        if self._has_root:
            roots[""].register_forward_pre_hook(self._root_pre_forward)
            roots[""].register_forward_hook(self._root_post_forward)
        self.by_rest = {id(matrix.rest): matrix for matrix in self.matrices()}
        self.by_name = {matrix.fqn: matrix for matrix in self.matrices()}
        self._buffer_of = {key: buffer for buffer in self.buffers for key in buffer.params}
        self._block_of = {id(matrix.full): block for block in self.blocks for matrix in block.matrices}
        for matrix in self.matrices():
            matrix.rest.keeper = self
        for block in self.blocks:
            module = block.module
            assert module is not None
            module.register_forward_pre_hook(partial(self._pre_forward, block), with_kwargs=True)
            module.register_forward_hook(partial(self._post_forward, block), always_call=True)
            for matrix in block.matrices:
                matrix.full.register_post_accumulate_grad_hook(hook)

    def matrices(self) -> Iterator[OwnedMatrix]:
        """All owned matrices, in the order of the buffers."""
        for buffer in self.buffers:
            yield from buffer.matrices

    def param_ids(self) -> set[int]:
        """Of everything that the model has."""
        return {id(p) for _, p in self.managed.named_parameters()} | self.by_rest.keys()

    def waiting_grad(self, param: OwnedTensor) -> Tensor | None:
        """The gradient of ``param`` that waits for a backward with synchronization; None of an alias."""
        buffer = self._buffer_of.get(id(param))
        waits = buffer is not None and buffer.gradients is GradState.WAITING
        return self.by_rest[id(param)].full.grad if waits else None

    def drop_waiting(self, param: OwnedTensor) -> None:
        """Forget that: the user has cleared or replaced the gradient; no backward has left one where there is none."""
        buffer = self._buffer_of.get(id(param))
        waits = buffer is not None and buffer.gradients is GradState.WAITING
        self.was_entered = self.was_entered and not waits and REDUCED_GRAD.__get__(param) is None
        if waits:
            self.by_rest[id(param)].full.grad = None

    def require(self, *, sync: bool | None = None, all_reduce: bool | None = None) -> None:
        """Let backward synchronize, and reduce across replicas too, or not: no gradient goes half of the way."""
        before = self.reduces
        self.syncs = self.syncs if sync is None else sync
        self._all_reduce = self._all_reduce if all_reduce is None else all_reduce
        self.reduces = self.syncs and (self._all_reduce or self.comm.column is None)
        for buffer in self.buffers if self.reduces != before else ():
            dtype = buffer.matrices[0].full.dtype
            wide = torch.promote_types(dtype, buffer.reduce_dtype)
            for matrix in buffer.matrices if wide != dtype else ():
                # What waits adds up in it, whatever the dtype of what comes then.
                matrix.full.grad_dtype = wide if not self.reduces and matrix.full.grad is None else None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # Hooks hold the runtime, so copying or pickling a model meets it before its parameters.
        return next(self.matrices()).rest.__deepcopy__(memo)  # raises, with the remedy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return next(self.matrices()).rest.__reduce_ex__(protocol)

    # -- weights ---------------------------------------------------------------------------------------------------

    def before_write(self) -> None:
        """Masters are about to change: what is queued from now on runs after whoever reads them.

        Fills and publications read masters after the calls that start these have returned: a fill copies them into
        their slots on ``fill_stream``, and a publication does so on ``publish_stream``.
        """
        self.comm.fill_stream.join()
        self.comm.publish_stream.join()

    def weights_changed(self) -> None:
        """Masters have changed, or will: whatever is in a buffer is out of date."""
        self.was_entered = False
        self.generation += 1

    def write_even(self, param: OwnedTensor, shard: Tensor) -> None:
        """Make the even shards of all ranks the value of ``param``. Collective.

        Raises:
            ValueError, RuntimeError: on every rank, if some rank cannot.
        """
        matrix = self.by_name[param.fqn]  # ``param`` may be an alias
        state = state_of(matrix.master, matrix, matrix.fqn)
        fault: Exception | None = None
        try:
            self.at_rest("a write to to_local()")
        except RuntimeError as error:
            fault = error
        state.write_even(shard, fault)
        matrix.write(local_tensor(state))

    def at_rest(self, doing: str, *, summoned: bool = False) -> None:
        """Raise unless every block is outside forward, backward and ``summon_full_params``.

        First cleans up after a backward that did not finish.

        Args:
            summoned: allow ``summon_full_params``.
        """
        if self.backwards:
            self.recover()
        for block in self.blocks:
            if block.phase is not Phase.REST and not (summoned and block.phase is Phase.SUMMONED):
                raise RuntimeError(f"{doing} while block {block.name!r} is {block.phase.name}: {block.phase.value}")

    def _unshard(self, block: Block, phase: Phase, links: Mapping[Block, Block]) -> None:
        """Put whole weights into the modules of ``block``, and start filling the buffers that come next.

        The stream that computes waits for this block's fill alone: fills run on a stream of their own, and those of the
        next blocks, which start now, run beside what this block computes.

        Args:
            links: which block comes after which one.
        """
        if block.phase is not Phase.REST:
            raise RuntimeError(f"forward or backward of block {block.name!r} while {block.phase.value}")
        if is_capturing(self.comm.device):
            raise RuntimeError(
                f"block {block.name!r} was called while a CUDA graph is being captured, whose replays would fetch "
                "weights, free them and vote without dmuon; capture no forward of a dedicated model"
            )
        block.buffer.start_fill(self.generation)
        if block.buffer.state is BufferState.FILLING:
            block.buffer.finish_fill()
        block.enter(phase)
        buffers = buffers_along(links, block)
        for buffer in islice(buffers, 1, 1 + self.comm.options.prefetch):  # the first is the block's own
            if phase is Phase.BACKWARD and not buffer.awaited:
                return
            if not buffer.users:
                buffer.start_fill(self.generation)

    def _reshard(self, block: Block, successor: Block | None) -> None:
        """Leave ``block``, and free its buffer unless the next block needs it too."""
        edited = block.rest()
        if edited is not None:
            raise RuntimeError(
                f"parameter {edited.fqn!r} was changed in place inside the forward or backward of block "
                f"{block.name!r}, where it is a copy of its owner's; edit it under dmuon.summon_full_params(model)"
            )
        buffer = block.buffer
        if not (buffer.keep or buffer.users) and (successor is None or successor.buffer is not buffer):
            buffer.free()

    # -- forward ---------------------------------------------------------------------------------------------------

    @outside_compile
    def _root_pre_forward(self, _module: nn.Module, _args: Any) -> None:
        if self.backwards:
            self.recover()
        self._begin_pass()
        trains = torch.is_grad_enabled()
        self.order_check.restart()  # blocks may also have run without gradients inside a pass that trains
        if trains:
            self._look()

    def _look(self) -> None:
        self.gradients.averager.look()
        self._has_looked = True

    def _begin_pass(self) -> None:
        """No block is at work yet, unless a Ctrl-C has ended the last pass, of which torch tells no forward hook."""
        self._last = None  # the next block that runs follows no other
        for block in self.blocks:
            if block.phase is Phase.FORWARD and current_backward() is None:
                block.abandon()

    @outside_compile
    def _root_post_forward(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if not torch.is_grad_enabled():
            self.order_check.end()

    @outside_compile
    def _pre_forward(
        self, block: Block, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        trains = torch.is_grad_enabled()
        passed = None
        if block.phase is not Phase.BACKWARD:  # otherwise it is recomputed, and backward has unsharded it already
            recomputes = current_backward() is not None
            if self.backwards and not recomputes:
                self.recover()
            begins = not (recomputes or self._has_root) and self.first is block
            if trains and (begins or not self._has_looked):
                self._look()  # where a pass begins without a root, as far as the model has it now
            if begins:
                self._begin_pass()
            if not (recomputes or trains):
                self.order_check.run(block)
            last, self._last = self._last, block
            if last is None and not recomputes:
                self.first = block
            elif last is not None and last is not block:
                self.following[last] = block
                self._preceding[block] = last
            # A recomputation goes backward from this block: what comes next in forward is not needed.
            self._unshard(block, Phase.FORWARD, {} if recomputes else self.following)
            if trains:
                block.generation = self.generation
                # Without a boundary, where no input needs a gradient, the end of the backward releases the block.
                given = (args, *kwargs.values())
                given, is_marked = mark_boundary(given, partial(self._post_backward, block))
                if is_marked:
                    passed = given[0], dict(zip(kwargs, given[1:], strict=True))
                    block.calls += not recomputes  # the graph of a recomputation may never be differentiated
        if trains and block in self._alike and not block.buffer.keep and saved_tensor_hooks_refusal() is None:
            # What the graph saves from now on comes back by way of the block: [Note: how backward enters a block].
            alike, storages = self._alike[block]
            block.saving.append(SavedTensors(alike, self.generation, storages, self._pre_backward))
        return passed

    @outside_compile
    def _post_forward(self, block: Block, _module: nn.Module, _args: Any, output: Any) -> Any:
        error = sys.exc_info()[1] if output is None else None  # the hook runs whatever the forward came to
        trains = torch.is_grad_enabled()
        if block.saving:
            saved = block.saving.pop()
            saved.end()
            for one in self._alike[block][0] if error is None and saved.any else ():
                one.buffer.awaited.add(one.name)
            if error is not None:
                tell_of_hooks(error, block.name)
        # Without gradients somebody may keep a view; but operations on DTensors leave garbage that refers to weights.
        block.buffer.was_read = block.buffer.was_read or trains or self.comm.tensor is None
        if block.phase is not Phase.FORWARD:
            return None
        returned: list[Tensor] = []
        devices: set[torch.device] = set()
        if error is None and trains:
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                    returned.append(leaf)
                    devices.add(leaf.device)
        self._reshard(block, self.following.get(block))
        if error is not None:
            block.calls = max(0, block.calls - trains)  # no backward will come to its boundary
        if error is not None or not trains:
            return None
        if returned:
            block.buffer.awaited.add(block.name)
        hook = partial(self._pre_backward, block, self.generation)
        if len(devices) > 1:
            # A thread for each device would enter the block, on each rank in another order.
            return mark_boundary(output, hook)[0]
        for tensor in returned:
            tensor.register_hook(hook)
        return None

    # -- backward --------------------------------------------------------------------------------------------------

    def _pre_backward(self, block: Block, generation: int, _grad: Tensor | None = None) -> None:
        """A gradient comes to what ``block`` has returned, or the graph asks back what a forward of it has saved."""
        if current_backward() is None:
            raise RuntimeError(
                f"what block {block.name!r} has saved for backward was read outside of one, and its weights have "
                "been freed; pass reshard_after_forward=False to dedicate_params to look at it"
            )
        if block.phase is Phase.BACKWARD:
            return
        self._join_backward(block, generation)
        for matrix in block.matrices:
            self.was_entered = self.was_entered or matrix.rest.requires_grad
        self._last = None  # the next block that runs follows no other
        self._unshard(block, Phase.BACKWARD, self._preceding)

    def _join_backward(self, block: Block, generation: int) -> None:
        """The backward pass that runs now has come to ``block``, to a forward of ``generation``.

        Raises:
            RuntimeError: it cannot be right.
        """
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
        block.backward = self._begin_backward()

    def _begin_backward(self) -> int:
        """The backward that runs now, at whose end all gradients are to be reduced."""
        backward = current_backward()
        assert backward is not None, "gradient hooks run inside a backward pass"
        if backward not in self.backwards:
            self.backwards.add(backward)
            on_backward_end(partial(self._root_post_backward, backward))
        return backward

    def _gradient_arrived(self, param: Tensor) -> None:
        """The gradient of what is replicated, or of a whole weight, perhaps by a way that no hook of its block saw."""
        block = self._block_of.get(id(param))
        if block is None:
            self._begin_backward()
            self.gradients.averager.arrived(param)
            return
        if self._has_streams:
            self.gradients.origins[id(param)] = Origin(self.comm.device)
        if block.backward is None:
            self._join_backward(block, block.generation)

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
            before = self._preceding.get(block)
            if self.gradients.origins:  # what made them has read the weights, whose memory may be freed now
                self.gradients.join(block.matrices)
            # Where the block that backward comes to next shares the buffer, freeing it would only fill it again.
            self._reshard(block, before if before is not None and before.name in before.buffer.awaited else None)
        block.backward, block.calls = None, 0
        buffer.awaited.discard(block.name)
        if not self.reduces:
            if buffer.gradients is GradState.NONE:
                buffer.gradients = GradState.WAITING
                self.may_wait = True
            return
        buffer.gradients = GradState.READY
        # With the last block of the buffer that ran: the same one on all ranks, whichever of them got a gradient here.
        if not buffer.awaited:
            self.gradients.reduce(buffer)

    def _root_post_backward(self, backward: int) -> None:
        """All gradients are reduced and visible when ``backward()`` returns.

        What blocks have started by themselves came in the order of this backward. What is left is started from the end
        of the model, since the order in which gradients came here may be this rank's own, and as other ranks do if this
        one alone has run forwards without a backward; then all is waited for, and averages and the vote follow
        ([Note: a backward on its streams]).
        """
        for block in reversed(self.blocks):
            if block.backward == backward:
                self._end_block(block)
        for buffer in reversed(self.buffers):
            # Either a block of it did not run, or a backward before this one has left something.
            if buffer.gradients is GradState.READY or (self.reduces and buffer.gradients is GradState.WAITING):
                self.gradients.reduce(buffer)
            # Or it was prefetched, and nothing came.
            is_idle = buffer.state is not BufferState.FREED and not (buffer.keep or buffer.users)
            if is_idle and self.backwards == {backward}:
                buffer.free()
        if self.reduces:
            self.gradients.finish()
            self.may_wait = False
        self._has_looked = self.backwards != {backward}
        self.backwards.discard(backward)  # last: after an exception above there is something to recover from

    # -- recovery --------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Clean up after a backward that raised: nothing more of it may reach a gradient.

        Blocks that it had reduced before keep what they got, and what was accumulated without synchronization waits on,
        as of ordinary parameters.
        """
        if current_backward() is not None:
            return
        self.backwards.clear()
        self.publications.forget_fills()
        for block in self.blocks:
            block.abandon()
            block.forget_graph()
        for buffer in self.buffers:
            buffer.forget_gradients()
        self.weights_changed()
        run_all([self.gradients.discard, *(buffer.free for buffer in self.buffers)])


def _tell(arrived: weakref.WeakMethod[Callable[[Tensor], None]], param: Tensor) -> None:
    alive = arrived()
    if alive is not None:
        alive(param)


def runtime_of(param: Tensor) -> Runtime | None:
    """The runtime that moves the weights of ``param``; None if it is not owned."""
    runtime: Runtime | None = param.keeper if isinstance(param, OwnedTensor) else None
    return runtime
