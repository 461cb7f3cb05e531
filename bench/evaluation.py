"""What a forward without gradients costs, and what comparing the order of its blocks adds.

Programs take turns in one process tree: a dedicated model as it is, the same model with the comparison left out, and
FSDP2. Printed are medians over rounds, and the median of the paired ratios; the error column is the largest relative
difference of the outputs from a single process.

    python bench/evaluation.py --world 2 --rounds 101
    python bench/evaluation.py --world 2 --rounds 101 --batch 1 --context 1     # generation: one token at a time
"""

from __future__ import annotations

import copy
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from common.clock import collect, in_turn, medians
from common.options import parse
from common.programs import ADAMW, DEDICATED, LEAST, Mode, Sizes, build_dedicated, build_stock, data, initial_model
from common.ranks import over_ranks, run_ranks, timed
from common.results import origin, write_json
from torch.distributed.device_mesh import init_device_mesh

from dmuon.dedicated.dedication import dedications

BARE, STOCK = "dedicated without comparison", "fsdp2"


@dataclass(frozen=True, slots=True)
class Settings(Sizes):
    rounds: int = 101
    json: str | None = None


class Incomparable:
    """In the place of ``OrderCheck``: compares nothing."""

    def restart(self) -> None: ...

    def run(self, _block: object, *, trains: bool) -> None: ...

    def end(self, *, trains: bool) -> None: ...


def worker(rank: int, settings: Settings) -> None:
    mesh = init_device_mesh("cpu", (settings.world,))
    initial = initial_model(settings)
    models = {
        DEDICATED: build_dedicated(DEDICATED, Mode(), copy.deepcopy(initial), settings).model,
        STOCK: build_stock(ADAMW, initial, mesh, settings).model,
    }
    runtime = dedications(models[DEDICATED])[0].runtime
    compared, bare = runtime.order_check, Incomparable()
    tokens, _ = data(settings, 0, rank)

    def passes(name: str) -> Callable[[], torch.Tensor]:
        model = models[DEDICATED if name == BARE else name]
        return lambda: model(tokens)

    def sample(index: int) -> dict[str, float]:
        took = {}
        for name in in_turn([DEDICATED, BARE, STOCK], index):
            runtime.order_check = bare if name == BARE else compared  # type: ignore[assignment]
            took[name] = 1e3 * timed(passes(name))
        return took

    with torch.no_grad():
        expected = initial(tokens)
        errors = {n: float((model(tokens) - expected).norm() / expected.norm()) for n, model in models.items()}
        samples = collect(settings.warmup, settings.rounds, sample)
    worst = dict(zip(errors, over_ranks(list(errors.values())), strict=True))
    if rank == 0:
        print(report(settings, samples, {**worst, BARE: worst[DEDICATED]}), flush=True)
        if settings.json:
            write_json(
                settings.json, {"settings": asdict(settings), **origin(), "samples_ms": samples, "errors": worst}
            )


def report(settings: Settings, samples: dict[str, list[float]], error: dict[str, float]) -> str:
    median = medians(samples)
    lines = [
        f"{settings.world} ranks, 1 thread each; {settings.layers} layers of width {settings.width}; "
        f"{settings.tokens} tokens per rank; {settings.rounds} interleaved rounds; medians in ms",
        "",
        f"{'program':<32}{'forward':>9}{'to that without':>17}{'error':>10}",
    ]
    for name, values in samples.items():
        ratio = statistics.median(a / b for a, b in zip(values, samples[BARE], strict=True))
        lines.append(f"{name:<32}{median[name]:>9.2f}{ratio:>17.3f}{error[name]:>10.1e}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    _, settings = parse(Settings, __doc__, argv, least=LEAST)
    run_ranks(settings.world, worker, settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
