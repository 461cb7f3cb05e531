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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from dmuon.model.matrix_spec import spec_of
from dmuon.platform.torch_private import local_tensor
from dmuon.step.batches import Batch, SharedBatch
from dmuon.step.scaling import EPS, Arrived, Scaling, over_norms


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The rows of the matrices of one batch of which this rank has elements, ``r`` of each.

    Attributes:
        moments: all of one dtype and device, flat.
        index: in these, ``(count, r)``.
        at: in the whole matrix, ``(r,)``.
        first: of the ranks that count in sums and have these rows.
        joins_squares, joins_norms: over the domain, the same on all its ranks.
    """

    moments: Tensor
    index: Tensor
    at: Tensor
    first: bool
    joins_squares: bool
    joins_norms: bool


class RowMoments(Scaling):
    """``v`` of all matrices of some groups, shaped as their local tensors with one input.

    Args:
        params: of the groups.
        batches: all that this rank has of them.
    """

    key = "row_second_moment"

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
        self.moments = {}
        moments: dict[object, Tensor] = {}
        for (device, dtype), of_kind in spans.items():
            flat_moments = moments[device, dtype] = torch.zeros(ends[device, dtype], dtype=dtype, device=device)
            parts = flat_moments.split([prod(shape) for _, shape in of_kind])
            for (key, shape), part in zip(of_kind, parts, strict=True):
                self.moments[key] = part.view(shape)
        self._rows: dict[int, _Rows] = {}  # by id of the batch
        for batch in batches:
            begin_of = [begins[id(param)] + _offset(batch) for param in batch.params]
            self._rows[id(batch)] = _rows_of(batch, moments[batch.device, batch.dtype], begin_of)

    def stages(self, group: Mapping[str, Any], arrived: Sequence[Arrived]) -> Iterator[tuple[Sequence[Tensor], str]]:
        every = [(one, one.batch, self._rows[id(one.batch)]) for one in arrived]
        squares: list[Tensor] = []
        sums: dict[int, Tensor] = {}
        for i, (one, batch, rows) in enumerate(every):
            if one.update is None:
                squares.append(torch.zeros(rows.index.shape, dtype=batch.dtype, device=batch.device))
            else:
                norms: Tensor = torch.linalg.vector_norm(one.update, dim=_inputs(batch), dtype=batch.dtype)
                squares.append(norms.square_())
            if rows.joins_squares:
                sums[i] = squares[i].new_zeros((batch.count, batch.shape[batch.transposed]))
                if one.is_counted:
                    sums[i][:, rows.at] = squares[i]
        yield list(sums.values()), "squares of rows"

        factors, of_matrices = list[Tensor](), list[Tensor]()
        for i, (one, batch, rows) in enumerate(every):
            if i in sums:
                squares[i] = sums[i][:, rows.at]
            factors.append(torch.zeros_like(squares[i]))
            for run in one.runs:
                some, index = one.rows(run), rows.index[run[0] * batch.each : run[1] * batch.each]
                factors[i][some] = _folded(group, batch, rows.moments, index, squares[i][some])
            of_matrices.append((squares[i] * factors[i].square()).sum(1))
        norms_of = [pair for pair in zip(of_matrices, every, strict=True) if pair[1][2].joins_norms]
        yield [norms if rows.first else norms.zero_() for norms, (_, _, rows) in norms_of], "norms of scaled rows"

        for (one, batch, _), of_rows, of_batch in zip(every, factors, of_matrices, strict=True):
            if one.update is not None:
                factor = of_rows * over_norms(batch.shape, of_batch).unsqueeze(1)
                one.update = (one.update * factor.unsqueeze(_inputs(batch))).to(one.update.dtype)


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
    first, joins_squares, joins_norms, at = True, False, False, here
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
    return _Rows(moments, rows, as_index(at), first, joins_squares, joins_norms)


def _inputs(batch: Batch) -> int:
    """The dimension of ``(k, …)`` along which inputs lie."""
    return 1 if batch.transposed else 2


def _folded(group: Mapping[str, Any], batch: Batch, moments: Tensor, index: Tensor, squares: Tensor) -> Tensor:
    """Fold sums of squares over whole rows into their moments; by what each row is multiplied, ``(k, r)``."""
    inputs = batch.shape[not batch.transposed]
    folded = moments[index].lerp_(squares / inputs, 1 - group["second_moment_beta"])
    moments[index] = folded
    return folded.sqrt_().add_(EPS).reciprocal_()
