"""Ranks that are slower in a step than the plan takes them for, and the plan that would suit them."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from socket import gethostname
from typing import Any

import torch.distributed as dist
import torch.nn as nn

from dmuon.comm.agreement import agree, run_awaited
from dmuon.comm.process_groups import broadcast_object, this_rank
from dmuon.dedicated.dedication import require_dedicated
from dmuon.optimizer.muon import Muon
from dmuon.planning.agreed_plan import planned_ranks
from dmuon.planning.owner_plan import OwnerPlan, reason_of
from dmuon.platform.log import logger
from dmuon.solver import SolveOptions
from dmuon.solver import plan as solve_plan

_log = logger(__name__)
_PHASES = ("ns", "ns in backward")
_ALIKE = 0.1  # ranks that differ by less count as alike: plans must not follow noise
_STEPS = 20  # to a speed of 1: speeds in between are rounded, so that many ranks are of few kinds
_MOST = 100.0  # speed


def rebalanced_plan(model: nn.Module, optimizer: Muon, solve: SolveOptions | None = None) -> OwnerPlan:
    """The plan that suits ranks as fast as they were in the last step: a straggler owns less.

    Compares the time that Newton–Schulz took on each rank with what its matrices cost by the plan; ranks within 10 % of
    the median count as alike. The log names the others. Nothing moves: save the plan, and give it to the next run,
    ``dedicate_params(model, mesh, plan=…)``, which loads any checkpoint. Waits for an accelerator. Collective over the
    ranks of ``model``.

    Args:
        model: as it was given to ``dedicate_params``.
        solve: options of the solver.

    Returns:
        The model's own plan, if no rank differs and it was made so. Memory is not looked at.

    Raises:
        ValueError: on every rank: the model was not dedicated, the plan does not know its costs, no step was taken yet,
            or the solver found nothing.
    """
    dedications = require_dedicated(model)
    if len(dedications) > 1:
        raise ValueError("several models inside of this one were dedicated; ask for the plan of one of them")
    plan, comm, pools = dedications[0].plan, dedications[0].runtime.comm, dedications[0].pools
    ranks = comm.topology.ranks
    position = ranks.index(this_rank())
    seconds = sum(optimizer.last_step.seconds.get(phase, 0.0) for phase in _PHASES)
    works = _work_of(plan)
    fault = None
    if works is None:
        fault = "the plan of the model does not know what its matrices cost; plan it anew, without plan="
    elif works[position] and not seconds:
        fault = "the optimizer has taken no step yet that this rank took part in; train some steps first"
    said = agree(comm.control, fault, (position, seconds, gethostname()))
    assert works is not None
    took, hosts = [0.0] * plan.world, [""] * plan.world
    for place, seconds_there, host in said:
        took[place], hosts[place] = seconds_there, host
    speeds = speeds_of(works, took)
    if all(speed == 1 for speed in speeds) and list(plan.solution.loads_ns) == works:
        return plan  # which takes all ranks as alike, too

    def find() -> list[Any]:
        """Error and document, on the first rank."""
        if dist.get_rank(comm.control) != 0:
            return [None, None]
        try:
            assert plan.costs is not None
            own = planned_ranks(hosts, plan.solution.starts_ns or (0,) * plan.world, pools, speeds)
            found = replace(plan, solution=solve_plan(plan.matrices, own, plan.costs, solve or SolveOptions()))
            _tell(ranks, works, took, speeds, found)
            return [None, found.to_json()]
        except Exception as error:  # every rank must hear of it, whatever it is
            return [reason_of(error), None]

    sent = run_awaited(comm.control, comm.device, "planning", find)
    if dist.get_world_size(comm.control) > 1:
        sent = broadcast_object(sent, comm.control, "the broadcast of the plan")
    error, document = sent
    if document is None:
        raise ValueError(f"no plan for ranks that differ: {error}")
    return OwnerPlan.from_json(document, plan.origin)


def speeds_of(works: Sequence[float], took: Sequence[float]) -> list[float]:
    """Of each rank relative to the median, from what its matrices cost and what they took; 1 where it has none."""
    rates = [work / seconds if work and seconds else None for work, seconds in zip(works, took, strict=True)]
    known = [rate for rate in rates if rate is not None]
    typical = statistics.median(known) if known else 1.0
    return [1.0 if rate is None else _rounded(rate / typical) for rate in rates]


def _rounded(speed: float) -> float:
    """A relative speed without its noise."""
    return 1.0 if abs(speed - 1.0) <= _ALIKE else min(max(1, round(speed * _STEPS)) / _STEPS, _MOST)


def _work_of(plan: OwnerPlan) -> list[int] | None:
    """By position, what its matrices cost on a rank that is as fast as the costs say; None if these are not known."""
    if plan.costs is None:
        return None
    works = [0] * plan.world
    for (position, shape), count in Counter((plan.owners[m.name], m.shape) for m in plan.matrices).items():
        works[position] += plan.costs.cost(shape, count)
    return works


def _tell(
    ranks: Sequence[int], works: Sequence[int], took: Sequence[float], speeds: Sequence[float], found: OwnerPlan
) -> None:
    """What a straggler takes, and the slowest rank would by the plan that was found."""
    rate = statistics.median(seconds / work for work, seconds in zip(works, took, strict=True) if work and seconds)
    for rank, speed, seconds in zip(ranks, speeds, took, strict=True):
        if speed != 1:
            _log.warning(
                "rank %d computes at %.2f of the median speed: Newton-Schulz took %.2f ms there, and %.2f ms on the "
                "slowest rank; by the plan that was found it would take %.2f ms on the slowest",
                rank,
                speed,
                1e3 * seconds,
                1e3 * max(took),
                1e3 * rate * found.solution.makespan_ns,
            )
