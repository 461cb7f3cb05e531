"""The profiler times the real update, in order, within its budget, and leaves no trace."""

from __future__ import annotations

import time

import pytest
import torch

from dmuon.planning import cost_cache, profiler

CPU = torch.device("cpu")


@pytest.fixture
def timed(monkeypatch):
    """Shapes and batch sizes in the order in which they are timed, with the number of threads."""
    seen, real = [], profiler._update_of

    def update_of(shape, k, device, options):
        if shape != (256, 256):  # by which the device's rate is found
            seen.append((shape, k, torch.get_num_threads()))
        return real(shape, k, device, options)

    monkeypatch.setattr(profiler, "_update_of", update_of)
    return seen


def test_every_shape_gets_its_first_batch_before_any_gets_its_second(timed):
    work = {(32, 32): (4, 1, 2), (8, 8): (2, 1), (16, 64): (1,)}
    profiler.measure(work, device=CPU, budget_s=5)
    order = [((8, 8), 1), ((16, 64), 1), ((32, 32), 1), ((8, 8), 2), ((32, 32), 2), ((32, 32), 4)]
    assert [one[:2] for one in timed] == order


def test_the_budget_is_kept_and_what_does_not_fit_is_left_out():
    started = time.process_time()  # what neighbours on the machine take does not count
    work = {(16, 16): (1,), (8192, 32768): (1,)}
    timings = profiler.measure(work, device=CPU, budget_s=2.0)
    assert time.process_time() - started < 5
    assert set(timings) == {(16, 16)}
    assert profiler.measure(work, device=CPU, budget_s=0.0) == {}
    assert profiler.measure({}, device=CPU) == {}


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield 2
    torch.set_num_threads(before)


def test_threads_and_random_state_are_left_alone(two_threads, timed):
    state = torch.get_rng_state()
    profiler.measure({(8, 8): (1,)}, device=CPU, budget_s=1)
    assert timed == [((8, 8), 1, two_threads)], "as a step will run"
    assert torch.get_num_threads() == two_threads
    assert torch.equal(torch.get_rng_state(), state)


def test_a_batch_that_does_not_fit_in_memory_is_left_out(monkeypatch, timed):
    real = profiler.muon_update_

    def small_memory(params, *rest, **options):
        if len(params) > 2:
            raise torch.OutOfMemoryError("full")
        real(params, *rest, **options)

    monkeypatch.setattr(profiler, "muon_update_", small_memory)
    timings = profiler.measure({(8, 8): (1, 2, 4, 8)}, device=CPU, budget_s=2)
    assert set(timings[8, 8]) == {1, 2}
    assert [k for _, k, _ in timed] == [1, 2, 4], "8 is not even tried"


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


def test_a_noisy_round_is_measured_again_and_a_calm_one_counts():
    ticks = iter([100, *[100, 200] * 4, 100, *[101] * 8, 102, *[1] * 99])
    timing = profiler._time_batch(lambda: None, lambda f: next(ticks), 1e12)
    assert timing == profiler.Timing(101, 101, 101, 9)


def test_the_first_run_which_may_compile_is_never_the_cost():
    ticks = iter([10**9, 100, 120])
    timing = profiler._time_batch(lambda: None, lambda f: next(ticks), 0.0)
    assert timing == profiler.Timing(100, 100, 100, 1), "one run counts even where the share is spent"


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


RUNS = [
    profiler.NsOptions(),
    profiler.NsOptions(steps=4),
    profiler.NsOptions("classic"),
    profiler.NsOptions((3.0, -4.0, 2.0)),
    profiler.NsOptions((3.0, -4.0, 2.0), 3, torch.float16),
    profiler.NsOptions("you", 4, torch.bfloat16),
    profiler.NsOptions(dtype=torch.float16),
]


@pytest.mark.pitfall("P10")
def test_each_option_is_part_of_the_key():
    keys = [cost_cache.device_key(CPU, options) for options in RUNS]
    assert len(set(keys)) == len(keys)
    for options, key in zip(RUNS, keys, strict=True):
        assert key.dtype == str(options.dtype or torch.float32).removeprefix("torch.")
        assert key.sm_count == 0 and key.device and key.torch == torch.__version__ and len(key.kernels) == 16
    assert keys[0].dtype == "float32" and keys[0] == cost_cache.device_key(CPU, profiler.NsOptions(dtype=torch.float32))
