"""The functions of generated configurations: who orthogonalizes what lies on several ranks, and how it gets there."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon.comm.agreement import agree, require_same
from dmuon.comm.domain import Domain, make_domain
from dmuon.comm.process_groups import this_rank
from dmuon.comm.redistribution import start_redistribution
from dmuon.layout.parameters import ParameterLayout, place, place_dtensor, place_replicated
from dmuon.layout.parcels import Parcel
from dmuon.layout.rank_grid import RankGrid, ShardDims
from dmuon.layout.ranks import GlobalRank, Position, position_in, positions
from dmuon.layout.shards import Cell, cells
from dmuon.planning.agreed_plan import Costs, make_plan
from dmuon.planning.link_cost import link_ns_per_byte
from dmuon.planning.owner_plan import OwnerPlan
from dmuon.platform.host import HostShare, warn_if_oversubscribed
from dmuon.platform.torch_private import local_tensor
from dmuon.solver import Matrix, SolveOptions
from dmuon.step.task import Task

__all__ = ["ShardFunctions"]

_NOMINAL_NS_PER_BYTE = 1 / 50  # 50 GB/s, beside costs that are estimated from FLOPs
_WIRE_BYTES = 8  # of an element, to the owner and back in fp32


class ShardFunctions:
    """``assign_fn``, ``gather_fn`` and ``redistribute_fn`` for parameters whose layout is known.

    ``dmuon.Muon`` recognizes them, and exchanges many matrices at once by the same layouts, instead of calling
    ``gather`` and ``redistribute`` for one after the other.

    Attributes:
        plans: of the last assignment, by the global ranks that it is for.
        labels: of the parameters of the last assignment, the same on all ranks that hold one together.
    """

    def __init__(
        self,
        *,
        grid: RankGrid | None = None,
        shard_dims: ShardDims | Callable[[Tensor], ShardDims] | None = None,
        copies: Mapping[int, Sequence[GlobalRank]] | None = None,
        costs: Costs = None,
        solve: SolveOptions | None = None,
        chunk_bytes: int,
        small_numel: int,
    ) -> None:
        """``copies``: by ``id`` of a parameter that every one of these ranks has whole, those global ranks."""
        self._grid = grid
        self._shard_dims = shard_dims
        self._copies = dict(copies or {})
        self._costs = costs
        self._solve = solve
        self.chunk_bytes = chunk_bytes
        self.small_numel = small_numel
        self.plans: dict[tuple[int, ...], OwnerPlan] = {}
        self._domains: dict[tuple[GlobalRank, ...], Domain] = {}  # that parameters span
        self._whole: Domain | None = None  # of the grid
        self._optimizer: weakref.ref[object] | None = None
        self.labels: list[str] = []
        self._names: list[str] = []  # on this rank
        self._params: list[Tensor] = []
        self._placed: list[ParameterLayout | None] = []
        self._experts: dict[tuple[str, int], GlobalRank] = {}  # name of a stack, expert: planned owner

    # -- the three functions -----------------------------------------------------------------------------------------

    def assign(self, params: Sequence[Tensor], state: dict[str, Any]) -> dict[int, GlobalRank]:
        """HostShare the parameters, and plan who owns them. Collective over the ranks that hold them together.

        Returns:
            Index to the global rank of the owner; of a stack of matrices, to that of its first matrix' owner.
        """
        names = _names(params, state)
        self.place(params, names)
        here = this_rank()
        owners = {}
        planned: dict[str, GlobalRank] = {}
        self.plans = {}
        for ranks, domain in self._domains.items():
            matrices, pools = self._matrices(ranks)
            if not matrices:
                continue
            plan = self._plan(domain, matrices, pools)
            self.plans[ranks] = plan
            planned |= {name: ranks[owner] for name, owner in plan.owners.items()}
            domain.chunks, domain.variants = plan.chunks, plan.variants
        self._experts = {}
        for index, (name, placed) in enumerate(zip(self.labels, self._placed, strict=True)):
            owners[index] = planned.get(name, here)
            if placed is not None and len(placed.layout.shape) == 3:
                for cell in cells(placed.layout):
                    for expert in range(cell.start, cell.stop):
                        first = placed.ranks[cell.holders[0]]
                        self._experts[name, expert] = planned.get(_expert(name, expert), first)
                owners[index] = self._experts[name, 0]
        return owners

    def gather(self, update: Tensor, dst_rank: GlobalRank, state: dict[str, Any]) -> Tensor | None:
        """The whole of a parameter's tensor on ``dst_rank``, None elsewhere. Collective over the ranks that hold it.

        Args:
            update: this rank's part, or a DTensor.

        Raises:
            ValueError: ``dst_rank`` does not hold the parameter.
            RuntimeError: ``update`` is not shaped as this rank's part.
        """
        placed = self._placed_now(update, state)
        local = local_tensor(update).detach()
        if placed is None:
            return local
        domain, parcel = self._one(placed, dst_rank, local)
        like, what = local.new_empty(0), "gather of one matrix"
        whole = start_redistribution([parcel.to_owner], {0: local[None]}, domain, like, what).wait()
        return whole[0][0] if whole else None

    def redistribute(self, update: Tensor | None, src_rank: GlobalRank, state: dict[str, Any]) -> Tensor:
        """This rank's part of what ``src_rank`` has whole. Collective over the ranks that hold the parameter.

        Args:
            update: the whole tensor on ``src_rank``, None elsewhere.
        """
        placed, local = self._placed_again(state)
        if placed is None:
            assert update is not None
            return update
        domain, parcel = self._one(placed, src_rank, local)
        whole = {0: update[None]} if update is not None and domain.position == parcel.owner else {}
        like, what = local.new_empty(0), "scatter of one matrix"
        part = start_redistribution([parcel.from_owner], whole, domain, like, what).wait()
        return part[0][0].to(local.dtype) if part else local.new_empty(local.shape)

    # -- for Muon ----------------------------------------------------------------------------------------------------

    def assigned(self, params: Sequence[Tensor], owners: Sequence[GlobalRank]) -> dict[int, list[Task]]:
        """By ``id``, who orthogonalizes each parameter that several ranks hold, and where its pieces lie.

        Raises:
            ValueError: an owner that does not hold its parameter.
        """
        found: dict[int, list[Task]] = {}
        for i, (param, placed, owner) in enumerate(zip(params, self._placed, owners, strict=True)):
            if placed is None:
                continue
            domain = self._domains[placed.ranks]
            if len(placed.layout.shape) == 3:
                found[id(param)] = self._of_stack(placed, domain, owner, self.labels[i])
                continue
            _require_holder(placed, owner, self._names[i])
            parcel = Parcel(1, placed.layout, positions(domain.world), position_in(domain.ranks, owner))
            found[id(param)] = [Task(domain, parcel, nbytes=self.chunk_bytes)]
        return found

    def require_free(self, optimizer: object) -> None:
        """Refuse a second optimizer, which would overwrite what the first one goes by.

        Raises:
            ValueError: another optimizer uses these functions, and is still alive, as its process groups are.
        """
        if self._domains and not any(map(_alive, self._domains.values())):
            return
        if self._optimizer is not None and self._optimizer() not in (None, optimizer):
            gc.collect()  # it may be dead, but in a cycle
            if self._optimizer() is not None:
                raise ValueError(
                    "distributed_config is in use by another optimizer that is still alive: create a configuration "
                    "for each optimizer, or delete the other one before"
                )

    def taken_by(self, optimizer: object) -> None:
        self._optimizer = weakref.ref(optimizer)

    def copied(self) -> Mapping[int, Sequence[GlobalRank]]:
        """By ``id``, the parameters that several ranks have whole, and which."""
        return self._copies

    def domains(self) -> list[Domain]:
        """Ranks that hold parameters with this one, in one order everywhere."""
        return list(self._domains.values())

    def where(self, param: Tensor) -> ParameterLayout | None:
        """Where a parameter of the last assignment lies; None for one that this rank has alone."""
        pairs = zip(self._params, self._placed, strict=True)
        return next((placed for known, placed in pairs if known is param), None)

    def members(self, domain: Domain) -> list[Tensor]:
        """The parameters that the ranks of ``domain`` hold together."""
        pairs = zip(self._params, self._placed, strict=True)
        return [param for param, placed in pairs if placed is not None and placed.ranks == domain.ranks]

    def place(self, params: Sequence[Tensor], names: Sequence[str], device: torch.device | None = None) -> None:
        """Find where the parameters lie, and connect the ranks.

        Collective over the ranks that hold them together; with a grid over all of its ranks.

        Args:
            device: in case that there are no parameters.
        """
        self._params = list(params)
        self._names = list(names)
        self.labels = list(names)
        fault: ValueError | None = None
        if self._grid is not None:
            found = self._found_on_grid(self._grid, device)
        else:
            found = []
            for param, name in zip(params, names, strict=True):
                try:
                    found.append(self._found_alone(param, name))
                except ValueError as error:  # those that hold it with this rank must hear of it
                    fault = fault or error
                    found.append(_suspected(param))
        self._placed = [None if p is None or len(p.ranks) == 1 else p for p in found]
        wanted = sorted({placed.ranks for placed in self._placed if placed is not None})
        kept = {ranks: domain for ranks, domain in self._domains.items() if ranks in wanted and _alive(domain)}
        if self._whole is not None:
            kept[self._whole.ranks] = self._whole
        self._domains = {}
        self.plans = {ranks: plan for ranks, plan in self.plans.items() if ranks in wanted}
        described: dict[tuple[int, ...], list[tuple[str, str]]] = {}
        for ranks in wanted:
            members = [i for i, placed in enumerate(self._placed) if placed is not None and placed.ranks == ranks]
            domain = kept.get(ranks)
            if domain is None:
                domain = make_domain(ranks, local_tensor(params[members[0]]).device)
            self._domains[ranks] = domain
            for number, i in enumerate(members):
                self.labels[i] = _label(names[i], number, ranks)
            described[ranks] = [self._described(i) for i in members]
        for _ in range(2):  # so that a fault that some domains find reaches those that were asked before
            for ranks, domain in self._domains.items():
                try:
                    require_same(domain.group, ranks, fault, described[ranks], None)
                except ValueError as error:
                    fault = fault or error
        if fault is not None:
            raise fault

    def _found_alone(self, param: Tensor, name: str) -> ParameterLayout | None:
        """Where a parameter lies by what it says of itself."""
        if isinstance(param, DTensor):
            return place_dtensor(param, name, this_rank())
        ranks = self._copies.get(id(param))
        return None if ranks is None else place_replicated(param, ranks)

    def _described(self, index: int) -> tuple[str, str]:
        """What all ranks that hold a parameter must say of it."""
        param, placed = self._params[index], self._placed[index]
        assert placed is not None
        layout = placed.layout
        return (
            f"parameter {self.labels[index]!r}",
            f"{layout.shape}, {param.dtype}, in pieces {[p.shape for p in layout.pieces]}",
        )

    def _found_on_grid(self, grid: RankGrid, device: torch.device | None) -> list[ParameterLayout | None]:
        """Where the parameters lie in ``grid``. All ranks of it go on from here, or raise.

        They agree once, and where plain parameters are cut, whose shapes go with that, once more.
        """
        if len(grid.ranks) == 1:
            return place(self._params, self._names, grid, this_rank(), self._shard_dims, lambda item: [item])
        whole = self._connected(grid, device)
        sharing = shared = False

        def share(item: object) -> list[object]:
            nonlocal sharing, shared
            sharing = True
            of_rank = dict(zip(whole.ranks, agree(whole.group, None, (item, None)), strict=True))
            shared = True
            return [of_rank[rank][0] for rank in grid.ranks]

        found: list[ParameterLayout | None] = []
        fault: Exception | None = None
        try:
            found = place(self._params, self._names, grid, this_rank(), self._shard_dims, share)
        except Exception as error:  # whatever a user's shard_dims raises
            if sharing and not shared:
                raise  # all ranks do
            fault = error
        spanned = {placed.ranks for placed in found if placed is not None and len(placed.ranks) > 1}
        said = agree(whole.group, fault, ([], spanned))
        if not shared and any(item for item, _ in said):
            rank, item = next((rank, item) for rank, (item, _) in zip(whole.ranks, said, strict=True) if item)
            fault = ValueError(
                f"rank {rank} has sharded parameters {[name for name, _ in item]} and rank {dist.get_rank()} has none; "
                "give all ranks of the process groups the same parameters in one order, and the same shard_dims"
            )
            agree(whole.group, fault)
        _require_spanned_alike(whole.ranks, [ranks for _, ranks in said])
        return found

    def _connected(self, grid: RankGrid, device: torch.device | None) -> Domain:
        """All ranks of ``grid``: made before any of them can find a fault, and kept."""
        if self._whole is None or not _alive(self._whole):
            if self._params:
                device = local_tensor(self._params[0]).device
            self._whole = make_domain(grid.ranks, device or torch.device("cpu"))
        return self._whole

    def _matrices(self, ranks: tuple[int, ...]) -> tuple[list[Matrix], list[frozenset[str]] | None]:
        """What the ranks share, and what each of them may own."""
        matrices = []
        pools: list[set[str]] = [{""} for _ in ranks]
        for name, placed in zip(self.labels, self._placed, strict=True):
            if placed is None or placed.ranks != ranks:
                continue
            shape = placed.layout.shape
            if len(shape) == 2:
                matrices.append(Matrix(name, *shape, "", shape[0] * shape[1] * _WIRE_BYTES))
                continue
            for cell in cells(placed.layout):
                if len(cell.holders) == 1:
                    continue
                pool = f"ranks {cell.holders}"
                for holder in cell.holders:
                    pools[holder].add(pool)
                m, n = cell.layout.shape
                for expert in range(cell.start, cell.stop):
                    matrices.append(Matrix(_expert(name, expert), m, n, "", m * n * _WIRE_BYTES, pool))
        alike = all(pool == {""} for pool in pools)
        return matrices, None if alike else [frozenset(pool) for pool in pools]

    def _plan(self, domain: Domain, matrices: list[Matrix], pools: list[frozenset[str]] | None) -> OwnerPlan:
        places: list[HostShare] = agree(domain.group, None, HostShare.here())
        if domain.device.type == "cpu":
            warn_if_oversubscribed(places, domain.position)
        per_byte = _NOMINAL_NS_PER_BYTE if self._costs == "flops" else link_ns_per_byte(domain)
        return make_plan(
            matrices,
            domain.group,
            domain.device,
            costs=self._costs,
            solve=self._solve,
            hosts=[p.host for p in places],
            pools=pools,
            ns_per_byte=per_byte,
        )

    def _of_stack(self, placed: ParameterLayout, domain: Domain, owner: GlobalRank, name: str) -> list[Task]:
        """Matrices of a stack, in ranges that one rank orthogonalizes."""
        found = []
        offset = 0
        here = placed.ranks.index(dist.get_rank())
        as_planned = self._experts.get((name, 0)) == owner  # not where a user gave the stack to another rank
        for cell in cells(placed.layout):
            held = here in cell.holders
            for first, last, position in self._ranges(placed, cell, owner, name, as_planned):
                parcel = Parcel(last - first, cell.layout, cell.holders, position)
                if len(cell.holders) > 1 or held:  # nobody else needs to know of what one rank has alone
                    found.append(Task(domain, parcel, first, last, offset + first - cell.start, self.chunk_bytes))
            offset += cell.stop - cell.start if held else 0
        return found

    def _ranges(
        self, placed: ParameterLayout, cell: Cell, owner: GlobalRank, name: str, as_planned: bool
    ) -> list[tuple[int, int, Position]]:
        """``(start, stop, position of the owner)``: as many matrices each as planned, but neighbours."""
        counts = dict.fromkeys(cell.holders, 0)
        for expert in range(cell.start, cell.stop):
            planned = self._experts.get((name, expert), owner) if as_planned else owner
            position = position_in(placed.ranks, planned) if planned in placed.ranks else cell.holders[0]
            counts[position if position in counts else cell.holders[0]] += 1
        found = []
        start = cell.start
        for position, count in counts.items():
            if count:
                found.append((start, start + count, position))
                start += count
        return found

    def _placed_now(self, update: Tensor, state: Mapping[str, Any]) -> ParameterLayout | None:
        """Where the tensor that ``gather`` got lies: as the current parameter, or as its own layout says."""
        index: int | None = state.get("current_param_idx")
        local = local_tensor(update)
        if index is None or not self._params:
            self.place([update], ["update"])
            self._params = [update]
            return self._placed[0]
        param = self._params[index]
        if local.shape != local_tensor(param).shape:
            raise RuntimeError(
                f"gather_fn got a tensor of shape {tuple(local.shape)} for parameter {index} on rank "
                f"{dist.get_rank()}, whose part here is {tuple(local_tensor(param).shape)}"
            )
        return self._placed[index]

    def _placed_again(self, state: Mapping[str, Any]) -> tuple[ParameterLayout | None, Tensor]:
        index: int = state.get("current_param_idx") or 0
        if not self._params:
            raise RuntimeError("redistribute_fn was called before gather_fn, which learns where the tensor lies")
        return self._placed[index], local_tensor(self._params[index])

    def _one(self, placed: ParameterLayout, owner: GlobalRank, local: Tensor) -> tuple[Domain, Parcel]:
        _require_holder(placed, owner, "update")
        domain = self._domains[placed.ranks]
        return domain, Parcel(1, placed.layout, positions(domain.world), position_in(domain.ranks, owner))


def _label(name: str, number: int, ranks: Sequence[int]) -> str:
    """The name of a parameter of a module; otherwise, as groups differ between ranks, its number among the shared."""
    return f"{number} of those that ranks {' '.join(map(str, ranks))} hold together" if " " in name else name


def _suspected(param: Tensor) -> ParameterLayout | None:
    """The ranks of a parameter that cannot be placed, as copies; None where that is not known either."""
    if not isinstance(param, DTensor) or param.device_mesh.get_coordinate() is None:
        return None
    return place_replicated(param, sorted(set(param.device_mesh.mesh.flatten().tolist())))


def _require_holder(placed: ParameterLayout, owner: int, name: str) -> None:
    if owner not in placed.ranks:
        raise ValueError(
            f"Invalid rank {owner} for parameter {name!r}: it lies on ranks {list(placed.ranks)}, one of which must "
            "own it"
        )


def _require_spanned_alike(ranks: Sequence[int], spanned: Sequence[set[tuple[int, ...]]]) -> None:
    """Raise on all ranks of a grid if one of them waits for another that does not know of it."""
    of_rank = dict(zip(ranks, spanned, strict=True))
    for rank, theirs in of_rank.items():
        for line in sorted(theirs):
            other = next((other for other in line if line not in of_rank.get(other, ())), None)
            if other is not None:
                raise ValueError(
                    f"rank {rank} holds parameters together with ranks {list(line)}, and rank {other} holds none with "
                    "exactly these; give all of them the same parameters, laid out alike, and the same shard_dims"
                )


def _alive(domain: Domain) -> bool:
    """Whether the process group still exists; not after the default one was destroyed."""
    try:
        return dist.get_process_group_ranks(domain.group) == list(domain.ranks)
    except (KeyError, RuntimeError, ValueError):
        return False


def _names(params: Sequence[Tensor], state: Mapping[str, Any]) -> list[str]:
    names: list[str] = list(state.get("param_names", ()))
    return names if len(names) == len(params) else [str(i) for i in range(len(params))]


def _expert(name: str, expert: int) -> str:
    return f"{name}[{expert}]"
