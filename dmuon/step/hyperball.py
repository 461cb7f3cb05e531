"""Hyperball (Wen et al., arXiv 2606.16899): weights of a constant norm, and so no weight decay; with Muon "MuonH".

Of a matrix ``W`` with ``R = ‖W‖``, and its update ``u``, by whichever members of the family::

    W ← R · normalize(W - η R · normalize(u))

The learning rate ``η`` is what a step is of the weight, whatever its shape. ``R`` is read off the weight before each
step, which is that of the first one up to rounding, and of whatever weights were loaded since: so it is no state. A
matrix of zeros has no norm to keep. Its first step is as without hyperball, and what it has then stays.

With ``c`` the cosine of ``W`` and ``u`` and ``d = 1 - 2 η c + η²``, that is ``W ← (W - η R u / ‖u‖) / √d``: one
all-reduce of the three products of ``W`` and ``u`` with one another tells each rank what its part becomes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dmuon.kernels import update_scale
from dmuon.step.scaling import Arrived, Scaling, joined


class Hyperball(Scaling):
    """Makes of updates the differences to the points on the sphere, over the learning rate."""

    def stages(self, group: Mapping[str, Any], arrived: Sequence[Arrived]) -> Iterator[tuple[Sequence[Tensor], str]]:
        weights: list[Tensor | None] = []
        products: list[Tensor] = []
        for one in arrived:
            of_batch = torch.zeros(3, one.count, dtype=torch.float64, device=one.batch.device)
            weight = None
            if one.update is not None:
                weight, update = torch.stack(one.weights()).to(one.batch.dtype), one.update.to(one.batch.dtype)
                for row, (a, b) in zip(of_batch, ((weight, weight), (weight, update), (update, update)), strict=True):
                    row.copy_((a * b).sum((1, 2), dtype=torch.float64))
            weights.append(weight)
            products.append(of_batch)
        yield joined(arrived, products), "products of weights and updates"

        lr = group["lr"]
        for one, weight, (of_weight, of_both, of_update) in zip(arrived, weights, products, strict=True):
            if one.update is None or weight is None:
                continue
            plain = update_scale(group["adjust_lr_fn"], one.batch.scaled_shape)
            of_norms = (of_weight * of_update).sqrt()
            moves = of_norms != 0
            cosine = torch.where(moves, of_both / of_norms, 0.0)
            root = (1 - 2 * lr * cosine + lr**2).sqrt()
            # W - W_new = lr (kept · W + taken · u): the first is (1 - 1 / root) / lr, without its cancellation.
            kept = torch.where(moves, (lr - 2 * cosine) / (root * (1 + root)), 0.0)
            taken = torch.where(moves, (of_weight / of_update).sqrt() / root, torch.where(of_weight == 0, plain, 0.0))
            kept, taken = (factor.to(weight.dtype).view(-1, 1, 1) for factor in (kept, taken))
            one.update = weight.mul_(kept).add_(one.update * taken)
