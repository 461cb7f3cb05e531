"""An owner plan: who owns what and why, as an object and as a file; found on rank 0, and verified on every rank."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from dmuon.comm.agreement import agree
from dmuon.comm.process_groups import broadcast_object, gather_objects, ranks_of
from dmuon.kernels import user_cache_directory
from dmuon.layout.topology import Position
from dmuon.planning import cost_lookup
from dmuon.planning.cost_cache import NsOptions
from dmuon.planning.cost_lookup import FoundCosts
from dmuon.platform.files import read_json, write_bytes
from dmuon.platform.host import logger
from dmuon.platform.options import is_integer, is_number
from dmuon.solver import CostTable, Matrix, Plan, Rank, Shape, SolveOptions
from dmuon.solver import plan as solve_plan

_log = logger(__name__)

_SCHEMA = 2
_CHECKSUM = "sha256"  # of all other fields
SOLVED = "solved now"
AGAIN = "plan again: leave plan= out, save the new plan"
_LONG_S = 0.5  # a solution that took longer is kept

Speeds = Sequence[float] | None
Costs = Literal["flops"] | str | os.PathLike[str] | CostTable | None


@dataclass(frozen=True)
class OwnerPlan:
    """Who owns what, in batches of what size, and at what predicted cost.

    Attributes:
        matrices: every owned matrix, in the order of the model; by name in a plan that was not applied to one yet.
        solution: the solver's plan (owners, makespan, bound, loads).
        chunks: ``(small side, large side)`` to the number of matrices that one batched update takes.
        cost_source: where the costs came from, for people.
        origin: where the plan came from, for people.
        costs: by which the solver counted, of these shapes; None where that is not known.

    Raises:
        ValueError: chunks that are no positive integers, one per shape.
    """

    matrices: tuple[Matrix, ...]
    solution: Plan
    chunks: dict[Shape, int]
    cost_source: str
    origin: str = SOLVED
    costs: CostTable | None = None

    def __post_init__(self) -> None:
        shapes = {m.shape for m in self.solution.matrices}
        if self.chunks.keys() != shapes or not all(is_integer(size, 1) for size in self.chunks.values()):
            raise ValueError(f"chunks={self.chunks!r}: there must be an integer of at least 1 for each of {shapes}")

    @classmethod
    def from_solution(cls, solution: Plan, costs: FoundCosts, counted: CostTable | None = None) -> OwnerPlan:
        """What the solver found with ``costs``. Needs no process group.

        Args:
            counted: by which it counted, if that is more than Newton–Schulz.
        """
        chunks = {shape: costs.table.batch_size(shape) for shape in sorted({m.shape for m in solution.matrices})}
        table = CostTable({shape: (counted or costs.table).costs[shape] for shape in chunks})
        return cls(solution.matrices, solution, chunks, costs.source, costs=table)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.solution.world

    @cached_property
    def owners(self) -> dict[str, Position]:
        """Canonical parameter name to the owner's position among the ranks that the plan is for."""
        return {name: Position(owner) for name, owner in self.solution.owners.items()}

    @property
    def digest(self) -> str:
        """SHA-256 of owners, shapes, blocks and batches: on alike devices, equal digests give equal bits."""
        return _sha256([self.solution.digest, _named(self.chunks)])

    @property
    def balance(self) -> float:
        """Largest predicted load over the mean load, with what was planned before; 1 is perfect."""
        loads = self.solution.ends_ns
        mean = sum(loads) / len(loads)
        return max(loads) / mean if mean > 0 else 1.0

    def summary(self) -> str:
        """In one line: how much, over how many ranks, what that is predicted to take, and where costs came from."""
        elements = sum(m.rows * m.cols for m in self.matrices)
        loads = self.solution.ends_ns
        return (
            f"{len(self.matrices)} matrices of {elements:,} elements over {len(loads)} ranks; predicted "
            f"{max(loads) / 1e6:.3f} ms on the slowest, {sum(loads) / len(loads) / 1e6:.3f} ms on average; "
            f"plan: {self.origin}, by costs: {self.cost_source}"
        )

    def report(self) -> str:
        """Origin, source of the costs, batch sizes, and what the slowest rank is predicted to take, with its bound."""
        batches = "; ".join(f"{small}x{large} by {size}" for (small, large), size in sorted(self.chunks.items()))
        planned = self.solution
        before = " with what was planned before" if planned.starts_ns else ""
        return (
            f"plan: {self.origin}, digest with batches {self.digest}\n"
            f"costs: {self.cost_source}\nbatches: {batches}\n"
            f"slowest rank (makespan): {planned.makespan_ns / 1e6:.3f} ms{before}; lower bound: "
            f"{planned.bound_ns / 1e6:.3f} ms (gap {planned.gap:.2%})"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan for :meth:`load` and ``dedicate_params(plan=path)``, atomically, also from several processes.

        Raises:
            OSError: the file cannot be written; one that was there is left as it is.
        """
        path = Path(path)
        try:
            write_bytes(path, f"{json.dumps(self.to_json(), indent=1)}\n".encode())
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
            raise ValueError(f"plan file {path}: {error}; check the path, or {AGAIN}") from error
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
            "cost_source": self.cost_source,
        }
        if self.costs is not None:
            costs = self.costs.costs.items()
            fields["costs"] = _named({shape: {str(k): ns for k, ns in entries.items()} for shape, entries in costs})
        return {**fields, _CHECKSUM: _sha256(fields)}

    @classmethod
    def from_json(cls, document: object, origin: str) -> OwnerPlan:
        """The plan that :meth:`to_json` wrote. Its checksum covers all fields, which need no other check then.

        Raises:
            ValueError: another schema, or content that was changed.
        """
        if not isinstance(document, dict):
            raise ValueError(f"holds no JSON object; {AGAIN}")
        schema = document.get("schema")
        if not is_integer(schema, _SCHEMA, _SCHEMA):
            raise ValueError(f"field 'schema' is {schema!r}, this version of dmuon reads {_SCHEMA}; {AGAIN}")
        fields = {name: value for name, value in document.items() if name != _CHECKSUM}
        checksum, stated = _sha256(fields), document.get(_CHECKSUM)
        if checksum != stated:
            raise ValueError(f"the content was changed: its SHA-256 is {checksum}, not {stated!r}; {AGAIN}")
        solution = Plan.from_json(fields["solution"])
        costs = {
            shape: {int(size): ns for size, ns in sizes.items()}
            for shape, sizes in _by_shape(fields.get("costs", {})).items()
        }
        return cls(
            solution.matrices,
            solution,
            _by_shape(fields["chunks"]),
            fields["cost_source"],
            origin,
            CostTable(costs) if costs else None,  # files of earlier versions lack them
        )


PlanSource = OwnerPlan | str | os.PathLike[str] | None


def _named(values: Mapping[Shape, Any]) -> dict[str, Any]:
    return {f"{small}x{large}": value for (small, large), value in sorted(values.items())}


def _by_shape(values: Mapping[str, Any]) -> dict[Shape, Any]:
    """What :func:`_named` was given."""
    sides = {name: name.split("x") for name in values}
    return {(int(sides[name][0]), int(sides[name][1])): value for name, value in values.items()}


def _sha256(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def reason_of(fault: Exception) -> str:
    """What a message says of ``fault``: its type too, unless it was raised to be read."""
    return str(fault) if isinstance(fault, ValueError) else f"{type(fault).__name__}: {fault}"


# -- the same plan on all ranks -------------------------------------------------------------------------------------


def check_options(costs: object, solve: object, plan: object, ranks: object = None) -> None:
    """Raise TypeError or ValueError for a value, or values together, that :func:`make_plan` cannot take."""
    if not (costs is None or isinstance(costs, (str, os.PathLike, CostTable))):
        raise TypeError(
            f"costs must be None, 'flops', the path of a cost cache or a CostTable, got {type(costs).__name__}"
        )
    if not (solve is None or isinstance(solve, SolveOptions)):
        raise TypeError(f"solve must be a dmuon.solver.SolveOptions, got {type(solve).__name__}")
    if not (plan is None or isinstance(plan, (str, os.PathLike, OwnerPlan))):
        raise TypeError(f"plan must be None, a dmuon.OwnerPlan or the path of one, got {type(plan).__name__}")
    check_speeds(ranks)
    for name, value in (("costs", costs), ("solve", solve), ("ranks", ranks)):
        if plan is not None and value is not None:
            raise ValueError(f"{name}= says how to plan, and plan= is a plan already; leave one of them out")


def check_speeds(ranks: object) -> None:
    """Refuse what ``ranks=`` cannot be: anything but positive numbers, one for each rank there is."""
    remedy = "give a list of speeds, one for each rank of the job, such as [1.0, 0.5], or leave it out"
    if ranks is None:
        return
    if isinstance(ranks, str) or not isinstance(ranks, Sequence) or not all(map(is_number, ranks)):
        raise TypeError(f"ranks={ranks!r} is no list of numbers; {remedy}; docs/planning.md finds them in a step")
    if not all(0 < speed < math.inf for speed in ranks):
        raise ValueError(f"ranks={ranks!r} holds what is no positive number; {remedy}")
    if dist.is_initialized() and len(ranks) != dist.get_world_size():
        raise ValueError(f"ranks= has {len(ranks)} speeds, and the job {dist.get_world_size()} ranks; {remedy}")


def describe_source(plan: PlanSource) -> str:
    """What all ranks must pass alike. Only rank 0 reads a file, so paths may differ."""
    if isinstance(plan, OwnerPlan):
        return f"a plan with digest {plan.digest}"
    return "None" if plan is None else "a path"


def make_plan(
    matrices: Sequence[Matrix],
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    costs: Costs = None,
    solve: SolveOptions | None = None,
    plan: PlanSource = None,
    hosts: Sequence[str],
    starts: Sequence[int],
    pools: Sequence[frozenset[str]] | None = None,
    ns_per_byte: float = 0.0,
    ranks: Speeds = None,
    ns: NsOptions | None = None,
) -> OwnerPlan:
    """Find costs and solve, or take ``plan``, on rank 0; broadcast, and verify. Collective over ``group``.

    Args:
        hosts: the host name of every rank; equal names are one node.
        starts: of every rank, nanoseconds that what it owns by earlier plans is predicted to take.
        pools: of every rank, the pools whose matrices it may own; None: all of them.
        ns_per_byte: what a byte of a matrix costs its owner, beside Newton–Schulz.
        ranks: how fast each rank of the job computes; None: all alike.
        ns: the Newton–Schulz run that costs are of; None: the default one.

    Raises:
        ValueError: on every rank, when the costs are unusable, the solver failed, or the plan does not fit
            this rank's model.
        CollectiveError: on every other rank, when one is gone, or takes longer than a collective of ``group`` may.
    """
    matrices = tuple(matrices)
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    measured = None if plan is not None or not matrices else _find_costs(matrices, group, device, costs, ns)

    def choose() -> list[Any]:
        """Error, document and origin, on rank 0."""
        if rank != 0:
            return [None, None, None]
        try:
            check_speeds(ranks)  # the job may have begun after a configuration was made
            speeds = [1.0 if ranks is None else float(ranks[member]) for member in ranks_of(group)]
            nodes = {host: node for node, host in enumerate(dict.fromkeys(hosts))}  # in the order of their first rank
            own = [
                Rank(i, nodes[host], speed, pools=None if pools is None else pools[i], start_ns=start)
                for i, (host, start, speed) in enumerate(zip(hosts, starts, speeds, strict=True))
            ]
            chosen = _choose(matrices, measured, solve or SolveOptions(), plan, own, ns_per_byte)
            return [None, chosen.to_json(), chosen.origin]
        except Exception as fault:  # every rank must hear of it, whatever it is
            return [reason_of(fault), None, None]

    sent = choose()
    if world > 1:
        sent = broadcast_object(sent, group, "the broadcast of the plan")
    error, result = sent[0], None
    if error is None:
        try:
            result = _fit(OwnerPlan.from_json(sent[1], sent[2]), matrices, world, pools)
        except Exception as fault:
            error = reason_of(fault)
    digests = agree(group, error, None if result is None else result.digest)
    assert result is not None
    other = [r for r, digest in enumerate(digests) if digest != digests[0]]
    if other:
        raise ValueError(
            f"rank {other[0]} holds another owner plan than rank 0 (digests {digests[other[0]]} and {digests[0]}); run "
            "the same version of dmuon on every rank"
        )
    return result


def _choose(
    matrices: Sequence[Matrix],
    measured: FoundCosts | None,
    options: SolveOptions,
    plan: PlanSource,
    ranks: Sequence[Rank],
    ns_per_byte: float,
) -> OwnerPlan:
    """The plan that is given, or one from measured costs."""
    if measured is not None:
        table = measured.table
        if ns_per_byte:
            table = table.with_transfer({m.shape: round(ns_per_byte * m.nbytes) for m in matrices})
        return _solved(matrices, ranks, measured, table, options)
    if plan is None:
        return OwnerPlan((), Plan({}, (), (0,) * len(ranks), 0, "none", "there is no matrix"), {}, "none")
    if isinstance(plan, OwnerPlan):
        return replace(plan, origin="given" if plan.origin == SOLVED else plan.origin)
    return OwnerPlan.load(plan)


def _solved(
    matrices: Sequence[Matrix], ranks: Sequence[Rank], measured: FoundCosts, table: CostTable, options: SolveOptions
) -> OwnerPlan:
    """What the solver finds, or has found before: what took long is kept beside the costs, for the next start."""
    sources = [item.read_bytes() for item in resources.files("dmuon.solver").iterdir() if item.name.endswith(".py")]
    ordered = tuple(sorted(matrices, key=lambda m: m.name))
    owners = [(r.index, r.node, r.speed, r.start_ns, None if r.pools is None else sorted(r.pools)) for r in ranks]
    question = repr((sorted(sources), ordered, owners, table, options))
    name = f"plan-{hashlib.sha256(question.encode()).hexdigest()}.json"
    with suppress(ValueError, RuntimeError):  # nothing is there that can be read, or the user has no home
        found = OwnerPlan.load(user_cache_directory() / name)
        if found.matrices == ordered:
            return replace(found, cost_source=measured.source, origin=SOLVED)
    start = time.perf_counter()
    solution = solve_plan(matrices, ranks, table, options)
    seconds = time.perf_counter() - start
    _log.debug(
        "planned %d matrices over %d ranks in %.3f s, at most %.2f %% above the best: %s, %s",
        len(matrices),
        solution.world,
        seconds,
        100 * solution.gap,
        solution.stage,
        solution.reason,
    )
    chosen = OwnerPlan.from_solution(solution, measured, table)
    if seconds > _LONG_S and "failed" not in solution.reason:
        try:
            folder = user_cache_directory()
            folder.mkdir(parents=True, exist_ok=True)
            chosen.save(folder / name)
        except (OSError, RuntimeError) as error:
            _log.debug("the plan cannot be kept (%s): the next start solves again", error)
    return chosen


def _find_costs(
    matrices: Sequence[Matrix], group: dist.ProcessGroup, device: torch.device, costs: Costs, ns: NsOptions | None
) -> FoundCosts:
    if isinstance(costs, CostTable):
        return FoundCosts(costs, "given")
    world = dist.get_world_size(group)

    def share(work: Callable[[], object]) -> list[object]:
        return gather_objects(work(), group, "the exchange of costs")

    return cost_lookup.find_costs(
        dict(Counter(m.shape for m in matrices)),
        world=world,
        rank=dist.get_rank(group),
        device=device,
        costs=costs,
        options=ns,
        share=share if world > 1 else None,
    )


def _fit(plan: OwnerPlan, matrices: Sequence[Matrix], world: int, pools: Sequence[frozenset[str]] | None) -> OwnerPlan:
    """``plan`` for exactly these matrices over ``world`` ranks, or a ValueError with the first that differs."""
    about = f"the owner plan ({plan.origin})"
    if plan.world != world:
        raise ValueError(f"{about} is for {plan.world} ranks, this mesh has {world}; {AGAIN}")
    planned = {m.name: m for m in plan.solution.matrices}
    owned = {m.name: m for m in matrices}
    for name in [*owned, *planned]:
        if name not in planned:
            raise ValueError(f"{about} has no owner for parameter {name!r}, which dmuon owns here; {AGAIN}")
        if name not in owned:
            raise ValueError(f"{about} holds {name!r}, which is no parameter that dmuon owns here; {AGAIN}")
        matrix, own = planned[name], owned[name]
        for what, value, own_value in (
            ("shape", (matrix.rows, matrix.cols), (own.rows, own.cols)),
            ("block", matrix.block, own.block),
        ):
            if value != own_value:
                raise ValueError(f"{about} has {name!r} with {what} {value!r}, here it is {own_value!r}; {AGAIN}")
    for name, own in owned.items():
        if pools is not None and own.pool not in pools[plan.owners[name]]:
            raise ValueError(f"{about} gives {name!r} to rank {plan.owners[name]}, which has nothing of it; {AGAIN}")
    # Another communication dtype has other bytes; who owns what stands.
    counted = tuple(replace(m, nbytes=owned[m.name].nbytes) for m in plan.solution.matrices)
    return replace(plan, matrices=tuple(matrices), solution=replace(plan.solution, matrices=counted))
