"""Matrices that a user's own functions gather and redistribute: the rounds of a step, and what the functions return."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon.comm.agreement import agree
from dmuon.comm.domain import Domain
from dmuon.comm.monitor import FirstError
from dmuon.exchanged.config import OWN_ENTRIES, DistributedConfig, Waitable
from dmuon.kernels import momentum_update, normalized, update_scale
from dmuon.layout.matrices import local_regions
from dmuon.layout.topology import GlobalRank
from dmuon.model.matrix_spec import flat_of, shape_of, spec_of
from dmuon.platform.streams import PhaseTimer
from dmuon.platform.torch_private import local_tensor
from dmuon.step.batches import Batch
from dmuon.step.residency import like_param
from dmuon.step.rounds import Round, Step
from dmuon.step.update import Done, apply, fold, numerics_of, orthogonalize


def tensor_of(function: str, returned: object) -> Tensor | None:
    """What a call of a user's function comes to, once its communication has finished; None where it gave none."""
    if isinstance(returned, tuple):
        tensor, work = returned if len(returned) == 2 else (returned, returned)  # a tuple is neither
        if not (tensor is None or isinstance(tensor, Tensor)) or not (work is None or isinstance(work, Waitable)):
            types = ", ".join(type(item).__name__ for item in returned)
            raise TypeError(f"{function} returned a tuple ({types}): a tuple must be (tensor or None, work or None)")
        if work is not None:
            work.wait()
        return tensor
    if isinstance(returned, dist.Work):
        raise TypeError(
            f"{function} returned a dist.Work alone, which has no tensor to give: return (tensor, work), "
            "or (None, work) on a rank that receives nothing"
        )
    if isinstance(returned, Waitable):  # before Tensor: an asynchronous collective's tensor is both
        waited = returned.wait()
        if waited is not None and not isinstance(waited, Tensor):
            raise TypeError(
                f"{function} returned a {type(returned).__name__} whose wait() gave {waited!r}, "
                "not a tensor or None: return (tensor, work) instead"
            )
        return waited
    if returned is None or isinstance(returned, Tensor):
        return returned
    raise TypeError(f"{function} must return a tensor, None, (tensor, work) or an object with wait(), got {returned!r}")


class UserFunctions:
    """Calls the ``gather_fn`` and ``redistribute_fn`` of ``config`` as :class:`DistributedConfig` documents.

    ``config.state["rank"]`` must be set by now. What dmuon has set is put back before every call: another optimizer
    with this configuration sets the same entries. :func:`tensor_of` waits for what a call returns.
    """

    def __init__(self, config: DistributedConfig) -> None:
        self._state = config.state
        self._entries = {name: config.state[name] for name in OWN_ENTRIES if name in config.state}
        self._gather = _documented_call("gather_fn", config.gather_fn, "dst_rank")
        self._redistribute = _documented_call("redistribute_fn", config.redistribute_fn, "src_rank")

    def gather(self, index: int, update: Tensor, owner: GlobalRank) -> object:
        """Start assembling parameter ``index`` on rank ``owner`` from every rank's part ``update``."""
        self._state |= {**self._entries, "current_param_idx": index}
        return self._gather(update, owner, self._state)

    def redistribute(self, index: int, whole: Tensor | None, owner: GlobalRank) -> object:
        """Start giving every rank its part of parameter ``index``; ``whole`` is None except on rank ``owner``."""
        self._state |= {**self._entries, "current_param_idx": index}
        return self._redistribute(whole, owner, self._state)


_Call = Callable[[Tensor | None, int, dict[str, Any]], object]


def _documented_call(name: str, function: Callable[..., object], rank_name: str) -> _Call:
    """``function`` as one of the tensor, the rank and the state, by position.

    Raises:
        TypeError: the signature of ``function`` takes them neither by position nor by their documented names.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # built-in functions need not have one
        return function
    names = [one for one in (rank_name, "rank") if {one, "state"} <= signature.parameters.keys()]
    for keyword in names[:1] or (None, rank_name):  # by their names, whatever their order is
        try:
            if keyword is None:
                signature.bind(None, 0, {})
                return function
            signature.bind(None, **{keyword: 0, "state": {}})
            return partial(_call_by_name, function, keyword)
        except TypeError:
            continue
    raise TypeError(f"{name} must be callable as {name}(update, {rank_name}, state), its signature is {signature}")


def _call_by_name(
    function: Callable[..., object], keyword: str, update: Tensor | None, rank: int, state: dict[str, Any]
) -> object:
    return function(update, **{keyword: rank, "state": state})


# -- rounds ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class UserRound(Round):
    """At most one parameter of each owner: all are gathered, each owner orthogonalizes, all are redistributed.

    A batch is one parameter, and its position the number of that.

    Where the ranks check what the functions gave for a parameter for the first time, a fault of one ends all of them.

    Attributes:
        owners, names: of all parameters, by number.
        rank: this one.
        domain: the ranks that take part; None for a single process.
    """

    exchanged = True
    knows_shapes = False
    queue = 0  # one for all domains: the functions of every rank are called for all parameters in one order

    index: int
    batches: Sequence[Batch]
    functions: UserFunctions
    owners: Sequence[GlobalRank]
    names: Sequence[str]
    rank: GlobalRank
    domain: Domain | None

    def __post_init__(self) -> None:
        self._unproven = {batch.position for batch in self.batches}
        self._shapes: dict[int, tuple[int, ...]] = {}  # of what was gathered here before

    def run(self, step: Step) -> Iterator[bool]:
        """Nothing is recorded: what is here of each matrix, only the functions know."""
        group, timer = step.options[self.index], step.timer
        batches = {batch.position: batch for batch in self.batches if batch.ids <= step.present}  # one parameter each
        results: dict[int, object] = {}
        for number, batch in batches.items():
            with timer.phase("momentum"):
                [update] = fold(group, batch, batch.whole, momentum_update)
                update = like_param(batch.params[0], update.view(local_tensor(batch.params[0]).shape))
            with timer.phase("exchange"), self._named("gather_fn", number):
                results[number] = self.functions.gather(number, update, self.owners[number])
            del update
        yield False

        first = FirstError()
        wholes = self._wholes(batches, results, timer, first)
        updates: dict[int, Tensor | None] = {}
        for number, batch in batches.items():
            whole = wholes.pop(number)
            updates[number] = None
            if whole is not None:
                with first:  # of the user's are adjust_lr_fn and orthogonalize
                    updates[number], done = _orthogonalized(group, batch, whole, timer)
                    step.done += done
            del whole
        self._raise(first.error, batches)
        with timer.phase("exchange"):  # not before this rank has computed: the functions may wait for other owners
            for number in batches:
                whole = updates.pop(number)
                with self._named("redistribute_fn", number):
                    results[number] = self.functions.redistribute(number, whole, self.owners[number])
                del whole
        yield True

        parts = self._parts(batches, results, timer)
        self._unproven -= batches.keys()
        for number, batch in batches.items():
            assert batch.region is not None
            update = batch.region.take(parts.pop(number).to(batch.dtype))
            apply(group, batch, batch.whole[0], update, timer, scale=1.0)

    def _wholes(
        self, batches: Mapping[int, Batch], gathered: dict[int, object], timer: PhaseTimer, first: FirstError
    ) -> dict[int, Tensor | None]:
        """What has been gathered, by number; None where another rank is the owner, or where ``first`` has a fault."""
        wholes: dict[int, Tensor | None] = {}
        for number, batch in batches.items():
            with timer.phase("exchange"):
                with self._named("gather_fn", number):
                    whole = tensor_of("gather_fn", gathered.pop(number))
                wholes[number] = None
                with first:
                    wholes[number] = self._checked_whole(number, batch.params[0], whole)
        return wholes

    def _checked_whole(self, number: int, param: Tensor, whole: Tensor | None) -> Tensor | None:
        """The whole matrix on its owner, and None on other ranks, whatever ``gather_fn`` gave there.

        A DTensor's local tensor is what counts. Where its shape is unknown, no side may be smaller than that of this
        rank's part; if that has other dimensions, there may not be fewer elements than it has.

        Raises:
            RuntimeError: on the owner, anything but a tensor of the whole matrix's shape.
        """
        if self.rank != self.owners[number]:
            return None
        name, rank = self.names[number], self.rank
        if whole is None:
            raise RuntimeError(
                f"gather_fn returned None for parameter {name!r} on rank {rank}, which owns it: return the whole "
                "matrix on dst_rank"
            )
        local = local_tensor(whole)
        shape, part = tuple(local.shape), tuple(local_tensor(param).shape)
        known = self._shapes.get(number)
        if known is None and (isinstance(param, DTensor) or flat_of(param)):
            known = shape_of(param)
        if known is not None:
            fits, expected = shape == tuple(known), f"the whole matrix is {tuple(known)}"
        elif len(shape) == len(part):
            fits = all(side >= least for side, least in zip(shape, part, strict=True))
            expected = f"this rank's part alone is {part}"
        else:
            fits, expected = prod(shape) >= prod(part), f"this rank's part alone has {prod(part)} elements"
        if not fits:
            raise RuntimeError(
                f"gather_fn returned a tensor of shape {shape} for parameter {name!r} on rank {rank}; {expected}: join "
                "the parts of all ranks along the dimensions that are sharded"
            )
        try:
            spec_of(param).matrix_shape(shape)
        except ValueError as fault:
            raise RuntimeError(
                f"gather_fn returned a tensor for parameter {name!r} on rank {rank} that Muon cannot take: {fault}; "
                "return it in the shape that it has in the layer"
            ) from None
        self._shapes[number] = shape  # by which the learning rate is scaled
        return local

    def _parts(self, batches: Mapping[int, Batch], results: dict[int, object], timer: PhaseTimer) -> dict[int, Tensor]:
        """What has been redistributed, by number."""
        parts: dict[int, Tensor] = {}
        first = FirstError()
        with timer.phase("exchange"):
            for number, batch in batches.items():
                with self._named("redistribute_fn", number):
                    part = tensor_of("redistribute_fn", results.pop(number))
                shape = tuple(local_tensor(batch.params[0]).shape)
                with first:
                    if part is None or local_tensor(part).shape != shape:
                        given = "None" if part is None else f"a tensor of shape {tuple(local_tensor(part).shape)}"
                        raise RuntimeError(
                            f"redistribute_fn returned {given} for parameter {self.names[number]!r} on rank "
                            f"{self.rank}; this rank's part is {shape}: return it on every rank"
                        )
                    parts[number] = local_tensor(part)
        self._raise(first.error, batches)
        return parts

    def _named(self, function: str, number: int) -> AbstractContextManager[None]:
        """Communication that fails inside says where, as dmuon's own does."""
        if self.domain is None:
            return nullcontext()
        return self.domain.monitor.watch(f"{function} of parameter {self.names[number]!r}")

    def _raise(self, fault: Exception | None, numbers: Collection[int]) -> None:
        """Raise a fault of this rank, and of any other one if some of ``numbers`` come for the first time."""
        if self.domain is not None and not self._unproven.isdisjoint(numbers):
            try:
                agree(self.domain.group, fault)
            except ValueError as of_others:
                raise RuntimeError(str(of_others)) from None
        if fault is not None:
            raise fault


def _orthogonalized(
    group: Mapping[str, Any], batch: Batch, whole: Tensor, timer: PhaseTimer
) -> tuple[Tensor, list[Done]]:
    """The update, scaled by the shapes of the whole matrices, which other ranks do not know."""
    param = batch.params[0]
    spec = spec_of(param)
    whole = whole.to(batch.dtype)
    numerics = numerics_of(group, batch.dtype, whole.device)
    update, done = torch.empty_like(whole, memory_format=torch.contiguous_format), []
    regions = local_regions(whole.shape, spec)
    several = len(regions) * regions[0].stack[0] > 1 or whole.ndim > 2
    for part, region in enumerate(regions):
        of_part = replace(batch, shape=region.shape, transposed=spec.transposed)
        with timer.phase("momentum"):
            x, norms = normalized(region.take(whole), storage=numerics.storage, eps=group["eps"])
        orthogonal, of_part_done = orthogonalize(numerics, of_part, (0, 1), x, norms, timer)
        scaled = orthogonal.to(batch.dtype) * update_scale(group["adjust_lr_fn"], of_part.scaled_shape)
        target = region.take(update)
        target.copy_(scaled)
        region.put(update, list(target.unbind(0)))
        numbers = range(part, len(regions) * region.count, len(regions))
        done.append(replace(of_part_done, matrices=[(param, i if several else None) for i in numbers]))
    return update, done


def by_owner(batches: Sequence[Batch], owners: Sequence[GlobalRank], together: bool) -> list[list[Batch]]:
    """The batches of each round: at most one parameter per owner; one parameter each unless together."""
    rounds: list[list[Batch]] = []
    taken: dict[int, int] = {}
    for batch in batches:
        owner = owners[batch.position]
        number = taken.get(owner, 0) if together else len(rounds)
        taken[owner] = number + 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(batch)
    return rounds
