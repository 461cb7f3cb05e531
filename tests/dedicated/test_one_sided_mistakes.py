"""A mistake on one rank, or in one data-parallel group, ends all ranks: there by its own error, elsewhere by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
from harness.assertions import Raised, raised_by, says_what_to_do
from harness.dedicated_toy import dedicate, default_mesh, refused
from harness.network import Block, Network, tensor_parallel
from harness.on_ranks import on_ranks
from harness.pool import RankPool
from harness.toy import SIZE, WIDTH, build
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

import dmuon


class Fault(LookupError):
    pass


def _raise(error: Exception) -> bool:
    raise error


def reversed_modules(model: Network) -> None:
    model.blocks[0]._modules = dict(reversed(model.blocks[0]._modules.items()))


def sharded_alone(model: Network) -> None:
    weight = DTensor.from_local(model.embed.weight.detach(), default_mesh(), [Shard(0)], run_check=False)
    model.embed.weight = nn.Parameter(weight)


# By name: what the rank at fault does to its model, which options it returns, and what is raised there.
ONE_RANK: dict[str, tuple[Callable[[Network], Any], type[Exception], str]] = {
    "other shapes": (
        lambda m: setattr(m.blocks[1], "up", nn.Linear(WIDTH, 30)),
        ValueError, r"'blocks\.1\.up\.weight' is \(30, 13\).* on rank 1 and \(29, 13\).* on rank 0; b",
    ),
    "other AdamW shapes": (
        lambda m: setattr(m, "norm", nn.LayerNorm(WIDTH, bias=False)),
        ValueError, r"'norm\.bias' is absent on rank 1 and \(13,\).* on rank 0",
    ),
    "other dtype": (
        lambda m: m.head.to(torch.bfloat16),
        ValueError, r"'head\.weight' is \(17, 13\), torch\.bfloat16, AdamW on rank 1",
    ),
    "missing block": (
        lambda m: m.blocks.__delitem__(2),
        ValueError, r"'blocks\.2\.\w+\.\w+' is absent on rank 1 and .* on rank 0",
    ),
    "extra block": (
        lambda m: m.blocks.append(Block(SIZE)),
        ValueError, r"'blocks\.3\.\w+\.\w+' is .* on rank 1 and absent on rank 0",
    ),
    "other order": (
        reversed_modules, ValueError, "come in another order on some ranks.*build the same model",
    ),
    "extra buffer": (
        lambda m: m.register_buffer("table", torch.zeros(3)),
        ValueError, r"buffer 'table' is \(3,\), torch\.float32 on rank 1 and absent on rank 0",
    ),
    "frozen": (
        lambda m: m.blocks[0].mix.weight.requires_grad_(False),
        ValueError, r"'blocks\.0\.mix\.weight' is .*Muon, frozen on rank 1 and .*Muon in block blocks\.0 on rank 0",
    ),
    "other policy": (
        lambda _: {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        ValueError, "option mp_policy is param_dtype=torch.bfloat16.* on rank 1",
    ),
    "other residency": (
        lambda _: {"reshard_after_forward": False},
        ValueError, "option reshard_after_forward is False on rank 1 and True on rank 0",
    ),
    "other costs": (
        lambda _: {"costs": None}, ValueError, "option costs is NoneType on rank 1 and flops on rank 0",
    ),
    "other prefetch": (
        lambda _: {"comm": dmuon.CommOptions(prefetch=3)},
        ValueError, r"option comm is .*prefetch=3.* on rank 1 and .*prefetch=1.* on rank 0",
    ),
    "wrapped": (
        lambda m: m.blocks.__setitem__(0, nn.DataParallel(m.blocks[0])),
        ValueError, r"module 'blocks\.0' is wrapped in DataParallel",
    ),
    "bad option": (lambda _: {"mp_policy": "bf16"}, TypeError, "mp_policy must be"),
    "optimizer": (
        lambda m: setattr(m, "optimizer", torch.optim.SGD(m.parameters(), lr=0.1)),
        ValueError, r"optimizer SGD already holds parameter",
    ),
    "select raises ValueError": (lambda _: {"select": lambda *_: _raise(ValueError("mine"))}, ValueError, "mine"),
    "select raises TypeError": (lambda _: {"select": lambda *_: _raise(TypeError("mine"))}, TypeError, "mine"),
    "select raises KeyError": (lambda _: {"select": lambda *_: _raise(KeyError("mine"))}, KeyError, "mine"),
    "select raises its own type": (lambda _: {"select": lambda *_: _raise(Fault("mine"))}, Fault, "mine"),
    "select returns no bool": (
        lambda _: {"select": lambda *_: "yes"},
        TypeError, r"select\('embed\.weight', …\) returned 'yes'; return True or False",
    ),
    "sharded": (
        sharded_alone,
        ValueError, r"parameter 'embed\.weight' is a DTensor",
    ),
}  # fmt: skip


def make_faults(rank: int, _world: int) -> dict[str, Raised]:
    def fault(kind: str) -> None:
        model = build()
        change = ONE_RANK[kind][0](model) if rank == 1 else None
        options = change if isinstance(change, dict) else {}
        if kind == "sharded":  # comparing DTensors would communicate
            dedicate(model)
        refused(model, **options)

    default_mesh()
    return {kind: raised_by(partial(fault, kind)) for kind in ONE_RANK}


@pytest.fixture(scope="module")
def faults(ranks: RankPool) -> list[dict[str, Raised]]:
    return ranks(2, make_faults, timeout=110)


@pytest.mark.pitfall("P21", "P48", "P49")
@pytest.mark.parametrize("kind", ONE_RANK)
def test_a_fault_on_one_rank_ends_all_of_them(faults: list[dict[str, Raised]], kind: str) -> None:
    _, error, match = ONE_RANK[kind]
    first, second = (of_rank[kind] for of_rank in faults)
    assert first.matches(ValueError, match) and ("rank 1" in first.message or kind == "other order"), first
    assert second.matches(error, match), f"the rank at fault raises the original: {second}"
    assert says_what_to_do(first.message) or "mine" in match, f"without a remedy: {first.message}"


# -- a fault in one data-parallel group of several ----------------------------------------------------------------


IN_ONE_GROUP = {
    "option": (Exception, "reshard_after_forward must be True or False, got 'yes'"),
    "policy": (ValueError, "option mp_policy is .* on rank 1 and .*bfloat16.* on rank 0"),
    "model": (ValueError, r"module 'blocks\.1' is wrapped in DataParallel"),
}


@pytest.mark.pitfall("P21", "P48")
@on_ranks(4)
def test_a_fault_in_one_data_parallel_group_ends_all_of_them(rank: int, world: int) -> None:
    """Two data-parallel ranks times two tensor-parallel ones; ranks 0 and 2 or rank 3 alone are wrong."""
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def fault(kind: str) -> None:
        options: dict[str, Any] = {}
        model = build()
        if kind == "option" and rank in (0, 2):
            options["reshard_after_forward"] = "yes"
        if kind == "policy" and rank in (0, 2):
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        tensor_parallel(model, whole["tp"])
        if kind == "model" and rank == 3:
            model.blocks[1] = nn.DataParallel(model.blocks[1])
        dedicate(model, whole["dp"], **options)

    for kind, told in IN_ONE_GROUP.items():
        raised = raised_by(partial(fault, kind))
        assert raised.matches(*told), raised
