"""Muon with a user's own communication: three functions, what they are given, and what they must return.

Also what a generated configuration says of the layout of parameters, of which its functions are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from dmuon.layout.topology import GlobalRank, RankGrid, ShardDims
from dmuon.planning.owner_plan import Costs, Speeds, check_options
from dmuon.planning.strategies import SMALL_PARAM_NUMEL
from dmuon.platform.options import check_flag, check_integer
from dmuon.solver import SolveOptions

CHUNK_BYTES = 2**28
LAYOUTS = "dmuon.layouts"  # in ``state``: what generated functions know of an optimizer's parameters
OWN_ENTRIES = ("rank", "param_names", "assignments", LAYOUTS)  # of ``state``, set once by each optimizer


@runtime_checkable
class Waitable(Protocol):
    """Communication under way, such as a ``dist.Work``."""

    def wait(self) -> object: ...


Owners = Mapping[int, int] | Mapping[int, list[int] | tuple[int, ...]]
Returned = Tensor | None | Waitable | tuple[Tensor | None, Waitable | None]


@dataclass
class DistributedConfig:
    """How Muon assembles whole matrices from what the ranks hold: three functions of the user's.

    Each parameter has one owner. In every step the owner receives the whole momentum-smoothed update, orthogonalizes
    it once, and gives every rank its part of the result. Weights and momentum stay where they are::

        whole = gather_fn(update, owner, state)
        part = redistribute_fn(orthogonalize(whole) if state["rank"] == owner else None, owner, state)

    Every rank calls ``gather_fn`` and ``redistribute_fn`` for the same parameters in the same order, so collectives
    inside them match. All ranks are global ranks, as ``torch.distributed.get_rank()`` gives them. What a function
    raises ends the step: nothing is tried again. A RuntimeError, as failed communication raises it, comes as a
    :class:`dmuon.CollectiveError` that names rank, step and parameter.

    ``rank`` and ``state`` are passed by position. A function with parameters named ``dst_rank`` (``src_rank`` in
    ``redistribute_fn``) or ``rank``, and ``state``, gets them by these names, in whatever order, keyword-only too.

    ``gather_fn`` and ``redistribute_fn`` return one of:

    - a tensor that is ready, or ``None`` where there is nothing to return;
    - ``(tensor, work)``: the tensor is ready once ``work.wait()`` returns. ``work`` is what a collective with
      ``async_op=True`` returns, ``None`` included; on a rank that receives nothing, ``(None, work)``;
    - an object whose ``wait()`` returns the tensor or ``None``: for tensors that are put together after the
      communication.

    Attributes:
        assign_fn: ``assign_fn(params, state)``, called when the optimizer is made, and again when a group is added or
            parameters or their layouts have changed. Returns the owner of every parameter, the same on every rank:
            ``{index: rank}`` over ``range(len(params))``, or ``{rank: [index, …]}``.
        gather_fn: ``gather_fn(update, dst_rank, state)``, called in every step for every parameter. ``update`` is
            this rank's part, of the parameter's local shape. Returns the whole tensor on ``dst_rank``; what other
            ranks return, ``None`` as a rule, is dropped.
        redistribute_fn: ``redistribute_fn(update, src_rank, state)``, called after ``gather_fn`` for the same
            parameter. ``update`` is the orthogonalized whole tensor on ``src_rank`` and ``None`` elsewhere. Returns
            this rank's part, of the parameter's local shape, on every rank.
        state: passed to all three, for process groups, shapes and whatever else they need. dmuon sets ``"rank"``,
            this process's global rank; ``"assignments"``, what ``assign_fn`` returned; ``"param_names"``, names by
            index; ``"dmuon.layouts"``, what generated functions know of the parameters, for them alone; and
            ``"current_param_idx"``, the index of the parameter, before every call of ``gather_fn`` and
            ``redistribute_fn``. Read the last when called: by the time of ``wait()``, other parameters may have been
            started. Set ``"process_group"`` if fewer ranks than all take part. Several optimizers may have one
            configuration: before every call, these entries are those of the optimizer that calls.
        async_gpu_parallelism: owners orthogonalize at the same time. ``False`` finishes each parameter before the
            next one starts: for debugging.
        prefetch_count: parameters whose ``gather_fn`` is called ahead of the one that is being orthogonalized. Each
            holds one whole matrix on its owner. It hides communication only where ``gather_fn`` returns something to
            wait for; 0 gathers each parameter when it is needed.

    Raises:
        TypeError, ValueError: a field of the wrong type or out of its range, by name.
    """

    assign_fn: Callable[..., Owners]
    gather_fn: Callable[..., Returned]
    redistribute_fn: Callable[..., Returned]
    state: dict[str, Any]
    async_gpu_parallelism: bool = True
    prefetch_count: int = 1

    def __post_init__(self) -> None:
        for name in ("assign_fn", "gather_fn", "redistribute_fn"):
            if not callable(getattr(self, name)):
                raise TypeError(f"{name} must be a function, got {getattr(self, name)!r}")
        if not isinstance(self.state, dict):
            raise TypeError(f"state must be a dict, got {self.state!r}")
        check_flag("async_gpu_parallelism", self.async_gpu_parallelism)
        check_integer("prefetch_count", self.prefetch_count, 0)


@dataclass(frozen=True, slots=True)
class LayoutOptions:
    """What all generators have in common; :func:`dmuon.create_dtensor_config` explains each option."""

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


def owners_from(assigned: object, count: int, world: int) -> tuple[GlobalRank, ...]:
    """The owner of each of ``count`` parameters, from what ``assign_fn`` returned.

    Raises:
        TypeError: neither ``{index: rank}`` nor ``{rank: [index, …]}``.
        ValueError: an index that is missing, unknown or assigned twice, or a rank outside ``range(world)``.
    """
    owners: dict[int, GlobalRank] = {}
    for index, rank in _pairs(assigned):
        if not 0 <= index < count:
            raise ValueError(f"assign_fn assigned parameter {index} to rank {rank}, but there are {count} parameters")
        if not 0 <= rank < world:
            raise ValueError(
                f"Invalid rank {rank} for parameter {index}: ranks are 0 … {world - 1}; assign_fn gives global ranks"
            )
        if index in owners:
            raise ValueError(
                f"assign_fn assigned parameter {index} twice, to rank {owners[index]} and rank {rank}: "
                "each parameter has one owner"
            )
        owners[index] = GlobalRank(rank)
    missing = [index for index in range(count) if index not in owners]
    if missing:
        raise ValueError(
            f"assign_fn left out {', '.join(map(str, missing))} of {count} parameters: "
            "give every index in range(len(params)) a rank"
        )
    return tuple(owners[index] for index in range(count))


def _pairs(assigned: object) -> Iterator[tuple[int, int]]:
    """Every ``(index, rank)`` of either form of assignment."""
    wanted = "assign_fn must return {index: rank}, or {rank: [index, …]} with lists or tuples"
    if not isinstance(assigned, Mapping):
        raise TypeError(f"{wanted}; got {type(assigned).__name__}")
    by_rank = all(isinstance(value, (list, tuple)) for value in assigned.values())
    for key, value in assigned.items():
        for index, rank in [(index, key) for index in value] if by_rank else [(key, value)]:
            if not (_is_integer(index) and _is_integer(rank)):
                raise TypeError(f"{wanted}; got the index {index!r} with the rank {rank!r}")
            yield int(index), int(rank)


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
