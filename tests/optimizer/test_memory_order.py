"""Weights, gradients and state in any order of memory, and complex ones: the numbers of ``torch.optim``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn as nn
from harness.assertions import assert_equal_weights, assert_same_tensors
from harness.dtensors import local_tensor
from harness.network import full_state
from harness.on_ranks import on_ranks
from harness.toy import OPTIONS
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import dmuon

LAST = torch.channels_last


class Block(nn.Module):
    """A matrix and a kernel, which are Muon's."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.kernel = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.kernel(torch.relu(self.up(x.movedim(1, -1)).movedim(-1, 1)))


class Filter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight[:, None], n=8)


class Net(nn.Module):
    def __init__(self, spectral: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 4)
        self.filter = Filter() if spectral else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.filter(x).mean((2, 3)))


def net(**options: Any) -> Net:
    torch.manual_seed(1)
    return Net(**options)


def loss_of(model: nn.Module, step: int, rank: int = 0, world: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(shape, generator=generator).to(dtype) for shape in ((4, 3, 8, 8), (4, 4)))
    return nn.functional.mse_loss(model(x[rank::world]), y[rank::world])


def train(
    model: nn.Module, optimizer: Any, steps: range, change: Callable[[Tensor], Tensor] = lambda grad: grad, **of: Any
) -> None:
    """``change`` is for what this rank has of a gradient."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, **of).backward()
        for param in model.parameters():
            if isinstance(param.grad, DTensor):
                param.grad._local_tensor = change(local_tensor(param.grad))
            elif param.grad is not None:
                param.grad = change(param.grad)
        optimizer.step()


def turned(tensor: Tensor) -> Tensor:
    """The same values, in the opposite order of dimensions."""
    dims = tuple(reversed(range(tensor.ndim)))
    return tensor.permute(dims).contiguous().permute(dims)


def gapped(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0]


def last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=LAST) if tensor.ndim == 4 else tensor


ORDERS = {"turned": turned, "gapped": gapped, "channels last": last}


def expected(**of: Any) -> dict[str, Tensor]:
    model = net()
    train(model, dmuon.Muon(model, **OPTIONS), range(4), **of)
    return dict(model.state_dict())


def assert_goes_on(model: nn.Module, optimizer: dmuon.Muon, steps: range, **of: Any) -> None:
    train(model, optimizer, steps, **of)
    assert_equal_weights(dict(model.state_dict()), expected(), 2e-6)


def test_expanded_gradients_are_exact() -> None:
    found = []
    for change in (lambda g: g.flatten()[0].expand_as(g), lambda g: g.flatten()[0].expand_as(g).clone()):
        model = net()
        train(model, dmuon.Muon(model, **OPTIONS), range(3), change)
        found.append(dict(model.state_dict()))
    assert_equal_weights(*found, 2e-6)


@pytest.mark.pitfall("P85")
@pytest.mark.parametrize(
    ("order", "when"),
    [("turned", "before"), ("gapped", "between"), ("channels last", "loaded"), ("turned", "loaded")],
)
def test_weights_in_any_order_are_exact(order: str, when: str) -> None:
    """From the beginning, converted between two steps, or built so and loaded from a run that was not."""
    model = net()

    def convert(model: nn.Module) -> None:
        for param in model.parameters():
            param.data = ORDERS[order](param.data)

    if when == "before":
        convert(model)
    optimizer = dmuon.Muon(model, **OPTIONS)
    train(model, optimizer, range(2))
    if when == "between":
        convert(model)
    if when == "loaded":
        state, model = optimizer.state_dict(), copy.deepcopy(model)
        convert(model)
        optimizer = dmuon.Muon(model, **OPTIONS)
        optimizer.load_state_dict(state)
    assert_goes_on(model, optimizer, range(2, 4))


@pytest.mark.pitfall("P85")
@pytest.mark.parametrize("convert", [lambda m: m.to(memory_format=LAST), lambda m: m.double()])
def test_a_converted_model_goes_on(convert: Callable[[nn.Module], nn.Module]) -> None:
    model = net()
    optimizer = dmuon.Muon(model, **OPTIONS)
    train(model, optimizer, range(2))
    convert(model)
    train(model, optimizer, range(2, 4), dtype=model.head.weight.dtype)
    assert_equal_weights({n: t.float() for n, t in model.state_dict().items()}, expected(), 2e-6)


@pytest.mark.pitfall("P85")
@pytest.mark.parametrize("order", ["gapped", "channels last"])
@on_ranks(2)
def test_gradients_in_any_order_are_exact_wherever_weights_lie(rank: int, world: int, order: str) -> None:
    for how in ("alone", "ddp", "dedicated", "fsdp")[: 2 if order == "channels last" else 4]:  # which FSDP2 forgets
        model = net()
        if how == "ddp":
            model.to(memory_format=LAST)
        whole = laid(how, model, world)
        part = {} if how == "alone" else {"rank": rank, "world": world}
        train(whole, dmuon.Muon(whole, **OPTIONS), range(4), ORDERS[order], **part)
        assert_equal_weights(full_state(model), expected(), 2e-6)


def laid(how: str, model: Net, world: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (world,))
    if how == "ddp":
        return DistributedDataParallel(model)
    if how == "dedicated":
        dmuon.dedicate_params(model, mesh, costs="flops")
    elif how == "fsdp":
        fully_shard(model.filter, mesh=mesh)  # FSDP2 wants one dtype in each of its units
        fully_shard(model, mesh=mesh)
    return model


@on_ranks(2)
def test_whole_gradients_of_sharded_weights_are_cut(rank: int, world: int) -> None:
    model, sharded = net(), net()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (world,)))
    runs = [(model, dmuon.Muon(model, **OPTIONS)), (sharded, dmuon.Muon(sharded, **OPTIONS))]
    for step in range(3):
        loss_of(model, step).backward()
        for param, other in zip(model.parameters(), sharded.parameters(), strict=True):
            other.grad = param.grad.clone()
        for of_model, optimizer in runs:
            optimizer.step()
            of_model.zero_grad()
    assert_equal_weights(full_state(sharded), dict(model.state_dict()), 2e-6)


@pytest.mark.pitfall("P84")
@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
@on_ranks(2)
def test_moments_that_somebody_put_there_are_cut_or_refused(rank: int, world: int, key: str) -> None:
    mesh = init_device_mesh("cpu", (world,))
    model = net()
    fully_shard(model, mesh=mesh)
    optimizer = dmuon.Muon(model, **OPTIONS)
    train(model, optimizer, range(2))
    values = optimizer.state[model.head.weight]
    whole = values[key].full_tensor()
    values[key] = whole
    train(model, optimizer, range(2, 4))
    assert_equal_weights(full_state(model), expected(), 2e-6)
    for wrong, what in ((distribute_tensor(whole, mesh, [Shard(1)]), "lies otherwise"), (whole[:1], r"\(1, 8\)")):
        before = full_state(model)
        values[key] = wrong
        with pytest.raises(ValueError, match=f"{key} of 'head.weight' is .*{what}"):
            train(model, optimizer, range(1))
        assert_same_tensors(full_state(model), before)


# -- complex -------------------------------------------------------------------------------------------------------


def reals(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: torch.view_as_real(t) if t.is_complex() else t for n, t in tensors.items()}


def adamw_of(model: Net, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW([model.filter.weight], lr=OPTIONS["lr"], betas=(0.9, 0.95), **options)


@pytest.mark.parametrize("order", ["", "gapped"])
def test_complex_weights_are_those_of_torch(order: str) -> None:
    """State goes from torch's AdamW into dmuon's and back."""
    runs = []
    for kind in ("torch", "dmuon"):
        model = net(spectral=True)
        if order:
            model.filter.weight.data = ORDERS[order](model.filter.weight.data)
        adamw = adamw_of(model, weight_decay=OPTIONS["weight_decay"])
        train(model, adamw, range(2))
        if kind == "dmuon":
            own = dmuon.Muon([{"params": [model.filter.weight], "use_muon": False}], **OPTIONS)
            own.load_state_dict({**own.state_dict(), "state": adamw.state_dict()["state"]})
            train(model, own, range(2, 4), change=ORDERS.get(order, lambda grad: grad.conj().resolve_conj().conj()))
            adamw.load_state_dict({**adamw.state_dict(), "state": own.state_dict()["state"]})
        else:
            train(model, adamw, range(2, 4))
        train(model, adamw, range(4, 5))
        runs.append(reals({"filter": model.filter.weight.detach()}))
    assert_equal_weights(*runs, 2e-6)


def test_muon_takes_no_complex_weight() -> None:
    model = net(spectral=True)
    with pytest.raises(ValueError, match=r"torch\.complex64; Muon takes real matrices"):
        dmuon.Muon([{"params": [model.filter.weight], "use_muon": True}])
    for params in (model, [model.head.weight, model.filter.weight]):
        groups = dmuon.Muon(params, **OPTIONS).param_groups
        assert any(p is model.filter.weight for group in groups if not group["use_muon"] for p in group["params"])
