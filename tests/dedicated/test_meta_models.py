"""Models on the meta device: the first rank initializes one module after the other, and no rank holds the whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from harness.assertions import assert_same_tensors, raised_by
from harness.dedicated_toy import dedicate
from harness.dtensors import local_tensor
from harness.network import full_state, tensor_parallel
from harness.on_ranks import on_ranks
from harness.topologies import LAYOUTS, lay
from harness.toy import build
from harness.traffic import live_bytes
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import dmuon
from dmuon.dedicated import initial_values


class Angles(nn.Module):
    """A buffer that no checkpoint has, one that all have, integers, and nothing that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.empty(3), persistent=False)
        self.register_buffer("scales", torch.empty(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.normal_(self.angles)
        self.scales.copy_(torch.rand(3))
        self.count.fill_(7)


def network() -> nn.Module:
    model = build()
    model.blocks[1].register_module("angles", Angles())
    model.blocks[2].norm.weight.requires_grad_(False)
    model.blocks[0].mix.weight.requires_grad_(False)
    return model


def on_meta(tied: bool = False) -> nn.Module:
    """Its shapes alone."""
    model = network().to("meta")
    if tied:
        model.head.weight = model.embed.weight
    return model


def initialized(model: nn.Module, tied: bool, seed: int) -> nn.Module:
    """What a single process has: all materialized, then each module initialized, in their order."""
    model.to_empty(device="cpu")
    if tied:
        model.head.weight = model.embed.weight
    torch.manual_seed(seed)
    for module in model.modules():
        if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            module.reset_parameters()
    return model


def alone(tied: bool = False, seed: int = 3) -> nn.Module:
    return initialized(on_meta(tied), tied, seed)


@pytest.mark.pitfall("P79")
@pytest.mark.parametrize(
    ("world", "name", "tied", "nbytes"),
    [
        (2, "1d", False, 3000),
        (2, "1d-two-lines", True, 1),
        (2, "ddp-2", False, 2**28),
        pytest.param(4, "hsdp", False, 3000, marks=pytest.mark.slow),
    ],
)
@on_ranks()
def test_values_are_those_of_one_process_that_initializes_all_modules(
    rank: int, world: int, name: str, tied: bool, nbytes: int
) -> None:
    expected = alone(tied)
    model = on_meta(tied)
    torch.manual_seed(3 + rank)
    with mock.patch.object(initial_values, "BUCKET_BYTES", nbytes):
        laid = lay(name, model)
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    if LAYOUTS[name].fsdp is False:
        assert (model.head.weight is model.embed.weight) == tied
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == [
        "blocks.0.mix.weight",
        "blocks.2.norm.weight",
    ]
    assert_same_tensors(full_state(model), dict(expected.state_dict()))
    assert torch.equal(model.blocks[1].angles.angles, expected.blocks[1].angles.angles)
    reference = lay(name, alone(tied))
    for each in (laid, reference):
        each.train(each.optimizer(), range(2))
    assert_same_tensors(full_state(model), full_state(reference.model))


def numbered(module: nn.Module) -> None:
    """As a program that knows DTensors: all parts of the same numbers."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        value = torch.arange(tensor.numel(), dtype=tensor.dtype).view(tensor.shape) / 100
        if isinstance(tensor, DTensor):
            value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
        tensor.copy_(value)


@on_ranks(4)
def test_a_function_initializes_what_tensor_parallelism_has_split(rank: int, world: int) -> None:
    """A failure of one tensor-parallel rank of the first replica ends those of other replicas before."""
    model = build().to("meta")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    tensor_parallel(model, mesh["tp"])

    def failing(module: nn.Module) -> None:
        if rank == 1 and isinstance(module, nn.LayerNorm):
            raise OSError("no such file")
        numbered(module)

    raised = raised_by(lambda: dmuon.dedicate_params(model, mesh["shard"], costs="flops", initialize=failing))
    assert raised.matches(Exception, "rank 1" if rank == 3 else "no such file"), raised
    dmuon.dedicate_params(model, mesh["shard"], costs="flops", initialize=numbered)
    expected = build()
    with torch.no_grad():
        for module in expected.modules():
            numbered(module)
    assert_same_tensors(full_state(model), dict(expected.state_dict()))


@pytest.mark.pitfall("P79")
@on_ranks(2)
def test_no_rank_ever_has_more_than_it_keeps_and_two_rounds(rank: int, world: int) -> None:
    bucket = 40_000
    model = build(layers=12, hidden=512).to("meta")
    whole = sum(p.nbytes for p in model.parameters())
    before, most = live_bytes(), 0

    def initialize(module: nn.Module) -> None:
        nonlocal most
        module.reset_parameters()  # type: ignore[operator]
        most = max(most, live_bytes() - before)

    with mock.patch.object(initial_values, "BUCKET_BYTES", bucket):
        plan = dmuon.dedicate_params(model, init_device_mesh("cpu", (world,)), costs="flops", initialize=initialize)
    owned = sum(local_tensor(p).nbytes for p in model.parameters())
    assert owned < 0.6 * whole, plan.summary()
    assert most <= owned + 2 * bucket + 4096, f"{most} B, of which {owned} B stay; the model has {whole} B"
    assert (most > 0) == (rank == 0), "one rank initializes"


def with_norms_in_a_file(module: nn.Module) -> None:
    if isinstance(module, nn.LayerNorm):
        raise OSError("no such file")
    module.reset_parameters()  # type: ignore[operator]


def with_new_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.weight = nn.Parameter(torch.zeros(2, 2))


# A model, what shall initialize it, and what the first rank is told of that.
FAILING: list[tuple[Callable[[], nn.Module], Callable[..., None], str]] = [
    (on_meta, with_new_weights, r"'weight' is not what it was: \(13, 13\), torch.float32 on cpu"),
    (on_meta, with_norms_in_a_file, r"module 'blocks\.0\.norm' \(LayerNorm\) failed: no such file"),
]


@on_ranks(2)
def test_a_failure_of_the_first_rank_ends_all_and_leaves_the_model_as_it_was(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="option initialize"):
        dedicate(on_meta(), initialize=None if rank else numbered)
    for make, initialize, says in FAILING:
        model = make()
        params = dict(model.named_parameters())
        raised = raised_by(partial(dedicate, model, initialize=initialize))
        if rank == 0:
            assert raised.matches(RuntimeError, f"initializing .*{says}"), raised
        else:
            assert raised.matches(ValueError, f"rank 0: RuntimeError: initializing .*{says}"), raised
        assert all(dict(model.named_parameters())[name] is param for name, param in params.items())
    torch.manual_seed(3)
    dedicate(model)
    assert_same_tensors(full_state(model), dict(alone().state_dict()))


@on_ranks(2)
def test_what_nobody_initializes_is_nan_until_a_checkpoint_is_loaded(rank: int, world: int, tmp_path: Path) -> None:
    saved = alone()
    dcp.save(saved.state_dict(), checkpoint_id=tmp_path)
    model = on_meta()

    def initialize(module: nn.Module) -> None:
        if isinstance(module, Angles):
            module.angles.fill_(1.0)

    dedicate(model, initialize=initialize)
    assert torch.isnan(model.embed.weight).all() and (model.blocks[1].angles.angles == 1).all()
    assert all(torch.isnan(local_tensor(p)).all() for p in dmuon.owned_parameters(model))
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=tmp_path)
    set_model_state_dict(model, state)
    assert_same_tensors(full_state(model), dict(saved.state_dict()))
