"""Rounds of a step: batches that travel together, and how the next ones travel while one is orthogonalized.

Timeline of three rounds of one domain with ``prefetch=1``, of which the updates go on to copies. A round is a generator
that stops where something of it is under way::

    round 0   fold, gather ─┐   orthogonalize, scatter ──────────────┐ copies ──────────┐ apply
    round 1   fold, gather ─┼────────────────────────┐ orthogonalize, scatter ──────────┼─┐ copies …
    round 2                 └ fold, gather ──────────┼──────────────────┐ orthogonalize …

The gather of the next round is on its way while one computes, and so are the scatter and the copies of those before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dmuon.comm.domain import AllToAll, Copies, Copying, Redistribution
from dmuon.kernels import (
    carrier_dtype,
    momentum_norms,
    momentum_update,
    normalized,
    normalized_momentum,
    normalized_update,
)
from dmuon.layout.matrices import Strategy
from dmuon.platform.streams import PhaseTimer, Stream
from dmuon.step.batches import Batch, Bundle, SharedBatch, make_bundles
from dmuon.step.scaling import Arrived, Scaling, scale
from dmuon.step.update import Done, Numerics, Terms, apply, fold, in_rows, kernel_of, numerics_of, orthogonalize


@dataclass(slots=True, eq=False)
class Step:
    """One step of an optimizer.

    Attributes:
        options: of each group.
        present: ids of the parameters of which some rank has a gradient.
        record: gets the terms of every update.
        done: what was orthogonalized here so far.
        scalings: by number of the group, what is made of updates that have arrived.
    """

    options: Sequence[Mapping[str, Any]]
    present: Set[int]
    timer: PhaseTimer
    record: list[Terms] | None = None
    done: list[Done] = field(default_factory=list)
    scalings: Mapping[int, Sequence[Scaling]] = field(default_factory=dict)


class Round(ABC):
    """Batches that go through a step together; the same on all ranks that share them.

    Attributes:
        index: of the batches' group of the optimizer.
        batches: in one order on all ranks that share them.
        exchanged: something travels.
        queue: rounds of one domain, which are counted on their own when the next ones start ahead.
        knows_shapes: those of whole matrices, by which the batches' learning rates are scaled; and where their rows
            lie, so that ``scalings`` may replace updates before they are applied.
        squares: of the norms of all matrices in the round, fp64, of this rank's parts until :func:`join_norms` has
            summed them. Where Newton–Schulz begins in half precision, parts are divided by these norms and travel as it
            takes them, which is half the bytes of momentum: each rank rounds what the owner would round otherwise.
    """

    index: int
    batches: Sequence[Batch]
    exchanged: bool
    queue: int = 0
    knows_shapes: bool = True
    squares: Tensor | None = None

    @property
    def folded(self) -> Iterable[Batch]:
        """That into whose momentum gradients go: the batches, or what is made of them."""
        return self.batches

    def fold(self, step: Step) -> None:
        """Before any round runs: gradients go into momentum, if norms of whole matrices must be joined first."""

    @abstractmethod
    def run(self, step: Step) -> Iterator[bool]:
        """Update the weights. It yields where something was sent that it waits for when it goes on.

        The first time, that is what others orthogonalize; then what this rank has orthogonalized, and perhaps what of
        it goes on to copies. The value says whether it sends nothing more.
        """


class AloneRound(Round):
    """One batch that this rank has whole.

    Attributes:
        early: gives the update of the batch if it was computed during backward and is still right; None without.
    """

    exchanged = False

    def __init__(self, index: int, batch: Batch) -> None:
        self.index = index
        self.batches = [batch]
        self.early: Callable[[Mapping[str, Any], Batch], tuple[Tensor, Done] | None] | None = None

    def run(self, step: Step) -> Iterator[bool]:
        group, batch = step.options[self.index], self.batches[0]
        ready = None if self.early is None else self.early(group, batch)
        updates = [] if ready is None else [(batch.whole[0], *ready)]
        if ready is None:
            numerics = numerics_of(group, batch.dtype, batch.device)
            kernel = partial(normalized_momentum, storage=numerics.storage, eps=group["eps"])
            for run_of in batch.runs(step.present):
                with step.timer.phase("momentum"):
                    [(x, norms)] = fold(group, batch, [run_of], kernel)
                updates.append((run_of, *orthogonalize(numerics, batch, run_of, x, norms, step.timer)))
                del x
        for run_of, update, done in updates:
            step.done.append(done)
            if self.index in step.scalings:
                arrived = Arrived(batch, update, run_of, [run_of])
                scale(step.scalings[self.index], group, [arrived])
                assert arrived.update is not None
                update = arrived.update
            apply(group, batch, run_of, update, step.timer, record=step.record)
        return iter(())


def join_norms(rounds: Sequence[Round]) -> None:
    """Sum squares over the ranks of each domain. Collective, one all-reduce a domain, in the order of ``rounds``."""
    by_domain: dict[int, list[ExchangedRound]] = {}
    for one in rounds:
        if isinstance(one, ExchangedRound) and one.squares is not None:
            by_domain.setdefault(id(one.domain), []).append(one)
    pending = []
    for members in by_domain.values():
        parts = [one.squares for one in members if one.squares is not None]
        domain, sums = members[0].domain, torch.cat(parts)
        launch = partial(dist.all_reduce, sums, group=domain.group, async_op=True)
        what = f"norms of {len(sums)} matrices"
        pending.append((domain.monitor.start(domain.lane, what, launch), members, sums.split([*map(len, parts)])))
    for work, members, squares in pending:
        work.wait()
        for one, of_round in zip(members, squares, strict=True):
            one.squares = of_round


class ExchangedRound(Round):
    """Batches of several owners in one domain: their pieces travel to these in one all-to-all, and back in another.

    Where there are copies, updates go from the owner's one on to the others. Batches of which this rank has small parts
    that are alike are treated together, and get new momentum for that.

    Attributes:
        domain: the ranks that take part.
        parcels: of the batches.
        has_owners: others than owners orthogonalize nothing; False: ranks do that with what concerns them.
        joins_norms: also where that saves no bytes, since no rank has a whole matrix.
    """

    has_owners = True
    joins_norms = False
    orthogonalize: Callable[..., tuple[Tensor, Done]] = staticmethod(orthogonalize)

    def __init__(self, index: int, batches: Sequence[SharedBatch], what: str) -> None:
        """``what`` names the batches, the same on all ranks."""
        self.index = index
        self.batches: list[SharedBatch] = list(batches)
        self.domain = batches[0].domain
        self.queue = id(self.domain)
        self.parcels = [batch.parcel for batch in batches]
        self._counts = [parcel.count for parcel in self.parcels]
        self.exchanged = any(len(parcel.spread.holders) > 1 for parcel in self.parcels)
        self._what = what
        self._ids = frozenset[int]().union(*(batch.ids for batch in batches))
        self._like = torch.empty(0, dtype=batches[0].dtype, device=batches[0].device)
        here = self.domain.position
        owned = {i for i, parcel in enumerate(self.parcels) if parcel.owner == here or not self.has_owners}
        self.routes = [parcel.routes(here) for parcel in self.parcels]
        held = {i: batch for i, batch in enumerate(self.batches) if here in batch.parcel.spread.parts}
        self.bundles: list[Bundle] = make_bundles(held, owned)

    @property
    def folded(self) -> Iterable[Batch]:
        return (bundle.joint for bundle in self.bundles)

    def fold(self, step: Step) -> None:
        self.squares = None  # a step before may have failed
        group = step.options[self.index]
        # A round of one rank's own matrices is unknown to the others.
        numerics = numerics_of(group, self._like.dtype, self._like.device)
        if not self.exchanged or not (numerics.sent_normalized or self.joins_norms):
            return
        if step.present.isdisjoint(self._ids):
            return
        norms: dict[int, Tensor] = {}
        with step.timer.phase("momentum"):
            for bundle in self.bundles:
                batch = bundle.joint
                runs = batch.runs(step.present)
                found = fold(group, batch, runs, momentum_norms, again=True)
                of_bundle = in_rows(found, batch, runs, (batch.count,), torch.float64)
                norms |= zip(bundle.numbers, of_bundle.split(bundle.counts), strict=True)
            self.squares = torch.zeros(sum(self._counts), dtype=torch.float64, device=self._like.device)
            slots = self.squares.split(self._counts)
            # Of copies the owner's one counts.
            counted = [i for i in norms if self.domain.position in self.parcels[i].to_owner.senders]
            if counted:
                torch._foreach_copy_([slots[i] for i in counted], [norms[i] for i in counted])
                self.squares.square_()

    def run(self, step: Step) -> Iterator[bool]:
        if step.present.isdisjoint(self._ids):
            return
        group, timer = step.options[self.index], step.timer
        numerics = numerics_of(group, self._like.dtype, self._like.device)
        norms, self.squares = None if self.squares is None else self.squares.sqrt().split(self._counts), None
        parts: dict[int, Tensor] = {}
        with timer.phase("momentum"):
            for bundle in self.bundles:
                update = self._sent(step, bundle, numerics, norms)
                if bundle.owned:
                    parts |= zip(bundle.numbers, update.split(bundle.counts), strict=True)
                else:
                    parts[bundle.numbers[0]] = update
                del update  # of which only what is kept outlives the packing
        with timer.phase("exchange"):
            like = self._like if norms is None else self._like.to(numerics.storage)
            gathering = Redistribution(self._before, parts, like, f"gather of {self._what}")
        del parts
        yield False

        with timer.phase("exchange"):
            whole = gathering.wait()
        del gathering
        for i in list(whole):
            batch = self.batches[i]
            x = whole.pop(i)
            with timer.phase("momentum"):
                x, of_batch = self._begun(step, i, x, numerics, norms)
            whole[i], done = self.orthogonalize(numerics, batch, batch.whole[0], x, of_batch, timer)
            del x
            # Matrices that no rank has a gradient of have travelled along, and are not updated.
            for start, end in batch.runs(step.present):
                some = slice(start * batch.each, end * batch.each)
                step.done.append(Done(done.matrices[some], done.shape, done.variant, done.norms[some]))
        with timer.phase("exchange"):
            like = self._like.to(numerics.storage)
            arriving: Redistribution | Copying
            arriving = Redistribution(self._after, whole, like, f"scatter of {self._what}")
        del whole
        scales = self.index in step.scalings
        if (self.copies.needed or scales) and self._after.travels:
            yield False
        if self.copies.needed:
            with timer.phase("exchange"):
                arriving = Copying(self.copies, arriving.wait(), like, f"copies of {self._what}")
        if scales:  # with collectives of its own, which have one order only if they come before the last stop
            with timer.phase("exchange"):
                updates = self._scaled(step, arriving.wait())
        yield True

        if not scales:
            with timer.phase("exchange"):
                updates = arriving.wait()
        del arriving
        for bundle in self.bundles:
            arrived = []
            for i in bundle.numbers:
                if i in updates:
                    arrived.append(updates.pop(i))
            joint = bundle.joint
            runs = joint.runs(step.present)
            if runs is joint.whole:
                apply(group, joint, runs[0], arrived, timer, record=step.record)
            elif runs:
                update = arrived[0] if len(arrived) == 1 else torch.cat(arrived)
                for start, end in runs:
                    rows = update[start * joint.each : end * joint.each]
                    apply(group, joint, (start, end), rows, timer, record=step.record)

    def _sent(self, step: Step, bundle: Bundle, numerics: Numerics, norms: Sequence[Tensor] | None) -> Tensor:
        """What this rank sends of a bundle: gradients go into momentum, unless they are in it with ``norms``."""
        group, batch = step.options[self.index], bundle.joint
        runs = batch.runs(step.present)
        if norms is None:
            found = fold(group, batch, runs, momentum_update)
        else:
            of_bundle, found = torch.cat([norms[i] for i in bundle.numbers]), []
            options = {"beta": group["momentum"], "nesterov": group["nesterov"]}
            kernel = partial(kernel_of(group, normalized_update), **options)
            for start, end in runs:  # gradients are in momentum already, unless that is rounded
                rows = of_bundle[start * batch.each : end * batch.each]
                grads, momentum = batch.gradients(start, end, group["l2"]), batch.momentum(start, end)
                if batch.is_rounded:
                    kernel_of(group, momentum_norms)(grads, momentum, **options)
                    batch.put_momentum(start, end, momentum)
                found.append(kernel(grads, momentum, rows, storage=numerics.storage, eps=group["eps"]))
        shape = found[0].shape if runs is batch.whole else batch.momentum(0, len(batch.params)).shape
        return in_rows(found, batch, runs, shape, batch.dtype if norms is None else numerics.storage)

    def _begun(
        self, step: Step, number: int, x: Tensor, numerics: Numerics, norms: Sequence[Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """What Newton–Schulz takes of a batch that was gathered, and the norms of its matrices."""
        if norms is None:
            return normalized(x, storage=numerics.storage, eps=step.options[self.index]["eps"])
        return x.to(carrier_dtype(x.device, numerics.storage)), norms[number]

    def _scaled(self, step: Step, updates: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """By number of the batch, as ``updates`` are, or by that of the first one of several that are one tensor."""
        parts: dict[int, Tensor] = {}
        for bundle in self.bundles:
            arrived = torch.cat([updates[i] for i in bundle.numbers if i in updates])
            parts |= zip(bundle.numbers, arrived.split(bundle.counts), strict=True)
        every = [
            Arrived(batch, parts.get(i), (0, len(batch.params)), batch.runs(step.present))
            for i, batch in enumerate(self.batches)
        ]
        scale(step.scalings[self.index], step.options[self.index], every, self.domain)
        return {i: one.update for i, one in enumerate(every) if one.update is not None}

    @cached_property
    def copies(self) -> Copies:
        """What goes on from the owners' copies to others."""
        return Copies(self.parcels if self.has_owners else (), self.domain)

    @cached_property
    def _before(self) -> AllToAll:
        return AllToAll([before for before, _ in self.routes], self.domain, self._stacks)

    @cached_property
    def _after(self) -> AllToAll:
        stacks = [] if self.copies.needed else self._stacks  # these go on batch by batch
        return AllToAll([after for _, after in self.routes], self.domain, stacks)

    @property
    def _stacks(self) -> list[tuple[int, ...]]:
        """What travels as it is folded."""
        return [bundle.numbers for bundle in self.bundles if not bundle.owned]

    def __str__(self) -> str:
        """What all ranks of the domain must agree on before data travels."""
        parcels = [(parcel.count, parcel.spread.layout.shape, parcel.team or parcel.owner) for parcel in self.parcels]
        way = "" if self.has_owners else f", {self.parcels[0].strategy}"
        return f"{self._what} as (count, shape, owner) {parcels}{way}"


def exchanged_rounds(
    index: int,
    batches: Sequence[SharedBatch],
    *,
    small_numel: int,
    nbytes: int,
    together: bool,
    order: Callable[[Batch], tuple[int, int]],
    kinds: Mapping[Strategy, type[ExchangedRound]] | None = None,
) -> list[ExchangedRound]:
    """Rounds of what several ranks hold: one batch of each owner, or several if they are of small matrices.

    Matrices of a stack that one rank has whole need no exchange, and come first.

    Args:
        small_numel: matrices of at most so many elements are packed.
        nbytes: most bytes of whole matrices that an owner gets in a round of packed batches.
        together: the owners work at the same time; False: one batch a round.
        order: key by which the batches of an owner are sorted; the same on all ranks.
        kinds: of rounds, for strategies other than that of owners.
    """
    lanes: dict[tuple[Strategy, bool, int, torch.dtype], dict[int, list[SharedBatch]]] = {}
    rounds = []
    for batch in batches:
        if len(batch.parcel.spread.holders) == 1:  # unknown to the other ranks, so it cannot be in a round with theirs
            rounds.append(ExchangedRound(index, [batch], f"matrices of one rank in group {index}"))
        else:
            key = (batch.parcel.strategy, not batch.parcel.team, id(batch.domain), batch.dtype)
            lanes.setdefault(key, {}).setdefault(batch.parcel.owner, []).append(batch)
    # Those of teams first: the ranks of no team go on to the next round, whose gather is under way by then.
    for (strategy, *_), by_owner in sorted(lanes.items(), key=lambda lane: lane[0][1]):
        kind = ExchangedRound if kinds is None else kinds[strategy]
        first = in_model_order if strategy == "fused" else order
        packs = [_packed(sorted(by_owner[owner], key=first), small_numel, nbytes) for owner in sorted(by_owner)]
        for number, of_owners in enumerate(zip_longest(*packs, fillvalue=())):
            members = [batch for pack in of_owners for batch in pack]
            for some in [members] if together else [[batch] for batch in members]:
                count = sum(batch.count for batch in some)
                what = f"round {number} of group {index}: {count} matrices"
                rounds.append(kind(index, some, what))
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


class Schedule:
    """The rounds of a step, and which of them have started when each one computes; worked out once for all steps.

    Args:
        prefetch: counts for the rounds of each domain on its own. What is stored on the host comes one round earlier.
    """

    def __init__(self, rounds: Sequence[Round], prefetch: int) -> None:
        self.rounds = rounds
        self.prefetch = prefetch
        self._exchanged = [round_ for round_ in rounds if round_.exchanged]
        windows = iter(prefetch_windows([round_.queue for round_ in self._exchanged], prefetch))
        turn = 0  # of the next round to exchange
        self._turns: list[tuple[Round, Sequence[int]]] = []
        first = next((batch for round_ in rounds for batch in round_.folded if batch.is_moved or batch.on_host), None)
        self._beside = None if first is None else Stream(first.device)
        for round_ in rounds:
            ahead: Sequence[int] = range(turn, min(turn + prefetch, len(self._exchanged)))
            self._turns.append((round_, next(windows) if round_.exchanged else ahead))
            turn += round_.exchanged

    def drive(self, step: Step) -> Iterator[Round | None]:
        """Run all rounds; yields each when its weights are up to date, and None once while the last ones are under way.

        The gathers of up to ``prefetch`` rounds that come later are on their way while one computes, and the scatter of
        the one before; with none of them, every collective ends before the next thing begins. Collectives start in one
        order on all ranks that share them, whatever other rounds these ranks have.
        """
        for round_ in self._exchanged:
            round_.fold(step)
        if any(round_.squares is not None for round_ in self._exchanged):
            with step.timer.phase("exchange"):
                join_norms(self._exchanged)
        started: dict[int, Iterator[bool]] = {}  # by turn
        is_last: dict[int, bool] = {}  # whether it sends nothing more
        leaving: list[int] = []  # turns of those that have computed
        turn = 0
        for number, (round_, window) in enumerate(self._turns, self.prefetch + 1):
            if self._beside is not None and number < len(self.rounds):
                for batch in self.rounds[number].folded:
                    if not batch.ids.isdisjoint(step.present):
                        batch.fetch(self._beside)
            for coming in window:
                if coming not in started:
                    started[coming] = self._exchanged[coming].run(step)
                    next(started[coming], None)
            if not round_.exchanged:
                for _ in round_.run(step):
                    pass
                yield round_
                continue
            is_last[turn] = next(started[turn], True)
            # A round of whatever domain computes while updates arrive. They are sent on when the next round of their
            # own domain has computed: so a domain's collectives have one order on all its ranks.
            before, leaving = leaving, []
            for earlier in before:
                if is_last[earlier]:
                    next(started[earlier], None)
                    yield self._exchanged[earlier]
                else:
                    leaving.append(earlier)
            for earlier in leaving:
                if self._exchanged[earlier].queue == round_.queue:
                    is_last[earlier] = next(started[earlier], True)
            leaving.append(turn)
            if not self.prefetch:
                for _ in started[leaving.pop()]:
                    pass
                yield round_
            turn += 1
        for earlier in leaving:
            if not is_last[earlier]:
                next(started[earlier], None)
        yield None
        for earlier in leaving:
            next(started[earlier], None)
            yield self._exchanged[earlier]


def prefetch_windows(domains: Sequence[int], prefetch: int) -> list[list[int]]:
    """For each round, the rounds that have started when it computes, itself included.

    These are the next ``prefetch`` rounds of whatever domain, and the next ``prefetch`` rounds of its own domain. The
    latter give the collectives of a domain one order on all its ranks, whatever other rounds each of them has. Say that
    ranks 0 and 1 share the domain ``a``, rank 1 has a round of another domain in between, and ``prefetch`` is 1::

        rank 0 with rounds a0 a1:      at a0  gather a0, gather a1,             compute, scatter a0
        rank 1 with rounds a0 b0 a1:   at a0  gather a0, gather b0, gather a1,  compute, scatter a0

    By the next round of whatever domain alone, rank 1 would start the gather of a1 at b0 only, after the scatter of a0,
    which follows it on rank 0: each rank would wait for a collective that the other one has not come to.
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
