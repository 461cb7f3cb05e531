"""Compiles Triton kernels for a GPU that is not there, and reads what they take: registers, memory, instructions."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from dmuon.kernels import symmetric_triton
from dmuon.kernels.symmetric_tiles import TileConfig

_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_INSTRUCTIONS = ("tcgen05.mma", "wgmma", "mma.sync")

# Shared memory that one block may take, in bytes, by compute capability.
SHARED_MEMORY = {80: 166912, 90: 232448, 100: 232448}
INSTRUCTION = {80: "mma.sync", 90: "wgmma", 100: "tcgen05.mma"}
PROCESSORS = 100


@dataclass(frozen=True, slots=True)
class Resources:
    """What one compiled kernel takes.

    ``registers`` and ``spill_bytes`` (stack and local memory) are per thread, ``shared_bytes`` per block.
    ``instruction`` is the matrix instruction in the PTX: ``"tcgen05.mma"``, ``"wgmma"``, ``"mma.sync"``, or ``"none"``.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    instruction: str
    ptx: str = field(repr=False)


class Recorder:
    """Stands for a kernel in the code that launches it: compiles for ``arch`` what would have been launched.

    Types, constants and alignments are found by the JIT itself, from CPU tensors.
    """

    def __init__(self, fn: Any, arch: int) -> None:
        self.fn = fn
        self.driver = _Driver(arch)
        self.grids: list[tuple[int, ...]] = []
        self.kernels: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: object, **options: object) -> None:
            with mock.patch.object(driver, "_active", self.driver):
                kernel = self.fn.warmup(*arguments, grid=grid, **options)
            self.grids.append(grid)
            self.kernels.append(kernel)

        return launch

    @property
    def variants(self) -> int:
        """How many different kernels were compiled."""
        return len({kernel.hash for kernel in self.kernels})


class _Driver:
    def __init__(self, arch: int) -> None:
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        return f"no device, sm{self.target.arch}"  # kernels are cached by device: never a real one's

    def get_current_stream(self, device: object) -> int:
        return 0


def resources(kernel: Any) -> Resources:
    """What a compiled ``kernel`` takes."""
    usage = _resource_usage(kernel.asm["cubin"])
    ptx = kernel.asm["ptx"]
    return Resources(
        registers=usage["REG"],
        spill_bytes=usage["STACK"] + usage["LOCAL"],
        shared_bytes=kernel.metadata.shared,
        instruction=next((name for name in _INSTRUCTIONS if name in ptx), "none"),
        ptx=ptx,
    )


def _resource_usage(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_CUOBJDUMP, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    return {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said)}


@contextmanager
def recording(arch: int) -> Iterator[Recorder]:
    """Inside, ``symmetric_product`` of CPU tensors does what it would on a GPU of ``arch``, but launch."""
    recorder = Recorder(symmetric_triton.symmetric_product_kernel, arch)
    symmetric_triton.plan_launch.cache_clear()
    with mock.patch.multiple(
        symmetric_triton,
        symmetric_product_kernel=recorder,
        hardware_of=lambda device: (divmod(arch, 10), PROCESSORS),
    ):
        yield recorder
    symmetric_triton.plan_launch.cache_clear()


def compile_product(
    config: TileConfig,
    dtype: torch.dtype,
    arch: int,
    *,
    layouts: str = "nt",
    sizes: tuple[int, int] = (512, 1024),
    adds: int = 1,
    identity: float = 0.0,
) -> Resources:
    """The kernel for ``(m, p)`` times ``(p, m)`` of ``sizes``, each contiguous ("n") or transposed ("t").

    It adds so many matrices.
    """
    m, p = sizes
    a = torch.empty(m, p, dtype=dtype) if layouts[0] == "n" else torch.empty(p, m, dtype=dtype).mT
    b = torch.empty(p, m, dtype=dtype) if layouts[1] == "n" else torch.empty(m, p, dtype=dtype).mT
    c = list(torch.empty(adds, m, m, dtype=dtype).unbind())
    with recording(arch) as recorder:
        symmetric_triton.symmetric_product(a, b, addends=c, betas=(0.5,) * adds, identity=identity, config=config)
    return resources(recorder.kernels[0])
