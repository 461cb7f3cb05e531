"""Ranks that have copies of the same parts: what a vote says of their gradients, which must be the same on all.

A matrix is gathered from one copy, that of its owner. A gradient that only another copy has would be dropped, and
momentum that only some copies decay would no longer be the same. Copies whose gradients nobody averaged, of whatever
route, drift apart.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon.layout.topology import Position
from dmuon.platform.streams import HostCopy
from dmuon.platform.torch_private import local_tensor

_NOTHING = -(2**31)  # of lines that a rank is not on; least of all int32
_OF_LINE = 4  # numbers: two, and their negatives
_SAMPLE = 2**12  # elements of a gradient whose norm is taken
_UNITS = 2**12  # of a checksum, to a factor of two
_TOLERANCE = 2**4  # in these units: a quarter of a percent in one of the gradients
_FLOOR = 1e-5  # norms below that, of the greatest one, are rounding
_NOT_FINITE = 1e30

Copies = tuple[Position, ...]  # positions in the domain of the ranks that have the same part, one of each copy


class CopiesVote:
    """Of one domain. Of each line of copies a digest of who has which gradients, a checksum of them, and the negatives.

    The checksum is the sum of the logarithms of norms, so that one small gradient counts as much as a large one. It is
    computed where the gradients are. A device is not waited for: what it computes in a step is compared in the next.

    Args:
        position: of this rank in the domain.
        params: by the ranks that have the same part of them, on all lines of the domain.

    Attributes:
        nothing: what a rank says that is on no line.
    """

    def __init__(self, position: Position, params: Mapping[Copies, Sequence[Tensor]]) -> None:
        self.lines = sorted(params)
        self.nothing = [_NOTHING] * (_OF_LINE * len(self.lines))
        self._params = [params[line] for line in self.lines]
        self._own = [number for number, line in enumerate(self.lines) if position in line]
        self._last: HostCopy | None = None

    def numbers(self) -> list[int]:
        """What this rank adds to its vote."""
        said = [*self.nothing]
        if not self._own:
            return said
        logs = [self._norms(number).log2().sum(dtype=torch.float64) for number in self._own]
        checksums = HostCopy((torch.stack(logs) * _UNITS).round().clamp(-(2**30), 2**30).to(torch.int32))
        known, self._last = checksums if checksums.immediate else self._last, checksums
        sums = [0] * len(self._own) if known is None else known.tolist()
        for number, checksum in zip(self._own, sums, strict=True):
            digest = zlib.crc32(self._flags(number)) & 0x7FFFFFFF
            said[_OF_LINE * number : _OF_LINE * (number + 1)] = digest, -digest, checksum, -checksum
        return said

    def differing(self, maxima: Sequence[int]) -> int | None:
        """Number of the first line on which copies differ, by the largest of what all ranks said; None without."""
        for number in range(len(self.lines)):
            most, negated, sum_, negated_sum = maxima[_OF_LINE * number : _OF_LINE * (number + 1)]
            if most != _NOTHING and (most != -negated or sum_ + negated_sum > _TOLERANCE):
                return number
        return None

    def told(self, number: int) -> tuple[bytes, list[float]] | None:
        """What a rank on that line tells the others; None elsewhere."""
        return (self._flags(number), self._norms(number).tolist()) if number in self._own else None

    def first(
        self, number: int, of_ranks: Sequence[tuple[bytes, list[float]] | None]
    ) -> tuple[Tensor, Position, Position, tuple[float, float] | None]:
        """The parameter that differs most, two positions at which it does, and its norms there.

        Without norms the first position has no gradient of it, and the other one has.

        Args:
            of_ranks: what all have :meth:`told`.
        """
        told = [(position, one) for position in self.lines[number] if (one := of_ranks[position]) is not None]
        line = [position for position, _ in told]
        for param, *said in zip(self._params[number], *(flags for _, (flags, _) in told), strict=True):
            if min(said) != max(said):
                return param, line[said.index(0)], line[said.index(1)], None
        norms = torch.tensor([of_rank for _, (_, of_rank) in told])
        least, greatest = norms.min(0), norms.max(0)
        worst = int((greatest.values / least.values).argmax())
        present = [param for param in self._params[number] if param.grad is not None]
        param = (present or self._params[number])[worst]
        ends = line[int(least.indices[worst])], line[int(greatest.indices[worst])]
        return param, *ends, (float(least.values[worst]), float(greatest.values[worst]))

    def _flags(self, number: int) -> bytes:
        return bytes(param.grad is not None for param in self._params[number])

    def _norms(self, number: int) -> Tensor:
        """Of samples of the gradients that are there, fp32; 1 where they cannot be compared yet."""
        grads = [(param, param.grad) for param in self._params[number] if param.grad is not None]
        samples = [_sample(param, grad) for param, grad in grads]
        if not samples:
            return torch.ones(1, device=local_tensor(self._params[number][0]).device)
        widest = torch.float64 if any(sample.dtype is torch.float64 for sample in samples) else torch.float32
        norms = torch.stack(torch._foreach_norm(samples, 2, dtype=widest)).float()
        norms = norms.nan_to_num(nan=_NOT_FINITE, posinf=_NOT_FINITE).clamp(1 / _NOT_FINITE, _NOT_FINITE)
        return torch.maximum(norms, norms.max() * _FLOOR)


def _sample(param: Tensor, grad: Tensor) -> Tensor:
    local = local_tensor(grad)
    partial = isinstance(grad, DTensor) and isinstance(param, DTensor) and grad.placements != param.placements
    if partial or local.layout is not torch.strided:  # copies have other parts of it before it is reduced
        return local_tensor(param).new_ones(1)
    if local.is_complex():
        local = torch.view_as_real(local)
    return local.view(-1)[:_SAMPLE] if local.numel() > _SAMPLE and local.is_contiguous() else local
