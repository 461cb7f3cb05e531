"""Owned matrices as an optimizer sees them: whole on their owner, or split by tensor parallelism."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import prod

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon.dedicated.block import buffers_along
from dmuon.dedicated.buffer import GradState
from dmuon.dedicated.matrix import OwnedMatrix, Part
from dmuon.dedicated.owned_state import lies_as, own_part, state_of
from dmuon.dedicated.owned_tensor import OwnedTensor
from dmuon.dedicated.runtime import Runtime, runtime_of
from dmuon.layout.matrices import Region
from dmuon.layout.parcels import Parcel
from dmuon.platform.torch_private import local_tensor
from dmuon.step.batches import Batch, Shared, SharedBatch, Task
from dmuon.step.residency import MOMENTUM, Options, Residency, Sharing, memberships
from dmuon.step.rounds import AloneRound, Round, exchanged_rounds, in_model_order

_TOLD = 8  # names in what ranks compare


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


class Dedicated(Residency):
    """The matrices of one dedicated model that are in one optimizer. Its runtime moves the weights."""

    def __init__(self, runtime: Runtime, params: Sequence[Tensor]) -> None:
        self.params = list(params)
        self._replicated: list[tuple[Tensor, str]] = []  # in groups of the optimizer, with their names
        self._runtime = runtime
        runtime.members.add(self)

    def tasks(self) -> list[Task]:
        """What this rank orthogonalizes of the model, or has tensor-parallel parts of, in forward order."""
        comm, tasks = self._runtime.comm, []
        for position, matrix in enumerate(self._runtime.matrices()):
            offset = 0  # in the master, if that is flat
            before: list[Parcel] = []
            for parts in _alike(matrix):
                m, n = parts[0].shape
                sides = min(m, n), max(m, n)
                parcel = parts[0].parcel
                shared = None
                if parcel is not None and comm.tensor is not None:
                    before.append(replace(parcel, count=len(parts)))
                    shared = Shared(comm.tensor, before[-1], tuple(before))
                region = None
                if matrix.is_split:
                    stack = (len(parts), *parts[0].local_shape)
                    region = Region(stack, (0, len(parts)), 1, ((0, stack[1]),) if stack[1] else (), offset)
                    offset += prod(stack)
                size, variants = self._runtime.plan.chunks[sides], self._runtime.plan.variants.get(sides, {})
                numbers = tuple(part.number for part in parts)
                transposed = parts[0].transposed
                tasks.append(Task(matrix.rest, position, (m, n), size, variants, region, transposed, numbers, shared))
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
        self._runtime.gradients.listeners.append(weakref.WeakMethod(landed))

    def compare(self, options: Options, groups: Sequence[Sequence[Tensor]], names: Mapping[int, str]) -> None:
        """Of all groups that hold parameters of the model."""
        of_model = self._runtime.param_ids()
        shared = [[param for param in group if id(param) in of_model] for group in groups]
        self._runtime.gradients.compare(options, [i for i, params in enumerate(shared) if params])
        self._runtime.comm.monitor.note_options(memberships(shared, names))
        plain = [param for params in shared for param in params if not isinstance(param, DTensor)]
        self._replicated = [(param, names[id(param)]) for param in plain]

    def left_out(self, held: set[int]) -> list[str]:
        """Owned matrices that are in no ``Muon``, and other tensors of two or more dimensions that are not in this one.

        Only what has a gradient is meant.
        """
        claimed = held.union(*({id(p) for p in member.params} for member in self._runtime.members))
        return self._runtime.unclaimed(claimed)

    # -- a step ----------------------------------------------------------------------------------------------------

    def before_step(self, changed: bool, fault: Exception | None = None) -> set[int] | None:
        """As :meth:`Residency.before_step`.

        Raises:
            RuntimeError: a gradient is left unreduced, or a backward came through blocks and left none; or a block is
                in no state for a step.
        """
        runtime = self._runtime
        runtime.at_rest("step()")
        for buffer in runtime.buffers:
            for matrix in buffer.matrices if buffer.gradients is GradState.WAITING else ():
                if matrix.waiting_grad is not None:
                    raise RuntimeError(
                        f"the gradient of {matrix.fqn!r} is not reduced: the last backward before step() must run "
                        "outside no_sync()"
                    )
        present: set[int] = set()
        for param in self.params:
            if param.grad is not None:
                present.add(id(param))
        if runtime.was_entered and not present and all(matrix.rest.grad is None for matrix in runtime.matrices()):
            raise RuntimeError(
                f"backward came through the block of {next(runtime.matrices()).fqn!r}, and no parameter that "
                "dmuon owns has a gradient: backward(inputs=…) cannot name them, since graphs know the whole weights "
                "instead; call backward() without inputs, and freeze what is not to be trained"
            )
        # The vote of the next backward tells: this step has none.
        missing: list[str] = []
        for param, name in self._replicated:
            if param.grad is None:
                missing.append(repr(name))
        told = ", ".join(missing[:_TOLD]) or "none"
        runtime.comm.monitor.note_options([("parameters without a gradient in a step", told)])
        return present

    def begin_update(self, params: Iterable[Tensor]) -> None:
        """Before the masters of ``params`` change: raise the generation, and publish what none of them delays.

        :meth:`updated` and :meth:`end_update` publish the rest, each buffer as soon as this rank's masters of it are up
        to date, in the order in which the next forward needs them. Buffers that are kept are then filled too; of the
        others, as many as are prefetched.
        """
        runtime = self._runtime
        runtime.comm.monitor.begin_step()
        runtime.before_write()
        runtime.generation += 1
        runtime.was_entered = False
        for block in runtime.blocks:  # graphs of forwards that never ran backward are void now
            if block.backward is not None or block.calls or block.buffer.awaited:
                block.forget_graph()
        outdated = runtime.by_rest.keys() & map(id, params)
        buffers = buffers_along(runtime.order.following, runtime.order.first)
        runtime.publications.begin(buffers, outdated, runtime.generation)

    def updated(self, params: Iterable[Tensor]) -> None:
        self._runtime.publications.updated(params)

    def end_update(self) -> None:
        self._runtime.publications.updated(self.params)
        self._runtime.comm.monitor.end_step()

    def drop_gradients(self) -> None:
        """Forget gradients that were not reduced yet."""
        if self._runtime.backwards:
            self._runtime.recover()
        self._runtime.was_entered = False
        for buffer in self._runtime.buffers:
            if buffer.gradients is not GradState.NONE:
                buffer.forget_gradients()

    def loads(self) -> list[Sequence[int]]:
        return [self._runtime.plan.solution.loads_ns]

    def repeated(self) -> list[str]:
        if self._runtime.comm.topology.tensor == 1:
            return []
        return [m.fqn for m in self._runtime.matrices() if any(part.parcel is None for part in m.mine)]

    def shared(self) -> list[Sharing]:
        comm, matrices = self._runtime.comm, list(self._runtime.matrices())
        labels = [(m.rest, part.number if m.is_split else None, part.shape) for m in matrices for part in m.parts]
        return [Sharing(comm.control, comm.device, labels)]

    # -- momentum --------------------------------------------------------------------------------------------------

    def shown(self, param: Tensor, local: Tensor) -> Tensor:
        matrix = self._runtime.matrix_of(param)
        return matrix.like_rest(local, f"{matrix.fqn}.{MOMENTUM}")

    def saved(self, param: Tensor, momentum: Tensor) -> Tensor:
        matrix = self._runtime.matrix_of(param)
        with self._runtime.comm.monitor.watch("state_dict() of the optimizer"):  # which saves nothing after a fault
            return state_of(local_tensor(momentum), matrix, f"{matrix.fqn}.{MOMENTUM}")

    def part_of(self, param: Tensor, momentum: Tensor, name: str) -> Tensor:
        matrix = self._runtime.matrix_of(param)
        if type(momentum) is Tensor and momentum.shape != param.shape:
            return momentum  # what the master holds
        if type(momentum) is OwnedTensor and not lies_as(momentum, matrix.rest):  # shown of another matrix
            for source in self._runtime.matrices():
                if momentum.fqn == f"{source.fqn}.{MOMENTUM}" and momentum.owners == source.owners:
                    momentum = state_of(local_tensor(momentum), source, momentum.fqn)
                    break
        return own_part(momentum, matrix)

    def loading_groups(self) -> list[tuple[dist.ProcessGroup, set[int]]]:
        return [(self._runtime.comm.control, self._runtime.param_ids())]


def _alike(matrix: OwnedMatrix) -> list[list[Part]]:
    """The parts that this rank owns, in order; neighbours that lie alike together."""
    neighbours = groupby(matrix.mine, lambda part: (part.shape, part.local_shape, part.parcel))
    return [list(parts) for _, parts in neighbours]
