"""Matrices that a user's own functions gather and redistribute, in the rounds of a step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon.comm.agreement import agree
from dmuon.comm.domain import Domain
from dmuon.exchanged.user_functions import Result, UserFunctions, check_gathered, check_part
from dmuon.kernels import update_scale
from dmuon.layout.matrices import local_regions
from dmuon.layout.topology import GlobalRank
from dmuon.model.matrix_spec import spec_of
from dmuon.platform.streams import PhaseTimer
from dmuon.platform.torch_private import local_tensor
from dmuon.step.batches import Batch
from dmuon.step.record import StepRecord
from dmuon.step.residency import like_param
from dmuon.step.rounds import Round
from dmuon.step.update import Done, apply, folded, orthogonalize_whole


@dataclass(eq=False)
class UserRound(Round):
    """At most one parameter of each owner: all are gathered, each owner orthogonalizes, all are redistributed.

    A batch is one parameter, and its position the number of that.

    Where the ranks check what the functions gave for a parameter for the first time, a fault of one ends all of them.

    Attributes:
        owners, names: of all parameters, by number.
        rank: this one.
        domain: the ranks that take part; None for a single process.
    """

    exchanged = True
    queue = 0  # one for all domains: the functions of every rank are called for all parameters in one order

    index: int
    batches: Sequence[Batch]
    functions: UserFunctions
    owners: Sequence[GlobalRank]
    names: Sequence[str]
    rank: GlobalRank
    domain: Domain | None

    def __post_init__(self) -> None:
        self._unproven = {batch.position for batch in self.batches}
        self._gathered: dict[int, Result] = {}  # by number of the parameter
        self._parts: dict[int, Result] = {}

    def start(self, group: Mapping[str, Any], present: Collection[int], timer: PhaseTimer) -> None:
        self._gathered, self._parts = {}, {}  # a step before may have failed
        for batch in self.batches:
            number, param = batch.position, batch.params[0]
            if id(param) not in present:
                continue
            with timer.phase("momentum"):
                update = folded(group, batch, [True])
                update = like_param(param, update.view(local_tensor(param).shape))
            with timer.phase("exchange"), self._named("gather_fn", number):
                self._gathered[number] = self.functions.gather(number, update, self.owners[number])

    def compute(self, group: Mapping[str, Any], timer: PhaseTimer) -> list[Done]:
        done = []
        wholes = self._wholes(timer)
        updates: dict[int, Tensor | None] = {}
        for batch in self.batches:
            number = batch.position
            if number not in wholes:
                continue
            whole = wholes.pop(number)
            updates[number] = None
            if whole is not None:
                updates[number], one = _orthogonalized(group, batch, whole, timer)
                done += one
        with timer.phase("exchange"):  # not before this rank has computed: the functions may wait for other owners
            for number in list(updates):
                update = updates.pop(number)
                with self._named("redistribute_fn", number):
                    self._parts[number] = self.functions.redistribute(number, update, self.owners[number])
        return done

    def _wholes(self, timer: PhaseTimer) -> dict[int, Tensor | None]:
        """What has been gathered, by number; None where another rank is the owner."""
        wholes: dict[int, Tensor | None] = {}
        fault: RuntimeError | None = None
        for batch in self.batches:
            number, param = batch.position, batch.params[0]
            if number not in self._gathered:
                continue
            with timer.phase("exchange"):
                with self._named("gather_fn", number):
                    whole = self._gathered.pop(number).wait()
                try:
                    wholes[number] = check_gathered(
                        whole,
                        name=self.names[number],
                        owner=self.owners[number],
                        rank=self.rank,
                        local_shape=tuple(local_tensor(param).shape),
                        global_shape=tuple(param.shape) if isinstance(param, DTensor) else None,
                    )
                except RuntimeError as error:
                    wholes[number], fault = None, fault or error
        self._raise(fault, wholes)
        return wholes

    def finish(self, group: Mapping[str, Any], timer: PhaseTimer, record: StepRecord | None) -> None:
        """Nothing is recorded: what is here of each matrix, only the functions know."""
        parts: dict[int, Tensor] = {}
        fault: RuntimeError | None = None
        with timer.phase("exchange"):
            for batch in self.batches:
                number = batch.position
                if number not in self._parts:
                    continue
                with self._named("redistribute_fn", number):
                    part = self._parts[number].wait()
                shape = tuple(local_tensor(batch.params[0]).shape)
                try:
                    parts[number] = check_part(part, name=self.names[number], rank=self.rank, local_shape=shape)
                except RuntimeError as error:
                    fault = fault or error
        self._raise(fault, self._parts)
        self._unproven -= self._parts.keys()
        self._parts = {}
        for batch in self.batches:
            if batch.position in parts:
                part = parts.pop(batch.position)
                assert batch.region is not None
                update = batch.region.take(part.to(batch.dtype))
                apply(group, batch, batch.params, update, timer, scale=1.0)

    def _named(self, function: str, number: int) -> AbstractContextManager[None]:
        """Communication that fails inside says where, as dmuon's own does."""
        if self.domain is None:
            return nullcontext()
        return self.domain.monitor.watch(f"{function} of parameter {self.names[number]!r}")

    def _raise(self, fault: RuntimeError | None, numbers: Collection[int]) -> None:
        """Raise a fault of this rank, and of any other one if some of ``numbers`` come for the first time."""
        if self.domain is not None and not self._unproven.isdisjoint(numbers):
            try:
                agree(self.domain.group, fault)
            except ValueError as of_others:
                raise RuntimeError(str(of_others)) from None
        if fault is not None:
            raise fault


def _orthogonalized(
    group: Mapping[str, Any], batch: Batch, whole: Tensor, timer: PhaseTimer
) -> tuple[Tensor, list[Done]]:
    """The update, scaled by the shapes of the whole matrices, which other ranks do not know."""
    param = batch.params[0]
    spec = spec_of(param)
    whole = whole.to(batch.dtype)
    update, done = torch.empty_like(whole, memory_format=torch.contiguous_format), []
    regions = local_regions(whole.shape, spec)
    several = len(regions) * regions[0].stack[0] > 1 or whole.ndim > 2
    for part, region in enumerate(regions):
        of_part = replace(batch, shape=region.shape, transposed=spec.transposed)
        ready = orthogonalize_whole(group, of_part, region.take(whole), timer)
        scaled = ready.update.to(batch.dtype) * update_scale(group["adjust_lr_fn"], of_part.scaled_shape)
        target = region.take(update)
        target.copy_(scaled)
        region.put(update, list(target.unbind(0)))
        numbers = range(part, len(regions) * region.count, len(regions))
        done.append(replace(ready.done, matrices=[(param, i if several else None) for i in numbers]))
    return update, done


def by_owner(batches: Sequence[Batch], owners: Sequence[GlobalRank], together: bool) -> list[list[Batch]]:
    """The batches of each round: at most one parameter per owner; one parameter each unless together."""
    rounds: list[list[Batch]] = []
    taken: dict[int, int] = {}
    for batch in batches:
        owner = owners[batch.position]
        number = taken.get(owner, 0) if together else len(rounds)
        taken[owner] = number + 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(batch)
    return rounds
