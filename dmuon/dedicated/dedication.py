"""What ``dedicate_params`` leaves on a model, and what is done with that.

Users switch synchronization and look at whole weights. An optimizer sees the owned matrices as a residency: whole on
their owner, or split by tensor parallelism.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from math import prod

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dmuon.comm.context import Comm
from dmuon.comm.process_groups import this_rank
from dmuon.dedicated.block import buffers_along
from dmuon.dedicated.buffer import BufferState, GradState, Publications
from dmuon.dedicated.matrix import (
    OwnedMatrix,
    Part,
    as_dtensor,
    of_elements,
    of_rows,
    resting,
    supersede,
    whole_parameter,
)
from dmuon.dedicated.owned_state import lies_as, own_part, state_of
from dmuon.dedicated.owned_tensor import OwnedTensor
from dmuon.dedicated.replicated import dedicated_roots
from dmuon.dedicated.runtime import Runtime, runtime_of
from dmuon.layout.matrices import Parcel, Region
from dmuon.layout.topology import GlobalRank, position_in
from dmuon.model.blocks import canonical_fqn, unwrapped
from dmuon.model.routing import Route
from dmuon.platform.torch_private import local_tensor
from dmuon.step.batches import Batch, SharedBatch, Task
from dmuon.step.normuon import RowMoments
from dmuon.step.residency import MOMENTUM, Options, Residency, Sharing, memberships
from dmuon.step.rounds import AloneRound, Round, exchanged_rounds, in_model_order

_GONE = nn.Parameter(torch.empty(0))
_TOLD = 8  # names in what ranks compare


class Dedication:
    """The plan, the routes, and the runtime that moves the weights of one dedicated model, or of several modules.

    Attributes:
        is_list: it is of several modules, or of a list of one.
    """

    def __init__(self, roots: Mapping[str, nn.Module], routes: Sequence[Route], runtime: Runtime) -> None:
        self.plan = runtime.plan
        self.runtime = runtime
        # Without the parameters, which routes would keep alive.
        self._routes = {r.fqn: replace(r, param=_GONE, sites=(), block_module=None) for r in routes}
        for route in routes:
            if route.block is not None:
                supersede(route.param, runtime.by_name[route.fqn].rest)
        self.is_list = "" not in roots
        self._prefixes = weakref.WeakKeyDictionary({unwrapped(root): prefix for prefix, root in roots.items()})
        for root in roots.values():
            dedicated_roots[root] = self

    def place(self, root: nn.Module) -> str:
        """Which one of its list ``root`` is."""
        return self._prefixes[unwrapped(root)]

    def note_around(self, ranks: Iterable[int]) -> None:
        """A model of ``ranks`` lies around this one: those that are none of its own hold something else here."""
        others = {*ranks, *self.runtime.strangers}.difference(self.runtime.comm.topology.ranks)
        self.runtime.strangers = tuple(map(GlobalRank, sorted(others)))

    def tied_outside(self, params: Mapping[str, nn.Parameter]) -> str | None:
        """Name of one of ``params`` that is its own, or was before it had another one put into its place."""
        own = self.runtime.param_ids()
        return next((name for name, param in params.items() if id(resting(param)) in own), None)

    def routes(self, root: nn.Module) -> Iterator[Route]:
        """Of the parameters that ``root`` has now, by their names in it."""
        prefix = self.place(root)
        for name, param in root.named_parameters():
            name = canonical_fqn(name)
            if (route := self._routes.get(f"{prefix}{name}")) is not None:
                yield replace(route, fqn=name, param=resting(param))


def dedication_of(module: nn.Module) -> Dedication | None:
    """What ``dedicate_params(module)`` left; None where it was called on another module, above or below."""
    dedication: Dedication | None = dedicated_roots.get(module)
    return dedication


def dedications(module: nn.Module) -> list[Dedication]:
    """What ``dedicate_params`` left in ``module`` or below it, outermost first, each once."""
    found = (dedication_of(part) for part in module.modules())
    return list(dict.fromkeys(dedication for dedication in found if dedication is not None))


def averaged_by_dmuon() -> set[int]:
    """By ``id``, all parameters that dedicated models hold: dmuon averages their gradients, or knows who does."""
    return set().union(*(dedication.runtime.param_ids() for dedication in {*dedicated_roots.values()}))


def left_to_others() -> dict[int, tuple[str, dist.ProcessGroup]]:
    """By ``id``, what dedicated models have given no owner: its strategy, and the ranks that average its gradients."""
    found: dict[int, tuple[str, dist.ProcessGroup]] = {}
    for root, dedication in dedicated_roots.items():
        left = [route for route in dedication.routes(root) if route.strategy != "owner"]
        found |= {id(route.param): (route.strategy, dedication.runtime.comm.group) for route in left}
    return found


def places_in(model: nn.Module) -> dict[str, object]:
    """Of the modules in ``model`` that were dedicated before, by name, which one of its list each is."""
    found = ((name, module, dedication_of(module)) for name, module in model.named_modules())
    return {f"place of {name!r} in a list": one.place(module) for name, module, one in found if one is not None}


def require_dedicated(model: nn.Module) -> list[Dedication]:
    """:func:`dedications`, at least one.

    Raises:
        ValueError: the model was not dedicated.
    """
    dedicated = dedications(model)
    if not dedicated:
        raise ValueError("model was not dedicated: call dmuon.dedicate_params(model, mesh) first")
    return dedicated


def set_requires_gradient_sync(model: nn.Module, requires_gradient_sync: bool) -> None:
    """Reduce gradients in backward (True, the default) or accumulate them locally (False).

    Covers owned matrices, replicated parameters and every FSDP2 module of ``model``. The last backward before
    ``step()`` must synchronize; it reduces what was accumulated.

    Raises:
        ValueError: the model was not dedicated.
    """
    for dedication in require_dedicated(model):
        dedication.runtime.require(sync=requires_gradient_sync)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(requires_gradient_sync, recurse=False)


def set_requires_all_reduce(model: nn.Module, requires_all_reduce: bool) -> None:
    """With several replicas, reduce gradients across them (True, the default), or, of FSDP2, only within each (False).

    Gradients of owned matrices and of replicated parameters then accumulate on each rank, as without
    :func:`set_requires_gradient_sync`; every FSDP2 module of ``model`` keeps them sharded. The last backward before
    ``step()`` must do both. Without replicas it changes nothing.

    Raises:
        ValueError: the model was not dedicated.
    """
    for dedication in require_dedicated(model):
        dedication.runtime.require(all_reduce=requires_all_reduce)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_all_reduce(requires_all_reduce, recurse=False)


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Inside the context, backward accumulates gradients without communication.

    Raises:
        ValueError: the model was not dedicated.
    """
    before = all(dedication.runtime.syncs for dedication in require_dedicated(model))
    set_requires_gradient_sync(model, False)
    try:
        yield
    finally:
        set_requires_gradient_sync(model, before)


@contextmanager
def summon_full_params(model: nn.Module, *, writeback: bool = True) -> Iterator[None]:
    """Inside the context, modules hold whole owned weights, in the dtype of the masters, on every rank.

    Under tensor parallelism they hold this rank's parts, as DTensors. Costs the memory of all owned matrices on every
    rank. Forward and backward are not available inside. Collective.

    Args:
        model: the model that was dedicated.
        writeback: make the owners' edits the new weights. Edits must be the same on all ranks; an exception inside
            drops them.

    Raises:
        ValueError: the model was not dedicated.
        RuntimeError: inside a forward or backward, or inside itself; a forward, a step, or a weight of another shape
            inside.
    """
    runtimes = [dedication.runtime for dedication in require_dedicated(model)]
    for runtime in runtimes:
        runtime.at_rest("summon_full_params()")
    blocks = [block for runtime in runtimes for block in runtime.blocks]
    wholes = [[_whole(block.buffer.comm, matrix) for matrix in block.matrices] for block in blocks]
    for block, of_block in zip(blocks, wholes, strict=True):
        if block.buffer.state is not BufferState.FREED:
            block.buffer.free()
        block.summon(of_block)
    try:
        yield
        edited = [(matrix, _edited(matrix)) for block in blocks for matrix in block.matrices]
        for matrix, param in edited:
            matrix.rest.requires_grad_(param.requires_grad)
    finally:
        for block in blocks:
            block.rest()
    if writeback:
        for matrix, param in edited:
            matrix.write(matrix.own_part(local_tensor(param)))


def _edited(matrix: OwnedMatrix) -> nn.Parameter:
    """What the module holds now: the parameter that was put there, or one that the user put in its place."""
    held, name = matrix.places[0]
    param: nn.Parameter | None = held[name]
    if param is None or param.shape != matrix.shape:
        replacement = "nothing" if param is None else f"shape {tuple(param.shape)}"
        raise RuntimeError(
            f"summon_full_params(): parameter {matrix.fqn!r} of shape {tuple(matrix.shape)} was replaced by "
            f"{replacement}; keep its shape"
        )
    return param


def _whole(comm: Comm, matrix: OwnedMatrix) -> nn.Parameter:
    """The whole weight, with the dtype of its master. Collective over the data-parallel ranks."""
    whole = torch.empty(matrix.local_shape, dtype=matrix.master.dtype, device=comm.device)
    mine = {part.number: piece for part, piece in matrix.pieces(matrix.master)}
    with torch.no_grad():
        for part in matrix.parts:
            value = whole.new_empty(part.local_shape)
            if part.number in mine:
                value.copy_(mine[part.number])
            if comm.world > 1 and part.numel:
                with comm.monitor.watch(f"broadcast of {matrix.fqn!r} for summon_full_params"):
                    dist.broadcast(value, src=comm.ranks[part.owner], group=comm.group)
            for of_whole, of_part in part.pairs(whole, value):
                of_whole.copy_(of_part)
    if isinstance(matrix.full, DTensor):
        whole = as_dtensor(whole, matrix.full.device_mesh, matrix.full.placements, matrix.shape)
    return whole_parameter(whole, matrix.rest)


# -- as an optimizer sees it ------------------------------------------------------------------------------------------


def dedicated_residencies(params: Iterable[Tensor]) -> list[Dedicated]:
    """One for each dedicated model that owns some of ``params``, in the order in which they come.

    Raises:
        ValueError: a dedicated model is gone, of which a parameter is left.
    """
    members: dict[Runtime, list[Tensor]] = {}
    for param in params:
        runtime = runtime_of(param)
        if runtime is not None:
            members.setdefault(runtime, []).append(param)
        elif isinstance(param, OwnedTensor):
            raise ValueError(
                f"the model of {param.fqn!r}, which dmuon owned, was deleted, and no one can move its weights now; "
                "keep a reference to the model until its optimizer is built"
            )
    return [Dedicated(runtime, of_model) for runtime, of_model in members.items()]


def planned_ns(runtimes: Iterable[Runtime]) -> int:
    """What this rank is predicted to take for what it owns of dedicated models, in nanoseconds."""
    plans = ((one.plan.solution.loads_ns, one.comm.topology.ranks) for one in runtimes)
    return sum(loads[position_in(ranks, this_rank())] for loads, ranks in plans)


class Dedicated(Residency):
    """The matrices of one dedicated model that are in one optimizer. Its runtime moves the weights."""

    def __init__(self, runtime: Runtime, params: Sequence[Tensor]) -> None:
        self.params = list(params)
        self._whole: list[tuple[Tensor, str]] = []  # or replicated, in groups of the optimizer, with their names
        self._runtime = runtime
        self._of_moments: dict[int, OwnedMatrix] = {}  # by id of what is shown of second moments
        runtime.members.add(self)

    def tasks(self) -> list[Task]:
        """What this rank orthogonalizes of the model, or has tensor-parallel parts of, in forward order."""
        comm, tasks = self._runtime.comm, []
        for position, matrix in enumerate(self._runtime.matrices()):
            offset = row_offset = 0  # in the master, if that is flat, and in what has one number for each output
            before: list[Parcel] = []
            for parts in _alike(matrix):
                m, n = parts[0].shape
                sides = min(m, n), max(m, n)
                parcel = parts[0].parcel
                if parcel is not None:
                    parcel = replace(parcel, count=len(parts))
                    before.append(parcel)
                region = None
                if matrix.is_split:
                    stack = (len(parts), *parts[0].local_shape)
                    runs = ((0, stack[1]),) if stack[1] else ()
                    region = Region(stack, (0, len(parts)), 1, runs, offset, row_offset)
                    offset += prod(stack)
                    row_offset += stack[0] * stack[2 if parts[0].transposed else 1]
                size = self._runtime.plan.chunks[sides]
                numbers, transposed = tuple(part.number for part in parts), parts[0].transposed
                shared = (None if parcel is None else comm.tensor), parcel, tuple(before)
                tasks.append(Task(matrix.rest, position, (m, n), size, region, transposed, numbers, *shared))
        return tasks

    def rounds(self, batches: Sequence[Sequence[Batch]]) -> list[Round]:
        """In the order of the model: what a round completes is published for the next forward at once."""
        rounds: list[Round] = []
        for index, of_group in enumerate(batches):
            rounds += [AloneRound(index, batch) for batch in of_group if not isinstance(batch, SharedBatch)]
            split = [batch for batch in of_group if isinstance(batch, SharedBatch)]
            rounds += exchanged_rounds(index, split, small_numel=0, nbytes=0, together=True, order=in_model_order)
        return sorted(rounds, key=lambda round_: min(batch.position for batch in round_.batches))

    def listen(self, landed: Callable[[Sequence[Tensor]], None]) -> None:
        gradients = self._runtime.gradients
        living = [listener for listener in gradients.listeners if listener() is not None]
        gradients.listeners = [*living, weakref.WeakMethod(landed)]

    def compare(self, options: Options, groups: Sequence[Sequence[Tensor]], names: Mapping[int, str]) -> None:
        """Of all groups that hold parameters of the model."""
        of_model = self._runtime.param_ids()
        shared = [[param for param in group if id(param) in of_model] for group in groups]
        self._runtime.gradients.compare(options, [i for i, params in enumerate(shared) if params])
        self._runtime.comm.monitor.note_options(memberships(shared, names))
        whole = [p for params in shared for p in params if isinstance(p, OwnedTensor) or not isinstance(p, DTensor)]
        self._whole = [(param, names[id(param)]) for param in whole]

    def left_out(self, held: set[int]) -> list[str]:
        """Owned matrices that are in no ``Muon``, and other tensors of two or more dimensions that are not in this one.

        Only what has a gradient is meant.

        Args:
            held: ids of all parameters of this optimizer.
        """
        runtime = self._runtime
        claimed = held.union(*({id(p) for p in member.params} for member in runtime.members))
        named: list[tuple[str, Tensor]] = [(matrix.fqn, matrix.rest) for matrix in runtime.matrices()]
        others = runtime.managed.named_parameters()
        named += [(canonical_fqn(n), p) for n, p in others if not isinstance(p, OwnedTensor)]
        return [name for name, p in named if p.ndim >= 2 and p.grad is not None and id(p) not in claimed]

    # -- a step ----------------------------------------------------------------------------------------------------

    def before_step(self, changed: bool, fault: Exception | None = None) -> set[int] | None:
        """As :meth:`Residency.before_step`.

        Raises:
            RuntimeError: a gradient is left unreduced, or a backward came through blocks and left none; or a block is
                in no state for a step.
        """
        runtime = self._runtime
        runtime.at_rest("step()")
        waiting: list[str] = []
        for buffer in runtime.buffers:
            for matrix in buffer.matrices if buffer.gradients is GradState.WAITING else ():
                if matrix.full.grad is not None:
                    waiting.append(matrix.fqn)
        of_this_rank = runtime.gradients.averager.waiting
        for param, name in self._whole if of_this_rank else ():
            if id(param) in of_this_rank and param.grad is not None:
                waiting.append(name)
        if waiting:
            raise RuntimeError(
                f"the gradient of {waiting[0]!r} is not reduced: the last backward before step() must run outside "
                "no_sync()"
            )
        present: set[int] = set()
        for param in self.params:
            if param.grad is not None:
                present.add(id(param))
        is_untrained = runtime.was_entered and not present and all(m.rest.grad is None for m in runtime.matrices())
        # Experts that were dedicated by themselves, and got no token, have no gradient at all.
        if is_untrained and any(param.grad is not None for _, param in runtime.managed.named_parameters()):
            raise RuntimeError(
                f"backward came through the block of {next(runtime.matrices()).fqn!r}, and no parameter that dmuon "
                "owns has a gradient: backward(inputs=…) and autograd.grad cannot name them, since graphs know the "
                "whole weights instead; call backward() without inputs, and freeze what is not to be trained"
            )
        # The vote of the next backward tells: this step has none.
        missing: list[str] = []
        for param, name in self._whole:
            if id(param) not in present and param.grad is None:  # of what is owned, each reading asks its model
                missing.append(repr(name))
        told = f"{len(missing)}: {', '.join(missing[:_TOLD])}" if missing else "none"
        runtime.comm.monitor.note_options([("parameters without a gradient in a step", told)])
        return present

    def begin_update(self, params: Iterable[Tensor], before: Publications | None) -> Publications:
        """Before the masters of ``params`` change: raise the generation, and publish what none of them delays.

        Publications come behind those ``before``, of another model of the same optimizer. Returns this model's.

        :meth:`updated` and :meth:`end_update` publish the rest, each buffer as soon as this rank's masters of it are up
        to date, in the order in which the next forward needs them. Buffers that are kept are then filled too; of the
        others, as many as are prefetched.
        """
        runtime = self._runtime
        monitor = runtime.comm.monitor  # the other ranks must take the step, too, before the next gradients are used
        monitor.note("step", f"step {monitor.step} of the optimizer")
        runtime.before_write()
        runtime.generation += 1
        runtime.was_entered = False
        for block in runtime.blocks:  # graphs of forwards that never ran backward are void now
            if block.backward is not None or block.calls or block.buffer.awaited:
                block.forget_graph()
        outdated = runtime.by_rest.keys() & map(id, params)
        buffers = buffers_along(runtime.following, runtime.first)
        runtime.publications.begin(buffers, outdated, runtime.generation, before)
        return runtime.publications

    def updated(self, params: Iterable[Tensor]) -> None:
        self._runtime.publications.updated(params)

    def end_update(self) -> None:
        self._runtime.publications.updated(self.params)
        self._runtime.comm.monitor.step += 1

    def drop_gradients(self) -> None:
        """Forget gradients that were not reduced yet."""
        if self._runtime.backwards:
            self._runtime.recover()
        self._runtime.was_entered = False
        waiting = [m for b in self._runtime.buffers if b.gradients is GradState.WAITING for m in b.matrices]
        own = set(map(id, self.params)) if waiting else set()
        for matrix in waiting:  # what other optimizers have of the model waits on
            if id(matrix.rest) in own:
                matrix.full.grad = None
        self._runtime.gradients.averager.waiting.difference_update(id(param) for param, _ in self._whole)

    def shared(self) -> list[Sharing]:
        comm, matrices = self._runtime.comm, list(self._runtime.matrices())
        labels = [(m.rest, part.number if m.is_split else None, part.shape) for m in matrices for part in m.parts]
        return [Sharing(comm.control, comm.device, labels)]

    # -- momentum --------------------------------------------------------------------------------------------------

    def shown(self, param: Tensor, local: Tensor) -> Tensor:
        if id(param) in self._of_moments:
            return param
        matrix = self._runtime.by_rest[id(param)]
        return matrix.rest.like(local, f"{matrix.fqn}.{MOMENTUM}")

    def shown_moment(self, param: Tensor, local: Tensor, key: str) -> Tensor:
        matrix = self._runtime.by_rest[id(param)]
        of_moment = (of_rows if key == RowMoments.key else of_elements)(matrix, local, f"{matrix.fqn}.{key}")
        self._of_moments[id(of_moment.rest)] = of_moment
        return of_moment.rest

    def saved(self, param: Tensor, momentum: Tensor) -> Tensor:
        moment = self._of_moments.get(id(param))
        matrix = moment or self._runtime.by_rest[id(param)]
        with self._runtime.comm.monitor.watch("state_dict() of the optimizer"):  # which saves nothing after a fault
            name = matrix.fqn if moment else f"{matrix.fqn}.{MOMENTUM}"
            return state_of(local_tensor(momentum), matrix, name)

    def part_of(self, param: Tensor, momentum: Tensor, name: str) -> Tensor:
        matrix = self._of_moments.get(id(param)) or self._runtime.by_rest[id(param)]
        if type(momentum) is Tensor and momentum.shape != param.shape:
            return momentum  # what the master holds
        if type(momentum) is OwnedTensor and not lies_as(momentum, matrix.rest):  # shown of another matrix
            for source in self._runtime.matrices():
                if momentum.fqn == f"{source.fqn}.{MOMENTUM}" and momentum.owners == source.rest.owners:
                    momentum = state_of(local_tensor(momentum), source, momentum.fqn)
                    break
        return own_part(momentum, matrix)

    def loading_groups(self) -> list[tuple[dist.ProcessGroup, set[int]]]:
        return [(self._runtime.comm.control, self._runtime.param_ids())]


def _alike(matrix: OwnedMatrix) -> list[list[Part]]:
    """The parts that this rank owns, in order; neighbours that lie alike together."""
    neighbours = groupby(matrix.mine, lambda part: (part.shape, part.local_shape, part.parcel))
    return [list(parts) for _, parts in neighbours]
