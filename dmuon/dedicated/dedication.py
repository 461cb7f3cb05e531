"""What ``dedicate_params`` leaves on a model, and what users do with that: synchronization, whole weights."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from dmuon.comm.context import Comm
from dmuon.dedicated.buffer import BufferState
from dmuon.dedicated.matrix import OwnedMatrix, Part, resting, whole_parameter
from dmuon.dedicated.replicated import ATTRIBUTE, living, mark
from dmuon.dedicated.runtime import Runtime
from dmuon.layout.topology import GlobalRank, Position
from dmuon.model.blocks import canonical_fqn, unwrapped
from dmuon.model.routing import Route
from dmuon.platform.torch_private import local_tensor

_GONE = nn.Parameter(torch.empty(0))
_ROUND_BYTES = 2**28  # most bytes of whole matrices that travel together, unless one has more


class Dedication:
    """The plan, the routes, and the runtime that moves the weights of one dedicated model, or of several modules.

    Attributes:
        pools: of each rank, what it may own; None: everything.
        is_list: it is of several modules, or of a list of one.
    """

    def __init__(
        self,
        roots: Mapping[str, nn.Module],
        routes: Sequence[Route],
        pools: list[frozenset[str]] | None,
        runtime: Runtime,
    ) -> None:
        self.plan = runtime.plan
        self.pools = pools
        self.runtime = runtime
        # Without the parameters, which routes would keep alive.
        self._routes = {r.fqn: replace(r, param=_GONE, sites=(), block_module=None) for r in routes}
        self._originals = [weakref.ref(r.param) for r in routes if r.block is not None]
        self.is_list = "" not in roots
        self._prefixes = weakref.WeakKeyDictionary({unwrapped(root): prefix for prefix, root in roots.items()})
        for root in roots.values():
            mark(root, self)

    def place(self, root: nn.Module) -> str:
        """Which one of its list ``root`` is."""
        return self._prefixes[unwrapped(root)]

    def note_place(self, root: nn.Module, name: str) -> None:
        """A model around this one calls ``root``, one of its modules, ``name``."""
        self.runtime.order_check.places[self.place(root)] = name

    def note_around(self, ranks: Iterable[int]) -> None:
        """A model of ``ranks`` lies around this one: those that are none of its own hold something else here."""
        others = {*ranks, *self.runtime.strangers}.difference(self.runtime.comm.topology.ranks)
        self.runtime.strangers = tuple(map(GlobalRank, sorted(others)))

    def tied_outside(self, params: Mapping[str, Tensor]) -> str | None:
        """Name of one of ``params`` that is its own, or was before it had another one put into its place."""
        alive = {id(param) for reference in self._originals if (param := reference()) is not None}
        own = alive | self.runtime.param_ids()
        return next((name for name, param in params.items() if id(param) in own), None)

    def routes(self, root: nn.Module) -> Iterator[Route]:
        """Of the parameters that ``root`` has now, by their names in it."""
        prefix = self.place(root)
        for name, param in root.named_parameters():
            name = canonical_fqn(name)
            if (route := self._routes.get(f"{prefix}{name}")) is not None:
                yield replace(route, fqn=name, param=resting(param))


def dedication_of(module: nn.Module) -> Dedication | None:
    """What ``dedicate_params(module)`` left; None where it was called on another module, above or below."""
    dedication: Dedication | None = module.__dict__.get(ATTRIBUTE)
    return dedication


def dedications(module: nn.Module) -> list[Dedication]:
    """What ``dedicate_params`` left in ``module`` or below it, outermost first, each once."""
    found = (dedication_of(part) for part in module.modules())
    return list(dict.fromkeys(dedication for dedication in found if dedication is not None))


def averaged_by_dmuon() -> set[int]:
    """By ``id``, all parameters that dedicated models hold: dmuon averages their gradients, or knows who does."""
    found = {dedication for root in living() if (dedication := dedication_of(root)) is not None}
    return set().union(*(dedication.runtime.param_ids() for dedication in found))


def places_in(model: nn.Module) -> dict[str, object]:
    """Of the modules in ``model`` that were dedicated before, by name, which one of its list each is."""
    found = ((name, module, dedication_of(module)) for name, module in model.named_modules())
    return {f"place of {name!r} in a list": one.place(module) for name, module, one in found if one is not None}


def undedicated(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters of ``module``, by name, that lie outside every dedicated model in it."""
    inside = {id(p) for part in module.modules() if dedication_of(part) is not None for p in part.parameters()}
    return [(name, p) for name, p in module.named_parameters() if id(p) not in inside]


def require_dedicated(model: nn.Module) -> list[Dedication]:
    """:func:`dedications`, at least one.

    Raises:
        ValueError: the model was not dedicated.
    """
    dedicated = dedications(model)
    if not dedicated:
        raise ValueError("model was not dedicated: call dmuon.dedicate_params(model, mesh) first")
    return dedicated


def set_requires_gradient_sync(model: nn.Module, requires_gradient_sync: bool) -> None:
    """Reduce gradients in backward (True, the default) or accumulate them locally (False).

    Covers owned matrices, replicated parameters and every FSDP2 module of ``model``. The last backward before
    ``step()`` must synchronize; it reduces what was accumulated.

    Raises:
        ValueError: the model was not dedicated.
    """
    for dedication in require_dedicated(model):
        dedication.runtime.sync = requires_gradient_sync
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(requires_gradient_sync, recurse=False)


def set_requires_all_reduce(model: nn.Module, requires_all_reduce: bool) -> None:
    """With several replicas, reduce gradients across them (True, the default) or only within each (False).

    Between micro-batches this keeps gradients sharded without crossing replicas. Covers owned matrices, replicated
    parameters and every FSDP2 module of ``model``. The last backward before ``step()`` must do both. Without replicas
    it changes nothing; where every rank is a replica it is :func:`set_requires_gradient_sync`.

    Raises:
        ValueError: the model was not dedicated.
    """
    for dedication in require_dedicated(model):
        dedication.runtime.all_reduce = requires_all_reduce
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_all_reduce(requires_all_reduce, recurse=False)


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Inside the context, backward accumulates gradients without communication.

    Raises:
        ValueError: the model was not dedicated.
    """
    set_requires_gradient_sync(model, False)
    try:
        yield
    finally:
        set_requires_gradient_sync(model, True)


@contextmanager
def summon_full_params(model: nn.Module, *, writeback: bool = True) -> Iterator[None]:
    """Inside the context, modules hold whole owned weights, in the dtype of the masters, on every rank.

    Under tensor parallelism they hold this rank's parts, as DTensors. Costs the memory of all owned matrices on every
    rank. Forward and backward are not available inside. Collective.

    Args:
        model: the model that was dedicated.
        writeback: make the owners' edits the new weights. Edits must be the same on all ranks; an exception inside
            drops them.

    Raises:
        ValueError: the model was not dedicated.
        RuntimeError: inside a forward or backward, or inside itself; a forward, a step, or a weight of another shape
            inside.
    """
    runtimes = [dedication.runtime for dedication in require_dedicated(model)]
    for runtime in runtimes:
        runtime.at_rest("summon_full_params()")
    blocks = [block for runtime in runtimes for block in runtime.blocks]
    of_blocks = [(runtime.comm, [m for block in runtime.blocks for m in block.matrices]) for runtime in runtimes]
    wholes = iter([whole for comm, matrices in of_blocks for whole in _wholes(comm, matrices)])
    of_block = [[*islice(wholes, len(block.matrices))] for block in blocks]
    for block, whole in zip(blocks, of_block, strict=True):
        if block.buffer.state is not BufferState.FREED:
            block.buffer.free()
        block.summon(whole)
    try:
        yield
        present = [(block.buffer.comm, matrix) for block in blocks for matrix in block.matrices if any(matrix.sites)]
        edited = [(comm, matrix, _edited(matrix)) for comm, matrix in present]
    finally:
        for block in blocks:
            block.rest()
    if writeback:
        for runtime in runtimes:
            runtime.before_write()
        with torch.no_grad():
            for _, matrix, param in edited:
                matrix.master.copy_(matrix.own_part(local_tensor(param)))
        for runtime in runtimes:
            runtime.weights_changed()


def _edited(matrix: OwnedMatrix) -> nn.Parameter:
    """What the module holds now: the parameter that was put there, or one that the user put in its place."""
    module, name = next(matrix.sites)
    param = module._parameters[name]
    if param is None or param.shape != matrix.shape:
        replacement = "nothing" if param is None else f"shape {tuple(param.shape)}"
        raise RuntimeError(
            f"summon_full_params(): parameter {matrix.fqn!r} of shape {tuple(matrix.shape)} was replaced by "
            f"{replacement}; keep its shape"
        )
    return param


def _wholes(comm: Comm, matrices: Sequence[OwnedMatrix]) -> Iterator[nn.Parameter]:
    """Each matrix, whole. Collective over the data-parallel ranks: a broadcast of each owner a round."""
    for some in _in_rounds(matrices):
        with torch.no_grad():
            wholes = _round_of_wholes(comm, some)
        for whole, matrix in zip(wholes, some, strict=True):
            yield whole_parameter(
                whole if matrix.tensor is None else matrix.tensor.wrap(whole, matrix.shape), matrix.rest
            )


def _in_rounds(matrices: Sequence[OwnedMatrix]) -> Iterator[list[OwnedMatrix]]:
    """In order; those that travel together come together."""
    some: list[OwnedMatrix] = []
    nbytes = 0
    for matrix in matrices:
        size = matrix.local_shape.numel() * matrix.master.element_size()
        if some and (nbytes + size > _ROUND_BYTES or matrix.master.dtype != some[0].master.dtype):
            yield some
            some, nbytes = [], 0
        some.append(matrix)
        nbytes += size
    if some:
        yield some


def _round_of_wholes(comm: Comm, matrices: Sequence[OwnedMatrix]) -> list[Tensor]:
    wholes = [torch.empty(m.local_shape, dtype=m.master.dtype, device=comm.device) for m in matrices]
    pieces = {id(part): piece for matrix in matrices for part, piece in matrix.pieces(matrix.master)}
    by_owner: dict[Position, list[tuple[Tensor, Part]]] = {}
    for whole, matrix in zip(wholes, matrices, strict=True):
        for part in matrix.parts:
            by_owner.setdefault(part.owner, []).append((whole, part))
    for owner, targets in sorted(by_owner.items()):
        flat = wholes[0].new_empty(sum(part.numel for _, part in targets))
        slots = flat.split([part.numel for _, part in targets])
        if owner == comm.position:
            for slot, (_, part) in zip(slots, targets, strict=True):
                slot.copy_(pieces[id(part)].reshape(-1))
        if comm.world > 1:
            what = f"broadcast of {len(targets)} matrices from rank {comm.ranks[owner]} for summon_full_params"
            with comm.monitor.watch(what):
                dist.broadcast(flat, src=comm.ranks[owner], group=comm.group)
        for slot, (whole, part) in zip(slots, targets, strict=True):
            part.write(whole, slot.view(part.local_shape))
    return wholes
