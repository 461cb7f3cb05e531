"""What the check runs on, and the kernels there against fp64, with the replay of a CUDA graph."""

from __future__ import annotations

import socket
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

import dmuon
from dmuon.kernels import Variant, backend_fault, drop_graphs, muon_update_, orthogonalize
from dmuon.tools.check.report import Board, Line
from dmuon.tools.check.training import newton_schulz

_NO_BUILD = "the kernel does not build"  # how a fault of the compiler begins, others are of the device
_SHAPES = ((1024, 1024), (1000, 1536), (1024, 4096), (4096, 1024))
# Limits of Newton-Schulz on Gaussian matrices: half precision is amplified where singular values are small.
_LIMITS = {torch.float16: 2e-2, torch.bfloat16: 5e-2, torch.float32: 2e-4}


@dataclass(frozen=True, slots=True)
class Machine:
    """One rank's software and device.

    Attributes:
        fault: why the Triton kernels cannot run; None if they can, and on CPUs.
    """

    torch_version: str
    dmuon_version: str
    backend: str
    device: str
    host: str
    fault: str | None = None

    @classmethod
    def here(cls, device: torch.device, backend: str) -> Machine:
        """This process, which computes on ``device``; on a GPU the kernels are built once."""
        versions, host = (torch.__version__, dmuon.__version__), socket.gethostname()
        if device.type == "cpu":
            return cls(*versions, backend, "CPU", host)
        torch.cuda.set_device(device)
        if backend == "nccl":
            backend = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fault = backend_fault("triton", device, torch.float16)
            _update(device, 8, 16, torch.float16)  # warns where the fused passes do not build
        fault = fault or next((f"{_NO_BUILD}: {one.message}" for one in caught), None)
        return cls(*versions, backend, torch.cuda.get_device_name(device), host, fault)


def cuda_fault() -> str | None:
    """Why CUDA does not start, and the remedy; None if it does."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; install one of https://pytorch.org, or --device cpu"
    try:
        torch.cuda.init()
    except Exception as error:  # whatever a driver may raise that is missing, too old, or in trouble
        said = " ".join(str(error).split())
        return (
            f"CUDA does not start ({said}); install or update the NVIDIA driver, see that nvidia-smi lists the GPUs "
            "and CUDA_VISIBLE_DEVICES hides none, or take --device cpu"
        )
    return None


def describe(board: Board, machines: Sequence[Machine]) -> int:
    """Add lines about ranks, devices and versions; what forbids a check fails. Returns the number of hosts."""
    first, hosts = machines[0], len({machine.host for machine in machines})
    where = f"{len(machines)} rank{'s' if len(machines) > 1 else ''}"
    devices = ", ".join(f"{n} × {name}" for name, n in Counter(m.device for m in machines).items())
    software = f"torch {first.torch_version}, dmuon {first.dmuon_version}, {first.backend}"
    board.add(Line("environment", f"{software}, {hosts} host{'s' if hosts > 1 else ''}, {devices}", where=where))
    same = "install the same everywhere"
    one_kind = "choose GPUs of one kind by CUDA_VISIBLE_DEVICES"
    for name, remedy in {"torch_version": same, "dmuon_version": same, "backend": same, "device": one_kind}.items():
        found = {getattr(machine, name): rank for rank, machine in reversed(list(enumerate(machines)))}
        if len(found) > 1:
            each = ", ".join(f"{value} on rank {rank}" for value, rank in found.items())
            text = f"ranks differ in {name.replace('_', ' ')}: {each}; {remedy}"
            board.add(Line("environment", text, status="fail", where=where))
    for rank, machine in enumerate(machines):
        if machine.fault is not None:
            build = machine.fault.startswith(_NO_BUILD)
            remedy = "Triton needs a C compiler (gcc, or CC), all of its wheel, and a driver as new as its CUDA"
            text = f"rank {rank}: {machine.fault}; {remedy if build else 'cuBLAS and operations of torch run, slower'}"
            board.add(Line("environment", text, status="fail" if build else "warn", where=where))
    return hosts


def check_kernels(board: Board, device: torch.device) -> None:
    """Add the lines of every rank's device, without communication."""
    scale = 16 if device.type == "cpu" else 1
    for (m, n), dtype in product(_SHAPES, _LIMITS):
        where = f"{str(dtype).removeprefix('torch.')} {m // scale}x{n // scale}"
        board.judge("kernels", where, partial(_update, device, m // scale, n // scale, dtype))
    if device.type == "cuda":
        board.judge("kernels", "replay of a graph", partial(replays, device, 64, 192))


def _update(device: torch.device, m: int, n: int, dtype: torch.dtype) -> list[Line]:
    """A whole update of three matrices as a step runs it, and singular values of what has low rank."""
    params, grads, momentum, low = (_gaussian(device, 3, m, n, seed) for seed in range(4))
    weights, average = params.double(), torch.lerp(momentum.double(), grads.double(), 0.05)
    exact = newton_schulz(torch.lerp(grads.double(), average, 0.95))
    some = [*params.unbind()], [*grads.unbind()], momentum
    muon_update_(*some, lr=0.5, weight_decay=0.0, beta=0.95, nesterov=True, scale=1.0, dtype=dtype)
    low[:, min(m, n) // 4 :, min(m, n) // 4 :] *= 1e-4
    largest = float(torch.linalg.matrix_norm(orthogonalize(low, dtype=dtype).float(), ord=2).max())
    average_error = float((momentum - average).norm() / average.norm())
    error = float((weights - params - 0.5 * exact).norm() / (0.5 * exact).norm())
    return [
        Line("kernels", "momentum", average_error, 1e-6, "relative error"),
        Line("kernels", "change of the weights", error, _LIMITS[dtype], "relative error"),
        Line("kernels", "nearly singular matrices", largest, 1.3, "largest singular value"),
    ]


def _gaussian(device: torch.device, k: int, m: int, n: int, seed: int) -> Tensor:
    return torch.randn(k, m, n, generator=torch.Generator().manual_seed(seed)).to(device)


def replays(device: torch.device, m: int, n: int) -> list[Line]:
    """Batches by a CUDA graph, bitwise as by single launches: at once, and in a backward after all graphs were dropped.

    Raises:
        UserWarning: nothing was captured.
    """
    eager = Variant("standard", (), "torch", 4)
    x = [_gaussian(device, 2, m, n, seed) for seed in range(2)]
    found: list[Tensor] = []

    def replay(_gradient: object = None) -> None:
        found.extend(orthogonalize(each, variant=replace(eager, replay=True)) for each in x)

    leaf = torch.ones(1, device=device, requires_grad=True)
    leaf.register_post_accumulate_grad_hook(replay)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        replay()
        drop_graphs()
        (2 * leaf).sum().backward()
    drop_graphs()
    expected = [orthogonalize(each, variant=eager) for each in 2 * x]
    unequal = sum(int((one != each).sum()) for one, each in zip(found, expected, strict=True))
    return [Line("kernels", "entries that differ from single launches'", unequal)]
