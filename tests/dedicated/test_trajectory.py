"""Training equals a single process with ``torch.optim.Muon`` + ``torch.optim.AdamW``, on whatever it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch
from harness.assertions import about, assert_equal_weights, assert_same_bits
from harness.network import full_state, loss_of
from harness.oracle import reference_weights
from harness.pool import RankPool
from harness.topologies import LAYOUTS, lay, runtime_of
from harness.toy import batch, build
from programs.unusual import KINDS, Variant, plain_names, reference_variant
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

import dmuon

Options = dict[str, Any]
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True)
class Case:
    """How a toy is trained.

    Attributes:
        micro: batches a step.
        sync: what all but the last of them leave out: "no_sync" any reduction, "no_all_reduce" the one of replicas.
        half: forward and backward in bf16.
        kind: of the forward, if it is unusual.
        comm: options of communication.
    """

    layout: str
    keep: bool = False
    micro: int = 1
    sync: str = "always"
    half: bool = False
    kind: str = ""
    steps: int = 4
    comm: Options = field(default_factory=dict)

    def expected(self) -> dict[str, Tensor]:
        return reference_variant(self.kind) if self.kind else reference_weights(self.steps, self.half)


@dataclass(frozen=True)
class Trajectory:
    """What a rank has at the end; ``orthogonalized`` counts the matrices of all steps."""

    weights: dict[str, Tensor]
    orthogonalized: int
    owned: int
    masters: set[torch.dtype]


def train_all(rank: int, _world: int, cases: Sequence[Case]) -> list[Trajectory]:
    return [train(rank, case) for case in cases]


def train(rank: int, case: Case) -> Trajectory:
    seed = 0 if "tp" in case.layout else rank  # different on purpose: rank 0's weights become everyone's
    model = Variant(case.kind) if case.kind else build(seed)
    policy = BF16 if case.half else None
    laid = lay(case.layout, model, keep=case.keep, mp_policy=policy, comm=dmuon.CommOptions(**case.comm))
    runtime = runtime_of(model)
    rows = any(name in ("shard", "cp") and extent > 1 for name, extent in LAYOUTS[case.layout].dims)
    resident = case.keep or not rows
    optimizer = laid.optimizer()
    orthogonalized = 0
    for step in range(case.steps):
        optimizer.zero_grad()
        tokens, targets = laid.mine(batch(step))
        for i, part in enumerate(zip(tokens.chunk(case.micro), targets.chunk(case.micro), strict=True)):
            last = i == case.micro - 1
            dmuon.set_requires_gradient_sync(model, last or case.sync != "no_sync")
            dmuon.set_requires_all_reduce(model, last or case.sync != "no_all_reduce")
            (loss_of(model, *part, torch.bfloat16 if case.half else torch.float32) / case.micro).backward()
        assert resident or all(buffer.state.name == "FREED" for buffer in runtime.buffers)
        optimizer.step()
        orthogonalized += optimizer.last_step.ns_matrices
    masters = {entry.master.dtype for entry in runtime.matrices()}
    if case.kind:
        for buffer in runtime.buffers:
            buffer.free()  # also what the last step published: nobody may still use it
            assert buffer.buffer_nbytes == 0
        assert resident or not any(buffer.users for buffer in runtime.buffers)
    return Trajectory(plain_names(full_state(model)), orthogonalized, len(dmuon.owned_parameters(model)), masters)


def check(results: list[list[Trajectory]], cases: Sequence[Case]) -> None:
    """Every rank has the weights of a single process; each matrix was orthogonalized once a step.

    In bf16 the single process rounds as well, but it sums whole batches. Four steps may then differ by 1e-3 of a
    matrix; biases start at zero and move by AdamW's normalised steps only.
    """
    for case, *found in zip(cases, *results, strict=True):
        with about(case):
            assert_same_bits([one.weights for one in found])
            weights, expected = found[0].weights, case.expected()
            vectors = {name for name, tensor in expected.items() if tensor.ndim < 2}
            for names, tolerance in ((expected.keys() - vectors, 1e-3), (vectors, 3e-2)):
                part = {name: tensor for name, tensor in weights.items() if (name in vectors) == (names is vectors)}
                limit = tolerance if case.half else 1e-5
                assert_equal_weights(part, {name: expected[name] for name in names}, limit)
            assert all(one.masters == {torch.float32} for one in found)
            if not case.kind:
                assert [one.owned for one in found] == [9] * len(found)
                total = sum(one.orthogonalized for one in found)
                assert total == 9 * case.steps, "every matrix is orthogonalized once a step, not once a micro-batch"


BOTH = (False, True)  # reshard, keep


def cases(layouts: Sequence[str], slow: bool = False, **choices: Sequence[Any]) -> list[Any]:
    """One item a layout: every combination of ``choices`` on it."""
    about_all = "-".join(f"{name}={','.join(map(str, values))}" for name, values in choices.items() if values != BOTH)
    return [
        pytest.param(
            [Case(layout, **dict(zip(choices, chosen, strict=True))) for chosen in product(*choices.values())],
            id=f"{layout} {about_all}",
            marks=[pytest.mark.slow] if slow else [],
        )
        for layout in layouts
    ]


WITHIN = ("no_sync", "no_all_reduce")
TRANSPORTS = ({"transport": "broadcast"}, {"transport": "single"})


@pytest.mark.pitfall("P01", "P04", "P11", "P12", "P14", "P42", "P53")
@pytest.mark.parametrize(
    "cases",
    [
        *cases(["1d", "1d-3-two-lines"], keep=BOTH, steps=[5]),
        *cases(["1d-1", "1d-1-two-lines", "1d-two-lines", "1d-3", "1d-4-two-lines"], slow=True, keep=BOTH, steps=[5]),
        *cases(["hsdp-two-lines"], keep=BOTH),
        *cases(["tp-two-lines"], keep=[True]),
        *cases(["tp-two-lines"], slow=True, keep=[False]),
        *cases(["1d-4", "cp", "tp-ddp"], slow=True, keep=BOTH),
        *cases(["ddp-2"], keep=[False], micro=[1, 3]),
        *cases(["ddp-2"], slow=True, keep=[True], micro=[1, 3]),
        *cases(["hsdp", "ddp-4", "tp", "tp-fsdp"], slow=True, keep=BOTH, micro=[1, 3]),
        *cases(["1d"], keep=BOTH, micro=[3], half=[True]),
        *cases(["1d"], slow=True, keep=BOTH, micro=[1], half=[True]),
        *cases(["hsdp", "ddp-2", "ddp-4", "tp", "tp-fsdp"], slow=True, keep=BOTH, micro=[1, 3], half=[True]),
        *cases(["1d", "1d-two-lines"], slow=True, keep=BOTH, micro=[3], sync=["always", "no_sync"], steps=[5]),
        *cases(["hsdp"], keep=[False], micro=[3], sync=WITHIN),
        *cases(["hsdp"], slow=True, keep=[True], micro=[3], sync=WITHIN),
        *cases(["hsdp-two-lines", "ddp-2", "tp-ddp"], slow=True, keep=BOTH, micro=[3], sync=WITHIN),
        *cases(["ddp-2"], keep=[False], comm=TRANSPORTS),
        *cases(["ddp-2"], slow=True, keep=[True], comm=TRANSPORTS),
        *cases(["1d-4", "hsdp"], slow=True, keep=BOTH, comm=TRANSPORTS),
    ],
)
def test_steps_equal_single_process(ranks: RankPool, cases: list[Case]) -> None:
    check(ranks(LAYOUTS[cases[0].layout].world, train_all, cases, timeout=100), cases)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(400)
@pytest.mark.parametrize("keep", BOTH, ids=["reshard", "keep"])
def test_eight_ranks_of_hsdp_and_tensor_parallelism(keep: bool) -> None:
    pool = RankPool(most=8)
    cases = [Case("hsdp-tp", keep)]
    try:
        check(pool(8, train_all, cases, timeout=200), cases)
    finally:
        pool.close()


# -- unusual forwards ---------------------------------------------------------------------------------------------

MERGED = 10**6  # bytes: all blocks of a toy model together
TELLING = [
    "block called twice",
    "one call without backward",
    "nested outputs",
    "skipped block",
    "branches",
    "block input without gradient",
    "checkpoint reentrant",
    "checkpoint several blocks",
]
OPTION_SETS: list[Options] = [
    {"transport": "broadcast", "prefetch": 2, "outstanding_reductions": 4},
    {"transport": "single", "prefetch": 0, "outstanding_reductions": 1},
    {"merge_bytes": MERGED},
    {"asynchronous": False},
]
FORWARDS: list[tuple[str, bool, Options, list[str]]] = [
    *((name, keep, {}, KINDS) for name in ("1d-two-lines", "hsdp") for keep in BOTH),
    ("1d-two-lines", False, {"merge_bytes": MERGED, "transport": "single", "prefetch": 2}, TELLING),
    ("1d-two-lines", True, {"merge_bytes": MERGED, "prefetch": 0, "asynchronous": False}, TELLING),
    *((name, False, {}, ["plain", "branches"]) for name in ("1d-3", "1d-3-two-lines")),
    ("ddp-4", False, {}, KINDS),
    *((name, i % 2 == 0, comm, TELLING) for name in ("hsdp", "1d") for i, comm in enumerate(OPTION_SETS)),
]
QUICK_FORWARDS = [
    ("ddp-2", False, {"transport": "single", "outstanding_reductions": 1}, TELLING),
    ("1d", False, {}, ["plain", "branches"]),
]


@pytest.mark.pitfall("P15", "P18", "P19", "P58")
@pytest.mark.parametrize(
    ("name", "keep", "comm", "kinds"),
    [
        *QUICK_FORWARDS,
        *(pytest.param(*item, marks=pytest.mark.slow) for item in FORWARDS if item not in QUICK_FORWARDS),
    ],
)
def test_unusual_forwards_equal_single_process(
    ranks: RankPool, name: str, keep: bool, comm: Options, kinds: list[str]
) -> None:
    cases = [Case(name, keep, kind=kind, steps=3, comm=comm) for kind in kinds]
    check(ranks(LAYOUTS[name].world, train_all, cases, timeout=100), cases)


# -- options change nothing ---------------------------------------------------------------------------------------

SYNCHRONOUS: list[Options] = [{}, {"asynchronous": False}]
VARIED: list[Options] = [
    *SYNCHRONOUS,
    {"prefetch": 0},
    {"prefetch": 2, "outstanding_reductions": 4},
    {"outstanding_reductions": 1},
    {"merge_bytes": MERGED},
    {"transport": "single"},
    {"transport": "broadcast"},
    {"transport": "single", "merge_bytes": MERGED, "prefetch": 2, "asynchronous": False},
]
REPEATED = ["block called twice", "checkpoint reentrant"]


@pytest.mark.slow
@pytest.mark.pitfall("P10", "P26")
@pytest.mark.parametrize(
    ("name", "keep", "kinds", "varied"),
    [
        *((name, False, REPEATED, VARIED) for name in ("hsdp-two-lines", "ddp-2")),
        ("tp", False, [""], VARIED),
        *((name, keep, [""], SYNCHRONOUS) for name, keep in (("1d", True), ("hsdp", False), ("cp", True))),
    ],
)
def test_options_of_communication_change_no_bit(
    ranks: RankPool, name: str, keep: bool, kinds: list[str], varied: list[Options]
) -> None:
    """Two ranks on each lane: whatever the order of a sum, it is the same one."""
    micro = 2 if name == "tp" else 1
    cases = [Case(name, keep, micro, kind=kind, steps=3, comm=comm) for kind in kinds for comm in varied]
    for found in ranks(LAYOUTS[name].world, train_all, cases, timeout=100):
        for case, one, first in zip(cases, found, [f for f in found[:: len(varied)] for _ in varied], strict=True):
            with about(case):
                assert_same_bits([first.weights, one.weights])
