"""Which rank owns which matrix: solved or read on rank 0, broadcast, and verified on every rank."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from dmuon.comm import agree
from dmuon.costs import FoundCosts, find_costs
from dmuon.files import read_json, write_text
from dmuon.kernels import Variant
from dmuon.solver import CostTable, Matrix, Plan, Rank, Shape, SolveOptions
from dmuon.solver import plan as solve_plan

__all__ = ["Costs", "OwnerPlan", "PlanSource", "check_options", "describe_source", "make_plan"]

Costs = Literal["flops"] | str | os.PathLike[str] | CostTable | None

_SCHEMA = 2
_FIELDS = ("schema", "solution", "chunks", "variants", "cost_source")
_CHECKSUM = "sha256"  # of these fields
_SOLVED = "solved now"
_AGAIN = "plan again: leave plan= out, save the new plan"


@dataclass(frozen=True)
class OwnerPlan:
    """Who owns what, in batches of what size, and at what predicted cost.

    Attributes:
        matrices: every owned matrix, in the order of the model; by name in a plan that was not applied to one yet.
        solution: the solver's plan (owners, makespan, bound, loads).
        chunks: ``(small side, large side)`` to the number of matrices that one batched update takes.
        cost_source: where the costs came from, for people.
        variants: ``(small side, large side)`` to batch size to how Newton–Schulz was measured to be fastest, as
            ``dmuon.kernels.Variant`` prints; a batch runs as the largest that is no larger, or as the rules say.
        origin: where the plan came from, for people.

    Raises:
        ValueError: chunks that are no positive integers, one per shape.
    """

    matrices: tuple[Matrix, ...]
    solution: Plan
    chunks: dict[Shape, int]
    cost_source: str
    variants: dict[Shape, dict[int, str]] = field(default_factory=dict)
    origin: str = _SOLVED

    def __post_init__(self) -> None:
        shapes = {m.shape for m in self.solution.matrices}
        if self.chunks.keys() != shapes:
            small, large = min(self.chunks.keys() ^ shapes)
            side = "has no matrices" if (small, large) in self.chunks else "is missing"
            raise ValueError(f"field 'chunks': shape {small}x{large} {side}; {_AGAIN}")
        for (small, large), size in self.chunks.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"field 'chunks.{small}x{large}' is {size!r}, not an integer of at least 1; {_AGAIN}")
        for (small, large), variants in self.variants.items():
            name = f"field 'variants.{small}x{large}'"
            if (small, large) not in shapes:
                raise ValueError(f"{name}: the plan has no matrices of that shape; {_AGAIN}")
            for size, variant in variants.items():
                try:
                    Variant.parse(variant)
                except (ValueError, TypeError) as error:
                    raise ValueError(f"field 'variants.{small}x{large}.{size}': {error}; {_AGAIN}") from None

    @classmethod
    def from_solution(cls, solution: Plan, costs: FoundCosts) -> OwnerPlan:
        """What the solver found with ``costs``. Needs no process group."""
        chunks = {shape: costs.table.chunk(shape) for shape in sorted({m.shape for m in solution.matrices})}
        of_shapes = {shape: costs.variants.get(shape, {}) for shape in chunks}
        variants = {
            shape: {k: v for k, v in sorted(found.items()) if k <= chunks[shape]} for shape, found in of_shapes.items()
        }
        variants = {shape: found for shape, found in variants.items() if found}
        return cls(solution.matrices, solution, chunks, costs.source, variants)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.solution.world

    @property
    def owners(self) -> dict[str, int]:
        """Canonical parameter name to owning rank of the mesh."""
        return dict(self.solution.owners)

    @property
    def digest(self) -> str:
        """SHA-256 of owners, shapes, blocks, batches and variants: on alike devices, equal digests give equal bits."""
        return _sha256([self.solution.digest, _named(self.chunks), self._named_variants()])

    @property
    def balance(self) -> float:
        """Largest predicted load over the mean load; 1 is perfect."""
        loads = list(self.solution.loads_ns)
        mean = sum(loads) / len(loads)
        return max(loads) / mean if mean > 0 else 1.0

    def report(self) -> str:
        """Origin, source of the costs, batch sizes, makespan, proven bound, gap, and a bar per rank."""
        batches = "; ".join(
            f"{shape[0]}x{shape[1]} by {size}" + (f" ({variants[max(variants)]})" if variants else "")
            for shape, size in sorted(self.chunks.items())
            for variants in [self.variants.get(shape, {})]
        )
        return (
            f"plan: {self.origin}, digest with batches {self.digest}\n"
            f"costs: {self.cost_source}\nbatches: {batches}\n{self.solution.report()}"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan for :meth:`load` and ``dedicate_params(plan=path)``, atomically, also from several processes.

        Raises:
            OSError: the file cannot be written; one that was there is left as it is.
        """
        path = Path(path)
        try:
            write_text(path, json.dumps(self.to_json(), indent=1) + "\n")
        except OSError as error:
            raise OSError(
                error.errno, f"plan file {path}: cannot be written ({error.strerror}); check the folder {path.parent}"
            ) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> OwnerPlan:
        """Read and validate a file that :meth:`save` or ``dmuon-plan --json`` wrote. Needs no process group.

        Raises:
            ValueError: missing, unreadable, or not as it was written; names file, field and remedy.
        """
        path = Path(path)
        try:
            document = read_json(path)
        except ValueError as error:
            raise ValueError(f"plan file {path}: {error}; check the path, or {_AGAIN}") from error
        try:
            return cls.from_json(document, f"loaded from {path}")
        except ValueError as error:
            raise ValueError(f"plan file {path}: {error}") from error

    def to_json(self) -> dict[str, Any]:
        """The document that :meth:`save` writes: plain types, with a checksum over all of them."""
        fields = {
            "schema": _SCHEMA,
            "solution": self.solution.to_json(),
            "chunks": _named(self.chunks),
            "variants": self._named_variants(),
            "cost_source": self.cost_source,
        }
        return {**fields, _CHECKSUM: _sha256(fields)}

    def _named_variants(self) -> dict[str, dict[str, str]]:
        return _named({s: {str(k): v for k, v in sorted(sizes.items())} for s, sizes in self.variants.items()})

    @classmethod
    def from_json(cls, document: object, origin: str) -> OwnerPlan:
        """The plan that :meth:`to_json` wrote.

        Raises:
            ValueError: another schema, a field that is missing, unknown or ill-typed, or content that was changed.
        """
        if not isinstance(document, dict):
            raise ValueError(f"holds no JSON object; {_AGAIN}")
        schema = document.get("schema")
        if schema != _SCHEMA or isinstance(schema, bool):
            raise ValueError(f"field 'schema' is {schema!r}, this version of dmuon reads {_SCHEMA}; {_AGAIN}")
        odd = sorted(document.keys() ^ {*_FIELDS, _CHECKSUM})
        if odd:
            raise ValueError(f"field {odd[0]!r} is {'unknown' if odd[0] in document else 'missing'}; {_AGAIN}")
        if not isinstance(document["cost_source"], str):
            raise ValueError(f"field 'cost_source' is {document['cost_source']!r}, not a string; {_AGAIN}")
        chunks, variants = (_by_shape(name, document[name]) for name in ("chunks", "variants"))
        variants = {shape: _by_size(shape, sizes) for shape, sizes in variants.items()}
        try:
            solution = Plan.from_json(document["solution"])
        except Exception as error:  # whatever reading nonsense raises, it is the file's fault
            raise ValueError(f"field 'solution': {_said(error)}; {_AGAIN}") from error
        plan = cls(solution.matrices, solution, chunks, document["cost_source"], variants, origin)
        found = _sha256({name: document[name] for name in _FIELDS})
        if found != document[_CHECKSUM]:
            raise ValueError(f"the content was changed: its SHA-256 is {found}, not {document[_CHECKSUM]!r}; {_AGAIN}")
        return plan


PlanSource = OwnerPlan | str | os.PathLike[str] | None


def check_options(costs: object, solve: object, plan: object) -> None:
    """Raise TypeError or ValueError for a value, or values together, that :func:`make_plan` cannot take."""
    if not (costs is None or isinstance(costs, (str, os.PathLike, CostTable))):
        raise TypeError(
            f"costs must be None, 'flops', the path of a cost cache or a CostTable, got {type(costs).__name__}"
        )
    if not (solve is None or isinstance(solve, SolveOptions)):
        raise TypeError(f"solve must be a dmuon.solver.SolveOptions, got {type(solve).__name__}")
    if not (plan is None or isinstance(plan, (str, os.PathLike, OwnerPlan))):
        raise TypeError(f"plan must be None, a dmuon.OwnerPlan or the path of one, got {type(plan).__name__}")
    for name, value in (("costs", costs), ("solve", solve)):
        if plan is not None and value is not None:
            raise ValueError(f"{name}= says how to plan, and plan= is a plan already; leave one of them out")


def describe_source(plan: PlanSource) -> str:
    """What all ranks must pass alike. Only rank 0 reads a file, so paths may differ."""
    match plan:
        case None:
            return "None"
        case OwnerPlan():
            return f"a plan with digest {plan.digest}"
        case _:
            return "a path"


def make_plan(
    matrices: Sequence[Matrix],
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    costs: Costs = None,
    solve: SolveOptions | None = None,
    plan: PlanSource = None,
    hosts: Sequence[str],
    pools: Sequence[frozenset[str]] | None = None,
    ns_per_byte: float = 0.0,
) -> OwnerPlan:
    """Find costs and solve, or take ``plan``, on rank 0; broadcast, and verify. Collective over ``group``.

    Args:
        hosts: the host name of every rank; equal names are one node.
        pools: of every rank, the pools whose matrices it may own; None: all of them.
        ns_per_byte: what a byte of a matrix costs its owner, beside Newton–Schulz.

    Raises:
        ValueError: on every rank, when the costs are unusable, the solver failed, or the plan does not fit
            this rank's model.
    """
    matrices = tuple(matrices)
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    found_costs = None if plan is not None else _find_costs(matrices, group, device, costs)
    sent: list[Any] = [None, None, None]  # error, document, origin
    if rank == 0:
        try:
            if found_costs is not None:
                table = found_costs.table
                if ns_per_byte:
                    table = table.with_transfer({m.shape: round(ns_per_byte * m.nbytes) for m in matrices})
                solution = solve_plan(matrices, _ranks(hosts, pools), table, solve or SolveOptions())
                found = OwnerPlan.from_solution(solution, found_costs)
            elif isinstance(plan, OwnerPlan):
                found = replace(plan, origin="given" if plan.origin == _SOLVED else plan.origin)
            else:
                assert plan is not None
                found = OwnerPlan.load(plan)
            sent = [None, found.to_json(), found.origin]
        except Exception as fault:  # every rank must hear of it, whatever it is
            sent[0] = _said(fault)
    if world > 1:
        dist.broadcast_object_list(sent, group_src=0, group=group)
    error, result = sent[0], None
    if error is None:
        try:
            result = _fit(OwnerPlan.from_json(sent[1], sent[2]), matrices, world)
        except Exception as fault:
            error = _said(fault)
    digests = agree(group, error, None if result is None else result.digest)
    assert result is not None
    other = [r for r, digest in enumerate(digests) if digest != digests[0]]
    if other:
        raise ValueError(
            f"rank {other[0]} holds another owner plan than rank 0 (digests {digests[other[0]]} and {digests[0]}); run "
            "the same version of dmuon on every rank"
        )
    return result


def _find_costs(matrices: Sequence[Matrix], group: dist.ProcessGroup, device: torch.device, costs: Costs) -> FoundCosts:
    if isinstance(costs, CostTable):
        return FoundCosts(costs, "given")
    world = dist.get_world_size(group)

    def share(item: object) -> list[object]:
        items: list[object] = [None] * world
        dist.all_gather_object(items, item, group=group)
        return items

    return find_costs(
        dict(Counter(m.shape for m in matrices)),
        world=world,
        rank=dist.get_rank(group),
        device=device,
        costs=costs,
        share=share if world > 1 else None,
    )


def _ranks(hosts: Sequence[str], pools: Sequence[frozenset[str]] | None) -> list[Rank]:
    """Nodes are numbered in the order of their first rank."""
    names = list(dict.fromkeys(hosts))
    return [
        Rank(index, node=names.index(host), pools=None if pools is None else pools[index])
        for index, host in enumerate(hosts)
    ]


def _fit(plan: OwnerPlan, matrices: Sequence[Matrix], world: int) -> OwnerPlan:
    """``plan`` for exactly these matrices over ``world`` ranks, or a ValueError with the first that differs."""
    about = f"the owner plan ({plan.origin})"
    if plan.world != world:
        raise ValueError(f"{about} is for {plan.world} ranks, this mesh has {world}; {_AGAIN}")
    planned = {m.name: m for m in plan.solution.matrices}
    mine = {m.name: m for m in matrices}
    for name in [*mine, *planned]:
        if name not in planned:
            raise ValueError(f"{about} has no owner for parameter {name!r}, which dmuon owns here; {_AGAIN}")
        if name not in mine:
            raise ValueError(f"{about} holds {name!r}, which is no parameter that dmuon owns here; {_AGAIN}")
        there, here = planned[name], mine[name]
        for what, theirs, ours in (
            ("shape", (there.rows, there.cols), (here.rows, here.cols)),
            ("block", there.block, here.block),
        ):
            if theirs != ours:
                raise ValueError(f"{about} has {name!r} with {what} {theirs!r}, here it is {ours!r}; {_AGAIN}")
    # Another communication dtype has other bytes; who owns what stands.
    counted = tuple(replace(m, nbytes=mine[m.name].nbytes) for m in plan.solution.matrices)
    return replace(plan, matrices=tuple(matrices), solution=replace(plan.solution, matrices=counted))


def _by_shape(field: str, value: object) -> dict[Shape, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"field {field!r} is no object; {_AGAIN}")
    result = {}
    for text, item in value.items():
        match = re.fullmatch(r"([1-9][0-9]{0,8})x([1-9][0-9]{0,8})", text)
        if not match:
            raise ValueError(f"field {field!r}: shape {text!r} is not like '1024x4096'; {_AGAIN}")
        result[int(match[1]), int(match[2])] = item
    return result


def _by_size(shape: Shape, value: object) -> dict[int, Any]:
    name = f"field 'variants.{shape[0]}x{shape[1]}'"
    if not isinstance(value, dict):
        raise ValueError(f"{name} is no object of batch sizes; {_AGAIN}")
    for text in value:
        if not re.fullmatch(r"[1-9][0-9]{0,8}", text):
            raise ValueError(f"{name}: batch size {text!r} is no positive integer; {_AGAIN}")
    return {int(text): item for text, item in value.items()}


def _named(values: Mapping[Shape, Any]) -> dict[str, Any]:
    return {f"{small}x{large}": value for (small, large), value in sorted(values.items())}


def _sha256(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _said(fault: Exception) -> str:
    return str(fault) if isinstance(fault, ValueError) else f"{type(fault).__name__}: {fault}"
