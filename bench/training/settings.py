"""What a training run depends on, and where its files lie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from training.model import VOCABULARY, GPTConfig

OPTIMIZERS = {  # by name, what the table says
    "adamw": "FSDP2 + AdamW",
    "gather": "FSDP2 + Muon, gathered everywhere",
    "dmuon": "FSDP2 + dmuon.Muon",
    "dedicated": "dmuon.dedicate_params + dmuon.Muon",
}
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run depends on; a resumed run must have the same."""

    data: str | None
    steps: int
    world: int
    device: str
    dtype: str
    layers: int
    width: int
    heads: int
    context: int
    batch: int
    lr_adamw: float
    lr_dmuon: float
    weight_decay: float = 0.1

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
    out: Path
    checkpoint_every: int
    resume_from: Path | None = None

    @property
    def metrics(self) -> Path:
        return self.out / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoints" / f"{self.optimizer}-seed{self.seed}"
