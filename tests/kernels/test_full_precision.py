"""Products keep their precision whatever the user allows torch, and the user's settings are back afterwards."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dmuon.kernels import orthogonalize
from dmuon.kernels.device import full_precision

newton_schulz = importlib.import_module("dmuon.kernels.newton_schulz")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HALVES = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
BACKENDS = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)


def settings() -> list[object]:
    matmul = torch.backends.cuda.matmul
    names = (*HALVES, *(f"{name}_split_k" for name in HALVES), "allow_fp16_accumulation")
    return [*(getattr(matmul, name) for name in names), *(backend.fp32_precision for backend in BACKENDS)]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    halves = {name: (getattr(matmul, name), getattr(matmul, f"{name}_split_k")) for name in HALVES}
    accumulation = matmul.allow_fp16_accumulation
    yield
    for name, value in halves.items():
        setattr(matmul, name, value)
    matmul.allow_fp16_accumulation = accumulation
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("precision", ["medium", "high", "highest"])
def test_products_are_exact_inside_and_the_users_settings_are_back_after(allowed: bool, precision: str) -> None:
    matmul = torch.backends.cuda.matmul
    for name in HALVES:
        setattr(matmul, name, (allowed, allowed))
    matmul.allow_fp16_accumulation = allowed
    torch.set_float32_matmul_precision(precision)
    users = settings()
    with pytest.raises(KeyError), full_precision(CUDA):
        assert settings()[:5] == [False, False, allowed, allowed, False]
        assert not {backend.fp32_precision for backend in BACKENDS} & {"tf32", "bf16"}
        raise KeyError
    assert settings() == users
    assert torch.get_float32_matmul_precision() == precision


def test_threads_share_the_settings_and_the_last_one_restores_them() -> None:
    """The first to come leaves before the second: it must not take the second one's precision away."""
    torch.set_float32_matmul_precision("medium")
    users = settings()
    first_left, second_came = threading.Event(), threading.Event()
    seen: list[list[object]] = []

    def second() -> None:
        with full_precision(CUDA):
            seen.append(settings())
            second_came.set()
            assert first_left.wait(10)
            seen.append(settings())

    with full_precision(CUDA):
        inside = settings()
        thread = threading.Thread(target=second)
        thread.start()
        assert second_came.wait(10)
    first_left.set()
    thread.join()
    assert seen == [inside, inside] and inside != users
    assert settings() == users and torch.get_float32_matmul_precision() == "medium"


def test_products_run_with_full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a CPU that has no faster way, where results would not tell."""
    torch.set_float32_matmul_precision("medium")
    seen: list[tuple[str, bool]] = []
    iterate = newton_schulz.iterate

    def watched(*args: object, **options: object) -> Tensor:
        seen.append((torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu")))
        result: Tensor = iterate(*args, **options)
        return result

    monkeypatch.setattr(newton_schulz, "iterate", watched)
    with torch.autocast("cpu", torch.bfloat16):
        orthogonalize(torch.randn(8, 16))
        assert torch.is_autocast_enabled("cpu")
    assert seen == [("highest", False)]
    assert torch.get_float32_matmul_precision() == "medium"
