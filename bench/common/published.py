"""Steps that others have published: Muon with owners beside AdamW, on GPUs that nobody has here.

What is not published is stated here: batch sizes are those by which AdamW's step reaches about half of the peak, or
that the published share of Newton–Schulz implies; the efficiency is that by which AdamW's step takes as long as
published. So only what Muon adds is predicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dmuon.tools.hardware import HARDWARE, Hardware
from dmuon.tools.simulation import Program

_X_SQUARE = (
    "github.com/X-Square-Robot/dmuon, README.md at commit 001f5826527b: medians on 128 A800, sequences of 4096 tokens; "
    "another implementation of dedicated owners"
)
_NVIDIA = (
    "developer.nvidia.com/blog/advancing-emerging-optimizers-for-accelerated-llm-training-with-nvidia-megatron, Table "
    "1: model TFLOP/s per GPU, GB300, MXFP8; another implementation, layer-wise, with AdamW's collectives"
)
_DION = (
    "github.com/microsoft/dion/pull/70, comment of 2026-04-29: 5.8 % of a step of 452 ms, Gram form, FSDP2; "
    "assumed are the sizes of its layers, and tokens"
)
_CANZONA = "arXiv 2602.06079, abstract: against a synchronous layer-wise baseline, on 256 GPUs that it does not name"


def config_path(model: str) -> Path:
    """Of a shipped example or of a model that only others have trained, by name; else ``model`` is the path."""
    bench = Path(__file__).parents[1]
    found = (folder / f"{model}.json" for folder in (bench.parent / "examples" / "models", bench / "models"))
    return next((path for path in found if path.exists()), Path(model))


_A800 = HARDWARE["a800"]
_GB300 = HARDWARE["gb300"]


@dataclass(frozen=True, slots=True)
class Case:
    """One published pair of steps.

    Attributes:
        model: a name, as :func:`config_path` takes it.
        over: the program that ``program`` is compared with.
        published: step of ``program`` over that of ``over``, less 1.
        over_s: published seconds of ``over``; None where ``over_flops`` says it.
        over_flops: published model FLOP/s of one GPU with ``over``.
        muon_share: published FLOPs of Newton–Schulz over those of the model, which tell the tokens.
        tokens: of a rank, where the source says it; 0: as many as the above implies.
        once: weights are gathered once a step, as with ``reshard_after_forward=False``.
        fitted: whether terms are fitted to it; otherwise it is only compared.
    """

    name: str
    model: str
    machine: Hardware
    program: Program
    published: float
    source: str
    over: Program = "adamw"
    over_s: float | None = None
    over_flops: float | None = None
    muon_share: float | None = None
    grid: Mapping[str, int] = field(default_factory=dict)
    pp: int = 1
    tokens: int = 0
    sequence: int = 4096
    once: bool = False
    fitted: bool = True

    @property
    def path(self) -> Path:
        """Of the model's configuration."""
        return config_path(self.model)


def _x_square(name: str, model: str, flat: tuple[int, int], replicated: tuple[int, int]) -> list[Case]:
    """Milliseconds of AdamW and of dmuon: weights kept and sharded over all ranks, and sharded in each node."""

    def case(kind: str, steps: tuple[int, int], **rest: Any) -> Case:
        over, step = steps
        return Case(
            f"{name}, {kind}", model, _A800, published=step / over - 1, source=_X_SQUARE, over_s=over / 1e3, **rest
        )

    return [
        case("FSDP, kept", flat, program="dedicated", once=True, grid={"world": 128}),
        case("HSDP", replicated, program="dedicated", grid={"world": 128, "replicate": 16}),
    ]


CASES = (
    *_x_square("Qwen2.5-1.5B, 128 A800", "qwen2.5-1.5b", (623, 634), (657, 634)),
    *_x_square("Qwen2.5-7B, 128 A800", "qwen2.5-7b", (1233, 1229), (1246, 1334)),
    *_x_square("Llama-3.2-3B, 128 A800", "llama-3.2-3b", (1168, 1166), (1192, 1165)),
    *_x_square("Llama-3.1-8B, 128 A800", "llama-3-8b", (1271, 1372), (1348, 1412)),
    *_x_square("Pi0, 128 A800", "pi0", (1587, 1659), (1630, 1652)),
    *_x_square("WallX (Qwen2.5-VL-3B), 128 A800", "qwen2.5-vl-3b", (1690, 1790), (1492, 1522)),
    Case(
        "Qwen3-30B-A3B, 8 GB300", "qwen3-30b-a3b", _GB300, "dedicated", 713 / 686 - 1, _NVIDIA, over_flops=713e12,
        muon_share=35 / 686, grid={"world": 8},
    ),
    Case(
        "Kimi K2, 256 GB300", "kimi-k2", _GB300, "dedicated", 1051 / 1029 - 1, _NVIDIA, over_flops=1051e12,
        muon_share=51 / 1029, grid={"world": 64}, pp=4, once=True,
    ),
    Case(
        "1.06B, 8 B200", "llama-1b", HARDWARE["b200"], "exchanged", 0.058 / 0.942, _DION, over_s=0.942 * 0.452,
        grid={"world": 8}, fitted=False,
    ),
    Case(
        "Qwen3-32B, 256 GPUs (as H100)", "qwen3-32b", HARDWARE["h100"], "dedicated", 1 / 1.57 - 1, _CANZONA,
        over="gather", grid={"world": 256, "replicate": 32}, fitted=False,
    ),
)  # fmt: skip

# Published ratios of optimizer steps of one implementation: duplicated, and by owners. The model is not named by the
# first source, and stands for it here; its dense matrices lie over 16 ranks, its experts over 8 times 2.
_MEGATRON = "github.com/NVIDIA/Megatron-LM/issues/6676, 32 GB300, TP2 × GTP8, experts EP8 × 2: 632 and 157 ms"
HOMES = (("as Qwen3-30B-A3B", "qwen3-30b-a3b", 632 / 157, _MEGATRON), ("as Kimi K2", "kimi-k2", 632 / 157, _MEGATRON))


@dataclass(frozen=True, slots=True)
class ProductCase:
    """One published time of a symmetric product ``x @ x.T``, ``x`` of ``(m, k)``, in bf16.

    Attributes:
        device: the preset it is predicted for; the H800 has the chip of the H100.
        whole_us: by cuBLAS, which computes both triangles.
        half_us: by a Triton kernel that computes one and mirrors it.
    """

    source: str
    device: str
    m: int
    k: int
    whole_us: float
    half_us: float


_PYTORCH = "github.com/pytorch/pytorch/pull/184886, H100, medians of 200"
_FLASH = "github.com/nil0x9/flash-muon, README.md at commit 02f3067, "
PRODUCTS = (
    *(
        ProductCase(_PYTORCH, "h100", *row)
        for row in (
            (1024, 1024, 19.6, 28.5), (2048, 2048, 37.2, 47.6), (4096, 4096, 230.8, 183.5),
            (8192, 8192, 2717.3, 1858.9), (4096, 8192, 425.4, 352.4), (4096, 16384, 2054.8, 1648.2),
        )
    ),
    *(
        ProductCase(f"{_FLASH}{name}", device, m, m, whole, half)
        for name, device, m, half, whole in (
            ("H800", "h100", 1024, 12.4, 11.2), ("H800", "h100", 2048, 32.2, 38.4),
            ("H800", "h100", 4096, 183.8, 295.5), ("H800", "h100", 8192, 1452.8, 2264.3),
            ("A100", "a100", 1024, 19.1, 22.8), ("A100", "a100", 2048, 68.9, 116.6),
            ("A100", "a100", 4096, 373.3, 664.4), ("A100", "a100", 8192, 2981.5, 5160.4),
        )
    ),
)  # fmt: skip
