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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from dmuon.model.matrix_spec import spec_of
from dmuon.platform.torch_private import local_tensor
from dmuon.step.batches import Batch, SharedBatch
from dmuon.step.scaling import EPS, Arrived, Scaling, fold_moments, over_norms


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The rows of the matrices of one batch of which this rank has elements, ``r`` of each.

    Attributes:
        thin: the batch with one input, which lies in moments as the batch does in parameters.
        at: where the rows are in the whole matrix, ``(r,)``, if ranks share that.
        first: of the ranks that count in sums and have these rows.
        joins_squares, joins_norms: over the domain, the same on all its ranks.
    """

    thin: Batch
    at: Tensor
    first: bool = True
    joins_squares: bool = False
    joins_norms: bool = False


class RowMoments(Scaling):
    """``v`` of all matrices of some groups, shaped as their local tensors with one input.

    Args:
        params: of the groups.
        batches: all that this rank has of them.
    """

    key = "row_second_moment"

    def __init__(self, params: Iterable[Tensor], batches: Sequence[Batch]) -> None:
        self._rows = {id(batch): _rows_of(batch) for batch in batches}
        lengths: dict[int, int] = {}  # of what is flat
        for batch in batches:
            region = self._rows[id(batch)].thin.region
            if region is None:
                continue
            for param in batch.params:
                lengths[id(param)] = max(lengths.get(id(param), 0), region.offset + prod(region.stack))
        self.moments = {}
        for param in params:
            local = local_tensor(param)
            flat = local.ndim < param.ndim
            shape = (lengths.get(id(param), 0),) if flat else spec_of(param).with_one_input(local.shape)
            wide = torch.promote_types(local.dtype, torch.float32)
            self.moments[id(param)] = torch.zeros(shape, dtype=wide, device=local.device)

    def stages(self, group: Mapping[str, Any], arrived: Sequence[Arrived]) -> Iterator[tuple[Sequence[Tensor], str]]:
        every = [(one, one.batch, self._rows[id(one.batch)]) for one in arrived]
        squares: list[Tensor] = []
        sums: dict[int, Tensor] = {}
        for i, (one, batch, rows) in enumerate(every):
            if one.update is None:
                squares.append(torch.zeros(batch.count, len(rows.at), dtype=batch.dtype, device=batch.device))
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
                means = squares[i][one.rows(run)] / batch.shape[not batch.transposed]
                moments = [self.moments[id(param)] for param in batch.params[slice(*run)]]
                folded = fold_moments(rows.thin, moments, means.unsqueeze(_inputs(batch)), group["second_moment_beta"])
                factors[i][one.rows(run)] = folded.view(means.shape).sqrt_().add_(EPS).reciprocal_()
            of_matrices.append((squares[i] * factors[i].square()).sum(1))
        norms_of = [pair for pair in zip(of_matrices, every, strict=True) if pair[1][2].joins_norms]
        yield [norms if rows.first else norms.zero_() for norms, (_, _, rows) in norms_of], "norms of scaled rows"

        for (one, batch, _), of_rows, of_batch in zip(every, factors, of_matrices, strict=True):
            if one.update is not None:
                factor = of_rows * over_norms(batch.shape, of_batch).unsqueeze(1)
                one.update = (one.update * factor.unsqueeze(_inputs(batch))).to(one.update.dtype)


def _rows_of(batch: Batch) -> _Rows:
    region, out, into = batch.region, int(batch.transposed), int(not batch.transposed)
    thin = batch
    if region is not None:
        count, *sides = region.stack
        stack = (count, 1, sides[1]) if batch.transposed else (count, sides[0], 1)
        runs = region.runs if region.dim == 1 + out else ((0, 1),)
        thin = replace(batch, region=replace(region, stack=stack, runs=runs, offset=region.row_offset))
    if not isinstance(batch, SharedBatch):
        return _Rows(thin, torch.empty(0, dtype=torch.int64))
    parcel, position = batch.parcel, batch.domain.position
    whole = tuple(((0, length),) for length in batch.shape)
    senders = {sender: piece.runs for sender, piece in parcel.to_owner.senders.items()}
    held = parcel.spread.pieces[position].runs[out] if position in parcel.spread.pieces else ()
    return _Rows(
        thin,
        torch.tensor([row for run in held for row in range(*run)], dtype=torch.int64, device=batch.device),
        first=position == min((sender for sender, runs in senders.items() if runs[out] == held), default=None),
        # Also of a rank with no input, which has a copy of the moments.
        joins_squares=parcel.spread.copies > 1
        or any(piece.runs[into] != whole[into] for piece in parcel.spread.pieces.values()),
        joins_norms=any(runs[out] != whole[out] for runs in senders.values()),
    )


def _inputs(batch: Batch) -> int:
    """The dimension of ``(k, …)`` along which inputs lie."""
    return 1 if batch.transposed else 2
