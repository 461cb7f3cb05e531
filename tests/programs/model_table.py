"""Which models and frameworks train: ``python tests/programs/model_table.py [WORD …]`` runs the tests of each.

Prints a row for each. Words choose rows that contain one of them. Ends with 1 unless all tests of each row passed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def main(words: list[str]) -> int:
    rows = {what: tests for what, tests in ROWS.items() if not words or any(w.lower() in what.lower() for w in words)}
    green = 0
    for what, tests in rows.items():
        path, _, name = tests.partition("::")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "slow or not slow", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, str(TESTS / path), "-k", name or Path(path).stem], capture_output=True, text=True
        )
        said = done.stdout.splitlines()[-1].strip(" =")
        green += done.returncode == 0 and "skipped" not in said  # as where a framework is not installed
        print(f"{what:52}{said}", flush=True)
    print(f"{green} of {len(rows)} rows are green")
    return 0 if rows and green == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
