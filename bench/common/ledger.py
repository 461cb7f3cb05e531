"""What runs inside ``with Ledger() as ledger``: its collectives, the bytes they move, and the memory it allocates."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dmuon.comm.domain import Copying, Redistribution

# All methods of the exchange, whatever they are called.
_EXCHANGE = [
    (kind, name)
    for kind in (Redistribution, Copying)
    for name, method in vars(kind).items()
    if inspect.isfunction(method)
]


class Live(TorchDispatchMode):
    """Follows the storages that are made inside; what a DTensor's own operators make in between is not seen.

    Attributes:
        peak: most bytes that were alive at once of them, since :meth:`restart`; before that it is not kept up.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak, self._counting = 0, False
        self._storages: dict[int, weakref.ref[Any]] = {}

    def bytes(self) -> int:
        """Of those that are alive; their sizes may change."""
        alive = {key: (ref, found) for key, ref in self._storages.items() if (found := ref()) is not None}
        self._storages = {key: ref for key, (ref, _) in alive.items()}
        return sum(found.nbytes() for _, found in alive.values())

    def restart(self) -> None:
        gc.collect()
        self.peak, self._counting = self.bytes(), True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(found):
            key = storage._cdata
            if key not in given and (key not in self._storages or self._storages[key]() is None):
                self._storages[key] = weakref.ref(storage)
        if self._counting:
            self.saw(self.bytes())
        return found

    def saw(self, alive: int) -> None:
        """So many bytes are alive after an operator."""
        self.peak = max(self.peak, alive)


class Ledger(Live):
    """Counts on this rank.

    Attributes:
        calls: collectives, by operator.
        sent, received: bytes by operator, as few as point-to-point messages need: of an all-gather the parts of the
            others, of a reduction to one rank its part of every other rank, of an all-reduce twice what is not a
            rank's own.
        in_flight: most bytes that were alive at once inside of a method of ``Redistribution``: no workspace is alive
            then, but the parts, whole matrices and updates that are packed, on their way, or put together are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.in_flight = 0
        self._depth = 0  # of methods of the exchange that run now
        self._restore = ExitStack()

    def __enter__(self) -> Ledger:
        for kind, name in _EXCHANGE:
            own = vars(kind)[name]  # perhaps another ledger's
            self._restore.callback(setattr, kind, name, own)
            setattr(kind, name, self._observed(own))
        super().__enter__()
        self.restart()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        self._restore.close()

    def _observed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def observed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                return method(*args, **kwargs)
            finally:
                self._depth -= 1

        return observed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func.overloadpacket.__name__, args)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def saw(self, alive: int) -> None:
        super().saw(alive)
        if self._depth:
            self.in_flight = max(self.in_flight, alive)

    def _count(self, name: str, args: Any) -> None:
        tensors = [tensor for tensor in tree_leaves(args) if isinstance(tensor, Tensor)]
        if not tensors:
            return  # a barrier
        first, last = tensors[0].nbytes, tensors[-1].nbytes
        match name:
            case "alltoall_base_":
                received, sent = first, last
            case "_allgather_base_":
                received, sent = first - last, last * (first // max(1, last) - 1)
            case "all_gather_into_tensor":
                received = sent = first * (args[1] - 1)
            case "_reduce_scatter_base_":
                received = sent = last - first
            case "broadcast_":
                group = dist.ProcessGroup.unbox(args[1])
                received, sent = (0, first) if args[2] == group.rank() else (first, 0)  # others pass it on
            case "reduce_":
                group = dist.ProcessGroup.unbox(args[1])
                received, sent = (first * (group.size() - 1), 0) if args[3] == group.rank() else (0, first)
            case "allreduce_":
                size = dist.ProcessGroup.unbox(args[1]).size()
                received = sent = 2 * first * (size - 1) // size
            case "wait_tensor" | "_wrap_tensor_autograd":
                return
            case _:
                raise NotImplementedError(f"no rule says how many bytes {name} moves; add one here")
        self.calls[name] += 1
        self.received[name] += received
        self.sent[name] += sent


def _storages(tree: Any) -> list[Any]:
    return [_plain(leaf).untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _plain(tensor: Tensor) -> Tensor:
    """What is inside of a DTensor, or of a functional collective's result."""
    for name in ("_local_tensor", "elem"):
        tensor = getattr(tensor, name, tensor)
    return tensor
