"""Counts what travels, by process group and by operator of the back end, and what is in memory."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness.dtensors import local_tensor


@dataclass(frozen=True, slots=True)
class Amount:
    """Operations, and bytes of the regions that they gather or reduce."""

    operations: int = 0
    nbytes: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.operations + other.operations, self.nbytes + other.nbytes)

    def __str__(self) -> str:
        return f"{self.operations} of {self.nbytes} bytes"


class Traffic(TorchDispatchMode):
    """Counts the collectives of this rank while it is entered, by process group and by operator of the back end."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.amounts: dict[tuple[str, str], Amount] = {}  # by name of the group and operator

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            operator = func.overloadpacket.__name__
            key = next((name for name in map(_group_name, args) if name), ""), operator
            self.amounts[key] = self.amounts.get(key, Amount()) + Amount(1, _region_nbytes(operator, args))
        return func(*args, **(kwargs or {}))

    def over(self, *groups: dist.ProcessGroup, votes: bool = True) -> Amount:
        """What went over some groups, all-reduces (``votes``) included or not."""
        names = {group.group_name for group in groups}
        counted = {key: a for key, a in self.amounts.items() if votes or not key[1].startswith("allreduce")}
        return sum((amount for (name, _), amount in counted.items() if name in names), Amount())

    def operations(self) -> dict[str, int]:
        """How many there were, by operator of ``torch.ops.c10d``."""
        return {operator: amount.operations for operator, amount in self.by_operator().items()}

    def by_operator(self) -> dict[str, Amount]:
        """What went over any group, by operator of ``torch.ops.c10d``, such as ``broadcast_``."""
        found: dict[str, Amount] = {}
        for (_, operator), amount in sorted(self.amounts.items(), key=lambda item: item[0][1]):
            found[operator] = found.get(operator, Amount()) + amount
        return found


def live_bytes() -> int:
    """Of all tensors of this process."""
    gc.collect()
    storages = {}
    for obj in gc.get_objects():
        kind = type(obj)  # torch.compile leaves some that are fake
        if issubclass(kind, Tensor) and not issubclass(kind, FakeTensor) and not obj.is_meta:
            storage = local_tensor(obj).untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _region_nbytes(name: str, args: Sequence[Any]) -> int:
    """Bytes of the larger side, which gathers fill and reductions read; of an all-to-all those that arrive."""
    arriving = _nbytes(args[0])
    return arriving if name.startswith("alltoall") else max(arriving, _nbytes(args[1]))


def _group_name(value: Any) -> str:
    if not isinstance(value, torch.ScriptObject):
        return ""
    try:
        name: str = dist.ProcessGroup.unbox(value).group_name
    except RuntimeError:  # another kind of object, such as a reduction
        return ""
    return name


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, (list, tuple)):
        return sum(map(_nbytes, value))
    return 0
