"""``dmuon.Muon`` on models that torch sharded or replicated: equal to a single process, each matrix once."""

from __future__ import annotations

import copy
import itertools
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness.assertions import assert_close, assert_equal_weights, assert_same_bits
from harness.dtensors import give, no_whole_tensors, noise, parameter, whole
from harness.oracle import Reference, Twin, reference_weights
from harness.pool import RankPool
from harness.topologies import EXCHANGED, LAYOUTS, Laid, lay
from harness.toy import LR, OPTIONS, batch, build
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.utils import clip_grad_norm_ as torch_clip
from torch.optim.lr_scheduler import LambdaLR

import dmuon
from dmuon import create_dtensor_config, create_processgroup_config
from dmuon.check.model import Block, Network, Size, is_matrix, loss_of, shard
from dmuon.check.topologies import full_state
from dmuon.check.traffic import Amount, Traffic
from dmuon.layout.parcels import travels

LENGTHS = pytest.mark.parametrize("steps", [5, pytest.param(20, marks=pytest.mark.slow)])
MAX_NORM = 0.5  # below the norm of every step


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
    optimizer = laid.optimizer(**options)
    calls = []
    for step in range(steps):
        optimizer.zero_grad()
        laid.backward(step)
        optimizer.step()
        calls.append(optimizer.last_step.ns_matrices)
    return full_state(laid.network), calls


def train(_rank: int, _world: int, name: str, steps: int) -> tuple[dict[str, Tensor], list[int]]:
    return run(lay(name, toy(name)), steps)


def check_run(results: list[Any], name: str, steps: int) -> None:
    for weights, _ in results:
        assert_equal_weights(weights, expected("tp" not in name, steps))
    assert_same_bits([weights for weights, _ in results])
    calls = torch.tensor([of_rank for _, of_rank in results]).sum(0)
    assert calls.tolist() == [matrices(name)] * steps, "every matrix is orthogonalized once a step, over all ranks"


@pytest.mark.pitfall("P01", "P04", "P11", "P14")
@pytest.mark.parametrize("name", [name for name in EXCHANGED if LAYOUTS[name].world <= 4])
@LENGTHS
def test_steps_equal_single_process(ranks: RankPool, name: str, steps: int) -> None:
    check_run(ranks(LAYOUTS[name].world, train, name, steps), name, steps)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_hundred_steps_equal_single_process(ranks: RankPool) -> None:
    check_run(ranks(2, train, "fsdp2-2", 100, timeout=200), "fsdp2-2", 100)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(400)
def test_eight_ranks_of_hsdp_and_tensor_parallelism() -> None:
    pool = RankPool(most=8)
    try:
        check_run(pool(8, train, "fsdp2-hsdp-tp", 20, timeout=300), "fsdp2-hsdp-tp", 20)
    finally:
        pool.close()


def train_half(_rank: int, _world: int, name: str, steps: int) -> dict[str, Tensor]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        weights, _ = run(lay(name, build(), mp_policy=policy), steps)
    assert {t.dtype for t in weights.values()} == {torch.float32}
    return weights


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
@pytest.mark.parametrize("name", ["fsdp2-2", "fsdp2-hsdp"])
def test_half_precision_equals_a_single_process_that_rounds_as_well(ranks: RankPool, name: str) -> None:
    """Matrices within what bf16 sums in another order make of them, biases, which start at zero, of AdamW as well."""
    steps = 4
    single = half_reference(LAYOUTS[name].world, steps)
    vectors = {n for n, t in single.items() if t.ndim < 2}
    results = ranks(LAYOUTS[name].world, train_half, name, steps)
    for weights in results:
        for names, tolerance in ((single.keys() - vectors, 3e-4), (vectors, 1e-2)):
            assert_equal_weights({n: weights[n] for n in names}, {n: single[n] for n in names}, tolerance)
    assert_same_bits(results)


# -- pipeline stages ------------------------------------------------------------------------------------------------


class Stage(nn.Module):
    """Some of a toy's modules, under the toy's names."""

    def __init__(self, model: Network, first: bool) -> None:
        super().__init__()
        self.first = first
        self.blocks = nn.ModuleDict({str(i): b for i, b in enumerate(model.blocks) if (i == 0) == first})
        if first:
            self.embed = model.embed
        else:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) if self.first else x
        for block in self.blocks.values():
            x = block(x)
        return x if self.first else self.head(self.norm(x))


def train_stages(rank: int, _world: int, given: bool, steps: int) -> tuple[dict[str, Tensor], list[int]]:
    """Ranks 0 and 1 shard the first block, ranks 2 and 3 the others; activations and their gradients travel."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "fsdp"))
    first, peer = rank < 2, (rank + 2) % 4
    stage = Stage(toy("pp"), first)
    for module in (*stage.blocks.values(), stage):
        fully_shard(module, mesh=mesh["fsdp"])
    if given:
        config = create_processgroup_config(
            fsdp_pg=mesh.get_group("fsdp"), pp_pg=mesh.get_group("pp"), costs="flops", prefetch_count=2
        )
    else:
        config = create_dtensor_config(costs="flops")
    block_of = {id(p): name for name, p in stage.named_parameters() if is_matrix(name)}
    groups = [
        {"params": [p for p in stage.parameters() if id(p) in block_of], "use_muon": True},
        {"params": [p for p in stage.parameters() if id(p) not in block_of and p.ndim > 1], "use_muon": False},
        {"params": [p for p in stage.parameters() if p.ndim < 2], "use_muon": False, "weight_decay": 0.0},
    ]
    optimizer = dmuon.Muon(groups, distributed_config=config, **OPTIONS)
    calls = []
    for step in range(steps):
        optimizer.zero_grad()
        tokens, targets = (part.chunk(2)[rank % 2] for part in batch(step))
        if first:
            hidden = stage(tokens)
            dist.send(hidden.detach(), peer)
            grad = torch.empty_like(hidden)
            dist.recv(grad, peer)
            hidden.backward(grad)
        else:
            hidden = torch.empty(*tokens.shape, 13)
            dist.recv(hidden, peer)
            hidden.requires_grad_()
            torch.nn.functional.cross_entropy(stage(hidden).flatten(0, 1), targets.flatten()).backward()
            assert hidden.grad is not None
            dist.send(hidden.grad, peer)
        optimizer.step()
        calls.append(optimizer.last_step.ns_matrices)
    return {name: whole(p) for name, p in stage.named_parameters()}, calls


@pytest.mark.parametrize("given", [True, False], ids=["groups", "dtensors"])
@LENGTHS
def test_pipeline_stages_do_not_meet(ranks: RankPool, given: bool, steps: int) -> None:
    results = ranks(4, train_stages, given, steps)
    single = expected(True, steps)
    for weights, _ in results:
        assert_equal_weights(weights, {name: single[name] for name in weights})
    assert results[0][0].keys() | results[2][0].keys() == single.keys()
    for one, other, count in ((0, 1, 5), (2, 3, 10)):
        assert_same_bits([results[one][0], results[other][0]])
        assert [a + b for a, b in zip(results[one][1], results[other][1], strict=True)] == [count] * steps


# -- traffic --------------------------------------------------------------------------------------------------------


def count_step(_rank: int, _world: int, names: list[str], options: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Collectives of a second step, their bytes, and what both must be."""
    found = {}
    for name in names:
        laid = lay(name, toy(name), **options)
        optimizer = laid.optimizer()
        for step in range(2):
            optimizer.zero_grad()
            laid.backward(step)
            with no_whole_tensors(), Traffic() as traffic:
                optimizer.step()
        exchanged = [r for r in optimizer._rounds if r.exchanged]
        rounds = [
            ([getattr(parcel, way) for parcel in r.parcels], r.domain.position)
            for r in exchanged
            for way in ("to_owner", "from_owner")
        ]
        exchange = optimizer._exchange
        held = zip(exchange.params, exchange.owners, strict=True)
        local = [(p.numel(), p._local_tensor.numel() if isinstance(p, DTensor) else p.numel(), o) for p, o in held]
        found[name] = {
            "calls": traffic.operations(),
            "received": traffic.by_operator().get("alltoall_base_", Amount()).nbytes,
            "rounds": len(exchanged),
            "exchanges": sum(travels(routes) for routes, _ in rounds),
            "by the rounds": 4 * sum(sum(route.numel_in(at).values()) for routes, at in rounds for route in routes),
            "by the shards": 4 * sum(n - mine if o == dist.get_rank() else mine for n, mine, o in local),
        }
    return found


TRAFFIC = {
    2: ["fsdp2-2", "tp-alone", "ddp", "replicate-fsdp"],
    3: ["fsdp2-3"],
    4: ["fsdp2-4", "fsdp2-hsdp", "fsdp2-tp", "cp-groups"],
}


@pytest.mark.pitfall("P13")
@pytest.mark.parametrize("world", TRAFFIC)
@pytest.mark.parametrize("packed", [True, False])
def test_a_step_is_one_vote_and_the_exchanges_that_the_layout_needs(ranks: RankPool, world: int, packed: bool) -> None:
    options = {} if packed else {"small_param_numel_threshold": 0, "chunk_bytes": 2000}
    names = TRAFFIC[world] if packed else [name for name in TRAFFIC[world] if name != "ddp"]
    for of_rank in ranks(world, count_step, names, options):
        for name, found in of_rank.items():
            each = 1 if name in ("ddp", "replicate-fsdp") else 2  # owners have whole matrices there
            rounds = found["rounds"]
            assert found["calls"] == {"allreduce_": 1, "alltoall_base_": each * rounds}, name
            assert rounds == 1 if packed else rounds > 1, f"{name}: {rounds} rounds"
            assert found["exchanges"] == each * rounds, name
            assert found["received"] == found["by the rounds"] == found["by the shards"], f"{name}: {found}"


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


def train_schedules(_rank: int, _world: int, name: str, schedules: list[dict[str, Any]]) -> list[Any]:
    return [run(lay(name, toy(name), **options), 2) for options in schedules]


@pytest.mark.parametrize(
    ("name", "schedules"),
    [
        ("fsdp2-2", SCHEDULES[:12]),
        ("fsdp2-tp", [SCHEDULES[1], SCHEDULES[9], SCHEDULES[14]]),
        ("fsdp2-hsdp", [SCHEDULES[1], SCHEDULES[8], SCHEDULES[21]]),
        *(pytest.param(name, SCHEDULES, marks=pytest.mark.slow) for name in ("fsdp2-2", "fsdp2-tp", "fsdp2-hsdp")),
    ],
    ids=["fsdp2-2", "fsdp2-tp", "fsdp2-hsdp", "fsdp2-2-all", "fsdp2-tp-all", "fsdp2-hsdp-all"],
)
def test_the_schedule_changes_no_bit(ranks: RankPool, name: str, schedules: list[dict[str, Any]]) -> None:
    for results in ranks(LAYOUTS[name].world, train_schedules, name, schedules, timeout=100):
        assert_equal_weights(results[0][0], expected("tp" not in name, 2))
        for options, (weights, calls) in zip(schedules, results, strict=True):
            assert calls == results[0][1]
            for fqn, tensor in results[0][0].items():
                assert torch.equal(weights[fqn], tensor), f"{fqn} with {options}"


def several_domains(rank: int, _world: int, prefetch: int) -> tuple[dict[str, Tensor], int]:
    """Two groups over ranks 0 to 2, and between them matrices that only ranks 0 and 1 share."""
    everyone, two = (DeviceMesh("cpu", list(range(n))) for n in (3, 2))
    shapes = {"a": (9, 5), "b": (5, 5), "c": (7, 4), "d": (8, 3), "e": (6, 6)}
    meshes = {"a": everyone, "b": two, "c": two, "d": everyone, "e": everyone}
    groups: list[dict[str, Any]] = []
    params = {}
    for names in ("ab", "c", "d", "e"):
        mine = [name for name in names if rank < 2 or meshes[name] is everyone]
        made = {n: parameter(noise(ord(n), *shapes[n]), meshes[n], [Shard(0)]) for n in mine}
        params.update(made)
        groups.append({"params": list(made.values()), "use_muon": True})
    if rank == 2:
        groups[1]["params"] = [nn.Parameter(torch.zeros(2, 2))]  # groups are counted alike on all ranks
    config = create_dtensor_config(costs="flops", prefetch_count=prefetch)
    optimizer = dmuon.Muon(groups, distributed_config=config, **OPTIONS)
    for step in range(3):
        for name, param in params.items():
            give(param, noise(1000 * step + ord(name), *shapes[name]))
        optimizer.step()
    return {name: whole(p) for name, p in params.items()}, optimizer.last_step.ns_matrices


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_ranks_that_share_some_matrices_with_some_ranks(ranks: RankPool, prefetch: int) -> None:
    results = ranks(3, several_domains, prefetch)
    shapes = {name: tuple(t.shape) for name, t in results[0][0].items()}
    twin = Twin([noise(ord(name), *shape) for name, shape in shapes.items()])
    for step in range(3):
        twin.step([noise(1000 * step + ord(name), *shape) for name, shape in shapes.items()])
    for weights, _ in results:
        for name, value in zip(shapes, twin.weights(), strict=True):
            if name in weights:
                assert_close(weights[name], value, name)
    assert sum(calls for _, calls in results) == 5


# -- any placement --------------------------------------------------------------------------------------------------

SHAPES = [(12, 8), (1, 9), (7, 1), (5, 3), (2, 11), (1, 1), (3, 13)]
GRADIENTS = 2


def placements_of(world: int) -> list[tuple[tuple[int, ...], list[Any]]]:
    """Extents of a mesh, and placements over it."""
    line = [((world,), [placement]) for placement in (Shard(0), Shard(1), Replicate())]
    if world != 4:
        return line
    square = [
        [Shard(0), Shard(0)],
        [_StridedShard(0, split_factor=2), Shard(0)],
        [Shard(0), Shard(1)],
        [Shard(1), Shard(0)],
        [Replicate(), Shard(0)],
        [Shard(1), Replicate()],
        [Replicate(), Replicate()],
    ]
    return line + [((2, 2), placements) for placements in square]


def update_everywhere(_rank: int, world: int, scale: float) -> tuple[list[tuple[str, int, Tensor]], int]:
    """Every shape on every placement, in one optimizer: the sum of two updates, as weights that began at zero."""
    params = []
    for extents, placements in placements_of(world):
        mesh = init_device_mesh("cpu", extents)
        for i, shape in enumerate(SHAPES):
            about = f"{shape} on {extents} as {placements}"
            params.append((about, i, parameter(torch.zeros(shape), mesh, placements)))
    optimizer = dmuon.Muon(
        [{"params": [p for *_, p in params], "use_muon": True}],
        distributed_config=create_dtensor_config(costs="flops", chunk_bytes=1000),
        **{**OPTIONS, "weight_decay": 0.0},
    )
    for step in range(GRADIENTS):
        for _, i, param in params:
            give(param, scale * noise(100 * step + i, *SHAPES[i]))
        optimizer.step()
    return [(about, i, whole(p)) for about, i, p in params], optimizer.last_step.ns_matrices


@lru_cache
def updates() -> list[Tensor]:
    twin = Twin([torch.zeros(shape) for shape in SHAPES], decay=0.0)
    for step in range(GRADIENTS):
        twin.step([noise(100 * step + i, *shape) for i, shape in enumerate(SHAPES)])
    return twin.weights()


@pytest.mark.pitfall("P04", "P14", "P53")
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_update_does_not_depend_on_the_layout(ranks: RankPool, world: int) -> None:
    results = ranks(world, update_everywhere, 1.0)
    for found, _ in results:
        for about, i, weights in found:
            assert_close(weights, updates()[i], about)
    assert sum(calls for _, calls in results) == len(results[0][0])


@pytest.mark.pitfall("P35")
@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e15, 1e30])
def test_the_scale_of_gradients_does_not_matter(ranks: RankPool, scale: float) -> None:
    for found, _ in ranks(2, update_everywhere, scale):
        for about, i, weights in found:
            assert_close(weights, updates()[i], f"{about}, gradients times {scale}")


def keep_half(_rank: int, world: int) -> tuple[torch.dtype, torch.dtype, Tensor, Tensor]:
    mesh = init_device_mesh("cpu", (world,))
    param = parameter(noise(1, 9, 6).bfloat16(), mesh, [Shard(0)])
    wide = parameter(noise(1, 9, 6).double(), mesh, [Shard(0)])
    optimizer = dmuon.Muon([param, wide], distributed_config=create_dtensor_config(costs="flops"), **OPTIONS)
    for step in range(2):
        give(param, noise(2 + step, 9, 6).bfloat16())
        give(wide, noise(2 + step, 9, 6).bfloat16().double())
        optimizer.step()
    momentum = [optimizer.state[p]["momentum_buffer"] for p in (param, wide)]
    return momentum[0].dtype, momentum[1].dtype, whole(momentum[0]), whole(wide)


@pytest.mark.pitfall("P23")
def test_momentum_is_fp32_or_wider_whatever_the_parameter_is(ranks: RankPool) -> None:
    twin = Twin([noise(1, 9, 6)])
    for step in range(2):
        twin.step([noise(2 + step, 9, 6).bfloat16().float()])
    for half, wide, momentum, weights in ranks(2, keep_half):
        assert (half, wide) == (torch.float32, torch.float64)
        assert_close(momentum, twin.momentum(0), "momentum of bf16", 1e-6)
        assert_close(weights, twin.weights()[0], "fp64 beside bf16")


# -- gradients ------------------------------------------------------------------------------------------------------


def train_clipped(_rank: int, _world: int, names: list[str], ours: bool) -> dict[str, Any]:
    found = {}
    for name in names:
        laid = lay(name, toy(name))
        optimizer = laid.optimizer()
        norms = []
        for step in range(4):
            optimizer.zero_grad()
            laid.backward(step)
            norm = (dmuon.clip_grad_norm_ if ours else torch_clip)(laid.network.parameters(), MAX_NORM)
            norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
            optimizer.step()
        found[name] = full_state(laid.network), norms
    return found


def clipped_reference(thin: bool) -> tuple[dict[str, Tensor], list[float]]:
    model = build(block=ThinBlock) if thin else build()
    optimizer = Reference(model, matrix=is_matrix)
    norms = []
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, *batch(step)).backward()
        norms.append(float(torch_clip(model.parameters(), MAX_NORM)))
        optimizer.step()
    return dict(model.state_dict()), norms


@pytest.mark.pitfall("P34", "P36", "P37")
@pytest.mark.parametrize(
    ("world", "names", "ours"),
    [
        (2, ["fsdp2-2", "ddp", "tp-alone"], True),  # tp mixes DTensors with plain tensors
        (2, ["fsdp2-2", "ddp"], False),
        (4, ["fsdp2-hsdp", "fsdp2-tp"], True),
        (4, ["fsdp2-hsdp"], False),
    ],
)
def test_clipping_before_the_step_equals_single_process(
    ranks: RankPool, world: int, names: list[str], ours: bool
) -> None:
    for found in ranks(world, train_clipped, names, ours):
        for name, (weights, norms) in found.items():
            single, single_norms = clipped_reference("tp" not in name)
            assert min(single_norms) > MAX_NORM
            assert norms == pytest.approx(single_norms, rel=1e-5), name
            assert_equal_weights(weights, single)
            with pytest.raises(AssertionError, match="relative error"):
                assert_equal_weights(weights, expected("tp" not in name, 4))


UNUSED = [((12, 8), Shard(0)), ((12, 8), Shard(0)), ((12, 8), Shard(0)), ((5, 5), Shard(1)), ((4, 6), Replicate())]


def leave_out(rank: int, world: int, missing: dict[int, list[int]]) -> list[tuple[Tensor, Tensor]]:
    """Weights and momentum after steps in which the ranks ``missing[i]`` have no gradient of parameter ``i``."""
    mesh = init_device_mesh("cpu", (world,))
    params = [parameter(noise(i, *shape), mesh, [placement]) for i, (shape, placement) in enumerate(UNUSED)]
    plain = nn.Parameter(noise(50, 3, 4))
    optimizer = dmuon.Muon([*params, plain], distributed_config=create_dtensor_config(costs="flops"), **OPTIONS)
    for step in range(3):
        optimizer.zero_grad()
        for i, param in enumerate(params):
            if step == 0 or rank not in missing.get(i, []):
                give(param, noise(100 * (1 + step) + i, *param.shape))
        optimizer.step()
    return [(whole(p), whole(optimizer.state[p]["momentum_buffer"])) for p in [*params, plain]]


@pytest.mark.pitfall("P19", "P48")
@pytest.mark.parametrize("rest", [0, 1])
def test_a_rank_without_gradients_takes_part(ranks: RankPool, rest: int) -> None:
    """Parameter 1 is unused everywhere, 2 and 3 on one rank, whose part of the gradient counts as zero."""
    missing = {1: [0, 1], 2: [rest], 3: [rest]}
    results = ranks(2, leave_out, missing)
    twin = Twin([noise(i, *shape) for i, (shape, _) in enumerate(UNUSED)])
    for step in range(3):
        grads: list[Tensor | None] = []
        for i, (shape, placement) in enumerate(UNUSED):
            grad = noise(100 * (1 + step) + i, *shape)
            if step and len(missing.get(i, [])) == 1:
                grad.chunk(2, placement.dim)[rest].zero_()
            grads.append(None if step and i == 1 else grad)
        twin.step(grads)
    for result in results:
        for i, (weights, momentum) in enumerate(result[:-1]):
            assert_close(weights, twin.weights()[i], f"parameter {i}")
            assert_close(momentum, twin.momentum(i), f"momentum {i}")
        untouched, momentum = result[-1]
        assert torch.equal(untouched, noise(50, 3, 4)) and not momentum.any()


def one_bad_matrix(_rank: int, world: int) -> tuple[list[Tensor], tuple[str, ...]]:
    mesh = init_device_mesh("cpu", (world,))
    params = [parameter(noise(i, 6, 4), mesh, [Shard(0)]) for i in range(4)]
    optimizer = dmuon.Muon(params, distributed_config=create_dtensor_config(costs="flops"), **OPTIONS)
    for i, param in enumerate(params):
        grad = noise(10 + i, 6, 4)
        give(param, grad.mul_(0) if i == 0 else grad.index_fill_(0, torch.tensor([5]), torch.nan) if i == 1 else grad)
    optimizer.step()
    return [whole(p) for p in params], optimizer.last_step.nonfinite


@pytest.mark.pitfall("P38")
def test_a_nan_stays_in_its_matrix_and_a_zero_gradient_is_zero(ranks: RankPool) -> None:
    results = ranks(2, one_bad_matrix)
    twin = Twin([noise(i, 6, 4) for i in range(4)])
    twin.step([None, None, noise(12, 6, 4), noise(13, 6, 4)])
    for weights, _ in results:
        assert_close(weights[0], noise(0, 6, 4) * (1 - LR * OPTIONS["weight_decay"]), "a zero gradient", 1e-6)
        assert weights[1].isnan().all()
        for i in (2, 3):
            assert_close(weights[i], twin.weights()[i], i)
    assert sorted(name for _, names in results for name in names) == ["parameter 1 of group 0"]


# -- process groups -------------------------------------------------------------------------------------------------


def step_again(rank: int, world: int) -> list[Tensor]:
    """One configuration for two optimizers, with the process group of the first one destroyed in between."""
    config = create_dtensor_config(costs="flops")
    store = dist.distributed_c10d._get_default_store()
    found = []
    for attempt in range(2):
        mesh = init_device_mesh("cpu", (world,))
        params = [parameter(noise(i, 6 + i, 4), mesh, [Shard(0)]) for i in range(3)]
        optimizer = dmuon.Muon(params, distributed_config=config, **OPTIONS)
        for i, param in enumerate(params):
            give(param, noise(10 + i, *param.shape))
        flying = torch.ones(1000)
        work = dist.all_reduce(flying, async_op=True)
        optimizer.step()
        work.wait()
        assert flying.eq(world).all()
        found += [whole(p) for p in params]
        if attempt == 0:
            dist.destroy_process_group()
            torch.distributed.tensor.debug._clear_sharding_prop_cache()
            dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=world)
    return found


@pytest.mark.pitfall("P24", "P25")
def test_a_new_process_group_and_a_users_own_collectives(ranks: RankPool) -> None:
    twin = Twin([noise(i, 6 + i, 4) for i in range(3)])
    twin.step([noise(10 + i, 6 + i, 4) for i in range(3)])
    for found in ranks(2, step_again, fresh=True):
        for i, weights in enumerate(found):
            assert_close(weights, twin.weights()[i % 3], i)


def share_some(rank: int, world: int, lonely: int) -> tuple[Tensor, Tensor | None]:
    mesh = init_device_mesh("cpu", (world,))
    params = [parameter(noise(1, 7, 5), mesh, [Shard(0)])]
    params += [nn.Parameter(noise(2, 4, 3))] if rank == lonely else []
    optimizer = dmuon.Muon(params, distributed_config=create_dtensor_config(costs="flops"), **OPTIONS)
    for param in params:
        give(param, noise(5, *param.shape))
    optimizer.step()
    return whole(params[0]), whole(params[1]) if rank == lonely else None


@pytest.mark.pitfall("P37")
@pytest.mark.parametrize("lonely", [0, 1])
def test_a_rank_may_have_a_matrix_of_its_own(ranks: RankPool, lonely: int) -> None:
    twin = Twin([noise(1, 7, 5), noise(2, 4, 3)])
    twin.step([noise(5, 7, 5), noise(5, 4, 3)])
    results = ranks(2, share_some, lonely)
    for shared, _ in results:
        assert_close(shared, twin.weights()[0], "shared")
    own = results[lonely][1]
    assert own is not None
    assert_close(own, twin.weights()[1], "alone")


# -- groups that change, and both residencies -----------------------------------------------------------------------


def is_owned(name: str) -> bool:
    return name.startswith("blocks.1.") and is_matrix(name)


def train_mixed(rank: int, world: int, steps: int) -> tuple[dict[str, Tensor], int, int]:
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
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, *(part.chunk(world)[rank] for part in batch(step))).backward()
        optimizer.step()
    return full_state(model), optimizer.last_step.ns_matrices, len(exchanged)


@pytest.mark.parametrize("world", [2, 3])
@LENGTHS
def test_one_model_may_mix_both_residencies(ranks: RankPool, world: int, steps: int) -> None:
    results = ranks(world, train_mixed, steps)
    for weights, *_ in results:
        assert_equal_weights(weights, expected(True, steps))
    assert_same_bits([weights for weights, *_ in results])
    assert sum(calls for _, calls, _ in results) == 15
    assert results[0][2] == 10


CHANGING = [(9, 5), (9, 5), (4, 7), (6, 6), (3, 8)]


def change_groups(_rank: int, world: int) -> tuple[list[Tensor], list[int]]:
    """Begin with parameters 0 and 1, add 2 in a group and 3 to a list, then take 0 out."""
    mesh = init_device_mesh("cpu", (world,))
    params = [parameter(noise(i, *shape), mesh, [Shard(i % 2)]) for i, shape in enumerate(CHANGING)]
    optimizer = dmuon.Muon(params[:2], distributed_config=create_dtensor_config(costs="flops"), **OPTIONS)
    calls = []
    for step in range(8):
        if step == 2:
            optimizer.add_param_group({"params": [params[2]], "use_muon": True})
        if step == 4:
            optimizer.param_groups[1]["params"].append(params[3])
        if step == 6:
            del optimizer.param_groups[0]["params"][0]
            optimizer.param_groups[0]["params"].insert(0, params[4])
        for i, param in enumerate(params):
            give(param, noise(100 * step + i, *param.shape))
        optimizer.step()
        calls.append(optimizer.last_step.ns_matrices)
    return [whole(p) for p in params], calls


def test_changed_groups_are_assigned_anew_and_momentum_stays(ranks: RankPool) -> None:
    twin = Twin([noise(i, *shape) for i, shape in enumerate(CHANGING)])
    alive = [{0, 1}, {0, 1}, {0, 1, 2}, {0, 1, 2}, {0, 1, 2, 3}, {0, 1, 2, 3}, {1, 2, 3, 4}, {1, 2, 3, 4}]
    for step, some in enumerate(alive):
        twin.step([noise(100 * step + i, *s) if i in some else None for i, s in enumerate(CHANGING)])
    results = ranks(3, change_groups)
    for weights, _ in results:
        for i, value in enumerate(twin.weights()):
            assert_close(weights[i], value, i)
    assert torch.tensor([calls for _, calls in results]).sum(0).tolist() == [len(some) for some in alive]


def lay_anew(_rank: int, world: int) -> list[Tensor]:
    """Parameters take other placements between steps, in place."""
    mesh = init_device_mesh("cpu", (world,))
    params = [parameter(noise(i, 7, 5), mesh, [Shard(0)]) for i in range(3)]
    optimizer = dmuon.Muon(params, distributed_config=create_dtensor_config(costs="flops"), **OPTIONS)
    for step, placement in enumerate((Shard(0), Shard(1), Replicate(), Shard(0))):
        for i, param in enumerate(params):
            if i < 2 and step:
                param.grad = None
                torch.utils.swap_tensors(param, nn.Parameter(param.detach().redistribute(placements=[placement])))
            give(param, noise(100 * step + i, 7, 5))
        optimizer.step()
        assert all(optimizer.state[p]["momentum_buffer"].placements == p.placements for p in params)
    return [whole(p) for p in params] + [whole(optimizer.state[p]["momentum_buffer"]) for p in params]


def test_another_placement_is_planned_anew_and_momentum_follows(ranks: RankPool) -> None:
    twin = Twin([noise(i, 7, 5) for i in range(3)])
    for step in range(4):
        twin.step([noise(100 * step + i, 7, 5) for i in range(3)])
    for found in ranks(2, lay_anew):
        for i in range(3):
            assert_close(found[i], twin.weights()[i], i)
            assert_close(found[3 + i], twin.momentum(i), f"momentum {i}")


# -- refusals -------------------------------------------------------------------------------------------------------


def refuse_partial(_rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    model = build()
    weight = DTensor.from_local(model.blocks[1].up.weight.detach(), mesh, [Partial()], run_check=False)
    model.blocks[1].up.weight = nn.Parameter(weight)
    dmuon.Muon(model, distributed_config=create_dtensor_config(costs="flops"))


def refuse_four_dimensions(_rank: int, world: int) -> None:
    param = parameter(noise(0, 4, 3, 2, 2), init_device_mesh("cpu", (world,)), [Shard(0)])
    dmuon.Muon([{"params": [param], "use_muon": True}], distributed_config=create_dtensor_config(costs="flops"))


def refuse_flattened(_rank: int, _world: int) -> None:
    model = build()
    model.blocks[1] = FullyShardedDataParallel(model.blocks[1], use_orig_params=True, device_id=torch.device("cpu"))
    dmuon.Muon(model)


@pytest.mark.parametrize(
    ("refused", "match"),
    [
        (refuse_partial, r"'blocks\.1\.up\.weight'.*Partial"),
        (refuse_four_dimensions, r"\(4, 3, 2, 2\) has 4 dimensions"),
        (refuse_flattened, r"'blocks\.1'.*FullyShardedDataParallel.*FSDP2"),
    ],
)
def test_what_cannot_be_exchanged_is_refused_by_name(ranks: RankPool, refused: Any, match: str) -> None:
    ranks(2, refused, expect=ValueError, match=match)


# -- training loops -------------------------------------------------------------------------------------------------


def halve(step: int) -> float:
    return 0.5**step


def train_scheduled(_rank: int, _world: int, name: str) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """With a scheduler, and with a closure instead of a loop body."""
    laid = lay(name, toy(name))
    optimizer = laid.optimizer(adamw_lr=2 * LR)
    scheduler = LambdaLR(optimizer, halve)
    losses = []
    for step in range(4):

        def closure(step: int = step) -> float:
            optimizer.zero_grad()
            laid.backward(step)
            return float(step)

        losses.append(optimizer.step(closure))
        scheduler.step()
    return full_state(laid.network), losses, [group["lr"] for group in optimizer.param_groups]


@pytest.mark.pitfall("P09", "P55")
def test_schedulers_reach_both_routes_and_closures_work(ranks: RankPool) -> None:
    model = build(block=ThinBlock)
    reference = Reference(model, matrix=is_matrix, adamw_lr=2 * LR)
    schedulers = [LambdaLR(reference.muon, halve), LambdaLR(reference.adamw, halve)]
    for step in range(4):
        reference.zero_grad()
        loss_of(model, *batch(step)).backward()
        reference.step()
        for scheduler in schedulers:
            scheduler.step()
    for weights, losses, rates in ranks(2, train_scheduled, "fsdp2-2"):
        assert_equal_weights(weights, dict(model.state_dict()))
        assert losses == [0.0, 1.0, 2.0, 3.0]
        assert rates == [LR / 16, LR / 8, LR / 8]


def refused_group(_rank: int, world: int) -> tuple[Tensor, Tensor]:
    """Weights after a step, of an optimizer that refused a group which was taken out again, and of one beside it."""
    mesh = init_device_mesh("cpu", (world,))
    weights = []
    for refuse in (True, False):
        weight = parameter(noise(0, 6, 5), mesh, [Shard(0)])
        optimizer = dmuon.Muon([weight], distributed_config=create_dtensor_config(costs="flops"), **OPTIONS)
        if refuse:
            unreduced = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Partial()]))
            with pytest.raises(ValueError, match="Partial"):
                optimizer.add_param_group({"params": [unreduced], "use_muon": True})
            optimizer.param_groups.pop()
        give(weight, noise(1, 6, 5))
        optimizer.step()
        weights.append(whole(weight))
    assert not torch.equal(weights[1], noise(0, 6, 5))
    return weights[0], weights[1]


def test_a_refused_group_that_is_taken_out_again_changes_nothing(ranks: RankPool) -> None:
    for refused, beside in ranks(2, refused_group):
        assert torch.equal(refused, beside)
