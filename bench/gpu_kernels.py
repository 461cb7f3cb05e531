"""Newton–Schulz on one GPU: timed against cuBLAS and public routines. ``dmuon-check`` says whether it is right.

    python bench/gpu_kernels.py --models DIR [--json bench/results/NAME.json] [--seconds 420]

Needs torch, Triton and NumPy, and no installation: dmuon is taken from the checkout that the script stands in.

Products with a symmetric result are timed alone, per size and depth; whole models as the sum over their matrices, one
batch after another. Times are medians of interleaved CUDA-graph replays between events, with the L2 cache overwritten
before each. Each row is printed, and the JSON file written, before the next one is computed. What fails is a row as
well, and the rest goes on. Exit status 1 where something of dmuon's failed.

``--dry`` runs everything on whatever device there is, on tiny matrices, so that the script is known to work; with
``TRITON_INTERPRET=1`` also the kernels. It prints no figure worth keeping.
"""

from __future__ import annotations

import argparse
import importlib
import platform
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from common.checkout import commit
from gpu.journal import DeviceLost, Journal
from gpu.models import time_models
from gpu.products import time_products
from gpu.settings import Settings


def head(settings: Settings, dry: bool) -> dict[str, Any]:
    """What the results were measured on."""
    cuda = settings.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name() if cuda else platform.machine(),
        "driver": _driver() if cuda else "",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "triton": importlib.import_module("triton").__version__ if settings.tiles else "not used",
        "commit": commit(),
        "python": platform.python_version(),
        "date": date.today().isoformat(),
        "dry": dry,
    }


def _driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):  # some containers have none
        return ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder of model configurations")
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--seconds", type=float, default=420.0, help="after which nothing new is timed")
    parser.add_argument("--rounds", type=int, default=15, help="samples per median")
    parser.add_argument("--dry", action="store_true", help="tiny matrices, any device")
    arguments = parser.parse_args(argv)
    cuda = torch.cuda.is_available()
    if not cuda and not arguments.dry:
        parser.error("no CUDA device; --dry runs the script without one")
    if not arguments.models.is_dir():
        parser.error(f"--models {arguments.models} is no folder; it holds NAME.json, as Hugging Face's config.json")
    torch.set_num_threads(1)
    settings = Settings(
        torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"),
        128 if arguments.dry else 1,
        arguments.seconds,
        2 if arguments.dry else arguments.rounds,
        arguments.models,
    )
    begun = time.monotonic()
    journal = Journal(arguments.json, head(settings, arguments.dry))
    lost = False
    try:
        time_products(settings, journal, begun + 0.5 * settings.seconds)
        time_models(settings, journal, begun + settings.seconds)
    except DeviceLost as error:
        lost = True
        print(f"the device is lost, nothing more can run: {error}", flush=True)
    journal.note(seconds=round(time.monotonic() - begun, 1))
    return 1 if lost or journal.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
