"""NorMuon (arXiv 2510.05491): the second moment of the rows of updates, of matrices that lie anywhere.

Of the orthogonal factor ``O`` of the momentum of a matrix with ``m`` outputs and ``n`` inputs, and ``v``, zeros at
first::

    v ← β₂ v + (1 - β₂) · mean over the inputs of O ⊙ O          (m,)
    Ô = O ⊘ (√v + ε), row by row
    W ← (1 - η λ) W - η̂ Ô        where η̂ = 0.2 η √(mn) / ‖Ô‖

``√min(m, n) · Ô / ‖Ô‖`` has the norm of an orthogonal factor, and stands for ``O`` here. So learning rates are adjusted
by shape as without it; by ``"match_rms_adamw"`` that is the paper's ``η̂``. A row is an output, however it is stored.

Each rank has ``v`` of the rows of which it has elements. Where ranks have other columns of the same rows, or copies of
them, one all-reduce joins the sums of squares; where they have other rows, another one joins the norms of ``Ô``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dmuon.comm.domain import Domain
from dmuon.model.matrix_spec import spec_of
from dmuon.platform.torch_private import local_tensor
from dmuon.step.batches import Batch, SharedBatch

EPS = 1e-8


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The rows of the matrices of one batch of which this rank has elements, ``r`` of each.

    Attributes:
        moments: all of one dtype and device, flat.
        index: in these, ``(count, r)``.
        at: in the whole matrix, ``(r,)``.
        counted: what this rank has counts in sums over the domain; of copies those of the owner do.
        first: of the ranks that count and have these rows.
        joins_squares, joins_norms: over the domain, the same on all its ranks.
    """

    moments: Tensor
    index: Tensor
    at: Tensor
    counted: bool
    first: bool
    joins_squares: bool
    joins_norms: bool


class RowMoments:
    """``v`` of all matrices of some groups, which begins as zeros.

    Args:
        params: of the groups.
        batches: all that this rank has of them.

    Attributes:
        local: by ``id`` of the parameter, shaped as its local tensor with one input.
    """

    def __init__(self, params: Iterable[Tensor], batches: Sequence[Batch]) -> None:
        batches_of: dict[int, list[Batch]] = defaultdict(list)
        for batch in batches:
            for param in batch.params:
                batches_of[id(param)].append(batch)
        begins: dict[int, int] = {}  # by id of the parameter
        spans: dict[tuple[torch.device, torch.dtype], list[tuple[int, tuple[int, ...]]]] = {}
        ends: dict[tuple[torch.device, torch.dtype], int] = {}
        for param in params:
            local = local_tensor(param)
            kind = local.device, torch.promote_types(local.dtype, torch.float32)
            shape = spec_of(param).with_one_input(local.shape)
            if local.ndim < param.ndim:
                shape = (
                    max([_offset(batch) + prod(_stacked_rows(batch)) for batch in batches_of[id(param)]], default=0),
                )
            begins[id(param)] = ends.get(kind, 0)
            ends[kind] = begins[id(param)] + prod(shape)
            spans.setdefault(kind, []).append((id(param), shape))
        self.local: dict[int, Tensor] = {}
        moments: dict[object, Tensor] = {}
        for (device, dtype), of_kind in spans.items():
            flat_moments = moments[device, dtype] = torch.zeros(ends[device, dtype], dtype=dtype, device=device)
            parts = flat_moments.split([prod(shape) for _, shape in of_kind])
            for (key, shape), part in zip(of_kind, parts, strict=True):
                self.local[key] = part.view(shape)
        self._rows: dict[int, _Rows] = {}  # by id of the batch
        for batch in batches:
            begin_of = [begins[id(param)] + _offset(batch) for param in batch.params]
            self._rows[id(batch)] = _rows_of(batch, moments[batch.device, batch.dtype], begin_of)

    def scale_wholes(self, group: Mapping[str, Any], batch: Batch, run_of: tuple[int, int], update: Tensor) -> Tensor:
        """What takes the place of ``update``, ``(k, m, n)``, of whole matrices.

        Args:
            run_of: range of the batch's parameters.
        """
        rows, some = self._rows[id(batch)], slice(run_of[0] * batch.each, run_of[1] * batch.each)
        squares = _squares(update, batch)
        factors = _folded(group, batch, rows.moments, rows.index[some], squares)
        return _scaled(update, batch, factors, (squares * factors.square()).sum(1))

    def scale_parts(
        self, group: Mapping[str, Any], batches: Sequence[SharedBatch], updates: Mapping[int, Tensor], present: Set[int]
    ) -> dict[int, Tensor]:
        """What takes the place of ``updates``, of this rank's parts by number of the batch. Collective over the domain.

        Args:
            present: ids of the parameters that are updated.
        """
        every, domain = [(i, batch, self._rows[id(batch)]) for i, batch in enumerate(batches)], batches[0].domain
        squares: dict[int, Tensor] = {}
        for i, batch, rows in every:
            nothing = batch.momenta[0].new_zeros(rows.index.shape, dtype=batch.dtype, device=batch.device)
            squares[i] = _squares(updates[i], batch) if i in updates else nothing
        sums: dict[int, Tensor] = {}
        for i, batch, rows in every:
            if rows.joins_squares:
                sums[i] = squares[i].new_zeros((batch.count, batch.shape[batch.transposed]))
                if rows.counted:
                    sums[i][:, rows.at] = squares[i]
        _sum_over_ranks(sums, domain, "squares of rows")
        squares |= {i: of_whole[:, every[i][2].at] for i, of_whole in sums.items()}
        factors, norms = dict[int, Tensor](), dict[int, Tensor]()
        for i, batch, rows in every:
            factors[i] = torch.zeros_like(squares[i])
            for start, end in batch.runs(present):
                some = slice(start * batch.each, end * batch.each)
                factors[i][some] = _folded(group, batch, rows.moments, rows.index[some], squares[i][some])
            norms[i] = (squares[i] * factors[i].square()).sum(1)
        joined = {i: norms[i] if rows.first else norms[i].zero_() for i, _, rows in every if rows.joins_norms}
        _sum_over_ranks(joined, domain, "norms of scaled rows")
        return {i: _scaled(update, batches[i], factors[i], (norms | joined)[i]) for i, update in updates.items()}


def _offset(batch: Batch) -> int:
    return 0 if batch.region is None else batch.region.row_offset


def _stacked_rows(batch: Batch) -> tuple[int, int]:
    """Matrices of the stack that the local tensor is, or a part of it, and outputs of each."""
    if batch.region is None:
        return 1, batch.momenta[0].shape[batch.transposed]
    return batch.region.stack[0], batch.region.stack[1 + batch.transposed]


def _rows_of(batch: Batch, moments: Tensor, begins: Sequence[int]) -> _Rows:
    """``begins``: for each parameter, where in ``moments`` the stack begins."""
    region, (_, outputs) = batch.region, _stacked_rows(batch)
    matrices, here = range(1), [*range(outputs)]
    if region is not None:
        matrices = range(*region.span)
        if region.dim == 1 + batch.transposed:
            here = [i for start, stop in region.runs for i in range(start, stop)]
    index = [[begin + i * outputs + row for row in here] for begin in begins for i in matrices]
    counted, first, joins_squares, joins_norms, at = True, True, False, False, here
    if isinstance(batch, SharedBatch):
        parcel, position = batch.parcel, batch.domain.position
        whole = tuple(((0, length),) for length in batch.shape)
        senders = {sender: piece.runs for sender, piece in parcel.to_owner.senders.items()}
        out, into = int(batch.transposed), int(not batch.transposed)
        counted = position in senders
        first = counted and position == min(s for s, runs in senders.items() if runs[out] == senders[position][out])
        joins_squares = parcel.spread.copies > 1 or any(runs[into] != whole[into] for runs in senders.values())
        joins_norms = any(runs[out] != whole[out] for runs in senders.values())
        held = parcel.pieces[position].runs[out] if position in parcel.pieces else ()
        at = [row for start, stop in held for row in range(start, stop)]
        index = index or [[] for _ in range(batch.count)]
    as_index = partial(torch.tensor, dtype=torch.int64, device=batch.device)
    rows = as_index(index).view(batch.count, len(at))
    return _Rows(moments, rows, as_index(at), counted, first, joins_squares, joins_norms)


def _squares(update: Tensor, batch: Batch) -> Tensor:
    """Sums of squares over the inputs, ``(k, r)``."""
    norms: Tensor = torch.linalg.vector_norm(update, dim=1 if batch.transposed else 2, dtype=batch.dtype)
    return norms.square_()


def _folded(group: Mapping[str, Any], batch: Batch, moments: Tensor, index: Tensor, squares: Tensor) -> Tensor:
    """Fold sums of squares over whole rows into their moments; by what each row is multiplied, ``(k, r)``."""
    inputs = batch.shape[not batch.transposed]
    folded = moments[index].lerp_(squares / inputs, 1 - group["second_moment_beta"])
    moments[index] = folded
    return folded.sqrt_().add_(EPS).reciprocal_()


def _scaled(update: Tensor, batch: Batch, factors: Tensor, squared_norms: Tensor) -> Tensor:
    """``update`` times ``factors`` of its rows, over the norms that this gives whole matrices."""
    norms = squared_norms.sqrt()
    over = torch.where(norms == 0, 0.0, min(batch.shape) ** 0.5 / norms)
    of_rows = (factors * over.unsqueeze(1)).unsqueeze(1 if batch.transposed else 2)
    return (update * of_rows).to(update.dtype)


def _sum_over_ranks(tensors: Mapping[int, Tensor], domain: Domain, what: str) -> None:
    """Sum ``tensors`` over a domain, all ranks of which have them, in place."""
    if not tensors:
        return
    values = list(tensors.values())
    flat = torch.cat([value.reshape(-1) for value in values])
    launch = partial(dist.all_reduce, flat, group=domain.group, async_op=True)
    domain.monitor.start(domain.lane, f"{what} of {len(values)} batches", launch).wait()
    parts = flat.split([value.numel() for value in values])
    torch._foreach_copy_(values, [part.view(value.shape) for part, value in zip(parts, values, strict=True)])
