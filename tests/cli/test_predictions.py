"""What ``dmuon-plan`` predicts and recommends, against figures worked out by hand and the record of the fit."""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness.commands import command
from harness.configs import LLAMA_8B, QWEN_MOE, SMALL_LLAMA, written

main = command("dmuon-plan")


FIT = Path(__file__).resolve().parents[2] / "bench/results/simulation-fit.json"
MOE = QWEN_MOE | {
    "hidden_size": 8, "intermediate_size": 16, "moe_intermediate_size": 4, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "num_experts": 8, "num_experts_per_tok": 2,
    "vocab_size": 10, "tie_word_embeddings": False,
}  # fmt: skip
BY_TRANSFORMERS = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers reads this model type")
DEDICATED, EXCHANGED, GATHER, ADAMW = "dedicate_params", "dmuon.Muon alone", "Muon, gathered everywhere", "AdamW"
KEPT = f"{DEDICATED}, no reshard"
PROGRAMS = (DEDICATED, KEPT, EXCHANGED, GATHER, ADAMW)
FREE = {"latency_s": 1e-30, "bandwidth": 1e30}


@pytest.fixture
def plan(tmp_path: Path, ended: Callable[..., Any]) -> Callable[..., Any]:
    """``plan(config, *arguments)``."""
    return lambda config, *arguments: ended(main, written(tmp_path, config), *arguments)


def times(done: Any, program: str) -> tuple[float, float, float, float]:
    """Milliseconds of the step, of forward and backward, of Newton–Schulz, and what is exposed of the rest."""
    assert done.status == 0, done.err
    [computes] = re.findall(r"forward and backward take (\S+) ms", done.out)
    step, ns, exposed = map(float, done.row(program).removeprefix(program).split()[3:6])
    return step, float(computes), ns, exposed


# -- what is computed -----------------------------------------------------------------------------------------------

ATTENTION, FEED_FORWARD = 2 * 8 * 8 + 2 * 4 * 8, 3 * 8 * 16  # q and o; k and v, one head of two; gate, up, down
PAIRS = 2 * (3 * 3) * 4 * 8 / 2  # two sequences of three; scores and values, four operations a pair, half are masked


@pytest.mark.parametrize(
    ("config", "forward"),
    [
        (SMALL_LLAMA, 2 * (12 * (ATTENTION + FEED_FORWARD) + PAIRS) + 12 * 10 * 8),
        # The router, and two of eight experts.
        pytest.param(MOE, 12 * (ATTENTION + 8 * 8 + 2 * 3 * 4 * 8) + PAIRS + 12 * 10 * 8, marks=BY_TRANSFORMERS),
    ],
)
def test_forward_and_backward_by_hand(
    plan: Callable[..., Any], preset: Callable[..., None], config: dict[str, Any], forward: float
) -> None:
    """Of six tokens at a megaflop a second, half of the peak."""
    preset(device={"peak_flops": 2e6})
    done = plan(config, "--world", 2, "--tokens", 6, "--sequence", 3)
    assert times(done, ADAMW)[1] == pytest.approx(3 * forward / 1e3, abs=0.006)
    assert ("expert parallelism is not predicted" in done.out) == (config is MOE)


@pytest.mark.parametrize(("world", "replicate"), [(256, 32)])
def test_llama_8b_within_brackets(plan: Callable[..., Any], world: int, replicate: int) -> None:
    done = plan(LLAMA_8B, "--world", world, "--replicate", replicate, "--tokens", 8192)
    found = {program: times(done, program) for program in PROGRAMS}
    assert found[ADAMW][1] == pytest.approx(800, rel=0.01)  # 6 operations a parameter and token at half the peak
    steps = {program: step for program, (step, *_) in found.items()}
    assert steps[GATHER] > steps[ADAMW] + found[GATHER][2]
    assert found[DEDICATED][2] >= found[GATHER][2] / world
    assert steps[DEDICATED] >= 0.97 * steps[ADAMW] and steps[KEPT] <= steps[DEDICATED]
    assert 1.0 < steps[GATHER] / steps[DEDICATED] < 5.0


@pytest.mark.parametrize(
    ("config", "arguments", "says"),
    [
        (SMALL_LLAMA, ["--tokens", 7, "--sequence", 3], "tokens=7 must be a multiple of sequence=3"),
        (SMALL_LLAMA | {"vocab_size": "many"}, [], "field 'vocab_size' is"),
        pytest.param(MOE | {"num_experts_per_tok": 9}, [], "num_experts_per_tok", marks=BY_TRANSFORMERS),
    ],
)
def test_what_nothing_can_be_predicted_from_is_named(
    plan: Callable[..., Any], config: dict[str, Any], arguments: list[object], says: str
) -> None:
    done = plan(config, "--world", 2, *arguments)
    assert (done.status, done.out) == (2, "") and says in done.err


@pytest.mark.pitfall("P82")
def test_the_report_says_what_a_reader_needs(plan: Callable[..., Any]) -> None:
    text = plan(LLAMA_8B, "--world", 16, "--replicate", 2, "--tp", 2).out
    assert "predicted: one step on 16 × H200, 2 nodes, tp 2\n16,384 tokens per rank" in text
    assert "AdamW                            2 × 4" in text
    assert "at 50% of the peak" in text and "estimated for 3 of 3 shapes" in text
    error = json.loads(FIT.read_text())["error"]
    assert f"± {error:.1%} is how far predictions were off" in text and error <= 0.04
    errors = [float(re.search(rf"^{name} .*± (\S+)%", text, re.M)[1]) for name in (DEDICATED, GATHER)]  # type: ignore[index]
    assert 100 * error <= errors[0] + 0.05 and errors[1] > 2 * errors[0]  # it grows with Newton–Schulz


def test_the_error_is_that_of_published_cases_each_left_out(plan: Callable[..., Any]) -> None:
    fit = json.loads(FIT.read_text())
    left_out = [case["left_out"] for case in fit["cases"] if case["fitted"]]
    assert fit["error"] == pytest.approx((sum(e * e for e in left_out) / len(left_out)) ** 0.5)
    assert all(case["source"] for case in fit["cases"])


# -- what is recommended --------------------------------------------------------------------------------------------


@pytest.fixture
def recommended(plan: Callable[..., Any]) -> Callable[..., tuple[list[list[str]], str, str]]:
    """Rows of the table, the lines that answer, and the code."""

    def recommend(*arguments: object) -> tuple[list[list[str]], str, str]:
        done = plan(LLAMA_8B | {"num_hidden_layers": 4}, "--recommend", "--tokens", 8192, *arguments)
        assert done.status == 0, done.err
        said, _, rest = done.out.partition("\n\n")
        code = textwrap.dedent(rest.partition("\n\n")[0])
        rows = re.findall(r"^((?:dedicate_params|dmuon.Muon alone).*?) +(\d+) × (\d+) +(.*)$", done.out, re.M)
        return [[*row[:3], *row[3].split()] for row in rows], said, code

    return recommend


def test_every_mesh_of_whole_nodes_in_both_residencies(recommended: Callable[..., Any]) -> None:
    rows, said, _ = recommended("--world", 64)
    found = {(int(row[1]), "reshard" in row[0], "alone" in row[0]) for row in rows}
    assert found == {(r, kept, alone) for r in (1, 2, 4, 8) for kept in (False, True) for alone in (False, True)}
    [taken] = [row for row in rows if row[-1] == "<"]
    steps = [float(row[3]) for row in rows]
    assert steps[rows.index(taken)] == min(steps)
    take, holds, step, *_ = said.splitlines()
    assert take.startswith("take:  ") and f"on a mesh of {taken[1]} × {taken[2]} ranks" in take
    assert holds.startswith(f"holds: {taken[-2]} GiB a rank, against ") and "of AdamW" in holds
    said_ms = re.fullmatch(r"step:  (\S+) ms, [+-]\S+% ± 3\.\d%(?: \(equal\))? over AdamW's \S+", step)
    assert said_ms and float(said_ms[1]) == pytest.approx(steps[rows.index(taken)], abs=0.06)


def test_what_does_not_fit_is_not_recommended(recommended: Callable[..., Any], preset: Callable[..., None]) -> None:
    preset(device={"memory": 3e9})
    rows, _, _ = recommended("--world", 64)
    fitting = [row for row in rows if row[-1] != "!"]
    assert 0 < len(fitting) < len(rows) and next(row for row in rows if row[-1] == "<") in fitting
    preset(device={"memory": 1e3})
    assert "none of them fits" in recommended("--world", 64)[1]


class Mesh:
    def __init__(self, device: str, sizes: tuple[int, ...], mesh_dim_names: tuple[str, ...] | None = None) -> None:
        self.seen: tuple[object, ...] = (sizes, mesh_dim_names, None)

    def __getitem__(self, names: str | tuple[str, ...]) -> Mesh:
        self.seen = (*self.seen[:2], (names,) if isinstance(names, str) else names)
        return self


@pytest.mark.parametrize(("tp", "memory"), [(2, 141e9), (1, 1e10)])
def test_the_line_runs_and_its_mesh_has_all_ranks(
    recommended: Callable[..., Any], preset: Callable[..., None], tp: int, memory: float
) -> None:
    """With tensor parallelism the model is dedicated over the other dimensions; blocks are sharded before the root."""
    preset(device={"memory": memory})
    rows, _, code = recommended("--world", 64, "--tp", tp)
    [taken] = [row for row in rows if row[-1] == "<"]
    meshes: list[Mesh] = []
    sharded: list[object] = []
    model = SimpleNamespace(model=SimpleNamespace(layers=["first", "second"]))

    def shard(part: object, mesh: Mesh, **options: object) -> None:
        sharded.append(part)
        meshes.append(mesh)

    dmuon = SimpleNamespace(
        dedicate_params=lambda _, mesh, **options: meshes.append(mesh),
        CommOptions=dict,
        fully_shard=shard,
        Muon=lambda given, lr: given,
    )
    exec(code, {"init_device_mesh": Mesh, "dmuon": dmuon, "model": model, "fully_shard": shard})
    sizes, names, data = meshes[0].seen
    replicate, shards = int(taken[1]), int(taken[2])
    expected = [size for size in (replicate, shards) if size > 1] + [tp] * (tp > 1)
    assert list(sizes) == expected and (tp == 1 or data == names[:-1])  # type: ignore[call-overload, index]
    assert ("reshard_after_forward=False" in code) == ("reshard" in taken[0])
    assert sharded == ["first", "second", model] and ("dedicate_params" in code) == ("alone" not in taken[0])
    ast.parse(code)
