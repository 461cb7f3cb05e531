"""Experts over groups of ranks, dedicated within the ranks that hold the same ones, before everything else is."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from harness.assertions import assert_equal_weights
from harness.checkpoints import Run, load, save
from harness.dedicated_toy import dedicate, default_mesh
from harness.dtensors import local_tensor
from harness.heard import heard
from harness.network import full_state, shard_blocks
from harness.on_ranks import on_ranks, slowly
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import dmuon
from dmuon.dedicated.dedication import dedications
from dmuon.dedicated.owned_tensor import OwnedTensor
from dmuon.integrations import require_whole

WIDTH, EXPERTS, LAYERS, TOKENS, VOCAB = 8, 4, 2, 5, 16
STEPS, MAX_NORM = 4, 0.05
OPTIONS: dict[str, Any] = {"lr": 2e-2, "adamw_lr": 1e-2, "ns_coefficients": "classic"}


class _Share(torch.autograd.Function):
    """A loss is the mean over all ranks; that of what a group has alone is the sum of its shares."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: int) -> Tensor:
        ctx.parts = parts
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.parts, None


class Experts(nn.Module):
    """Stacks ``(experts here, out, in)``. The tokens that this rank has are those of its experts."""

    def __init__(self, up: Tensor, down: Tensor, bias: Tensor, groups: int) -> None:
        super().__init__()
        self.up, self.down, self.bias, self.groups = nn.Parameter(up), nn.Parameter(down), nn.Parameter(bias), groups

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        weights = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down, self.bias))
        up, down, bias = (_Share.apply(w, self.groups) for w in weights)
        of_experts = torch.stack([F.gelu(x @ u.T) @ d.T + b for u, d, b in zip(up, down, bias, strict=True)])
        return of_experts[expert % len(up), torch.arange(len(x))]


class Block(nn.Module):
    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = experts

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        h = self.norm(x)
        weight = self.router(h).softmax(-1).gather(1, expert[:, None])
        return x + self.mix(h) + weight * self.experts(h, expert)


class Model(nn.Module):
    def __init__(self, seed: int = 0, mesh: DeviceMesh | None = None, stored: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks = nn.ModuleList()
        for _ in range(LAYERS):
            shapes = (EXPERTS, 2 * WIDTH, WIDTH), (EXPERTS, WIDTH, 2 * WIDTH), (EXPERTS, WIDTH)
            weights = [0.3 * torch.randn(shape) for shape in shapes]
            if mesh is not None:
                weights = [w.tensor_split(mesh.size())[mesh.get_local_rank()].clone() for w in weights]
            if mesh is not None and stored == "DTensor":
                weights = [DTensor.from_local(w, mesh, [Shard(0)]) for w in weights]
            self.blocks.append(Block(Experts(*weights, 1 if mesh is None else mesh.size())))

    def experts(self) -> list[Experts]:
        return [block.experts for block in self.blocks]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, tokens % EXPERTS)
        return self.head(x)


def batch(step: int, rank: int = 0, world: int = 1) -> tuple[Tensor, Tensor]:
    """Of four parts every second one has tokens of the first two experts alone, the others those of the last two."""
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB // 2, (4, TOKENS), generator=draw)
    of_group = 2 * (torch.arange(4) % 2)[:, None]
    mine = (tokens // 2 * EXPERTS + of_group + tokens % 2)[rank::world].flatten()
    return mine, (3 * mine + 1) % VOCAB


def train(
    model: nn.Module, optimizer: dmuon.Muon, steps: range, rank: int = 0, world: int = 1, *, clip: bool = True
) -> list[float]:
    norms = []
    for step in steps:
        tokens, targets = batch(step, rank, world)
        optimizer.zero_grad()
        F.cross_entropy(model(tokens), targets).backward()
        if clip:
            norms.append(float(dmuon.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
    return norms


def reference(clip: bool) -> tuple[dict[str, Tensor], list[float]]:
    model = Model()
    optimizer = dmuon.Muon(model, exclude=["*.router", "*.bias"], **OPTIONS)
    norms = train(model, optimizer, range(STEPS), clip=clip)
    return dict(model.state_dict()), norms


def laid(stored: str, rest: str, seed: int = 0) -> tuple[Model, dmuon.Muon, DeviceMesh]:
    """Experts over two groups of two ranks each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep_shard", "ep"))
    model = Model(seed, mesh["ep"], stored)
    dedicate(model.experts(), mesh["ep_shard"], exclude=["*.bias"])
    if rest == "dedicated":
        dedicate(model, exclude=["*.router"])
        return model, dmuon.Muon(model, **OPTIONS), mesh["ep"]
    shard_blocks(model, default_mesh(), dmuon.fully_shard)
    names = dict(model.named_parameters())
    muon = [p for name, p in names.items() if name.endswith((".mix.weight", ".up", ".down"))]
    others = [p for p in names.values() if not any(p is one for one in muon)]
    vectors, tables = ([p for p in others if (p.ndim < 2) == flat] for flat in (True, False))
    groups = [
        {"params": muon, "use_muon": True},
        {"params": tables, "use_muon": False},
        {"params": vectors, "use_muon": False, "weight_decay": 0.0},
    ]
    config = dmuon.create_dtensor_config(costs="flops")
    return model, dmuon.Muon(groups, distributed_config=config, **OPTIONS), mesh["ep"]


@on_ranks(2)
def test_experts_that_get_no_token_leave_a_step_to_others(rank: int, world: int) -> None:
    model = Model()
    dedicate(model.experts(), exclude=["*.bias"])
    optimizer = dmuon.Muon(dedicate(model, exclude=["*.router"]), **OPTIONS)
    for experts in model.experts():
        experts.forward = lambda x, expert: torch.zeros_like(x) + 0 * x  # type: ignore[method-assign]
    before = full_state(model)
    train(model, optimizer, range(1), rank, world)
    after = full_state(model)
    assert {name for name in before if torch.equal(before[name], after[name])} == {
        name for name in before if ".experts." in name
    }


def whole(model: Model, ep: DeviceMesh) -> dict[str, Tensor]:
    """Of all groups' experts."""
    found = full_state(model)
    for name, tensor in found.items():
        if len(tensor) < EXPERTS and ".experts." in name:
            parts = [torch.empty_like(tensor) for _ in range(ep.size())]
            dist.all_gather(parts, tensor.contiguous(), group=ep.get_group())
            found[name] = torch.cat(parts)
    return found


@pytest.mark.parametrize(
    ("stored", "rest", "saved"),
    [("plain", "dedicated", False), ("DTensor", "dedicated", True), *slowly(("DTensor", "fsdp2", False))],
)
@on_ranks(4)
def test_experts_of_groups_equal_a_single_process(
    rank: int, world: int, stored: str, rest: str, saved: bool, tmp_path: Path
) -> None:
    """Plain parts of a stack, or a DTensor over the expert-parallel dimension, whose norm is that of all groups.

    What is saved goes on in another model, from a checkpoint of all groups.
    """
    clip = stored == "DTensor"
    model, optimizer, ep = laid(stored, rest)
    found = train(model, optimizer, range(2), rank, world, clip=clip)
    if saved:
        save(Run(model, optimizer, lambda part: part), str(tmp_path))
        model, optimizer, ep = laid(stored, rest, seed=1)
        load(Run(model, optimizer, lambda part: part), str(tmp_path))
    of_experts, *others = dedications(model)[::-1]
    assert len(others) == (rest == "dedicated"), "one dedication of all layers' experts, and one of the rest"
    expected, norms = reference(clip)
    found += train(model, optimizer, range(2, STEPS), rank, world, clip=clip)
    assert_equal_weights(whole(model, ep), expected)
    assert found == pytest.approx(norms, rel=1e-5)
    if not clip:
        with pytest.raises(ValueError, match=r"'0\.\w+' and its like is known on ranks .* only, and r"):
            dmuon.clip_grad_norm_(model.parameters(), MAX_NORM)
        apart = dmuon.clip_grad_norm_([p for block in model.blocks for p in block.experts.parameters()], math.inf)
        both = [torch.empty(()) for _ in range(world)]
        dist.all_gather(both, apart)
        assert both[rank] == both[(rank + 2) % world] != both[rank - 1], "each group's own"
    comm = of_experts.runtime.comm
    mine = [name for name, owner in of_experts.plan.owners.items() if comm.topology.ranks[owner] == rank]
    assert len(mine) == LAYERS * 2 * EXPERTS / world, "planned together, each over the ranks that hold it"
    if stored == "DTensor":
        first = ep.get_local_rank() * EXPERTS // 2
        assert {int(name[-2]) for name in mine} <= {first, first + 1}, "an owner holds what it owns"
    matrices = torch.tensor(optimizer.last_step.ns_matrices)
    dist.all_reduce(matrices)
    assert matrices == LAYERS * (2 * EXPERTS + 1), "each matrix is orthogonalized once"


@on_ranks(2)
def test_what_was_dedicated_before_keeps_its_values_and_its_gradients(rank: int, world: int) -> None:
    """The outer call neither gives it the first rank's values, nor averages its gradients over all ranks.

    Stacks by one name in several groups are told when they are saved.
    """
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ep_shard", "ep"))
    model = Model(0, mesh["ep"])
    model.blocks[0].experts.shift = nn.Parameter(torch.full((2, WIDTH), float(rank)))
    model.blocks[0].experts.register_buffer("seen", torch.full((1,), float(rank)))
    before = [block.experts.up.detach().clone() for block in model.blocks]
    dedicate(model.experts(), mesh["ep_shard"], exclude=["*.bias", "*.shift"])
    dedicate(model, exclude=["*.router"])
    assert model.blocks[0].experts.shift.eq(rank).all() and model.blocks[0].experts.seen.eq(rank).all()
    for block, value in zip(model.blocks, before, strict=True):
        assert isinstance(block.experts.up, OwnedTensor)
        assert torch.equal(local_tensor(block.experts.up).view_as(value), value), "a group of one rank has it whole"
    optimizer = dmuon.Muon(model, **OPTIONS)
    tokens, targets = batch(0, rank, world)
    extra = model.blocks[0].experts.shift.sum() * (rank + 1)
    (F.cross_entropy(model(tokens), targets) + extra).backward()
    grad = model.blocks[0].experts.shift.grad
    assert grad is not None and grad.eq(rank + 1).all()
    optimizer.step()
    text = dmuon.explain(model, optimizer)
    assert "blocks.1.experts.up" in text and "blocks.0.experts.shift" in text and "outside what" not in text
    with heard() as told:
        model.state_dict()
        model.state_dict()
    assert len(told) == 1 and "are other weights on ranks" in told[0] and "by the same names" in told[0]
    with pytest.raises(ValueError, match=r"are other weights on ranks .*, so one file cannot"):
        require_whole(model)


def in_another_order(rank: int) -> Model:
    """Its experts are dedicated as a list, backwards on rank 1. All elements are alike, so the list shows nothing."""
    model = Model()
    dedicate(model.experts()[:: -1 if rank else 1], exclude=["*.bias"])
    return model


@on_ranks(2)
def test_lists_in_another_order_are_told_before_training_or_under_fsdp2_before_the_first_step(
    rank: int, world: int
) -> None:
    with pytest.raises(ValueError, match=r"place of 'blocks\.0\.experts' in a list"):
        dedicate(in_another_order(rank), exclude=["*.router"])
    model = in_another_order(rank)
    shard_blocks(model, default_mesh(), dmuon.fully_shard)
    tokens, targets = batch(0, rank, world)
    loss = F.cross_entropy(model(tokens), targets)
    with pytest.raises(dmuon.CollectiveError, match=r"issued different collectives: .fill of block .* on rank 1 where"):
        loss.backward()


@on_ranks(2)
def test_fsdp2_leaves_out_lists_over_all_ranks_too(rank: int, world: int) -> None:
    """Whether groups are all ranks, or fewer, who averages their biases does not change."""
    grid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep_shard", "ep"))
    model = Model(0, grid["ep"], "DTensor")
    biases = [block.experts.bias for block in model.blocks]
    dedicate(model.experts(), grid["ep_shard"], exclude=["*.bias"])
    shard_blocks(model, default_mesh(), dmuon.fully_shard)
    assert [block.experts.bias is bias for block, bias in zip(model.blocks, biases, strict=True)] == [True] * LAYERS
    tokens, targets = batch(0, rank, world)
    F.cross_entropy(model(tokens), targets).backward()
    grads = torch.stack([b.grad.to_local() for b in biases if isinstance(b.grad, DTensor)])
    of_ranks = [torch.empty_like(grads) for _ in range(world)]
    dist.all_gather(of_ranks, grads)
    assert len(grads) == LAYERS and torch.equal(*of_ranks) and bool(grads.any())


@on_ranks(2)
def test_a_plan_whose_owners_have_nothing_of_a_matrix_is_refused(rank: int, world: int) -> None:
    """As one made elsewhere may be; a plan for ranks that differ knows who has what."""
    grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ep_shard", "ep"))

    def dedicated(**options: Any) -> tuple[Model, dmuon.OwnerPlan]:
        model = Model(0, grid["ep"], "DTensor")
        return model, dmuon.dedicate_params(model.experts(), grid["ep_shard"], exclude=["*.bias"], **options)

    model, plan = dedicated(costs="flops")
    assert all(owner == int(name[-2]) // 2 for name, owner in plan.owners.items())
    dedicate(model, exclude=["*.router"])
    optimizer = dmuon.Muon(model, **OPTIONS)
    train(model, optimizer, range(1), rank, world, clip=False)
    swapped = {name: 1 - owner for name, owner in plan.owners.items()}
    wrong = replace(plan, solution=replace(plan.solution, owners=swapped))
    with pytest.raises(ValueError, match=r"gives '0\.\w+\[0\]' to rank 1, which has nothing of it"):
        dedicated(plan=wrong)


@on_ranks(2)
def test_what_lies_inside_and_outside_is_refused(rank: int, world: int) -> None:
    model = Model()
    dedicate(model.experts())
    model.blocks[0].experts.norm = model.blocks[0].norm
    with pytest.raises(ValueError, match="a LayerNorm lies in a module that was dedicated before, and outside of it"):
        dedicate(model)
    model = Model()
    model.tied = nn.Module()
    model.tied.up = model.blocks[1].experts.up
    dedicate(model.experts())
    with pytest.raises(ValueError, match="is tied to one outside of it, which no longer is the same: untie them"):
        dedicate(model)
