"""Blocks and lines of docs/moving-over.md train as the optimizers that they come from, here written out in fp64."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness.network import Network, loss_of
from harness.oracle import newton_schulz
from harness.paper import CLASSIC
from harness.toy import batch, build

import dmuon
from dmuon.kernels import coefficient_sequence

PAGE = Path(__file__).parents[2] / "docs" / "moving-over.md"
YOU = [  # as all of these libraries have them
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]


@dataclass(frozen=True)
class Origin:
    """What an optimizer does by default."""

    lr: float
    decay: float
    nesterov: bool
    scale: Callable[[int, int], float]
    coefficients: Sequence[tuple[float, float, float]]
    adamw: dict[str, object]
    accumulates: bool = False  # m = 0.95 m + g, in place of an average
    momentum: float = 0.95
    eps: float = 0.0  # lower clamp of a norm


def original(m: int, n: int) -> float:
    return max(1, m / n) ** 0.5


def match_rms(m: int, n: int) -> float:
    return 0.2 * max(m, n) ** 0.5


def spectral(m: int, n: int) -> float:
    return (m / n) ** 0.5


ORIGINS = {
    "torch.optim.Muon": Origin(1e-3, 0.1, True, original, CLASSIC, {"lr": 1e-3, "weight_decay": 0.01}),
    "KellerJordan/Muon": Origin(
        0.02,
        0.0,
        True,
        original,
        CLASSIC,
        {"lr": 3e-4, "weight_decay": 0.0, "betas": (0.9, 0.95), "eps": 1e-10},
    ),
    "microsoft/dion": Origin(
        0.01,
        0.01,
        False,
        spectral,
        YOU,
        {"lr": 0.01, "weight_decay": 0.01, "betas": (0.9, 0.95)},
        accumulates=True,
    ),
    "torchtitan's DistMuon": Origin(
        1e-3, 0.1, True, original, CLASSIC, {"lr": 8e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
    ),
    "Megatron-LM": Origin(3e-4, 0.01, False, lambda m, n: max(m, n) ** 0.5, YOU, {"lr": 3e-4, "weight_decay": 0.01}),
    "X-Square's dmuon": Origin(
        0.02,
        0.0,
        True,
        match_rms,
        coefficient_sequence("polar_express", 5),
        {"lr": 1e-3, "weight_decay": 0.01},
        accumulates=True,
    ),
}

NO_NESTEROV = ({"nesterov": False}, {"nesterov": False})
SIMPLE = ({"coefficients": CLASSIC}, {"ns_coefficients": "classic"})
# Of an origin: what a line of its table begins with, what that changes there, and what here.
LINES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("torch.optim.Muon", "`lr=1e-3`", {"lr": 0.01, "decay": 0.5}, {"lr": 0.01, "weight_decay": 0.5}),
    ("torch.optim.Muon", "`momentum=0.95`, `nesterov=True`, `ns_steps=5`", *NO_NESTEROV),
    ("torch.optim.Muon", "`momentum=0.95`", {"coefficients": CLASSIC[:3]}, {"ns_steps": 3}),
    ("torch.optim.Muon", '`adjust_lr_fn=None`, or `"original"`', {}, {"adjust_lr_fn": None}),
    ("torch.optim.Muon", '`adjust_lr_fn="spectral_unclamped"`', {"scale": spectral}, {"adjust_lr_fn": "spectral"}),
    ("torch.optim.Muon", "`ns_coefficients=(3.4445", {}, {"ns_coefficients": CLASSIC[0]}),
    ("torch.optim.Muon", "`eps=1e-7`", {"eps": 2.0}, {"eps": 2.0}),
    ("torch.optim.Muon", "AdamW's `lr=1e-3`", {"adamw": {"lr": 0.01}}, {"adamw_lr": 0.01}),
    (
        "torch.optim.Muon",
        "AdamW's `eps=1e-8`",
        {"adamw": {"lr": 1e-3, "eps": 1e-3, "weight_decay": 0.3}},
        {"adamw_eps": 1e-3, "adamw_weight_decay": 0.3},
    ),
    ("microsoft/dion", "`adjust_lr=None`", {"scale": lambda m, n: 1.0}, {"adjust_lr_fn": lambda shape: 1.0}),
    ("Megatron-LM", '`scale_mode="unit_rms_norm"`', {"scale": spectral}, {"adjust_lr_fn": "spectral"}),
    ("Megatron-LM", '`coefficient_type="simple"`', *SIMPLE),
    ("X-Square's dmuon", "`ns_backend=NewtonSchulz(", {"coefficients": YOU}, {"ns_coefficients": "you"}),
]


def losses_of(model: Network, step: Callable[[], None]) -> list[float]:
    losses = []
    for _ in range(6):
        model.zero_grad()
        loss = loss_of(model, *batch(0))
        loss.backward()
        losses.append(loss.item())
        step()
    return losses


def reference(model: Network, origin: Origin) -> list[float]:
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if all(p is not q for q in matrices)]
    groups = [{"params": [p for p in rest if p.ndim == 2]}, {"params": [p for p in rest if p.ndim < 2]}]
    adamw = torch.optim.AdamW(groups, **origin.adamw)
    adamw.param_groups[1]["weight_decay"] = 0.0
    momenta = [torch.zeros_like(p) for p in matrices]

    def step() -> None:
        with torch.no_grad():
            for p, m in zip(matrices, momenta, strict=True):
                if origin.accumulates:
                    m.mul_(origin.momentum).add_(p.grad)
                    g = p.grad + origin.momentum * m if origin.nesterov else m
                else:
                    m.lerp_(p.grad, 1 - origin.momentum)
                    g = torch.lerp(p.grad, m, origin.momentum) if origin.nesterov else m
                p.mul_(1 - origin.lr * origin.decay)
                p.sub_(origin.lr * origin.scale(*p.shape) * newton_schulz(g, origin.coefficients, origin.eps))
        adamw.step()

    return losses_of(model, step)


def section_of(name: str) -> str:
    return PAGE.read_text().split(f"## {name}\n")[1].split("\n## ")[0]


def found(model: Network, name: str, **changes: Any) -> list[float]:
    """Losses by the block of that section, with other options."""
    block = re.search(r"^```python\n(.*?)^```$", section_of(name), re.MULTILINE | re.DOTALL)
    assert block is not None
    names = {
        "model": model,
        "dmuon": SimpleNamespace(Muon=lambda *args, **options: dmuon.Muon(*args, **{**options, **changes})),
    }
    exec(block[1], names)
    return losses_of(model, names["optimizer"].step)


@pytest.mark.parametrize("name", ORIGINS)
def test_the_block_of_the_page_gives_the_curve_of_its_origin(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    expected = reference(deepcopy(model).double(), ORIGINS[name])
    assert found(model, name) == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < expected[0] - 1e-3, "it learns"
    assert not caplog.text


@pytest.mark.parametrize(("name", "line", "there", "here"), LINES)
def test_a_line_of_a_table_gives_the_curve_that_it_claims(
    name: str, line: str, there: dict[str, Any], here: dict[str, Any]
) -> None:
    assert f"\n| {line}" in section_of(name)
    model = build()
    expected = reference(deepcopy(model).double(), replace(ORIGINS[name], **there))
    assert found(model, name, **here) == pytest.approx(expected, rel=1e-4)


def test_torchs_own_muon_gives_that_curve_to_the_error_of_bf16() -> None:
    model = build()
    expected = reference(deepcopy(model).double(), ORIGINS["torch.optim.Muon"])
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if all(p is not q for q in matrices)]
    norms = [p for p in rest if p.ndim < 2]
    muon = torch.optim.Muon(matrices)
    adamw = torch.optim.AdamW(
        [{"params": [p for p in rest if p.ndim == 2]}, {"params": norms, "weight_decay": 0.0}], lr=1e-3
    )

    def step() -> None:
        muon.step()
        adamw.step()

    assert losses_of(model, step) == pytest.approx(expected, rel=1e-3)


# -- what is kept by mistake --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keyword", "instead"),
    [
        ("betas", "adamw_betas="), ("backend_steps", "ns_steps="), ("rank", "nothing"),
        ("wieght_decay", "weight_decay="), ("unheard_of", "one of params, lr, weight_decay"),
    ],
)  # fmt: skip
def test_an_unknown_keyword_says_what_to_write(keyword: str, instead: str) -> None:
    says = rf"dmuon\.Muon\(\) got an unexpected keyword argument '{keyword}'; write {instead}"
    with pytest.raises(TypeError, match=says):
        dmuon.Muon(build(), **{keyword: 1})
    with pytest.raises(TypeError, match=r"dmuon\.dedicate_params\(\) got .* 'predicate'; write select="):
        dmuon.dedicate_params(build(), None, predicate=lambda name, param: True)
    assert list(inspect.signature(dmuon.Muon).parameters)[:3] == ["params", "lr", "weight_decay"]


def test_a_learning_rate_on_torchs_scale_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    matrices = [p for p in build().blocks.parameters() if p.ndim == 2]
    group = {"params": matrices, "use_muon": True}
    optimizer = dmuon.Muon(matrices, lr=1e-3, weight_decay=0.1, momentum=0.95)
    for matrix in matrices:
        matrix.grad = torch.ones_like(matrix)
    for _ in range(2):
        optimizer.step()
    dmuon.Muon([{**group, "lr": 0.02}])
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert told[0].startswith("lr=0.001 is read on AdamW's scale") and told[1].startswith("lr=0.02 is read")
    assert all('pass adjust_lr_fn="original" to keep their scale' in line for line in told)
    caplog.clear()
    for name in ("original", "match_rms_adamw", None):
        dmuon.Muon(matrices, lr=0.02, adjust_lr_fn=name)
        dmuon.Muon([{**group, "lr": 0.02, "adjust_lr_fn": name}])
    dmuon.Muon(build(), lr=0.02)
    dmuon.Muon(matrices, lr=0.02, adamw_lr=1e-3)
    dmuon.Muon([{**group, "lr": 0.01}])
    assert not caplog.text
