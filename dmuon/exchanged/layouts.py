"""Where the parameters of one optimizer lie by a recipe, and the process groups of the ranks that share them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon.comm.agreement import agree, require_same_in_turn
from dmuon.comm.domain import Domain, make_domain
from dmuon.comm.process_groups import this_rank
from dmuon.layout.parameters import (
    ParameterLayout,
    part_among_holders,
    place,
    place_dtensor,
    place_replicated,
)
from dmuon.layout.shards import ShardLayout
from dmuon.layout.topology import GlobalRank, RankGrid, Ranks, ShardDims, listed
from dmuon.model.matrix_spec import spec_of
from dmuon.planning.agreed_plan import Costs, Speeds, check_options
from dmuon.planning.owner_plan import OwnerPlan
from dmuon.platform.options import check_integer
from dmuon.platform.torch_private import default_group_is_bound, local_tensor
from dmuon.solver import SolveOptions

CHUNK_BYTES = 2**28
SMALL_PARAM_NUMEL = 65536
_SHOWN_PIECES = 16


@dataclass(frozen=True, slots=True)
class LayoutOptions:
    """What all generators have in common; :func:`dmuon.create_dtensor_config` explains each option.

    Raises:
        TypeError, ValueError: an option of the wrong type or out of its range.
    """

    costs: Costs = None
    solve: SolveOptions | None = None
    chunk_bytes: int = CHUNK_BYTES
    small_param_numel_threshold: int = SMALL_PARAM_NUMEL
    ranks: Speeds = None

    def __post_init__(self) -> None:
        check_options(self.costs, self.solve, None, self.ranks)
        check_integer("chunk_bytes", self.chunk_bytes, 1)
        check_integer("small_param_numel_threshold", self.small_param_numel_threshold, 0)


@dataclass(frozen=True, slots=True, eq=False)
class LayoutRecipe:
    """What a generated configuration says; nothing in it changes, and any number of optimizers may go by it.

    Attributes:
        grid: the ranks of the user's groups or mesh; None where parameters say themselves where they lie.
        shard_dims: of plain tensors in a grid, the dimension that each role cuts.
        copies: without a grid, by ``id``, the parameters that several ranks have whole, and those ranks.
    """

    grid: RankGrid | None = None
    shard_dims: ShardDims | Callable[[Tensor], ShardDims] | None = None
    copies: Mapping[int, Sequence[GlobalRank]] = field(default_factory=dict)
    options: LayoutOptions = field(default_factory=LayoutOptions)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Layouts:
    """What one rank knows of its parameters once all ranks that share one of them agree on it.

    Attributes:
        names: of the parameters, on this rank.
        labels: the same on all ranks that share a parameter, where ``names`` may differ.
        placed: where each parameter lies; None for one that this rank has alone.
        domains: by their ranks, those that share parameters with this one; in one order on all ranks.
        whole: all ranks of the recipe's grid, some of which may share nothing; None without a grid of several ranks.
        among_holders: ranks that hold the same matrices of a stack exchange these among themselves.
        plans: who is to own what, by the ranks that share it; empty before they have planned.
    """

    recipe: LayoutRecipe
    params: tuple[Tensor, ...]
    names: tuple[str, ...]
    labels: tuple[str, ...]
    placed: tuple[ParameterLayout | None, ...]
    domains: Mapping[Ranks, Domain]
    whole: Domain | None
    among_holders: bool = False
    plans: Mapping[Ranks, OwnerPlan] = field(default_factory=dict)

    def members(self, domain: Domain) -> list[Tensor]:
        """The parameters that the ranks of ``domain`` share, also those of which some of them exchange a part."""
        pairs = zip(self.params, self.placed, strict=True)
        return [
            param
            for param, placed in pairs
            if placed is not None and domain.ranks in (placed.ranks, placed.whole.ranks)
        ]

    def exchanged(self, domain: Domain) -> list[Tensor]:
        """The parameters of which the ranks of ``domain`` exchange matrices."""
        pairs = zip(self.params, self.placed, strict=True)
        return [
            param
            for param, placed in pairs
            if placed is not None and domain.ranks == placed.ranks and (placed.is_part or placed.stack is None)
        ]

    def alike(self, other: Layouts) -> bool:
        """Whether both are of the same parameters, which lie as they did."""
        return [*map(id, self.params)] == [*map(id, other.params)] and self.placed == other.placed


def lay_out(
    recipe: LayoutRecipe,
    params: Sequence[Tensor],
    names: Sequence[str],
    *,
    device: torch.device | None = None,
    last: Layouts | None = None,
    among_holders: bool = False,
) -> Layouts:
    """Find where ``params`` lie, connect the ranks that share them, and agree with them on all of it.

    Collective over the ranks that share parameters; with a grid over all of its ranks.

    Args:
        device: of the ranks' communication if there are no parameters.
        last: of the same optimizer before; its process groups are used again.
        among_holders: the matrices of a stack are exchanged by the ranks that hold them, where these are some of those
            that share the stack.

    Raises:
        ValueError: on all ranks that share parameters, by the name of the one that cannot be placed or that lies
            otherwise on another rank.
    """
    if params:
        device = local_tensor(params[0]).device
    fault: ValueError | None = None
    whole: Domain | None = None
    if recipe.grid is None:
        placed, fault = _placed_alone(recipe, params, names)
    elif len(recipe.grid.ranks) == 1:
        placed = place(params, names, recipe.grid, this_rank(), recipe.shard_dims, lambda item: [item])
    else:
        whole = None if last is None else last.whole
        if whole is None or whole.ranks != tuple(sorted(recipe.grid.ranks)):
            # Before any rank can find a fault, which it then tells the others.
            whole = make_domain(recipe.grid.ranks, device or torch.device("cpu"))
        placed = _placed_on_grid(recipe, recipe.grid, whole, params, names)
    placed = [None if one is None or len(one.ranks) == 1 else one for one in placed]
    among_holders = among_holders and not (dist.is_initialized() and default_group_is_bound())
    if among_holders:  # a default group that is bound to a device allows no further groups of some ranks
        placed = [
            one if one is None or spec_of(param).flattened else part_among_holders(one, this_rank())
            for param, one in zip(params, placed, strict=True)
        ]

    open_domains = {} if last is None else dict(last.domains)
    if whole is not None:
        open_domains[whole.ranks] = whole
    domains: dict[Ranks, Domain] = {}
    labels = list(names)
    asked: list[tuple[dist.ProcessGroup, Ranks, list[tuple[str, str]]]] = []
    for ranks in sorted({one.whole.ranks for one in placed if one is not None}):
        members = [(i, one.whole) for i, one in enumerate(placed) if one is not None and one.whole.ranks == ranks]
        domains[ranks] = open_domains.get(ranks) or make_domain(ranks, local_tensor(params[members[0][0]]).device)
        for number, (i, _) in enumerate(members):
            labels[i] = _label(names[i], number, ranks)
        described = [_described(labels[i], params[i], one) for i, one in members]
        asked.append((domains[ranks].group, ranks, described))
    require_same_in_turn(asked, fault)
    # Only now: a rank that has another layout would not come. What is alike as a whole is alike in its parts.
    for ranks in sorted({one.ranks for one in placed if one is not None and one.is_part} - domains.keys()):
        member = next(i for i, one in enumerate(placed) if one is not None and one.ranks == ranks)
        domains[ranks] = open_domains.get(ranks) or make_domain(ranks, local_tensor(params[member]).device)
    domains = dict(sorted(domains.items()))
    return Layouts(recipe, tuple(params), tuple(names), tuple(labels), tuple(placed), domains, whole, among_holders)


def _placed_alone(
    recipe: LayoutRecipe, params: Sequence[Tensor], names: Sequence[str]
) -> tuple[list[ParameterLayout | None], ValueError | None]:
    """Where parameters lie by what they say of themselves, and the first fault, of which others must hear."""
    placed: list[ParameterLayout | None] = []
    fault: ValueError | None = None
    for param, name in zip(params, names, strict=True):
        copies = recipe.copies.get(id(param))
        try:
            if isinstance(param, DTensor):
                placed.append(place_dtensor(param, name, this_rank()))
            else:
                placed.append(None if copies is None else place_replicated(param, copies))
        except ValueError as error:
            fault = fault or error
            placed.append(_suspected(param))
    return placed, fault


def _suspected(param: Tensor) -> ParameterLayout | None:
    """Where a parameter that cannot be placed seems to lie, for its ranks to hear of it; None if that is unknown."""
    if not isinstance(param, DTensor) or param.device_mesh.get_coordinate() is None:
        return None
    return place_replicated(param, sorted(set(param.device_mesh.mesh.flatten().tolist())))


def _placed_on_grid(
    recipe: LayoutRecipe, grid: RankGrid, whole: Domain, params: Sequence[Tensor], names: Sequence[str]
) -> list[ParameterLayout | None]:
    """Where the parameters lie in ``grid``. All ranks of it go on from here, or raise.

    They agree twice, whatever each of them finds: on the shapes of plain parameters that are cut, and on what shares.
    """
    cut: list[list[tuple[str, tuple[int, ...]]]] = []  # of each rank of ``whole``, once they have agreed
    asked = False

    def share(item: object) -> list[object]:
        nonlocal asked
        asked = True
        cut.extend(agree(whole.group, None, item))
        return [cut[whole.ranks.index(rank)] for rank in grid.ranks]

    placed: list[ParameterLayout | None] = []
    fault: Exception | None = None
    try:
        placed = place(params, names, grid, this_rank(), recipe.shard_dims, share)
    except Exception as error:  # whatever a user's shard_dims raises
        if asked and not cut:
            raise  # all ranks do
        fault = error
    if not asked:
        cut.extend(agree(whole.group, fault, []))
        rank = next((rank for rank, items in zip(whole.ranks, cut, strict=True) if items), None)
        if rank is not None:
            names = [name for name, _ in cut[whole.ranks.index(rank)]]
            fault = ValueError(
                f"rank {rank} has sharded parameters {names} and rank {whole.ranks[whole.position]} has none; give all "
                "ranks of the process groups the same parameters in one order, and the same shard_dims"
            )
    shared = {one.ranks for one in placed if one is not None and len(one.ranks) > 1}
    _require_shared_alike(whole.ranks, agree(whole.group, fault, shared))
    return placed


def _require_shared_alike(ranks: Ranks, shared: Sequence[set[Ranks]]) -> None:
    """Raise on all ranks of a grid if one of them waits for another that does not know of it."""
    of_rank = dict(zip(ranks, shared, strict=True))
    for rank, lines in of_rank.items():
        for line in sorted(lines):
            other = next((other for other in line if line not in of_rank.get(other, ())), None)
            if other is not None:
                raise ValueError(
                    f"rank {rank} holds parameters together with ranks {list(line)}, and rank {other} holds none with "
                    "exactly these; give all of them the same parameters, laid out alike, and the same shard_dims"
                )


def _label(name: str, number: int, ranks: Ranks) -> str:
    """The name of a parameter of a module; otherwise, as groups differ between ranks, its number among the shared."""
    return f"{number} of those that ranks {listed(ranks, ' ')} hold together" if " " in name else name


def _described(label: str, param: Tensor, placed: ParameterLayout) -> tuple[str, str]:
    """What all ranks that share a parameter must say of it."""
    layout = placed.layout
    return f"parameter {label!r}", f"{layout.shape}, {param.dtype}, {spec_of(param)}, {_described_pieces(layout)}"


@lru_cache(maxsize=256)
def _described_pieces(layout: ShardLayout) -> str:
    """For people what fits a line, and of the rest what tells it from others."""
    shapes = [piece.shape for piece in layout.pieces]
    if len(shapes) <= _SHOWN_PIECES:
        return f"in pieces {shapes}"
    digest = hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]
    return f"in {len(shapes)} pieces {str(shapes[:_SHOWN_PIECES])[:-1]}, …] of digest {digest}"
