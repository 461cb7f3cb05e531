"""What dmuon tells of a model and of its ranks; what finds it out is loaded with the first question."""

from __future__ import annotations

from importlib import import_module

import torch
import torch.nn as nn

from dmuon.optimizer.muon import Muon
from dmuon.planning.owner_plan import OwnerPlan
from dmuon.solver import SolveOptions


def explain(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, max_rows: int | None = 100) -> str:
    """Matrix by matrix what becomes of it and why, sums per rank, dtypes, warnings, and what the optimizer did last.

    Of each matrix: of which tensor it is a part, where it lies, its owner, the batched Newton-Schulz call that takes it
    and with how many others, how that runs, its share of the time that the plan predicts for its owner, the bytes of
    its weight and momentum on this rank, and the bytes that this rank sends and receives for it in a step of one
    micro-batch. Communicates nothing, so that one rank may call it alone.

    Args:
        model: any; of one that did not go through ``dedicate_params`` the optimizer knows the owners.
        optimizer: a ``dmuon.Muon``, whose groups are then the routes; adds what it exchanges, what costs more than it
            should, and counters of its last step on this rank.
        max_rows: a table with more rows tells those as one that differ in the numbers in their names only; their times
            and bytes are sums. None shows every matrix.

    Raises:
        ValueError: without an optimizer, Muon would refuse the model; ``max_rows`` is no positive integer.
        TypeError: ``optimizer`` is not a ``dmuon.Muon``.
    """
    text: str = import_module(f"{__name__}.tables").explain(model, optimizer, max_rows)
    return text


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
    plan: OwnerPlan = import_module(f"{__name__}.stragglers").rebalanced_plan(model, optimizer, solve)
    return plan
