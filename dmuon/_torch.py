"""Every semi-private PyTorch call that dmuon makes, behind one version check."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

__all__ = [
    "current_backward",
    "default_group_is_bound",
    "local_tensor",
    "on_backward_end",
    "outside_compile",
    "require_supported_torch",
    "row_sharded_spec",
]

_P = ParamSpec("_P")
_T = TypeVar("_T")

_OLDEST = (2, 11)


def require_supported_torch() -> None:
    """Raise RuntimeError when the installed PyTorch is older than what dmuon supports."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < _OLDEST:
        raise RuntimeError(
            f"dmuon needs PyTorch >= {_OLDEST[0]}.{_OLDEST[1]}, found {torch.__version__}: upgrade torch"
        )


def row_sharded_spec(mesh: DeviceMesh, shape: torch.Size, dtype: torch.dtype) -> DTensorSpec:
    """Spec of a contiguous ``(m, n)`` tensor sharded by rows over a 1-D ``mesh``, evenly or not."""
    meta = TensorMeta(shape=shape, stride=(shape[1], 1), dtype=dtype)
    return DTensorSpec(mesh, (Shard(0),), tensor_meta=meta)


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank holds of ``tensor``: itself, or a DTensor's local tensor, without autograd and not a view."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def default_group_is_bound() -> bool:
    """Whether the default process group was made for one device (``init_process_group(device_id=…)``)."""
    return dist.distributed_c10d._get_default_group().bound_device_id is not None


def current_backward() -> int | None:
    """Identity of the backward pass that runs now (nested ones differ), or None outside of one."""
    task: int = torch._C._current_graph_task_id()
    return None if task == -1 else task


def on_backward_end(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward pass that runs now has computed its last gradient."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def outside_compile(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Keep ``function`` out of ``torch.compile``: hooks move storage, which no graph can hold."""
    disabled: Callable[_P, _T] = _disable_dynamo(function)
    return disabled
