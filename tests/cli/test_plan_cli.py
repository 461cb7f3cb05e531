"""`dmuon-plan`: what it prints, what it writes, what it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from harness.commands import command
from harness.configs import LLAMA_8B, written

from dmuon import OwnerPlan

main = command("dmuon-plan")

CONFIG = LLAMA_8B | {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2,
}  # fmt: skip


@pytest.fixture
def plan(tmp_path: Path, ended: Callable[..., Any]) -> Callable[..., Any]:
    """``dmuon-plan`` for a small model, how it ended and what it said."""
    return partial(ended, main, written(tmp_path, CONFIG))


def test_answers_first_and_keeps_the_solver_for_those_who_ask(plan: Callable[..., Any]) -> None:
    done = plan("--world", 4)
    assert done.status == 0
    take, holds, step, *_ = done.out.splitlines()
    assert take.startswith("take:  ") and "GiB a rank, against" in holds and "over AdamW's" in step
    assert "    for block in model.model.layers:" in done.out and "lr=3e-4" in done.out
    assert "estimated for 3 of 3 shapes" in done.out and "makespan" not in done.out
    assert done.row("dedicate_params, no reshard") and done.row("AdamW")
    [forward_backward] = re.findall(r"forward and backward take (\S+) ms", done.out)
    assert float(done.row("dedicate_params").split()[4]) >= float(forward_backward) > 0
    said = plan("--world", 4, "--verbose").out
    assert said.startswith(done.out.rstrip("\n"))
    assert "costs: estimated: wave model of H200\n28 matrices in 4 blocks over 4 ranks\nmakespan" in said


@pytest.mark.parametrize(
    ("config", "loops"),
    [
        ("gpt2-1.5b", ["model.transformer.h"]),
        ("towers", ["model.blocks"]),  # whose names are no attributes
    ],
)
def test_lines_to_paste_have_the_models_own_blocks(
    tmp_path: Path, ended: Callable[..., Any], config: str, loops: list[str]
) -> None:
    described: dict[str, Any] = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 50}
    if config == "towers":
        tower = {
            "name": "a-tower", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
            "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "gated_mlp": True,
        }  # fmt: skip
        described = {"model_type": "towers", "towers": [tower]}
    done = ended(main, written(tmp_path, described), "--world", 2)
    assert done.status == 0, done.err
    assert [line.split()[-1].rstrip(":") for line in done.out.splitlines() if "for block in" in line] == loops


def test_writes_the_plan_that_it_reports_and_leaves_nothing_else(plan: Callable[..., Any], tmp_path: Path) -> None:
    target = tmp_path / "plans" / "plan.json"
    target.parent.mkdir()
    target.write_text("old")
    done = plan("--world", 4, "--verbose", "--json", target)
    assert done.status == 0
    found = OwnerPlan.load(target)
    assert found.world == 4
    assert found.solution.digest in done.out
    assert list(target.parent.iterdir()) == [target]


def test_the_grid_reaches_the_plan(plan: Callable[..., Any], tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    grid = ["--world", 8, "--nodes", 2, "--replicate", 2, "--tp", 2]
    assert plan(*grid, "--json", target).status == 0
    slow = OwnerPlan.load(target).solution
    assert slow.world == 8
    assert "tensor-parallel" in OwnerPlan.load(target).cost_source
    assert plan("--world", 8, "--json", target).status == 0
    # The same model without tensor parallelism: no gather in the costs.
    assert OwnerPlan.load(target).solution.makespan_ns < slow.makespan_ns


def test_figures_of_the_preset_change_the_prediction(plan: Callable[..., Any], preset: Callable[..., None]) -> None:
    def step(*args: object) -> float:
        done = plan("--world", 4, "--nodes", 2, *args)
        assert done.status == 0
        return float(done.row("dedicate_params").split()[4])

    shipped = step()
    assert step("--tokens", 32768) > shipped
    preset(device={"peak_flops": 1e14})
    assert step() > shipped
    preset(inter={"bandwidth": 1e12})
    assert step() < shipped


@pytest.mark.parametrize("device", ["a800", "gb300"])
def test_every_preset_plans(plan: Callable[..., Any], device: str) -> None:
    done = plan("--world", 32, "--nodes", 4, "--device", device)
    assert done.status == 0 and device.upper() in done.out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--world", "0"], "--world: '0' is no positive integer"),
        (["--world", "6", "--nodes", "4"], "--nodes 4 does not divide --world 6"),
        (["--world", "8", "--tp", "3"], "tp=3 does not divide world=8"),
        (["--world", "2", "--pp", "2"], "--pp: was removed; plan one stage: a config.json of its layers"),
        (["--world", "2", "--costs", "/no/such/cache.json"], "/no/such/cache.json"),
    ],
)
def test_bad_arguments_end_with_status_2_and_write_nothing(
    plan: Callable[..., Any], tmp_path: Path, args: list[str], says: str
) -> None:
    target = tmp_path / "plan.json"
    done = plan(*args, "--json", target)
    assert (done.status, done.out) == (2, "")
    assert says in done.err
    assert not target.exists()


def test_bad_files_end_with_status_2_and_nothing_is_written(tmp_path: Path, ended: Callable[..., Any]) -> None:
    bad, target, nowhere = written(tmp_path, {**CONFIG, "hidden_size": None}), tmp_path / "plan.json", tmp_path / "no"
    for model, out, says in (
        (bad, target, f"{bad}: field 'hidden_size' is None; set it to an integer"),
        (tmp_path / "none.json", target, "none.json"),
        (bad, nowhere / "plan.json", f"no such folder {nowhere}; create it"),
    ):
        done = ended(main, model, "--world", 2, "--json", out)
        assert done.status == 2 and says in done.err
        assert not out.exists()
