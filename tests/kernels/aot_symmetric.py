"""Calls of ``symmetric_product`` that compile for a GPU which is not there, instead of launching."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from aot import Recorder, Resources, resources

from dmuon.kernels import symmetric_triton as triton_symmetric
from dmuon.kernels.symmetric_tiles import TileConfig
from dmuon.kernels.symmetric_triton import symmetric_product
from dmuon.kernels.symmetric_triton_kernel import symmetric_product_kernel

# Shared memory that one block may take, in bytes, by compute capability.
SHARED_MEMORY = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
INSTRUCTION = {80: "mma.sync", 86: "mma.sync", 89: "mma.sync", 90: "wgmma", 100: "tcgen05.mma", 120: "mma.sync"}
PROCESSORS = 100


@contextmanager
def recording(arch: int) -> Iterator[Recorder]:
    """Inside, ``symmetric_product`` of CPU tensors does what it would on a GPU of ``arch``, but launch."""
    recorder = Recorder(symmetric_product_kernel, arch)
    triton_symmetric._plan.cache_clear()
    with mock.patch.multiple(
        triton_symmetric,
        _kernel=lambda: recorder,
        _capability=lambda device: divmod(arch, 10),
        _processors=lambda device: PROCESSORS,
        unsupported=lambda device, dtype: None,
    ):
        yield recorder
    triton_symmetric._plan.cache_clear()


def compile_product(
    config: TileConfig,
    dtype: torch.dtype,
    arch: int,
    *,
    layouts: str = "nt",
    sizes: tuple[int, int] = (512, 1024),
    adds: bool = True,
) -> Resources:
    """The kernel for ``(m, p)`` times ``(p, m)`` of ``sizes``, each contiguous ("n") or transposed ("t")."""
    m, p = sizes
    a = torch.empty(m, p, dtype=dtype) if layouts[0] == "n" else torch.empty(p, m, dtype=dtype).mT
    b = torch.empty(p, m, dtype=dtype) if layouts[1] == "n" else torch.empty(m, p, dtype=dtype).mT
    c = torch.empty(m, m, dtype=dtype) if adds else None
    with recording(arch) as recorder:
        symmetric_product(a, b, c, beta=0.5 if adds else 0.0, config=config)
    return resources(recorder.kernels[0])
