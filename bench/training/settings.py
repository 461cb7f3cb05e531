"""What a training run depends on, and where its files lie."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.options import option

from training.model import VOCABULARY, GPTConfig

OPTIMIZERS = {  # by name, what the table says
    "adamw": "FSDP2 + AdamW",
    "gather": "FSDP2 + Muon, gathered everywhere",
    "dmuon": "FSDP2 + dmuon.Muon",
    "dedicated": "dmuon.dedicate_params + dmuon.Muon",
}


SHORT = {"steps": 120, "layers": 3, "width": 192}
LONG = {"steps": 350, "layers": 4, "width": 256}
# Options of the program that say which runs there are, or where they go: a resumed one may have others.
APART = ("long", "optimizers", "seeds", "out", "resume", "checkpoint_every", "json")


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of training; where they say nothing, the sizes are SHORT's or, with ``long``, LONG's.

    Attributes:
        world: by default the number of GPUs, or 2 on the CPU.
        batch: windows per process and step, of ``context`` bytes each.
        lr_adamw: also of dmuon's AdamW part.
        lr_dmuon: of the block matrices.
        dtype: of the computation; ``auto`` is bfloat16 on CUDA.
        json: a file to write the table and the curves of the validation loss to.
    """

    long: bool = False
    steps: int | None = None
    world: int | None = None
    optimizers: tuple[str, ...] = option(tuple(OPTIMIZERS), choices=OPTIMIZERS)
    seeds: tuple[int, ...] = option((0,), least=0)
    layers: int | None = None
    width: int | None = None
    heads: int = 4
    context: int = 128
    batch: int = 8
    # Chosen by the validation loss after 150 steps of the default model, seed 0.
    # AdamW: 1.932 at 1e-3, 1.903 at 1.5e-3, 1.930 at 2e-3, 2.236 at 4e-3.
    # dmuon, AdamW part at 1.5e-3: 1.961 at 2e-3, 1.828 at 4e-3, 1.786 at 8e-3, 1.803 at 1.6e-2.
    lr_adamw: float = 1.5e-3
    lr_dmuon: float = 8e-3
    out: str = "runs/train"
    resume: bool = False
    checkpoint_every: int = 100
    device: str = option("auto", choices=("auto", "cpu", "cuda"))
    dtype: str = option("auto", choices=("auto", "float32", "bfloat16"))
    json: str | None = None

    @property
    def fixed(self) -> dict[str, Any]:
        """What a run depends on; a resumed one must have the same."""
        return {name: value for name, value in asdict(self).items() if name not in APART}

    @property
    def model(self) -> GPTConfig:
        return GPTConfig(self.layers, self.width, self.heads, self.context)

    @property
    def size(self) -> tuple[int, int]:
        """Parameters, and tokens that all ranks together see in a step."""
        blocks = self.layers * (4 * self.width**2 + 3 * self.width * self.model.hidden)
        return blocks + 2 * VOCABULARY * self.width, self.world * self.batch * self.context


@dataclass(frozen=True, slots=True)
class Job:
    """One optimizer on one seed, and where its files lie."""

    optimizer: str
    seed: int
    settings: Settings
    resume_from: Path | None = None

    @property
    def metrics(self) -> Path:
        return Path(self.settings.out) / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return Path(self.settings.out) / "checkpoints" / f"{self.optimizer}-seed{self.seed}"
