"""An installed quack is the first choice from Hopper on, once a child found it right; a fake one stands for it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dmuon.kernels import (
    backend_fault,
    choose_variant,
    coefficient_sequence,
    products_on,
    symmetric_quack,
    variant,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
HALF = torch.float16

# What an installed quack does, behind a product that is right.
FAKE = """
import os, sys, time
import torch

def gemm_symmetric(A, B, C=None, out=None, alpha=1.0, beta=1.0):
    exact = alpha * A.double() @ B.double() + (0 if C is None else beta * C.double())
    out.copy_((exact + exact.mT) / 2)
    {fault}
"""
FAULTS = {
    "right": ("pass", ""),
    "wrong": ("out.mul_(1.5)", r"its product in torch.float16 differs from fp64 by 0\.5 of the largest entry"),
    "half wrong": ("out[0, 3, 5] += C is not None and A.dtype == torch.bfloat16", "in torch.bfloat16 differs from"),
    "lopsided": ("out[0, 3, 5] += 2**-11 * exact.abs().max()", "its product in torch.float16 is not symmetric bitwise"),
    "crashing": ("os.abort()", r"ended with status -6 \("),
    "hanging": ("time.sleep(100)", "did not end within 0.5 s"),
}
QUICK = ("right", "hanging")


def install(folder: Path, fault: str = "pass") -> None:
    (folder / "quack").mkdir(exist_ok=True)
    (folder / "quack/__init__.py").touch()
    (folder / "quack/gemm_interface.py").write_text(FAKE.format(fault=fault))


@pytest.fixture(autouse=True)
def remembers_nothing() -> Iterator[None]:
    for remembered in (backend_fault, products_on, choose_variant):
        remembered.cache_clear()
    yield
    for remembered in (backend_fault, products_on, choose_variant):
        remembered.cache_clear()


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in FAULTS])
def test_a_child_says_what_is_wrong_and_costs_no_more_than_its_deadline(name, monkeypatch, tmp_path):
    fault, told = FAULTS[name]
    install(tmp_path, fault)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(symmetric_quack, "DEADLINE_SECONDS", 0.5 if name == "hanging" else 100.0)
    found = symmetric_quack.tried(CPU)
    assert re.search(told, found) if told else found == ""


@pytest.fixture
def hopper(monkeypatch, tmp_path) -> SimpleNamespace:
    """A device with an installed quack, on which Triton runs; ``trials`` are those that were made of ``verdicts``."""
    machine = SimpleNamespace(capability=(9, 0), versions={}, trials=[], verdict="", folder=tmp_path / "cache/dmuon")
    install(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: machine.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(symmetric_quack.metadata, "version", lambda name: machine.versions.get(name, "1"))
    monkeypatch.setattr(symmetric_quack, "tried", lambda device: machine.trials.append(device) or machine.verdict)
    monkeypatch.setattr(variant, "triton_fault", lambda device, dtype: None)
    return machine


def chosen(dtype: torch.dtype = HALF) -> tuple[str, str]:
    """As a process that has just started chooses."""
    for remembered in (backend_fault, products_on, choose_variant):
        remembered.cache_clear()
    return products_on(CUDA, dtype)


def test_it_is_the_first_choice_and_tried_once_for_a_device_and_versions(hopper):
    polar = coefficient_sequence("polar_express", 5)
    assert [chosen() for _ in range(3)] == [("quack", "")] * 3 and hopper.trials == [CUDA]
    assert chosen(torch.bfloat16)[0] == "quack" and len(hopper.trials) == 1
    assert choose_variant((4096, 4096), 8, polar, HALF, CUDA).backend == "quack"
    assert choose_variant((512, 512), 8, polar, HALF, CUDA).backend == "torch", "too small for any kernel"
    squares = coefficient_sequence("squares", 5)
    assert choose_variant((4096, 4096), 8, squares, HALF, CUDA).backend == "quack"
    assert choose_variant((512, 512), 8, squares, HALF, CUDA).backend == "triton", "adds in the same launch"
    hopper.versions["quack-kernels"] = "2"
    assert chosen()[0] == "quack" and len(hopper.trials) == 2


def test_what_it_failed_by_is_warned_of_once_and_kept(hopper):
    hopper.verdict = "its product is wrong"
    with pytest.warns(UserWarning, match=r"installed, but its product is wrong; not used. Remove .*quack-.*json"):
        assert chosen() == ("triton", "quack: its product is wrong")
    assert chosen() == ("triton", "quack: its product is wrong") and len(hopper.trials) == 1
    (file,) = hopper.folder.iterdir()
    hopper.verdict = ""
    for broken in ("", "[]", json.dumps({"key": "another", "fault": ""}), json.dumps({"fault": ""})):
        file.write_text(broken)
        assert chosen() == ("quack", "") and list(hopper.folder.iterdir()) == [file]
    assert len(hopper.trials) == 5


@pytest.mark.parametrize(
    ("capability", "dtype", "installed", "why"),
    [
        ((8, 9), HALF, True, "quack: it is tried from compute capability 9.0 on, and this is 8.9"),
        ((10, 0), HALF, False, r"quack: it is not installed; pip install dmuon[quack]"),
        ((10, 0), torch.float32, True, "quack: it multiplies fp16 and bf16 on NVIDIA GPUs, not torch.float32 on cuda"),
    ],
)
def test_elsewhere_triton_takes_its_place_and_says_why(hopper, monkeypatch, capability, dtype, installed, why):
    hopper.capability = capability
    if not installed:
        monkeypatch.setitem(sys.modules, "quack", None)
        monkeypatch.setattr(symmetric_quack.importlib.util, "find_spec", lambda name: None)
    assert chosen(dtype) == ("triton", why) and not hopper.trials
