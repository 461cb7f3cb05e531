"""Matrices that a user's own functions gather and redistribute, in the rounds of a step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon._torch import local_tensor
from dmuon.batches import Batch, Done, apply, folded, like_param, orthogonalize_whole
from dmuon.device import PhaseTimer
from dmuon.distributed_config import Result, UserFunctions, check_gathered, check_part
from dmuon.kernels import update_scale

__all__ = ["UserRound", "user_rounds"]


class UserRound:
    """At most one parameter of each owner: all are gathered, each owner orthogonalizes, all are redistributed."""

    exchanged = True

    def __init__(
        self,
        index: int,
        batches: Sequence[Batch],
        functions: UserFunctions,
        owners: Sequence[int],
        names: Sequence[str],
        here: int,
    ) -> None:
        """``owners`` and ``names`` are those of all parameters, by number; ``here`` is this process's global rank."""
        self.index = index
        self.batches = list(batches)
        self._functions = functions
        self._owners = owners
        self._names = names
        self._here = here
        self._gathered: dict[int, Result] = {}  # by number of the parameter
        self._parts: dict[int, Result] = {}

    def start(self, group: Mapping[str, Any], present: Collection[int], timer: PhaseTimer) -> None:
        for batch in self.batches:
            number, param = _number(batch), batch.params[0]
            if id(param) not in present:
                continue
            with timer.phase("momentum"):
                update = folded(group, batch, [True])
                update = like_param(param, update if batch.span is not None else update[0])
            with timer.phase("exchange"):
                self._gathered[number] = self._functions.gather(number, update, self._owners[number])

    def compute(self, group: Mapping[str, Any], timer: PhaseTimer) -> list[Done]:
        done = []
        updates: dict[int, Tensor | None] = {}
        for batch in self.batches:
            number, param = _number(batch), batch.params[0]
            if number not in self._gathered:
                continue
            with timer.phase("exchange"):
                whole = check_gathered(
                    self._gathered[number].wait(),
                    name=self._names[number],
                    owner=self._owners[number],
                    here=self._here,
                    local_shape=tuple(local_tensor(param).shape),
                    global_shape=tuple(param.shape) if isinstance(param, DTensor) else None,
                )
            updates[number] = None
            if whole is not None:
                updates[number], one = _orthogonalized(group, batch, whole, timer)
                done.append(one)
        self._gathered = {}
        with timer.phase("exchange"):  # not before this rank has computed: the functions may wait for other owners
            for number in list(updates):
                update = updates.pop(number)
                self._parts[number] = self._functions.redistribute(number, update, self._owners[number])
        return done

    def finish(self, group: Mapping[str, Any], timer: PhaseTimer) -> None:
        for batch in self.batches:
            number, param = _number(batch), batch.params[0]
            result = self._parts.pop(number, None)
            if result is None:
                continue
            with timer.phase("exchange"):
                part = check_part(
                    result.wait(),
                    name=self._names[number],
                    here=self._here,
                    local_shape=tuple(local_tensor(param).shape),
                )
            update = part if batch.span is not None else part[None]
            apply(group, batch, [param], update.to(batch.momentum.dtype), timer, scale=1.0)


def _orthogonalized(group: Mapping[str, Any], batch: Batch, whole: Tensor, timer: PhaseTimer) -> tuple[Tensor, Done]:
    """Scaled here, where the shape of the whole matrix is known."""
    stack = whole if whole.ndim == 3 else whole[None]
    m, n = stack.shape[1:]
    known = replace(batch, shape=(m, n))
    ready = orthogonalize_whole(group, known, stack.to(batch.momentum.dtype), timer)
    update = ready.update.to(batch.momentum.dtype) * update_scale(group["adjust_lr_fn"], (m, n))
    labels = [(batch.params[0], i if batch.span is not None else None) for i in range(len(stack))]
    return update if whole.ndim == 3 else update[0], replace(ready.done, matrices=labels)


def _number(batch: Batch) -> int:
    assert batch.number is not None
    return batch.number


def user_rounds(
    index: int,
    batches: Sequence[Batch],
    functions: UserFunctions,
    owners: Sequence[int],
    names: Sequence[str],
    *,
    here: int,
    together: bool,
) -> list[UserRound]:
    """Rounds of what ``functions`` exchange, of at most one parameter per owner; one parameter each unless together."""
    rounds: list[list[Batch]] = []
    taken: dict[int, int] = {}
    for batch in batches:
        if batch.number is None:
            continue
        owner = owners[batch.number]
        place = taken.get(owner, 0) if together else len(rounds)
        taken[owner] = place + 1
        if place == len(rounds):
            rounds.append([])
        rounds[place].append(batch)
    return [UserRound(index, some, functions, owners, names, here) for some in rounds]
