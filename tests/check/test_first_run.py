"""``dmuon-check --first-run`` without a GPU: each section runs; what fails, hangs or dies is named and ends there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dmuon.check.first_run import FORMAT, launch_of
from dmuon.check.sections import SECTIONS
from dmuon.check.stage import Launch
from dmuon.check.topologies import TOPOLOGIES

NAMES = ["environment", "kernels", "topologies", "delays", "asynchronous", "memory", "profile"]
SECTION = {"name", "status", "reason", "seconds", "launches"}
LAUNCH = {"ranks", "lines", "facts", "left_out", "faults", "tracebacks", "output"}

# A program whose ranks all run what stands before `main`: each starts by importing it.
PROGRAM = """
import os, signal, sys, time, warnings
import torch
import dmuon.check.sections as sections
sections.SECTIONS = tuple(each for each in sections.SECTIONS if each.name in {sections!r})
{plant}
from dmuon.cli.check import main
if __name__ == "__main__":
    sys.exit(main())
"""


def first_run(
    folder: Path, plant: str = "", sections: list[str] = NAMES, *options: str, device: str = "cpu"
) -> tuple[Any, Any]:
    """The process, and what its file says."""
    script, out = folder / "program.py", folder / "report.json"
    script.write_text(PROGRAM.format(sections=sections, plant=plant))
    command = [sys.executable, str(script), "--first-run", "--device", device, "--json", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    return done, json.loads(out.read_text())


def section(report: Any, name: str) -> Any:
    return next(each for each in report["sections"] if each["name"] == name)


@pytest.mark.slow
@pytest.mark.timeout(450)
def test_each_section_runs_without_a_gpu_and_is_ok(tmp_path: Path) -> None:
    done, report = first_run(tmp_path, "", NAMES, "--budget", "380")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (report["format"], report["dry"], report["done"], report["ok"]) == (FORMAT, True, True, True)
    assert [(each["name"], each["status"], each["reason"]) for each in report["sections"]] == [
        (name, "ok", "") for name in NAMES
    ]
    passed = {}
    for each in report["sections"]:
        assert each.keys() == SECTION
        for launch in each["launches"]:
            assert launch.keys() == LAUNCH and not launch["left_out"]
            for line in launch["lines"]:
                passed.setdefault(each["name"], []).append((line["check"], line["where"], line["status"], line["text"]))
    assert sum(line[0] == "parity" and line[2] == "pass" for line in passed["topologies"]) >= 6
    assert {line[1].split()[0] for line in passed["delays"]} == {"1d", "fsdp2", "ddp", "tp"}
    assert any("late on rank 1 alone" in line[3] for line in passed["delays"])
    assert {line[1] for line in passed["asynchronous"]} >= {"1d 2 reshard fp32", "1d 2 keep fp32", "fsdp2 2 keep fp32"}
    assert {line[1] for line in passed["memory"]} == {"dedicated 1d 2", "exchanged 1d 2"}
    facts = section(report, "environment")["launches"][0]["facts"]
    assert facts["packages"]["dmuon"] and facts["packages"]["torch"] and "variables" in facts
    costs = section(report, "profile")["launches"][0]["facts"]["costs"]
    assert all(each["median_us"] > 0 and each["variant"] is not None for each in costs) and len(costs) == 4
    for name in NAMES:
        assert any(row.startswith("ok") and name in row for row in done.stdout.splitlines())


# Each in what its section checks, of which it leaves a part.
PLANTS = {
    "environment": """
import dmuon.check.devices as devices
devices.refusals = lambda gpus: ["rank 0: planted; mend it"]
""",
    "kernels": """
import dmuon.check.kernels as kernels
original = kernels.orthogonalize
kernels.orthogonalize = lambda x, **how: original(x, **how) * (1.1 if how.get("method") == "gram" else 1)
""",
    "topologies": """
import dmuon.check.trial as trial
trial.DECAY = 5.0
sections.TOPOLOGIES = ("1d",)
""",
    "delays": """
import dmuon.check.bits as bits
original = bits.backward
def backward(laid, *arguments):
    original(laid, *arguments)
    grad = laid.model.norm.weight.grad
    part = getattr(grad, "to_local", lambda: grad)()
    if torch.utils.deterministic.fill_uninitialized_memory and torch.are_deterministic_algorithms_enabled():
        part.add_(torch.empty(part.shape).clamp(0, 0))  # of what nobody wrote; unfilled it may be NaN by itself
bits.backward = backward
bits._LAYOUTS = ("1d",)
""",
    "asynchronous": """
import dmuon.check.bits as bits
original = bits.start
def start(kind, asynchronous, **options):
    laid, optimizer = original(kind, asynchronous=asynchronous, **options)
    for group in optimizer.param_groups:
        group["lr"] *= 1 if asynchronous else 1.5
    return laid, optimizer
bits.start = start
bits._LAYOUTS = ("1d",)
""",
    "memory": """
import dmuon.check.memory as memory
original = memory.exchanged
def exchanged(*arguments):
    program = original(*arguments)
    for parameter in program.model.parameters():
        program.optimizer.state[parameter]["copy"] = parameter.detach().clone()
    return program
memory.exchanged = exchanged
""",
    "profile": """
original = sections.measure
def measure(*arguments, **options):
    warnings.warn("Newton–Schulz variant planted differs from the standard form by 1; not used")
    return original(*arguments, **options)
sections.measure = measure
""",
}
SAID = {
    "environment": "planted; mend it",
    "kernels": "gram ",
    "topologies": "parity ",
    "delays": "new memory holds NaN",
    "asynchronous": "as with each collective waited for",
    "memory": "memory exchanged",
    "profile": "variants",
}


@pytest.mark.slow
@pytest.mark.timeout(450)
@pytest.mark.parametrize("name", NAMES)
def test_what_fails_is_in_the_file_under_its_section(tmp_path: Path, name: str) -> None:
    done, report = first_run(tmp_path, PLANTS[name], [name], "--budget", "4000")
    assert done.returncode == 1
    assert report["done"] and not report["ok"]
    [found] = report["sections"]
    assert (found["name"], found["status"]) == (name, "failed")
    texts = [
        f"{line['check']} {line['where']} {line['text']}" for launch in found["launches"] for line in launch["lines"]
    ]
    failed = [
        text
        for text, line in zip(texts, [x for launch in found["launches"] for x in launch["lines"]], strict=True)
        if line["status"] == "fail"
    ]
    assert any(SAID[name] in text for text in failed) or SAID[name] in found["reason"], (failed, found["reason"])
    assert any(row.startswith("failed") and name in row for row in done.stdout.splitlines())


@pytest.mark.slow
def test_after_a_refusal_nothing_else_runs(tmp_path: Path) -> None:
    done, report = first_run(tmp_path, PLANTS["environment"], ["environment", "memory"], "--budget", "200")
    assert done.returncode == 1 and "mend it" in done.stdout
    assert section(report, "environment")["launches"][0]["facts"]["refusals"] == ["rank 0: planted; mend it"]
    memory = section(report, "memory")
    assert (memory["status"], memory["reason"]) == ("skipped", "the environment was refused")


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_without_a_gpu_it_is_refused_and_not_run_on_the_cpu(tmp_path: Path) -> None:
    done, report = first_run(tmp_path, "", ["environment", "memory"], "--budget", "200", device="cuda")
    assert done.returncode == 1 and not report["dry"]
    [line] = section(report, "environment")["launches"][0]["lines"]
    assert line["status"] == "fail" and "is built without CUDA; install" in line["text"]
    assert section(report, "memory")["status"] == "skipped"


IN_MEMORY = """
import dmuon.check.sections as sections
def held(*_):
    if os.environ["RANK"] == "1":
        {act}
    return []
sections.allocated_when_dedicated = held
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "fault"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1: killed by SIGKILL"),
        ("os._exit(3)", "rank 1: exit status 3"),
        ("time.sleep(1000)", "rank 1: no end within its time"),
        ("raise ArithmeticError('planted')", "dedicated 1d 2"),
    ],
    ids=["killed", "ended", "hangs", "raises"],
)
def test_a_rank_that_dies_or_hangs_ends_its_section_alone(tmp_path: Path, act: str, fault: str) -> None:
    # Shares of 700 seconds: 42 for memory; as the first of two it has no more.
    plant = IN_MEMORY.format(act=act)
    done, report = first_run(tmp_path, plant, ["memory", "profile"], "--budget", "400")
    assert done.returncode == 1
    memory, profile = report["sections"]
    assert memory["status"] == "failed" and fault in memory["reason"]
    assert profile["status"] == "ok"
    [launch] = memory["launches"]
    if "sleep" in act:
        assert "in held" in launch["output"]["1"]  # where it hung
    elif "raise" in act:
        assert "ArithmeticError: planted" in "".join(launch["tracebacks"]["1"])
    else:
        assert memory["seconds"] < 30


@pytest.mark.slow
def test_a_run_that_is_killed_has_left_what_came_before(tmp_path: Path) -> None:
    plant = IN_MEMORY.format(act="os.kill(os.getppid(), signal.SIGKILL)")
    done, report = first_run(tmp_path, plant, ["environment", "memory", "profile"], "--budget", "400")
    assert done.returncode == -9
    assert not report["done"] and not report["ok"]
    assert [(each["status"], each["reason"]) for each in report["sections"]] == [
        ("ok", ""), ("skipped", "not reached"), ("skipped", "not reached"),
    ]  # fmt: skip


@pytest.mark.slow
def test_what_does_not_fit_the_time_is_said_and_is_not_ok(tmp_path: Path) -> None:
    plant = """
import dmuon.check.bits as bits
original = bits.train
bits.train = lambda *args, **options: time.sleep(4) or original(*args, **options)
"""
    done, report = first_run(tmp_path, plant, ["delays", "profile"], "--budget", "260")
    assert done.returncode == 1 and report["done"] and not report["ok"]
    delays, profile = report["sections"]
    assert delays["status"] == "skipped" and "raise --budget" in delays["reason"]
    [launch] = delays["launches"]
    assert launch["left_out"] and all(what in delays["reason"] for what in launch["left_out"])
    assert any(line["status"] == "pass" for line in launch["lines"])  # of what did fit
    assert profile["status"] == "ok"


@pytest.mark.parametrize("world", range(1, 9))
def test_each_topology_runs_on_as_many_ranks_as_it_can_use(world: int) -> None:
    launches = next(each for each in SECTIONS if each.name == "topologies").launches
    found = [(name, each.world) for each in launches(Launch("cuda", world, world, "nccl")) for name in each.topologies]
    names = [name for name, _ in found]
    assert set(names) == set(TOPOLOGIES)
    by_name = dict(found)
    even = world - world % 2
    assert by_name["fsdp2"] == by_name["ddp"] == world
    assert by_name["tp"] == max(even, 1 if world < 2 else 2)
    assert by_name["hsdp"] == (even if world >= 4 else world)


def test_one_gpu_has_two_ranks_by_gloo_and_one_by_nccl() -> None:
    launch = launch_of("cuda", 1, None, 60)
    assert (launch.world, launch.devices, launch.backend) == (2, 1, "gloo")
    assert str(launch) == "2 ranks by gloo, all on one GPU"
    topologies = next(each for each in SECTIONS if each.name == "topologies").launches(launch)
    assert ("nccl", 1, ("1d",)) in [(each.backend, each.world, each.topologies) for each in topologies]


def test_several_gpus_have_a_rank_each_by_nccl() -> None:
    launch = launch_of("cuda", 16, None, 60)
    assert (launch.world, launch.devices, launch.backend) == (8, 8, "nccl")
    with pytest.raises(ValueError, match="--ranks 5: 4 GPUs are here"):
        launch_of("cuda", 4, 5, 60)


def test_the_shares_are_the_whole() -> None:
    assert [each.name for each in SECTIONS] == NAMES
    assert sum(each.share for each in SECTIONS) == pytest.approx(1)
