"""AdaMuon (Si et al., arXiv 2507.11005): the second moment of the elements of updates, of signs of momentum.

Of the momentum ``M`` of a matrix with ``m`` outputs and ``n`` inputs, and ``V``, zeros at first::

    O = orthogonalize(sign(M))
    V ← β₂ V + (1 - β₂) · O ⊙ O          (m, n)
    Ô = O ⊘ (√V + ε)
    W ← (1 - η λ) W - γ η Ô               where γ = 0.2 √(mn) / ‖Ô‖

``√min(m, n) · Ô / ‖Ô‖`` has the norm of an orthogonal factor, and stands for ``O``, as in NorMuon. With Nesterov's
average in place of ``M``, as in its authors' code, or without, as in the paper: that is ``nesterov``. The paper has one
``β`` for both averages.

Signs are taken of whatever part of the momentum a rank has, before it travels; and ``V`` needs nothing of other ranks.
One all-reduce joins the norms of ``Ô`` where ranks have parts, or copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dmuon.kernels import momentum_update, normalized_update
from dmuon.platform.torch_private import local_tensor
from dmuon.step.scaling import EPS, Arrived, Scaling, fold_moments, joined, over_norms


class ElementMoments(Scaling):
    """``V`` of all matrices of some groups."""

    key = "element_second_moment"

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.moments = {}
        for param in params:
            local = local_tensor(param)
            wide = torch.promote_types(local.dtype, torch.float32)
            self.moments[id(param)] = torch.zeros(local.shape, dtype=wide, device=local.device)

    def stages(self, group: Mapping[str, Any], arrived: Sequence[Arrived]) -> Iterator[tuple[Sequence[Tensor], str]]:
        scaled: list[Tensor | None] = []
        norms: list[Tensor] = []
        for one in arrived:
            of_batch = torch.zeros(one.count, dtype=one.batch.dtype, device=one.batch.device)
            found = None
            if one.update is not None:
                found = torch.zeros_like(one.update, dtype=one.batch.dtype)
                for run in one.runs:
                    update = one.update[one.rows(run)].to(found.dtype)
                    moments = [self.moments[id(param)] for param in one.batch.params[slice(*run)]]
                    folded = fold_moments(one.batch, moments, update.square(), group["second_moment_beta"])
                    found[one.rows(run)] = update / folded.sqrt_().add_(EPS)
                of_batch.copy_(torch.linalg.vector_norm(found, dim=(1, 2))).square_()
            scaled.append(found)
            norms.append(of_batch)
        yield joined(arrived, norms), "norms of scaled elements"

        for one, found, of_batch in zip(arrived, scaled, norms, strict=True):
            if one.update is not None and found is not None:
                one.update = found.mul_(over_norms(one.batch.shape, of_batch).view(-1, 1, 1)).to(one.update.dtype)


def of_signs(
    kernel: Callable[..., Any],
    grads: Sequence[Tensor],
    momentum: Tensor,
    *norms: Tensor,
    beta: float,
    nesterov: bool,
    **options: Any,
) -> Any:
    """What ``kernel``, a pass over gradients and momentum, makes of the signs of what it would have made it of.

    Signs are taken before anything is rounded, or divided. What is not finite becomes NaN: torch's sign of that is
    zero, which would hide it.

    Args:
        norms: of signs, for ``normalized_update``: gradients are in momentum already.
    """
    if norms:
        ones, wide = torch.ones_like(norms[0]), momentum.dtype
        update = normalized_update(grads, momentum, ones, beta=beta, nesterov=nesterov, storage=wide)
    else:
        update = momentum_update(grads, momentum, beta=beta, nesterov=nesterov)
    signs = update.sign().add_(update.mul_(0.0))
    return kernel(list(signs.unbind(0)), signs, *norms, beta=0.0, nesterov=False, **options)
