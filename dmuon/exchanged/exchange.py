"""How one optimizer exchanges the matrices that several ranks hold: by layout, or by a user's functions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon.comm.agreement import Verdict, Vote, require_same
from dmuon.comm.domain import Domain, make_domain
from dmuon.comm.monitor import CollectiveError
from dmuon.comm.process_groups import ranks_of, this_rank
from dmuon.exchanged.assignment import plan, planned_owners, tasks
from dmuon.exchanged.config import LAYOUTS, DistributedConfig, owners_from
from dmuon.exchanged.functions import AssignByLayout, GatherByLayout, RedistributeByLayout
from dmuon.exchanged.generators import default_config
from dmuon.exchanged.layouts import Layouts, lay_out
from dmuon.exchanged.recipe import LayoutRecipe
from dmuon.exchanged.user_functions import UserFunctions
from dmuon.exchanged.user_round import user_rounds
from dmuon.layout.ranks import GlobalRank
from dmuon.platform.torch_private import local_tensor
from dmuon.step.batches import Batch
from dmuon.step.rounds import Round, exchanged_rounds
from dmuon.step.task import Task

__all__ = ["Exchange", "Exchanged", "LayoutExchange", "UserExchange", "exchange_for"]


def exchange_for(
    given: DistributedConfig | None,
    copies: Mapping[int, dist.ProcessGroup],
    params: Sequence[Tensor],
    names: Sequence[str],
    device: torch.device,
    last: Exchange | None,
) -> Exchange | None:
    """How an optimizer exchanges ``params``; None if every parameter is local to one rank. Collective.

    With a configuration that was given, ranks without parameters take part: others may wait for them.

    Args:
        copies: by ``id``, the parameters that ``DistributedDataParallel`` replicates, and over which group.
        device: in case that there are no parameters.
        last: the same optimizer's before, whose process groups, and plans that still fit, are used again.
    """
    config = given or default_config(copies, params)
    if config is None or not (params or dist.is_initialized()):
        return None
    layouts = None if last is None else last.layouts
    match config.gather_fn, config.redistribute_fn:
        case GatherByLayout(recipe), RedistributeByLayout(other) if recipe is other:
            return LayoutExchange(config, recipe, params, names, device, layouts)
        case _:
            return UserExchange(config, params, names, device, layouts)


@dataclass(frozen=True, slots=True)
class Exchanged:
    """One parameter, as people want to see it."""

    name: str
    shape: str
    lies_as: str
    ranks: str
    owner: GlobalRank


class Exchange(ABC):
    """The assignment of an optimizer's matrices to ranks. Made anew when parameters or layouts change.

    Attributes:
        config: as given or by default.
        layouts: where the parameters lie; None where only a user's functions know.
        owners: by number of the parameter.
        assigned: by ``id`` of the parameter, for batches; empty with a user's functions.
        numbers: by ``id``, of those that a user's functions exchange.
        domains: ranks that share parameters with this one, and which.
    """

    def __init__(
        self,
        config: DistributedConfig,
        recipe: LayoutRecipe | None,
        params: Sequence[Tensor],
        names: Sequence[str],
        device: torch.device,
        last: Layouts | None,
    ) -> None:
        """Collective over all ranks that hold one of ``params`` together, of a grid, or of a user's functions.

        Args:
            recipe: by which the parameters are laid out; None leaves that to a user's functions.
            device: in case that there are no parameters.
            last: layouts of the same optimizer before.
        """
        self.config = config
        self.layouts: Layouts | None = None
        self.names = list(names)
        self.assigned: dict[int, list[Task]] = {}
        self.numbers: dict[int, int] = {}
        self._params = list(params)
        self._laid = [_lies(p) for p in params]
        self._rank = this_rank()
        self._stepped = False
        state = config.state
        state |= {"rank": self._rank, "param_names": self.names, LAYOUTS: last}
        if recipe is not None:
            self.layouts = state[LAYOUTS] = lay_out(recipe, params, names, device=device, last=last)
        fault: Exception | None = None
        match config.assign_fn:
            case AssignByLayout(own) if own is recipe and self.layouts is not None:
                self.layouts = state[LAYOUTS] = plan(self.layouts, last)
                state["assignments"] = planned_owners(self.layouts, self._rank)
                self.owners = tuple(state["assignments"].values())
            case _:
                self.owners, fault = self._ask()
        self.domains, fault = self._connect(device, fault)
        self._require_same_owners(fault)
        if not params:
            self.domains = []  # no rank has any

    def _ask(self) -> tuple[tuple[GlobalRank, ...], Exception | None]:
        """What a user's ``assign_fn`` says, or what is wrong with it, of which the other ranks must hear."""
        if not self._params:
            return (), None
        state = self.config.state
        try:
            state["assignments"] = self.config.assign_fn(list(self._params), state)
            world = dist.get_world_size() if dist.is_initialized() else 1
            owners = owners_from(state["assignments"], len(self._params), world)
        except CollectiveError:
            raise
        except Exception as fault:  # whatever the function raises
            return (GlobalRank(0),) * len(self._params), fault
        planned: Layouts | None = state[LAYOUTS]  # by a generated function, if the user's one asked that
        if self.layouts is not None and planned is not None and planned.alike(self.layouts):
            self.layouts = planned
        return owners, None

    def _connect(
        self, device: torch.device, fault: Exception | None
    ) -> tuple[list[tuple[Domain, list[Tensor]]], Exception | None]:
        """The ranks that share parameters, and a fault of this one, of which they must hear."""
        if self.layouts is None:
            return [], fault
        return [(domain, self.layouts.members(domain)) for domain in self.layouts.domains.values()], fault

    def _require_same_owners(self, fault: Exception | None) -> None:
        labels = self.names if self.layouts is None else self.layouts.labels
        owners = {
            id(param): (f"owner of parameter {label!r}", str(owner))
            for param, label, owner in zip(self._params, labels, self.owners, strict=True)
        }
        for domain, members in self.domains:
            try:
                require_same(domain.group, domain.ranks, fault, [owners[id(p)] for p in members], None)
            except Exception as error:  # the ranks of the next domains must hear of it
                fault = error
        if fault is not None:
            raise fault

    @property
    def prefetch(self) -> int:
        return self.config.prefetch_count

    @abstractmethod
    def rounds(self, index: int, batches: Sequence[Batch]) -> list[Round]:
        """What group ``index`` exchanges."""

    @abstractmethod
    def table(self) -> list[Exchanged]:
        """What is exchanged, in the order of the parameters."""

    @abstractmethod
    def report(self) -> list[str]:
        """The plans behind the owners."""

    def vote(self, changed: bool) -> set[int] | None:
        """Ids of the parameters of which any rank has a gradient; None if layouts changed.

        Collective over the domains. It needs nothing that a device has yet to compute.

        Raises:
            CollectiveError: the ranks issued different collectives before.
            RuntimeError: layouts changed on some ranks only, or another rank found a fault in another domain.
        """
        changed = changed or any(_lies(p) != laid for p, laid in zip(self._params, self._laid, strict=True))
        if self._stepped:
            for domain, _ in self.domains:
                domain.monitor.end_step()
        self._stepped = True
        present: set[int] = set()
        fault: Exception | None = None
        for domain, members in self.domains:  # all of them whatever happens: their ranks wait for this one
            flags = [p.grad is not None for p in members]
            vote = Vote(flags, domain.monitor.digest, changed, None if fault is None else self._rank)
            try:
                verdict = domain.vote(vote)
                self._check_vote(domain, changed, verdict)
            except Exception as error:
                fault = fault or error
                continue
            present |= {id(p) for p, voted in zip(members, verdict.flags, strict=True) if voted}
        if fault is not None:
            raise fault
        return None if changed else present

    def _check_vote(self, domain: Domain, changed: bool, verdict: Verdict) -> None:
        ranks = " ".join(map(str, domain.ranks))
        if not verdict.same_change:
            where = "this rank" if changed else "another rank, and not on this one"
            raise RuntimeError(
                f"rank {self._rank}: parameters of the optimizer or their layouts have changed on {where}, of ranks "
                f"{ranks}; change them on all of them before the same step"
            )
        if verdict.fault not in (None, self._rank):
            raise RuntimeError(
                f"rank {self._rank}: rank {verdict.fault}, one of ranks {ranks}, found a fault among other ranks that "
                "hold parameters with it, and takes no step; its message says which"
            )


class LayoutExchange(Exchange):
    """By generated functions: many matrices at once, by the layouts of the parameters."""

    layouts: Layouts

    def __init__(
        self,
        config: DistributedConfig,
        recipe: LayoutRecipe,
        params: Sequence[Tensor],
        names: Sequence[str],
        device: torch.device,
        last: Layouts | None,
    ) -> None:
        """As :class:`Exchange`.

        Raises:
            ValueError: an owner that does not hold its parameter.
        """
        super().__init__(config, recipe, params, names, device, last)
        self.assigned = tasks(self.layouts, self.owners, self._rank)

    def rounds(self, index: int, batches: Sequence[Batch]) -> list[Round]:
        options = self.layouts.recipe.options
        return [
            *exchanged_rounds(
                index,
                [batch for batch in batches if batch.runtime is None],
                small_numel=options.small_param_numel_threshold,
                nbytes=options.chunk_bytes,
                together=self.config.async_gpu_parallelism,
            )
        ]

    def table(self) -> list[Exchanged]:
        return [
            Exchanged(
                name, _by_x(placed.layout.shape), _placements(param, "plain tensors"), " ".join(map(str, placed.ranks)),
                owner,
            )
            for param, name, placed, owner in zip(
                self._params, self.names, self.layouts.placed, self.owners, strict=True
            )
            if placed is not None
        ]  # fmt: skip

    def report(self) -> list[str]:
        plans = self.layouts.plans.items()
        return [f"ranks {' '.join(map(str, ranks))}: {plan.report()}" for ranks, plan in plans]


class UserExchange(Exchange):
    """By a user's ``gather_fn`` and ``redistribute_fn``, or one of them: one parameter of each owner at a time."""

    def __init__(
        self,
        config: DistributedConfig,
        params: Sequence[Tensor],
        names: Sequence[str],
        device: torch.device,
        last: Layouts | None,
    ) -> None:
        """As :class:`Exchange`.

        Raises:
            TypeError: a function that cannot be called with a tensor, a rank and the state.
        """
        recipe = config.assign_fn.recipe if isinstance(config.assign_fn, AssignByLayout) else None
        super().__init__(config, recipe, params, names, device, last)
        self._user = UserFunctions(config)
        # What generated layouts say that this rank has alone needs no functions.
        shared = {id(p) for _, members in self.domains for p in members}
        self.numbers = {id(p): i for i, p in enumerate(params) if self.layouts is None or id(p) in shared}

    def _connect(
        self, device: torch.device, fault: Exception | None
    ) -> tuple[list[tuple[Domain, list[Tensor]]], Exception | None]:
        if self.layouts is not None or not dist.is_initialized() or dist.get_world_size() == 1:
            return super()._connect(device, fault)
        group = self.config.state.get("process_group") or dist.group.WORLD
        if not self._params and (not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0):
            return [], fault  # other ranks take part, and this one has no parameters
        device = local_tensor(self._params[0]).device if self._params else device
        domain = make_domain(ranks_of(group), device)
        stranger = next((i for i, owner in enumerate(self.owners) if owner not in domain.ranks), None)
        if stranger is not None and fault is None:
            fault = ValueError(
                f"Invalid rank {self.owners[stranger]} for parameter {self.names[stranger]!r}: state['process_group'] "
                f"has ranks {list(domain.ranks)}, one of which must own it"
            )
        return [(domain, self._params)], fault

    def rounds(self, index: int, batches: Sequence[Batch]) -> list[Round]:
        rounds: list[Round] = []
        domains: Sequence[tuple[Domain | None, list[Tensor]]] = self.domains or [(None, self._params)]
        for domain, members in domains:
            ids = {id(p) for p in members}
            rounds += user_rounds(
                index,
                [batch for batch in batches if batch.number is not None and id(batch.params[0]) in ids],
                self._user,
                self.owners,
                self.names,
                rank=self._rank,
                domain=domain,
                together=self.config.async_gpu_parallelism,
            )
        return rounds

    def table(self) -> list[Exchanged]:
        return [
            Exchanged(name, _by_x(param.shape), _placements(param, "a user's functions say"), "", owner)
            for param, name, owner in zip(self._params, self.names, self.owners, strict=True)
        ]

    def report(self) -> list[str]:
        return []


def _by_x(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _placements(param: Tensor, otherwise: str) -> str:
    return ", ".join(map(str, param.placements)) if isinstance(param, DTensor) else otherwise


def _lies(param: Tensor) -> tuple[Any, ...]:
    """How a parameter lies, as far as this rank can see without asking."""
    if isinstance(param, DTensor):
        return param.device_mesh, param.placements, param._local_tensor.shape
    return (param.shape,)
