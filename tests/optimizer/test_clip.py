"""Clipping: one norm over owned, sharded and replicated gradients, equal to a single process on whole ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness.assertions import assert_equal_weights
from harness.on_ranks import on_ranks
from harness.oracle import Reference
from harness.pool import RankPool
from harness.topologies import LAYOUTS as TOPOLOGIES
from harness.topologies import Laid, lay
from harness.toy import batch, build
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn.utils import clip_grad_norm_ as torch_clip
from torch.nn.utils import clip_grad_value_ as torch_clip_value
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils._python_dispatch import TorchDispatchMode

import dmuon
from dmuon.check.model import Network, is_matrix, loss_of
from dmuon.check.topologies import full_state
from dmuon.dedicated.owned_tensor import OwnedTensor, owned_tensor
from dmuon.layout.topology import Position

STEPS = 4
MAX_NORM = 0.5  # below the norm of every step, so that each one is clipped
ORDERS = [2.0, 1.0, 3.5, 0.5, 0.0, math.inf, -math.inf, -1.0, -2.5]
TORCH_ORDERS = [2.0, 0.5, 0.0, math.inf, -math.inf, -1.0]
MIXED = "root replicated"  # owned, sharded and plain gradients meet
COLLECTIVES = {"allreduce_", "_allgather_base_", "allgather_", "all_gather_into_tensor", "all_reduce", "broadcast_"}
HIDDEN = 28  # tensor parallelism splits it evenly

Gradients = dict[str, Tensor]


# Layouts of one model: each gives its parameters, by name, with the gradient of one global batch as it lays them out.


def toy() -> Network:
    return build(hidden=HIDDEN)


def single_process() -> dict[str, Tensor]:
    """The parameters of the model on one process, each a plain tensor with its whole gradient."""
    model = toy()
    loss_of(model, *batch(0)).backward()
    return dict(model.named_parameters())


def laid_out(name: str, model: Network) -> Laid:
    if name != MIXED:
        return lay(name, model)
    laid = lay("1d-two-lines" if dist.get_world_size() == 2 else "1d-3-two-lines", model)
    for block in model.blocks:
        dmuon.fully_shard(block, mesh=laid.mesh)
    return laid


def on_topology(name: str, rank: int, world: int) -> dict[str, Tensor]:
    laid = laid_out(name, toy())
    laid.backward(0)
    return dict(laid.model.named_parameters())


def by_hand(lay_out: Callable[[int, str, Tensor], Tensor]) -> dict[str, Tensor]:
    """Parameters whose gradients are those of a single process, laid out by ``lay_out(number, name, gradient)``."""
    found = {}
    for number, (name, param) in enumerate(single_process().items()):
        found[name] = with_gradient(lay_out(number, name, param.grad))  # type: ignore[arg-type]
    return found


def with_gradient(grad: Tensor) -> Tensor:
    param = torch.zeros_like(grad)
    param.grad = grad
    return param


def on_any_placement(rank: int, world: int) -> dict[str, Tensor]:
    square = init_device_mesh("cpu", (2, 2))
    box = init_device_mesh("cpu", (2, 1, 2))
    strided = _StridedShard(0, split_factor=2)
    choices: list[tuple[DeviceMesh, list[Placement]]] = [
        (square, [Shard(0), Shard(0)]),
        (square, [strided, Shard(0)]),
        (square, [Replicate(), Shard(0)]),
        (square, [Shard(0), Replicate()]),
        (square, [Replicate(), Replicate()]),
        (square, [Shard(-1), Shard(0)]),
        (square, [Shard(0), Shard(-1)]),
        (box, [Shard(0), Shard(0), Shard(0)]),
        (box, [Shard(-1), Replicate(), strided]),
    ]

    def lay_out(number: int, name: str, grad: Tensor) -> Tensor:
        if number % (len(choices) + 1) == len(choices):
            return grad
        mesh, placements = choices[number % (len(choices) + 1)]
        placements = [Shard(p.dim % grad.ndim) if isinstance(p, Shard) else p for p in placements]
        return distribute_tensor(grad, mesh, placements, src_data_rank=None)

    return by_hand(lay_out)


def on_owners_by_hand(shape: tuple[int, ...], last: Placement, rank: int, world: int) -> dict[str, Tensor]:
    """Owned matrices on a mesh of ``shape``, all over it if ``last`` shards, else over all but its last dimension."""
    mesh = init_device_mesh("cpu", shape)
    owners = mesh.size() // (mesh.size(-1) if last.is_replicate() else 1)

    def lay_out(number: int, name: str, grad: Tensor) -> Tensor:
        if not is_matrix(name):
            return distribute_tensor(grad, mesh, [Replicate()] * (mesh.ndim - 1) + [Shard(0)], src_data_rank=None)
        owner = number % owners
        held = grad if owner == rank * owners // world else grad[:0]
        placements = [Shard(0)] * (mesh.ndim - 1) + [last]
        return owned_tensor(held.clone(), mesh, grad.shape, fqn=name, owners=(Position(owner),), placements=placements)

    return by_hand(lay_out)


STOCK = ["fsdp2-hsdp", "fsdp2-tp"]
DEDICATED = ["1d-3", "1d-4-two-lines", "hsdp", "hsdp-two-lines", "ddp-2", "tp", "tp-fsdp", "tp-ddp"]
# The number of ranks; and what gives the parameters of a rank, from its number and the world: collective.
LAYOUTS: dict[str, tuple[int, Callable[[int, int], dict[str, Tensor]]]] = {
    **{name: (TOPOLOGIES[name].world, partial(on_topology, name)) for name in (*DEDICATED, *STOCK)},
    MIXED: (2, partial(on_topology, MIXED)),
    "any placement": (4, on_any_placement),
    "owned, 2-D": (4, partial(on_owners_by_hand, (2, 2), Shard(0))),
    "owned x TP replicated": (4, partial(on_owners_by_hand, (2, 1, 2), Replicate())),
}


# Oracle: torch's functions on whole gradients, in fp64.


def local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of ``tensor``, on every rank; collective."""
    if not isinstance(tensor, OwnedTensor):
        return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, tensor._local_tensor)
    held = [part for part in parts if part.numel()]
    last = tensor.placements[-1]
    if held[0].shape != tensor.shape:
        assert isinstance(last, Shard)
        return torch.cat(held, last.dim)
    replicas = tensor.device_mesh.size(-1) if last.is_replicate() else 1
    assert len(held) == replicas, f"{tensor.fqn} has {len(held)} owners"
    return held[0]


def all_whole(params: dict[str, Tensor]) -> Gradients:
    return {n: whole(p.grad) for n, p in params.items() if p.grad is not None}


def true_norm(wholes: Iterable[Tensor], order: float) -> float:
    return float(get_total_norm([grad.double() for grad in wholes], order))


class Snapshot:
    """What this rank held of the gradients, and what torch makes of it, given the true norm."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.held = [local(p.grad) for p in params if p.grad is not None]
        self.copies = [tensor.clone() for tensor in self.held]

    def restore(self) -> None:
        for tensor, copy in zip(self.held, self.copies, strict=True):
            tensor.copy_(copy)

    def assert_unchanged(self, case: str) -> None:
        for tensor, copy in zip(self.held, self.copies, strict=True):
            assert torch.equal(tensor.nan_to_num(7.0), copy.nan_to_num(7.0)), case

    def assert_clipped(self, max_norm: float, norm: float, case: str) -> None:
        expected = [with_gradient(copy.double()) for copy in self.copies]
        clip_grads_with_norm_(expected, max_norm, torch.tensor(norm, dtype=torch.float64))
        self._assert_equal([p.grad for p in expected], case)  # type: ignore[misc]

    def assert_clamped(self, limit: float, case: str) -> None:
        self._assert_equal([copy.double().clamp(-limit, limit) for copy in self.copies], case)

    def _assert_equal(self, expected: list[Tensor], case: str) -> None:
        for found, wanted in zip(self.held, expected, strict=True):
            assert torch.allclose(found.double(), wanted, rtol=2e-6, atol=1e-30, equal_nan=True), case


def near(value: float) -> Any:
    return pytest.approx(value, rel=2e-6, abs=0.0, nan_ok=True)


# Every layout, every order.


def clip_every_order(params: dict[str, Tensor]) -> list[float]:
    wholes = all_whole(params)
    assert_equal_weights(wholes, {n: p.grad for n, p in single_process().items() if p.grad is not None})
    snapshot = Snapshot(params.values())
    totals = []
    for order, foreach in zip(ORDERS, itertools.cycle((None, False)), strict=False):
        case = f"order {order}, foreach {foreach}"
        norm = true_norm(wholes.values(), order)
        assert norm > 0, case
        totals.append(float(dmuon.clip_grad_norm_(iter(params.values()), 2 * norm + 1, order, foreach=foreach)))
        assert totals[-1] == near(norm), case
        snapshot.assert_unchanged(case)
        totals.append(float(dmuon.clip_grad_norm_(params.values(), norm / 2, order, foreach=foreach)))
        snapshot.assert_clipped(norm / 2, norm, case)
        snapshot.restore()
    return totals


def norms_of_some(params: dict[str, Tensor]) -> int:
    """How many norms of how many gradients were compared."""
    compared = 0
    for name in ("blocks.0.up.bias", "blocks.2.mix.weight", "norm.weight"):
        local(params[name].grad).zero_()  # type: ignore[arg-type]
    wholes = all_whole(params)
    some = {
        "matrices": [n for n in params if is_matrix(n)],
        "the others": [n for n in params if not is_matrix(n)],
        "one": ["blocks.1.up.weight"],
        "zeros": ["blocks.0.up.bias", "norm.weight"],
        "few": ["blocks.1.up.weight", "embed.weight", "blocks.1.down.bias", "blocks.2.mix.weight"],
    }
    for (case, names), order in itertools.product(some.items(), ORDERS):
        expected = true_norm([wholes[n] for n in names], order)
        found = dmuon.clip_grad_norm_([params[n] for n in names], math.inf, order)
        assert float(found) == near(expected), f"{case}, order {order}"
        if any(isinstance(params[n], OwnedTensor) for n in names):
            stock = torch_clip(params[names[0]] if len(names) == 1 else (params[n] for n in names), math.inf, order)
            assert float(stock) == near(expected), f"{case}, order {order}, by torch"
        compared += 1
    for name in ("blocks.0.mix.weight", "blocks.0.up.bias", "embed.weight"):
        params[name].grad = None
        del wholes[name]
    for order in ORDERS:
        clips = [dmuon.clip_grad_norm_]
        if any(isinstance(param, OwnedTensor) for param in params.values()):
            clips.append(torch_clip)
        for clip in clips:
            found = clip(params.values(), math.inf, order)
            assert float(found) == near(true_norm(wholes.values(), order)), f"without some, order {order}"
        compared += 1
    for param in params.values():
        param.grad = None
    assert [float(dmuon.clip_grad_norm_(params.values(), 1.0, p)) for p in ORDERS] == [0.0] * len(ORDERS)
    return compared


def poison(grad: Tensor, holder: int, bad: float) -> None:
    """Put ``bad`` where only the ranks at shard ``holder`` of each dimension see it, if they hold anything."""
    if isinstance(grad, OwnedTensor):
        here = True  # the owner's, which holds all
    elif isinstance(grad, DTensor):
        mesh, at = grad.device_mesh, grad.device_mesh.get_coordinate()
        split = [i for i, p in enumerate(grad.placements) if not p.is_replicate()]
        here = all(at[i] == holder % mesh.size(i) for i in split)  # type: ignore[index]
    else:
        here = True
    if here and local(grad).numel():
        local(grad).view(-1)[0] = bad


def clip_nonfinite(params: dict[str, Tensor]) -> int:
    """How many poisoned gradients were told of."""
    world, compared = dist.get_world_size(), 0
    names = ("blocks.1.up.weight", "blocks.2.up.bias", "embed.weight")
    wholes, clean = all_whole(params), Snapshot(params.values())
    owned = any(isinstance(param, OwnedTensor) for param in params.values())
    clips = [dmuon.clip_grad_norm_, *([torch_clip] if owned else [])]
    for name, holder, bad in itertools.product(names, (0, world - 1), (math.nan, -math.inf)):
        poison(params[name].grad, holder, bad)  # type: ignore[arg-type]
        poisoned, snapshot = wholes | {name: whole(params[name].grad)}, Snapshot(params.values())  # type: ignore[arg-type]
        for order, clip in itertools.product((2.0, math.inf, -math.inf, -1.0, 0.0), clips):
            case = f"{bad} in {name}, order {order}, {clip.__module__}"
            norm = true_norm(poisoned.values(), order)
            if not math.isfinite(norm):
                with pytest.raises(RuntimeError, match="norm"):
                    clip(params.values(), 1.0, order, error_if_nonfinite=True)
                snapshot.assert_unchanged(case)
            assert float(clip(params.values(), 1.0, order)) == near(norm), case
            snapshot.assert_clipped(1.0, norm, case)
            snapshot.restore()
            compared += 1
        clean.restore()
    return compared


def clip_values(params: dict[str, Tensor]) -> int:
    """How many limits were held."""
    compared = 0
    snapshot = Snapshot(params.values())
    for limit, foreach in itertools.product((1e-3, 0.0, math.inf), (None, True, False)):
        with operations() as ran:
            dmuon.clip_grad_value_(iter(params.values()), limit, foreach)
        assert not COLLECTIVES & set(ran)
        snapshot.assert_clamped(limit, f"clip_value {limit}, foreach {foreach}")
        snapshot.restore()
        compared += 1
    return compared


# torch's own functions.


def torch_every_order(params: dict[str, Tensor]) -> list[float]:
    """Every norm that torch's functions have found."""
    wholes, snapshot = all_whole(params), Snapshot(params.values())
    totals = []
    for order, foreach in itertools.product(TORCH_ORDERS, (None, True, False)):
        case = f"order {order}, foreach {foreach}"
        norm = true_norm(wholes.values(), order)
        total = torch_clip(iter(params.values()), norm / 2, order, foreach=foreach)
        assert type(total) is Tensor and float(total) == near(norm), case
        totals.append(float(total))
        snapshot.assert_clipped(norm / 2, norm, case)
        snapshot.restore()
    for foreach in (None, True, False):
        norm = true_norm(wholes.values(), 3.0)
        total = get_total_norm([p.grad for p in params.values() if p.grad is not None], 3.0, foreach=foreach)
        clip_grads_with_norm_(params.values(), norm / 3, total, foreach=foreach)
        snapshot.assert_clipped(norm / 3, norm, f"in two calls, foreach {foreach}")
        snapshot.restore()
        torch_clip_value(params.values(), 1e-3, foreach)
        snapshot.assert_clamped(1e-3, f"values, foreach {foreach}")
        snapshot.restore()
    return totals


@contextmanager
def operations() -> Iterator[list[str]]:
    """The names of all operations that run inside."""
    names: list[str] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Recorder():
        yield names


def record_operations(params: dict[str, Tensor]) -> dict[tuple[float, bool | None], list[str]]:
    """What runs, by order and ``foreach``."""
    recorded = {}
    for order, foreach in itertools.product((2.0, 0.0, math.inf, -math.inf), (None, True, False)):
        with operations() as names:
            dmuon.clip_grad_norm_(params.values(), 1.0, order, foreach=foreach)
        recorded[order, foreach] = names
    return recorded


# What holds of which layouts. All that is claimed of a layout runs in one call: laying it out takes most of the time.
CLAIMS: dict[Callable[[dict[str, Tensor]], Any], list[str]] = {
    clip_every_order: [*LAYOUTS],
    clip_values: [*LAYOUTS],
    clip_nonfinite: [MIXED, "tp-fsdp", "any placement"],
    torch_every_order: [name for name in LAYOUTS if name not in (*STOCK, "any placement")],
    record_operations: ["1d-3", MIXED, "fsdp2-hsdp"],
    norms_of_some: [*LAYOUTS],
}


def run_claims(rank: int, world: int, layout: str) -> dict[str, Any]:
    """What every claim about a layout returns on this rank; each one begins with the gradients of one backward."""
    params = LAYOUTS[layout][1](rank, world)
    grads, snapshot = {n: p.grad for n, p in params.items()}, Snapshot(params.values())
    results = {}
    for claim, layouts in CLAIMS.items():
        if layout in layouts:
            for name, param in params.items():
                param.grad = grads[name]
            snapshot.restore()
            results[claim.__name__] = claim(params)
    return results


@pytest.fixture(scope="module")
def results_of(ranks: RankPool) -> Callable[[Callable[[dict[str, Tensor]], Any], str], list[Any]]:
    """The results of a claim about a layout, by rank."""

    @cache
    def claimed(layout: str) -> list[dict[str, Any]]:
        return ranks(LAYOUTS[layout][0], run_claims, layout)

    return lambda claim, layout: [results[claim.__name__] for results in claimed(layout)]


SLOW = (
    "1d-3",
    "1d-4-two-lines",
    "hsdp-two-lines",
    "tp-ddp",
    "fsdp2-tp",
    "owned, 2-D",
    "tp-fsdp",
    "hsdp",
    "root replicated",
    "owned x TP replicated",
)


def each_layout(claim: Callable[[dict[str, Tensor]], Any]) -> Any:
    layouts = [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CLAIMS[claim]]
    return pytest.mark.parametrize("layout", layouts)


@pytest.mark.pitfall("P36", "P37", "P14")
@each_layout(clip_every_order)
def test_norms_and_clipped_gradients_equal_single_process(results_of: Any, layout: str) -> None:
    results = results_of(clip_every_order, layout)
    assert len(results[0]) == 2 * len(ORDERS)
    assert all(totals == results[0] for totals in results), "the same number on all ranks"


@pytest.mark.pitfall("P36", "P38", "P48")
@each_layout(norms_of_some)
def test_norms_of_some_parameters_equal_single_process(results_of: Any, layout: str) -> None:
    assert set(results_of(norms_of_some, layout)) == {6 * len(ORDERS)}


@pytest.mark.pitfall("P36", "P38")
@each_layout(clip_nonfinite)
def test_nonfinite_gradients_are_reported_on_every_rank(results_of: Any, layout: str) -> None:
    functions = 1 if layout == "any placement" else 2
    assert set(results_of(clip_nonfinite, layout)) == {3 * 2 * 2 * 5 * functions}


@pytest.mark.pitfall("P36")
@each_layout(clip_values)
def test_clipped_values_equal_single_process(results_of: Any, layout: str) -> None:
    assert set(results_of(clip_values, layout)) == {3 * 3}


@pytest.mark.pitfall("P36", "P48")
@each_layout(torch_every_order)
def test_torch_functions_equal_single_process(results_of: Any, layout: str) -> None:
    results = results_of(torch_every_order, layout)
    assert len(results[0]) == 3 * len(TORCH_ORDERS)
    assert all(totals == results[0] for totals in results), "the same numbers on all ranks"


# Any placements at random.


@dataclass(frozen=True, slots=True)
class Case:
    """Tensors of one call: shape, dtype, seed, mesh and placements of each."""

    order: float
    tensors: tuple[tuple[tuple[int, ...], torch.dtype, int, int, tuple[Placement, ...]], ...]


MESHES = ((4,), (2, 2), (2, 1, 2))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tensors = []
    for _ in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
        mesh = draw(st.integers(0, len(MESHES) - 1))
        dims = st.integers(0, len(shape) - 1)
        placement = st.one_of(
            st.just(Replicate()), dims.map(Shard), dims.map(lambda d: _StridedShard(d, split_factor=2))
        )
        placements = tuple(draw(placement) for _ in MESHES[mesh])
        dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
        tensors.append((shape, dtype, draw(st.integers(0, 99)), mesh, placements))
    return Case(draw(st.sampled_from(ORDERS)), tuple(tensors))


def clip_cases(rank: int, world: int, examples: list[Case]) -> None:
    meshes = [init_device_mesh("cpu", shape) for shape in MESHES]
    for case in examples:
        params, wholes = {}, {}
        for number, (shape, dtype, seed, mesh, placements) in enumerate(case.tensors):
            values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * (seed % 4)  # some are zero
            wholes[str(number)] = values.to(dtype)
            params[str(number)] = with_gradient(
                distribute_tensor(values.to(dtype), meshes[mesh], placements, src_data_rank=None)
            )
        norm = true_norm(wholes.values(), case.order)
        total = dmuon.clip_grad_norm_(params.values(), math.inf, case.order)
        wide = any(dtype == torch.float64 for _, dtype, *_ in case.tensors)
        assert total.dtype == (torch.float64 if wide else torch.float32) and total.shape == ()
        assert float(total) == pytest.approx(norm, rel=1e-5), case


@pytest.mark.pitfall("P14", "P36")
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(examples=st.lists(cases(), min_size=8, max_size=16))
def test_norms_on_random_placements_equal_single_process(ranks: RankPool, examples: list[Case]) -> None:
    ranks(4, clip_cases, examples)


# Pipeline stages.


def clip_stages(rank: int, world: int, stages: int, empty: tuple[int, ...]) -> list[float]:
    mesh = init_device_mesh("cpu", (stages, world // stages), mesh_dim_names=("pp", "dp"))
    stage = mesh.get_local_rank("pp")
    single = single_process()
    full = [s for s in range(stages) if s not in empty]
    mine = {}
    for number, (name, param) in enumerate(single.items()):
        if full and stage == full[number % len(full)]:
            sharded = distribute_tensor(param.grad, mesh["dp"], [Shard(0)], src_data_rank=None)  # type: ignore[arg-type]
            mine[name] = with_gradient(sharded if number % 3 else param.grad)  # type: ignore[arg-type]
    snapshot = Snapshot(mine.values())
    totals = []
    for order in ORDERS:
        norm = true_norm([p.grad for p in single.values() if p.grad is not None] if full else [], order)
        totals.append(float(dmuon.clip_grad_norm_(mine.values(), norm / 2, order, pp_mesh=mesh["pp"])))
        assert totals[-1] == near(norm), order
        snapshot.assert_clipped(norm / 2, norm, f"order {order}")
        snapshot.restore()
    return totals


@pytest.mark.pitfall("P36", "P48")
@pytest.mark.parametrize(
    ("world", "stages", "empty"), [(2, 2, ()), (4, 2, ()), (4, 2, (1,)), (3, 3, (0, 2)), (2, 2, (0, 1))]
)
def test_stages_of_a_pipeline_count_together(ranks: RankPool, world: int, stages: int, empty: tuple[int, ...]) -> None:
    results = ranks(world, clip_stages, stages, empty)
    assert all(totals == results[0] for totals in results), "the same number on all ranks"


# In which dtype, and what runs.


@pytest.mark.pitfall("P10", "P48")
@each_layout(record_operations)
def test_nothing_waits_and_foreach_is_obeyed(results_of: Any, layout: str) -> None:
    for recorded in results_of(record_operations, layout):
        for (_, foreach), names in recorded.items():
            assert not {"_local_scalar_dense", "is_nonzero", "nonzero"} & set(names), "the host waits for the device"
            assert names.count("allreduce_") == 1
            assert any(name.startswith("_foreach") for name in names) == (foreach is not False)


@pytest.mark.pitfall("P10")
def test_foreach_raises_where_torch_has_no_kernels() -> None:
    param = nn.Parameter(torch.ones(2, device="meta"))
    param.grad = torch.ones_like(param)
    for clip in (dmuon.clip_grad_norm_, torch_clip, dmuon.clip_grad_value_, torch_clip_value):
        with pytest.raises(RuntimeError, match="foreach"):
            clip([param], 1.0, foreach=True)  # type: ignore[operator]
        clip([param], 1.0, foreach=False)  # type: ignore[operator]


@pytest.mark.pitfall("P36")
@pytest.mark.parametrize("foreach", [None, True, False])
def test_plain_tensors_clip_as_in_torch(foreach: bool | None) -> None:
    for order in ORDERS:
        ours, theirs = single_process(), single_process()
        total = dmuon.clip_grad_norm_(ours.values(), 0.1, order, foreach=foreach)
        expected = torch_clip(theirs.values(), 0.1, order, foreach=foreach)
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=0.0)
        for mine, stock in zip(ours.values(), theirs.values(), strict=True):
            torch.testing.assert_close(mine.grad, stock.grad, rtol=1e-5, atol=0.0)
    assert float(dmuon.clip_grad_norm_([], 1.0)) == 0.0
    assert dmuon.clip_grad_value_([], 1.0) is None
    one = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    one.grad = torch.tensor([3.0, 4.0j])
    assert float(dmuon.clip_grad_norm_(one, 1.0, foreach=foreach)) == pytest.approx(5.0)


@pytest.mark.pitfall("P35")
def test_half_precision_gradients_do_not_overflow_the_norm() -> None:
    param = nn.Parameter(torch.zeros(300, dtype=torch.float16))
    param.grad = torch.full_like(param, 1e4)  # the sum of squares, 3e10, is beyond fp16
    total = dmuon.clip_grad_norm_(param, 1.0)
    assert total.dtype == torch.float32 and float(total) == pytest.approx(1e4 * math.sqrt(300), rel=1e-3)
    assert float(param.grad.float().norm()) == pytest.approx(1.0, rel=1e-2)


@pytest.mark.pitfall("P35")
def test_a_mixture_of_dtypes_loses_nothing() -> None:
    grads = [torch.full((2,), 3.0, dtype=t) for t in (torch.bfloat16, torch.float32, torch.float16)]
    assert dmuon.clip_grad_norm_(map(with_gradient, grads), 1e9).dtype == torch.float32
    small = torch.full((1,), 2.0**-40, dtype=torch.float64)
    total = dmuon.clip_grad_norm_(map(with_gradient, [*grads, small]), 1e9, 1.0)
    assert total.dtype == torch.float64 and float(total) == 18.0 + 2.0**-40


# Errors.


@pytest.mark.parametrize(
    ("clip", "arguments", "match"),
    [
        (dmuon.clip_grad_norm_, (1.0, math.nan), "norm_type"),
        (dmuon.clip_grad_norm_, (-1.0,), "max_norm"),
        (dmuon.clip_grad_norm_, (math.nan,), "max_norm"),
        (dmuon.clip_grad_value_, (-1.0,), "clip_value"),
        (dmuon.clip_grad_value_, (math.nan,), "clip_value"),
    ],
)
def test_arguments_without_a_meaning_are_refused(clip: Any, arguments: tuple[float, ...], match: str) -> None:
    param = with_gradient(torch.ones(2))
    with pytest.raises(ValueError, match=match):
        clip([param], *arguments)
    assert param.grad is not None and param.grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("order", ORDERS)
def test_a_gradient_without_elements_is_as_in_torch(order: float) -> None:
    params = [with_gradient(torch.ones(3)), with_gradient(torch.ones(0, 2))]
    if 0 <= order < math.inf:
        assert float(dmuon.clip_grad_norm_(params, 9.0, order)) == pytest.approx(float(torch_clip(params, 9.0, order)))
        return
    for clip in (torch_clip, dmuon.clip_grad_norm_):
        with pytest.raises(RuntimeError, match=r"elements|empty"):
            clip(params, 9.0, order)


def test_a_used_generator_is_said_to_be_empty() -> None:
    parameters = build().parameters()
    list(parameters)
    with pytest.warns(UserWarning, match="nothing is clipped"):
        dmuon.clip_grad_norm_(parameters, 1.0)


@pytest.mark.pitfall("P36", "P48")
@on_ranks(2)
def test_gradients_that_are_not_summed_are_refused(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    sharded = with_gradient(distribute_tensor(torch.ones(3), mesh, [Shard(0)]))
    partial_sum = with_gradient(DTensor.from_local(torch.ones(3), mesh, [Partial()]))
    for clip in (dmuon.clip_grad_norm_, dmuon.clip_grad_value_):
        with operations() as ran, pytest.raises(ValueError, match=r"number 1 of shape \(3,\).*Partial"):
            clip([sharded, partial_sum], 1.0)
        assert "allreduce_" not in ran


@pytest.mark.pitfall("P36", "P48")
@on_ranks(3)
def test_meshes_over_which_no_rank_can_count_are_refused(rank: int, world: int) -> None:
    pair = DeviceMesh("cpu", [0, 1])
    if rank == 2:
        outside = with_gradient(DTensor.from_local(torch.ones(0, 3), pair, [Shard(0)], run_check=False))
        with pytest.raises(ValueError, match="without this rank"):
            dmuon.clip_grad_norm_([outside], 1.0)
    with pytest.raises(ValueError, match="pp_mesh"):
        dmuon.clip_grad_norm_([], 1.0, pp_mesh=init_device_mesh("cpu", (1, world)))


# Training.


def clipped_run(rank: int, world: int, layout: str, stock: bool) -> tuple[dict[str, Tensor], list[float]]:
    laid = laid_out(layout, build())
    optimizer, clip = laid.optimizer(), torch_clip if stock else dmuon.clip_grad_norm_
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        laid.backward(step)
        norms.append(float(whole(clip(laid.model.parameters(), MAX_NORM))))
        assert float(whole(clip(laid.model.parameters(), math.inf))) == pytest.approx(MAX_NORM, rel=1e-5)
        optimizer.step()
    return full_state(laid.model), norms


@pytest.fixture(scope="module")
def reference() -> tuple[dict[str, Tensor], list[float]]:
    model = build()
    optimizer = Reference(model)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, *batch(step)).backward()
        norms.append(float(torch_clip(model.parameters(), MAX_NORM)))
        optimizer.step()
    assert min(norms) > 1.2 * MAX_NORM
    return dict(model.state_dict()), norms


@pytest.mark.pitfall("P34", "P36", "P37")
@pytest.mark.parametrize(
    ("layout", "world", "stock"),
    [
        ("1d", 2, True),
        ("1d-3", 3, False),
        (MIXED, 3, False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *(("1d-1", 1, True), ("1d-3", 3, True), ("1d-4", 4, True)),
                *(("1d-two-lines", 2, False), ("1d-4-two-lines", 4, False)),
            )
        ),
    ],
)
def test_clipped_training_equals_single_process(
    ranks: RankPool, reference: tuple[dict[str, Tensor], list[float]], layout: str, world: int, stock: bool
) -> None:
    """By torch's function where it is exact, and by ours."""
    results = ranks(world, clipped_run, layout, stock)
    for weights, norms in results:
        assert norms == pytest.approx(reference[1], rel=1e-5)
        assert stock or norms == results[0][1], "the same number on all ranks"
        assert_equal_weights(weights, reference[0])


def scaled_gradients(rank: int, world: int, factor: float) -> dict[str, Tensor]:
    laid = lay("1d", build())
    optimizer = laid.optimizer()
    laid.backward(0)
    total = dmuon.clip_grad_norm_(laid.model.parameters(), math.inf)
    dmuon.clip_grad_norm_(laid.model.parameters(), factor * float(total))
    optimizer.step()
    return full_state(laid.model)


@pytest.mark.pitfall("P34")
def test_clipping_scales_gradients_and_not_the_update(ranks: RankPool) -> None:
    """The first update of either route does not depend on the scale of the gradient, so clipping must not change it."""
    plain, clipped = ranks(2, scaled_gradients, 2.0)[0], ranks(2, scaled_gradients, 0.25)[0]
    start = build().state_dict()
    moved = {n: plain[n] - start[n] for n in plain if is_matrix(n)}
    assert_equal_weights({n: clipped[n] - start[n] for n in moved}, moved, 1e-4)
