"""How one optimizer exchanges the matrices that several ranks hold: by layout, or by a user's functions."""

from __future__ import annotations

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
from dmuon.exchanged.config import DistributedConfig, owners_from
from dmuon.exchanged.default import default_config, functions_of
from dmuon.exchanged.functions import ShardFunctions
from dmuon.exchanged.user_functions import UserFunctions
from dmuon.exchanged.user_round import user_rounds
from dmuon.layout.ranks import GlobalRank
from dmuon.platform.torch_private import local_tensor
from dmuon.step.batches import Batch
from dmuon.step.rounds import Round, exchanged_rounds
from dmuon.step.task import Task

__all__ = ["Exchange", "Exchanged", "exchange_for"]


def exchange_for(
    optimizer: object,
    given: DistributedConfig | None,
    copies: Mapping[int, dist.ProcessGroup],
    params: Sequence[Tensor],
    names: Sequence[str],
    device: torch.device,
    last: Exchange | None,
) -> Exchange | None:
    """How ``optimizer`` exchanges ``params``; None if no rank holds any of them with another. Collective.

    With a configuration that was given, ranks without parameters take part: others may wait for them.

    Args:
        device: in case that there are no parameters.
        last: how it did before; kept if it still serves.
    """
    config = given or default_config(copies, params, None if last is None else last.config)
    if config is None or not (params or dist.is_initialized()):
        return None
    if last is not None and last.config is config and last.serves(params):
        return last
    return Exchange(config, params, names, optimizer, device)


def _all_functions(config: DistributedConfig) -> list[ShardFunctions]:
    """The layouts that any of the three functions goes by."""
    given = (config.assign_fn, config.gather_fn, config.redistribute_fn)
    found = {id(f): f for f in (getattr(function, "__self__", None) for function in given)}
    return [f for f in found.values() if isinstance(f, ShardFunctions)]


def _assigning(config: DistributedConfig) -> ShardFunctions | None:
    """The layouts that ``assign_fn`` goes by, if it was generated."""
    known = getattr(config.assign_fn, "__self__", None)
    return known if isinstance(known, ShardFunctions) else None


@dataclass(frozen=True, slots=True)
class Exchanged:
    """One parameter, as people want to see it."""

    name: str
    shape: str
    lies_as: str
    ranks: str
    owner: GlobalRank


class Exchange:
    """The assignment of an optimizer's matrices to ranks. Made anew when parameters or layouts change.

    Attributes:
        config: as given or by default.
        functions: None where a user's functions exchange.
        owners: global rank by number of the parameter.
        assigned: by ``id`` of the parameter, for batches; empty with a user's functions.
        numbers: by ``id``, of those that a user's functions exchange.
        domains: ranks that share parameters with this one, and which.
    """

    def __init__(
        self,
        config: DistributedConfig,
        params: Sequence[Tensor],
        names: Sequence[str],
        optimizer: object,
        device: torch.device,
    ) -> None:
        """Collective over all ranks that hold one of ``params`` together, of a grid, or of a user's functions.

        Args:
            device: in case that there are no parameters.
        """
        for functions in _all_functions(config):
            functions.require_free(optimizer)
        self.config = config
        self.functions = functions_of(config)
        self.names = list(names)
        self._params = list(params)
        self._laid = [_lies(p) for p in params]
        self._device = local_tensor(params[0]).device if params else device
        self._outdated = False
        state = config.state
        state["rank"] = self._here = this_rank()
        state["param_names"] = self.names
        world = dist.get_world_size() if dist.is_initialized() else 1
        placing = _assigning(config) if self.functions is None else self.functions
        if self.functions is not None and (_assigning(config) is not self.functions or not params):
            self.functions.place(params, self.names, device)  # the user says who owns what, and nothing else
        owners, fault = self._asked(params, world) if params else ((), None)
        self.domains: list[tuple[Domain, list[Tensor]]] = []
        if placing is not None:
            self.domains = [(domain, placing.members(domain)) for domain in placing.domains()]
        elif dist.is_initialized() and world > 1 and (domain := self._users_domain()) is not None:
            self.domains = [(domain, self._params)]
            outside = [(n, rank) for n, rank in zip(names, owners, strict=True) if rank not in domain.ranks]
            if outside and fault is None:
                fault = ValueError(
                    f"Invalid rank {outside[0][1]} for parameter {outside[0][0]!r}: state['process_group'] has ranks "
                    f"{list(domain.ranks)}, one of which must own it"
                )
        labels = self.names if placing is None else placing.labels
        described = [(f"owner of parameter {label!r}", str(rank)) for label, rank in zip(labels, owners, strict=True)]
        shared = {id(p) for _, members in self.domains for p in members}
        for domain, members in self.domains:
            ids = {id(p) for p in members}
            items = [item for p, item in zip(params, described, strict=False) if id(p) in ids]
            try:
                require_same(domain.group, domain.ranks, fault, items, None)
            except Exception as found:  # those of the next ones must hear of it
                fault = found
        if fault is not None:
            raise fault
        if not params:
            self.domains = []  # nobody has any
        self.owners = owners
        self.assigned: dict[int, list[Task]] = {}
        self.numbers: dict[int, int] = {}
        self._user: UserFunctions | None = None
        self._stepped = False
        if self.functions is not None:
            self.assigned = self.functions.assigned(params, owners)
            assert shared == self.assigned.keys()
        else:
            self._user = UserFunctions(config)
            # What generated placements say that this rank has alone needs no functions.
            self.numbers = {id(p): i for i, p in enumerate(params) if placing is None or id(p) in shared}
        for functions in _all_functions(config):
            functions.taken_by(optimizer)

    def _asked(self, params: Sequence[Tensor], world: int) -> tuple[tuple[GlobalRank, ...], Exception | None]:
        try:
            assigned = self.config.assign_fn(list(params), self.config.state)
            self.config.state["assignments"] = assigned
            return owners_from(assigned, len(params), world), None
        except CollectiveError:
            raise
        except Exception as fault:  # whatever a user's function raises: the other ranks wait for this one
            if self.functions is not None and _assigning(self.config) is self.functions:
                raise  # all ranks agreed on it
            return (GlobalRank(0),) * len(params), fault

    def _users_domain(self) -> Domain | None:
        """The ranks of a user's functions; None if they are others, and this one has no parameters."""
        group = self.config.state.get("process_group") or dist.group.WORLD
        if not self._params and (not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0):
            return None
        return make_domain(ranks_of(group), self._device)

    def serves(self, params: Sequence[Tensor]) -> bool:
        """Whether these are the parameters that it was made for, lying as they did. If so, the ranks agree on it.

        Not where a user's functions take part, which may decide otherwise now.
        """
        if self._outdated or self.functions is None or _assigning(self.config) is not self.functions:
            return False
        if [id(p) for p in params] != [id(p) for p in self._params] or [_lies(p) for p in params] != self._laid:
            return False
        known = self.functions.domains()
        self.functions.place(params, self.names, self._device)  # as a rank does that makes a new one
        return self.functions.domains() == known

    @property
    def prefetch(self) -> int:
        return self.config.prefetch_count

    def rounds(self, index: int, batches: Sequence[Batch]) -> list[Round]:
        """What group ``index`` exchanges."""
        together = self.config.async_gpu_parallelism
        if self._user is not None:
            found: list[Round] = []
            taking_part: Sequence[tuple[Domain | None, list[Tensor]]] = self.domains or [(None, self._params)]
            for domain, members in taking_part:
                ids = {id(p) for p in members}
                found += user_rounds(
                    index,
                    [batch for batch in batches if batch.number is not None and id(batch.params[0]) in ids],
                    self._user,
                    self.owners,
                    self.names,
                    here=self._here,
                    domain=domain,
                    together=together,
                )
            return found
        assert self.functions is not None
        return [
            *exchanged_rounds(
                index,
                [batch for batch in batches if batch.runtime is None],
                small_numel=self.functions.small_numel,
                nbytes=self.functions.chunk_bytes,
                together=together,
            )
        ]

    def table(self) -> list[Exchanged]:
        """What is exchanged, in the order of the parameters."""
        found = []
        for param, name, owner in zip(self._params, self.names, self.owners, strict=True):
            placed = None if self.functions is None else self.functions.where(param)
            if self.functions is not None and placed is None:
                continue
            shape = tuple(param.shape) if placed is None else placed.layout.shape
            if isinstance(param, DTensor):
                lies_as = ", ".join(str(placement) for placement in param.placements)
            else:
                lies_as = "a user's functions say" if placed is None else "plain tensors"
            ranks = "" if placed is None else " ".join(map(str, placed.ranks))
            found.append(Exchanged(name, "x".join(map(str, shape)), lies_as, ranks, owner))
        return found

    def report(self) -> list[str]:
        """The plans behind the owners."""
        plans = {} if self.functions is None else self.functions.plans
        return [f"ranks {' '.join(map(str, ranks))}: {plan.report()}" for ranks, plan in plans.items()]

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
            vote = Vote(flags, domain.monitor.digest, changed, None if fault is None else self._here)
            try:
                verdict = domain.vote(vote)
                self._check_vote(domain, changed, verdict)
            except Exception as error:
                fault = fault or error
                continue
            present |= {id(p) for p, voted in zip(members, verdict.flags, strict=True) if voted}
        if fault is not None:
            raise fault
        self._outdated = changed
        return None if changed else present

    def _check_vote(self, domain: Domain, changed: bool, verdict: Verdict) -> None:
        ranks = " ".join(map(str, domain.ranks))
        if not verdict.same_change:
            where = "this rank" if changed else "another rank, and not on this one"
            raise RuntimeError(
                f"rank {self._here}: parameters of the optimizer or their layouts have changed on {where}, of ranks "
                f"{ranks}; change them on all of them before the same step"
            )
        if verdict.fault not in (None, self._here):
            raise RuntimeError(
                f"rank {self._here}: rank {verdict.fault}, one of ranks {ranks}, found a fault among other ranks that "
                "hold parameters with it, and takes no step; its message says which"
            )


def _lies(param: Tensor) -> tuple[Any, ...]:
    """How a parameter lies, as far as this rank can see without asking."""
    if isinstance(param, DTensor):
        return param.device_mesh, param.placements, param._local_tensor.shape
    return (param.shape,)
