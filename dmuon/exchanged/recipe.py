"""What a generated configuration says; nothing in it changes, and any number of optimizers may go by it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from dmuon.layout.rank_grid import RankGrid, ShardDims
from dmuon.layout.ranks import GlobalRank
from dmuon.planning.agreed_plan import Costs, check_options
from dmuon.platform.options import check_integer
from dmuon.solver import SolveOptions

__all__ = ["CHUNK_BYTES", "SMALL_PARAM_NUMEL", "LayoutOptions", "LayoutRecipe"]

CHUNK_BYTES = 2**28
SMALL_PARAM_NUMEL = 65536


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

    def __post_init__(self) -> None:
        check_options(self.costs, self.solve, None)
        check_integer("chunk_bytes", self.chunk_bytes, 1)
        check_integer("small_param_numel_threshold", self.small_param_numel_threshold, 0)


@dataclass(frozen=True, slots=True, eq=False)
class LayoutRecipe:
    """How to find where parameters lie, and how to exchange them.

    Attributes:
        grid: the ranks of the user's groups or mesh; None where parameters say themselves where they lie.
        shard_dims: of plain tensors in a grid, the dimension that each role cuts.
        copies: without a grid, by ``id``, the parameters that several ranks have whole, and those ranks.
    """

    grid: RankGrid | None = None
    shard_dims: ShardDims | Callable[[Tensor], ShardDims] | None = None
    copies: Mapping[int, Sequence[GlobalRank]] = field(default_factory=dict)
    options: LayoutOptions = field(default_factory=LayoutOptions)
