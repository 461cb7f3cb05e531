"""Matrices that lie on several ranks: their pieces travel to the rank that orthogonalizes them, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dmuon.comm.domain import Domain
from dmuon.layout.parcels import Route, travels
from dmuon.layout.shards import Piece

__all__ = ["Redistribution", "start_redistribution"]


def start_redistribution(
    routes: Sequence[Route], tensors: Mapping[int, Tensor], domain: Domain, like: Tensor, what: str
) -> Redistribution:
    """Send what this rank has to those who want it. Collective over the domain, in one order on all ranks.

    Args:
        tensors: by number of the route, ``(count, …)`` of what this rank has, in the dtype of ``like``.
        like: has the dtype and device of what travels, also where this rank has no part of anything.
        what: names the redistribution, the same on all ranks.
    """
    kept = {i: tensors[i] for i, route in enumerate(routes) if domain.position in route.senders}
    flight = _Flight(routes, kept, domain, like, what) if travels(routes) else None
    kept = {i: tensor for i, tensor in kept.items() if domain.position in routes[i].receivers}
    return Redistribution(routes, kept, domain, like, flight)


class Redistribution:
    """Matrices on their way, in one direction or the other."""

    def __init__(
        self,
        routes: Sequence[Route],
        kept: Mapping[int, Tensor],
        domain: Domain,
        like: Tensor,
        flight: _Flight | None,
    ) -> None:
        """``kept``: what this rank has, of the routes on which it sends something to itself."""
        self._routes = routes
        self._kept = dict(kept)
        self._position = domain.position
        self._like = like
        self._flight = flight

    def wait(self) -> dict[int, Tensor]:
        """By number of the route, ``(count, …)`` of what this rank wanted; perhaps views of what it had."""
        arrived = {} if self._flight is None else self._flight.wait()
        wanted: dict[int, Tensor] = {}
        for i, route in enumerate(self._routes):
            if self._position not in route.receivers:
                continue
            parts: list[tuple[Piece, Tensor]] = []
            for sender in route.senders:
                piece = route.piece(sender, self._position)
                if sender == self._position:
                    parts.append((piece, _cut(self._kept[i], route.senders[sender], piece)))
                else:
                    parts.append((piece, arrived[sender].take((route.count, *piece.shape))))
            wanted[i] = _assembled(route, route.receivers[self._position], parts, self._like)
        self._flight, self._kept = None, {}
        return wanted


class _Flight:
    """One uneven all-to-all."""

    def __init__(
        self, routes: Sequence[Route], tensors: Mapping[int, Tensor], domain: Domain, like: Tensor, what: str
    ) -> None:
        parts: list[list[Tensor]] = [[] for _ in domain.ranks]
        self._incoming = [0] * domain.world
        for i, route in enumerate(routes):
            for receiver in route.receivers if domain.position in route.senders else ():
                if receiver != domain.position:
                    piece = route.piece(domain.position, receiver)
                    parts[receiver].append(_cut(tensors[i], route.senders[domain.position], piece))
            for sender, numel in route.numel_in(domain.position).items():
                self._incoming[sender] += numel
        packed = [part for of_rank in parts for part in of_rank]
        self._sent = like.new_empty(sum(part.numel() for part in packed))
        if packed:
            slots = self._sent.split([part.numel() for part in packed])
            torch._foreach_copy_([slot.view(part.shape) for slot, part in zip(slots, packed, strict=True)], packed)
        self._received = like.new_empty(sum(self._incoming))
        outgoing = [sum(part.numel() for part in of_rank) for of_rank in parts]

        def launch() -> list[dist.Work]:
            work = dist.all_to_all_single(
                self._received, self._sent, self._incoming, outgoing, group=domain.group, async_op=True
            )
            assert work is not None
            return [work]

        self._pending = domain.monitor.start(domain.lane, what, launch)

    def wait(self) -> dict[int, _Arrived]:
        """By position, what each rank sent."""
        self._pending.wait()
        arrived = {sender: _Arrived(flat) for sender, flat in enumerate(self._received.split(self._incoming))}
        del self._sent, self._received  # only now: the collective read and wrote them
        return arrived


class _Arrived:
    """What one rank sent, taken off piece by piece, in the order of the routes."""

    def __init__(self, flat: Tensor) -> None:
        self._rest = flat

    def take(self, shape: Sequence[int]) -> Tensor:
        taken, self._rest = self._rest.tensor_split([math.prod(shape)])
        return taken.view(list(shape))


def _assembled(route: Route, wanted: Piece, parts: Sequence[tuple[Piece, Tensor]], like: Tensor) -> Tensor:
    """``(count, …)`` of what is wanted, from parts of it."""
    if len(parts) == 1 and parts[0][0] == wanted:
        return parts[0][1]
    dim = route.layout.split_dim
    if dim is not None:  # one kernel instead of one a piece
        return torch.cat([part for _, part in parts], dim + 1)
    whole = like.new_empty((route.count, *wanted.shape))
    for piece, part in parts:
        for block, of_whole in piece.blocks():
            whole[_each(of_whole)].copy_(part[_each(block)])
    return whole


def _each(block: tuple[slice, ...]) -> tuple[slice, ...]:
    """Of every matrix of a stack."""
    return slice(None), *block


def _cut(tensor: Tensor, source: Piece, piece: Piece) -> Tensor:
    """``(count, …)`` of ``piece``, from what ``source`` has: the same, or the whole. A view where it is one block."""
    if piece == source:
        return tensor
    blocks = piece.blocks()
    if len(blocks) == 1:
        view: Tensor = tensor[_each(blocks[0][1])]
        return view
    part = tensor.new_empty((tensor.shape[0], *piece.shape))
    for block, of_whole in blocks:
        part[_each(block)].copy_(tensor[_each(of_whole)])
    return part
