"""What is recommended, and why: all meshes, the error, memory, and a line that can be pasted."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness.configs import LLAMA_8B, written

from dmuon.model.config import read_model
from dmuon.solver import CostTable, Matrix, SolveOptions, plan
from dmuon.tools.simulation import prediction
from dmuon.tools.simulation.hardware import HARDWARE, Topology
from dmuon.tools.simulation.prediction import ERROR, Recommendation, recommend
from dmuon.tools.simulation.scenario import Machine, Scenario, Workload

ROOT = Path(__file__).resolve().parents[2]
DEVICE = HARDWARE["h200"]


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    path = written(tmp_path_factory.mktemp("models"), LLAMA_8B | {"num_hidden_layers": 4})
    matrices = [Matrix(m.name, m.rows, m.cols, m.block) for m in read_model(path)]
    costs = CostTable.from_flops({m.shape for m in matrices})
    owners = plan(matrices, 64, costs, SolveOptions(method="greedy"))
    workload = Workload.from_config(path, tokens=8192, sequence=4096)
    return Scenario(workload, owners, costs, Machine.from_hardware(DEVICE), Topology(64))


@pytest.fixture(scope="module")
def found(scenario: Scenario) -> Recommendation:
    return recommend(scenario, DEVICE.device.memory)


def test_every_mesh_in_both_residencies(found: Recommendation) -> None:
    assert {(way.topology.replicate, way.residency, way.kept) for way in found.ways} == {
        (replicate, residency, kept)
        for replicate in (1, 2, 4, 8)
        for residency in ("dedicated", "exchanged")
        for kept in (False, True)
    }


def test_what_is_taken_is_equal_to_others(found: Recommendation) -> None:
    fastest = min(way.step_s for way in found.ways if way.fits)
    equal = [way for way in found.ways if way.fits and way.step_s < fastest * (1 + ERROR)]
    assert sorted(way.nbytes for way in found.equal) == sorted(way.nbytes for way in equal)
    assert found.taken in found.equal and found.taken.step_s < fastest * (1 + ERROR / 10)
    assert f"{len(equal) - 1} more are equal to it" in found.report()
    assert found.overhead == pytest.approx(found.taken.step_s / found.adamw.step_s - 1)


def test_blocks_are_merged_for_more_than_a_tenth_of_the_error(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(merging: float) -> Recommendation:
        def step(name: str, one: Scenario) -> float:
            if name != "dedicated" or one.topology.replicate > 1 or not one.kept:
                return 9.0
            return merging if len(one.workload.blocks) == 2 else 1.0

        monkeypatch.setattr(prediction, "step_s", step)
        return recommend(scenario, DEVICE.device.memory)

    assert taken(1 - 0.05 * ERROR).taken.merge_bytes == 0
    found = taken(1 - 0.2 * ERROR)
    block = scenario.workload.blocks[0].matrix_elements * 2
    assert found.taken.merge_bytes == 2 * block and f"merge_bytes={2 * block}" in found.taken.code()
    assert [way.merge_bytes for way in found.ways if way.merge_bytes] == [2 * block], "what gains nothing is not shown"


def test_the_line_is_code_over_all_ranks(found: Recommendation) -> None:
    for way in found.ways:
        tree = ast.parse(way.code())
        sizes = next(node for node in ast.walk(tree) if isinstance(node, ast.Tuple))
        product = 1
        for size in sizes.elts:
            product *= ast.literal_eval(size)
        assert product == 64
    assert found.report().splitlines()[-1].strip() == found.taken.code()


def test_what_does_not_fit_is_not_recommended(found: Recommendation, scenario: Scenario) -> None:
    least, most = (bound(way.nbytes for way in found.ways) for bound in (min, max))
    memory = (least + most) / 2 / 0.6
    tight = recommend(scenario, memory)
    assert tight.taken.fits and not all(way.fits for way in tight.ways)
    assert tight.report().count("does not fit") == sum(not way.fits for way in tight.ways)
    assert "none of them fits" in recommend(scenario, 1.0).report()


def test_terms_are_those_of_the_fit() -> None:
    """``python bench/simulate.py --fit`` wrote them."""
    fit = json.loads((ROOT / "bench/results/simulation-fit.json").read_text())
    machine = Machine.from_hardware(DEVICE)
    assert {name: getattr(machine, name) for name in fit["terms"]} == pytest.approx(fit["terms"], rel=0.01)
    assert pytest.approx(fit["error"], abs=6e-4) == ERROR
    left_out = [case["left_out"] for case in fit["cases"] if case["fitted"]]
    assert fit["error"] == pytest.approx((sum(e * e for e in left_out) / len(left_out)) ** 0.5)
    assert all(case["source"] for case in fit["cases"])


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ({"tp": 2}, ((32, 2), ("shard", "tp"), ("shard",))),
        ({"tp": 2, "replicate": 4}, ((4, 8, 2), ("replicate", "shard", "tp"), ("replicate", "shard"))),
        ({"tp": 2, "replicate": 32}, ((32, 2), ("replicate", "tp"), ("replicate",))),
        ({"replicate": 4}, ((4, 16), ("replicate", "shard"), None)),
        ({}, ((64,), None, None)),
    ],
)
def test_the_mesh_of_the_line_has_all_ranks(
    found: Recommendation, shape: dict[str, int], expected: tuple[object, ...]
) -> None:
    """With tensor parallelism the model is dedicated over the other dimensions."""
    way = replace(found.ways[0], topology=Topology(64, **shape), residency="dedicated")

    class Mesh:
        def __init__(self, device: str, sizes: tuple[int, ...], mesh_dim_names: tuple[str, ...] | None = None) -> None:
            self.seen: tuple[object, ...] = (sizes, mesh_dim_names, None)

        def __getitem__(self, names: str | tuple[str, ...]) -> Mesh:
            self.seen = (*self.seen[:2], (names,) if isinstance(names, str) else names)
            return self

    given: list[Mesh] = []
    dmuon = SimpleNamespace(dedicate_params=lambda model, mesh, **_: given.append(mesh), CommOptions=dict)
    exec(way.code(), {"init_device_mesh": Mesh, "dmuon": dmuon, "model": None})
    assert given[0].seen == expected


@pytest.mark.parametrize("kept", [False, True])
def test_the_line_shards_every_block_as_it_was_predicted(found: Recommendation, kept: bool) -> None:
    """And the root behind them: alone it would gather the whole model at once."""
    way = replace(found.ways[0], topology=Topology(64), residency="exchanged", kept=kept)
    sharded: list[tuple[object, dict[str, object]]] = []
    model = SimpleNamespace(blocks=["first", "second"])
    names = {
        "init_device_mesh": lambda *_: "mesh",
        "fully_shard": lambda part, **options: sharded.append((part, options)),
        "dmuon": SimpleNamespace(Muon=lambda given: given),
        "model": model,
    }
    exec(way.code(), names)
    options = {"mesh": "mesh", "reshard_after_forward": False} if kept else {"mesh": "mesh"}
    assert sharded == [("first", options), ("second", options), (model, options)]
    assert names["optimizer"] is model
