"""Programs on layouts, with options, equal one process with ``torch.optim.Muon`` and ``torch.optim.AdamW``.

One table: what is trained and how (``programs/unusual.py``), on which ranks and in which residency
(``harness/topologies.py``), with which options. Where not every program is tried with every option, programs take the
options in turn, beginning with another one on each layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count, groupby
from typing import Any

import pytest
import torch
from harness.assertions import about, assert_equal_weights, assert_same_bits
from harness.network import full_state
from harness.oracle import Reference
from harness.pool import RankPool
from harness.small_convnets import CONVNETS
from harness.small_models import CASES as SMALL_MODELS
from harness.topologies import EXCHANGED, LAYOUTS, lay, runtime_of
from harness.toy import build
from programs.left_behind import TOWERS, WAYS
from programs.unusual import KINDS, PROGRAMS, plain_name
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

import dmuon

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
MERGED = 10**6  # bytes: all blocks of a toy model together
Options = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A program on a layout.

    Attributes:
        keep: whole weights stay after forward.
        half: forward and backward in bf16.
        options: of communication where dmuon owns the matrices, of the configuration elsewhere.
        muon: of the optimizer.
    """

    layout: str
    program: str
    keep: bool = False
    half: bool = False
    options: Options = field(default_factory=dict)
    muon: Options = field(default_factory=dict)

    @property
    def resident(self) -> bool:
        """Whether whole weights stay, because that is asked for or because nobody shards them."""
        return self.keep or not any(n in ("shard", "cp") and extent > 1 for n, extent in LAYOUTS[self.layout].dims)


@dataclass(frozen=True)
class Trained:
    """What a rank has at the end; ``orthogonalized`` counts the matrices of each step."""

    weights: dict[str, Tensor]
    orthogonalized: list[int]


def train_all(rank: int, _world: int, cases: Sequence[Case]) -> list[Trained]:
    return [train(rank, case) for case in cases]


def train(rank: int, case: Case) -> Trained:
    print(case, flush=True)
    program, grid = PROGRAMS[case.program], LAYOUTS[case.layout]
    differs = grid.dedicated and "tp" not in case.layout and program.make is build
    model: Any = build(rank) if differs else program.make()  # rank 0's weights become everyone's
    options = {"comm": dmuon.CommOptions(**case.options)} if grid.dedicated else case.options
    policy = BF16 if case.half else None
    laid = lay(case.layout, model, keep=case.keep, mp_policy=policy, split=program.split, **options)
    optimizer = laid.optimizer(**case.muon)
    orthogonalized: list[int] = []

    def before(*_: Any) -> None:
        laid.reduce()
        if grid.dedicated and program.frees and not case.resident and not case.muon:
            assert all(buffer.state.name == "FREED" for buffer in runtime_of(model).buffers)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(lambda *_: orthogonalized.append(optimizer.last_step.ns_matrices))
    dtype = torch.bfloat16 if case.half else torch.float32
    program.loop(laid.model, optimizer, lambda step: program.loss(laid.model, step, laid.part, laid.parts, dtype))
    weights = {plain_name(name): tensor for name, tensor in full_state(laid.network).items()}
    return Trained(weights, orthogonalized)


@cache
def expected(name: str, half: bool) -> dict[str, Tensor]:
    program = PROGRAMS[name]
    model, dtype = program.make(), torch.bfloat16 if half else torch.float32
    program.loop(model, Reference(model, matrix=program.matrix), lambda step: program.loss(model, step, 0, 1, dtype))
    return {plain_name(name): tensor.detach() for name, tensor in model.state_dict().items()}


def check(case: Case, found: list[Trained]) -> None:
    """Every rank has the weights of a single process; each matrix was orthogonalized once a step.

    In bf16 the single process rounds as well, but it sums whole batches. Four steps may then differ by 1e-3 of a
    matrix of Muon's. AdamW's steps are normalised element by element, so that rounding decides the direction of those
    whose gradient is next to nothing; and biases start at zero, and are nothing but such steps.
    """
    assert_same_bits([one.weights for one in found])
    single, matrix = expected(case.program, case.half), PROGRAMS[case.program].matrix
    for name, tensor in single.items():
        rounded = 1e-3 if matrix(name) else 5e-3 if tensor.ndim > 1 else 5e-2
        assert_equal_weights({name: found[0].weights[name]}, {name: tensor}, rounded if case.half else 1e-5)
    assert found[0].weights.keys() == single.keys()
    if case.program in ("steps", "accumulated", "thin matrices"):
        matrices = 15 if case.program == "thin matrices" else 9
        assert [sum(step) for step in zip(*(one.orthogonalized for one in found), strict=True)] == [matrices] * 4


# -- the table --------------------------------------------------------------------------------------------------------

COMM: list[Options] = [
    {},
    {"transport": "broadcast", "prefetch": 2},
    {"transport": "single", "prefetch": 0},
    {"merge_bytes": MERGED},
    {"asynchronous": False},
    {"transport": "single", "merge_bytes": MERGED, "prefetch": 2, "asynchronous": False},
]
SCHEDULES: list[Options] = [
    {},
    {"async_gpu_parallelism": False, "prefetch_count": 0, "small_param_numel_threshold": 0, "chunk_bytes": 3000},
    {"prefetch_count": 3, "small_param_numel_threshold": 0},
    {"async_gpu_parallelism": False, "prefetch_count": 1, "chunk_bytes": 3000},
    {"prefetch_count": 0, "small_param_numel_threshold": 0, "chunk_bytes": 3000},
]

LOOPS = ["cleared, full", "two forwards two backwards", "momentum replaced", "momentum cleared", "momentum zeroed"]
HIDDEN = [f"auxiliary loss by {way}" for way in WAYS]
KEPT_HIDDEN = HIDDEN[1:]
CACHED = [f"keys in a cache, {i}" for i in range(len(TOWERS))]
ALONE = [name for name, program in PROGRAMS.items() if program.alone]
HOOKS = ["gradient hooks", "gradient hooks from before"]
TWICE = "block called twice"


def all_of(layouts: Iterable[str], programs: Iterable[str], **fixed: Any) -> list[Case]:
    return [Case(layout, program, **fixed) for layout in layouts for program in programs]


def in_turn(layouts: Iterable[str], programs: Sequence[str]) -> list[Case]:
    """Each program once on each layout, with options and residencies of whole weights in turn."""
    return [
        Case(layout, program, (i + j) % 2 == 1, options=COMM[(i + 2 * j) % len(COMM)])
        for j, layout in enumerate(layouts)
        for i, program in enumerate(programs)
    ]


QUICK: list[Case] = [
    *all_of(["1d", "1d-3-two-lines", "hsdp-two-lines"], ["steps"]),
    *all_of(["1d-3-two-lines", "tp-two-lines"], ["steps"], keep=True),
    *all_of(["1d"], ["accumulated"], half=True),
    *all_of(["1d"], ["branches", "cleared, full", "two forwards two backwards"]),
    *all_of(["fsdp2-2"], ["scaled"]),
    *all_of(["1d-two-lines"], ["scaled"], muon={"overlap_backward": True}),
    *all_of(["1d"], ["moved", "edited"]),
    *all_of(["1d-two-lines"], ["looked at by one rank"], keep=True),
    *all_of(["1d-two-lines"], ["given gradients"]),
    *all_of(["1d"], ["clipped by torch"]),
    *all_of(["1d-3"], ["clipped"]),
    *all_of(["1d-two-lines"], ["sparse gradients", *HIDDEN, *CACHED[::2]]),
    *all_of(["ddp-2"], KEPT_HIDDEN[2:]),
    *all_of(
        ["1d-two-lines"],
        ["exceptions", "exceptions between", "layers that are attributes", "norms in the loss"],
    ),
    *all_of(["hsdp"], ["accumulated locally", "accumulated in replicas"]),
    *all_of(["1d-two-lines"], ["cleared, none", *HOOKS]),
    *all_of(["1d-two-lines"], ["gradient hooks"], muon={"overlap_backward": True}),
    *all_of(["1d-two-lines"], ["used by some ranks"], keep=True),
    *all_of(["hsdp-two-lines"], ["used by some ranks"], options={"merge_bytes": MERGED}),
    *all_of(["ddp-2"], ["accumulated", "auxiliary loss, accumulated locally"]),
    *in_turn(["ddp-2"], [TWICE, "nested outputs", "parameter used three times", "block input without gradient"]),
    *all_of(["ddp-2"], ["checkpoint reentrant"]),
    *all_of(["hsdp-two-lines"], ["two dtypes"]),
    # Two blocks, of which one tensor-parallel rank has more than the other: both merge them.
    *all_of(["tp-two-lines"], ["steps"], options={"merge_bytes": 7400}),
    *all_of(["fsdp2-tp", "tp-alone"], ["steps"]),
    *all_of(["tp"], ["sequence parallel", "copied matrices"]),
    *(Case("fsdp2-2", "thin matrices", options=options) for options in SCHEDULES[::2]),
    *all_of(["fsdp2-2"], ["steps"], half=True),
    *all_of(["1d"], ["tied layers"]),
    *all_of(["fsdp2-2"], ["ResNet"]),
]
SLOW: list[Case] = [
    *all_of([name for name, grid in LAYOUTS.items() if grid.dedicated and grid.world <= 4], ["steps"]),
    *all_of(["hsdp", "cp", "tp-fsdp"], ["steps"], keep=True),
    *all_of(["hsdp"], ["accumulated"]),
    *all_of(["tp-fsdp"], ["accumulated"], half=True),
    *all_of(["ddp-2"], ["steps"], half=True),
    *all_of(["1d-two-lines", "tp-ddp"], ["accumulated locally"], keep=True),
    *all_of(["tp-ddp"], ["accumulated in replicas"]),
    *in_turn(["1d-two-lines"], KINDS),
    *all_of(["1d-two-lines"], CACHED[1::2]),
    *in_turn(["ddp-2"], KINDS[8:]),
    *(Case("hsdp-two-lines" if i % 2 else "1d-two-lines", TWICE, options=o) for i, o in enumerate(COMM)),
    *(Case(n, p, options=o) for n, p in (("ddp-2", "steps"), ("tp", "accumulated")) for o in COMM[1::2]),
    *in_turn(["1d-two-lines"], ALONE),
    *in_turn(["1d-two-lines"], LOOPS),
    *in_turn(["hsdp-two-lines"], [*LOOPS[:2], *(name for name in ALONE if "replica" in name)]),
    *all_of(["hsdp-two-lines", "tp-fsdp"], ["scaled"], muon={"overlap_backward": True}),
    *all_of(["hsdp"], HOOKS[1:]),
    *all_of(["tp-two-lines"], ["cleared, none", "gradient hooks"]),
    *all_of(["ddp-2"], ["sparse gradients"]),
    *all_of(["tp-two-lines"], HIDDEN[::2]),
    *all_of(["hsdp-two-lines"], KEPT_HIDDEN[1:], keep=True),
    *all_of(["1d-3"], ["clipped by torch"]),
    *all_of(["1d-two-lines"], ["averaged"], keep=True),
    *all_of(["ddp-2", "fsdp2-2"], ["averaged"]),
    *all_of([name for name in EXCHANGED if LAYOUTS[name].world <= 4 and "tp" not in name], ["thin matrices"]),
    *all_of(["fsdp2-tp"], ["ten steps"]),
    *all_of(["tp-two-lines"], ["sequence parallel"]),
    *all_of(["tp-fsdp"], ["copied matrices"]),
    *(Case("fsdp2-tp", "steps", options=options) for options in SCHEDULES[1::2]),
    *all_of(["1d-two-lines"], [*SMALL_MODELS, *CONVNETS]),
]
IN_ONE_CALL = 24  # how many cases; a call has a time limit


def calls(cases: Sequence[Case], mark: Sequence[Any]) -> list[Any]:
    """Cases of one world in one call."""
    found = []
    unlike = [case for i, case in enumerate(cases) if case not in cases[:i]]
    for world, group in groupby(sorted(unlike, key=world_of), key=world_of):
        rest = list(group)
        for number in count(1):
            if rest:
                found.append(pytest.param(world, rest[:IN_ONE_CALL], id=f"{world} ranks, {number}", marks=mark))
            rest = rest[IN_ONE_CALL:]
            if not rest:
                break
    return found


def world_of(case: Case) -> int:
    return LAYOUTS[case.layout].world


@pytest.mark.pitfall("P01", "P04", "P10", "P11", "P12", "P14", "P15", "P16", "P17", "P18", "P19", "P22", "P26", "P34")
@pytest.mark.pitfall("P36", "P37", "P42", "P48", "P53", "P54", "P58", "P66", "P67", "P74", "P83")
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("world", "cases"),
    [*calls(QUICK, ()), *calls([case for case in SLOW if case not in QUICK], [pytest.mark.slow])],
)
def test_programs_equal_one_process(ranks: RankPool, world: int, cases: list[Case]) -> None:
    compare(ranks(world, train_all, cases, timeout=300), cases)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_eight_ranks_of_hsdp_and_tensor_parallelism() -> None:
    pool = RankPool(most=8)
    cases = all_of(["hsdp-tp", "fsdp2-hsdp-tp"], ["steps"])
    try:
        compare(pool(8, train_all, cases, timeout=300), cases)
    finally:
        pool.close()


def compare(results: list[list[Trained]], cases: Sequence[Case]) -> None:
    """With one process; and with each other those that differ in options only, if a sum has no order but one."""
    alike: dict[tuple[str, str, bool], dict[str, Tensor]] = {}
    for case, *found in zip(cases, *results, strict=True):
        with about(case):
            check(case, found)
            if case.layout in ("1d", "1d-two-lines", "hsdp-two-lines", "ddp-2", "tp", "fsdp2-2", "fsdp2-tp"):
                first = alike.setdefault((case.layout, case.program, case.half), found[0].weights)
                assert_same_bits([first, found[0].weights])
