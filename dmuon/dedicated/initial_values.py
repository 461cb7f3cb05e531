"""The values that a model begins with: the first rank's become everyone's, also of a model on the meta device.

Of the latter the first rank initializes one module after the other, and each rank keeps its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon.comm.agreement import agree
from dmuon.comm.context import Comm
from dmuon.comm.monitor import FirstError
from dmuon.dedicated.matrix import Weight, initial_master
from dmuon.dedicated.replicated import excluded_modules, held_by, in_buckets
from dmuon.model.blocks import canonical_fqn
from dmuon.platform.torch_private import TorchDispatchMode, local_tensor, move_hooks, share_random_state

Initialize = Callable[[nn.Module], object]
_NAMED = 5  # at most in one message
BUCKET_BYTES = 2**28  # of a bucket that is full


def share_initial_values(
    model: nn.Module, weights: Sequence[Weight], comm: Comm, initialize: Initialize | None
) -> dict[str, Tensor]:
    """Make the first rank's values everyone's; returns the masters of this rank by name. Collective."""
    by_tensor = {id(weight.route.param): weight for weight in weights}
    theirs = held_by(excluded_modules(model))
    own = (tensor for tensor in chain(model.parameters(), model.buffers()) if id(tensor) not in theirs)
    tensors = [tensor for tensor in own if not tensor.is_meta]
    of_meta = _values_of_meta(model, comm, initialize) if _is_on_meta(model) else ()
    masters: dict[str, Tensor] = {}
    replaced: dict[int, Tensor] = {}
    # Behind the others: initializing a module may have changed buffers of it that were there.
    for tensor, value in chain(of_meta, _from_first_rank(tensors, tensors, comm)):
        weight = by_tensor.get(id(tensor))
        if weight is not None:
            masters[weight.route.fqn] = initial_master(value, weight, comm)
        elif tensor.is_meta:
            replaced[id(tensor)] = _replacement(tensor, value, comm.device)
        elif comm.position:
            with torch.no_grad():
                local_tensor(tensor).detach().copy_(value)
    for module in model.modules():
        for store, name, tensor in _held(module):
            store[name] = replaced.get(id(tensor), tensor)
    return masters


def _from_first_rank(
    tensors: Sequence[Tensor], values: Sequence[Tensor], comm: Comm
) -> Iterator[tuple[Tensor, Tensor]]:
    """Each tensor with the first rank's value of its local part. Collective over the data-parallel ranks.

    They travel in flat buckets. A value may be a part of one, which keeps all of that alive: copy what shall stay.

    Args:
        tensors: alike on all ranks in shape and dtype.
        values: of these; they are read on the first rank alone, where those on the meta device have none.
    """
    given = {id(tensor): local_tensor(value).detach() for tensor, value in zip(tensors, values, strict=True)}
    for bucket in in_buckets(tensors, BUCKET_BYTES, attrgetter("dtype")):  # ranks may have them on other devices
        sources = [given[id(tensor)] for tensor in bucket]
        flat = torch.empty(sum(map(torch.numel, sources)), dtype=bucket[0].dtype, device=comm.device)
        parts = [
            part.view(one.shape) for part, one in zip(flat.split([*map(torch.numel, sources)]), sources, strict=True)
        ]
        if comm.position == 0:
            for part, source in zip(parts, sources, strict=True):
                if not source.is_meta:  # of what could not be initialized, any value is sent
                    part.copy_(source)
        with comm.monitor.watch("broadcast of initial values"):
            dist.broadcast(flat.view(torch.uint8), src=comm.ranks[0], group=comm.group)  # back ends lack some dtypes
        yield from zip(bucket, parts, strict=True)


def _is_on_meta(model: nn.Module) -> bool:
    """Whether anything of ``model`` waits for its values."""
    return any(tensor.is_meta for module in model.modules() for _, _, tensor in _held(module))


def check_initialize(model: nn.Module, initialize: Initialize | None) -> None:
    """Raise unless every module of ``model`` that is on the meta device can be initialized.

    Raises:
        TypeError, ValueError: naming modules and the remedy.
    """
    if initialize is not None and not callable(initialize):
        raise TypeError(f"initialize must be a function of a module, got {type(initialize).__name__}")
    waiting = [(name, module) for name, module in model.named_modules() if _waiting(module)]
    if initialize is not None and not waiting:
        raise ValueError(
            "initialize is for models on the meta device, and nothing of this one is there: its values are kept; leave "
            "initialize out"
        )
    for name, module in waiting:
        if not all(param.is_meta for param in module.parameters(recurse=False)):
            raise ValueError(
                f"module {name or 'model'!r} has tensors on the meta device and parameters that are not, which "
                "initializing would overwrite; move all of its tensors to one of them"
            )
    lacking = [
        f"{canonical_fqn(name) or 'model'!r} ({type(module).__name__})"
        for name, module in waiting
        if not callable(getattr(module, "reset_parameters", None))
    ]
    if initialize is None and lacking:
        more = f" and {len(lacking) - _NAMED} more" if len(lacking) > _NAMED else ""
        raise ValueError(
            f"modules {', '.join(lacking[:_NAMED])}{more} are on the meta device and have no reset_parameters(); give "
            "dedicate_params(initialize=…) a function that initializes a module's own tensors, such as a transformers "
            "model's _init_weights, or materialize the model first"
        )


def _values_of_meta(model: nn.Module, comm: Comm, initialize: Initialize | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Every tensor of ``model`` on the meta device, with the value (of its local part) that the first rank gave it.

    The first rank materializes the tensors of one module after the other, NaN at first, and initializes that, in the
    order of ``model.modules()``; what several modules hold has the value that the last one left. A method of a module,
    such as a transformers model's ``_init_weights``, is called for modules without tensors, too: it is refused if it
    writes to what is not there. No rank has more than a module and a bucket of it, besides what the caller keeps. A
    value may be a part of a bucket: copy what shall stay. Collective over the data-parallel ranks.

    Raises:
        RuntimeError: on the first rank: initializing a module failed, or changed what it holds.
        ValueError: on the others, then.
    """
    of_model = isinstance(getattr(initialize, "__self__", None), nn.Module)
    waiting = [
        (name, module)
        for name, module in model.named_modules(memo=excluded_modules(model))
        if _waiting(module) or (of_model and not [*_held(module)] and _is_on_meta(module))
    ]
    mesh = next((t.device_mesh for _, m in waiting for _, _, t in _waiting(m) if isinstance(t, DTensor)), None)
    if mesh is not None and comm.position == 0:
        share_random_state(mesh)
    last = {id(tensor): module for _, module in waiting for _, _, tensor in _waiting(module)}
    given: dict[int, Tensor] = {}  # on the first rank, until all modules that hold a tensor are initialized
    first = FirstError()  # what follows is sent all the same, since the others wait for it
    for name, module in waiting:
        if comm.position == 0 and first.error is None:
            with first:
                _initialize(module, name, initialize, given, comm.device)
        complete = {id(t): t for _, _, t in _waiting(module) if last[id(t)] is module}
        yield from _from_first_rank([*complete.values()], [given.pop(key, t) for key, t in complete.items()], comm)
    agree(comm.control, first.error)


def _replacement(tensor: Tensor, value: Tensor, device: torch.device) -> Tensor:
    """A tensor or parameter like ``tensor``, which is on the meta device, with ``value`` as its local part."""
    fresh = _materialized(tensor, device)
    with torch.no_grad():
        local_tensor(fresh).copy_(value)
    move_hooks(tensor, fresh)
    fresh.__dict__.update(tensor.__dict__)
    return fresh


def _materialized(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor or parameter like ``tensor``, which is on the meta device, without values."""
    with torch.no_grad():
        fresh = torch.empty_like(tensor, device=device)
    return nn.Parameter(fresh, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fresh


def _held(module: nn.Module) -> Iterator[tuple[dict[str, Tensor | None], str, Tensor]]:
    stores: list[dict[str, Tensor | None]] = [module._parameters, module._buffers]  # type: ignore[list-item]
    for store in stores:
        for name, tensor in list(store.items()):
            if tensor is not None:
                yield store, name, tensor


def _waiting(module: nn.Module) -> list[tuple[dict[str, Tensor | None], str, Tensor]]:
    return [each for each in _held(module) if each[2].is_meta]


def _initialize(
    module: nn.Module, name: str, initialize: Initialize | None, given: dict[int, Tensor], device: torch.device
) -> None:
    """Give values to what ``module`` itself holds.

    Args:
        given: by the ``id`` of what is on the meta device, what takes its place until it has been sent.
    """
    held = _waiting(module)
    for store, key, tensor in held:
        if id(tensor) not in given:
            given[id(tensor)] = blank = _materialized(tensor, device)
            with torch.no_grad():
                local_tensor(blank).fill_(_filling(blank.dtype))
        store[key] = given[id(tensor)]
    try:
        with torch.no_grad(), _NothingIsLost():  # type: ignore[no-untyped-call]
            if initialize is None:
                module.reset_parameters()  # type: ignore[operator]
            else:
                initialize(module)
        for store, key, tensor in held:
            found = store.get(key)
            if found is None or (found.shape, found.dtype, found.device) != (tensor.shape, tensor.dtype, device):
                raise ValueError(f"{key!r} is not what it was: {tuple(tensor.shape)}, {tensor.dtype} on {device}")
            given[id(tensor)] = found
    except Exception as fault:
        raise RuntimeError(
            f"initializing module {name or 'model'!r} ({type(module).__name__}) failed: {fault}"
        ) from fault
    finally:
        for store, key, tensor in held:
            store[key] = tensor


class _NothingIsLost(TorchDispatchMode):
    """Raises where something is written to a tensor on the meta device, which would forget it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = args[0] if args else None
        if func.overloadpacket.__name__.endswith("_") and isinstance(target, Tensor) and target.is_meta:
            raise RuntimeError(
                "it writes to a tensor of another module, which is on the meta device still; give initialize=… a "
                "function that writes to a module's own tensors, or materialize the model and initialize it first"
            )
        return func(*args, **(kwargs or {}))


def _filling(dtype: torch.dtype) -> float:
    """What stands for a value that nobody has given: NaN, or the largest integer."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max
