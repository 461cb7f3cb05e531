"""The symmetric-product kernel: its machine code, its launches, its tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from aot import INSTRUCTION, SHARED_MEMORY, Resources, compile_product, recording, resources

from dmuon.kernels.symmetric_tiles import TileConfig, Work, candidates, default_config
from dmuon.kernels.symmetric_triton import symmetric_product

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
POINTERS = TileConfig(128, 64, 8, 4)
WIDE = TileConfig(128, 64, 8, 4, wide=True)


def _default(
    k: int, m: int, p: int, dtype: torch.dtype, capability: tuple[int, int], addends: int = 0, processors: int = 132
) -> TileConfig:
    return default_config(Work(k, m, p, dtype, addends, processors), capability)


def _check_resources(config: TileConfig, dtype: torch.dtype, arch: int, **options: object) -> Resources:
    used = compile_product(config, dtype, arch, **options)
    assert used.spill_bytes == 0, (config, arch, used.registers)
    assert used.shared_bytes <= SHARED_MEMORY[arch], (config, arch)
    assert used.instruction == ("none" if dtype == torch.float32 else INSTRUCTION[arch])
    return used


def _compiled(config: TileConfig, arch: int, adds: int = 0) -> Any:
    """The kernel for squares in fp16 that adds so many matrices."""
    s, *c = torch.empty(1 + adds, 512, 512, dtype=torch.float16).unbind()
    with recording(arch) as recorder:
        symmetric_product(s, s, addends=c, betas=(0.5,) * adds, b_symmetric=True, config=config)
    return recorder.kernels[0]


@pytest.mark.parametrize(
    ("arch", "side", "dtype", "addends"),
    [
        (80, 2048, torch.float16, 4),
        (90, 256, torch.float16, 4),
        (90, 2048, torch.float32, 0),
        (100, 256, torch.bfloat16, 0),
    ],
)
def test_default_config_builds_without_spills(arch, side, dtype, addends):
    """Four addends and the identity are what the longest sum of the blocks of squares takes."""
    most = {"adds": addends, "identity": 0.5, "sizes": (512, 512)} if addends else {}
    _check_resources(_default(4, side, side, dtype, divmod(arch, 10), addends), dtype, arch, **most)


@pytest.mark.parametrize(("layouts", "config"), [("tt", POINTERS), ("nn", WIDE)], ids=str)
def test_other_layouts_use_the_matrix_instruction(layouts, config):
    _check_resources(config, torch.float16, 90, layouts=layouts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "dtype"), [(80, torch.float16), (90, torch.float16), (100, torch.float16), (90, torch.float32)]
)
def test_every_candidate_builds_without_spills(arch, dtype):
    """With as many addends as products of the dtype have, which takes more registers than fewer."""
    most = {"adds": 4, "identity": 0.5, "sizes": (512, 512)} if dtype == torch.float16 else {}
    for config in candidates(2048, 2048, dtype, divmod(arch, 10)):
        _check_resources(config, dtype, arch, **most)
    for config in candidates(2047, 2047, dtype, divmod(arch, 10)):
        _check_resources(config, dtype, arch, sizes=(511, 1023))


def test_default_does_not_spill_where_strides_and_addresses_forbid_vectors():
    x = torch.empty(512 * 516 + 1, dtype=torch.float16)[1:].view(512, 516)[:, :512]
    with recording(80) as recorder:
        symmetric_product(x, x.mT)
    assert resources(recorder.kernels[0]).spill_bytes == 0


def test_through_pointers_a_single_addend_is_on_its_way_while_the_product_is_computed():
    config = TileConfig(128, 64, 8, 3)
    assert "ld.global" not in _compiled(config, 90).asm["ptx"]
    before, _, after = _compiled(config, 90, adds=1).asm["ptx"].partition(INSTRUCTION[90] + ".")
    assert "ld.global" in before and "ld.global" not in after


@pytest.mark.pitfall("P46")
@pytest.mark.parametrize("wide", [False, True])
def test_coefficients_and_batch_sizes_share_one_kernel(wide):
    x = torch.empty(17, 128, 64, dtype=torch.float16)
    c = torch.empty(17, 128, 128, dtype=torch.float16)
    config = TileConfig(64, 64, 4, 3, wide)
    with recording(90) as recorder:
        for k in (1, 2, 3, 16, 17):
            for alpha, beta in ((1.0, 1.0), (1, 2), (-0.25, 0.5), (3.4445, -4.775)):
                symmetric_product(x[:k], x[:k].mT, addends=[c[:k]], betas=[beta], alpha=alpha, config=config)
    assert len(recorder.kernels) == 20
    assert recorder.variants == 1


@pytest.mark.pitfall("P47")
def test_a_program_takes_one_tile():
    x = torch.empty(40, 128, 64, dtype=torch.float16)
    with recording(90) as recorder:
        for wide in (False, True):
            symmetric_product(x, x.mT, config=TileConfig(64, 64, 4, 3, wide))
    assert recorder.grids == [(40 * 3,), (40 * 2,)]
    assert ["cp.async.bulk.tensor" in kernel.asm["ptx"] for kernel in recorder.kernels] == [False, True]


@pytest.mark.pitfall("P47")
@pytest.mark.parametrize(
    ("arch", "columns", "descriptors"),
    [(80, 1024, False), (90, 1024, True), (90, 1023, False)],
)
def test_default_takes_descriptors_where_possible(arch, columns, descriptors):
    x = torch.empty(8, 2048, 1024, dtype=torch.float16)[..., :columns].contiguous()
    with recording(arch) as recorder:
        symmetric_product(x, x.mT)
    assert ("cp.async.bulk.tensor" in recorder.kernels[0].asm["ptx"]) == descriptors


def test_default_falls_back_where_strides_forbid_descriptors():
    x = torch.empty(256, 129, dtype=torch.float16)[:, :64]  # sizes allow them, 258 bytes between rows do not
    with recording(90) as recorder:
        symmetric_product(x, x.mT)
    assert "cp.async.bulk.tensor" not in recorder.kernels[0].asm["ptx"]


def test_symmetric_b_is_read_along_its_inner_dimension():
    a, b = torch.empty(2, 256, 256, dtype=torch.float16).unbind()
    with recording(90) as recorder:
        for b_symmetric, view in ((True, b), (False, b.mT), (False, b)):
            symmetric_product(a, view, b_symmetric=b_symmetric)
    transposed, explicit, plain = (kernel.hash for kernel in recorder.kernels)
    assert transposed == explicit != plain


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0), (13, 7)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(16, 16), (64, 4096), (100, 37), (512, 512), (4096, 14336), (8191, 8192)])
def test_candidates_are_few_and_distinct_in_print(capability, dtype, sizes):
    configs = candidates(*sizes, dtype, capability)
    assert 1 <= len({str(config) for config in configs}) == len(configs) <= 4
    assert all(_default(k, *sizes, dtype, capability, addends) in configs for k in (1, 50) for addends in (0, 4))
    if capability < (9, 0):
        assert not any(config.wide for config in configs)
