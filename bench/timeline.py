"""Draws one measured step: what each rank computes and what is sent meanwhile, from ``torch.profiler``.

python bench/timeline.py --out docs/step.png
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common.options import RankOptions, parse
from common.ranks import run_ranks
from matplotlib.figure import Figure
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile, record_function
from training.model import GPT, GPTConfig
from training.trainer import sharded

import dmuon

Span = tuple[str, float, float]  # name, start and end in milliseconds

COMPUTED = {  # by the name of a range, its colour, and what the legend says
    "forward": ("#4c78a8", "forward"),
    "backward": ("#72b7b2", "backward"),
    "dmuon::momentum": ("#f2cf5b", "momentum"),
    "dmuon::ns": ("#e45756", "Newton–Schulz (own matrices)"),
    "dmuon::apply": ("#f58518", "update of the weights"),
    "dmuon::adamw": ("#b279a2", "AdamW"),
}
SENT = {
    "gloo:all_to_all": ("#54a24b", "matrices (to owners, and back)"),
    "gloo:": ("#bab0ac", "FSDP2"),
}
LANES = {"compute": COMPUTED, "communication": SENT}


@dataclass(frozen=True, slots=True)
class Settings(RankOptions):
    out: str = "docs/step.png"


def record(rank: int, settings: Settings) -> list[list[Span]]:
    """The spans of every rank."""
    mesh = init_device_mesh("cpu", (settings.world,))
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=4, width=256, heads=4, context=128))
    sharded(fully_shard, model, mesh=mesh)
    optimizer = dmuon.Muon(model)
    for block in model.blocks:  # named in the profile
        block.forward = record_function("forward")(block.forward)  # type: ignore[method-assign]
    tokens = torch.randint(256, (2, 129), generator=torch.Generator().manual_seed(rank))

    def forward_backward() -> None:
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        with record_function("backward"):
            loss.backward()

    for _ in range(3):
        forward_backward()
        optimizer.step()
        optimizer.zero_grad()
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        forward_backward()
        optimizer.step()
        optimizer.zero_grad()
        forward_backward()  # shows the next forward
    everyone: list[list[Span]] = [[]] * settings.world
    own = [(e.name, e.time_range.start / 1e3, e.time_range.end / 1e3) for e in trace.events()]
    dist.all_gather_object(everyone, own)
    return everyone


def kind_of(name: str, kinds: dict[str, tuple[str, str]]) -> str | None:
    return next((kind for kind in kinds if name.startswith(kind)), None)


def draw(everyone: list[list[Span]], out: Path) -> None:
    figure = Figure(figsize=(12, 1.2 + 1.3 * len(everyone)), layout="tight")
    axes = figure.subplots()
    rows, inside = {}, []
    for rank, spans in enumerate(everyone):
        start = min(begin for name, begin, _ in spans if kind_of(name, COMPUTED))
        for index, (lane, kinds) in enumerate(LANES.items()):
            rows[f"rank {rank} {lane}"] = row = 2.4 * rank + index - 0.4
            for kind, (colour, said) in kinds.items():
                bars = [(b - start, max(e - b, 0.05)) for name, b, e in spans if kind_of(name, kinds) == kind]
                height = 0.8 if lane == "compute" else 0.4
                low = 0.4 if kind == "gloo:" else 0.0  # beside what is sent at once
                of_all = "" if rank else said  # the legend says it once
                look = {"facecolors": colour, "edgecolor": "white", "linewidth": 0.3, "label": of_all}
                axes.broken_barh(bars, (row + low, height), **look)
                if kind in ("dmuon::ns", "dmuon::adamw"):
                    inside += [time for begin, length in bars for time in (begin, begin + length)]
    axes.set_yticks([row + 0.4 for row in rows.values()], list(rows))
    axes.invert_yaxis()
    # The whole step() and as much around it as shows what comes before and after.
    first, last = min(inside), max(inside)
    axes.set_xlim(first - 0.4 * (last - first), last + 0.4 * (last - first))
    axes.set_xlabel("ms")
    axes.legend(ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    _, settings = parse(Settings, __doc__)
    draw(run_ranks(settings.world, record, settings), Path(settings.out).resolve())
