"""What an optimizer tells: numbers of a step, matrix by matrix for whoever asked for a record, and lines in the log."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, prod
from typing import Any, ParamSpec

import torch
import torch.distributed as dist
from torch import Tensor

from dmuon.comm.norm import all_reduce
from dmuon.comm.process_groups import this_rank
from dmuon.dedicated.dedication import Dedicated
from dmuon.dedicated.owned_tensor import OwnedTensor
from dmuon.kernels import HALF, products_on
from dmuon.model.makeup import ModuleTree, longest_path, looks_fused, makeup_of, sites_of
from dmuon.model.matrix_spec import Names, spec_of
from dmuon.optimizer.wrapping import listed_names
from dmuon.platform.host import logger
from dmuon.step.residency import Alone, Residency
from dmuon.step.update import Done, Terms, numerics_of

_P = ParamSpec("_P")

_log = logger(__name__)


@dataclass(frozen=True, slots=True)
class StepStats:
    """What the last ``step()`` did on this rank.

    Attributes:
        ns_matrices: matrices that were orthogonalized.
        ns_batches: batched Newton-Schulz calls that took.
        seconds: per phase: ``momentum``, ``ns``, ``apply``, ``publish``, ``adamw``; ``exchange`` of what several
            ranks hold; ``momentum in backward`` and ``ns in backward`` with ``overlap_backward``.
        overlapped: batches among them that ran during backward and were still right.
        variants: per shape, small side first, how Newton-Schulz ran: form, restarts, back end, matrices at once.
        nonfinite: the matrices whose momentum holds NaN or infinity; their weights do now too, nobody else's.
        qk_logits: with ``qk_clip``, by attention module, the largest logit of each head over all ranks that share it;
            ``-inf`` of a head of which nobody noted any.
        qk_max_logit: the largest of these; NaN if there is one.
        qk_clipped: heads among them that passed the threshold, those left out that are NaN or infinite.
    """

    ns_matrices: int
    ns_batches: int
    seconds: dict[str, float]
    overlapped: int
    variants: dict[tuple[int, int], str]
    nonfinite: tuple[str, ...]
    qk_logits: dict[str, tuple[float, ...]] = field(default_factory=dict)
    qk_max_logit: float = -inf
    qk_clipped: int = 0


def step_stats(done: Sequence[Done], seconds: dict[str, float], overlapped: int, names: Names) -> StepStats:
    """Of the updates ``done``. Waits for an accelerator."""
    variants: dict[tuple[int, int], str] = {}
    nonfinite = []
    for one in done:
        small, large = sorted(one.shape)
        variants[small, large] = str(one.variant)
        finite = one.norms.isfinite().tolist()
        nonfinite += [label for label, ok in zip(one.matrices, finite, strict=True) if not ok]
    return StepStats(
        ns_matrices=sum(len(one.matrices) for one in done),
        ns_batches=len(done),
        seconds=seconds,
        overlapped=overlapped,
        variants=dict(sorted(variants.items())),
        nonfinite=tuple(_name(names, *label) for label in nonfinite),
    )


@dataclass(frozen=True, slots=True)
class MatrixStats:
    """What one step did to one matrix.

    Attributes:
        update_rms: root mean square of the elements of the update, without weight decay:
            ``‖W_new - (1 - lr · weight_decay) · W_old‖ / √(mn)``.
        effective_lr: what the orthogonal factor of the momentum was multiplied by: ``lr``, scaled by shape as
            ``adjust_lr_fn`` says.
        weight_norm: ``‖W_new‖``, the Frobenius norm after the step.
        update_ratio: the norm of the update over that of the weight.
    """

    update_rms: float
    effective_lr: float
    weight_norm: float
    update_ratio: float


class MatrixRecord:
    """What one step did to each matrix: as ``dmuon.Muon.record_next_step`` returns it, filled by the next step.

    The step computes norms on the device and waits for nothing. Reading waits for an accelerator.
    """

    def __init__(self) -> None:
        self._step: Sequence[Terms] | None = None
        self._residencies: Sequence[Residency] = ()
        self._names: Names = {}

    def fill(self, step: Sequence[Terms], residencies: Sequence[Residency], names: Names) -> None:
        """A step has been taken."""
        self._step, self._residencies, self._names = step, list(residencies), names

    def local(self) -> dict[str, MatrixStats]:
        """By name, of the matrices that this rank has whole. Communicates nothing.

        Those are what dmuon owns here, what this rank has alone, and what it has copies of. A matrix of a parameter
        that is made of several is called ``name[number]``.

        Raises:
            RuntimeError: the step has not been taken yet, or has failed.
        """
        terms = [one for one in self._terms() if one.numel == one.shape[0] * one.shape[1]]
        if not terms:
            return {}
        matrices = [(param, number, one.shape) for one in terms for param, number in one.labels]
        return self._named(matrices, torch.cat([one.columns for one in terms], 1))

    def gather(self) -> dict[str, MatrixStats]:
        """By name, of all matrices that this rank shares with others, and of those that it has alone.

        Collective over the ranks that share matrices: call it on all of them, or on none. All must have asked for a
        record of this step.

        Raises:
            RuntimeError: the step has not been taken yet, or has failed.
            CollectiveError: some of the ranks did not take part.
        """
        terms = self._terms()
        found = self.local()
        for residency in self._residencies:
            for shared in residency.shared():
                places = {(id(param), number): i for i, (param, number, _) in enumerate(shared.matrices)}
                summed = torch.zeros(4, len(places), dtype=torch.float64, device=shared.device)
                own = [one for one in terms if (id(one.labels[0][0]), one.labels[0][1]) in places]
                if own:
                    at = [places[id(param), number] for one in own for param, number in one.labels]
                    summed[:, torch.tensor(at, device=shared.device)] = torch.cat([one.columns for one in own], 1).to(
                        shared.device
                    )
                if dist.get_world_size(shared.group) > 1:
                    all_reduce(summed, dist.ReduceOp.SUM, shared.group, "statistics")
                found |= self._named(shared.matrices, summed)
        return found

    def _terms(self) -> Sequence[Terms]:
        if self._step is None:
            raise RuntimeError(
                "this record is empty: record_next_step() is for the step that follows, which was not taken or failed"
            )
        return self._step

    def _named(
        self, matrices: Sequence[tuple[Tensor, int | None, tuple[int, int]]], columns: Tensor
    ) -> dict[str, MatrixStats]:
        """By name, of those that were updated."""
        stats = [_stats_of(column, matrix[2]) for column, matrix in zip(columns.T.tolist(), matrices, strict=True)]
        pairs = zip(matrices, stats, strict=True)
        return {_name(self._names, *matrix[:2]): one for matrix, one in pairs if one is not None}


def _name(names: Names, param: Tensor, number: int | None) -> str:
    name = names.get(id(param), "a parameter that no group holds")
    return name if number is None else f"{name}[{number}]"


def _stats_of(total: Sequence[float], shape: tuple[int, int]) -> MatrixStats | None:
    """Of one matrix, whatever the number of copies; None of one that was not updated.

    Args:
        total: a column of :class:`Terms`, over all ranks that hold parts.
    """
    update, weight, elements, weighted = total
    if not elements:
        return None
    copies = elements / prod(shape)
    update_norm, weight_norm = (update / copies) ** 0.5, (weight / copies) ** 0.5
    if weight_norm:
        ratio = update_norm / weight_norm
    else:
        ratio = inf if update_norm else 0.0
    return MatrixStats(update_norm / prod(shape) ** 0.5, weighted / elements, weight_norm, ratio)


# -- the log: where matrices live, what looks wrong about them, and what computes them --------------------------------

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
            "Muon: %s have a gradient and are in no group, so this optimizer does not train them; another one must, or "
            "pass the model, or dmuon.param_groups(model)",
            listed_names(names),
        )


def tell_products(
    groups: Sequence[Mapping[str, Any]], residencies: Sequence[Residency], device: torch.device
) -> list[str]:
    """What computes symmetric products of each group on a GPU. All ranks decide it here: quack's trial takes long."""
    found = [("", "")] * len(groups)  # products of others than halves are whole
    for number, group in enumerate(groups if device.type == "cuda" else ()):
        storage = numerics_of(group, torch.float32, device).storage if group["use_muon"] else None
        if storage in HALF:
            found[number] = products_on(device, storage)
    for backend, others in sorted({*found} - {("", "")}) if _speaks(residencies) else ():
        why = f" ({others})" if others else ""
        _log.info("large symmetric products on %s are computed by %s%s", device, backend, why)
    return [backend for backend, _ in found]


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
            names += [longest_path(tree.above(*site)) for site in looks[:1]]
    if not names:
        return []
    return [
        f"{listed_names(names)}: looks like several projections fused into one tensor, and is orthogonalized as one "
        "matrix; if it is several, let select return the dmuon.MatrixSpec that says which"
    ]
