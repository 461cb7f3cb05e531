"""Compiles a Triton kernel without a GPU and reads what it takes: registers, spills, shared memory, instructions."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver

_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_INSTRUCTIONS = ("tcgen05.mma", "wgmma", "mma.sync")


@dataclass(frozen=True, slots=True)
class Resources:
    """What one compiled kernel takes.

    ``registers`` and ``spill_bytes`` (stack and local memory) are per thread, ``shared_bytes`` per block.
    ``instruction`` is the matrix instruction in the PTX: ``"tcgen05.mma"``, ``"wgmma"``, ``"mma.sync"``, or
    ``"none"``.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    instruction: str
    ptx: str


def compile_kernel(
    fn: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, object],
    *,
    arch: int,
    warps: int,
    stages: int,
    divisible_by_16: Sequence[str] = (),
) -> Resources:
    """Compile ``fn`` for compute capability ``arch`` (80, 90, 100, ...).

    Args:
        fn: a function decorated with ``triton.jit``, not interpreted.
        signature: type of each run-time argument: ``"*fp16"``, ``"i32"``, ``"fp32"``, and for a host-side
            descriptor ``"tensordesc<fp16[1, 128, 64]>"``.
        constexprs: value of each compile-time argument; an argument that is ``None`` belongs here too.
        arch: compute capability without its point.
        warps: warps in a block.
        stages: depth of software pipelining.
        divisible_by_16: run-time arguments that the JIT would have seen to be multiples of 16.

    Raises:
        ValueError: an argument of ``fn`` in neither or in both mappings.
    """
    names = list(fn.arg_names)
    if sorted([*signature, *constexprs]) != sorted(names):
        raise ValueError(f"signature and constexprs must name each of {names} once")
    source = ASTSource(
        fn=fn,
        signature={name: signature.get(name, "constexpr") for name in names},
        constexprs=dict(constexprs),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in divisible_by_16},
    )
    # Triton 3.9 warns unless told about fused multiply-adds; they are its default.
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    return resources(triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options))


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
        run = subprocess.run(
            [_CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, check=True, text=True
        )
    return {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", run.stdout)}
