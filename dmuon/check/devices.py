"""The GPUs of a first run: what a bug report needs to know of them, and what forbids the run."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist

import dmuon
from dmuon.check.environment import Machine, describe
from dmuon.check.report import Reading
from dmuon.check.run import process_group
from dmuon.check.stage import Stage
from dmuon.kernels import backend_fault, normalized_momentum
from dmuon.planning.device_key import NsOptions, device_key

NEEDED_BYTES = 6 << 30  # of a GPU: stress matrices in fp64, the larger model, shapes that are timed
_VARIABLES = ("NCCL_", "TORCH_", "CUDA_", "PYTORCH_", "GLOO_", "TRITON_", "OMP_", "CUBLAS_", "NVIDIA_")
_PACKAGES = ("torch", "triton", "numpy", "pulp")
_BUILD = "the kernel does not build"  # how a fault of the compiler begins, others are of the device


@dataclass(frozen=True, slots=True)
class Gpu:
    """One rank's device.

    Attributes:
        capability: of compute.
        free, total: bytes of memory.
        peers: numbers of the devices that this one reads directly.
        products: why the Triton kernel for symmetric products cannot run; None if it can.
        passes: the same of the fused passes of the update.
    """

    name: str
    uuid: str
    capability: tuple[int, int]
    free: int
    total: int
    peers: tuple[int, ...]
    products: str | None
    passes: str | None

    @classmethod
    def here(cls, device: torch.device) -> Gpu:
        """``device``, after building each kernel once."""
        properties = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        others = [i for i in range(torch.cuda.device_count()) if i != device.index]
        return cls(
            name=properties.name,
            uuid=str(properties.uuid),
            capability=(properties.major, properties.minor),
            free=free,
            total=total,
            peers=tuple(i for i in others if torch.cuda.can_device_access_peer(device, i)),
            products=backend_fault("triton", device, torch.float16),
            passes=_passes_fault(device),
        )


def look_around(stage: Stage) -> None:
    """The section: facts of all ranks, refusals, and one collective."""
    stage.facts |= software()
    answers: list[Gpu | str | None] = stage.gather(start_cuda(stage.device) if stage.device.type == "cuda" else None)
    gpus = [answer for answer in answers if isinstance(answer, Gpu)]
    stage.facts["devices"] = [asdict(gpu) for gpu in gpus]
    where = str(stage.launch)
    faults = [f"rank {rank}: {fault}" for rank, fault in enumerate(answers) if isinstance(fault, str)]
    faults = faults or [*refusals(gpus)]
    stage.facts["refusals"] = faults
    for text in faults:
        stage.board.say("fail", "environment", where, text)
    if faults:
        return
    for text in warned(gpus):
        stage.board.say("warn", "environment", where, text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what caches lack is a line
        machines: list[Machine] = stage.gather(Machine.here(stage.device, dmuon.__version__))
    stage.facts["driver"] = device_key(stage.device, NsOptions()).driver
    describe(stage.board, machines)
    with process_group(stage.board, where):
        stage.board.judge("collective", where, lambda: _sum(stage))


def refusals(gpus: Sequence[Gpu]) -> Iterator[str]:
    """What forbids a first run on these GPUs, by rank: what it is, which rank has it, and the remedy."""
    for rank, gpu in enumerate(gpus[1:], 1):
        if (gpu.name, gpu.capability) != (gpus[0].name, gpus[0].capability):
            yield (
                f"GPUs of different kind: rank 0 has {gpus[0].name}, rank {rank} has {gpu.name}; choose those of one "
                "kind by CUDA_VISIBLE_DEVICES"
            )
            break
    for rank, gpu in enumerate(gpus):
        if gpu.free < NEEDED_BYTES:
            yield (
                f"rank {rank}: {gpu.free / 2**30:.1f} of {gpu.total / 2**30:.1f} GiB of {gpu.name} are free, this "
                f"needs {NEEDED_BYTES >> 30}; end what else uses it (nvidia-smi), or choose others by "
                "CUDA_VISIBLE_DEVICES"
            )
        for fault in (gpu.products, gpu.passes):
            if fault is not None and fault.startswith(_BUILD):
                yield (
                    f"rank {rank}: {fault}; Triton needs a C compiler (gcc, or the one that CC names), the files of "
                    "its own wheel, and a driver that is not older than its CUDA"
                )
                break


def warned(gpus: Sequence[Gpu]) -> Iterator[str]:
    """What runs otherwise than on a GPU that the kernels are written for."""
    for rank, gpu in enumerate(gpus):
        if gpu.products is not None:
            yield f"rank {rank}: no kernel for symmetric products ({gpu.products}): cuBLAS computes them whole"
        if gpu.passes is not None:
            yield f"rank {rank}: no fused passes of the update ({gpu.passes}): torch's operations run, slower"


def software() -> dict[str, Any]:
    """Versions, and variables of the environment that matter to a bug report."""
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "not installed"
    return {
        "packages": {**packages, "dmuon": dmuon.__version__},
        "python": sys.version,
        "platform": platform.platform(),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None,
        "compiler": shutil.which(os.environ.get("CC", "gcc")),
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)},
    }


def start_cuda(device: torch.device) -> Gpu | str:
    """This rank's device; or why CUDA does not start on it, and the remedy."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; install one of https://pytorch.org that has it"
    try:
        torch.cuda.init()
        torch.cuda.set_device(device)
        torch.ones(1, device=device).sum().item()
        return Gpu.here(device)
    except Exception as error:  # of whatever kind: a driver that is missing, too old, or in trouble
        said = " ".join(str(error).split())
        return (
            f"CUDA does not start ({said}); install or update the NVIDIA driver, see that nvidia-smi lists the GPUs "
            "and CUDA_VISIBLE_DEVICES hides none, or install a torch built for this driver"
        )


def _passes_fault(device: torch.device) -> str | None:
    """Why the fused passes do not run on ``device``; None if they do. Once built, or not, this remains so."""
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        grad, momentum = torch.ones(4, 4, device=device), torch.ones(1, 4, 4, device=device)
        normalized_momentum([grad], momentum, beta=0.5, nesterov=True, storage=torch.float16)
    return f"{_BUILD}: {caught[0].message}" if caught else None


def _sum(stage: Stage) -> list[Reading]:
    numbers = torch.full((1 << 20,), float(stage.rank), device=stage.device)
    dist.all_reduce(numbers)
    world = stage.launch.world
    wrong = int((numbers != world * (world - 1) / 2).sum())
    return [Reading("collective", "an all-reduce of 4 MiB: wrong numbers", wrong, 0)]
