"""What the ranks of a sharded model would exchange in a step: laid out, planned and cut into rounds by the run time.

Layouts, shared matrices, tasks, batches and rounds are made by the code that a training run goes through, for tensors
on the meta device and ranks that nobody connects. A weight is cut along its rows by the shards, as FSDP2 does, and
along its columns by tensor parallelism. Experts in one tensor are cut along their number; where more ranks shard them
than there are experts, and ranks divide them, along their rows as well.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from dmuon.comm.domain import Domain
from dmuon.exchanged.assignment import planned_owners, shared_matrices, tasks
from dmuon.exchanged.layouts import LayoutRecipe, Layouts
from dmuon.layout.matrices import numbered
from dmuon.layout.parameters import ParameterLayout
from dmuon.layout.parcels import Parcel, Route
from dmuon.layout.shards import Piece, ShardLayout, layout_of
from dmuon.layout.topology import GlobalRank, Position, Ranks
from dmuon.model.matrix_spec import MatrixSpec, remember_spec, spec_of
from dmuon.planning.cost_lookup import FoundCosts
from dmuon.planning.owner_plan import OwnerPlan
from dmuon.simulation.engine import Times
from dmuon.simulation.network import Topology
from dmuon.simulation.pools import plan_pools
from dmuon.simulation.scenario import Scenario, batches
from dmuon.simulation.wave_model import UPDATE_BYTES
from dmuon.simulation.workload import is_expert
from dmuon.solver import Matrix, Rank, SolveOptions
from dmuon.step.batches import SharedBatch, make_batches
from dmuon.step.rounds import exchanged_rounds, longest_first

_Array = NDArray[np.int64]
_JOINED = 4  # of each element: read and written when it has come, and before it goes back
_NAMED = re.compile(r"(?P<base>.*)\[(?P<number>\d+)\]$")


@dataclass(frozen=True, slots=True)
class Load:
    """What one all-to-all carries.

    Attributes:
        sent, received: bytes by rank, within its node and between nodes, shape ``(2, ranks)``.
        messages: most that a rank sends, or receives.
    """

    sent: NDArray[np.float64]
    received: NDArray[np.float64]
    messages: int

    @property
    def near(self) -> float:
        """Most bytes that a rank sends or receives within its node."""
        return float(np.maximum(self.sent[0], self.received[0]).max())

    @property
    def far(self) -> float:
        """The same between nodes."""
        return float(np.maximum(self.sent[1], self.received[1]).max())


@dataclass(frozen=True, slots=True)
class RoundLoad:
    """One round.

    Attributes:
        gather, scatter: before and after Newton–Schulz.
        copied: bytes that ranks with the same parts get of each other, most of any, and by how many broadcasts.
        ns: seconds of Newton–Schulz, by rank.
        parts: elements that each rank folds, packs and applies.
    """

    gather: Load
    scatter: Load
    copied: tuple[float, int]
    ns: Times
    parts: Times


@dataclass(frozen=True, slots=True)
class Schedule:
    """A step's rounds, and what ranks have alone.

    Attributes:
        alone: seconds of Newton–Schulz of matrices that one rank has whole, by rank.
        matrices: that are exchanged.
    """

    rounds: tuple[RoundLoad, ...]
    alone: Times
    matrices: int


def schedule(scenario: Scenario) -> Schedule:
    """What :func:`dmuon.create_dtensor_config` would do with the model of ``scenario``, whose plan it replaces."""
    scenario = replace(scenario, costs=scenario.exchanged_costs or scenario.costs)
    pieces = _Pieces()
    layouts = _layouts(scenario)
    loads = []
    total = 0
    if layouts.plans:
        owners = planned_owners(layouts, GlobalRank(0))
        made, _ = make_batches(
            tasks(layouts, [owners[i] for i in range(len(layouts.params))], GlobalRank(0)), torch.device("meta")
        )
        shared = [batch for batch in made if isinstance(batch, SharedBatch) and len(batch.parcel.holders) > 1]
        options = layouts.recipe.options
        for round_ in exchanged_rounds(
            0,
            shared,
            small_numel=options.small_param_numel_threshold,
            nbytes=options.chunk_bytes,
            together=True,
            order=longest_first,
        ):
            total += sum(parcel.count for parcel in round_.parcels)
            loads.append(_round(scenario, pieces, round_.parcels))
    return Schedule(tuple(loads), _alone(scenario, layouts), total)


# -- layouts --------------------------------------------------------------------------------------------------------


def _layouts(scenario: Scenario) -> Layouts:
    """Every tensor of the model as rank 0 would have it, and a plan of what is shared."""
    world = scenario.topology.world
    ranks = Ranks(GlobalRank(rank) for rank in range(world))
    params, names, placed = [], [], []
    for name, shape, spec in _tensors(scenario):
        layout = _layout(scenario.topology, name, shape)
        param = torch.empty(layout.pieces[0].shape, device="meta")
        if spec != MatrixSpec():
            remember_spec(param, spec)
        params.append(param)
        names.append(name)
        placed.append(ParameterLayout(ranks, layout) if world > 1 else None)
    nobody = cast(Any, None)
    domain = Domain(ranks, Position(0), torch.device("meta"), nobody, nobody)
    named = tuple(names)
    layouts = Layouts(LayoutRecipe(), tuple(params), named, named, tuple(placed), {ranks: domain}, None)
    matrices, pools = shared_matrices(layouts, ranks)
    if not matrices:
        return layouts
    return replace(layouts, plans={ranks: _planned(scenario, matrices, pools)})


def _tensors(scenario: Scenario) -> Iterator[tuple[str, tuple[int, ...], MatrixSpec]]:
    """Name, shape and make-up of each tensor; matrices of one that is not a stack of experts stand for themselves."""
    order = {block.name: i for i, block in enumerate(scenario.workload.blocks)}
    stacks: dict[str, list[Matrix]] = {}
    for m in sorted(scenario.plan.matrices, key=lambda m: order[m.block]):
        found = _NAMED.match(m.name) if is_expert(m.name) else None
        if found is None:
            yield m.name, (m.rows, m.cols), MatrixSpec()
        else:
            stacks.setdefault(found["base"], []).append(m)
    fewest = min((len(members) for members in stacks.values()), default=1)  # experts; others are fused
    for name, members in stacks.items():
        m, parts = members[0], max(1, len(members) // fewest)
        spec = MatrixSpec((m.rows,) * parts) if parts > 1 else MatrixSpec()
        yield name, (len(members) // parts, parts * m.rows, m.cols), spec


def _layout(topology: Topology, name: str, shape: tuple[int, ...]) -> ShardLayout:
    columns: Placement = Shard(len(shape) - 1) if topology.tp > 1 else Replicate()
    if len(shape) == 2:
        grid = (topology.replicate, topology.shard, topology.tp)
        return layout_of(shape, grid, (Replicate(), Shard(0), columns))
    outer = topology.shard // topology.ep  # ranks that shard the same experts
    whole = topology.ep == 1 or shape[0] >= topology.shard
    cut = Shard(0) if whole else Shard(1)
    sizes = (topology.replicate, outer, topology.ep, topology.tp)
    return layout_of(shape, sizes, (Replicate(), cut, Shard(0), columns))


def _planned(scenario: Scenario, matrices: list[Matrix], pools: list[frozenset[str]] | None) -> OwnerPlan:
    per_node, speeds = scenario.topology.gpus_per_node, scenario.speeds
    owners = [
        Rank(i, node=i // per_node, speed=speeds.get(i, 1.0), pools=None if pools is None else pools[i])
        for i in range(scenario.topology.world)
    ]
    solution = plan_pools(matrices, owners, scenario.costs, SolveOptions(method="greedy", byte_slack=0.0))
    return OwnerPlan.from_solution(solution, FoundCosts(scenario.costs, "as given"))


def _alone(scenario: Scenario, layouts: Layouts) -> Times:
    """Seconds of each rank for the matrices that nobody else has a part of."""
    counts: list[Counter[tuple[int, int]]] = [Counter() for _ in range(scenario.topology.world)]
    for param, placed in zip(layouts.params, layouts.placed, strict=True):
        if placed is None:
            counts[0].update([_two(param.shape)])
        elif param.ndim == 3:
            for share, numbers in numbered(placed.layout, spec_of(param)):
                if len(share.holders) == 1:
                    counts[share.holders[0]][_two(share.layout.shape)] += len(numbers)
    return np.array([sum(batches(scenario, of_rank)) for of_rank in counts], dtype=float)


def _two(shape: Sequence[int]) -> tuple[int, int]:
    return shape[-2], shape[-1]


# -- rounds ---------------------------------------------------------------------------------------------------------


def _round(scenario: Scenario, pieces: _Pieces, parcels: Sequence[Parcel]) -> RoundLoad:
    topology = scenario.topology
    world, itemsize = topology.world, scenario.machine.ns_bytes
    ns, parts = np.zeros(world), np.zeros(world)
    for parcel in parcels:
        ns[parcel.owner] += _orthogonalized_s(scenario, parcel)
        at, numel = pieces.flat(parcel.pieces)
        parts[at] += parcel.count * numel
    gathers = [(parcel.owner, parcel.to_owner, parcel.to_owner.senders) for parcel in parcels]
    scatters = [(parcel.owner, parcel.from_owner, parcel.from_owner.receivers) for parcel in parcels]
    return RoundLoad(
        _load(topology, pieces, gathers, itemsize, to_owner=True),
        _load(topology, pieces, scatters, itemsize, to_owner=False),
        _copied(topology, pieces, parcels, itemsize),
        ns,
        parts,
    )


def _orthogonalized_s(scenario: Scenario, parcel: Parcel) -> float:
    """Seconds of the owner for what has come whole: an update less its passes, which each rank runs over its parts.

    Instead, parts are joined, and those of the update are laid out for the others.
    """
    m, n = parcel.layout.shape
    machine = scenario.machine
    less = UPDATE_BYTES - _JOINED * machine.ns_bytes
    update = sum(batches(scenario, {(m, n): parcel.count}))
    return max(0.0, update - less * parcel.numel / machine.copy_bytes_per_s)


def _load(
    topology: Topology,
    known: _Pieces,
    routes: Iterable[tuple[Position, Route, Mapping[Position, Piece]]],
    itemsize: int,
    *,
    to_owner: bool,
) -> Load:
    """``routes`` between an owner and the pieces of the others."""
    of_owner, of_others = np.zeros((2, topology.world)), np.zeros((2, topology.world))
    node = np.arange(topology.world) // topology.gpus_per_node
    partners: dict[int, NDArray[np.bool_]] = {}
    for owner, route, pieces in routes:
        at, numel = known.flat(pieces)
        others = at != owner
        at, nbytes = at[others], itemsize * route.count * numel[others]
        far = node[at] != node[owner]
        for link, some in enumerate((~far, far)):
            of_owner[link, owner] += nbytes[some].sum()
            of_others[link, at[some]] += nbytes[some]
        partners.setdefault(owner, np.zeros(topology.world, dtype=bool))[at] = True
    met = np.array(list(partners.values())) if partners else np.zeros((1, 1), dtype=bool)
    messages = int(max(met.sum(axis=1).max(), met.sum(axis=0).max()))
    return Load(of_others, of_owner, messages) if to_owner else Load(of_owner, of_others, messages)


def _copied(topology: Topology, known: _Pieces, parcels: Sequence[Parcel], itemsize: int) -> tuple[float, int]:
    """What goes on to other copies: by the replica that it comes from, for each rank."""
    nbytes = np.zeros((topology.replicate, topology.world))
    replica = topology.coordinates()[0]
    for parcel in parcels:
        if parcel.spread.copies > 1:
            at, numel = known.flat(parcel.pieces)
            nbytes[replica[parcel.owner], at] += itemsize * parcel.count * numel
    return float(nbytes.sum(axis=0).max()), int(np.count_nonzero(nbytes, axis=0).max())


class _Pieces:
    """Positions and elements of pieces as arrays, once for all matrices that lie alike."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Mapping[Position, Piece], _Array, _Array]] = {}

    def flat(self, pieces: Mapping[Position, Piece]) -> tuple[_Array, _Array]:
        known = self._known.get(id(pieces))
        if known is None:
            numel = np.array([piece.numel for piece in pieces.values()], dtype=np.int64)
            known = self._known[id(pieces)] = (pieces, np.array(list(pieces), dtype=np.int64), numel)
        return known[1], known[2]
