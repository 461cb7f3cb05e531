"""The model of products on GPUs: its terms, what it says of the default configs, and what it reads of machine code."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dmuon.kernels import coefficient_sequence, rule_on
from dmuon.kernels.symmetric_tiles import TileConfig
from dmuon.simulation.hardware import HARDWARE
from dmuon.simulation.wave_model import _Product, _product_s

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module


def test_cublas_is_as_fast_as_it_was_measured(bench: Callable[[str], ModuleType]) -> None:
    """8192 cubed at 798 and 788 TFLOP/s."""
    model = bench("product_model")
    for device in model.DEVICES[1:3]:
        rate = 2 * 8192**3 / model.predict_cublas(model.Product(1, 8192, 8192, 0), device)
        assert 0.97 < rate / 793e12 < 1.03, device.name


def test_the_rest_of_a_tile_is_hidden_behind_a_second_program(bench: Callable[[str], ModuleType]) -> None:
    """With 264 tiles two a multiprocessor: alone, two rests; together, the last one's."""
    model = bench("product_model")
    h200 = model.DEVICES[2]
    config = TileConfig(128, 64, 8, 3, descriptors=True)
    work = model.Product(264, 128, 16384, 0)
    main = model.main_seconds(128, 128, work.p, h200)
    rest = model.rest_seconds(config, 0, 500, h200)
    for blocks, rests in ((1, 2), (2, 1)):
        seconds, even = model.predict(config, work, {"epilogue": 500, "blocks": blocks}, h200)
        assert seconds == pytest.approx(model.LAUNCH + 2 * main + rests * rest)
        assert even == pytest.approx(seconds), "no multiprocessor has less to do"


def test_the_rule_takes_what_the_model_finds_fast(bench: Callable[[str], ModuleType]) -> None:
    """Of the machine code that was last looked at."""
    model = bench("product_model")
    rows = list(model.predictions(json.loads((BENCH / "results" / "kernel-resources.json").read_text())["rows"]))
    best: dict[tuple[object, ...], float] = {}
    for row in rows:
        key = tuple(row[name] for name in ("device", "k", "m", "p", "addends"))
        best[key] = min(best.get(key, row["ms"]), row["ms"])
    chosen = {tuple(row[name] for name in ("device", "k", "m", "p", "addends")): row for row in rows if row["default"]}
    assert chosen.keys() == best.keys()
    for key, row in chosen.items():
        assert row["ms"] <= 1.1 * best[key], key


def test_instructions_behind_the_product_are_counted(bench: Callable[[str], ModuleType]) -> None:
    pytest.importorskip("triton")
    listing = """
        /*0100*/                   HGMMA.64x128x16.F32 R24, gdesc[UR4] ;   /* 0x0 */
        /*0110*/              @!P0 BRA 0x100 ;                             /* 0x0 */
        /*0120*/               @P1 F2FP.F16.F32.PACK_AB R0, R1, R2 ;       /* 0x0 */
        /*0130*/             @!UP2 UTMASTG.3D [UR8], [UR10] ;              /* 0x0 */
        /*0140*/                   EXIT ;                                  /* 0x0 */
        /*0150*/                   NOP ;                                   /* 0x0 */
    """
    resources = bench("kernel_resources")
    assert resources.epilogue(listing) == 3
    assert resources.epilogue(listing.replace("HGMMA", "FFMA")) is None


def test_the_wave_model_takes_as_long_where_the_rule_takes_the_kernel(bench: Callable[[str], ModuleType]) -> None:
    """Both are models: this one is 20 % uncertain, and the other has one rate in place of its terms."""
    h200 = HARDWARE["h200"].device
    polar = coefficient_sequence("polar_express", 5)
    rows = json.loads((BENCH / "results" / "kernel-resources.json").read_text())["rows"]
    ratios = []
    for row in bench("product_model").predictions(rows):
        k, shape = row["k"], (row["m"], row["p"])
        taken = rule_on(h200.sms, shape, k, polar, torch.float16).backend == "triton"
        if row["device"] == "H200" and row["default"] and row["addends"] <= 1 and taken:  # Polar Express adds one
            product = _Product(row["m"], row["p"], row["m"], row["addends"], halves=True)
            ratios.append((_product_s(h200, product, k) + h200.launch_s) * 1e3 / row["ms"])
    assert len(ratios) >= 10
    assert min(ratios) > 0.8 and max(ratios) < 1.2, ratios
    assert math.prod(ratios) ** (1 / len(ratios)) == pytest.approx(1, abs=0.05)
