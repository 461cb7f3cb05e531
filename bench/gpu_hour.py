"""The first hour on GPUs: all that is to be checked, timed and held against predictions, by one command.

    python bench/gpu_hour.py --out runs/hour

``checks``  dmuon-check --first-run: kernels against fp64, replay of graphs, training on every topology
``kernels`` bench/gpu_kernels.py: products and whole models against cuBLAS, quack and public routines
``costs``   dmuon-profile: the update of a model of 1B parameters, into the user's cost cache
``steps N`` a step of that model on 1, 2, 4, … GPUs: AdamW, both residencies, torch.optim.Muon

Each part is a process of its own, which is ended after its time. ``hour.json`` is written after each, what it prints
goes to ``NAME.log``. The same command goes on where it was interrupted, and tries again what failed or took too long.
At the end stands what was predicted beside what was measured. dmuon must be installed (``pip install -e .``).

``--dry`` runs all of it on the CPU and on a tiny model, so that the script is known to work. Its figures mean nothing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from common.checkout import ROOT, commit
from common.fit import overhead, scenario_of
from common.options import parse
from common.published import Case
from common.results import columns, write_json
from gpu_steps import AGAIN, settings_of

from dmuon.planning.cost_cache import CostCache, NsOptions, device_key, user_cache_path
from dmuon.tools.hardware import HARDWARE, Product, product_s, wave_costs
from dmuon.tools.simulation import ERROR, Program

_BENCH = Path(__file__).resolve().parent
_PREDICTED: dict[str, Program] = {"dmuon": "exchanged", "dedicated": "dedicated", "gather": "gather"}
_FACTOR = 1.5  # by which a predicted time may be off and still be called held
_GRACE = 15.0  # seconds to end in, before a part is killed


@dataclass(frozen=True, slots=True)
class Arguments:
    """``out``: a folder. ``dry``: on the CPU, with a tiny model and two ranks."""

    out: str = "runs/hour"
    dry: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """One command, the JSON file that it writes, and the seconds after which it is ended."""

    name: str
    seconds: float
    command: tuple[str, ...]
    found: Path


def parts(out: Path, gpus: int, dry: bool) -> list[Part]:
    def part(name: str, seconds: float, *words: str, found: Path | None = None) -> Part:
        path = found or out / f"{name.replace(' ', '-')}.json"
        written = () if found else ("--json", str(path))
        return Part(name, seconds, (sys.executable, *words, *written), path)

    cpu = ("--device", "cpu") if dry else ()
    check = ("-m", "dmuon.tools.cli.check", "--first-run", *cpu)
    kernels = (str(_BENCH / "gpu_kernels.py"), "--models", str(ROOT / "examples/models"))
    limits = ("--seconds", "2", "--dry") if dry else ("--seconds", "600")
    profile = ("-m", "dmuon.tools.cli.profile", str(out / "model.json"), *cpu, "--budget")
    budget = ("2", "--max-batch", "2") if dry else ("480",)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
    size = ("-m", "gpu_steps", "--size", "dry" if dry else "1b")
    return [
        part("checks", 900, *check),
        part("kernels", 660, *kernels, *limits),
        part("costs", 660, *profile, *budget, found=cost_file(dry)),
        *(part(f"steps {world}", 480, *torchrun, str(world), *size) for world in (1, 2, 4, 8) if world <= gpus),
    ]


def cost_file(dry: bool) -> Path:
    device = torch.device("cpu" if dry else "cuda")
    return user_cache_path(device_key(device, NsOptions()))


def run(part: Part, log: Path) -> dict[str, Any]:
    """How it ended. Nothing of it runs any more."""
    begun = time.monotonic()
    with log.open("ab") as stream:
        process = subprocess.Popen(
            part.command, stdout=stream, stderr=subprocess.STDOUT, cwd=_BENCH, start_new_session=True
        )
        try:
            code: int | None = process.wait(part.seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(process.pid, number)
                    process.wait(_GRACE)
                except (ProcessLookupError, subprocess.TimeoutExpired):
                    continue
    status = {0: "done", None: f"ended after its {part.seconds:.0f} s"}.get(code, f"failed with exit status {code}")
    return {"status": status, "seconds": round(time.monotonic() - begun, 1), "command": part.command, "log": str(log)}


# -- what was predicted ---------------------------------------------------------------------------------------------


def verdict(out: Path, gpus: int, dry: bool) -> Iterator[dict[str, Any]]:
    """Rows of what was predicted and measured, as far as parts have left it."""
    found = {part.name: part.found for part in parts(out, gpus, dry) if part.found.exists()}
    if "checks" in found:
        lines = json.loads(found["checks"].read_text())["lines"]
        for what, chosen in {"lines of dmuon-check that fail": "", "of these, replay of a graph": "graph"}.items():
            failed = [line["status"] == "fail" for line in lines if chosen in line["where"]]
            if failed:
                yield {"what": what, "predicted": 0, "measured": sum(failed), "held": not any(failed)}
    name = preset(dry)
    if name is None:
        print("no preset is for this device, so nothing of its times was predicted", flush=True)
        return
    machine = HARDWARE[name]
    for row in json.loads(found["kernels"].read_text())["products"] if "kernels" in found else ():
        for ways, halves in ((("cuBLAS", "cuBLAS in place"), False), ((row.get("best"),), True)):
            times = [row["ms"][way] for way in ways if way in row["ms"]]
            if times:
                product = Product(row["m"], row["p"], row["m"], halves=halves)
                ms = 1e3 * (product_s(machine.device, product, row["k"]) + machine.device.launch_s)
                kind = "one triangle" if halves else "cuBLAS"
                yield _timed(f"ms of {row['k']} × {row['m']}×{row['p']}, {kind}", ms, min(times))
    if "costs" in found:
        entries = CostCache.load(found["costs"]).entries
        table = wave_costs(machine.device, {shape: max(batches) for shape, batches in entries.items()})
        for shape, batches in entries.items():
            k = max(k for k in batches if k in table.costs[shape])
            ms = [ns / 1e6 for ns in (table.costs[shape][k], batches[k].median_ns)]
            yield _timed(f"ms of an update, {k} × {shape[0]}×{shape[1]}", *ms)
    for world in (1, 2, 4, 8):
        if f"steps {world}" in found:
            yield from _steps(out, json.loads(found[f"steps {world}"].read_text())["programs"], name, world, dry)


def _timed(what: str, predicted: float, measured: float) -> dict[str, Any]:
    held = 1 / _FACTOR <= predicted / measured <= _FACTOR
    return {"what": what, "predicted": predicted, "measured": measured, "ratio": predicted / measured, "held": held}


def _steps(
    out: Path, programs: dict[str, dict[str, float]], name: str, world: int, dry: bool
) -> Iterator[dict[str, Any]]:
    """What each program adds to AdamW's step, at the efficiency by which that takes as long as measured."""
    over = [programs[one]["step_ms"] / 1e3 for one in ("adamw", AGAIN) if one in programs]
    for program in (one for one in _PREDICTED if over and one in programs):
        settings = settings_of("dry" if dry else "1b", world, "cpu" if dry else "cuda")
        measured = programs[program]["step_ms"] / 1e3 / (sum(over) / len(over)) - 1
        case = Case(
            program, str(out / "model.json"), HARDWARE[name], _PREDICTED[program], measured, "this run",
            over_s=sum(over) / len(over), grid={"world": world}, tokens=settings.batch * settings.context,
            sequence=settings.context,
        )  # fmt: skip
        predicted, _ = overhead(case, *scenario_of(case))
        held = abs(predicted - measured) <= ERROR
        yield {
            "what": f"{program} over AdamW, {world} GPUs", "predicted": predicted, "measured": measured,
            "ratio": (1 + predicted) / (1 + measured), "held": held,
        }  # fmt: skip


def preset(dry: bool) -> str | None:
    device = "A100" if dry else torch.cuda.get_device_name()
    return next((name for name in sorted(HARDWARE, key=len, reverse=True) if name.upper() in device.upper()), None)


def config_of(dry: bool) -> dict[str, Any]:
    """The GPT of the steps, as ``dmuon-profile`` and predictions read it."""
    settings = settings_of("dry" if dry else "1b", 1, "cpu")
    return {
        "model_type": "llama", "hidden_size": settings.width, "intermediate_size": settings.model.hidden,
        "num_hidden_layers": settings.layers, "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.heads, "vocab_size": 256, "tie_word_embeddings": False,
    }  # fmt: skip


# -- the command ----------------------------------------------------------------------------------------------------


def begin(out: Path, dry: bool) -> dict[str, Any]:
    """What ``hour.json`` says, or the first of it.

    Raises:
        ValueError: another commit, device or size was measured there.
    """
    head = {"commit": commit(), "torch": torch.__version__, "device": "cpu" if dry else torch.cuda.get_device_name()}
    path = out / "hour.json"
    if not path.exists():
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "model.json", config_of(dry))
        return {**head, "dry": dry, "parts": {}, "verdict": []}
    hour: dict[str, Any] = json.loads(path.read_text())
    for name, value in {**head, "dry": dry}.items():
        if hour[name] != value:
            raise ValueError(f"{path} has {name} {hour[name]}, here it is {value}; give another --out")
    return hour


def main(argv: Sequence[str] | None = None) -> int:
    parser, arguments = parse(Arguments, __doc__, argv)
    if not arguments.dry and not torch.cuda.is_available():
        parser.error("no CUDA device; --dry runs the script without one")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    out, dry = Path(arguments.out).resolve(), arguments.dry
    gpus = 2 if dry else torch.cuda.device_count()
    try:
        hour = begin(out, dry)
    except ValueError as error:
        parser.error(str(error))
    for part in parts(out, gpus, dry):
        if hour["parts"].get(part.name, {}).get("status") != "done":
            print(f"{part.name}: at most {part.seconds:.0f} s …", flush=True)
            hour["parts"][part.name] = run(part, out / f"{part.name.replace(' ', '-')}.log")
            write_json(out / "hour.json", hour)
        print(f"{part.name}: {hour['parts'][part.name]['status']}", flush=True)
    hour["verdict"] = list(verdict(out, gpus, dry))
    write_json(out / "hour.json", hour)
    rows = {row["what"]: {**row, "held": "yes" if row["held"] else "NO"} for row in hour["verdict"]}
    print("\n" + columns(rows, {"predicted": ".3g", "measured": ".3g", "ratio": ".2f", "held": ""}))
    missed = sum(not row["held"] for row in hour["verdict"])
    print(f"\n{len(hour['verdict']) - missed} of {len(hour['verdict'])} predictions held; {out / 'hour.json'}")
    return int(any(part["status"] != "done" for part in hour["parts"].values()))


def _end(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)  # the part that runs is ended on the way


if __name__ == "__main__":
    sys.exit(main())
