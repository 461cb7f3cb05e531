"""What an optimizer tells the log: where its matrices live, what looks wrong about them, and what computes them."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec

import torch.distributed as dist
from torch import Tensor

from dmuon.comm.process_groups import this_rank
from dmuon.dedicated.dedication import Dedicated
from dmuon.dedicated.owned_tensor import OwnedTensor
from dmuon.kernels import HALF, products_on
from dmuon.model.makeup import ModuleTree, longest_path, looks_fused, makeup_of, sites_of
from dmuon.model.matrix_spec import spec_of
from dmuon.platform.host import logger
from dmuon.step.residency import Alone, Residency
from dmuon.step.rounds import Round
from dmuon.step.update import numerics_of

_P = ParamSpec("_P")

_log = logger(__name__)

_NAMED = 3  # of what is alike
_LARGE = 0.02  # learning rate of a group: Keller Jordan's default, and more than is usual on AdamW's scale
_OF_TORCH = {"lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps"}  # not adjust_lr_fn


def tell_scale(init: Callable[_P, None]) -> Callable[_P, None]:
    """Let the constructor warn of a learning rate that seems to be on the scale of another library's Muon.

    A call is suspected that ``torch.optim.Muon`` would take too, and that names no ``adjust_lr_fn``: a list of matrices
    and options, or groups with a large learning rate, which are Keller Jordan's.
    """
    call = inspect.signature(init)

    @functools.wraps(init)
    def told(*args: _P.args, **kwargs: _P.kwargs) -> None:
        init(*args, **kwargs)
        given = call.bind(*args, **kwargs).arguments
        params, lr = given["params"], given.get("lr", call.parameters["lr"].default)
        options = given.keys() - {"self", "params"}
        if not isinstance(params, list) or not options <= _OF_TORCH or this_rank() != 0:
            return
        matrices = all(isinstance(p, Tensor) and not isinstance(p, OwnedTensor) and p.ndim == 2 for p in params)
        groups = [g for g in params if isinstance(g, Mapping) and g["use_muon"] and "adjust_lr_fn" not in g]
        large = [rate for g in groups if isinstance(rate := g.get("lr", lr), float) and rate >= _LARGE]
        if large or (matrices and options):
            _log.warning(
                "lr=%s is read on AdamW's scale, which updates a 1024 x 1024 matrix 6.4 times as much as "
                'torch.optim.Muon and Keller Jordan\'s Muon do: pass adjust_lr_fn="original" to keep their scale, or '
                'adjust_lr_fn="match_rms_adamw" if this is meant',
                large[0] if large else lr,
            )

    return told


def tell_first_step(groups: Iterable[Mapping[str, Any]], residencies: Sequence[Residency]) -> None:
    """Once, by one of the ranks that share matrices: where they live, and which look like several.

    What none of the groups has is told on every rank.
    """
    _warn_of_left_out(groups, [residency for residency in residencies if isinstance(residency, Dedicated)])
    if not _speaks(residencies):
        return
    for line in taken_whole(residencies):
        _log.warning("%s", line)
    if not _log.isEnabledFor(logging.INFO):
        return
    owned = sum(len(residency.params) for residency in residencies if isinstance(residency, Dedicated))
    alone = [p.requires_grad for residency in residencies if isinstance(residency, Alone) for p in residency.params]
    others = [group["params"] for group in groups if not group["use_muon"]]
    exchanged = sum(len(group["params"]) for group in groups if group["use_muon"]) - owned - len(alone)
    _log.info(
        "Muon takes %d parameters that dmuon owns, %d that other layouts shard or replicate and %d that no other "
        "rank is known to have; AdamW takes %d%s",
        owned,
        exchanged,
        sum(alone),
        sum(map(len, others)),
        "" if all(alone) else f"; {alone.count(False)} matrices are frozen, and Muon's when they train",
    )


def _warn_of_left_out(groups: Iterable[Mapping[str, Any]], residencies: Iterable[Dedicated]) -> None:
    """Say that parameters have a gradient and are in none of an optimizer's groups."""
    held = {id(p) for group in groups for p in group["params"]}
    names = [name for residency in residencies for name in residency.left_out(held)]
    if names:
        _log.warning(
            "Muon: %d parameters have a gradient and are in no group, so this optimizer does not train them: %s; "
            "another optimizer must, or pass the model, or dmuon.param_groups(model)",
            len(names),
            ", ".join(map(repr, names[:6])) + (", …" if len(names) > 6 else ""),
        )


def tell_products(
    groups: Sequence[Mapping[str, Any]], residencies: Sequence[Residency], rounds: Sequence[Round]
) -> None:
    """What computes symmetric products on GPUs. All ranks decide it here: quack's trial would hold up a step."""
    batches = [(groups[round_.index], batch) for round_ in rounds for batch in round_.batches]
    on_gpus = [(group, batch) for group, batch in batches if batch.device.type == "cuda"]
    found = {(batch.device, numerics_of(group, batch.dtype, batch.device).storage) for group, batch in on_gpus}
    for device, storage in sorted(found, key=str):
        if storage in HALF:  # others take whole products
            backend, others = products_on(device, storage)
            if _speaks(residencies):
                why = f" ({others})" if others else ""
                _log.info("large symmetric products of %s on %s are computed by %s%s", storage, device, backend, why)


def _speaks(residencies: Iterable[Residency]) -> bool:
    """Whether this rank is the first of some that share matrices, or the first of all where none do."""
    groups = [group for residency in residencies for group, _ in residency.loading_groups()]
    return any(dist.get_rank(group) == 0 for group in groups) if groups else this_rank() == 0


def taken_whole(residencies: Sequence[Residency]) -> list[str]:
    """A line if something looks like several matrices that Muon has as one: by its sizes, or since a user said so."""
    params = {id(p): p for residency in residencies for p in residency.params if p.requires_grad}.values()
    whole = [param for param in params if param.ndim > 1 and spec_of(param).is_whole]
    tree, sites = sites_of(whole) if whole else (ModuleTree([]), {})
    names = []
    for param in whole:
        holders = sites.get(id(param), ())
        if holders and not makeup_of(tree, param, holders).known:
            looks = [site for site in holders if looks_fused(tree, *site, param)]
            names += [repr(longest_path(tree.above(*site))) for site in looks[:1]]
    if not names:
        return []
    more = f" and {len(names) - _NAMED} more" if names[_NAMED:] else ""
    return [
        f"{', '.join(names[:_NAMED])}{more}: looks like several projections fused into one tensor, and is "
        "orthogonalized as one matrix; if it is several, let select return the dmuon.MatrixSpec that says which"
    ]
