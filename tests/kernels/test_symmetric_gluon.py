"""The symmetric product with a loader: its results on a double of Gluon, its machine code, and where it is offered."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from aot import INSTRUCTION, SHARED_MEMORY, compile_product, recording
from gluon_double import Stuck, doubled, order_calls

from dmuon.kernels import Variant, alternatives, coefficient_sequence, symmetric_gluon, variant, variant_fault
from dmuon.kernels.symmetric_gluon import loader_obstacle
from dmuon.kernels.symmetric_tiles import LOADED, TileConfig, candidates
from dmuon.kernels.symmetric_triton import symmetric_product

SMALL = TileConfig(16, 16, 1, 2, descriptors=True, halves=2, persistent=True, loader=True)
CUDA = torch.device("cuda", 0)


def _operands(k: int, m: int, p: int, layouts: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """``A`` and ``B = Aᵀ``, each contiguous ("n") or transposed ("t")."""
    a = torch.randn(k, m, p, generator=torch.Generator().manual_seed(seed)).div_(p**0.5).half()
    b = a.mT.contiguous() if layouts[1] == "n" else a.contiguous().mT
    return (a if layouts[0] == "n" else a.mT.contiguous().mT), b


def _check(k: int, m: int, p: int, layouts: str = "nt", adds: int = 0, identity: float = 0.0, without: int = 0) -> None:
    a, b = _operands(k, m, p, layouts)
    c = torch.randn(adds, k, m, m, generator=torch.Generator().manual_seed(1)).half()
    c = (c + c.mT).div_(2)
    betas = (0.5, -0.25, 2.0, 1.0)[:adds]
    expected = -1.5 * a.double() @ b.double() + identity * torch.eye(m)
    expected += sum(beta * x.double() for beta, x in zip(betas, c, strict=True))
    addends = list(c.unbind())
    out = addends[-1] if adds else None  # written where it is read
    with doubled(without):
        found = symmetric_product(a, b, addends, alpha=-1.5, beta=betas, identity=identity, out=out, config=SMALL)
    assert torch.equal(found, found.mT)
    assert (found - expected).abs().max() < 4e-3 * expected.abs().max()


@pytest.mark.parametrize(
    ("k", "m", "p"),
    [
        (1, 32, 32),
        (3, 64, 48),
        (2, 72, 24),  # the last pair of tile rows is one row, and p ends inside a slot
        (1, 16, 16),
        (2, 104, 136),
    ],
)
@pytest.mark.parametrize("layouts", ["nt", "tn"])
def test_the_kernel_with_a_loader_equals_fp64_and_is_symmetric_bitwise(k, m, p, layouts):
    _check(k, m, p, layouts)


@pytest.mark.parametrize("adds", [1, 2, 4])
def test_addends_and_the_identity_are_added_once(adds):
    _check(2, 72, 40, adds=adds, identity=0.5)


@pytest.mark.parametrize("without", order_calls())
def test_a_kernel_that_leaves_one_call_out_does_not_pass(monkeypatch, without):
    """Of what orders those that run at once: so the tests before say something of each."""
    monkeypatch.setattr("gluon_double._SECONDS", 0.2)
    line = order_calls()[without]
    with pytest.raises((AssertionError, Stuck)):
        _check(2, 72, 40, "nt", adds=4, without=line)
        _check(2, 72, 40, "tn", adds=4, without=line)


@pytest.mark.parametrize("adds", [0, 4])
def test_the_loader_builds_without_spills_and_fills_a_multiprocessor(adds):
    """Two warpgroups that multiply, and the loader's; four slots."""
    used = compile_product(LOADED, torch.float16, 90, adds=adds, identity=0.5 if adds else 0.0, sizes=(512, 512))
    assert used.spill_bytes == 0 and used.registers * 32 * 12 <= 1 << 16
    assert used.shared_bytes <= SHARED_MEMORY[90] and used.blocks == 1
    assert used.instruction == INSTRUCTION[90] and "wgmma.mma_async.sync.aligned.m64n256k16" in used.ptx
    assert re.findall(r"setmaxnreg\.(inc|dec)\S*\s+(\d+)", used.ptx).count(("dec", "24")) == 1, "the loader gives away"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layouts", "dtype"), [("nn", torch.float16), ("tt", torch.float16), ("tn", torch.bfloat16), ("nt", torch.bfloat16)]
)
def test_every_layout_builds_with_a_loader(layouts, dtype):
    for adds in (1, 4):
        used = compile_product(LOADED, dtype, 90, layouts=layouts, adds=adds, identity=0.5)
        assert used.spill_bytes == 0 and used.shared_bytes <= SHARED_MEMORY[90] and used.instruction == "wgmma"


@pytest.mark.parametrize(("layouts", "adds"), [("nt", 0), ("nt", 2), ("tn", 1)])
def test_all_warps_have_read_or_written_memory_before_one_of_them_lets_it_go(layouts, adds):
    """Barriers that the compiler sets: in Gluon nobody writes them."""
    ptx = compile_product(LOADED, torch.float16, 90, layouts=layouts, adds=adds).ptx
    frees = re.findall(r"wgmma\.wait_group(.*?)mbarrier\.arrive", ptx, re.DOTALL)
    assert len(frees) == 2 and all("bar.sync" in between for between in frees)
    steps = re.findall(
        r"stmatrix|ldmatrix|bar\.sync|fence\.proxy\.async|cp\.async\.bulk\.(?:tensor\.3d\.\S+?(?=\.)|wait_group\.read)",
        ptx.partition("wgmma.wait_group")[2],
    )
    loads = [i for i, step in enumerate(steps) if step == "cp.async.bulk.tensor.3d.shared::cta"]
    stores = [i for i, step in enumerate(steps) if step == "cp.async.bulk.tensor.3d.global"]
    halves = 2
    assert len(stores) == 2 * halves and len(loads) > adds * halves, "and the loader's"
    for at in stores:
        assert steps[:at][-2:] == ["fence.proxy.async", "bar.sync"], "what is stored is written by all"
    for at in loads[: adds * halves]:
        assert steps[at - 1] == "bar.sync", "what was there is read by all, or stored"
        assert steps[at + 1 : at + 3] == ["bar.sync", "ldmatrix"], "one has waited for it"
    of_adds = [steps[a + 2 : b] for a, b in itertools.pairwise(loads[: adds * halves])]
    again = [between for between in of_adds if not any(step.startswith("cp.async") for step in between)]
    assert len(again) == halves * max(0, adds - 1), "the second into the same memory"
    for between in again:
        first, *rest = [step for step in between if step != "ldmatrix"]
        assert first == "bar.sync" and "fence.proxy.async" in rest, "read by all, and known to those who copy"
    writes = [i for i, step in enumerate(steps) if step == "stmatrix" and steps[i - 1] != "stmatrix"]
    assert all(steps[at - 1] == "bar.sync" for at in writes), "what was there is read by all, or stored"


def test_coefficients_and_batch_sizes_share_one_kernel_with_a_loader():
    x = torch.empty(5, 512, 256, dtype=torch.float16)
    c = torch.empty(5, 512, 512, dtype=torch.float16)
    with recording(90) as recorder:
        for k, alpha, beta in ((1, 1.0, 1.0), (2, 3.4445, -4.775), (5, 1, 2)):
            symmetric_product(x[:k], x[:k].mT, c[:k], alpha=alpha, beta=beta, config=LOADED)
    assert recorder.loaded.variants == 1 and not recorder.kernels
    assert recorder.loaded.grids == [(6,), (12,), (30,)], "one program a tile, until multiprocessors are taken"


def test_the_loader_prints_and_is_a_candidate_of_capability_9_alone():
    assert str(LOADED) == "128x64w8s4dhplg8" and TileConfig.parse(str(LOADED)) == LOADED
    for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        for dtype in (torch.float16, torch.float32):
            offered = LOADED in candidates(2048, 2048, dtype, capability)
            assert offered == (capability == (9, 0) and dtype == torch.float16)


@pytest.mark.parametrize(
    "text", ["128x64w8s4dhlg8", "128x64w8s4dplg8", "128x64w4s4dhplg8", "128x64w8s4dhkplg8", "128x64w8s4dhr2plg8"]
)
def test_a_loader_of_other_programs_is_refused(text):
    with pytest.raises(ValueError, match=r"must be|is no tile config"):
        TileConfig.parse(text)
    with pytest.raises(ValueError, match="a loader must be"):
        replace(LOADED, warps=4)


@pytest.mark.parametrize(
    ("dtype", "capability", "told"),
    [
        (torch.float16, (9, 0), None),
        (torch.bfloat16, (9, 0), None),
        (torch.float32, (9, 0), "for half precision, not torch.float32"),
        (torch.float16, (10, 0), "those of compute capability 9, not 10.0"),
        (torch.float16, (8, 0), "not 8.0"),
    ],
)
def test_where_a_loader_cannot_run_it_says_why(dtype, capability, told):
    found = loader_obstacle(dtype, capability)
    assert found is None if told is None else told in found


def test_a_triton_without_gluon_lacks_the_loader_and_says_so(monkeypatch):
    """The tuner does not try it, a plan that names it is refused, and so is the config."""

    def missing():
        raise ImportError("cannot import name 'warpgroup_mma'")

    def tiles() -> list[str]:
        steps = alternatives((2048, 2048), 4, coefficient_sequence("polar_express", 5), torch.float16, CUDA)
        _, tile_step, *_ = steps
        return [rival.tile for rival in tile_step(Variant("gram", (2,), "triton", 4))]

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(variant, "backend_fault", lambda *_: None)
    named = Variant("gram", (2,), "triton", 4, str(LOADED))
    symmetric_gluon._gluon_fault.cache_clear()
    assert str(LOADED) in tiles() and variant_fault(named, (2048, 2048), CUDA, torch.float16) is None
    monkeypatch.setattr(symmetric_gluon, "loaded_kernel", missing)
    symmetric_gluon._gluon_fault.cache_clear()
    assert str(LOADED) not in tiles() and len(tiles()) == 7
    told = "this Triton's Gluon lacks something (ImportError: cannot import name 'warpgroup_mma')"
    assert told in variant_fault(named, (2048, 2048), CUDA, torch.float16)
    x = torch.empty(256, 256, dtype=torch.float16)
    with recording(90), pytest.raises(ValueError, match=r"has a loader, but .*; pass a config without one"):
        symmetric_product(x, x.mT, config=LOADED)
    symmetric_gluon._gluon_fault.cache_clear()
