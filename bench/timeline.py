"""Draws one measured step: what each rank computes and what is sent meanwhile, from ``torch.profiler``.

python bench/timeline.py --out docs/step.png
python bench/timeline.py --residency dedicated --out docs/step-dedicated.png
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common.figures import new_figure, save_png
from common.options import RankOptions, parse
from common.ranks import run_ranks, share
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile, record_function
from training.model import GPT, GPTConfig
from training.trainer import sharded

import dmuon

Span = tuple[str, float, float]  # name, start and end in milliseconds

COLOURS = {
    "forward": "#4c78a8",
    "backward": "#72b7b2",
    "momentum": "#f2cf5b",
    "ns": "#e45756",
    "apply": "#f58518",
    "adamw": "#b279a2",
    "all_to_all": "#54a24b",
    "broadcast": "#54a24b",
    "reduce": "#9d755d",
    "rest": "#bab0ac",
}


NAMES = {
    "ns": "Newton–Schulz (own matrices)",
    "apply": "update of the weights",
    "adamw": "AdamW",
    "all_to_all": "matrices (to owners, and back)",
    "broadcast": "weights (owners publish)",
    "reduce": "gradients (to owners)",
    "rest": "FSDP2",
}


@dataclass(frozen=True, slots=True)
class Settings(RankOptions):
    out: str = "docs/step.png"
    residency: str = "exchanged"
    width: int = 256


def record(rank: int, settings: Settings) -> list[list[Span]]:
    """The spans of every rank."""
    mesh = init_device_mesh("cpu", (settings.world,))
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=4, width=settings.width, heads=4, context=128))
    if settings.residency == "dedicated":
        dmuon.dedicate_params(model, mesh)
    sharded(dmuon.fully_shard, model, mesh=mesh)
    optimizer = dmuon.Muon(model)
    for block in model.blocks:  # named in the profile
        block.forward = record_function("forward")(block.forward)  # type: ignore[method-assign]
    tokens = torch.randint(256, (2, 129), generator=torch.Generator().manual_seed(rank))

    def forward_backward() -> None:
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        with record_function("backward"):
            loss.backward()

    def step() -> None:
        forward_backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        step()
        forward_backward()  # shows the next forward using what was published
    dist.barrier()
    spans = [
        (event.name, event.time_range.start / 1e3, event.time_range.end / 1e3)
        for event in trace.events()
        if event.name.startswith(("dmuon::", "gloo:")) or event.name in ("forward", "backward")
    ]
    return share(spans)


def lane(name: str) -> tuple[str, str] | None:
    """Lane and kind of a profiled range."""
    if name in ("forward", "backward"):
        return "compute", name
    if name.startswith("gloo:"):
        kind = name.removeprefix("gloo:")
        return "communication", kind if kind in COLOURS else "rest"
    kind = name.removeprefix("dmuon::").split()[0]
    return ("compute", kind) if kind in COLOURS else None


def draw(everyone: list[list[Span]], out: Path) -> None:
    figure = new_figure(12, 1.2 + 1.3 * len(everyone), layout="tight")
    axes = figure.subplots()
    labels = []
    drawn = set()
    for rank, spans in enumerate(everyone):
        start = min(begin for _, begin, _ in spans)
        for index, wanted in enumerate(("compute", "communication")):
            row = 2.4 * rank + index
            labels.append((row, f"rank {rank} {wanted}"))
            for name, begin, end in sorted(spans, key=lambda span: span[1] - span[2]):
                found = lane(name)
                if found is None or found[0] != wanted:
                    continue
                drawn.add(found[1])
                low = 0.4 if found[1] in ("broadcast", "rest") and wanted == "communication" else 0.0
                height = 0.4 if wanted == "communication" else 0.8
                axes.broken_barh(
                    [(begin - start, max(end - begin, 0.05))],
                    (row - 0.4 + low, height),
                    facecolors=COLOURS[found[1]],
                    edgecolor="white",
                    linewidth=0.3,
                )
    axes.set_yticks([row for row, _ in labels], [text for _, text in labels])
    axes.invert_yaxis()
    # The whole step() and as much around it as shows what comes before and after.
    inside = [
        (begin - min(b for _, b, _ in spans), end - min(b for _, b, _ in spans))
        for spans in everyone
        for name, begin, end in spans
        if lane(name) in (("compute", "ns"), ("compute", "adamw"))
    ]
    first, last = min(begin for begin, _ in inside), max(end for _, end in inside)
    axes.set_xlim(first - 0.4 * (last - first), last + 0.4 * (last - first))
    axes.set_xlabel("ms")
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=NAMES.get(kind, kind)) for kind, colour in COLOURS.items() if kind in drawn]
    axes.legend(handles=handles, ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_png(figure, out)


def main(argv: Sequence[str] | None = None) -> int:
    _, settings = parse(Settings, __doc__, argv, choices={"residency": ("exchanged", "dedicated")})
    spans = run_ranks(settings.world, record, settings)
    draw(spans, Path(settings.out).resolve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
