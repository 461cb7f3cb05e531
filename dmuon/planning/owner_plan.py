"""An owner plan: who owns what and why, as an object and as a file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dmuon.layout.topology import Position
from dmuon.platform.files import read_json, write_bytes
from dmuon.platform.options import is_integer
from dmuon.solver import CostTable, Matrix, Plan, Shape

_SCHEMA = 2
_CHECKSUM = "sha256"  # of all other fields
SOLVED = "solved now"
AGAIN = "plan again: leave plan= out, save the new plan"


@dataclass(frozen=True, slots=True)
class FoundCosts:
    """What planning needs to know of a device.

    Attributes:
        table: the planner's costs.
        source: where they came from, for people.
    """

    table: CostTable
    source: str


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
