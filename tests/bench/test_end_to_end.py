"""Benches run end to end; their records can be printed again, say where they come from, and are what pages say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from harness.commands import ROOT

MODULE = "exchange"
TINY = ["--layers", "1", "--width", "32", "--heads", "2", "--context", "16", "--batch", "1"]
BRIEF = ["--rounds", "1", "--warmup", "0", "--check", "1", "--costs", "flops", "--chunk-bytes", "16384"]
ROW = re.compile(r"^\| ([A-Z\w][^|]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE)


@pytest.mark.slow
def test_all_modes_agree_with_each_other_and_with_a_single_process(
    bench: ModuleType, run_in_pool: Callable[..., str], tmp_path: Path
) -> None:
    out = tmp_path / "result.json"
    said = run_in_pool("exchange", *TINY, *BRIEF, "--json", out)
    result = json.loads(out.read_text())
    programs = result["programs"]
    assert list(programs) == [*bench.MODES, bench.GATHER, bench.DEDICATED, bench.ADAMW]
    assert all(name in said for name in programs)
    assert str(tmp_path) not in out.read_text(), "the command has the place of the record"
    assert {"command", "commit", "date", "machine", "versions", "seconds", "settings"} <= result.keys()
    assert run_in_pool("exchange", "--read", out) == said
    for name in bench.MODES:
        row = programs[name]
        assert row["equal"], f"{name}: {row}"
    for name, row in programs.items():
        assert row["error"] < 1e-4, f"{name}: {row['error']} from a single process"
    saved = result["saved"]["prefetching, owners together"]
    before, after = (programs[f"exchanged async {prefetch}"]["step()"] for prefetch in (0, 1))
    assert saved["published"] == "20-40%" and saved["step()"] == pytest.approx(1 - after / before)
    in_flight = [programs[f"exchanged in turn {prefetch}"]["in flight"] for prefetch in range(4)]
    assert in_flight == sorted(in_flight) and in_flight[0] < in_flight[1], in_flight


@pytest.mark.slow
def test_the_ablation_says_what_parts_save_on_several_ranks(run_in_pool: Callable[..., str], tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    options = ["--programs", "ablation", "--worlds", "1,2", *TINY, "--rounds", "1", "--warmup", "0", "--costs", "flops"]
    said = run_in_pool("step", *options, "--json", out)
    record = json.loads(out.read_text())
    assert record["worlds"].keys() == {"1", "2"} and "2 ranks, exposed CPU" in said
    for world, found in record["worlds"].items():
        for name, row in found["programs"].items():
            assert row["error"] < 1e-4, f"{name} on {world} ranks"
            assert row["step"] == pytest.approx(row["ideal"] + row["sent"] + row["rest"])
        saved = record["saved"][f"{world} ranks, exposed CPU"]
        assert saved["owners"]["times"] == pytest.approx(saved["sequential everywhere"]["ms"] / saved["owners"]["ms"])


@pytest.mark.slow
def test_all_ways_are_right_and_owners_send_what_the_article_says(
    run_in_pool: Callable[..., str], tmp_path: Path
) -> None:
    out = tmp_path / "result.json"
    sizes = ["--count", "3", "--side", "16", "--rows", "16", "--cols", "64", "--world", "2", "--rounds", "1"]
    sizes += ["--thin-rows", "16", "--thin-cols", "128", "--warmup", "0", "--costs", "flops"]
    said = run_in_pool("ways", *sizes, "--json", out)
    for case, rows in json.loads(out.read_text())["cases"].items():
        of_large = [] if case == "small" else ["large sharded", "teams"]
        assert list(rows) == ["owner", "replicated", "full_replication", "sharded", *of_large, "auto"]
        for way, row in rows.items():
            assert row["error"] < 1e-4 and f"{way} " in said, case
        assert rows["owner"]["seed MB"] == 2 * rows["replicated"]["seed MB"]
        assert rows["sharded"]["seed NS"] == 0.5


@pytest.mark.slow
@pytest.mark.pitfall("P59")
def test_the_page_says_what_is_counted(run_in_pool: Callable[..., str], tmp_path: Path) -> None:
    out = tmp_path / "memory.json"
    run_in_pool("memory", "--json", out)
    counted = json.loads(out.read_text())["rows"]
    section = (ROOT / "docs" / "how-to" / "memory.md").read_text().split("## How much")[0]
    said = {name: [float(n) for n in numbers] for name, *numbers in ROW.findall(section)}
    assert said.keys() == counted.keys()
    for name, numbers in said.items():  # what is under way at once varies a little
        assert numbers == pytest.approx(list(counted[name].values()), abs=0.5), name
