"""Every topology equals a single process with ``torch.optim.Muon`` + ``torch.optim.AdamW``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.assertions import assert_equal_weights, assert_same_bits
from harness.oracle import reference_weights
from harness.pool import RankPool
from harness.topologies import LAYOUTS, lay
from harness.toy import OPTIONS, batch, build
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

import dmuon
from dmuon.check.model import loss_of
from dmuon.check.topologies import full_state
from dmuon.dedicated.dedication import dedications

STEPS = 4


def train(
    rank: int,
    _world: int,
    name: str,
    keep: bool = False,
    micro: int = 1,
    sync: str = "always",
    steps: int = STEPS,
    comm: dict[str, Any] | None = None,
    muon: dict[str, Any] | None = None,
) -> tuple[dict[str, Tensor], int, int]:
    """Weights, matrices orthogonalized here, and matrices owned."""
    laid = lay(name, build(seed=0), keep=keep, comm=dmuon.CommOptions(**(comm or {})))
    model = laid.model
    optimizer = dmuon.Muon(model, **{**OPTIONS, **(muon or {})})
    calls = 0
    for step in range(steps):
        optimizer.zero_grad()
        tokens, targets = laid.mine(batch(step))
        for i, (t, y) in enumerate(zip(tokens.chunk(micro), targets.chunk(micro), strict=True)):
            last = i == micro - 1
            dmuon.set_requires_gradient_sync(model, last or sync != "no_sync")
            dmuon.set_requires_all_reduce(model, last or sync != "no_all_reduce")
            (loss_of(model, t, y) / micro).backward()
        optimizer.step()
        calls += optimizer.last_step.ns_matrices
    return full_state(model), calls, len(dmuon.owned_parameters(model))


@pytest.mark.pitfall("P01", "P04", "P11", "P14")
@pytest.mark.parametrize("keep", [False, True], ids=["reshard", "keep"])
@pytest.mark.parametrize("name", ["1d-4", "hsdp-two-lines", "cp", "tp-two-lines", "tp-ddp"])
def test_steps_equal_single_process(ranks: RankPool, name: str, keep: bool) -> None:
    results = ranks(LAYOUTS[name].world, train, name, keep)
    expected = reference_weights(STEPS)
    for weights, *_ in results:
        assert_equal_weights(weights, expected)
    assert_same_bits([weights for weights, *_ in results])
    owned = results[0][2]
    assert owned == 9
    assert sum(calls for _, calls, _ in results) == STEPS * owned, "every matrix is orthogonalized once a step"


def run_matrix(rank: int, _world: int, name: str, half: bool) -> dict[str, tuple[dict[str, Tensor], int, int]]:
    """Every combination of reshard or keep with one or three micro-batches, in one process group."""
    found = {}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if half else None
    for keep in (False, True):
        for micro in (1, 3):
            laid = lay(name, build(seed=0), keep=keep, mp_policy=policy)
            optimizer = dmuon.Muon(laid.model, **OPTIONS)
            for step in range(STEPS):
                optimizer.zero_grad()
                tokens, targets = laid.mine(batch(step))
                for t, y in zip(tokens.chunk(micro), targets.chunk(micro), strict=True):
                    with torch.autocast("cpu", torch.bfloat16, enabled=half):
                        loss = loss_of(laid.model, t, y) / micro
                    loss.backward()
                optimizer.step()
            masters = {e.master.dtype for e in dedications(laid.model)[0].runtime.entries()}
            assert masters == {torch.float32}
            found[f"keep={keep} micro={micro}"] = full_state(laid.model), 0, 0
    return found


@pytest.mark.pitfall("P11", "P12", "P42")
@pytest.mark.parametrize(
    ("name", "half"),
    [(name, False) for name in ("hsdp", "ddp-2", "tp")]  # 1d: test_trajectory.py
    + [("1d", True)]
    + [pytest.param(name, True, marks=pytest.mark.slow) for name in ("hsdp", "ddp-2", "ddp-4", "tp", "tp-fsdp")]
    + [pytest.param(name, False, marks=pytest.mark.slow) for name in ("ddp-4", "tp-fsdp")],
)
def test_parity_matrix(ranks: RankPool, name: str, half: bool) -> None:
    """In bf16 the reference rounds as well, but it sums whole batches.

    Four steps may then differ by 1e-3 of a matrix; biases start at zero and move by AdamW's normalised steps only.
    """
    results = ranks(LAYOUTS[name].world, run_matrix, name, half, timeout=100)
    expected = reference_weights(STEPS, half)
    for case in results[0]:
        for result in results:
            found = result[case][0]
            vectors = {n for n, t in expected.items() if t.ndim < 2}
            for names, tolerance in ((expected.keys() - vectors, 1e-3), (vectors, 3e-2)):
                limit = tolerance if half else 1e-5
                assert_equal_weights({n: found[n] for n in names}, {n: expected[n] for n in names}, limit)
        assert_same_bits([result[case][0] for result in results])


@pytest.mark.pitfall("P12")
@pytest.mark.parametrize("sync", ["no_sync", "no_all_reduce"])
@pytest.mark.parametrize("keep", [False, True], ids=["reshard", "keep"])
@pytest.mark.parametrize(
    "name",
    ["hsdp", "ddp-2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("hsdp-two-lines", "tp-ddp"))],
)
def test_accumulation_without_reduction_in_between(ranks: RankPool, name: str, keep: bool, sync: str) -> None:
    results = ranks(LAYOUTS[name].world, train, name, keep, 3, sync)
    for weights, *_ in results:
        assert_equal_weights(weights, reference_weights(STEPS))
    assert_same_bits([weights for weights, *_ in results])


OPTION_SETS: list[dict[str, Any]] = [
    {"asynchronous": False},
    {"prefetch": 0},
    {"prefetch": 2},
    {"outstanding_reductions": 1},
    {"outstanding_reductions": 4},
    {"merge_bytes": 2**20},
]


def train_with_all(rank: int, world: int, name: str, keep: bool) -> list[tuple[dict[str, Tensor], int, int]]:
    return [train(rank, world, name, keep, 2, "always", 3, comm) for comm in [{}, *OPTION_SETS]]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "keep"), [("tp", False)])  # other topologies: test_topologies.py
def test_options_of_communication_change_no_bit(ranks: RankPool, name: str, keep: bool) -> None:
    for results in ranks(LAYOUTS[name].world, train_with_all, name, keep, timeout=100):
        first = results[0][0]
        for options, (weights, *_) in zip(OPTION_SETS, results[1:], strict=True):
            for fqn, tensor in first.items():
                assert torch.equal(weights[fqn], tensor), f"{fqn} with {options}"


@pytest.mark.parametrize("transport", ["broadcast", "single"])
@pytest.mark.parametrize("name", ["1d-4", pytest.param("hsdp", marks=pytest.mark.slow), "ddp-2"])
def test_transports_are_exact(ranks: RankPool, name: str, transport: str) -> None:
    for keep in (False, True):
        results = ranks(LAYOUTS[name].world, train, name, keep, 1, "always", STEPS, {"transport": transport})
        for weights, *_ in results:
            assert_equal_weights(weights, reference_weights(STEPS))
        assert_same_bits([weights for weights, *_ in results])


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(400)
@pytest.mark.parametrize("keep", [False, True], ids=["reshard", "keep"])
def test_eight_ranks_of_hsdp_and_tensor_parallelism(keep: bool) -> None:
    pool = RankPool(most=8)
    try:
        results = pool(8, train, "hsdp-tp", keep, timeout=200)
    finally:
        pool.close()
    for weights, *_ in results:
        assert_equal_weights(weights, reference_weights(STEPS))
    assert_same_bits([weights for weights, *_ in results])
    assert sum(calls for _, calls, _ in results) == STEPS * 9
