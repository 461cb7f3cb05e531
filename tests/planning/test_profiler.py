"""The profiler times the real update, in order, within its budget, and leaves no trace."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from dmuon.kernels import Variant
from dmuon.kernels.arithmetic import SplitArithmetic
from dmuon.planning import device_key, profiler

CPU = torch.device("cpu")


@pytest.fixture
def timed(monkeypatch):
    """Shapes and batch sizes in the order in which they are timed, with the number of threads."""
    seen = []
    real = profiler._time_best

    def time_best(shape, k, *rest):
        seen.append((shape, k, torch.get_num_threads()))
        return real(shape, k, *rest)

    monkeypatch.setattr(profiler, "_time_best", time_best)
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


def rivals(monkeypatch, times, wrong=(), options=profiler.NsOptions()):  # noqa: B008
    """Lets ``times`` (by back end and form) decide what is fastest; forms in ``wrong`` compute nonsense."""
    clocked = []

    def update(self, options, variant=None):
        return lambda: clocked.append(variant)

    def clock(function):
        function()
        return times.get((clocked[-1].backend, clocked[-1].method), 1000)

    real = profiler.orthogonalize

    def orthogonalize(x, *, variant=None, **options):
        result = real(x, variant=variant, **options)
        return result * 0.85 if variant is not None and variant.method in wrong else result

    monkeypatch.setattr(profiler._Batch, "update", update)
    monkeypatch.setattr(profiler, "orthogonalize", orthogonalize)
    return lambda: profiler._fastest(profiler._Batch((24, 32), 2, CPU), options, clock, 1e12, 0.0)[0], clocked


def test_the_fastest_variant_is_found_and_small_gains_are_noise(monkeypatch):
    find, tried = rivals(monkeypatch, {("split", "gram"): 500, ("split", "standard"): 970})
    assert (find().backend, find().method) == ("split", "gram")
    assert {(v.backend, v.method) for v in tried} == {(b, m) for b in ("torch", "split") for m in ("gram", "standard")}
    find, _ = rivals(monkeypatch, {("split", "gram"): 970})
    assert (find().backend, find().method) == ("torch", "standard"), "the rule's"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_variant_that_computes_something_else_is_not_chosen_however_fast(monkeypatch, dtype):
    find, _ = rivals(monkeypatch, {("torch", "gram"): 10}, wrong=("gram",), options=profiler.NsOptions(dtype=dtype))
    with pytest.warns(UserWarning, match=r"variant gram r2 torch by85 differs from the standard form by .*; not used"):
        assert find().method == "standard"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_variants_that_compute_the_same_agree(dtype):
    batch = profiler._Batch((48, 80), 2, CPU)
    for method, restarts in (("gram", (2,)), ("standard", ())):
        if method == "gram" and dtype == torch.bfloat16:
            continue
        for backend in ("torch", "split"):
            assert profiler._agrees(batch, profiler.NsOptions(dtype=dtype), Variant(method, restarts, backend, 1))


@pytest.mark.pitfall("P61")
def test_a_variant_whose_singular_values_grow_on_nearly_singular_matrices_does_not_agree(monkeypatch):
    """Reading a whole ``V`` as its transpose shows nowhere else."""
    real = SplitArithmetic.symmetric

    def read_transposed(self, a, b, c=None, **rest):
        return real(self, a, b.mT if a.shape == b.shape else b, c, **rest)

    monkeypatch.setattr(SplitArithmetic, "symmetric", read_transposed)
    batch = profiler._Batch((128, 192), 2, CPU)
    with pytest.warns(UserWarning, match=r"gives singular values up to 1\.[23]\d, the standard form 1\.1\d; not used"):
        assert not profiler._agrees(batch, profiler.NsOptions(dtype=torch.float16), Variant("gram", (2,), "split", 1))


@pytest.mark.parametrize("failure", [RuntimeError("no"), torch.OutOfMemoryError("full")])
def test_a_rival_that_fails_is_left_out(monkeypatch, failure):
    real = profiler.muon_update_

    def update(*arguments, variant=None, **options):
        if variant is not None and variant.method == "gram":
            raise failure
        real(*arguments, variant=variant, **options)

    monkeypatch.setattr(profiler, "muon_update_", update)
    with pytest.warns(UserWarning, match="variant gram r2 torch by85 failed"):
        timings = profiler.measure({(24, 32): (1,)}, device=CPU, budget_s=3)
    assert Variant.parse(timings[24, 32][1].variant).method == "standard"


@pytest.mark.pitfall("P93")
def test_no_rival_is_tried_that_would_take_more_than_its_share():
    batch = profiler._Batch((24, 32), 2, CPU)
    for limit_ns, expected in ((10.0, False), (1e12, True)):
        assert profiler._fastest(batch, profiler.NsOptions(), lambda f: 1, limit_ns, 1.0)[1] == expected


@pytest.mark.pitfall("P93")
def test_whatever_may_be_tried_is_built_before_the_budget_counts(monkeypatch):
    """On a device, where the first run of a kernel compiles it; here a CPU stands for one."""
    run, waited = [], []
    real = profiler.muon_update_

    def update(*arguments, variant=None, **options):
        run.append(str(variant))
        if variant.method == "gram":
            raise RuntimeError("does not build")
        real(*arguments, variant=variant, **options)

    class Device:
        def __init__(self, device):
            self.device = device

        current_stream = classmethod(lambda kind, device: kind(device))

        def synchronize(self):
            waited.append(self.device)

    monkeypatch.setattr(profiler, "muon_update_", update)
    profiler.build_kernels({(24, 32): (2,)}, device=CPU)
    assert run == []
    monkeypatch.setattr(profiler, "streams_of", lambda device: Device)
    profiler.build_kernels({(24, 32): (2,)}, device=CPU)
    assert set(run) == {
        f"{form} by85" for form in ("standard torch", "standard split", "gram r2 torch", "gram r2 split")
    }
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
def test_each_option_is_part_of_the_key_and_read_from_it():
    keys = [device_key.device_key(CPU, options) for options in RUNS]
    assert len(set(keys)) == len(keys)
    for options, key in zip(RUNS, keys, strict=True):
        again = device_key.options_of(key, "x")
        assert device_key.device_key(CPU, again) == key
        assert again.dtype == (options.dtype or torch.float32)
        assert key.sm_count == 0 and key.device and key.torch == torch.__version__ and len(key.kernels) == 16
    assert keys[0].dtype == "float32" and keys[0] == device_key.device_key(CPU, profiler.NsOptions(dtype=torch.float32))


@pytest.mark.pitfall("P50")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float99"}, "cost cache x: field 'key.dtype' is 'float99'.*dmuon-profile"),
        ({"dtype": "nn"}, "field 'key.dtype' is 'nn'"),
        ({"coefficients": "unheard of"}, "cost cache x: field 'key.coefficients' or 'key.steps'.*unheard of"),
        ({"coefficients": "(1, 2"}, "field 'key.coefficients'"),
        ({"coefficients": "(__import__('os'),)"}, "field 'key.coefficients'"),
        ({"coefficients": "you", "steps": 9}, "'key.steps'.*9"),
    ],
)
def test_a_key_of_no_run_is_refused_by_field(changes, message):
    with pytest.raises(device_key.CostCacheError, match=message):
        device_key.options_of(replace(device_key.device_key(CPU, profiler.NsOptions()), **changes), "x")
