"""On what and how long the GPU script runs, and how it times programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from common.clock import cold_samples, medians
from torch import Tensor

from dmuon.kernels import backend_fault
from dmuon.kernels.symmetric_tiles import TileConfig, candidates
from gpu.journal import Journal

_DRY = (
    TileConfig(16, 16, 4, 2),
    TileConfig(16, 16, 4, 2, descriptors=True),
    TileConfig(16, 16, 4, 2, descriptors=True, halves=2),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """``scale``: sides are divided by it."""

    device: torch.device
    scale: int
    seconds: float
    rounds: int
    models: Path

    @property
    def tiles(self) -> bool:
        return backend_fault("triton", self.device, torch.float16) is None

    @property
    def configs(self) -> Callable[[int, int, torch.dtype], Sequence[TileConfig]]:
        capability = torch.cuda.get_device_capability(self.device) if self.device.type == "cuda" else (9, 0)
        if self.scale > 1:
            return lambda m, p, dtype: _DRY
        return lambda m, p, dtype: candidates(m, p, dtype, capability)

    def medians(
        self, programs: Mapping[str, Callable[[], object]], journal: Journal, what: str, others: Sequence[str] = ()
    ) -> dict[str, float]:
        """Milliseconds of each, in turns: of graph replays on CUDA, CPU time elsewhere. None of what fails.

        Args:
            others: names of programs that are not dmuon's.
        """
        ready = {}
        for name, program in programs.items():
            with journal.guarded(f"{what}: {name}", ours=name not in others):
                ready[name] = self._prepared(program)
        cache_bytes = 1 << (28 if self.device.type == "cuda" else 20)
        return medians(cold_samples(ready, self.device, cache_bytes, self.rounds)) if ready else {}

    def _prepared(self, program: Callable[[], object]) -> Callable[[], object]:
        program()  # compiles
        if self.device.type != "cuda":
            return program
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = program()

        def replay(_kept: object = kept) -> None:
            graph.replay()

        replay()
        torch.cuda.synchronize()  # a fault is this program's
        return replay

    def gaussian(self, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(*shape, device=self.device, generator=generator).to(dtype)


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())
