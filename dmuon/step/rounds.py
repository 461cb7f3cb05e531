"""Rounds of a step: batches that travel together, and how the next ones travel while one is orthogonalized."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from dmuon.comm.copying import Copies, Copying
from dmuon.comm.domain import Itinerary, Redistribution
from dmuon.platform.streams import PhaseTimer
from dmuon.step.batches import Batch, Bundle, SharedBatch, make_bundles
from dmuon.step.record import StepRecord
from dmuon.step.update import (
    Done,
    Orthogonalized,
    apply,
    begin_dtype,
    folded,
    folded_norms,
    normalized_parts,
    orthogonalize,
    orthogonalize_whole,
    sent_normalized,
    wire_dtype,
)
from dmuon.step.whole_norms import WholeNorms, join


class Round(ABC):
    """Batches that go through a step together; the same on all ranks that share them.

    Attributes:
        index: of the batches' group of the optimizer.
        batches: in one order on all ranks that share them.
        exchanged: ``start`` sends something, for which ``compute`` waits.
        queue: rounds of one domain, which are counted on their own when the next ones start ahead.
        last_leg: what is under way arrives where it is wanted; otherwise :meth:`forward` sends it on.
    """

    index: int
    batches: Sequence[Batch]
    exchanged: bool
    queue: int = 0
    last_leg: bool = True

    @abstractmethod
    def start(self, group: Mapping[str, Any], present: Collection[int], timer: PhaseTimer) -> None:
        """Fold gradients into momentum, and send what others orthogonalize.

        Args:
            present: ids of the parameters of which some rank has a gradient.
        """

    @abstractmethod
    def compute(self, group: Mapping[str, Any], timer: PhaseTimer) -> list[Done]:
        """Orthogonalize what this rank owns, and send it."""

    def forward(self, timer: PhaseTimer) -> None:
        """Send on what has come, if others wait for it."""

    @abstractmethod
    def finish(self, group: Mapping[str, Any], timer: PhaseTimer, record: StepRecord | None) -> None:
        """Update this rank's parts of the weights, after :meth:`forward`; ``record`` is told of it."""


class AloneRound(Round):
    """One batch that this rank has whole.

    Attributes:
        early: gives the update of the batch if it was computed during backward and is still right; None without.
    """

    exchanged = False

    def __init__(self, index: int, batch: Batch) -> None:
        self.index = index
        self.batches = [batch]
        self.early: Callable[[Mapping[str, Any], Batch], Orthogonalized | None] | None = None
        self._ready: list[tuple[int, int, Orthogonalized]] = []

    def start(self, group: Mapping[str, Any], present: Collection[int], timer: PhaseTimer) -> None:
        pass

    def compute(self, group: Mapping[str, Any], timer: PhaseTimer) -> list[Done]:
        batch = self.batches[0]
        early = None if self.early is None else self.early(group, batch)
        if early is not None:
            self._ready = [(0, len(batch.params), early)]
        else:
            self._ready = []
            for start, end in batch.runs([p.grad is not None for p in batch.params]):
                momentum = batch.momentum(start, end)
                ready = orthogonalize(group, batch, (start, end), momentum, timer)
                batch.put_momentum(start, end, momentum)
                self._ready.append((start, end, ready))
        return [ready.done for _, _, ready in self._ready]

    def finish(self, group: Mapping[str, Any], timer: PhaseTimer, record: StepRecord | None) -> None:
        batch, ready = self.batches[0], self._ready
        self._ready = []
        for start, end, one in ready:
            apply(group, batch, batch.params[start:end], one.update, timer, record=record)


class ExchangedRound(Round):
    """Batches of several owners in one domain: their pieces travel to these in one all-to-all, and back in another.

    Where there are copies, updates go from the owner's one on to the others.

    Attributes:
        domain: the ranks that take part.
        parcels: of the batches.
    """

    def __init__(self, index: int, batches: Sequence[SharedBatch], what: str) -> None:
        """``what`` names the batches, the same on all ranks."""
        self.index = index
        self.batches: list[SharedBatch] = list(batches)
        self.domain = batches[0].domain
        self.queue = id(self.domain)
        self.parcels = [batch.parcel for batch in batches]
        self.exchanged = any(len(parcel.holders) > 1 for parcel in self.parcels)
        self._what = what
        self.bundles = [Bundle((i,), batch, i in self._owned) for i, batch in self._held.items()]
        self._present: list[list[bool]] = []
        self._norms: WholeNorms | None = None
        self._gathering: Redistribution | None = None
        self._scattering: Redistribution | None = None
        self._copying: Copying | None = None

    def bundle(self) -> dict[int, Tensor]:
        """Treat batches together whose parts here are small and alike; returns their momentum, which is new."""
        self.bundles, momentum = make_bundles(self._held, self._owned)
        return momentum

    def fold(self, group: Mapping[str, Any], present: Collection[int], timer: PhaseTimer) -> WholeNorms | None:
        """Before :meth:`start`: where parts travel normalized, fold gradients into momentum. The norms must be joined.

        Args:
            present: as for :meth:`start`.
        """
        self._gathering = self._scattering = self._copying = self._norms = None  # a step before may have failed
        self.last_leg = True
        self._present = [[id(p) in present for p in batch.params] for batch in self.batches]
        like = self._like()
        if not (self.exchanged and any(map(any, self._present)) and sent_normalized(group, like)):
            return None  # a round of one rank's own matrices is unknown to the others
        norms: dict[int, Tensor] = {}
        with timer.phase("momentum"):
            for bundle in self.bundles:
                found = folded_norms(group, bundle.joint, self._of_params(bundle))
                norms |= zip(bundle.numbers, found.split(self._counts(bundle)), strict=True)
            self._norms = WholeNorms(self.parcels, self.domain, norms, like.device)
        return self._norms

    def start(self, group: Mapping[str, Any], present: Collection[int], timer: PhaseTimer) -> None:
        if not any(map(any, self._present)):
            return
        parts: dict[int, Tensor] = {}
        like = self._like()
        norms = None if self._norms is None else self._norms.of_batches()
        with timer.phase("momentum"):
            for bundle in self.bundles:
                if norms is None:
                    update = folded(group, bundle.joint, self._of_params(bundle))
                else:
                    of_bundle = torch.cat([norms[i] for i in bundle.numbers])
                    update = normalized_parts(group, bundle.joint, self._of_params(bundle), of_bundle)
                if bundle.owned:
                    parts |= zip(bundle.numbers, update.split(self._counts(bundle)), strict=True)
                else:
                    parts[bundle.numbers[0]] = update
        with timer.phase("exchange"):
            what = f"gather of {self._what}"
            like = like if norms is None else like.to(begin_dtype(group, like))
            self._gathering = Redistribution(self._to_owners, parts, self.domain, like, what)

    def compute(self, group: Mapping[str, Any], timer: PhaseTimer) -> list[Done]:
        if self._gathering is None:
            return []
        with timer.phase("exchange"):
            whole = self._gathering.wait()
        norms = None if self._norms is None else self._norms.of_batches()
        self._gathering = self._norms = None
        done = []
        for i in list(whole):
            batch = self.batches[i]
            ready = orthogonalize_whole(group, batch, whole.pop(i), timer, norms=None if norms is None else norms[i])
            whole[i] = ready.update
            done += _of_present(ready.done, batch, self._present[i])
        like = self._like()
        like = like.to(wire_dtype(group, like.dtype, like.device))
        with timer.phase("exchange"):
            what = f"scatter of {self._what}"
            self._scattering = Redistribution(self._from_owners, whole, self.domain, like, what)
        self.last_leg = not self.copies.needed
        if not self._scattering.travels:
            self.forward(timer)
        return done

    def forward(self, timer: PhaseTimer) -> None:
        if self.last_leg or self._scattering is None:
            return
        self.last_leg = True
        with timer.phase("exchange"):
            updates, like = self._scattering.wait(), self._scattering.like
            self._scattering = None
            self._copying = Copying(self.copies, updates, like, f"copies of {self._what}")

    def finish(self, group: Mapping[str, Any], timer: PhaseTimer, record: StepRecord | None) -> None:
        arriving = self._copying or self._scattering
        if arriving is None:
            return
        with timer.phase("exchange"):
            updates = arriving.wait()
        self._scattering = self._copying = None
        for bundle in self.bundles:
            parts = [updates.pop(i) for i in bundle.numbers if i in updates]
            joint, present = bundle.joint, self._of_params(bundle)
            if all(present):
                apply(group, joint, joint.params, parts, timer, record=record)
            elif any(present):
                update = parts[0] if len(parts) == 1 else torch.cat(parts)
                for start, end in joint.runs(present):
                    apply(group, joint, joint.params[start:end], update[joint.rows(start, end)], timer, record=record)

    @cached_property
    def copies(self) -> Copies:
        """What goes on from the owners' copies to others."""
        return Copies(self.parcels, self.domain)

    @cached_property
    def _to_owners(self) -> Itinerary:
        return Itinerary([parcel.to_owner for parcel in self.parcels], self.domain, self._stacks)

    @cached_property
    def _from_owners(self) -> Itinerary:
        stacks = [] if self.copies.needed else self._stacks  # these go on batch by batch
        return Itinerary([parcel.from_owner for parcel in self.parcels], self.domain, stacks)

    @property
    def _stacks(self) -> list[tuple[int, ...]]:
        """What travels as it is folded."""
        return [bundle.numbers for bundle in self.bundles if not bundle.owned]

    @cached_property
    def _owned(self) -> set[int]:
        """Numbers of the batches of this rank."""
        return {i for i, parcel in enumerate(self.parcels) if parcel.owner == self.domain.position}

    @cached_property
    def _held(self) -> dict[int, Batch]:
        """The batches of which this rank has parts, by number."""
        return {i: batch for i, batch in enumerate(self.batches) if self.domain.position in batch.parcel.spread.parts}

    def _counts(self, bundle: Bundle) -> list[int]:
        return [self.batches[i].count for i in bundle.numbers]

    def _of_params(self, bundle: Bundle) -> list[bool]:
        """Which of its parameters have a gradient somewhere."""
        return [present for i in bundle.numbers for present in self._present[i]]

    def __str__(self) -> str:
        """What all ranks of the domain must agree on before data travels."""
        parcels = [(parcel.count, parcel.layout.shape, parcel.owner) for parcel in self.parcels]
        return f"{self._what} as (count, shape, owner) {parcels}"

    def _like(self) -> Tensor:
        return torch.empty(0, dtype=self.batches[0].dtype, device=self.batches[0].device)


def _of_present(done: Done, batch: Batch, present: Sequence[bool]) -> list[Done]:
    """``done`` without the matrices that no rank has a gradient of: these travelled along, and are not updated."""
    if all(present):
        return [done]
    parts = []
    for start, end in batch.runs(present):
        parts.append(Done(batch.labels(start, end), done.shape, done.variant, done.norms[batch.rows(start, end)]))
    return parts


def exchanged_rounds(
    index: int,
    batches: Sequence[SharedBatch],
    *,
    small_numel: int,
    nbytes: int,
    together: bool,
    order: Callable[[Batch], tuple[int, int]],
) -> list[ExchangedRound]:
    """Rounds of what several ranks hold: one batch of each owner, or several if they are of small matrices.

    Matrices of a stack that one rank has whole need no exchange, and come first.

    Args:
        small_numel: matrices of at most so many elements are packed.
        nbytes: most bytes of whole matrices that an owner gets in a round of packed batches.
        together: the owners work at the same time; False: one batch a round.
        order: key by which the batches of an owner are sorted; the same on all ranks.
    """
    lanes: dict[tuple[int, torch.dtype], dict[int, list[SharedBatch]]] = {}
    rounds = []
    for batch in batches:
        if len(batch.parcel.holders) == 1:  # unknown to the other ranks, so it cannot be in a round with theirs
            rounds.append(ExchangedRound(index, [batch], f"matrices of one rank in group {index}"))
        else:
            key = (id(batch.domain), batch.dtype)
            lanes.setdefault(key, {}).setdefault(batch.parcel.owner, []).append(batch)
    for by_owner in lanes.values():
        packs = [_packed(sorted(by_owner[owner], key=order), small_numel, nbytes) for owner in sorted(by_owner)]
        for number, of_owners in enumerate(zip_longest(*packs, fillvalue=())):
            members = [batch for pack in of_owners for batch in pack]
            for some in [members] if together else [[batch] for batch in members]:
                count = sum(batch.count for batch in some)
                what = f"round {number} of group {index}: {count} matrices"
                rounds.append(ExchangedRound(index, some, what))
    return rounds


def in_model_order(batch: Batch) -> tuple[int, int]:
    """The order in which updated weights are wanted next."""
    return batch.position, batch.numbers[0]


def longest_first(batch: Batch) -> tuple[int, int]:
    """Begin with what takes longest, so that owners compute alike batches at the same time."""
    m, n = batch.shape
    return -batch.count * m * n * min(m, n), batch.position


def _packed(batches: Sequence[SharedBatch], small_numel: int, nbytes: int) -> list[list[SharedBatch]]:
    packs: list[list[SharedBatch]] = []
    room = 0
    for batch in batches:
        size = batch.parcel.numel * batch.dtype.itemsize
        if batch.shape[0] * batch.shape[1] <= small_numel and size <= room:
            packs[-1].append(batch)
            room -= size
        else:
            packs.append([batch])
            room = nbytes - size if batch.shape[0] * batch.shape[1] <= small_numel else 0
    return packs


def drive(
    rounds: Sequence[Round],
    group_at: Callable[[int], Mapping[str, Any]],
    present: Collection[int],
    prefetch: int,
    timer: PhaseTimer,
    meanwhile: Callable[[], None],
    record: StepRecord | None = None,
) -> Iterator[tuple[Round, list[Done]]]:
    """Run all rounds; yields each with what it did here, when its weights are up to date.

    The gathers of up to ``prefetch`` rounds that come later are on their way while one computes, and the scatter of the
    one before; with none of them, every collective ends before the next thing begins. Collectives start in one order on
    all ranks that share them, whatever other rounds these ranks have.

    Args:
        prefetch: counts for the rounds of each domain on its own.
        meanwhile: what else is to do, while the last scatter is on its way.
        record: is told of every update.
    """
    exchanged = [r for r in rounds if r.exchanged]
    windows = prefetch_windows([r.queue for r in exchanged], prefetch)
    started: set[int] = set()
    turn = 0  # of the next round to exchange
    leaving: list[tuple[Round, list[Done]]] = []
    folded = [r.fold(group_at(r.index), present, timer) for r in rounds if isinstance(r, ExchangedRound)]
    if norms := [of_round for of_round in folded if of_round is not None]:
        with timer.phase("exchange"):
            join(norms)

    def start(turns: Iterable[int]) -> None:
        for coming in turns:
            if coming not in started:
                started.add(coming)
                exchanged[coming].start(group_at(exchanged[coming].index), present, timer)

    def finished(round_: Round, done: list[Done]) -> tuple[Round, list[Done]]:
        round_.forward(timer)
        round_.finish(group_at(round_.index), timer, record)
        return round_, done

    for round_ in rounds:
        if round_.exchanged:
            start(windows[turn])
            turn += 1
            done = round_.compute(group_at(round_.index), timer)
            # A round of whatever domain computes while updates arrive. They are sent on when the next round of their
            # own domain has computed: so a domain's collectives have one order on all its ranks.
            for pair in [pair for pair in leaving if pair[0].last_leg]:
                leaving.remove(pair)
                yield finished(*pair)
            for earlier, _ in leaving:
                if earlier.queue == round_.queue:
                    earlier.forward(timer)
            leaving.append((round_, done))
            if not prefetch:
                yield finished(*leaving.pop())
        else:
            start(range(turn, min(turn + prefetch, len(exchanged))))
            round_.start(group_at(round_.index), present, timer)
            done = round_.compute(group_at(round_.index), timer)
            round_.finish(group_at(round_.index), timer, record)
            yield round_, done
    for pair in leaving:
        pair[0].forward(timer)
    meanwhile()
    for pair in leaving:
        yield finished(*pair)


def prefetch_windows(domains: Sequence[int], prefetch: int) -> list[list[int]]:
    """For each round, the rounds that have started when it computes, itself included.

    These are the next ``prefetch`` rounds of whatever domain, and the next ``prefetch`` rounds of its own domain. The
    latter give the collectives of a domain one order on all its ranks, whatever other rounds each of them has. Say that
    ranks 0 and 1 share the domain ``a``, rank 1 has a round of another domain in between, and ``prefetch`` is 1::

        rank 0 with rounds a0 a1:      at a0  gather a0, gather a1,             compute, scatter a0
        rank 1 with rounds a0 b0 a1:   at a0  gather a0, gather b0, gather a1,  compute, scatter a0

    By the next round of whatever domain alone, rank 1 would start the gather of a1 at b0 only, after the scatter of a0,
    which follows it on rank 0: each rank would wait for a collective that the other one has not come to.

    Args:
        domains: of each round.
    """
    turns: dict[int, list[int]] = {}  # by domain
    for turn, domain in enumerate(domains):
        turns.setdefault(domain, []).append(turn)
    windows: list[list[int]] = [[] for _ in domains]
    for of_domain in turns.values():
        for number, turn in enumerate(of_domain):
            following = range(turn, min(turn + prefetch + 1, len(domains)))
            windows[turn] = sorted({*following, *of_domain[number : number + prefetch + 1]})
    return windows
