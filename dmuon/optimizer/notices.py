"""What an optimizer tells the log: at its first step where its matrices live, and whenever it is laid out anew."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from dmuon.comm.process_groups import this_rank
from dmuon.dedicated.residency import Dedicated
from dmuon.optimizer.advice import advice, taken_whole
from dmuon.platform.log import logger
from dmuon.step.residency import Alone, Residency
from dmuon.step.rounds import Round

_log = logger(__name__)


def tell_first_step(
    groups: Iterable[Mapping[str, Any]], residencies: Sequence[Residency], rounds: Sequence[Round]
) -> None:
    """Once, by one of the ranks that share matrices: where they live, and what costs more than it should."""
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
        "Muon takes %d parameters that dmuon owns, %d that are exchanged and %d that lie whole on this rank; AdamW "
        "takes %d%s",
        owned,
        exchanged,
        sum(alone),
        sum(map(len, others)),
        "" if all(alone) else f"; {alone.count(False)} matrices are frozen, and Muon's when they train",
    )
    for line in advice(residencies, rounds):
        _log.info("%s", line)


def tell_layout(why: str, rounds: Sequence[Round], prefetch: int) -> None:
    """On every rank, for maintainers."""
    if not _log.isEnabledFor(logging.DEBUG):
        return
    batches = [batch for round_ in rounds for batch in round_.batches]
    _log.debug(
        "Muon is laid out, as %s: %d rounds in a step, %d with collectives, %d ahead; %d batches of %d matrices",
        why,
        len(rounds),
        sum(round_.exchanged for round_ in rounds),
        prefetch,
        len(batches),
        sum(batch.count for batch in batches),
    )


def _speaks(residencies: Iterable[Residency]) -> bool:
    """Whether this rank is the first of some that share matrices, or the first of all where none do."""
    groups = [group for residency in residencies for group, _ in residency.loading_groups()]
    return any(dist.get_rank(group) == 0 for group in groups) if groups else this_rank() == 0
