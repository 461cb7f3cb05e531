"""What is recommended, and why: all meshes, the error, memory, and a line that can be pasted."""

from __future__ import annotations

import ast
import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness.configs import LLAMA_8B, written

from dmuon.model.config import read_model
from dmuon.simulation import recommendation
from dmuon.simulation.hardware import HARDWARE
from dmuon.simulation.network import Topology
from dmuon.simulation.programs import ProgramName, simulate
from dmuon.simulation.recommendation import Recommendation, meshes, recommend
from dmuon.simulation.scenario import Machine, Scenario
from dmuon.simulation.terms import ERROR, FITTED, NO_TERMS, Terms, verdict
from dmuon.simulation.workload import Workload
from dmuon.solver import CostTable, Matrix, SolveOptions, plan

ROOT = Path(__file__).resolve().parents[2]
DEVICE = HARDWARE["h200"]


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    path = written(tmp_path_factory.mktemp("models"), LLAMA_8B | {"num_hidden_layers": 4})
    matrices = [Matrix(m.name, m.rows, m.cols, m.block) for m in read_model(path)]
    costs = CostTable.from_flops({m.shape for m in matrices})
    owners = plan(matrices, 64, costs, SolveOptions(method="greedy"))
    workload = Workload.from_config(path, tokens=8192, sequence=4096)
    return Scenario(workload, owners, costs, Machine.of(DEVICE), Topology(64))


@pytest.fixture(scope="module")
def found(scenario: Scenario) -> Recommendation:
    return recommend(scenario, DEVICE.device.memory, error=0.1)


def test_every_mesh_in_both_residencies(found: Recommendation) -> None:
    assert {(way.topology.replicate, way.residency, way.kept) for way in found.ways} == {
        (replicate, residency, kept)
        for replicate in (1, 2, 4, 8)
        for residency in ("dedicated", "exchanged")
        for kept in (False, True)
    }


def test_rows_over_several_nodes_may_have_two_levels(found: Recommendation, scenario: Scenario) -> None:
    ways = [way for way in found.ways if way.hierarchical]
    assert {way.topology.replicate for way in ways} == {1, 2, 4} and {way.residency for way in ways} == {"dedicated"}
    assert all("hierarchical=True" in way.code() for way in ways)
    for way in ways:
        flat = next(
            one
            for one in found.ways
            if not one.hierarchical and replace(one, hierarchical=True, step_s=0.0) == replace(way, step_s=0.0)
        )
        alike = replace(scenario, topology=way.topology, gathers_once=way.kept, merge_bytes=way.merge_bytes)
        assert "hierarchical" not in flat.code()
        assert way.step_s == simulate("dedicated", replace(alike, hierarchical=True)).step_s
        assert flat.step_s == simulate("dedicated", alike).step_s


def test_what_is_taken_is_equal_to_others(found: Recommendation) -> None:
    fastest = min(way.step_s for way in found.ways if way.fits)
    equal = [way for way in found.ways if way.fits and way.step_s < fastest * 1.1]
    assert sorted(way.nbytes for way in found.equal) == sorted(way.nbytes for way in equal)
    assert found.taken in found.equal and found.taken.step_s < fastest * 1.01
    assert f"{len(equal) - 1} more are equal to it" in found.report()
    assert found.overhead == pytest.approx(found.taken.step_s / found.adamw_s - 1)


def test_options_are_set_for_more_than_a_tenth_of_the_error(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One level before two, then no merging, then the fastest."""

    def taken(flat: float, merging: float, levels: float) -> tuple[bool, bool]:
        def step(name: ProgramName, one: Scenario) -> SimpleNamespace:
            if name != "dedicated" or one.topology.replicate > 1 or not one.gathers_once:
                return SimpleNamespace(step_s=9.0)
            if one.hierarchical:
                return SimpleNamespace(step_s=9.0 if one.merge_bytes else levels)
            return SimpleNamespace(step_s=merging if one.merge_bytes else flat)

        monkeypatch.setattr(recommendation, "simulate", step)
        monkeypatch.setattr(recommendation, "merge_bytes", lambda *_: 2**20)
        found = recommend(scenario, DEVICE.device.memory, error=0.1)
        return found.taken.hierarchical, bool(found.taken.merge_bytes)

    assert taken(flat=1.009, merging=1.005, levels=1.0) == (False, False)
    assert taken(flat=1.011, merging=1.005, levels=1.0) == (False, True)
    assert taken(flat=1.02, merging=1.02, levels=1.0) == (True, False)
    assert taken(flat=1.0, merging=1.0, levels=1.0) == (False, False)


def test_where_no_adamw_fits_the_baseline_is_that_of_the_same_mesh(scenario: Scenario) -> None:
    scenario = replace(scenario, machine=Machine.of(DEVICE, efficiency=0.8))  # what holds least is not the best here
    found = recommend(scenario, DEVICE.device.memory, error=0.1)
    assert found.adamw_fits and "over the best AdamW" in found.report()
    least = min(found.ways, key=lambda way: way.nbytes)  # AdamW has a moment more
    tight = recommend(scenario, least.nbytes / 0.6, error=0.1)
    assert not tight.adamw_fits and replace(tight.taken, fits=least.fits) == least
    assert tight.adamw_s == tight.taken.adamw_s > found.adamw_s
    assert f"over AdamW on {tight.taken.place}, as none of it fits" in tight.report()


def test_the_baseline_is_the_best_adamw(found: Recommendation, scenario: Scenario) -> None:
    alone = [simulate("adamw", replace(scenario, topology=t)).step_s for t in meshes(scenario.topology)]
    assert found.adamw_s <= min(alone)


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
    tight = recommend(scenario, memory, error=0.1)
    assert tight.taken.fits and not all(way.fits for way in tight.ways)
    assert tight.report().count("does not fit") == sum(not way.fits for way in tight.ways)
    assert "none of them fits" in recommend(scenario, 1.0).report()


def test_tokens_from_which_the_way_is_equal_to_adamw(scenario: Scenario) -> None:
    error = 0.02
    found = recommend(scenario, DEVICE.device.memory, error=error)
    assert found.overhead > error and found.enough_tokens is not None
    assert f"is equal from {found.enough_tokens:,} tokens per rank on" in found.report()
    taken = found.taken
    way = replace(scenario, topology=taken.topology, gathers_once=taken.kept, merge_bytes=taken.merge_bytes)

    def over(tokens: float) -> float:
        more = scenario.workload.scaled(tokens / scenario.workload.tokens)
        best = min(
            simulate("adamw", replace(scenario, topology=t, gathers_once=kept, workload=more)).step_s
            for t in meshes(scenario.topology)
            for kept in (False, True)
        )
        return simulate(taken.residency, replace(way, workload=more)).step_s / best - 1

    assert over(found.enough_tokens) < 1.1 * error  # of the AdamW that is best now
    assert over(0.9 * found.enough_tokens) > error
    enough = recommend(replace(scenario, workload=scenario.workload.scaled(64)), DEVICE.device.memory, error=error)
    assert enough.enough_tokens is None and "tokens per rank on" not in enough.report()


def test_meshes_hold_all_ranks_and_divide_experts() -> None:
    for given in (Topology(64), Topology(48), Topology(4), Topology(64, tp=2), Topology(64, ep=16)):
        for mesh in meshes(given):
            assert mesh.replicate * mesh.shard * mesh.tp == given.world
            assert mesh.shard % mesh.ep == 0


def test_below_the_error_nobody_wins() -> None:
    assert verdict(0.029, 0.03) == verdict(-0.029, 0.03) == "equal"
    assert verdict(0.05, 0.03) == "+5.0% ± 3.0%"


def test_a_slow_host_makes_the_step_longer(scenario: Scenario) -> None:
    def step(terms: Terms, name: ProgramName = "adamw") -> float:
        return simulate(name, replace(scenario, machine=Machine.of(DEVICE, terms=terms))).step_s

    assert step(Terms(host_module_s=1e-6)) == step(NO_TERMS)  # it runs ahead
    assert step(Terms(host_module_s=1.0)) == 28.0  # a second for each weight
    assert step(Terms(host_exchanged_s=1.0), "exchanged") == 28.0
    assert step(Terms(host_call_s=1.0), "dedicated") == 3 * 28.0  # two fills and a reduction for each owner of a block
    assert step(Terms(jitter=0.1)) > step(NO_TERMS)


def test_contention_is_of_owners_alone(scenario: Scenario) -> None:
    quiet, slowed = (
        replace(scenario, machine=Machine.of(DEVICE, terms=terms)) for terms in (NO_TERMS, Terms(contention=0.3))
    )
    assert simulate("adamw", slowed).step_s == simulate("adamw", quiet).step_s
    assert simulate("dedicated", slowed).step_s > simulate("dedicated", quiet).step_s


def test_terms_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="jitter=-1 must be at least 0"):
        Terms(jitter=-1)


def test_terms_are_those_of_the_fit() -> None:
    """``python bench/simulate.py --fit`` wrote them."""
    fit = json.loads((ROOT / "bench/results/simulation-fit.json").read_text())
    assert asdict(FITTED) == pytest.approx(fit["terms"], rel=0.01)
    assert pytest.approx(fit["error"], abs=6e-4) == ERROR
    left_out = [case["left_out"] for case in fit["cases"] if case["fitted"]]
    assert fit["error"] == pytest.approx((sum(e * e for e in left_out) / len(left_out)) ** 0.5)
    assert all(case["source"] for case in fit["cases"])


def test_the_table_is_written_to_be_read(found: Recommendation) -> None:
    lines = found.report().splitlines()
    assert lines[0].startswith("ways to train, predicted; over the best AdamW") and "± 10.0%" in lines[0]
    assert len(lines) == 2 + len(found.ways) + 2
    assert "recommended, because" in lines[-2]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ({"tp": 2}, ((32, 2), ("shard", "tp"), ("shard",))),
        ({"tp": 2, "replicate": 4}, ((4, 8, 2), ("replicate", "shard", "tp"), ("replicate", "shard"))),
        ({"stages": 2, "tp": 2}, ((2, 32, 2), ("pp", "shard", "tp"), ("shard",))),
        ({"stages": 2, "replicate": 4}, ((2, 4, 16), ("pp", "replicate", "shard"), ("replicate", "shard"))),
        ({"stages": 2}, ((2, 64), ("pp", "shard"), ("shard",))),
        ({"tp": 2, "replicate": 32}, ((32, 2), ("replicate", "tp"), ("replicate",))),
        ({"replicate": 4}, ((4, 16), ("replicate", "shard"), None)),
        ({}, ((64,), None, None)),
    ],
)
def test_the_mesh_of_the_line_has_all_ranks(
    found: Recommendation, shape: dict[str, int], expected: tuple[object, ...]
) -> None:
    """With tensor parallelism, and in a pipeline, the model is dedicated over the other dimensions."""
    grid = {name: size for name, size in shape.items() if name != "stages"}
    stages = shape.get("stages", 1)
    way = replace(
        found.ways[0], topology=Topology(64, **grid), stages=stages, residency="dedicated", hierarchical=False
    )

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
