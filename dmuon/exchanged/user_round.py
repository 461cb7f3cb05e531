"""Matrices that a user's own functions gather and redistribute, in the rounds of a step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon.comm.agreement import agree
from dmuon.comm.domain import Domain
from dmuon.exchanged.user_functions import Result, UserFunctions, check_gathered, check_part
from dmuon.kernels import momentum_update, normalized, update_scale
from dmuon.layout.matrices import local_regions
from dmuon.layout.topology import GlobalRank
from dmuon.model.matrix_spec import spec_of
from dmuon.platform.streams import PhaseTimer
from dmuon.platform.torch_private import local_tensor
from dmuon.step.batches import Batch
from dmuon.step.residency import like_param
from dmuon.step.rounds import Round, Step
from dmuon.step.update import Done, apply, fold, numerics_of, orthogonalize


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
    knows_shapes = False
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

    def run(self, step: Step) -> Iterator[bool]:
        """Nothing is recorded: what is here of each matrix, only the functions know."""
        group, timer = step.options[self.index], step.timer
        batches = {batch.position: batch for batch in self.batches if batch.ids <= step.present}  # one parameter each
        results: dict[int, Result] = {}
        for number, batch in batches.items():
            with timer.phase("momentum"):
                [update] = fold(group, batch, batch.whole, momentum_update)
                update = like_param(batch.params[0], update.view(local_tensor(batch.params[0]).shape))
            with timer.phase("exchange"), self._named("gather_fn", number):
                results[number] = self.functions.gather(number, update, self.owners[number])
            del update
        yield False

        wholes = self._wholes(batches, results, timer)
        updates: dict[int, Tensor | None] = {}
        for number, batch in batches.items():
            whole = wholes.pop(number)
            updates[number] = None
            if whole is not None:
                updates[number], done = _orthogonalized(group, batch, whole, timer)
                step.done += done
            del whole
        with timer.phase("exchange"):  # not before this rank has computed: the functions may wait for other owners
            for number in batches:
                whole = updates.pop(number)
                with self._named("redistribute_fn", number):
                    results[number] = self.functions.redistribute(number, whole, self.owners[number])
                del whole
        yield True

        parts = self._parts(batches, results, timer)
        self._unproven -= batches.keys()
        for number, batch in batches.items():
            assert batch.region is not None
            update = batch.region.take(parts.pop(number).to(batch.dtype))
            apply(group, batch, batch.whole[0], update, timer, scale=1.0)

    def _wholes(
        self, batches: Mapping[int, Batch], gathered: dict[int, Result], timer: PhaseTimer
    ) -> dict[int, Tensor | None]:
        """What has been gathered, by number; None where another rank is the owner."""
        wholes: dict[int, Tensor | None] = {}
        fault: RuntimeError | None = None
        for number, batch in batches.items():
            param = batch.params[0]
            with timer.phase("exchange"):
                with self._named("gather_fn", number):
                    whole = gathered.pop(number).wait()
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

    def _parts(self, batches: Mapping[int, Batch], results: dict[int, Result], timer: PhaseTimer) -> dict[int, Tensor]:
        """What has been redistributed, by number."""
        parts: dict[int, Tensor] = {}
        fault: RuntimeError | None = None
        with timer.phase("exchange"):
            for number, batch in batches.items():
                with self._named("redistribute_fn", number):
                    part = results.pop(number).wait()
                shape = tuple(local_tensor(batch.params[0]).shape)
                try:
                    parts[number] = check_part(part, name=self.names[number], rank=self.rank, local_shape=shape)
                except RuntimeError as error:
                    fault = fault or error
        self._raise(fault, batches)
        return parts

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
    numerics = numerics_of(group, batch.dtype, whole.device)
    update, done = torch.empty_like(whole, memory_format=torch.contiguous_format), []
    regions = local_regions(whole.shape, spec)
    several = len(regions) * regions[0].stack[0] > 1 or whole.ndim > 2
    for part, region in enumerate(regions):
        of_part = replace(batch, shape=region.shape, transposed=spec.transposed)
        with timer.phase("momentum"):
            x, norms = normalized(region.take(whole), storage=numerics.storage, eps=group["eps"])
        orthogonal, of_part_done = orthogonalize(numerics, of_part, (0, 1), x, norms, timer)
        scaled = orthogonal.to(batch.dtype) * update_scale(group["adjust_lr_fn"], of_part.scaled_shape)
        target = region.take(update)
        target.copy_(scaled)
        region.put(update, list(target.unbind(0)))
        numbers = range(part, len(regions) * region.count, len(regions))
        done.append(replace(of_part_done, matrices=[(param, i if several else None) for i in numbers]))
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
