"""Stock checkpointing of dedicated models: what a state dict holds, what a load brings back, and what it refuses."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from harness.assertions import assert_equal_weights
from harness.oracle import Reference, reference_weights
from harness.pool import RankPool
from harness.toy import batch, build
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import dmuon
from dmuon.check.model import Block, Network, Size, is_matrix, loss_of, shard
from dmuon.check.topologies import full_state
from dmuon.dedicated.owned_tensor import OwnedTensor

CLASSIC = (3.4445, -4.7750, 2.0315)
OPTIONS: dict[str, Any] = {"lr": 2e-3, "weight_decay": 0.1, "ns_coefficients": "classic"}
FSDP, TWO_LINES = "fsdp2", "two-lines"
SAVED, TOTAL = 3, 5  # steps before the checkpoint, and in all


class BufferedBlock(Block):
    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.register_buffer("cache", torch.zeros(2), persistent=False)


def dedicated(rank: int, world: int, mode: str = FSDP, keep: bool = False, seed: int = 0, **toy: Any) -> Network:
    model = build(seed=seed + rank, **toy)  # rank 0's weights count
    mesh = init_device_mesh("cpu", (world,))
    dmuon.dedicate_params(model, mesh, costs="flops", reshard_after_forward=not keep)
    if mode == FSDP:
        for block in model.blocks:
            dmuon.fully_shard(block, mesh=mesh, reshard_after_forward=not keep)
        dmuon.fully_shard(model, mesh=mesh)
    return model


def train(model: nn.Module, optimizer: Any, rank: int, world: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, *shard(batch(step), rank, world)).backward()
        optimizer.step()


def local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def momenta(model: nn.Module, optimizer: dmuon.Muon) -> Iterator[tuple[str, Tensor]]:
    """Local momentum of every Muon parameter."""
    for name, param in model.named_parameters():
        value = optimizer.state[param].get("momentum_buffer")
        if value is not None:
            yield name, local(value)


def leaves(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from leaves(value)


# -- resume --------------------------------------------------------------------------------------------------------


def save(rank: int, world: int, path: str, mode: str, keep: bool, flat: bool = False) -> None:
    model = dedicated(rank, world, mode, keep)
    optimizer = dmuon.Muon(model, **OPTIONS)
    train(model, optimizer, rank, world, range(SAVED))
    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)


def resume(
    rank: int, world: int, path: str, mode: str, keep: bool, flat: bool = False, reorder: bool = False
) -> dict[str, Tensor]:
    model = dedicated(rank, world, mode, keep, seed=50)
    groups: list[dict[str, Any]] = dmuon.param_groups(model)
    if reorder:
        groups = [{**g, "params": g["params"][::-1]} for g in (groups[::-1] if flat else groups)]
    optimizer = dmuon.Muon(groups, **{**OPTIONS, "lr": 1.0})  # the saved lr must come back
    train(model, optimizer, rank, world, range(1))  # buffers and momentum hold something to be overwritten
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, state = get_state_dict(model, optimizer, options=options)
    loaded = {"model": weights, "optimizer": state}
    dcp.load(loaded, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=loaded["optimizer"], options=options)
    assert {g["lr"] for g in optimizer.param_groups} == {OPTIONS["lr"]}
    assert all(m.dtype == torch.float32 for _, m in momenta(model, optimizer))
    train(model, optimizer, rank, world, range(SAVED, TOTAL))
    return full_state(model)


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, Tensor]:
    return reference_weights(TOTAL)


@pytest.mark.pitfall("P23", "P27", "P28", "P29")
@pytest.mark.parametrize(
    ("before", "after", "modes", "keep"),
    [
        (2, 2, (FSDP, FSDP), False),
        (2, 2, (TWO_LINES, TWO_LINES), True),
        (1, 2, (FSDP, FSDP), False),
        (2, 3, (FSDP, FSDP), True),
        (4, 2, (FSDP, FSDP), False),
        (2, 1, (FSDP, FSDP), False),
        (2, 3, (TWO_LINES, TWO_LINES), False),
        (4, 2, (TWO_LINES, FSDP), False),
        (3, 2, (FSDP, TWO_LINES), True),
    ],
)
def test_resume_continues_the_uninterrupted_run(
    ranks: RankPool,
    tmp_path: Path,
    uninterrupted: dict[str, Tensor],
    before: int,
    after: int,
    modes: tuple[str, str],
    keep: bool,
) -> None:
    ranks(before, save, str(tmp_path), modes[0], keep)
    for weights in ranks(after, resume, str(tmp_path), modes[1], keep):
        assert_equal_weights(weights, uninterrupted)


@pytest.mark.pitfall("P31")
@pytest.mark.parametrize("flat", [False, True], ids=["parameters", "parameters-and-groups"])
def test_optimizer_state_follows_names_when_reordered(
    ranks: RankPool, tmp_path: Path, uninterrupted: dict[str, Tensor], flat: bool
) -> None:
    """DCP keys groups by position unless ``flatten_optimizer_state_dict`` is set; state by name always."""
    ranks(2, save, str(tmp_path), FSDP, False, flat)
    for weights in ranks(3, resume, str(tmp_path), FSDP, False, flat, True):
        assert_equal_weights(weights, uninterrupted)


def two_optimizers(rank: int, world: int, path: str) -> dict[str, Tensor]:
    def fresh(seed: int) -> tuple[Network, list[torch.optim.Optimizer]]:
        model = dedicated(rank, world, seed=seed)
        owned = dmuon.owned_parameters(model)
        rest = [p for p in model.parameters() if p not in owned]
        groups = [
            {"params": [p for p in rest if p.ndim >= 2], "weight_decay": OPTIONS["weight_decay"]},
            {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
        ]
        adamw = torch.optim.AdamW(groups, lr=OPTIONS["lr"], betas=(0.9, 0.95))
        return model, [dmuon.Muon(owned, **OPTIONS), adamw]

    def steps(model: Network, optimizers: list[torch.optim.Optimizer], which: range) -> None:
        for step in which:
            model.zero_grad()
            loss_of(model, *shard(batch(step), rank, world)).backward()
            for optimizer in optimizers:
                optimizer.step()

    model, optimizers = fresh(0)
    steps(model, optimizers, range(SAVED))
    weights, state = get_state_dict(model, optimizers)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
    model, optimizers = fresh(50)
    weights, state = get_state_dict(model, optimizers)
    loaded = {"model": weights, "optimizer": state}
    dcp.load(loaded, checkpoint_id=path)
    set_state_dict(model, optimizers, model_state_dict=weights, optim_state_dict=loaded["optimizer"])
    steps(model, optimizers, range(SAVED, TOTAL))
    return full_state(model)


@pytest.mark.pitfall("P23")
def test_muon_beside_another_optimizer_resumes(
    ranks: RankPool, tmp_path: Path, uninterrupted: dict[str, Tensor]
) -> None:
    for weights in ranks(2, two_optimizers, str(tmp_path)):
        assert_equal_weights(weights, uninterrupted)


def scheduled(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def scheduler_round_trip(rank: int, world: int) -> tuple[dict[str, Tensor], list[list[float]]]:
    model = dedicated(rank, world, TWO_LINES)
    optimizer = dmuon.Muon(model, **OPTIONS, adamw_lr=5e-4)
    scheduler = scheduled(optimizer)
    seen: list[list[float]] = []
    for step in range(4):
        if step == 2:
            weights, state, position = model.state_dict(), optimizer.state_dict(), scheduler.state_dict()
            model = dedicated(rank, world, TWO_LINES, seed=9)
            optimizer = dmuon.Muon(model, **OPTIONS, adamw_lr=5e-4)
            scheduler = scheduled(optimizer)
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
            scheduler.load_state_dict(position)
        seen.append([g["lr"] for g in optimizer.param_groups])
        train(model, optimizer, rank, world, range(step, step + 1))
        scheduler.step()
    return full_state(model), seen


def test_scheduler_resumes_with_the_optimizer(ranks: RankPool) -> None:
    model = build()
    reference = Reference(model, adamw_lr=5e-4)
    schedulers = [scheduled(reference.muon), scheduled(reference.adamw)]
    for step in range(4):
        reference.zero_grad()
        loss_of(model, *batch(step)).backward()
        reference.step()
        for scheduler in schedulers:
            scheduler.step()
    for weights, seen in ranks(2, scheduler_round_trip):
        assert seen == [pytest.approx([r / (1 + s) for r in (2e-3, 5e-4, 5e-4)]) for s in range(4)]
        assert_equal_weights(weights, dict(model.state_dict()))


# -- what a state dict holds ---------------------------------------------------------------------------------------


def contents(rank: int, world: int, mode: str, keep: bool) -> dict[str, Any]:
    model = dedicated(rank, world, mode, keep, tied=True, block=BufferedBlock)
    optimizer = dmuon.Muon(model, **OPTIONS)
    initial = full_state(model)
    train(model, optimizer, rank, world, range(1))  # buffers are filled ahead, or kept
    weights, state = model.state_dict(), optimizer.state_dict()
    _, named = get_state_dict(model, optimizer)
    part = model.blocks[1].state_dict(prefix="part.")
    for tensor in leaves([weights, state, named, part]):
        assert not isinstance(tensor, OwnedTensor)
        if isinstance(tensor, DTensor):
            tensor.full_tensor()
            rows = tensor.shape[0]
            size = -(-rows // world)
            assert len(local(tensor)) == max(0, min(size, rows - rank * size)), "even row shards"
    parameters = dict(model.named_parameters())
    return {
        "initial": initial,
        "shapes": {n: t.shape for n, t in weights.items()},
        "part": sorted(part),
        "alias": weights["head.weight"] is weights["embed.weight"]
        or torch.equal(local(weights["head.weight"]), local(weights["embed.weight"])),
        "momentum": {n: v["momentum_buffer"].shape for n, v in named["state"].items() if "momentum_buffer" in v},
        "owned": {n for n, p in parameters.items() if isinstance(p, OwnedTensor)},
        "order": list(state["state"]),
        "named order": list(named["state"]),
    }


@pytest.mark.pitfall("P27")
@pytest.mark.parametrize(("mode", "keep"), [(FSDP, False), (FSDP, True), (TWO_LINES, True)])
def test_state_dict_is_what_a_plain_model_has(ranks: RankPool, mode: str, keep: bool) -> None:
    plain = build(tied=True, block=BufferedBlock)
    expected = plain.state_dict()
    found = ranks(3, contents, mode, keep)
    for result in found:
        assert result["shapes"] == {n: t.shape for n, t in expected.items()}
        assert result["part"] == sorted("part." + n for n in plain.blocks[1].state_dict())
        assert result["owned"] == {n for n in expected if is_matrix(n)}
        assert result["momentum"] == {n: t.shape for n, t in expected.items() if is_matrix(n)}
        assert result["alias"]
        for name, value in expected.items():
            assert torch.equal(result["initial"][name], value), name
        # Whoever gathers a state dict walks it in its own order, collectively.
        assert result["order"] == found[0]["order"] == sorted(result["order"])
        assert result["named order"] == found[0]["named order"]


# -- plain checkpoints in and out ----------------------------------------------------------------------------------


def export(rank: int, world: int, mode: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    model = dedicated(rank, world, mode)
    optimizer = dmuon.Muon(model, **OPTIONS)
    train(model, optimizer, rank, world, range(SAVED))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, state = get_state_dict(model, optimizer, options=options)
    return dict(weights), dict(state)


@pytest.mark.pitfall("P27", "P33")
@pytest.mark.parametrize("mode", [FSDP, TWO_LINES])
def test_full_state_dict_loads_into_plain_module_and_stock_optimizers(
    ranks: RankPool, uninterrupted: dict[str, Tensor], mode: str
) -> None:
    weights, state = ranks(3, export, mode)[0]
    model = build(seed=3)
    model.load_state_dict(weights)
    reference = Reference(model)
    for optimizer in (reference.muon, reference.adamw):
        names = {p: n for n, p in model.named_parameters()}
        stock = optimizer.state_dict()
        params = [p for g in optimizer.param_groups for p in g["params"]]
        stock["state"] = {i: state["state"][names[p]] for i, p in enumerate(params)}
        optimizer.load_state_dict(stock)
    for step in range(SAVED, TOTAL):
        reference.zero_grad()
        loss_of(model, *batch(step)).backward()
        reference.step()
    assert_equal_weights(dict(model.state_dict()), uninterrupted)


@pytest.mark.pitfall("P33")
def test_checkpoint_converts_to_one_plain_file(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, save, str(tmp_path / "sharded"), FSDP, False)
    dcp_to_torch_save(tmp_path / "sharded", tmp_path / "plain.pt")
    state = torch.load(tmp_path / "plain.pt", weights_only=False)
    model = build(seed=3)
    model.load_state_dict(state["model"])
    assert_equal_weights(dict(model.state_dict()), reference_weights(SAVED))


def load_plain(rank: int, world: int, path: str, mode: str) -> dict[str, Tensor]:
    model = dedicated(rank, world, mode, seed=5)
    if mode == TWO_LINES:
        model.load_state_dict(torch.load(os.path.join(path, "plain.pt")))
    else:
        weights = {"model": get_model_state_dict(model)}
        dcp.load(weights, checkpoint_id=os.path.join(path, "sharded"))
        set_model_state_dict(model, weights["model"])
    return full_state(model)


@pytest.mark.pitfall("P33")
def test_plain_checkpoint_loads_into_dedicated_model(ranks: RankPool, tmp_path: Path) -> None:
    expected = build(seed=1).state_dict()
    torch.save(expected, tmp_path / "plain.pt")
    torch.save({"model": expected}, tmp_path / "nested.pt")
    torch_save_to_dcp(tmp_path / "nested.pt", tmp_path / "sharded")
    for mode in (FSDP, TWO_LINES):
        for weights in ranks(3, load_plain, str(tmp_path), mode):
            assert all(torch.equal(weights[n], t) for n, t in expected.items())


def full_optimizer_state(rank: int, world: int, mode: str, from_rank0: bool) -> dict[str, Tensor]:
    model = dedicated(rank, world, mode)
    optimizer = dmuon.Muon(model, **OPTIONS)
    train(model, optimizer, rank, world, range(SAVED))
    state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    fresh = dmuon.Muon(model, **{**OPTIONS, "lr": 1.0})
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank0)
    set_optimizer_state_dict(model, fresh, state if rank == 0 or not from_rank0 else {}, options=options)
    train(model, fresh, rank, world, range(SAVED, TOTAL))
    return full_state(model)


@pytest.mark.pitfall("P33")
@pytest.mark.parametrize("from_rank0", [False, True], ids=["everywhere", "from-rank-0"])
@pytest.mark.parametrize("mode", [FSDP, TWO_LINES])
def test_full_optimizer_state_loads(
    ranks: RankPool, uninterrupted: dict[str, Tensor], mode: str, from_rank0: bool
) -> None:
    for weights in ranks(2, full_optimizer_state, mode, from_rank0):
        assert_equal_weights(weights, uninterrupted)


@pytest.mark.pitfall("P33")
def test_torch_muon_state_loads_and_goes_back() -> None:
    """One process, the same options: a run may switch between the two optimizers at any step."""
    model = build()
    matrices = [p for n, p in model.named_parameters() if is_matrix(n)]
    options = {"lr": 2e-3, "weight_decay": 0.1, "ns_coefficients": CLASSIC}
    expected = {}
    reference = Reference(model)
    for step in range(6):
        reference.zero_grad()
        loss_of(model, *batch(step)).backward()
        reference.step()
    expected = copy.deepcopy(model.state_dict())

    model.load_state_dict(build().state_dict())
    reference = Reference(model)
    ours = dmuon.Muon([{"params": matrices, "use_muon": True}], **options)
    for step in range(6):
        model.zero_grad()
        loss_of(model, *batch(step)).backward()
        if step == 2:
            ours.load_state_dict(reference.muon.state_dict())
            assert all(
                torch.equal(ours.state[p]["momentum_buffer"], reference.muon.state[p]["momentum_buffer"])
                for p in matrices
            )
        if step == 4:
            reference.muon.load_state_dict(ours.state_dict())
        if step in (2, 3):
            ours.step()
            reference.adamw.step()
        else:
            reference.step()
    assert_equal_weights(dict(model.state_dict()), dict(expected))


@pytest.mark.pitfall("P33")
def test_state_of_torch_muon_with_default_options_loads() -> None:
    """torch says None for its default factor, and knows no ``use_muon`` or ``ns_dtype``."""
    weight, other = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(5, 3))
    stock, ours = torch.optim.Muon([weight]), dmuon.Muon([other], ns_dtype=torch.float64)
    weight.grad = torch.randn(5, 3)
    stock.step()
    ours.load_state_dict(stock.state_dict())
    group = ours.param_groups[0]
    assert group["use_muon"] is True and group["ns_dtype"] is torch.float64
    assert (group["lr"], group["ns_coefficients"], group["eps"]) == (1e-3, CLASSIC, 1e-7)
    assert group["adjust_lr_fn"] is None
    other.grad = torch.randn(5, 3)
    ours.step()
    assert ours.last_step.ns_matrices == 1


def adopt_torch_momentum(rank: int, world: int, weights: Any, muon: Any) -> dict[str, Tensor]:
    model = dedicated(rank, world, TWO_LINES, seed=4)
    model.load_state_dict(weights)
    matrices = [p for p in model.parameters() if isinstance(p, OwnedTensor)]
    optimizer = dmuon.Muon(matrices)
    optimizer.load_state_dict(muon)
    for step in range(SAVED, TOTAL):
        model.zero_grad()
        loss_of(model, *shard(batch(step), rank, world)).backward()
        optimizer.step()
    return {n: t for n, t in full_state(model).items() if is_matrix(n)}


@pytest.mark.pitfall("P33")
def test_torch_muon_state_of_one_process_loads_into_owners(ranks: RankPool) -> None:
    model = build()
    reference = Reference(model)
    for step in range(TOTAL):
        if step == SAVED:
            weights, muon = copy.deepcopy((model.state_dict(), reference.muon.state_dict()))
        reference.zero_grad()
        loss_of(model, *batch(step)).backward()
        if step < SAVED:
            reference.step()
        else:
            reference.adamw = torch.optim.SGD(model.parameters(), lr=0.0)
            reference.step()
    expected = {n: t for n, t in model.state_dict().items() if is_matrix(n)}
    for found in ranks(3, adopt_torch_momentum, weights, muon):
        assert_equal_weights(found, expected)


# -- loading -------------------------------------------------------------------------------------------------------


def forward_after_load(rank: int, world: int, mode: str, keep: bool, stepped: bool) -> Tensor:
    source = dedicated(rank, world, mode, seed=1)
    model = dedicated(rank, world, mode, keep, seed=20)
    optimizer = dmuon.Muon(model, **OPTIONS)
    model(batch(0)[0])  # fills buffers
    if stepped:
        train(model, optimizer, rank, world, range(1))  # and fills the first ones ahead
    set_model_state_dict(model, get_model_state_dict(source))
    with torch.no_grad():
        return model(batch(1)[0])


@pytest.mark.pitfall("P17", "P28")
@pytest.mark.parametrize("keep", [False, True], ids=["reshard", "keep"])
@pytest.mark.parametrize("mode", [FSDP, TWO_LINES])
def test_forward_after_load_uses_loaded_weights(ranks: RankPool, mode: str, keep: bool) -> None:
    with torch.no_grad():
        expected = build(seed=1)(batch(1)[0])
    for stepped in (False, True):
        for output in ranks(2, forward_after_load, mode, keep, stepped):
            torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)


def reload_momentum(rank: int, world: int, dtype: torch.dtype) -> float:
    model = dedicated(rank, world)
    optimizer = dmuon.Muon(model, **OPTIONS)
    train(model, optimizer, rank, world, range(2))
    before = {n: m.clone() for n, m in momenta(model, optimizer)}
    state = optimizer.state_dict()
    for values in state["state"].values():
        if "momentum_buffer" in values:
            values["momentum_buffer"] = values["momentum_buffer"].to(dtype)
    optimizer.load_state_dict(state)
    worst = 0.0
    for name, momentum in momenta(model, optimizer):
        assert momentum.dtype == torch.float32
        assert torch.equal(momentum, before[name].to(dtype).float()), name
        worst = max(worst, float((momentum - before[name]).abs().max()) if momentum.numel() else 0.0)
    train(model, optimizer, rank, world, range(2, 3))
    assert all(m.dtype == torch.float32 and m.isfinite().all() for _, m in momenta(model, optimizer))
    return worst


@pytest.mark.pitfall("P23", "P32")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_momentum_is_fp32_whatever_dtype_was_saved(ranks: RankPool, dtype: torch.dtype) -> None:
    worst = max(ranks(2, reload_momentum, dtype))
    assert (worst == 0.0) == (dtype == torch.float64)


@pytest.mark.pitfall("P23")
def test_momentum_of_bf16_parameters_survives_a_round_trip_exactly() -> None:
    """``torch.optim.Optimizer.load_state_dict`` casts state to the parameter's dtype."""
    model = build().to(torch.bfloat16)
    optimizer = dmuon.Muon(model, **OPTIONS)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, *batch(step)).backward()
        optimizer.step()
    before = {n: m.clone() for n, m in momenta(model, optimizer)}
    again = dmuon.Muon(model, **OPTIONS)
    again.load_state_dict(optimizer.state_dict())
    for name, momentum in momenta(model, again):
        assert momentum.dtype == torch.float32 and torch.equal(momentum, before[name]), name


def load_own_parameters(rank: int, world: int) -> None:
    model, other = dedicated(rank, world, TWO_LINES, seed=2), dedicated(rank, world, TWO_LINES, seed=7)
    expected = full_state(other)
    kept = {n: p.detach().clone() for n, p in other.named_parameters()}  # what an average of weights would hold
    model.load_state_dict(kept)
    found = full_state(model)
    assert all(torch.equal(found[n], t) for n, t in expected.items())


def test_copies_of_resting_parameters_load(ranks: RankPool) -> None:
    ranks(3, load_own_parameters)


# -- saving --------------------------------------------------------------------------------------------------------


def save_and_compare(rank: int, world: int, mode: str, keep: bool) -> dict[str, Tensor]:
    model = dedicated(rank, world, mode, keep)
    optimizer = dmuon.Muon(model, **OPTIONS)

    def snapshot() -> tuple[list[Tensor], list[Any]]:
        tensors = [*model.parameters()] + [p.grad for p in model.parameters() if p.grad is not None]
        tensors += [v for p in model.parameters() for v in optimizer.state[p].values()]
        options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        return [local(t).clone() for t in tensors], options

    def store() -> None:
        model.state_dict()
        optimizer.state_dict()
        get_state_dict(model, optimizer)
        get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))

    def unchanged() -> None:
        before, options = snapshot()
        store()
        after, same = snapshot()
        assert len(before) == len(after) and options == same
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

    unchanged()  # no dummy step creates state
    for step in range(TOTAL):
        optimizer.zero_grad()
        loss_of(model, *shard(batch(step), rank, world)).backward()
        if step == 2:
            assert all(p.grad is not None for p in model.parameters())
            unchanged()
        optimizer.step()
        if step == 3:
            unchanged()
    return full_state(model)


@pytest.mark.pitfall("P30")
@pytest.mark.parametrize(("mode", "keep"), [(FSDP, False), (TWO_LINES, True)])
def test_saving_changes_nothing(ranks: RankPool, uninterrupted: dict[str, Tensor], mode: str, keep: bool) -> None:
    for weights in ranks(2, save_and_compare, mode, keep):
        assert_equal_weights(weights, uninterrupted)


# -- refusals ------------------------------------------------------------------------------------------------------

KEY = "blocks.1.up.weight"


def load_faulty(rank: int, world: int, fault: str, everywhere: bool) -> None:
    model = dedicated(rank, world, TWO_LINES)
    state = build(seed=1).state_dict()
    if everywhere or rank == 1:
        if fault == "missing":
            del state[KEY]
        elif fault == "shape":
            state[KEY] = state[KEY][:-1]
        else:
            state[KEY] = None  # type: ignore[assignment]
    model.load_state_dict(state)


@pytest.mark.pitfall("P27", "P48")
@pytest.mark.parametrize("everywhere", [True, False], ids=["all-ranks", "one-rank"])
@pytest.mark.parametrize("fault", ["missing", "shape", "none"])
def test_faulty_weights_raise_on_every_rank(ranks: RankPool, fault: str, everywhere: bool) -> None:
    ranks(2, load_faulty, fault, everywhere, timeout=20.0, expect=RuntimeError, match=KEY.replace(".", r"\."))


def load_missing_from_dcp(rank: int, world: int) -> None:
    model = dedicated(rank, world)
    state = get_model_state_dict(model)
    del state[KEY]
    set_model_state_dict(model, state)


def test_missing_key_raises_through_stock_api(ranks: RankPool) -> None:
    ranks(2, load_missing_from_dcp, timeout=20.0, expect=RuntimeError, match=KEY.replace(".", r"\."))


def load_faulty_optimizer(rank: int, world: int, fault: str, everywhere: bool) -> None:
    model = dedicated(rank, world, TWO_LINES)
    optimizer = dmuon.Muon(model, **OPTIONS)
    state = optimizer.state_dict()
    if everywhere or rank == 1:
        groups = state["param_groups"]
        if fault == "fewer":
            groups[0]["params"] = groups[0]["params"][:-1]
        elif fault == "moved":  # the same count in all
            groups[1]["params"] = [groups[0]["params"].pop(), *groups[1]["params"]]
        elif fault == "shape":
            state["state"][0]["momentum_buffer"] = torch.zeros(3, 3)
        else:
            groups[0]["use_muon"] = False
    optimizer.load_state_dict(state)


@pytest.mark.pitfall("P31", "P48")
@pytest.mark.parametrize("everywhere", [True, False], ids=["all-ranks", "one-rank"])
@pytest.mark.parametrize(
    ("fault", "message"),
    [("fewer", "parameters"), ("moved", "group 0"), ("shape", r"blocks\.0\.mix\.weight"), ("route", "use_muon")],
)
def test_faulty_optimizer_state_raises_on_every_rank(
    ranks: RankPool, fault: str, message: str, everywhere: bool
) -> None:
    ranks(2, load_faulty_optimizer, fault, everywhere, timeout=20.0, expect=ValueError, match=message)


def test_faulty_optimizer_state_raises_in_one_process() -> None:
    model = build()
    optimizer = dmuon.Muon(model, **OPTIONS)
    state = optimizer.state_dict()
    state["state"][0]["momentum_buffer"] = torch.zeros(1, 13)  # copying would broadcast it
    with pytest.raises(ValueError, match=r"momentum.*\(1, 13\)"):
        optimizer.load_state_dict(state)
    smaller = dmuon.Muon(build(layers=2), **OPTIONS)
    with pytest.raises(ValueError, match="parameters"):
        optimizer.load_state_dict(smaller.state_dict())


def load_full(rank: int, world: int, mode: str, from_rank0: bool, summon: bool) -> dict[str, Tensor]:
    model = dedicated(rank, world, mode, keep=True)
    state = build(seed=1).state_dict() if rank == 0 or not from_rank0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank0)
    with dmuon.summon_full_params(model) if summon else nullcontext():
        set_model_state_dict(model, state, options=options)
        if summon:
            assert torch.equal(model.state_dict()[KEY], build(seed=1).state_dict()[KEY])
    return full_state(model)


@pytest.mark.pitfall("P33")
@pytest.mark.parametrize(
    ("from_rank0", "summon"),
    [(False, False), (False, True), (True, False), (True, True)],
    ids=["everywhere", "summoned", "from-rank-0", "summoned-from-rank-0"],
)
@pytest.mark.parametrize("mode", [FSDP, TWO_LINES])
def test_full_weights_load(ranks: RankPool, mode: str, from_rank0: bool, summon: bool) -> None:
    expected = build(seed=1).state_dict()
    for weights in ranks(2, load_full, mode, from_rank0, summon):
        assert all(torch.equal(weights[n], t) for n, t in expected.items())


def load_assign(rank: int, world: int) -> None:
    dedicated(rank, world, TWO_LINES).load_state_dict(build().state_dict(), assign=True)


def test_assign_is_refused(ranks: RankPool) -> None:
    ranks(2, load_assign, expect=ValueError, match="assign=False")
