"""``dmuon.Muon`` on models that torch sharded or replicated: equal to a single process, each matrix once."""

from __future__ import annotations

import copy
import importlib
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness.assertions import assert_close, assert_equal_weights
from harness.dtensors import give, no_whole_tensors, noise, parameter, placements_of, whole
from harness.hand_laid import Weights
from harness.network import Block, Network, Size, full_state, is_matrix, loss_of, shard
from harness.on_ranks import assert_same_over_ranks, on_ranks, over_ranks
from harness.oracle import Reference, Twin, reference_weights
from harness.pool import RankPool
from harness.topologies import EXCHANGED, LAYOUTS, Laid, lay, orthogonalized
from harness.toy import OPTIONS, batch, build
from harness.traffic import Amount, Traffic
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import dmuon
from dmuon import create_dtensor_config
from dmuon.kernels.newton_schulz import stages
from dmuon.layout.matrices import travels
from dmuon.report.accounting import expected_exchange

storage = importlib.import_module("dmuon.kernels.device")

LENGTHS = pytest.mark.parametrize("steps", [5, pytest.param(20, marks=pytest.mark.slow)])


class ThinBlock(Block):
    """With matrices of one row and of one column."""

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self.gate = nn.Linear(size.width, 1, bias=False)
        self.lift = nn.Linear(1, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.lift(self.gate(x))


def toy(name: str) -> Network:
    """With thin matrices, except where tensor parallelism leaves them whole on every rank."""
    return build() if "tp" in name else build(block=ThinBlock)


def matrices(name: str) -> int:
    return 9 if "tp" in name else 15


def expected(thin: bool, steps: int) -> dict[str, Tensor]:
    return reference_weights(steps, matrix=is_matrix, block=ThinBlock if thin else Block)


# -- trajectories ---------------------------------------------------------------------------------------------------


def run(laid: Laid, steps: int, **options: Any) -> tuple[dict[str, Tensor], list[int]]:
    """Weights after ``steps``, whole, and matrices that this rank orthogonalized in each."""
    calls = orthogonalized(laid.optimizer(**options), laid.backward, steps)
    return full_state(laid.network), calls


def check(weights: dict[str, Tensor], calls: list[int], name: str) -> None:
    """Equal to a single process, the same bits on all ranks, and every matrix orthogonalized once a step over all."""
    assert_equal_weights(weights, expected("tp" not in name, len(calls)))
    assert_same_over_ranks(weights)
    assert [over_ranks(of_step) for of_step in calls] == [matrices(name)] * len(calls)


def trajectory(_rank: int, _world: int, name: str, steps: int) -> None:
    check(*run(lay(name, toy(name)), steps), name)


SMALL = [name for name in EXCHANGED if LAYOUTS[name].world <= 4]
QUICK = ("fsdp2-2", "fsdp2-tp", "tp-alone", "replicate-fsdp")


@pytest.mark.pitfall("P01", "P04", "P11", "P14")
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("name", "steps"),
    [
        *((name, 5) for name in QUICK),
        *(pytest.param(name, 10, marks=pytest.mark.slow) for name in SMALL if name != "fsdp2-2"),
        pytest.param("fsdp2-2", 50, marks=pytest.mark.slow),
    ],
)
def test_steps_equal_single_process(ranks: RankPool, name: str, steps: int) -> None:
    ranks(LAYOUTS[name].world, trajectory, name, steps, timeout=200 if steps == 50 else 60)


def forget() -> None:
    """What was remembered of this CPU."""
    stages.cache_clear()
    storage.carrier_dtype.cache_clear()


def bf16_on_unlike_cpus(rank: int, _world: int, name: str, dtype: Any) -> None:
    """Only the last rank's CPU multiplies bf16: updates travel as it all the same."""
    multiplies = storage.cpu_multiplies_bf16
    storage.cpu_multiplies_bf16 = lambda: rank == _world - 1
    forget()
    try:
        weights, calls = run(lay(name, toy(name)), 3, ns_dtype=dtype)
    finally:
        storage.cpu_multiplies_bf16 = multiplies
        forget()
    assert_same_over_ranks(weights)
    assert [over_ranks(of_step) for of_step in calls] == [matrices(name)] * 3
    start, exact = full_state(toy(name)), expected("tp" not in name, 3)
    for key, weight in weights.items():
        change = (exact[key] - start[key]).norm()
        assert (weight - exact[key]).norm() <= 0.1 * change, key


@pytest.mark.parametrize(
    ("name", "dtype"), [("fsdp2-2", "mixed"), ("fsdp2-2", torch.bfloat16), ("tp", "mixed"), ("1d", "mixed")]
)
def test_ranks_of_which_one_multiplies_bf16_exchange_it(ranks: RankPool, name: str, dtype: Any) -> None:
    ranks(LAYOUTS[name].world, bf16_on_unlike_cpus, name, dtype)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(400)
def test_eight_ranks_of_hsdp_and_tensor_parallelism() -> None:
    pool = RankPool(most=8)
    try:
        pool(8, trajectory, "fsdp2-hsdp-tp", 5, timeout=300)
    finally:
        pool.close()


def half_reference(world: int, steps: int) -> dict[str, Tensor]:
    """One process with fp32 weights that computes every rank's part of a batch with bf16 copies of them."""
    model = build()
    optimizer = Reference(model)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world):
            half = copy.deepcopy(model).to(torch.bfloat16)
            half.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(half, *shard(batch(step), rank, world))
            loss.backward()
            for param, rounded in zip(model.parameters(), half.parameters(), strict=True):
                assert rounded.grad is not None
                part = rounded.grad.float() / world
                param.grad = part if param.grad is None else param.grad + part
        optimizer.step()
    return {n: p.detach().clone() for n, p in model.state_dict().items()}


@pytest.mark.pitfall("P42")
@pytest.mark.parametrize(("world", "name"), [(2, "fsdp2-2"), (4, "fsdp2-hsdp")])
@on_ranks()
def test_half_precision_equals_a_single_process_that_rounds_as_well(rank: int, world: int, name: str) -> None:
    """Matrices within what bf16 sums in another order make of them, biases, which start at zero, of AdamW as well."""
    steps = 4
    single = half_reference(world, steps)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        weights, _ = run(lay(name, build(), mp_policy=policy), steps)
    assert {t.dtype for t in weights.values()} == {torch.float32}
    vectors = {n for n, t in single.items() if t.ndim < 2}
    for names, tolerance in ((single.keys() - vectors, 3e-4), (vectors, 1e-2)):
        assert_equal_weights({n: weights[n] for n in names}, {n: single[n] for n in names}, tolerance)
    assert_same_over_ranks(weights)


# -- traffic --------------------------------------------------------------------------------------------------------


TRAFFIC = {
    2: ["fsdp2-2", "tp-alone", "ddp", "replicate-fsdp"],
    3: ["fsdp2-3"],
    4: ["fsdp2-4", "fsdp2-hsdp", "fsdp2-tp", "cp-groups"],
}


@pytest.mark.pitfall("P13")
@pytest.mark.parametrize(
    ("world", "packed"),
    [(2, False), (3, True), (4, True), *(pytest.param(w, w == 2, marks=pytest.mark.slow) for w in (2, 3, 4))],
)
@on_ranks()
def test_a_step_is_one_vote_and_the_exchanges_that_the_layout_needs(rank: int, world: int, packed: bool) -> None:
    """Of the second one."""
    options = {} if packed else {"small_param_numel_threshold": 0, "chunk_bytes": 2000}
    for name in TRAFFIC[world]:
        if name == "ddp" and not packed:
            continue
        laid = lay(name, toy(name), **options)
        optimizer = laid.optimizer()
        for step in range(2):
            optimizer.zero_grad()
            laid.backward(step)
            with no_whole_tensors(), Traffic() as traffic:
                optimizer.step()
        exchanged = [r for r in optimizer._rounds if r.exchanged]
        each = 0 if name in ("ddp", "replicate-fsdp") else 2  # owners have whole matrices there
        assert len(exchanged) == 1 if packed else len(exchanged) > 1, f"{name}: {len(exchanged)} rounds"
        counts = {"allreduce_": 1, "alltoall_base_": each * len(exchanged)}
        held = list(zip(optimizer._exchange.params, optimizer._exchange.owners, strict=True))
        if name in ("ddp", "replicate-fsdp", "fsdp2-hsdp", "cp-groups"):  # what one copy has goes on to the others
            of_rank = [
                {parcel.spread.source(rank, parcel.owner) for parcel in r.parcels if rank in parcel.spread.parts}
                for r in exchanged
            ]
            counts["broadcast_"] = sum(map(len, of_rank))
            assert counts["broadcast_"] <= len(held), f"{name}: at most one of each owner in a round"
        assert traffic.operations() == {what: count for what, count in counts.items() if count}, name
        rounds = [
            ([getattr(parcel, way) for parcel in r.parcels], r.domain.position)
            for r in exchanged
            for way in ("to_owner", "from_owner")
        ]
        assert sum(travels(routes) for routes, _ in rounds) == each * len(exchanged), name
        received = traffic.by_operator().get("alltoall_base_", Amount()).nbytes
        assert received == 4 * sum(sum(route.numel_in(at).values()) for routes, at in rounds for route in routes), name
        received += traffic.by_operator().get("broadcast_", Amount()).nbytes - expected_exchange(optimizer).copied
        local = [(p.numel(), p._local_tensor.numel() if isinstance(p, DTensor) else p.numel(), o) for p, o in held]
        assert received == 4 * sum(n - mine if owner == rank else mine for n, mine, owner in local), name


# -- the schedule ---------------------------------------------------------------------------------------------------

SCHEDULES: list[dict[str, Any]] = [
    {
        "async_gpu_parallelism": together,
        "prefetch_count": prefetch,
        "small_param_numel_threshold": small,
        "chunk_bytes": nbytes,
    }
    for (small, nbytes), together, prefetch in itertools.product(
        ((65536, 2**28), (0, 3000), (0, 2**28), (65536, 3000)), (True, False), (0, 1, 3)
    )
]


@pytest.mark.parametrize(
    ("world", "name", "schedules"),
    [
        (2, "fsdp2-2", range(0, 12, 3)),
        *(
            pytest.param(world, name, range(start, len(SCHEDULES), step), marks=pytest.mark.slow)
            for world, name, start, step in ((2, "fsdp2-2", 0, 1), (4, "fsdp2-tp", 0, 5), (4, "fsdp2-hsdp", 1, 5))
        ),
    ],
)
@on_ranks(timeout=100)
def test_the_schedule_changes_no_bit(rank: int, world: int, name: str, schedules: list[int]) -> None:
    first, *others = [run(lay(name, toy(name), **SCHEDULES[i]), 2) for i in schedules]
    assert_equal_weights(first[0], expected("tp" not in name, 2))
    for number, (weights, calls) in zip(schedules[1:], others, strict=True):
        assert calls == first[1]
        for fqn, tensor in first[0].items():
            assert torch.equal(weights[fqn], tensor), f"{fqn} with {SCHEDULES[number]}"


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@on_ranks(3)
def test_ranks_that_share_some_matrices_with_some_ranks(rank: int, world: int, prefetch: int) -> None:
    """Two groups over ranks 0 to 2, and between them matrices that only ranks 0 and 1 share."""
    everyone, two = (DeviceMesh("cpu", list(range(n))) for n in (3, 2))
    shapes = {"a": (9, 5), "b": (5, 5), "c": (7, 4), "d": (8, 3), "e": (6, 6)}
    meshes = {"a": everyone, "b": two, "c": two, "d": everyone, "e": everyone}
    weights = Weights()
    groups: list[dict[str, Any]] = []
    for names in ("ab", "c", "d", "e"):
        mine = [name for name in names if rank < 2 or meshes[name] is everyone]
        params = [weights.shard(ord(n), shapes[n], meshes[n], [Shard(0)]) for n in mine]
        groups.append({"params": params, "use_muon": True})
    if rank == 2:
        groups[1]["params"] = [nn.Parameter(torch.zeros(2, 2))]  # groups are counted alike on all ranks
    optimizer = weights.optimizer(create_dtensor_config(costs="flops", prefetch_count=prefetch), groups)
    weights.train(optimizer, 3)
    weights.check(optimizer)
    assert over_ranks(optimizer.last_step.ns_matrices) == 5


# -- any placement --------------------------------------------------------------------------------------------------

SHAPES = [(12, 8), (1, 9), (7, 1), (5, 3), (2, 11), (1, 1), (3, 13)]
GRADIENTS = 2


def update_everywhere(world: int, scale: float = 1.0) -> None:
    """Every shape on every placement, in one optimizer: the sum of two updates, as weights that began at zero."""
    weights = Weights(decay=0.0)
    for extents, placements in placements_of(world, 2):
        mesh = init_device_mesh("cpu", extents)
        for i, shape in enumerate(SHAPES):
            weights.shard(i, shape, mesh, placements, scale=0.0)
    optimizer = weights.optimizer(create_dtensor_config(costs="flops", chunk_bytes=1000))
    for _ in range(GRADIENTS):
        weights.step(optimizer, weights.give(scale))
    weights.check(optimizer if scale == 1.0 else None)
    assert over_ranks(optimizer.last_step.ns_matrices) == len(weights.params)


@pytest.mark.pitfall("P04", "P14", "P53")
@pytest.mark.parametrize("world", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
@on_ranks()
def test_the_update_does_not_depend_on_the_layout(rank: int, world: int) -> None:
    update_everywhere(world)


@pytest.mark.pitfall("P35")
@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e15, 1e30])
@on_ranks(2)
def test_the_scale_of_gradients_does_not_matter(rank: int, world: int, scale: float) -> None:
    update_everywhere(world, scale)


@pytest.mark.pitfall("P23")
@on_ranks(2)
def test_momentum_is_fp32_or_wider_whatever_the_parameter_is(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    twin = Twin([noise(1, 9, 6)])
    half, wide = (parameter(noise(1, 9, 6).to(dtype), mesh, [Shard(0)]) for dtype in (torch.bfloat16, torch.float64))
    optimizer = dmuon.Muon([half, wide], distributed_config=create_dtensor_config(costs="flops"), **OPTIONS)
    for step in range(2):
        grad = noise(2 + step, 9, 6).bfloat16()
        give(half, grad)
        give(wide, grad.double())
        optimizer.step()
        twin.step([grad.float()])
    momenta = [optimizer.state[p]["momentum_buffer"] for p in (half, wide)]
    assert [momentum.dtype for momentum in momenta] == [torch.float32, torch.float64]
    assert_close(whole(momenta[0]), twin.momentum(0), "momentum of bf16", 1e-6)
    assert_close(whole(wide), twin.weights()[0], "fp64 beside bf16")


# -- gradients ------------------------------------------------------------------------------------------------------


UNUSED = [((12, 8), Shard(0)), ((12, 8), Shard(0)), ((12, 8), Shard(0)), ((5, 5), Shard(1)), ((4, 6), Replicate())]


@pytest.mark.pitfall("P19", "P48")
@pytest.mark.parametrize("rest", [0, 1])
@on_ranks(2)
def test_a_rank_without_gradients_takes_part(rank: int, world: int, rest: int) -> None:
    """Parameter 1 is unused everywhere, 2 and 3 on one rank, whose part of the gradient counts as zero."""
    mesh = init_device_mesh("cpu", (world,))
    weights = Weights()
    for i, (shape, placement) in enumerate(UNUSED):
        weights.shard(i, shape, mesh, [placement])
    plain = nn.Parameter(noise(50, 3, 4))
    optimizer = weights.optimizer(create_dtensor_config(costs="flops"), [*weights.params, plain])
    weights.train(optimizer, 1)
    for _ in range(2):
        grads = weights.give()
        weights.params[1].grad = grads[1] = None
        for i in (2, 3):
            if rank == rest:
                weights.params[i].grad = None
            grads[i].chunk(2, UNUSED[i][1].dim)[rest].zero_()
        weights.step(optimizer, grads)
    weights.check(optimizer)
    assert torch.equal(plain, noise(50, 3, 4)) and not optimizer.state[plain]["momentum_buffer"].any()


@pytest.mark.pitfall("P38")
@on_ranks(2)
def test_a_nan_stays_in_its_matrix_and_a_zero_gradient_is_zero(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    bad = [parameter(noise(i, 6, 4), mesh, [Shard(0)]) for i in range(2)]
    good = Weights()
    for i in (2, 3):
        good.shard(i, (6, 4), mesh, [Shard(0)])
    optimizer = good.optimizer(create_dtensor_config(costs="flops"), [*bad, *good.params])
    give(bad[0], torch.zeros(6, 4))
    give(bad[1], noise(11, 6, 4).index_fill_(0, torch.tensor([5]), torch.nan))
    good.train(optimizer, 1)
    good.check(optimizer)
    group = optimizer.param_groups[0]
    assert_close(whole(bad[0]), noise(0, 6, 4) * (1 - group["lr"] * group["weight_decay"]), "a zero gradient", 1e-6)
    assert whole(bad[1]).isnan().all()
    found: list[Any] = [None] * world
    dist.all_gather_object(found, optimizer.last_step.nonfinite)
    assert sorted(name for names in found for name in names) == ["parameter 1 of group 0"]


# -- process groups -------------------------------------------------------------------------------------------------


@pytest.mark.pitfall("P37")
@pytest.mark.parametrize("lonely", [0, 1])
@on_ranks(2)
def test_a_rank_may_have_a_matrix_of_its_own(rank: int, world: int, lonely: int) -> None:
    weights = Weights()
    weights.shard(1, (7, 5), init_device_mesh("cpu", (world,)), [Shard(0)])
    if rank == lonely:
        weights.add(2, (4, 3))
    optimizer = weights.optimizer(create_dtensor_config(costs="flops"))
    weights.train(optimizer, 1)
    weights.check(optimizer)


# -- groups that change, and both residencies -----------------------------------------------------------------------


def is_owned(name: str) -> bool:
    return name.startswith("blocks.1.") and is_matrix(name)


@pytest.mark.parametrize("world", [2, 3])
@LENGTHS
@on_ranks()
def test_one_model_may_mix_both_residencies(rank: int, world: int, steps: int) -> None:
    """The matrices of one block are dmuon's, those of the others are FSDP2's."""
    model = toy("mixed")
    mesh = init_device_mesh("cpu", (world,))
    dmuon.dedicate_params(model, mesh, select=lambda fqn, *_: is_owned(fqn), costs="flops")
    for module in (*model.blocks, model):
        dmuon.fully_shard(module, mesh=mesh)
    owned, *rest = dmuon.param_groups(model)
    exchanged = [p for name, p in model.named_parameters() if is_matrix(name) and not is_owned(name)]
    ids = {id(p) for p in exchanged}
    for group in rest:
        group["params"] = [p for p in group["params"] if id(p) not in ids]
    optimizer = dmuon.Muon(
        [owned, {"params": exchanged, "use_muon": True}, *rest],
        distributed_config=create_dtensor_config(costs="flops"),
        **OPTIONS,
    )
    calls = orthogonalized(optimizer, lambda step: loss_of(model, *shard(batch(step), rank, world)).backward(), steps)
    check(full_state(model), calls, "mixed")
    assert len(exchanged) == 10


CHANGING = [(9, 5), (9, 5), (4, 7), (6, 6), (3, 8)]


@on_ranks(3)
def test_changed_groups_are_assigned_anew_and_momentum_stays(rank: int, world: int) -> None:
    """Begin with parameters 0 and 1, add 2 in a group and 3 to a list, then put 4 in the place of 0."""
    mesh = init_device_mesh("cpu", (world,))
    weights = Weights()
    params = [weights.shard(i, shape, mesh, [Shard(i % 2)]) for i, shape in enumerate(CHANGING)]
    optimizer = weights.optimizer(create_dtensor_config(costs="flops"), params[:2])
    alive = {0, 1}
    for step in range(8):
        if step == 2:
            optimizer.add_param_group({"params": [params[2]], "use_muon": True})
            alive = {0, 1, 2}
        if step == 4:
            optimizer.param_groups[1]["params"].append(params[3])
            alive = {0, 1, 2, 3}
        if step == 6:
            optimizer.param_groups[0]["params"][0] = params[4]
            alive = {1, 2, 3, 4}
        grads = weights.give()
        calls = weights.step(optimizer, [grad if i in alive else None for i, grad in enumerate(grads)])
        assert over_ranks(calls) == len(alive)
    weights.check()


@on_ranks(2)
def test_another_placement_is_planned_anew_and_momentum_follows(rank: int, world: int) -> None:
    """Parameters take other placements between steps, in place."""
    mesh = init_device_mesh("cpu", (world,))
    weights = Weights()
    for i in range(3):
        weights.shard(i, (7, 5), mesh, [Shard(0)])
    optimizer = weights.optimizer(create_dtensor_config(costs="flops"))
    for step, placement in enumerate((Shard(0), Shard(1), Replicate(), Shard(0))):
        for param in weights.params[: 2 if step else 0]:
            param.grad = None
            torch.utils.swap_tensors(param, nn.Parameter(param.detach().redistribute(placements=[placement])))
        weights.train(optimizer, 1)
        weights.check(optimizer)


# -- training loops -------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_refused_group_changes_nothing(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    weights = Weights()
    weights.shard(0, (6, 5), mesh, [Shard(0)])
    optimizer = weights.optimizer(create_dtensor_config(costs="flops"))
    unreduced = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Partial()]))
    with pytest.raises(ValueError, match="Partial"):
        optimizer.add_param_group({"params": [unreduced], "use_muon": True})
    weights.train(optimizer, 1)
    weights.check(optimizer)
