"""A table for people: who owns what, why, and at what cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dmuon.dedicated.dedication import Dedication, dedications
from dmuon.dedicated.owned_tensor import OwnedTensor
from dmuon.dedicated.part import parameter_of
from dmuon.dedicated.runtime import Runtime
from dmuon.model.blocks import canonical_fqn
from dmuon.model.matrix_spec import MatrixSpec, spec_of
from dmuon.model.routing import Route, route_parameters
from dmuon.optimizer.groups import inside_ddp
from dmuon.optimizer.muon import Muon
from dmuon.report.accounting import expected_memory, expected_traffic
from dmuon.step.rounds import AloneRound


def explain(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
    """Routes with reasons, owners per matrix, predicted loads, dtypes, warnings, and what the optimizer did last.

    Args:
        model: any; of one that did not go through ``dedicate_params`` the optimizer knows the owners.
        optimizer: a ``dmuon.Muon``, whose groups are then the routes; adds what it exchanges, what costs more than it
            should, and counters of its last step on this rank.

    Raises:
        ValueError: without an optimizer, Muon would take no matrix of the model, or refuse it.
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
        loads = [dedication.plan.solution.loads_ns for dedication in dedicated]
        lines += [*_warnings(optimizer, loads), *_last_step(optimizer)]
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
    inner = inside_ddp(model)
    named = [(canonical_fqn(name), param) for name, param in inner.named_parameters()]
    try:
        routes = {r.fqn: r for r in route_parameters(inner)}
    except ValueError:  # of what the optimizer got by select, groups or tensors, the policy may know nothing
        if optimizer is None:
            raise
        routes = {}
    if optimizer is None:
        taken = {name for name, route in routes.items() if route.muon}
        left = {name for name, _ in named} - taken
    else:
        groups = [({id(p) for p in group["params"]}, group["use_muon"]) for group in optimizer.param_groups]
        taken = {name for name, param in named if any(id(param) in ids for ids, muon in groups if muon)}
        left = {name for name, param in named if any(id(param) in ids for ids, muon in groups if not muon)}

    def why(name: str) -> str:
        if name not in taken | left:
            return "in no group: this optimizer does not train it"
        route = routes.get(name)
        by_policy = route is not None and route.muon == (name in taken)
        return route.reason if route is not None and by_policy else "put there by a group or by select"

    rows = [(name, "x".join(map(str, p.shape)), _made_of(p, routes.get(name)), why(name)) for name, p in named]
    table = _table([("matrix", "shape", "made of", "why"), *(row for row in rows if row[0] in taken)])
    sizes = {name: param.numel() for name, param in named}
    muon = f"{len(taken)} parameters, {sum(sizes[name] for name in taken):,}"
    rest = [(row[0], row[3]) for row in rows if row[0] not in taken]
    return ["matrices of Muon", *table, *_on_adamw(rest, muon, sum(sizes[name] for name, _ in rest))]


def _made_of(param: nn.Parameter, route: Route | None) -> str:
    """The matrices of a tensor that is made of several, or of one that is stored otherwise."""
    spec = spec_of(param)
    if spec == MatrixSpec() and route is not None:
        spec = route.spec
    try:
        shapes = Counter(f"{m}x{n}" for m, n in spec.matrices(param.shape))
    except ValueError:
        return ""
    if len(param.shape) == 2 and sum(shapes.values()) == 1:
        return "itself"
    return " and ".join(f"{count} of {shape}" for shape, count in shapes.items())


_SMALL = 1024  # elements
_DOMINATES = 1.5  # times the mean load


def _warnings(optimizer: Muon, dedicated: Sequence[Sequence[int]]) -> list[str]:
    """What costs more than it should.

    Args:
        dedicated: predicted loads of the owners of each dedicated model.
    """
    lines = []
    for loads in [*dedicated, *(loads for residency in optimizer._residencies for loads in residency.loads())]:
        most = max(loads) * len(loads) / max(1, sum(loads))
        if most > _DOMINATES:
            lines.append(
                f"owner {loads.index(max(loads))} of {len(loads)} has {most:.1f} times the mean load: there are too "
                "few matrices, or one outweighs all others"
            )
    alone = [batch for round_ in optimizer._rounds if isinstance(round_, AloneRound) for batch in round_.batches]
    plain = [p for batch in alone for p in batch.params if not isinstance(p, (DTensor, OwnedTensor))]
    if plain and dist.is_initialized() and dist.get_world_size() > 1:
        lines.append(
            f"{len({id(p) for p in plain})} parameters are whole on this rank as far as anyone can tell; if other "
            "ranks hold copies, all do the same work: pass distributed_config=create_processgroup_config(dp_pg=…)"
        )
    batches = [batch for round_ in optimizer._rounds for batch in round_.batches]
    small = sum(batch.count for batch in batches if batch.shape[0] * batch.shape[1] < _SMALL)
    if small:
        lines.append(
            f"{small} matrices of this rank have fewer than {_SMALL:,} elements, and cost more in launches than in "
            "arithmetic: AdamW is cheaper there (select=…)"
        )
    return ["", "warnings", *(f"  {line}" for line in lines)] if lines else []


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
