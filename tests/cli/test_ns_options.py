"""Costs are those of the Newton–Schulz run that is used, in both residencies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.assertions import raised_by
from harness.commands import command
from harness.network import shard_blocks
from harness.on_ranks import on_ranks
from harness.toy import build, train
from torch.distributed.device_mesh import init_device_mesh

import dmuon

profile = command("dmuon-profile")
RUN: dict[str, Any] = {"ns_coefficients": "classic", "ns_steps": 4, "ns_dtype": torch.bfloat16}


@pytest.fixture
def cache(tmp_path: Path, ended: Callable[..., Any]) -> Path:
    """Costs of the toy's shapes with that run."""
    sides = sorted({f"{min(p.shape)}x{max(p.shape)}" for p in build().blocks.parameters() if p.ndim == 2})
    run = ["--coefficients", "classic", "--steps", 4, "--dtype", "bf16"]
    out = tmp_path / "costs.json"
    done = ended(
        profile, "--shapes", ",".join(sides), *run, "--device", "cpu", "--max-batch", 4, "--budget", 3, "--out", out
    )
    assert done.status == 0, done.err
    return out


@on_ranks(2)
def test_a_cache_of_another_run_is_read_by_whoever_says_so(rank: int, world: int, cache: Path) -> None:
    mesh = init_device_mesh("cpu", (world,))
    refused = raised_by(lambda: dmuon.dedicate_params(build(), mesh, costs=cache))
    assert refused.matches(ValueError, "key field 'dtype' is 'bfloat16', this run's is 'float32'"), refused
    model = build()
    plan = dmuon.dedicate_params(model, mesh, costs=cache, **RUN)
    assert str(cache) in plan.cost_source
    contradicted = raised_by(lambda: dmuon.Muon(model, ns_steps=3))
    assert contradicted.matches(ValueError, "ns_steps=3, and dedicate_params was told ns_steps=4"), contradicted
    for optimizer in (dmuon.Muon(model), dmuon.Muon(dmuon.owned_parameters(model), ns_steps=4)):
        [group] = [group for group in optimizer.param_groups if group["use_muon"]]
        assert {name: group[name] for name in RUN} == RUN
    train(model, dmuon.Muon(model), range(1), rank, world)
    sharded = build()
    shard_blocks(sharded, mesh)
    config = dmuon.create_dtensor_config(costs=cache)
    refused = raised_by(lambda: dmuon.Muon(sharded, distributed_config=config))
    assert refused.matches(ValueError, "key field 'dtype' is 'bfloat16'"), refused
    train(sharded, dmuon.Muon(sharded, distributed_config=config, **RUN), range(1), rank, world)
