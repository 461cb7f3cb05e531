"""A table for people: who owns what, why, and at what cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from dmuon.dedicated.dedication import Dedication, dedications
from dmuon.dedicated.part import parameter_of
from dmuon.dedicated.runtime import Runtime
from dmuon.model.routing import Route, route_parameters
from dmuon.optimizer.groups import inside_ddp
from dmuon.optimizer.muon import Muon
from dmuon.report.accounting import expected_memory, expected_traffic


def explain(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
    """Routes with reasons, owners per matrix, predicted loads, dtypes, and what the optimizer did last.

    Args:
        model: any; of one that did not go through ``dedicate_params`` the optimizer knows the owners.
        optimizer: a ``dmuon.Muon``, to add what it exchanges, and counters of its last step on this rank.

    Raises:
        ValueError: Muon would take no matrix of the model.
        TypeError: ``optimizer`` is not a ``dmuon.Muon``.
    """
    if optimizer is not None and not isinstance(optimizer, Muon):
        raise TypeError(f"optimizer must be a dmuon.Muon, got {type(optimizer).__name__}")
    dedicated = dedications(model)
    lines = [] if dedicated else _routes(model, optimizer)
    if optimizer is not None:
        lines += _exchanged(optimizer)
    for dedication in dedicated:
        lines += [*_owned(dedication), *_runtime(dedication.runtime), *_rest(model), ""]
        lines.append(dedication.plan.report())
    if optimizer is not None:
        lines += _last_step(optimizer)
    return "\n".join(lines)


def _exchanged(optimizer: Muon) -> list[str]:
    """Matrices that lie where FSDP2, tensor parallelism or DDP put them."""
    exchanged = optimizer.exchanged()
    if not exchanged:
        return []
    rows = [(e.name, e.shape, e.lies_as, e.ranks, str(e.owner)) for e in exchanged]
    table = _table([("matrix", "shape", "lies as", "on ranks", "owner"), *rows])
    return ["", "exchanged matrices", *table, "", *optimizer.exchange_report()]


def _owned(dedication: Dedication) -> list[str]:
    """Matrices that lie whole on their owner, and what Muon leaves."""
    matrices, owners = dedication.plan.matrices, dedication.plan.owners
    reasons = dedication.reasons
    rows = [
        (m.name, f"{m.rows}x{m.cols}", m.block, str(owners[m.name]), reasons[parameter_of(m.name, reasons)][1])
        for m in matrices
    ]
    rest = [(name, why) for name, (muon, why) in dedication.reasons.items() if not muon]
    muon = f"{len(matrices)} matrices, {sum(m.rows * m.cols for m in matrices):,}"
    return [
        "owned matrices",
        *_table([("matrix", "shape", "block", "owner", "why"), *rows]),
        *_on_adamw(rest, muon, dedication.adamw_elements),
    ]


def _on_adamw(rest: Sequence[tuple[str, str]], muon: str, elements: int) -> list[str]:
    """What Muon leaves, with reasons, and how much of the model either takes: ``muon``, and so many ``elements``."""
    sums = f"Muon: {muon} elements; AdamW: {len(rest)} parameters, {elements:,} elements"
    return ["", "on AdamW", *_table([("parameter", "why"), *rest]), "", sums]


def _runtime(runtime: Runtime) -> list[str]:
    """Dtypes, memory and traffic of the owned weights."""
    entries = list(runtime.matrices())
    memory, traffic = expected_memory(runtime), expected_traffic(runtime)
    topology = runtime.comm.topology
    sent = "; ".join(
        f"{purpose} {calls} calls, {_mib(traffic.nbytes[purpose])}" for purpose, calls in traffic.calls.items()
    )
    return [
        f"owned weights: {len({b.name for b in runtime.buffers})} blocks, "
        f"forward in {_unique(e.full.dtype for e in entries)}, "
        f"masters in {_unique(e.master.dtype for e in entries)}, "
        f"gradients reduced in {_unique(b.reduce_dtype for b in runtime.buffers)}, "
        f"{'kept' if runtime.buffers[0].keep else 'freed'} after forward",
        f"ranks: {topology.replicas} replicas x {topology.shards} shards"
        + (f" x {topology.tensor} tensor-parallel" if topology.tensor > 1 else ""),
        f"this rank holds: masters {_mib(memory.masters)}, momentum as much, gradients as much, stand-ins "
        f"{_mib(memory.standins)}, kept buffers {_mib(memory.kept)}, largest buffer {_mib(memory.largest)}",
        f"this rank sends in a step of one micro-batch: {sent or 'nothing'}",
    ]


def _last_step(optimizer: Muon) -> list[str]:
    """What this rank did in the last step."""
    stats = optimizer.last_step
    phases = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in stats.seconds.items())
    lines = [
        "",
        f"last step on this rank: {stats.ns_matrices} matrices orthogonalized in {stats.ns_batches} batches; "
        f"{phases or 'no step yet'}",
        *(f"  {small}x{large}: {variant}" for (small, large), variant in stats.variants.items()),
    ]
    if stats.nonfinite:
        lines.append(f"not finite in the last step: {', '.join(stats.nonfinite)}")
    return lines


def _routes(model: nn.Module, optimizer: Muon | None) -> list[str]:
    """Every parameter's route: as the optimizer has it, with the policy's reason."""
    routes = route_parameters(inside_ddp(model))
    taken = {r.fqn for r in routes if r.muon}
    if optimizer is not None:
        ids = {id(p) for group in optimizer.param_groups if group["use_muon"] for p in group["params"]}
        taken = {r.fqn for r in routes if id(r.param) in ids}

    def why(route: Route) -> str:
        return route.reason if route.muon == (route.fqn in taken) else "put there by a group or by select"

    def elements(muon: bool) -> int:
        return sum(r.param.numel() for r in routes if (r.fqn in taken) == muon)

    lines = ["matrices of Muon", *_table([("matrix", "why"), *((r.fqn, why(r)) for r in routes if r.fqn in taken)])]
    rest = [(r.fqn, why(r)) for r in routes if r.fqn not in taken]
    return lines + _on_adamw(rest, f"{len(taken)} parameters, {elements(True):,}", elements(False))


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def _unique(dtypes: Iterable[torch.dtype]) -> str:
    return " and ".join(sorted({str(dtype) for dtype in dtypes}))


def _rest(model: nn.Module) -> list[str]:
    """Who has the parameters that dmuon does not own."""
    sharded = sum(isinstance(m, FSDPModule) for m in model.modules())
    return [
        f"the rest: sharded by FSDP2 in {sharded} modules" if sharded else "the rest: replicated, averaged by dmuon"
    ]


def _table(rows: Iterable[tuple[str, ...]]) -> list[str]:
    table = list(rows)
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in table]
