"""Cost files that cannot be used are refused by name on all ranks; one of this device is used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness.assertions import Raised, raised_by
from harness.commands import command
from harness.dedicated_toy import default_mesh, refused
from harness.pool import RankPool
from harness.toy import build

import dmuon

UNUSABLE = {
    "absent": (None, "no such file; write it with dmuon-profile"),
    "empty": (b"", "corrupt or truncated JSON"),
    "cut off": (b'{"schema": 1, "entr', "corrupt or truncated JSON"),
    "no object": (b"[1, 2]", "delete the file or measure anew"),
    "another schema": (b'{"schema": 99}', "delete the file or measure anew"),
    "no text": (b"\xff\xfe\x00", "corrupt or truncated"),
}


def with_cost_files(_rank: int, _world: int, paths: dict[str, str]) -> dict[str, Raised]:
    return {name: raised_by(lambda: refused(build(), costs=path)) for name, path in paths.items()}  # noqa: B023


@pytest.mark.pitfall("P50")
def test_unusable_cost_files_are_refused_by_name(ranks: RankPool, tmp_path: Path) -> None:
    for name, (content, _) in UNUSABLE.items():
        (tmp_path / name).mkdir()
        if content is not None:
            (tmp_path / name / "costs.json").write_bytes(content)
    for found in ranks(2, with_cost_files, {name: str(tmp_path / name / "costs.json") for name in UNUSABLE}):
        for name, raised in found.items():
            assert raised.matches(ValueError, rf"cost cache .*costs\.json: .*{UNUSABLE[name][1]}"), raised


def save_costs(folder: Path) -> None:
    """Files that fit this machine, with times of our own, two of them altered."""
    path = folder / "costs.json"
    options = ("--shapes", "13x13,13x29", "--max-batch", "1", "--budget", "5", "--device", "cpu")
    assert command("dmuon-profile")([*options, "--out", str(path)]) == 0
    document = json.loads(path.read_text())
    for batches in document["entries"].values():
        batches["1"] = {"median_ns": 1000, "p10_ns": 990, "p90_ns": 1010, "n": 5}
    text = json.dumps(document)
    path.write_text(text)
    (folder / "negative.json").write_text(text.replace("1000", "-1000"))
    document["key"]["device"] = "another device"
    (folder / "foreign.json").write_text(json.dumps(document))


def plan_from_cost_file(_rank: int, _world: int, path: str) -> tuple[str, int]:
    plan = dmuon.dedicate_params(build(), default_mesh(), costs=path)
    return plan.cost_source, max(plan.solution.loads_ns)


@pytest.mark.pitfall("P50")
def test_cost_files_of_another_device_are_refused_and_of_this_one_used(ranks: RankPool, tmp_path: Path) -> None:
    save_costs(tmp_path)
    messages = {
        "foreign": r"'device' is 'another device', this run's is .*dmuon-profile",
        "negative": r"negative\.json: .*-1000",
    }
    for found in ranks(2, with_cost_files, {name: str(tmp_path / f"{name}.json") for name in messages}):
        for name, raised in found.items():
            assert raised.matches(ValueError, messages[name]), raised
    path = str(tmp_path / "costs.json")
    assert ranks(2, plan_from_cost_file, path) == [(f"cost cache {path}", 5000)] * 2, "9 matrices of 1000 ns each"
