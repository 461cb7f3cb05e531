"""Which models and frameworks train: ``python tests/programs/model_table.py [WORD …]`` runs the tests of each.

Prints a row for each. Words choose rows that contain one of them. Ends with 1 unless all tests of each row passed.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
# What is tried, and what the names of its tests begin with, from the folder of tests.
ROWS = {
    "transformers: parts of every family": "model/test_transformers_families.py",
    "transformers: from the meta device": "frameworks/test_meta_transformers.py",
    "diffusers: every class that builds": "frameworks/test_diffusers_families.py",
    "timm: every family": "frameworks/test_timm_families.py",
    "pi0": "frameworks/test_pi0.py",
    "models refused, and their remedies": "frameworks/test_refused_models.py",
    "Trainer, DDP and each owner": "frameworks/test_trainer.py::test_training",
    "Trainer, DDP and FSDP2, resumed": "frameworks/test_trainer.py::test_run",
    "Trainer, dedicated": "frameworks/test_trainer.py::test_dedicated",
    "Trainer that does not fit, refused": "frameworks/test_trainer.py::test_trainers_that_do_not_fit",
    "accelerate, DDP and FSDP2": "frameworks/test_accelerate.py::test_training",
    "accelerate, dedicated": "frameworks/test_accelerate.py::test_dedicated",
    "accelerate's FSDP2 with a dedicated model, refused": "frameworks/test_accelerate.py::test_accelerators",
    "Lightning, DDP, FSDP2, dedicated": "frameworks/test_lightning.py",
    "torchtitan": "frameworks/test_torchtitan.py",
    "peft: LoRA": "frameworks/test_peft.py",
    "save_pretrained, safetensors, torch.save": "frameworks/test_saving.py",
    "TRL: SFT, DPO, GRPO": "frameworks/test_trl.py",
}


class Outcomes:
    """By name of a test; a plugin of pytest."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.of[report.nodeid.removeprefix("tests/")] = report.outcome

    def pytest_collectreport(self, report: Any) -> None:
        if report.outcome != "passed":  # skipped where a framework is not installed
            self.of[report.nodeid.removeprefix("tests/")] = report.outcome


def main(words: list[str]) -> int:
    rows = {what: tests for what, tests in ROWS.items() if not words or any(w.lower() in what.lower() for w in words)}
    outcomes = Outcomes()
    files = dict.fromkeys(str(TESTS / tests.partition("::")[0]) for tests in rows.values())
    chosen = " or ".join({tests.partition("::")[2] or Path(tests).stem for tests in rows.values()})
    pytest.main(["-q", "-m", "slow or not slow", "-p", "no:cacheprovider", "-k", chosen, *files], plugins=[outcomes])
    green = 0
    for what, tests in rows.items():
        path = tests.partition("::")[0]
        counts = Counter(found for name, found in outcomes.of.items() if name == path or name.startswith(tests))
        green += set(counts) == {"passed"}
        print(f"{what:52}{', '.join(f'{n} {found}' for found, n in sorted(counts.items())) or 'MISSING'}")
    print(f"{green} of {len(rows)} rows are green")
    return 0 if rows and green == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
