"""The profiler times the real update, in order, within its budget, and leaves no trace."""

from __future__ import annotations

import time

import pytest
import torch

from dmuon.planning import profiler

CPU = torch.device("cpu")


def test_the_budget_is_kept_and_what_does_not_fit_is_left_out():
    started = time.process_time()  # what neighbours on the machine take does not count
    work = {(16, 16): (1,), (8192, 32768): (1,)}
    timings = profiler.measure(work, device=CPU, budget_s=2.0)
    assert time.process_time() - started < 5
    assert set(timings) == {(16, 16)}
    assert profiler.measure(work, device=CPU, budget_s=0.0) == {}
    assert profiler.measure({}, device=CPU) == {}


@pytest.mark.pitfall("P10")
def test_what_is_timed_is_the_update_with_these_options(monkeypatch):
    calls = []
    real = profiler.muon_update_

    def record(params, grads, momentum, **options):
        calls.append((len(params), momentum.shape, options["coefficients"], options["steps"], options["dtype"]))
        real(params, grads, momentum, **options)

    monkeypatch.setattr(profiler, "muon_update_", record)
    profiler.measure({(8, 16): (2,)}, device=CPU, options=profiler.NsOptions("you", 3, torch.bfloat16), budget_s=1)
    assert set(calls) == {
        (1, (1, 256, 256), "you", 3, torch.bfloat16),
        (2, (2, 8, 16), "you", 3, torch.bfloat16),
    }


@pytest.mark.pitfall("P93")
def test_what_is_timed_is_built_before_the_budget_counts(monkeypatch):
    """On a device, where the first run of a kernel compiles it; here a CPU stands for one."""
    run, waited = [], []

    def update(params, grads, momentum, *, variant, **options):
        run.append((len(params), str(variant)))
        raise RuntimeError("does not build")

    class Device:
        def __init__(self, device):
            self.device = device

        current_stream = classmethod(lambda kind, device: kind(device))

        def synchronize(self):
            waited.append(self.device)

    monkeypatch.setattr(profiler, "muon_update_", update)
    profiler.build_kernels({(24, 32): (1, 2)}, device=CPU)
    assert run == []
    monkeypatch.setattr(profiler, "streams_of", lambda device: Device)
    profiler.build_kernels({(24, 32): (1, 2)}, device=CPU)
    assert run == [(1, "standard torch by85"), (2, "standard torch by85")], "as a step runs them"
    assert waited == [CPU]
