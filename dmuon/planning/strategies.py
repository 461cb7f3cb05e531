"""Which matrices gain if they have not just an owner: strategy ``"auto"``, by predictions of plans and links.

A matrix may have a *team*: ranks next to each other, each of which orthogonalizes a slice. For each time that a matrix
could take, those that take longer on one rank get the smallest team that is fast enough; then teams and owners are put,
largest first, where work ends first. Of these guesses the one whose slowest rank ends first is planned. So one huge
matrix is sharded over all ranks, and where there are fewer matrices than ranks the largest ones get two ranks each.

If all matrices are small, they may be replicated, where an exchange less takes more off than computing all of them
adds. What is predicted to gain less than a prediction may be wrong has an owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

import torch

from dmuon.comm.agreement import agree
from dmuon.comm.domain import Domain
from dmuon.kernels import coefficient_sequence, cost_of_slice, sliced_variant, storage_dtype
from dmuon.layout.matrices import Strategy
from dmuon.layout.topology import Position
from dmuon.planning.cost_cache import NsOptions
from dmuon.planning.cost_lookup import link_latency_ns, link_ns_per_byte
from dmuon.planning.owner_plan import OwnerPlan
from dmuon.platform.host import HostShare, is_oversubscribed
from dmuon.solver import CostTable, Matrix, Shape

SMALL_PARAM_NUMEL = 65536  # elements of a matrix that may be replicated
_ERROR = 0.2  # of predictions; less is no reason to change a plan
_NOMINAL_NS_PER_BYTE = 1 / 50  # 50 GB/s, beside costs that are estimated from FLOPs
_NOMINAL_LATENCY_NS = 2e4  # of a collective, likewise


@dataclass(frozen=True, slots=True)
class Link:
    """What it takes to send: a byte that an all-to-all brings, and any collective; in nanoseconds."""

    ns_per_byte: float
    latency_ns: float


def ns_per_byte(domain: Domain, costs: object) -> float:
    """What a byte costs that an all-to-all brings to one of ``domain``. Collective, unless costs are ``"flops"``."""
    return _NOMINAL_NS_PER_BYTE if costs == "flops" else link_ns_per_byte(domain)


def find_link(domain: Domain, per_byte: float, costs: object) -> tuple[Link, bool]:
    """The link that the first rank found, and whether a computation on more ranks takes less time.

    It does not where costs were measured on hosts whose ranks have more threads than CPUs. Collective likewise.
    """
    if costs == "flops":
        return Link(per_byte, _NOMINAL_LATENCY_NS), True
    said = agree(domain.group, None, (Link(per_byte, link_latency_ns(domain)), HostShare.here()))
    measured = domain.device.type == "cpu" and not isinstance(costs, CostTable)
    return said[0][0], not (measured and is_oversubscribed([share for _, share in said]))


Ranking = tuple[tuple[str, float], ...]  # ways, and what a step takes with them in ns: the chosen one, the next best, …


def told(ranking: Ranking) -> list[str]:
    """For people."""
    return [f"{way} {ns / 1e6:.3f} ms" for way, ns in ranking]


@dataclass(frozen=True, slots=True)
class Choice:
    """How a matrix is orthogonalized that has not just an owner.

    Attributes:
        predicted_ns: what it takes on each rank that does so.
        team: positions of these ranks; empty for all.
    """

    strategy: Strategy
    predicted_ns: float
    team: tuple[Position, ...] = ()


def choose(
    matrices: Sequence[Matrix],
    candidates: Collection[str],
    small: Collection[str],
    given: Mapping[str, int],
    plan: OwnerPlan,
    replan: Callable[[Sequence[Matrix], Sequence[int]], OwnerPlan],
    link: Link,
    device: torch.device,
    ns: NsOptions,
    *,
    exchange_ns: float,
    carried_ns_per_byte: float,
) -> tuple[dict[str, Choice], OwnerPlan | None, Ranking]:
    """By name, what is chosen for matrices that have not just owners, and the plan for the others, if there are any.

    And what was compared. The same on all ranks that have the same arguments; ``replan`` may be collective.

    Args:
        candidates: names of those that may be sharded.
        small: names of those that may be replicated.
        given: by name, the size of the team of those that have to be sharded.
        plan: of all matrices.
        replan: plans some of them, for ranks that have so many nanoseconds of other work.
        ns: the Newton–Schulz run that costs are of.
        exchange_ns: what owners wait for messages, beside their bytes.
        carried_ns_per_byte: what costs of the plan have for a byte of a matrix.
    """
    assert plan.costs is not None, "a plan that was made now"
    starts = plan.solution.starts_ns or (0,) * plan.world
    sizes = [*(2**i for i in range(1, plan.world.bit_length()) if 2**i < plan.world), plan.world]
    counts = Counter(matrix.shape for matrix in matrices)
    times: dict[tuple[Shape, int], float] = {}  # by the size of the team; of batches, where that is one rank
    for matrix in {matrix.shape: matrix for matrix in matrices}.values():
        shape, each = matrix.shape, -(-counts[matrix.shape] // plan.world)
        alone = plan.costs.cost(shape, 1) - carried_ns_per_byte * matrix.nbytes
        times |= {(shape, n): sharded_ns(shape, alone, n, link, device, ns) for n in {*sizes, *given.values()}}
        times[shape, 1] = plan.costs.cost(shape, each) / each

    def placed(teams: Mapping[str, int], some: Sequence[Matrix]) -> tuple[list[tuple[Position, ...]], list[float]]:
        wanted = [teams.get(one.name, 1) for one in some]
        return place([(n, times[one.shape, n]) for n, one in zip(wanted, some, strict=True)], starts)

    def planned(teams: Mapping[str, int]) -> tuple[float, OwnerPlan | None, dict[str, tuple[Position, ...]]]:
        """What all matrices take together, the plan of those without a team, and the teams."""
        if not teams:
            return plan.solution.makespan_ns + exchange_ns, plan, {}
        split, rest = ([m for m in matrices if (m.name in teams) is has_team] for has_team in (True, False))
        put, ends = placed(teams, split)
        of_rest = replan(rest, [round(end - start) for end, start in zip(ends, starts, strict=True)]) if rest else None
        total = max(ends) if of_rest is None else of_rest.solution.makespan_ns + exchange_ns
        return total, of_rest, {one.name: team for one, team in zip(split, put, strict=True)}

    by_owners = with_teams = planned(given)
    ways = {"owner": by_owners[0]}
    guesses = [{**given, **guess} for guess in _guesses([m for m in matrices if m.name in candidates], times, sizes)]
    if guesses:
        ends = [max(placed(teams, matrices)[1]) for teams in (given, *guesses)]
        best = min(range(1, len(ends)), key=ends.__getitem__)
        if ends[best] < ends[0]:
            with_teams = planned(guesses[best - 1])
        ways["sharded"] = max(with_teams[0], ends[best] + exchange_ns)
    everything = replicated_ns(matrices, plan, link, carried_ns_per_byte)
    if len(small) == len(matrices):
        ways["replicated"] = max(starts) + everything
    chosen = min(ways, key=ways.__getitem__)
    chosen = chosen if ways[chosen] <= (1 - _ERROR) * ways["owner"] else "owner"
    ranking = tuple(sorted(ways.items(), key=lambda way: (way[0] != chosen, way[1])))
    if chosen == "replicated":
        return dict.fromkeys(small, Choice("replicated", everything / len(matrices))), plan, ranking
    _, of_rest, teams = with_teams if chosen == "sharded" else by_owners
    choices = {}
    for matrix in (matrix for matrix in matrices if matrix.name in teams):
        team = teams[matrix.name]
        some = team if len(team) < plan.world else ()
        choices[matrix.name] = Choice("sharded", times[matrix.shape, len(team)], some)
    return choices, of_rest, ranking


def _guesses(
    matrices: Sequence[Matrix], times: Mapping[tuple[Shape, int], float], sizes: Sequence[int]
) -> Iterator[dict[str, int]]:
    """By name, sizes of teams: none larger than some time needs in which each matrix is to end.

    Of all matrices of a shape, or of so many as they are more than a multiple of the ranks. First the largest alone.
    """
    by_shape: dict[Shape, list[str]] = {}
    for matrix in sorted(matrices, key=lambda matrix: matrix.name):
        by_shape.setdefault(matrix.shape, []).append(matrix.name)
    fastest = {shape: min(sizes, key=lambda size: times[shape, size]) for shape in by_shape}
    for shape in sorted(by_shape, key=lambda shape: times[shape, 1])[-1:]:
        yield {by_shape[shape][0]: fastest[shape]}
    for most in sorted({times[shape, size] for shape in by_shape for size in sizes}):
        enough = {}
        for shape, best in fastest.items():
            if times[shape, 1] > max(most, times[shape, best]):
                enough[shape] = next((size for size in sizes if times[shape, size] <= most), best)
        for shares_evenly in (False, True):
            teams: dict[str, int] = {}
            for shape, size in enough.items():
                names = by_shape[shape]
                teams |= dict.fromkeys(names[: len(names) % sizes[-1] or None] if shares_evenly else names, size)
            if teams:
                yield teams


def place(
    wanted: Sequence[tuple[int, float]], starts: Sequence[float]
) -> tuple[list[tuple[Position, ...]], list[float]]:
    """Teams for what takes so many ranks so long, and when each rank ends.

    The largest teams first, and what takes longest; always those ranks that end first. A team begins at a multiple of
    its size: so it lies within a node, if those have a multiple of it, and each rank is in one team of a size.
    """
    ends = list(starts)
    teams: list[tuple[Position, ...]] = [()] * len(wanted)
    for size in sorted({size for size, _ in wanted}, reverse=True):
        free = [(max(ends[first : first + size]), first) for first in range(0, len(ends) - size + 1, size)]
        heapify(free)
        for i in sorted((i for i, (n, _) in enumerate(wanted) if n == size), key=lambda i: -wanted[i][1]):
            end, first = free[0][0] + wanted[i][1], free[0][1]
            heapreplace(free, (end, first))
            ends[first : first + size] = [end] * size
            teams[i] = tuple(map(Position, range(first, first + size)))
    return teams, ends


def sharded_ns(
    shape: Shape, alone_ns: float, world: int, link: Link, device: torch.device, options: NsOptions
) -> float:
    """What a matrix takes that ``world`` ranks orthogonalize together.

    Args:
        alone_ns: what Newton–Schulz takes of it on one rank.
    """
    storage = storage_dtype(torch.float32, device, options.dtype)
    sequence = coefficient_sequence(options.coefficients, options.steps)
    restarts = sliced_variant(shape, 1, world, sequence, storage, device).restarts
    m, n = shape
    sums = (len(restarts) + 1) * (link.latency_ns + 2 * (world - 1) / world * 4 * m * m * link.ns_per_byte)
    slices = 2 * (link.latency_ns + 4 * m * n / world * link.ns_per_byte)
    return alone_ns * cost_of_slice(shape, world, sequence, storage, device) + sums + slices


def replicated_ns(matrices: Sequence[Matrix], plan: OwnerPlan, link: Link, carried_ns_per_byte: float) -> float:
    """What all of them take on each rank, with the one exchange before."""
    assert plan.costs is not None
    counts: Mapping[Shape, int] = Counter(matrix.shape for matrix in matrices)
    elements = sum(matrix.rows * matrix.cols for matrix in matrices)
    carried = carried_ns_per_byte * sum(matrix.nbytes for matrix in matrices)
    computed = sum(plan.costs.cost(shape, count) for shape, count in counts.items()) - carried
    return computed + link.latency_ns + 4 * elements * link.ns_per_byte
