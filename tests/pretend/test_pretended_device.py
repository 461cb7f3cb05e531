"""dmuon on a device with streams, threads of autograd and memory that comes and goes, to the bits of the CPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness.assertions import assert_same_tensors, relative_errors
from harness.dtensors import local_tensor
from harness.network import Block, full_state
from harness.on_ranks import on_ranks
from harness.topologies import LAYOUTS, lay
from harness.toy import OPTIONS, SIZE, WIDTH, build, train
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import dmuon
from dmuon.comm.agreement import agree
from dmuon.comm.process_groups import broadcast_object, make_group
from dmuon.dedicated.runtime import Runtime
from dmuon.kernels import choose_variant, step_variant, variant
from dmuon.platform.torch_private import current_backward

on_device_ranks = partial(on_ranks, fixture="device_ranks")
DEVICES = ("cpu", "pretend")
STEPS = 3
FP32: dict[str, Any] = {"ns_dtype": torch.float32}  # half precision elsewhere than on the CPU, unless one says so


@contextmanager
def one_form() -> Iterator[None]:
    """On CPUs alone the rule counts calls, for which it would take another form of Newton–Schulz there."""
    caches = step_variant, choose_variant
    for cached in caches:
        cached.cache_clear()
    with mock.patch.object(variant, "_CPU_CALL", 0.0):
        yield
    for cached in caches:
        cached.cache_clear()


def weights(name: str, device: str, keep: bool, micro: int, muon: dict[str, Any], comm: dict[str, Any]) -> Any:
    """Weights after a few steps, and batches that were orthogonalized during each step's backward."""
    options = {"comm": dmuon.CommOptions(**comm)} if LAYOUTS[name].dedicated else {}
    model = build().to(device, torch.bfloat16 if "master_weights" in muon else torch.float32)
    laid = lay(name, model, keep=keep, device=torch.device(device), **options)
    if not LAYOUTS[name].dedicated:  # a plan from measured costs takes long here
        laid.config = dmuon.create_dtensor_config(costs="flops")
    optimizer = laid.optimizer(**FP32, **muon)
    overlapped = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(micro):
            laid.backward(micro * step + part)
        optimizer.step()
        overlapped.append(optimizer.last_step.overlapped)
    found = {n: t.cpu() for n, t in full_state(laid.model).items()}
    for i, param in enumerate(optimizer.param_groups[0]["params"] if "master_weights" in muon else ()):
        found[f"master of matrix {i}"] = local_tensor(optimizer.state[param]["master_weight"])
        assert found[f"master of matrix {i}"].device.type == muon["master_weights"]
    return found, overlapped


OVERLAP = {"overlap_backward": True}
HOST, MASTERS = {"momentum_device": "cpu"}, {"master_weights": "cpu"}
HALF = {"momentum_dtype": torch.bfloat16, "weight_decay_mode": "l2"}
MEMBER = {"second_moment": "element", "weight_decay_mode": "hyperball"}
# Layout, whether whole weights stay, micro-batches, and options of the optimizer and of communication.
CASES: dict[str, tuple[str, bool, int, dict[str, Any], dict[str, Any]]] = {
    **{f"{name} overlap": (name, False, 1, OVERLAP, {}) for name in ("ddp-2", "hsdp", "tp-fsdp")},
    "whole weights stay, in parts of one size": ("1d-two-lines", True, 1, OVERLAP, {"transport": "single"}),
    "accumulation, nothing fetched ahead": ("hsdp-two-lines", False, 2, {}, {"prefetch": 0}),
    "ddp": ("ddp", False, 1, {}, {}),
    "members of the family": ("fsdp2-2", False, 1, MEMBER, {}),
    "1d with momentum on the host": ("1d", False, 1, HOST | OVERLAP, {}),
    "fsdp2-tp with masters and momentum on the host": ("fsdp2-tp", False, 1, MASTERS | HOST | HALF, {}),
}


@pytest.mark.parametrize(("layout", "keep", "micro", "muon", "comm"), CASES.values(), ids=CASES)
@on_device_ranks("layout")
def test_the_toy_trains_to_the_bits_of_the_cpu(
    rank: int, world: int, layout: str, keep: bool, micro: int, muon: dict[str, Any], comm: dict[str, Any]
) -> None:
    with one_form():
        (expected, before), (found, after) = (weights(layout, device, keep, micro, muon, comm) for device in DEVICES)
    assert_same_tensors(found, expected)
    assert before == after
    assert all(after) if OVERLAP.items() <= muon.items() and "tp" not in layout else not any(after)


@on_device_ranks(1)
def test_one_process_trains_to_the_bits_of_the_cpu(rank: int, world: int) -> None:
    found: list[dict[str, Tensor]] = []
    for device in DEVICES:
        model = build().to(device)
        with one_form():
            train(model, dmuon.Muon(model, **OPTIONS, **FP32), range(STEPS))
        found.append({n: t.detach().cpu() for n, t in model.state_dict().items()})
    assert_same_tensors(*found)


@on_device_ranks(1)
def test_momentum_on_the_host_is_saved_and_loaded_there(rank: int, world: int) -> None:
    """Half of the training comes after a load, and equals that with momentum on the device."""
    found: list[dict[str, Tensor]] = []
    for where in (None, "cpu"):
        model = build().to("pretend")
        optimizer = dmuon.Muon(model, momentum_device=where, **OPTIONS, **FP32)
        train(model, optimizer, range(STEPS))
        saved = optimizer.state_dict()
        optimizer = dmuon.Muon(model, momentum_device=where, **OPTIONS, **FP32)
        optimizer.load_state_dict(saved)
        params = optimizer.param_groups[0]["params"]
        train(model, optimizer, range(STEPS, 2 * STEPS))
        found.append({n: t.detach().cpu() for n, t in model.state_dict().items()})
    shown = [optimizer.state[param] for param in params]
    kept = [of_param for of_param in optimizer.state_dict()["state"].values() if "momentum_buffer" in of_param]
    assert {of_param["momentum_buffer"].device.type for of_param in (*shown, *kept)} == {"cpu"}
    assert_same_tensors(*found)


# -- what only a device shows -----------------------------------------------------------------------------------------


class OnBothDevices(Block):
    """Its second output lies on the host: its gradient comes in the thread that called backward."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), self.mix(x).mean(-1).cpu()


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(OnBothDevices(SIZE) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for block in self.blocks:
            x, beside = block(x)
            total = total + beside.square().mean()
        return total + x.square().mean().cpu()


@on_device_ranks(1)
def test_one_thread_at_a_time_is_in_the_hooks(rank: int, world: int) -> None:
    model = TwoOutputs().to("pretend")
    dmuon.dedicate_params(model, init_device_mesh("pretend", (world,)), costs="flops")
    inside: set[int] = set()
    most = 0
    original = Runtime._unshard

    def slowly(runtime: Runtime, *args: Any) -> None:
        nonlocal most
        if current_backward() is not None:
            inside.add(threading.get_ident())
            time.sleep(0.3)
            most = max(most, len(inside))
            inside.discard(threading.get_ident())
        original(runtime, *args)

    with mock.patch.object(Runtime, "_unshard", slowly):
        model(torch.randn(4, WIDTH, device="pretend")).backward()
    assert most == 1


def outputs_on_two_devices(rank: int, world: int, on: str) -> dict[str, Tensor]:
    """Gradients of what this rank owns, of blocks with outputs on both devices."""
    torch.manual_seed(0)
    model = TwoOutputs().to(on)
    dmuon.dedicate_params(model, init_device_mesh(on, (world,)), costs="flops")
    torch.manual_seed(1 + rank)
    model(torch.randn(4, WIDTH).to(on)).backward()
    owned = [param for param in dmuon.owned_parameters(model) if param.owner == rank]
    return {param.fqn: local_tensor(param.grad).cpu() for param in owned if param.grad is not None}


@on_device_ranks(2)
def test_outputs_on_two_devices_have_the_gradients_of_the_cpu(rank: int, world: int) -> None:
    """Sums over both branches come in another order."""
    expected, found = (outputs_on_two_devices(rank, world, on) for on in DEVICES)
    assert expected and max(relative_errors(found, expected).values()) <= 1e-6


@on_device_ranks(2)
def test_objects_travel_by_the_device_of_the_model(rank: int, world: int) -> None:
    """By the current one, two ranks may meet on one GPU, which NCCL refuses."""
    mine = torch.pretend.current_device()  # type: ignore[attr-defined]
    group = make_group(torch.device("pretend", mine), range(world), "objects", None)
    torch.pretend.set_device(1 - mine)  # type: ignore[attr-defined]
    found = []
    gather, broadcast = dist.all_gather_object, dist.broadcast_object_list

    def noted(send: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any, **options: Any) -> None:
            found.append(torch.pretend.current_device() == mine)  # type: ignore[attr-defined]
            send(*args, **options)

        return run

    with (
        mock.patch.object(dist, "all_gather_object", noted(gather)),
        mock.patch.object(dist, "broadcast_object_list", noted(broadcast)),
    ):
        assert agree(group, None, mine) == [*range(world)]
        assert broadcast_object(mine, group, "a test") == 0
    assert found == [True, True]
