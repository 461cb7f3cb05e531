"""Matrices that lie on several ranks: their pieces travel to the rank that orthogonalizes them, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dmuon.comm.domain import Domain
from dmuon.comm.monitor import Pending
from dmuon.layout.parcels import Parcel, gathers, scatters
from dmuon.layout.shards import Piece

__all__ = ["Gathering", "Scattering", "start_gather", "start_scatter"]


class Gathering:
    """Whole matrices on their way to their owners."""

    def __init__(
        self, parts: Sequence[Tensor | None], parcels: Sequence[Parcel], domain: Domain, flight: _Flight | None
    ) -> None:
        self._parts = list(parts)
        self._parcels = parcels
        self._domain = domain
        self._flight = flight

    def wait(self) -> dict[int, Tensor]:
        """By position among the parcels, ``(count, m, n)`` of those that this rank owns."""
        here = self._domain.position
        arrived = None if self._flight is None else self._flight.wait()
        whole: dict[int, Tensor] = {}
        for i, parcel in enumerate(self._parcels):
            if parcel.owner != here:
                continue
            pieces: list[tuple[Piece, Tensor]] = []
            for sender, piece in parcel.senders.items():
                part = self._parts[i] if sender == here else None
                if part is None:
                    assert arrived is not None
                    part = arrived.take(sender, (parcel.count, *piece.shape))
                pieces.append((piece, part))
            whole[i] = _assembled(parcel, pieces)
        self._flight, self._parts = None, []
        return whole


class Scattering:
    """Updates on their way from their owners."""

    def __init__(
        self, whole: Mapping[int, Tensor], parcels: Sequence[Parcel], domain: Domain, flight: _Flight | None
    ) -> None:
        self._whole = dict(whole)
        self._parcels = parcels
        self._domain = domain
        self._flight = flight

    def wait(self) -> list[Tensor | None]:
        """This rank's part ``(count, …)`` of each parcel, None where it holds nothing."""
        here = self._domain.position
        arrived = None if self._flight is None else self._flight.wait()
        parts: list[Tensor | None] = []
        for i, parcel in enumerate(self._parcels):
            piece = parcel.receivers.get(here)
            if piece is None:
                parts.append(None)
            elif parcel.owner == here:
                parts.append(_cut(self._whole[i], piece))
            else:
                assert arrived is not None
                parts.append(arrived.take(parcel.owner, (parcel.count, *piece.shape)))
        self._flight, self._whole = None, {}
        return parts


def start_gather(
    parts: Sequence[Tensor | None], parcels: Sequence[Parcel], domain: Domain, like: Tensor, what: str
) -> Gathering:
    """Send this rank's part of every parcel to its owner. Collective over the domain, in one order on all ranks.

    Args:
        parts: ``(count, …)`` of each parcel, in the dtype of ``like``; None where this rank holds nothing.
        like: has the dtype and device of what travels, also where this rank has no part of anything.
    """
    if not gathers(parcels):
        return Gathering(parts, parcels, domain, None)
    here = domain.position
    outgoing: list[list[Tensor]] = [[] for _ in domain.ranks]
    incoming = [0] * domain.world
    for part, parcel in zip(parts, parcels, strict=True):
        if parcel.owner == here:
            for sender, piece in parcel.senders.items():
                if sender != here:
                    incoming[sender] += parcel.count * piece.numel
        elif part is not None and here in parcel.senders:
            outgoing[parcel.owner].append(part)
    flight = _Flight(outgoing, incoming, like, domain, f"gather of {what}")
    mine = [part if parcel.owner == here else None for part, parcel in zip(parts, parcels, strict=True)]
    return Gathering(mine, parcels, domain, flight)


def start_scatter(
    whole: Mapping[int, Tensor], parcels: Sequence[Parcel], domain: Domain, like: Tensor, what: str
) -> Scattering:
    """Send every holder its part of what this rank owns: the reverse of :func:`start_gather`. Collective.

    Args:
        whole: by position among ``parcels``, ``(count, m, n)``.
        like: has the dtype and device of what travels.
    """
    if not scatters(parcels):
        return Scattering(whole, parcels, domain, None)
    here = domain.position
    outgoing: list[list[Tensor]] = [[] for _ in domain.ranks]
    incoming = [0] * domain.world
    for i, parcel in enumerate(parcels):
        if parcel.owner == here:
            for position, piece in parcel.receivers.items():
                if position != here:
                    outgoing[position].append(_cut(whole[i], piece))
        elif here in parcel.receivers:
            incoming[parcel.owner] += parcel.count * parcel.receivers[here].numel
    flight = _Flight(outgoing, incoming, like, domain, f"scatter of {what}")
    return Scattering(whole, parcels, domain, flight)


class _Flight:
    """One uneven all-to-all: tensors per destination out, so many elements per source in."""

    def __init__(
        self, outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[int], like: Tensor, domain: Domain, what: str
    ) -> None:
        parts = [tensor for tensors in outgoing for tensor in tensors]
        self._sent = like.new_empty(sum(part.numel() for part in parts))
        if parts:
            places = self._sent.split([part.numel() for part in parts])
            torch._foreach_copy_([place.view(part.shape) for place, part in zip(places, parts, strict=True)], parts)
        self._received = like.new_empty(sum(incoming))
        self._incoming = list(incoming)
        sizes = [sum(tensor.numel() for tensor in tensors) for tensors in outgoing]

        def launch() -> list[dist.Work]:
            work = dist.all_to_all_single(
                self._received, self._sent, self._incoming, sizes, group=domain.group, async_op=True
            )
            assert work is not None
            return [work]

        self._pending: Pending = domain.monitor.start(domain.lane, what, launch)

    def wait(self) -> _Arrived:
        self._pending.wait()
        arrived = _Arrived(self._received, self._incoming)
        del self._sent, self._received  # only now: the collective read and wrote them
        return arrived


class _Arrived:
    """What each rank sent, taken off piece by piece."""

    def __init__(self, flat: Tensor, sizes: Sequence[int]) -> None:
        self._left: list[Tensor] = list(flat.split(list(sizes)))

    def take(self, source: int, shape: Sequence[int]) -> Tensor:
        numel = math.prod(shape)
        flat = self._left[source]
        self._left[source] = flat[numel:]
        taken: Tensor = flat[:numel].view(list(shape))
        return taken


def _assembled(parcel: Parcel, pieces: Sequence[tuple[Piece, Tensor]]) -> Tensor:
    """``(count, m, n)`` from the pieces of one copy."""
    if len(pieces) == 1 and pieces[0][0].covers(parcel.layout.shape):
        return pieces[0][1]
    dim = parcel.layout.split_dim
    if dim is not None:  # one kernel instead of one a piece
        return torch.cat([part for _, part in pieces], dim + 1)
    first = pieces[0][1]
    whole = first.new_empty((parcel.count, *parcel.layout.shape))
    for piece, part in pieces:
        for local, there in piece.blocks():
            whole[_each(there)].copy_(part[_each(local)])
    return whole


def _each(block: tuple[slice, ...]) -> tuple[slice, ...]:
    """Of every matrix of a stack."""
    return slice(None), *block


def _cut(whole: Tensor, piece: Piece) -> Tensor:
    """``(count, …)`` of what ``piece`` holds, a view where it is one block."""
    blocks = piece.blocks()
    if len(blocks) == 1:
        view: Tensor = whole[_each(blocks[0][1])]
        return view
    part = whole.new_empty((whole.shape[0], *piece.shape))
    for local, there in blocks:
        part[_each(local)].copy_(whole[_each(there)])
    return part
