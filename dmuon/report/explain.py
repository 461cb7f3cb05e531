"""A table for people: who owns what, why, how it is computed, and at what cost."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from dmuon.dedicated.dedication import Dedication, dedication_of, dedications
from dmuon.dedicated.matrix import resting
from dmuon.dedicated.owned_tensor import OwnedTensor
from dmuon.dedicated.runtime import Runtime
from dmuon.kernels import storage_dtype
from dmuon.layout.topology import GlobalRank
from dmuon.model.blocks import canonical_fqn
from dmuon.model.matrix_spec import MatrixSpec, spec_of
from dmuon.model.routing import Route, route_parameters
from dmuon.optimizer.groups import inside_ddp, names_in
from dmuon.optimizer.muon import Muon
from dmuon.optimizer.record import taken_whole
from dmuon.platform.options import check_integer
from dmuon.report.accounting import (
    MatrixRow,
    RankSums,
    dedicated_messages,
    expected_memory,
    matrix_rows,
    rank_sums,
    state_bytes,
    totals,
)
from dmuon.step.update import name_of

_FROZEN = "frozen"  # a reason begins with it
_MOST_RANKS = 32  # of which sums are shown
_ANEW = "the optimizer's groups hold other parameters than they did: the next step decides who owns what"


def explain(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, max_rows: int | None = 100) -> str:
    """Matrix by matrix what becomes of it and why, sums per rank, dtypes, warnings, and what the optimizer did last.

    Of each matrix: of which tensor it is a part, where it lies, its owner, and its share of the time that the plan
    predicts for its owner. Communicates nothing, so that one rank may call it alone.

    Args:
        model: any; of one that did not go through ``dedicate_params`` the optimizer knows the owners.
        optimizer: a ``dmuon.Muon``, whose groups are then the routes; adds what it exchanges, what costs more than it
            should, and counters of its last step on this rank.
        max_rows: a table with more rows tells those as one that differ in the numbers in their names only; their times
            are sums. None shows every matrix.

    Raises:
        ValueError: without an optimizer, Muon would refuse the model; ``max_rows`` is no positive integer.
        TypeError: ``optimizer`` is not a ``dmuon.Muon``.
    """
    if optimizer is not None and not isinstance(optimizer, Muon):
        raise TypeError(f"optimizer must be a dmuon.Muon, got {type(optimizer).__name__}")
    if max_rows is not None:
        check_integer("max_rows", max_rows, 1)
    dedicated = dedications(model)
    rows = matrix_rows(model, optimizer, dedicated)
    anew = [] if optimizer is None or optimizer._is_as_laid_out() else [_ANEW, ""]
    muon, rest = _tensors(model, optimizer, dedicated)
    lines = [*anew, *_matrices(muon, rows, max_rows)]
    lines += [*_on_adamw(rest, max_rows), "", _counts(muon, rest)]
    if optimizer is not None or dedicated:
        lines += _sums(rank_sums(rows))
    if optimizer is not None:
        lines += ["", *report] if (report := optimizer.exchange_report()) else []
    for dedication in dedicated:
        sharded = sum(isinstance(m, FSDPModule) for m in model.modules())
        others = f"sharded by FSDP2 in {sharded} modules" if sharded else "replicated, averaged by dmuon"
        lines += ["", *_runtime(dedication.runtime), f"the rest: {others}", "", dedication.plan.report()]
    if optimizer is not None:
        taken = taken_whole(optimizer._residencies)
        lines += ["", "warnings", *(f"  {line}" for line in taken)] if taken else []
        state = (f"{key} {mib(nbytes)}" for key, nbytes in state_bytes(optimizer).items())
        lines += ["", f"state on this rank: {', '.join(state) or 'none'}"]
        lines += [*_newton_schulz(optimizer), *_last_step(optimizer)]
    return "\n".join(lines)


# -- routes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One parameter and its route.

    Attributes:
        made_of: its matrices, in words.
        matrices: how many.
    """

    name: str
    shape: tuple[int, ...]
    numel: int
    made_of: str
    matrices: int
    why: str


def _tensors(
    model: nn.Module, optimizer: Muon | None, dedicated: Sequence[Dedication]
) -> tuple[list[_Tensor], list[_Tensor]]:
    """What Muon takes of the model, or beside it, and the rest: as the optimizer has it, with the policy's reason."""
    inner = inside_ddp(model)
    params: dict[str, Tensor] = {canonical_fqn(name): resting(p) for name, p in inner.named_parameters()}
    routes = _policy(inner, required=optimizer is None and not dedicated) | _dedicated_routes(inner)
    groups: dict[int, bool] = {}
    if optimizer is not None:
        groups = {id(p): group["use_muon"] for group in optimizer.param_groups for p in group["params"]}
        inside = set(map(id, params.values()))
        beside = (p for group in optimizer.param_groups for p in group["params"] if id(p) not in inside)
        names = names_in(optimizer.param_groups, optimizer._canonical)
        params |= {names[id(p)]: p for p in beside}
    muon: list[_Tensor] = []
    rest: list[_Tensor] = []
    for name, param in params.items():
        route = routes.get(name)
        owned = isinstance(param, OwnedTensor)
        taken = owned or (route is not None and route.muon if optimizer is None else groups.get(id(param), False))
        why = "outside what was dedicated" if route is None else route.reason
        if optimizer is not None and id(param) not in groups:
            lost = "in no group: this optimizer does not train it"
            why = f"{why}; {lost}" if owned else lost
        elif not param.requires_grad:
            why = f"{'Muon' if taken else 'AdamW'} takes it when it trains"
        elif optimizer is not None and (route is None or route.muon != taken):
            why = "a group, or select=, says so"
        why = why if param.requires_grad else f"{_FROZEN}; {why}"
        spec = spec_of(param)
        if spec == MatrixSpec() and route is not None:
            spec = route.spec
        tensor = _Tensor(name, tuple(param.shape), param.numel(), *_made_of(param, spec), why)
        (muon if taken else rest).append(tensor)
    return muon, rest


def _dedicated_routes(model: nn.Module) -> dict[str, Route]:
    routes = {}
    for name, module in model.named_modules():
        dedication = dedication_of(module)
        for route in () if dedication is None else dedication.routes(module):
            routes[canonical_fqn(f"{name}.{route.fqn}" if name else route.fqn)] = route
    return routes


def _policy(model: nn.Module, *, required: bool) -> dict[str, Route]:
    try:
        return {route.fqn: route for route in route_parameters(model)}
    except ValueError:  # of what the optimizer got by select, groups or tensors, the policy may know nothing
        if required:
            raise
        return {}


def _made_of(param: Tensor, spec: MatrixSpec) -> tuple[str, int]:
    """The matrices of a tensor in words, and how many; one if a shape says nothing."""
    try:
        shapes = Counter(shape_text(shape) for shape in spec.matrices(param.shape))
    except ValueError:
        return "", 1
    if len(param.shape) == 2 and spec.is_whole and not spec.transposed:
        return "one matrix", 1
    return " and ".join(f"{count} of {shape}" for shape, count in shapes.items()), sum(shapes.values())


# -- matrices -------------------------------------------------------------------------------------------------------

_HEAD = ("matrix", "count", "shape", "placement", "owner", "predicted", "parts", "why")


def _matrices(tensors: Sequence[_Tensor], rows: Sequence[MatrixRow], max_rows: int | None) -> list[str]:
    """A line for each matrix; of many, one for all that differ in numbers in their names only."""
    of_tensor: dict[str, list[MatrixRow | None]] = {tensor.name: [] for tensor in tensors}
    for one in rows:
        of_tensor.setdefault(one.tensor, []).append(one)
    pairs = [(tensor, row) for tensor in tensors for row in of_tensor[tensor.name] or [None]]
    folded = max_rows is not None and len(pairs) > max_rows
    alike: dict[object, list[tuple[_Tensor, MatrixRow | None]]] = {}
    for number, (tensor, row) in enumerate(pairs):
        kind: object = number
        if folded:
            known = () if row is None else (row.strategy, row.shape, pattern(row.lies), row.predicted_ns is None)
            kind = tensor.made_of, tensor.why, pattern(tensor.name), known or tensor.shape
        alike.setdefault(kind, []).append((tensor, row))
    counts = (f"{len(members):,}" if folded else "" for members in alike.values())
    return ["matrices of Muon", *table([_HEAD, *map(_line, counts, alike.values())])]


def _line(count: str, members: Sequence[tuple[_Tensor, MatrixRow | None]]) -> tuple[str, ...]:
    """Of one matrix, or of several that are alike; of tensors alone if nothing more is known of them."""
    tensor, first = members[0]
    name = pattern(tensor.name) if len({tensor.name for tensor, _ in members}) > 1 else tensor.name
    if first is None:
        return name, count, shape_text(tensor.shape), "", "", "", tensor.made_of, tensor.why
    if first.number is not None:
        name += f"[{first.number}]" if len(members) == 1 else "[*]"
    rows = [row for _, row in members if row is not None]
    predicted = [row.predicted_ns for row in rows if row.predicted_ns is not None]
    owners = sorted({row.owner for row in rows if row.owner is not None})
    return (
        name,
        count,
        shape_text(tensor.shape if first.number is None else first.shape),
        first.lies if len({row.lies for row in rows}) == 1 else pattern(first.lies),
        first.strategy if first.owner is None and first.strategy != "owner" else spans_text(owners),
        time_text(sum(predicted)) if predicted else "" if first.owner is None else time_text(None),
        tensor.made_of,
        tensor.why,
    )


def _on_adamw(rest: Sequence[_Tensor], max_rows: int | None) -> list[str]:
    """What Muon leaves, with reasons."""
    lines = [(tensor.name, "", tensor.why) for tensor in rest]
    if max_rows is not None and len(lines) > max_rows:
        alike: dict[tuple[str, str], list[str]] = {}
        for tensor in rest:
            alike.setdefault((pattern(tensor.name), tensor.why), []).append(tensor.name)
        lines = [(name if names[1:] else names[0], f"{len(names):,}", why) for (name, why), names in alike.items()]
    return ["", "on AdamW", *table([("parameter", "count", "why"), *lines])]


def _counts(muon: Sequence[_Tensor], rest: Sequence[_Tensor]) -> str:
    """How much of the model either trains, and nobody."""
    frozen = [tensor for tensor in (*muon, *rest) if tensor.why.startswith(_FROZEN)]
    muon, rest = ([tensor for tensor in some if not tensor.why.startswith(_FROZEN)] for some in (muon, rest))
    of_muon, of_adamw, of_none = (f"{sum(t.numel for t in some):,} elements" for some in (muon, rest, frozen))
    matrices = sum(tensor.matrices for tensor in muon)
    counts = f"Muon: {matrices:,} matrices, {of_muon}; AdamW: {len(rest)} parameters, {of_adamw}"
    return f"{counts}; frozen: {len(frozen)} parameters, {of_none}" if frozen else counts


def _sums(sums: Mapping[GlobalRank, RankSums]) -> list[str]:
    """What each rank owns; of many ranks, those that own most and least."""
    shown = list(sums)
    if len(shown) > _MOST_RANKS:
        by_load = sorted(shown, key=lambda rank: (-(sums[rank].predicted_ns or 0), -sums[rank].elements, rank))
        shown = [*by_load[: _MOST_RANKS // 2], *by_load[-_MOST_RANKS // 2 :]]
    rows = [
        (f"rank {rank}", f"{one.matrices:,}", f"{one.elements:,}", time_text(one.predicted_ns))
        for rank, one in ((rank, sums[rank]) for rank in shown)
    ]
    left = [f"  … and {len(sums) - len(shown)} more, which own as much as these or something in between"]
    head = ("rank", "matrices", "elements", "predicted")
    return ["", "per rank", *table([head, *rows]), *(left if len(sums) > len(shown) else [])]


_PURPOSES = {
    "fill": "unshard",
    "publish": "to other replicas",
    "gather": "momentum to owners",
    "scatter": "updates back",
    "copy": "updates to other replicas",
}


# -- the rest -------------------------------------------------------------------------------------------------------


def _runtime(runtime: Runtime) -> list[str]:
    """Dtypes, memory and traffic of the owned weights."""
    entries = list(runtime.matrices())
    held = "; ".join(f"{what} {mib(nbytes)}" for what, nbytes in expected_memory(runtime).items() if nbytes)
    largest = max((buffer.whole_nbytes for buffer in runtime.buffers), default=0)
    topology = runtime.comm.topology
    sent = "; ".join(
        f"{_PURPOSES.get(purpose, purpose)} {calls} calls, {mib(nbytes)}"
        for purpose, (calls, nbytes) in totals(dedicated_messages(runtime)).items()
    )
    return [
        f"dedicated weights: {len({b.name for b in runtime.buffers})} blocks, "
        f"forward in {_unique(e.full.dtype for e in entries)}, "
        f"masters in {_unique(e.master.dtype for e in entries)}, "
        f"gradients reduced in {_unique(b.reduce_dtype for b in runtime.buffers)}, "
        f"{'kept' if any(buffer.keep for buffer in runtime.buffers) else 'freed'} after forward",
        f"mesh: {topology.text}",
        f"this rank holds: {held or 'nothing'}; gradients as much as masters; "
        f"the largest block unsharded {mib(largest)}",
        f"this rank sends in a step of one micro-batch: {sent or 'nothing'}",
    ]


def _newton_schulz(optimizer: Muon) -> list[str]:
    """Coefficients, and how many steps in which dtype."""
    lines = []
    for group in optimizer.param_groups:
        if group["use_muon"] and group["params"] and group.get("orthogonalize") is not None:
            lines.append(f"orthogonalization: by {name_of(group['orthogonalize'])}")
        elif group["use_muon"] and group["params"]:
            momentum = torch.promote_types(group["params"][0].dtype, torch.float32)
            storage = storage_dtype(momentum, group["params"][0].device, group["ns_dtype"])
            lines.append(f"Newton-Schulz: {group['ns_coefficients']}, {group['ns_steps']} steps in {storage}")
    return sorted(set(lines))


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


def _unique(dtypes: Iterable[torch.dtype]) -> str:
    return " and ".join(sorted({str(dtype) for dtype in dtypes}))


# -- tables ---------------------------------------------------------------------------------------------------------

_MOST_PARTS = 4  # of what a cell lists


def table(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Lines of columns; a column in which no row but the first has anything is left out."""
    cells = list(rows)
    kept = [i for i in range(len(cells[0])) if len(cells) == 1 or any(row[i] for row in cells[1:])]
    widths = [max(len(row[i]) for row in cells) for i in kept]
    lines = ("  ".join((row[i] or "-").ljust(width) for i, width in zip(kept, widths, strict=True)) for row in cells)
    return [f"  {line}".rstrip() for line in lines]


def pattern(name: str) -> str:
    """``name`` with ``*`` for each number that stands between dots, or for all of a number of a matrix."""
    return re.sub(r"(?<![^.\s])\d+(?![^.\s])", "*", name)


def shape_text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def time_text(ns: float | None) -> str:
    """Predicted time."""
    return "not predicted" if ns is None else f"{ns / 1e6:.3f} ms"


def spans_text(numbers: Sequence[int]) -> str:
    """Ascending numbers, neighbours as a span."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    return " ".join(parts[:_MOST_PARTS]) + (" …" if parts[_MOST_PARTS:] else "")
