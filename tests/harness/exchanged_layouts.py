"""Ways to have a toy model sharded or replicated by torch itself, and matrices laid out by hand, for ``dmuon.Muon``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import dmuon
from dmuon import DistributedConfig, create_devicemesh_config, create_dtensor_config, create_processgroup_config
from harness.topologies import tensor_parallel
from harness.toy import (
    DECAY,
    LR,
    OPTIONS,
    WIDTH,
    Block,
    Toy,
    batch,
    build,
    fp32_newton_schulz,
    full_state,
    loss_of,
    shard,
)

# -- models ---------------------------------------------------------------------------------------------------------


class ThinBlock(Block):
    """With matrices of one row and of one column."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 1, bias=False)
        self.lift = nn.Linear(1, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.lift(self.gate(x))


class Wrapped(nn.Module):
    """A model of which one submodule is everything."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, tokens: Tensor) -> Tensor:
        return self.body(tokens)


@dataclass
class Laid:
    """A model as a user would pass it to ``dmuon.Muon``.

    Attributes:
        model: what the optimizer gets.
        toy: the same parameters under the names of ``Toy``.
        rank, parts: this rank's share of a batch.
        config: for the optimizer.
        reduce: what the user's program does to gradients after backward.
    """

    model: nn.Module
    toy: Toy
    rank: int
    parts: int
    config: DistributedConfig | None
    reduce: Callable[[], None] = field(default=lambda: None)

    def backward(self, step: int) -> None:
        loss_of(self.model, *shard(batch(step), self.rank, self.parts)).backward()
        self.reduce()

    def optimizer(self, **options: Any) -> dmuon.Muon:
        return dmuon.Muon(self.model, distributed_config=self.config, **{**OPTIONS, **options})


def toy(name: str) -> Toy:
    """With thin matrices, except where tensor parallelism leaves them whole on every rank."""
    return build() if "tp" in name else build(block=ThinBlock)


def is_matrix(name: str) -> bool:
    return name.startswith("blocks.") and name.endswith("weight") and "norm" not in name


def matrices(name: str) -> int:
    return 9 if "tp" in name else 15


WORLDS = {
    "fsdp-1": 1, "fsdp-2": 2, "fsdp-3": 3, "fsdp-4": 4, "hsdp": 4, "tp": 2, "fsdp-tp": 4, "hsdp-tp": 8,
    "ddp": 2, "ddp-inside": 2, "replicate-ddp": 2, "replicate-fsdp": 2, "cp-groups": 4, "cp-mesh": 4,
}  # fmt: skip


def lay(name: str, model: Toy, policy: MixedPrecisionPolicy | None = None, **options: Any) -> Laid:
    """Spread ``model`` as ``name`` says; ``options`` go to the configuration. Collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    options.setdefault("costs", "flops")
    mp = {} if policy is None else {"mp_policy": policy}
    if name.startswith("fsdp-") and name != "fsdp-tp":
        _fsdp(model, init_device_mesh("cpu", (world,)), mp)
        return Laid(model, model, rank, world, create_dtensor_config(**options))
    if name == "hsdp":
        _fsdp(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), mp)
        return Laid(model, model, rank, world, create_dtensor_config(**options))
    if name == "tp":
        tensor_parallel(model, init_device_mesh("cpu", (world,)))
        return Laid(model, model, 0, 1, create_dtensor_config(**options))
    if name == "fsdp-tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        tensor_parallel(model, mesh["tp"])
        _fsdp(model, mesh["dp"], mp)
        return Laid(model, model, rank // 2, 2, create_dtensor_config(**options))
    if name == "hsdp-tp":
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
        tensor_parallel(model, mesh["tp"])
        _fsdp(model, mesh["replicate", "shard"], mp)
        return Laid(model, model, rank // 2, 4, create_dtensor_config(**options))
    if name == "ddp":  # nothing is said to the optimizer
        return Laid(nn.parallel.DistributedDataParallel(model), model, rank, world, None)
    if name == "ddp-inside":
        return Laid(Wrapped(nn.parallel.DistributedDataParallel(model)), model, rank, world, None)
    if name == "replicate-ddp":
        from torch.distributed._composable.replicate import replicate

        replicate(model)
        return Laid(model, model, rank, world, None)
    if name == "replicate-fsdp":
        from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_fsdp

        for module in (*model.blocks, model):
            replicate_fsdp(module, mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("replicate",)))
        return Laid(model, model, rank, world, create_dtensor_config(**options))
    assert name in ("cp-groups", "cp-mesh"), name
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "fsdp"))
    _fsdp(model, mesh["fsdp"], mp)
    if name == "cp-mesh":
        config = create_devicemesh_config(mesh, ("cp", "fsdp"), **options)
    else:
        config = create_processgroup_config(fsdp_pg=mesh.get_group("fsdp"), cp_pg=mesh.get_group("cp"), **options)
    return Laid(model, model, rank, world, config, partial(_average, model, mesh.get_group("cp")))


def _fsdp(model: Toy, mesh: DeviceMesh, options: dict[str, Any]) -> None:
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, **options)


def _average(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Of gradients whose DTensors know nothing of the copies."""
    for param in model.parameters():
        assert isinstance(param.grad, DTensor)
        dist.all_reduce(param.grad._local_tensor, group=group)
        param.grad._local_tensor /= dist.get_world_size(group)


def run(laid: Laid, steps: int, **options: Any) -> tuple[dict[str, Tensor], list[int]]:
    """Weights after ``steps``, whole, and matrices that this rank orthogonalized in each."""
    optimizer = laid.optimizer(**options)
    calls = []
    for step in range(steps):
        optimizer.zero_grad()
        laid.backward(step)
        optimizer.step()
        calls.append(optimizer.last_step.ns_matrices)
    return full_state(laid.toy), calls


# -- matrices by hand -----------------------------------------------------------------------------------------------


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def spread(value: Tensor, mesh: DeviceMesh | None, placements: Sequence[Placement]) -> Tensor:
    """This rank's part of a value that all ranks have; without a mesh a plain tensor."""
    if mesh is None:
        return value.clone()
    return distribute_tensor(value, mesh, placements, src_data_rank=None)


def parameter(value: Tensor, mesh: DeviceMesh | None, placements: Sequence[Placement] = ()) -> nn.Parameter:
    return nn.Parameter(spread(value, mesh, placements))


def give(param: Tensor, grad: Tensor) -> None:
    """Let ``param`` have a gradient of which all ranks have the whole."""
    on_mesh = isinstance(param, DTensor)
    param.grad = spread(grad, param.device_mesh, param.placements) if on_mesh else grad.clone()


def whole(param: Tensor) -> Tensor:
    found = param.full_tensor() if isinstance(param, DTensor) else param
    return found.detach().clone()


class Twin:
    """``torch.optim.Muon`` over plain copies; each matrix of a stack is a parameter of its own."""

    def __init__(self, values: Sequence[Tensor], lr: float = LR, decay: float = DECAY) -> None:
        self.options = {
            "lr": lr, "weight_decay": decay, "momentum": 0.95, "adjust_lr_fn": "match_rms_adamw", "eps": 1e-30,
        }  # fmt: skip
        self.params: list[list[nn.Parameter]] = []
        self._optimizers: list[torch.optim.Muon] = []
        for value in values:
            self.add(value)

    def add(self, value: Tensor) -> None:
        params = [nn.Parameter(matrix.clone()) for matrix in (value if value.ndim == 3 else value[None])]
        self.params.append(params)
        self._optimizers.append(torch.optim.Muon(params, **self.options))

    def step(self, grads: Sequence[Tensor | None]) -> None:
        """One gradient for each value, in order; None leaves it as it is."""
        for params, optimizer, grad in zip(self.params, self._optimizers, grads, strict=True):
            if grad is None:
                continue
            for param, of_matrix in zip(params, grad if grad.ndim == 3 else grad[None], strict=True):
                param.grad = of_matrix.clone()
            with fp32_newton_schulz():
                optimizer.step()

    def weights(self) -> list[Tensor]:
        return [torch.stack([p.detach() for p in params]).clone() for params in self.params]

    def momentum(self, index: int) -> Tensor:
        state = self._optimizers[index].state
        return torch.stack([state[p]["momentum_buffer"] for p in self.params[index]])


def assert_close(found: Tensor, expected: Tensor, about: object, tolerance: float = 1e-5) -> None:
    """Relative in the Frobenius norm; ``expected`` may carry a leading dimension of one."""
    expected = expected.reshape(found.shape).double()
    error = float((found.double() - expected).norm() / expected.norm().clamp(min=1e-30))
    assert error <= tolerance, f"{about}: relative error {error:.2e} > {tolerance:.0e}"


@contextmanager
def no_whole_tensors() -> Any:
    """Raise where anything asks a DTensor for its whole, or for another placement."""

    def refuse(self: DTensor, *_: Any, **__: Any) -> Any:
        raise AssertionError(f"a step redistributes a DTensor of shape {tuple(self.shape)}")

    kept = DTensor.full_tensor, DTensor.redistribute
    DTensor.full_tensor, DTensor.redistribute = refuse, refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        DTensor.full_tensor, DTensor.redistribute = kept  # type: ignore[method-assign]
