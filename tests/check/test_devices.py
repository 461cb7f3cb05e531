"""What forbids a first run is named with rank and remedy; what only slows it is a warning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from dmuon.check.devices import NEEDED_BYTES, Gpu, refusals, start_cuda, warned

GPU = Gpu("H100", "a", (9, 0), 70 << 30, 80 << 30, (1,), None, None)
BUILD = "the kernel does not build (FileNotFoundError: gcc)"


def test_gpus_alike_with_memory_and_kernels_are_taken() -> None:
    assert not [*refusals([GPU, replace(GPU, uuid="b")])]
    assert not [*warned([GPU])]


@pytest.mark.parametrize(
    ("gpus", "text"),
    [
        ([GPU, replace(GPU, name="A100")], "rank 0 has H100, rank 1 has A100; choose those of one kind"),
        ([GPU, replace(GPU, capability=(8, 0))], "GPUs of different kind"),
        ([GPU, replace(GPU, free=NEEDED_BYTES - 1)], "rank 1: 6.0 of 80.0 GiB of H100 are free, this needs 6; end"),
        ([GPU, replace(GPU, products=BUILD)], "rank 1: the kernel does not build (FileNotFoundError: gcc); Triton"),
        ([replace(GPU, passes=BUILD)], "Triton needs a C compiler (gcc, or the one that CC names)"),
    ],
)  # fmt: skip
def test_what_forbids_the_run_is_named_with_its_remedy(gpus: Sequence[Gpu], text: str) -> None:
    [found] = refusals(gpus)
    assert text in found


def test_a_gpu_below_the_kernels_is_taken_and_says_what_runs_instead() -> None:
    old = replace(GPU, capability=(7, 5), products="compute capability 7.5 is below 8.0", passes="it is below 8.0")
    assert not [*refusals([old])]
    products, passes = warned([old])
    assert "cuBLAS computes them whole" in products and "torch's operations run" in passes


def test_a_torch_without_cuda_is_named() -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    assert "is built without CUDA; install" in (str(start_cuda(torch.device("cuda", 0))))


def test_a_driver_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\n(found version 10010)")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", fail)
    found = start_cuda(torch.device("cuda", 0))
    assert isinstance(found, str)
    assert found.startswith("CUDA does not start (The NVIDIA driver on your system is too old (found version 10010));")
    assert "update the NVIDIA driver" in found
