"""A table for people: who owns what, why, and at what cost."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn as nn

from dmuon.dedicated.dedication import dedications
from dmuon.dedicated.runtime import Runtime
from dmuon.model.routing import Route, route_parameters
from dmuon.optimizer.groups import inside_ddp
from dmuon.optimizer.muon import Muon
from dmuon.report.accounting import expected_memory, expected_traffic

__all__ = ["explain"]


def explain(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
    """Routes with reasons, owners per matrix, predicted loads, dtypes, and what the optimizer did last.

    Args:
        model: any; of one that did not go through ``dedicate_params`` the optimizer knows the owners.
        optimizer: a ``dmuon.Muon``, to add what it exchanges, and counters of its last step on this rank.

    Raises:
        ValueError: Muon would take no matrix of the model.
        TypeError: ``optimizer`` is not a ``dmuon.Muon``.
    """
    found = dedications(model)
    if optimizer is not None and not isinstance(optimizer, Muon):
        raise TypeError(f"optimizer must be a dmuon.Muon, got {type(optimizer).__name__}")
    exchanged = [] if optimizer is None else optimizer.exchanged()
    lines: list[str] = [] if found else _routes(model, optimizer)
    if exchanged:
        lines += ["", "exchanged matrices"]
        rows = [("matrix", "shape", "lies as", "on ranks", "owner")]
        lines += _table(rows + [(e.name, e.shape, e.lies_as, e.ranks, str(e.owner)) for e in exchanged])
        lines += ["", *optimizer.exchange_report()] if optimizer is not None else []
    for dedication in found:
        plan, runtime = dedication.plan, dedication.runtime
        owners = plan.owners
        lines += ["owned matrices"]
        rows = [("matrix", "shape", "block", "owner", "why")]
        rows += [
            (m.name, f"{m.rows}x{m.cols}", m.block, str(owners[m.name]), dedication.reasons[m.name][1])
            for m in plan.matrices
        ]
        lines += _table(rows)
        rest = [(name, why) for name, (muon, why) in dedication.reasons.items() if not muon]
        lines += ["", "on AdamW"]
        lines += _table([("parameter", "why"), *rest])
        elements = sum(m.rows * m.cols for m in plan.matrices)
        lines += [
            "",
            f"Muon: {len(plan.matrices)} matrices, {elements:,} elements; "
            f"AdamW: {len(rest)} parameters, {dedication.adamw_elements:,} elements",
        ]
        kept = "kept after forward" if runtime.buffers[0].keep else "freed after forward"
        entries = list(runtime.entries())
        lines += [
            f"owned weights: {len({g.name for g in runtime.buffers})} blocks, "
            f"forward in {_unique(e.full.dtype for e in entries)}, "
            f"masters in {_unique(e.master.dtype for e in entries)}, "
            f"gradients reduced in {_unique(g.reduce_dtype for g in runtime.buffers)}, {kept}",
            *_budget(runtime),
            *_fsdp_line(model),
            "",
            plan.report(),
        ]
    if optimizer is not None:
        stats = optimizer.last_step
        phases = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in stats.seconds.items())
        lines += [
            "",
            f"last step on this rank: {stats.ns_matrices} matrices orthogonalized in {stats.ns_batches} batches; "
            f"{phases or 'no step yet'}",
        ]
        lines += [f"  {small}x{large}: {variant}" for (small, large), variant in stats.variants.items()]
        if stats.nonfinite:
            lines.append(f"not finite in the last step: {', '.join(stats.nonfinite)}")
    return "\n".join(lines)


def _routes(model: nn.Module, optimizer: Muon | None) -> list[str]:
    """Every parameter's route: as the optimizer has it, with the policy's reason."""
    routes = route_parameters(inside_ddp(model))
    taken = {r.fqn for r in routes if r.muon}
    if optimizer is not None:
        here = {id(p) for group in optimizer.param_groups if group["use_muon"] for p in group["params"]}
        taken = {r.fqn for r in routes if id(r.param) in here}

    def why(route: Route) -> str:
        return route.reason if route.muon == (route.fqn in taken) else "put there by a group or by select"

    def elements(muon: bool) -> int:
        return sum(r.param.numel() for r in routes if (r.fqn in taken) == muon)

    lines = ["matrices of Muon", *_table([("matrix", "why"), *((r.fqn, why(r)) for r in routes if r.fqn in taken)])]
    rest = [(r.fqn, why(r)) for r in routes if r.fqn not in taken]
    lines += ["", "on AdamW", *_table([("parameter", "why"), *rest]), ""]
    lines += [
        f"Muon: {len(taken)} parameters, {elements(True):,} elements; "
        f"AdamW: {len(rest)} parameters, {elements(False):,} elements"
    ]
    return lines


def _budget(runtime: Runtime) -> list[str]:
    memory, traffic = expected_memory(runtime), expected_traffic(runtime)
    topology = runtime.comm.topology
    sent = "; ".join(
        f"{purpose} {calls} calls, {_mib(traffic.nbytes[purpose])}" for purpose, calls in traffic.calls.items()
    )
    return [
        f"ranks: {topology.replicas} replicas x {topology.shards} shards"
        + (f" x {topology.tensor} tensor-parallel" if topology.tensor > 1 else ""),
        f"this rank holds: masters {_mib(memory.masters)}, momentum as much, gradients as much, stand-ins "
        f"{_mib(memory.standins)}, kept buffers {_mib(memory.kept)}, largest buffer {_mib(memory.largest)}",
        f"this rank sends in a step of one micro-batch: {sent or 'nothing'}",
    ]


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def _unique(dtypes: Iterable[torch.dtype]) -> str:
    return " and ".join(sorted({str(dtype) for dtype in dtypes}))


def _fsdp_line(model: nn.Module) -> list[str]:
    from torch.distributed.fsdp import FSDPModule

    sharded = sum(isinstance(m, FSDPModule) for m in model.modules())
    return [
        f"the rest: sharded by FSDP2 in {sharded} modules" if sharded else "the rest: replicated, averaged by dmuon"
    ]


def _table(rows: Iterable[tuple[str, ...]]) -> list[str]:
    table = list(rows)
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in table]
