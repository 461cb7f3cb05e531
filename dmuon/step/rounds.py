"""What a step updates together, and the order in which gathers, Newton–Schulz and scatters overlap."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch import Tensor

from dmuon.comm.redistribution import Redistribution, start_redistribution
from dmuon.layout.parcels import Parcel
from dmuon.platform.timing import PhaseTimer
from dmuon.step.batches import Batch
from dmuon.step.update import Done, Orthogonalized, apply, folded, kept, orthogonalize, orthogonalize_whole, wire_dtype

__all__ = ["AloneRound", "ExchangedRound", "Round", "exchanged_rounds"]


class Round(Protocol):
    """Batches that go through a step together; the same on all ranks that share them.

    Attributes:
        index: of the batches' group of the optimizer.
        exchanged: ``start`` sends something, for which ``compute`` waits.
    """

    index: int
    exchanged: bool

    @property
    def batches(self) -> Sequence[Batch]:
        """In one order on all ranks that share them."""

    def start(self, group: Mapping[str, Any], present: Collection[int], timer: PhaseTimer) -> None:
        """Fold gradients into momentum, and send what others orthogonalize.

        Args:
            present: ids of the parameters of which some rank has a gradient.
        """

    def compute(self, group: Mapping[str, Any], timer: PhaseTimer) -> list[Done]:
        """Orthogonalize what this rank owns, and send it."""

    def finish(self, group: Mapping[str, Any], timer: PhaseTimer) -> None:
        """Update this rank's parts of the weights."""


class AloneRound:
    """One batch that this rank has whole."""

    exchanged = False

    def __init__(
        self, index: int, batch: Batch, early: Callable[[Mapping[str, Any], Batch], Orthogonalized | None]
    ) -> None:
        """``early`` gives the update if it was computed during backward, and is still right."""
        self.index = index
        self.batches = [batch]
        self._early = early
        self._ready: list[tuple[int, int, Orthogonalized]] = []

    def start(self, group: Mapping[str, Any], present: Collection[int], timer: PhaseTimer) -> None:
        pass

    def compute(self, group: Mapping[str, Any], timer: PhaseTimer) -> list[Done]:
        batch = self.batches[0]
        early = self._early(group, batch)
        if early is not None:
            self._ready = [(0, len(batch.params), early)]
        else:
            runs = batch.runs([p.grad is not None for p in batch.params])
            self._ready = []
            for start, end in runs:
                ready = orthogonalize(group, batch, (start, end), batch.momentum[batch.rows(start, end)], timer)
                self._ready.append((start, end, ready if len(runs) == 1 else kept(ready)))
        return [ready.done for _, _, ready in self._ready]

    def finish(self, group: Mapping[str, Any], timer: PhaseTimer) -> None:
        batch, ready = self.batches[0], self._ready
        self._ready = []
        for start, end, one in ready:
            apply(group, batch, batch.params[start:end], one.update, timer)


class ExchangedRound:
    """Batches of several owners, whose pieces travel in one all-to-all to them, and in another one back."""

    def __init__(self, index: int, batches: Sequence[Batch], what: str) -> None:
        """``what`` names the batches, the same on all ranks."""
        self.index = index
        self.batches = list(batches)
        self.parcels: list[Parcel] = [batch.parcel for batch in batches if batch.parcel is not None]
        domain = batches[0].domain
        assert domain is not None and len(self.parcels) == len(self.batches)
        self.domain = domain
        self.exchanged = any(len(parcel.holders) > 1 for parcel in self.parcels)
        self._what = what
        self._present: list[list[bool]] = []
        self._gathering: Redistribution | None = None
        self._scattering: Redistribution | None = None

    def start(self, group: Mapping[str, Any], present: Collection[int], timer: PhaseTimer) -> None:
        self._gathering = self._scattering = None  # a step before may have failed
        self._present = [[id(p) in present for p in batch.params] for batch in self.batches]
        if not any(map(any, self._present)):
            return
        with timer.phase("momentum"):
            parts = {
                i: folded(group, batch, present_params)
                for i, (batch, present_params) in enumerate(zip(self.batches, self._present, strict=True))
                if self._held(batch)
            }
        with timer.phase("exchange"):
            routes = [parcel.to_owner for parcel in self.parcels]
            self._gathering = start_redistribution(routes, parts, self.domain, self._like(), f"gather of {self._what}")

    def compute(self, group: Mapping[str, Any], timer: PhaseTimer) -> list[Done]:
        if self._gathering is None:
            return []
        with timer.phase("exchange"):
            whole = self._gathering.wait()
        self._gathering = None
        done = []
        for i in list(whole):
            batch = self.batches[i]
            ready = orthogonalize_whole(group, batch, whole.pop(i), timer)
            whole[i] = ready.update
            done += _of_present(ready.done, batch, self._present[i])
        like = self._like()
        like = like.to(wire_dtype(group, like.dtype, like.device))
        with timer.phase("exchange"):
            routes = [parcel.from_owner for parcel in self.parcels]
            self._scattering = start_redistribution(routes, whole, self.domain, like, f"scatter of {self._what}")
        return done

    def finish(self, group: Mapping[str, Any], timer: PhaseTimer) -> None:
        if self._scattering is None:
            return
        with timer.phase("exchange"):
            updates = self._scattering.wait()
        self._scattering = None
        for i, update in updates.items():
            batch = self.batches[i]
            for start, end in batch.runs(self._present[i]):
                apply(group, batch, batch.params[start:end], update[batch.rows(start, end)], timer)

    def __str__(self) -> str:
        """What all ranks of the domain must agree on before anything travels."""
        parcels = [(parcel.count, parcel.layout.shape, parcel.owner) for parcel in self.parcels]
        return f"{self._what} as (count, shape, owner) {parcels}"

    def _held(self, batch: Batch) -> bool:
        assert batch.parcel is not None
        return self.domain.position in batch.parcel.pieces

    def _like(self) -> Tensor:
        momentum = self.batches[0].momentum
        return torch.empty(0, dtype=momentum.dtype, device=momentum.device)


def _of_present(done: Done, batch: Batch, present: Sequence[bool]) -> list[Done]:
    """What to report: matrices without a gradient were carried along, and are not updated."""
    if all(present):
        return [done]
    parts = []
    for start, end in batch.runs(present):
        parts.append(Done(batch.labels(start, end), done.shape, done.variant, done.norms[batch.rows(start, end)]))
    return parts


def exchanged_rounds(
    index: int, batches: Sequence[Batch], *, small_numel: int, nbytes: int, together: bool
) -> list[ExchangedRound]:
    """Rounds of what several ranks hold: one batch of each owner, or, of small matrices, several.

    What dmuon owns keeps the order of the model, in which it is published; the rest begins with what takes longest, so
    that owners compute alike batches at the same time. Matrices of a stack that one rank has whole need no exchange,
    and come first.

    Args:
        small_numel: matrices of at most so many elements are packed.
        nbytes: most bytes of whole matrices that an owner gets in a round of packed batches.
        together: the owners work at the same time; False: one batch a round.
    """
    lanes: dict[tuple[Any, ...], dict[int, list[Batch]]] = {}
    rounds = []
    for batch in batches:
        if batch.parcel is None:
            continue
        if len(batch.parcel.holders) == 1:  # other ranks know nothing of it: it can have no part in what they share
            rounds.append(ExchangedRound(index, [batch], f"matrices of one rank in group {index}"))
        else:
            key = (id(batch.domain), batch.momentum.dtype)
            lanes.setdefault(key, {}).setdefault(batch.parcel.owner, []).append(batch)
    for by_owner in lanes.values():
        packs = []
        for owner in sorted(by_owner):
            mine = by_owner[owner]
            if mine[0].runtime is None:
                mine = sorted(mine, key=_longest_first)
            packs.append(_packed(mine, small_numel, nbytes))
        for number, found in enumerate(zip_longest(*packs, fillvalue=())):
            members = [batch for pack in found for batch in pack]
            for some in [members] if together else [[batch] for batch in members]:
                count = sum(batch.count for batch in some)
                what = f"round {number} of group {index}: {count} matrices"
                rounds.append(ExchangedRound(index, some, what))
    return rounds


def _longest_first(batch: Batch) -> tuple[int, int]:
    m, n = batch.shape
    return -batch.count * m * n * min(m, n), batch.position


def _packed(batches: Sequence[Batch], small_numel: int, nbytes: int) -> list[list[Batch]]:
    packs: list[list[Batch]] = []
    room = 0
    for batch in batches:
        assert batch.parcel is not None
        size = batch.parcel.numel * batch.momentum.element_size()
        if batch.shape[0] * batch.shape[1] <= small_numel and size <= room:
            packs[-1].append(batch)
            room -= size
        else:
            packs.append([batch])
            room = nbytes - size if batch.shape[0] * batch.shape[1] <= small_numel else 0
    return packs
