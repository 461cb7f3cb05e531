"""A plan: who owns what, how long each rank takes, and what is proven about it."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .inputs import Matrix, Shape, is_int

_MOST_ROWS = 32  # of the report
_BAR = 24  # characters of the bar of the slowest rank


@dataclass(frozen=True)
class Plan:
    """An owner for each matrix.

    Attributes:
        owners: rank index per matrix name; every matrix once, sorted by name.
        matrices: the matrices, sorted by name.
        loads_ns: cost per rank in nanoseconds.
        bound_ns: nanoseconds that no assignment can go below, proven.
        stage: what found the assignment: ``"lpt"``, ``"greedy"``, ``"multifit"``, each perhaps with ``"+search"``, or
            ``"milp"`` or ``"patterns"``.
        reason: why the search ended there.
        estimated: the shapes whose costs are estimates.
        starts_ns: of each rank, nanoseconds of work that it has before; empty if none has any.

    Raises:
        ValueError: owners, loads and bound that contradict each other.
    """

    owners: Mapping[str, int]
    matrices: tuple[Matrix, ...]
    loads_ns: tuple[int, ...]
    bound_ns: int
    stage: str
    reason: str
    estimated: tuple[Shape, ...] = ()
    starts_ns: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if list(self.owners) != [m.name for m in self.matrices]:
            raise ValueError("plan: owners and matrices must name the same matrices, sorted; plan again")
        for name, rank in self.owners.items():
            if not 0 <= rank < self.world:
                raise ValueError(
                    f"plan: the owner of {name!r} is rank {rank}, outside 0 … {self.world - 1}; plan again"
                )
        if len(self.starts_ns) not in (0, self.world):
            raise ValueError(f"plan: {len(self.starts_ns)} ranks have work before, of {self.world}; plan again")
        if not all(is_int(ns) and ns >= 0 for ns in (*self.loads_ns, *self.starts_ns, self.bound_ns)):
            raise ValueError("plan: loads must be whole nanoseconds, and so must the bound; plan again")
        if self.matrices and not 0 < self.bound_ns <= self.makespan_ns:
            raise ValueError(
                f"plan: bound {self.bound_ns} ns is not in (0, makespan {self.makespan_ns} ns]; plan again"
            )

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.loads_ns)

    @property
    def ends_ns(self) -> tuple[int, ...]:
        """Nanoseconds per rank, with the work that it has before."""
        pairs = zip(self.loads_ns, self.starts_ns or (0,) * self.world, strict=True)
        return tuple(load + start for load, start in pairs)

    @property
    def makespan_ns(self) -> int:
        """Nanoseconds until the last rank is done."""
        return max(self.ends_ns)

    @property
    def gap(self) -> float:
        """``(makespan - bound) / makespan``: the most that any other assignment could save."""
        return (self.makespan_ns - self.bound_ns) / max(1, self.makespan_ns)

    @property
    def rank_matrices(self) -> tuple[int, ...]:
        """Matrices per rank."""
        owned = Counter(self.owners.values())
        return tuple(owned[rank] for rank in range(self.world))

    @property
    def rank_bytes(self) -> tuple[int, ...]:
        """Bytes per rank."""
        nbytes = [0] * self.world
        for m in self.matrices:
            nbytes[self.owners[m.name]] += m.nbytes
        return tuple(nbytes)

    @property
    def block_balance(self) -> dict[str, tuple[int, int]]:
        """Per block, its largest owner's bytes, and an even share: the mean over all ranks, or the largest matrix."""
        owned: dict[str, dict[int, int]] = {}
        largest: dict[str, int] = {}
        for m in self.matrices:
            row = owned.setdefault(m.block, {})
            row[self.owners[m.name]] = row.get(self.owners[m.name], 0) + m.nbytes
            largest[m.block] = max(largest.get(m.block, 0), m.nbytes)
        return {
            block: (max(row.values()), max(largest[block], -(-sum(row.values()) // self.world)))
            for block, row in owned.items()
        }

    @property
    def digest(self) -> str:
        """SHA-256 of world size, owners, shapes and blocks: equal on all ranks, or they do not run the same plan."""
        content = [self.world, [[m.name, m.rows, m.cols, m.block, self.owners[m.name]] for m in self.matrices]]
        return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()

    def report(self) -> str:
        """The plan as text for people: makespan, bound, gap, stage, and a row per rank.

        Of many ranks, only the most and the least loaded have a row.
        """
        if not self.matrices:
            return f"no matrices over {self.world} ranks"
        balance = self.block_balance.values()
        largest, even = sum(most for most, _ in balance), sum(even for _, even in balance)
        estimated = f"estimated for {len(self.estimated)} of {len({m.shape for m in self.matrices})} shapes"
        before = f" with what was planned before, up to {_ms(max(self.starts_ns))}" if self.starts_ns else ""
        lines = [
            f"{len(self.matrices)} matrices in {len(balance)} block{'s' * (len(balance) > 1)} over {self.world} ranks",
            f"makespan  {_ms(self.makespan_ns)}{before}",
            f"bound     {_ms(self.bound_ns)}  (gap {self.gap:.2%})",
            f"stage     {self.stage}: {self.reason}",
            f"costs     {estimated if self.estimated else 'measured'}",
            f"blocks    largest owner {largest / len(balance) / 2**20:.1f} MiB on average, "
            f"{largest / even:.2f} times an even share",
            f"digest    {self.digest}",
            "",
            f"{'rank':>6} {'load':>12} {'of makespan':>12}  {'':<{_BAR}} {'matrices':>8} {'MiB':>10}",
        ]
        owned = zip(self.loads_ns, self.rank_matrices, self.rank_bytes, strict=True)
        makespan = self.makespan_ns
        rows = [
            f"{rank:>6} {_ms(load):>12} {load / makespan:>12.1%}  "
            f"{'#' * round(_BAR * load / makespan):<{_BAR}} {count:>8} {nbytes / 2**20:>10.1f}"
            for rank, (load, count, nbytes) in enumerate(owned)
        ]
        return "\n".join(lines + _shorten(rows, self.loads_ns))

    def to_json(self) -> dict[str, Any]:
        """Plain types that ``json.dumps`` takes and ``from_json`` reads."""
        return {
            "matrices": [
                [m.name, m.rows, m.cols, m.block, m.nbytes, m.pool, self.owners[m.name]] for m in self.matrices
            ],
            "loads_ns": list(self.loads_ns),
            "bound_ns": self.bound_ns,
            "stage": self.stage,
            "reason": self.reason,
            "estimated": [list(shape) for shape in self.estimated],
            "starts_ns": list(self.starts_ns),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """The plan that ``to_json`` wrote.

        Raises:
            ValueError: a field is missing, ill-typed, or contradicts the others.
        """
        try:
            rows = [(Matrix(*row[:6]), row[6]) for row in data["matrices"]]
            return cls(
                owners={m.name: rank for m, rank in rows},
                matrices=tuple(m for m, _ in rows),
                loads_ns=tuple(data["loads_ns"]),
                bound_ns=data["bound_ns"],
                stage=data["stage"],
                reason=data["reason"],
                estimated=tuple((small, large) for small, large in data["estimated"]),
                starts_ns=tuple(data.get("starts_ns", ())),  # files of earlier versions lack it
            )
        except KeyError as error:
            raise ValueError(f"plan: field {error} is missing; plan again") from error
        except (TypeError, IndexError) as error:
            raise ValueError(f"plan: a field is ill-typed ({error}); plan again") from error


def _shorten(rows: Sequence[str], loads: Sequence[int]) -> list[str]:
    if len(rows) <= _MOST_ROWS:
        return list(rows)
    order = sorted(range(len(rows)), key=lambda rank: (-loads[rank], rank))
    half = _MOST_ROWS // 2
    middle = order[half:-half]
    between = f"   … {len(middle)} more ranks, {_ms(loads[middle[0]])} to {_ms(loads[middle[-1]])} …"
    return [rows[r] for r in order[:half]] + [between] + [rows[r] for r in order[-half:]]


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.3f} ms"
