"""How one optimizer exchanges the matrices that several ranks hold: by layout, or by a user's functions."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon.comm.agreement import Vote, VoteResult, agree, require_same_in_turn
from dmuon.comm.domain import Domain, connect_copies, connect_teams, make_domain
from dmuon.comm.monitor import CollectiveError, FirstError
from dmuon.comm.process_groups import ranks_of, this_rank
from dmuon.exchanged.config import LAYOUTS, DistributedConfig, owners_from
from dmuon.exchanged.copies_vote import Copies, CopiesVote
from dmuon.exchanged.generators import ByLayout, default_config, recipe_of
from dmuon.exchanged.layouts import Layouts, lay_out, owner_fault, plan, planned_owners, tasks
from dmuon.exchanged.user_round import UserFunctions, UserRound, by_owner
from dmuon.layout.matrices import Region, Strategy, numbered, spread_over_all, stack_shape
from dmuon.layout.parameters import ParameterLayout, place_by_itself, place_replicated, ranks_of_mesh
from dmuon.layout.topology import GlobalRank, listed
from dmuon.model.matrix_spec import is_one_matrix, shape_of, spec_of
from dmuon.planning.cost_cache import NsOptions
from dmuon.planning.strategies import told
from dmuon.platform.torch_private import has_group, local_tensor
from dmuon.step.batches import Batch, SharedBatch, Task
from dmuon.step.full_replication import FullReplicationRound
from dmuon.step.fused import FusedRound
from dmuon.step.replicated import ReplicatedRound
from dmuon.step.residency import Options, Residency, Sharing, layouts_and_gradients, memberships
from dmuon.step.rounds import ExchangedRound, Round, exchanged_rounds, longest_first
from dmuon.step.sharded import ShardedRound

_VOTE = "vote before step()"
_KINDS: Mapping[Strategy, type[ExchangedRound]] = {
    "owner": ExchangedRound,
    "replicated": ReplicatedRound,
    "sharded": ShardedRound,
    "full_replication": FullReplicationRound,
    "fused": FusedRound,
}


def exchange_for(
    given: DistributedConfig | None,
    copies: Mapping[int, dist.ProcessGroup],
    params: Sequence[Tensor],
    names: Sequence[str],
    device: torch.device,
    ns: NsOptions,
    strategies: Mapping[int, str],
    start_ns: int,
) -> Exchange | None:
    """How an optimizer exchanges ``params``; None if every parameter is local to one rank. Collective.

    With a configuration that was given, ranks without parameters take part: others may wait for them.

    Args:
        copies: by ``id``, the parameters that ``DistributedDataParallel`` replicates, and over which group.
        device: in case that there are no parameters.
        ns: how it orthogonalizes.
        strategies: by ``id``, of those parameters that have not just owners.
        start_ns: what this rank is predicted to take for what is not exchanged.
    """
    config = given or default_config(copies, params)
    if config is None or not (params or dist.is_initialized()):
        return None
    state = config.state
    state |= {"rank": this_rank(), "param_names": list(names), LAYOUTS: None}
    gathered, assigned = recipe_of(config), config.assign_fn.recipe if isinstance(config.assign_fn, ByLayout) else None
    by_layout = gathered is not None
    by_recipe = by_layout and assigned is gathered
    recipe = gathered or assigned  # None leaves to the user's functions where parameters lie
    layouts: Layouts | None = None
    if recipe is not None:
        layouts = lay_out(
            recipe,
            params,
            names,
            device=device,
            among_holders=by_layout,
            strategies=strategies if by_recipe else {},
        )
        state[LAYOUTS] = layouts
    owners = (GlobalRank(0),) * len(params)
    beside = [] if by_recipe else [pair for pair in zip(params, names, strict=True) if id(pair[0]) in strategies]
    refused = None
    for param, name in beside[:1]:
        refused = ValueError(
            f"strategy={strategies[id(param)]!r} for {name!r}, and functions of the user's own in distributed_config "
            "say who orthogonalizes what: leave strategy= out, or use a generated configuration"
        )
    first = FirstError(refused, through=(CollectiveError,))
    with first:  # ranks that share other matrices with this one must hear of whatever is raised
        if layouts is not None and assigned is recipe:
            layouts = state[LAYOUTS] = plan(layouts, ns, start_ns)
            state["assignments"] = planned_owners(layouts)
            owners = tuple(state["assignments"].values())
        elif params:
            state["assignments"] = config.assign_fn(list(params), state)
            world = dist.get_world_size() if dist.is_initialized() else 1
            owners = owners_from(state["assignments"], len(params), world)
    planned: Layouts | None = state[LAYOUTS]  # by a generated function, if the user's one has called that
    if layouts is not None and planned is not None and [*map(id, planned.params)] == [*map(id, params)]:
        layouts = replace(layouts, plans=planned.plans)
    fault = first.error
    domains: list[tuple[Domain, list[Tensor]]] = []
    exchanged: list[tuple[Domain, list[Tensor]]] = []
    if layouts is not None:
        if by_layout:
            fault = fault or owner_fault(layouts, owners)
        domains = [(domain, layouts.members(domain)) for domain in layouts.domains.values()]
        exchanged = [(domain, layouts.exchanged(domain)) for domain in layouts.domains.values()]
    elif (domain := _domain_of_users(config, params, device)) is not None:
        domains = exchanged = [(domain, list(params))]
        stranger = next((i for i, owner in enumerate(owners) if owner not in domain.ranks), None)
        if stranger is not None and fault is None:
            fault = ValueError(
                f"Invalid rank {owners[stranger]} for parameter {names[stranger]!r}: state['process_group'] has ranks "
                f"{list(domain.ranks)}, one of which must own it"
            )
    columns = zip(params, names if layouts is None else layouts.labels, owners, strict=True)
    said = {id(param): (f"owner of parameter {label!r}", str(owner)) for param, label, owner in columns}
    require_same_in_turn([(one.group, [said[id(p)] for p in members]) for one, members in exchanged], fault)
    domains = domains if params else []  # no other rank has any either
    if by_layout and layouts is not None:
        return LayoutExchange(config, list(params), list(names), owners, layouts, domains, copies)
    return UserExchange(config, list(params), list(names), owners, layouts, domains, copies)


def _domain_of_users(config: DistributedConfig, params: Sequence[Tensor], device: torch.device) -> Domain | None:
    """The ranks of a user's functions; None if they are others, and this one has no parameters."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    group = config.state.get("process_group") or dist.group.WORLD
    if not params and (not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0):
        return None
    return make_domain(ranks_of(group), local_tensor(params[0]).device if params else device)


@dataclass(frozen=True, slots=True)
class Exchanged:
    """Matrices of one parameter that have one owner, as people want to see them; ``count`` of them.

    Attributes:
        owner: None where, by their strategy, several ranks orthogonalize them.
    """

    name: str
    shape: str
    lies_as: str
    ranks: str
    owner: GlobalRank | None
    count: int = 1
    strategy: str = "owner"


class _Ballot:
    """What this rank says in one domain before a step.

    Attributes:
        ids: of the parameters that its ranks share.
        groups: numbers of those whose options are compared.
        copies: of which gradients are compared.
        keeping: rounds that keep momentum of whole matrices.
    """

    def __init__(self, domain: Domain, ids: list[int]) -> None:
        self.domain = domain
        self.ids = ids
        self.groups: list[int] = []
        self.copies = CopiesVote(domain.position, {})
        self.keeping: list[FullReplicationRound] = []


@dataclass(eq=False, repr=False)
class Exchange(Residency):
    """The assignment of an optimizer's matrices to ranks. Made anew when parameters or layouts change.

    Attributes:
        config: as given or by default.
        params: all that dmuon does not own, also those that this rank has alone.
        owners: by number of the parameter.
        layouts: where the parameters lie; None where only a user's functions know.
        domains: ranks that share parameters with this one, and which.
        copies: by ``id``, the parameters that ``DistributedDataParallel`` replicates, and over which group.
        edited: momentum of this rank was changed since its last step: what others keep of it is gathered again.
        keeps_momentum: this rank keeps momentum of matrices of which state shows a part.
    """

    config: DistributedConfig
    params: list[Tensor]
    names: list[str]
    owners: tuple[GlobalRank, ...]
    layouts: Layouts | None
    domains: list[tuple[Domain, list[Tensor]]]
    copies: Mapping[int, dist.ProcessGroup]

    def __post_init__(self) -> None:
        self.edited = self.keeps_momentum = False
        self._laid_out, _ = layouts_and_gradients(self.params)
        self._rank = this_rank()
        self._options: weakref.WeakMethod[Options] | None = None
        self._loading: list[tuple[dist.ProcessGroup, set[int]]] = []
        self._ballots = [_Ballot(domain, [*map(id, members)]) for domain, members in self.domains]

    @abstractmethod
    def alone(self) -> list[Tensor]:
        """The parameters that need no exchange."""

    @abstractmethod
    def table(self) -> list[Exchanged]:
        """What is exchanged, in the order of the parameters."""

    def report(self) -> list[str]:
        """The plans behind the owners, for people."""
        return []

    def compare(self, options: Options, groups: Sequence[Sequence[Tensor]], names: Mapping[int, str]) -> None:
        """In each domain, of the groups that hold its matrices, or other parameters over just the same ranks."""
        self._options = weakref.WeakMethod(options)
        self._loading = []
        self._labels = names
        shared = [] if self.layouts is None else self.layouts.shared
        placed = {id(param): one.whole for param, one in shared}
        for ballot in self._ballots:
            domain, ids = ballot.domain, set(ballot.ids)
            held = [[p for p in group if id(p) in ids or self._ranks_of(p) == domain.ranks] for group in groups]
            ballot.groups = [i for i, params in enumerate(held) if params]
            self._loading.append((domain.group, ids.union(id(p) for params in held for p in params)))
            domain.monitor.note_options(memberships(held, names))
            copies: dict[Copies, list[Tensor]] = {}
            for param in (param for params in held for param in params):
                one = placed.get(id(param)) or self._placed(param)
                if one is not None and one.ranks == domain.ranks and max(one.layout.replicas):
                    for line in spread_over_all(one.layout).lines:
                        copies.setdefault(line, []).append(param)
            ballot.copies = CopiesVote(domain.position, copies)

    def _placed(self, param: Tensor) -> ParameterLayout | None:
        """Where a parameter lies that AdamW takes; None where it does not tell."""
        if id(param) in self.copies:
            return place_replicated(param, ranks_of(self.copies[id(param)]))
        try:
            return place_by_itself(param, "", self._rank)
        except ValueError:
            return None

    def _ranks_of(self, param: Tensor) -> tuple[GlobalRank, ...]:
        """Those that share a parameter, as far as it tells; ascending."""
        if isinstance(param, DTensor):
            return ranks_of_mesh(param.device_mesh)
        one = self._placed(param)
        return () if one is None else one.ranks

    def loading_groups(self) -> list[tuple[dist.ProcessGroup, set[int]]]:
        return self._loading

    def before_step(self, changed: bool, fault: Exception | None = None) -> set[int] | None:
        """A vote, as the ranks may have different gradients and see different changes.

        Collective over the domains. It needs nothing that a device has yet to compute.

        Raises:
            Exception: ``fault``, of which the other ranks hear.
            CollectiveError: the ranks issued different collectives before.
            RuntimeError: layouts changed on some ranks only, another rank takes no step, copies of the same part
                differ in whether they have a gradient, or the process groups were destroyed.
        """
        for domain, _ in self.domains:
            if not has_group(domain.group):
                raise RuntimeError(
                    f"rank {self._rank}: the process group by which ranks {listed(domain.ranks, ' ')} exchange was "
                    "destroyed since the optimizer was built: lay out the model over those that there are now, if "
                    "any, build an optimizer after that, and load the state dict of this one into it"
                )
        layouts, present = layouts_and_gradients(self.params)
        if layouts != self._laid_out:
            changed, present = True, set()
        options = None if self._options is None else self._options()
        # All domains, whatever happens: their ranks wait for this one.
        voted = set(present)
        first = FirstError(fault)
        for ballot in self._ballots:
            domain, ids, copies = ballot.domain, ballot.ids, ballot.copies
            said = copies.nothing
            with first:
                if options is not None:
                    domain.monitor.note_options(options(ballot.groups))
                said = copies.numbers() if said else said
            flags = [*map(present.__contains__, ids), *said]
            if ballot.keeping:  # is momentum to be gathered for those that keep it?
                flags.append(self.edited or any(one.momenta is None for one in ballot.keeping))
            with first:
                faulty = None if first.error is None else self._rank
                with domain.vote_stream.alone():
                    vote = Vote(flags, domain.group, domain.monitor, _VOTE, changed=changed, faulty=faulty)
                    result = vote.result()
                if not result.same_change or result.faulty not in (None, self._rank):
                    raise self._refusal(domain, changed, result)
                if said and not changed and result.faulty is None:
                    self._check_copies(domain, copies, result.flags[len(ids) :])
                if ballot.keeping and result.flags[-1]:
                    for round_ in ballot.keeping:
                        round_.momenta = None
                voted.update(compress(ids, result.flags))
        first.throw()
        return None if changed else voted

    def _refusal(self, domain: Domain, changed: bool, result: VoteResult) -> RuntimeError:
        ranks = listed(domain.ranks, " ")
        if not result.same_change:
            where = "this rank" if changed else "another rank, and not on this one"
            return RuntimeError(
                f"rank {self._rank}: parameters of the optimizer or their layouts have changed on {where}, of ranks "
                f"{ranks}; change them on all of them before the same step"
            )
        return RuntimeError(
            f"rank {self._rank}: rank {result.faulty}, one of ranks {ranks}, cannot take this step, and so none of "
            "them takes it; its message says why"
        )

    def _check_copies(self, domain: Domain, copies: CopiesVote, maxima: Sequence[int]) -> None:
        """All ranks of the domain see the same ``maxima``, and so exchange what differs, or none does."""
        number = copies.differing(maxima)
        if number is None:
            return
        param, one, other, norms = copies.first(number, agree(domain.group, None, copies.told(number)))
        about = f"rank {self._rank}: the gradient of {self._labels[id(param)]!r}"
        if norms is None:
            raise RuntimeError(
                f"{about} is missing on rank {domain.ranks[one]}, and rank {domain.ranks[other]}, which has a copy of "
                "the same part, has one; give all copies the same ones, or none"
            )
        raise RuntimeError(
            f"{about} differs between copies of the same part: its norm is {norms[0]:.6g} on rank {domain.ranks[one]} "
            f"and {norms[1]:.6g} on rank {domain.ranks[other]}. Nobody has averaged it, or somebody has changed it on "
            "some ranks: let the last backward before step() synchronize, and change gradients on all ranks alike"
        )

    def end_update(self) -> None:
        """All weights have their new values on this rank."""
        for domain, _ in self.domains:
            domain.monitor.step += 1


@dataclass(eq=False, repr=False)
class LayoutExchange(Exchange):
    """By generated functions: many matrices at once, by the layouts of the parameters, whose owners hold them."""

    layouts: Layouts

    def __post_init__(self) -> None:
        super().__post_init__()
        self._tasks = tasks(self.layouts, self.owners, self._rank)
        for domain in self.layouts.domains.values():  # in one order on all of their ranks
            parcels = [task.parcel for task in self._tasks if task.domain is domain and task.parcel is not None]
            connect_copies(domain, dict.fromkeys(parcel.spread for parcel in parcels))
            connect_teams(domain, {len(parcel.team) for parcel in parcels if parcel.team})

    def alone(self) -> list[Tensor]:
        return [param for param, placed in zip(self.params, self.layouts.placed, strict=True) if placed is None]

    def tasks(self) -> list[Task]:
        return self._tasks

    def rounds(self, batches: Sequence[Sequence[Batch]]) -> list[Round]:
        options = self.layouts.recipe.options
        ballots = {id(ballot.domain): ballot for ballot in self._ballots}
        rounds: list[Round] = []
        for index, of_group in enumerate(batches):
            for round_ in exchanged_rounds(
                index,
                [batch for batch in of_group if isinstance(batch, SharedBatch)],
                small_numel=options.small_param_numel_threshold,
                nbytes=options.chunk_bytes,
                together=self.config.async_gpu_parallelism,
                order=longest_first,
                kinds=_KINDS,
            ):
                rounds.append(round_)
                if isinstance(round_, FullReplicationRound):
                    ballots[id(round_.domain)].keeping.append(round_)
                    self.keeps_momentum = True
                if round_.exchanged:  # the first vote compares it
                    round_.domain.monitor.note("plan", f"{round_}, prefetch_count={self.config.prefetch_count}")
        return rounds

    def table(self) -> list[Exchanged]:
        rows = []
        for task in self._tasks:
            assert task.domain is not None and task.parcel is not None, "several ranks hold it"
            ranks, name = task.domain.ranks, self.names[task.position]
            if not is_one_matrix(task.param):
                first, last = task.numbers[0], task.numbers[-1]
                name += f"[{first}]" if first == last else f"[{first}…{last}]"
            owner = ranks[task.parcel.owner] if task.parcel.has_owner else None
            lies_as, shape = _lies_as(task.param, "plain tensors"), "x".join(map(str, task.shape))
            rows.append(Exchanged(name, shape, lies_as, listed(ranks, " "), owner, task.count, task.parcel.way))
        return rows

    def shared(self) -> list[Sharing]:
        """Also what one rank has whole of a stack that several hold."""
        sharings = []
        for domain in self.layouts.domains.values():
            matrices: list[tuple[Tensor, int | None, tuple[int, int]]] = []
            for param, one in self.layouts.shared:
                of_domain = numbered(one.whole.layout, spec_of(param)) if one.whole.ranks == domain.ranks else ()
                for share, numbers in of_domain:
                    m, n = share.spread.layout.shape
                    matrices += [(param, None if is_one_matrix(param) else number, (m, n)) for number in numbers]
            if matrices:
                sharings.append(Sharing(domain.group, domain.device, matrices))
        return sharings

    def report(self) -> list[str]:
        plans = self.layouts.plans.items()
        lines = [f"ranks {listed(ranks, ' ')}: {plan.report()}" for ranks, plan in plans]
        for ranks, ranking in self.layouts.rankings.items():
            ways = told(ranking)
            for best, others in [(ways[0], ways[1:])] if ways else []:
                lines.append(
                    f"ranks {listed(ranks, ' ')}: predicted of all matrices, and chosen: {best}; "
                    f"next best: {', then '.join(others) or 'nothing else was possible'}"
                )
        for name, choice in self.layouts.choices.items():
            way: str = choice.strategy
            on = "each rank"
            if choice.team:
                placed = self.layouts.placed[self.layouts.labels.index(name)]
                assert placed is not None, "several ranks hold it"
                way = f"{choice.strategy}:{len(choice.team)}"
                on = f"ranks {listed([placed.ranks[member] for member in choice.team], ' ')} each"
            lines.append(f"strategy of {name}: {way}, predicted {choice.predicted_ns / 1e6:.3f} ms on {on}")
        return lines


@dataclass(eq=False, repr=False)
class UserExchange(Exchange):
    """By a user's ``gather_fn`` and ``redistribute_fn``, or one of them: one parameter of each owner at a time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._functions = UserFunctions(self.config)
        # What generated layouts say that this rank has alone needs no functions.
        shared = {id(p) for _, members in self.domains for p in members}
        self._exchanged = {i: p for i, p in enumerate(self.params) if self.layouts is None or id(p) in shared}

    def alone(self) -> list[Tensor]:
        return [param for i, param in enumerate(self.params) if i not in self._exchanged]

    def tasks(self) -> list[Task]:
        """Each parameter on its own: only the functions know how large the whole is."""
        tasks = []
        for number, param in self._exchanged.items():
            local, spec = local_tensor(param).shape, spec_of(param)
            is_flat = len(local) < 2 or (len(local) > 3 and not spec.flattened)
            stack = (1, local.numel(), 1) if is_flat else stack_shape(local, spec)
            whole = Region(stack, (0, stack[0]), 1, ((0, stack[1]),) if stack[1] else ())
            numbers = tuple(range(max(1, stack[0])))
            tasks.append(Task(param, number, (stack[1], stack[2]), len(numbers), whole, numbers=numbers))
        return tasks

    def rounds(self, batches: Sequence[Sequence[Batch]]) -> list[Round]:
        domains: Sequence[tuple[Domain | None, list[Tensor]]] = self.domains or [(None, self.params)]
        rounds: list[Round] = []
        for index, of_group in enumerate(batches):
            for domain, members in domains:
                ids = {id(p) for p in members}
                shared = [batch for batch in of_group if id(batch.params[0]) in ids]
                for some in by_owner(shared, self.owners, self.config.async_gpu_parallelism):
                    rounds.append(UserRound(index, some, self._functions, self.owners, self.names, self._rank, domain))
        return rounds

    def table(self) -> list[Exchanged]:
        rows = []
        for param, name, owner in zip(self.params, self.names, self.owners, strict=True):
            lies_as, shape = _lies_as(param, "a user's functions say"), "x".join(map(str, shape_of(param)))
            rows.append(Exchanged(name, shape, lies_as, "", owner))
        return rows


def _lies_as(param: Tensor, plain: str) -> str:
    """``plain`` says it of a tensor that is no DTensor."""
    return ", ".join(map(str, param.placements)) if isinstance(param, DTensor) else plain
