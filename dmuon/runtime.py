"""One training step over the blocks of a model: fill, free, reduce, publish. Hooks only, no patching."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from dmuon._torch import current_backward, on_backward_end, outside_compile
from dmuon.averager import GradAverager
from dmuon.comm import Comm
from dmuon.group import GradReduction, OwnedEntry, OwnerGroup, Residence

__all__ = ["Runtime"]

_PREFETCH_DEPTH = 1  # blocks filled ahead of the one that computes, and published after a step
_MAX_REDUCTIONS = 2  # blocks whose gradients travel at once, the newest included


class Runtime:
    """The blocks of one dedicated model and the order in which their weights and gradients move.

    ``generation`` counts the versions of the weights. A buffer of an older generation is never used: a step, a load
    or any edit of a resting parameter raises it.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[OwnerGroup],
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
        self._index = {id(g): i for i, g in enumerate(self.groups)}
        self._following: dict[int, int] = {}
        self._preceding: dict[int, int] = {}
        self._first = 0
        self._last: int | None = None
        self._backwards: set[int] = set()
        self._reductions: deque[GradReduction] = deque()
        self._undecided: list[tuple[OwnedEntry, Tensor]] = []
        self._used: set[int] = set()  # entries that got a gradient on this rank in this backward
        self._averager: GradAverager | None = None
        self._model = model
        self._replicated = {id(p): weakref.ref(p) for p in model.parameters() if not isinstance(p, DTensor)}
        model.register_forward_pre_hook(self._start_of_model)
        for group in self.groups:
            for entry in group.entries:
                entry.rest.runtime = self  # type: ignore[attr-defined]
            module = group.module
            module.register_forward_pre_hook(partial(self._before_forward, group), with_kwargs=True)
            module.register_forward_hook(partial(self._after_forward, group), always_call=True)

    def entries(self) -> Iterator[OwnedEntry]:
        for group in self.groups:
            yield from group.entries

    # -- weights ---------------------------------------------------------------------------------------------------

    def weights_changed(self) -> None:
        """Masters were edited: whatever is in a buffer is out of date."""
        self.generation += 1

    def publish(self) -> None:
        """After an update: start the fills that the next forward wants first, in its order.

        With buffers that are kept, all of them; otherwise as many as are prefetched.
        """
        self.weights_changed()
        for group in self.groups:  # graphs of forwards that never ran backward are void now
            group.calls, group.awaits_backward = 0, False
        index: int | None = self._first
        started: set[int] = set()
        while index is not None and index not in started:
            group = self.groups[index]
            if not group.keep and len(started) >= _PREFETCH_DEPTH:
                break
            started.add(index)
            self._refresh(group)
            index = self._following.get(index)

    def at_rest(self, doing: str, *, summoned: bool = False) -> None:
        """Raise unless every block is outside forward, backward and ``summon_full_params``.

        First cleans up after a backward that did not finish.

        Args:
            summoned: allow ``summon_full_params``.
        """
        self._recover()
        resting = {Residence.FREED, Residence.FILLING, Residence.READY}
        for group in self.groups:
            if group.state not in resting and not (summoned and group.state is Residence.SUMMONED):
                raise RuntimeError(f"{doing} while block {group.name!r} is {group.state.name}: {group.state.value}")

    def _refresh(self, group: OwnerGroup) -> None:
        """Start filling ``group`` unless its buffer is current."""
        current = group.generation == self.generation
        if group.state is Residence.FREED or not current:
            if group.state is Residence.FILLING:
                group.free()
            group.start_fill(self.generation)

    def _ensure_ready(self, group: OwnerGroup) -> None:
        if group.state in (Residence.FORWARD, Residence.BACKWARD, Residence.SUMMONED):
            raise RuntimeError(f"forward or backward of block {group.name!r} while {group.state.value}")
        self._refresh(group)
        if group.state is Residence.FILLING:
            group.finish_fill()

    def _release(self, group: OwnerGroup) -> None:
        group.leave()
        if not group.keep:
            group.free()

    # -- forward ---------------------------------------------------------------------------------------------------

    @outside_compile
    def _start_of_model(self, _module: nn.Module, _args: Any) -> None:
        self._recover()
        self._last = None
        if self._averager is None:
            self._averager = self._make_averager()

    @outside_compile
    def _before_forward(
        self, group: OwnerGroup, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if group.state is Residence.BACKWARD:
            return None  # recomputation: backward has filled the block already
        self._recover()
        if self._averager is None:
            self._averager = self._make_averager()
        self._record(group)
        self._ensure_ready(group)
        group.enter(Residence.FORWARD)
        if current_backward() is None:  # a recomputation goes backward from here
            self._prefetch(group, self._following)
        if not torch.is_grad_enabled():
            return None
        return self._mark_boundary(group, args, kwargs)

    @outside_compile
    def _after_forward(self, group: OwnerGroup, _module: nn.Module, _args: Any, output: Any) -> None:
        if group.state is not Residence.FORWARD:
            return
        self._release(group)
        if not torch.is_grad_enabled():
            return
        hook = partial(self._before_backward, group, self.generation)
        for leaf in tree_flatten(output)[0]:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(hook)
                group.awaits_backward = True

    def _mark_boundary(
        self, group: OwnerGroup, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Pass all inputs that need gradients through one function: its backward runs after the block's own."""
        leaves, spec = tree_flatten((args, kwargs))
        where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not where:
            return None  # the end of the backward pass releases the block
        if current_backward() is None:  # the graph of a recomputation may never be differentiated
            group.calls += 1
        marked = _BackwardBoundary.apply(  # type: ignore[no-untyped-call]
            partial(self._after_backward, group), *(leaves[i] for i in where)
        )
        for i, tensor in zip(where, marked, strict=True):
            leaves[i] = tensor
        new_args, new_kwargs = tree_unflatten(leaves, spec)
        return new_args, new_kwargs

    def _record(self, group: OwnerGroup) -> None:
        index = self._index[id(group)]
        if self._last is None:
            self._first = index
        elif self._last != index:
            self._following[self._last] = index
            self._preceding[index] = self._last
        self._last = index

    def _prefetch(self, group: OwnerGroup, order: dict[int, int]) -> None:
        index = self._index[id(group)]
        for _ in range(_PREFETCH_DEPTH):
            following = order.get(index)
            if following is None:
                return
            target = self.groups[following]
            if order is self._preceding and not target.awaits_backward:
                return
            if target.state not in (Residence.FORWARD, Residence.BACKWARD):
                self._refresh(target)
            index = following

    # -- backward --------------------------------------------------------------------------------------------------

    def _before_backward(self, group: OwnerGroup, generation: int, _grad: Tensor) -> None:
        if group.state is Residence.BACKWARD:
            return
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"backward(create_graph=True) through block {group.name!r}: a second derivative would read weights "
                "that have been freed; keep the block out of it, or exclude its matrices with select=…"
            )
        if generation != self.generation:
            raise RuntimeError(
                f"the weights of block {group.name!r} changed between its forward and its backward; run backward "
                "before step(), load_state_dict() or edits"
            )
        group.backward = self._in_backward()
        self._last = None
        self._ensure_ready(group)
        for entry in group.entries:
            # Gradients of unsynchronized passes that zero_grad() has dropped since, whoever called it.
            if entry.unreduced and entry.rest.grad is None:
                entry.drop_unreduced()
        group.enter(Residence.BACKWARD)
        self._prefetch(group, self._preceding)

    def _after_backward(self, group: OwnerGroup) -> None:
        if group.state is not Residence.BACKWARD:
            return
        group.calls = max(0, group.calls - 1)
        if group.calls == 0:  # otherwise an earlier call of the same block still needs the weights
            self._close(group)

    def _close(self, group: OwnerGroup) -> None:
        self._release(group)
        group.backward, group.calls, group.awaits_backward = None, 0, False
        if not self.sync:
            for entry in group.entries:
                if entry.full.requires_grad:
                    self._hold(entry)
            return
        while len(self._reductions) >= _MAX_REDUCTIONS:
            self._finish_reduction()
        reduction = group.start_reduction()
        self._used.update(key for key, used in reduction.used.items() if used)
        self._reductions.append(reduction)

    def _hold(self, entry: OwnedEntry) -> None:
        entry.unreduced = True
        if entry.rest.grad is None:
            local = entry.master
            entry.placeholder_grad = entry.as_grad(self.comm, local.new_zeros(()).expand(local.shape))
            entry.rest.grad = entry.placeholder_grad

    def _finish_reduction(self) -> None:
        self._undecided += self._reductions.popleft().finish()

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
        return self.sync

    def _end_of_backward(self, backward: int) -> None:
        """All gradients are reduced and visible when ``backward()`` returns."""
        self._backwards.discard(backward)
        for group in self.groups:
            if group.state is Residence.BACKWARD and group.backward == backward:
                self._close(group)
        if not self._backwards:
            self._free_unused_prefetches()
        if not self.sync:
            return
        while self._reductions:
            self._finish_reduction()
        self._settle(self._averager.finish() if self._averager is not None else [])

    def _free_unused_prefetches(self) -> None:
        for group in self.groups:
            if group.state in (Residence.READY, Residence.FILLING) and not group.keep:
                group.free()

    def _settle(self, averages: list[tuple[nn.Parameter, Tensor]]) -> None:
        """Give a gradient to whatever any rank used, and to nothing else, the same on all ranks."""
        undecided, self._undecided = self._undecided, []
        replicated = self._averager.params if self._averager is not None else []
        missing = {id(param) for param, _ in averages}
        flags = [id(e) in self._used for e in self.entries()]
        flags += [p.grad is not None and id(p) not in missing for p in replicated]
        self._used.clear()
        if self.comm.world > 1:
            votes = self._on_device(torch.tensor(flags, dtype=torch.int32))
            dist.all_reduce(votes, dist.ReduceOp.MAX, group=self.comm.reduce_group)
            if not undecided and not averages:
                return  # nothing depends on the others' votes: do not wait for them on the host
            flags = votes.tolist()
        keys = [id(e) for e in self.entries()] + [id(p) for p in replicated]
        used = {key for key, flag in zip(keys, flags, strict=True) if flag}
        for entry, local in undecided:
            if id(entry) in used:
                entry.set_grad(self.comm, local)
            else:
                entry.drop_unreduced()
        for param, average in averages:
            if id(param) in used:
                param.grad = average.clone()

    def _on_device(self, flags: Tensor) -> Tensor:
        """Copy to the device without waiting for it."""
        if self.comm.device.type == "cpu":
            return flags
        return flags.pin_memory().to(self.comm.device, non_blocking=True)

    def _make_averager(self) -> GradAverager:
        """Average what nobody shards. Known at the first forward only: FSDP2 may be applied until then.

        FSDP2 may have put whole weights into its modules by now, but never the very tensors that were there before.
        """
        owned = {id(e.rest) for e in self.entries()} | {id(e.full) for e in self.entries()}
        params: dict[int, nn.Parameter] = {}
        sharded: set[int] = set()
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                sharded.update(id(m) for m in module.modules())
            for param in module.parameters(recurse=False):
                if isinstance(param, DTensor) or id(param) in owned:
                    continue
                original = self._replicated.get(id(param))
                if id(module) not in sharded or (original is not None and original() is param):
                    params[id(param)] = param
        return GradAverager(list(params.values()) if self.comm.world > 1 else [], self.comm, self._gradient_arrived)

    # -- recovery --------------------------------------------------------------------------------------------------

    def drop_gradients(self) -> None:
        """Forget gradients that were not reduced yet."""
        self._recover()
        for entry in self.entries():
            entry.drop_unreduced()

    def unreduced(self) -> str | None:
        """Name of a parameter whose gradient was left unreduced by a backward without synchronization."""
        return next((e.fqn for e in self.entries() if e.unreduced and e.rest.grad is not None), None)

    def _recover(self) -> None:
        """Clean up after a backward that raised: nothing more of it may reach a gradient.

        Blocks that it had reduced before keep what they got, as ordinary parameters do; gradients accumulated without
        synchronization are dropped.
        """
        if not self._backwards or current_backward() is not None:
            return
        self._backwards.clear()
        while self._reductions:
            self._reductions.popleft().discard()
        self._undecided.clear()
        self._used.clear()
        if self._averager is not None:
            self._averager.reset()
        for group in self.groups:
            group.reset()
        self.weights_changed()


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
