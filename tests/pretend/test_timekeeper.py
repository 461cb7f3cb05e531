"""The pretended device's streams, as a clock sees them, through autograd's threads and stream guards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from harness.network import Block, Network, Size
from harness.topologies import LAYOUTS, Laid, lay
from harness.toy import SIZE, build
from streams.plants import Plant
from streams.plants import planted as planted_bug
from torch import Tensor

import dmuon
from dmuon.platform import streams
from pretend.listener import listening
from pretend.timekeeper import Timekeeper

Ranks = Callable[..., list[Any]]
DEVICE = "pretend"


def seen(program: Callable[[], object]) -> Counter[str]:
    keeper = Timekeeper()
    with listening(keeper):
        program()
    return Counter({str(race): count for race, count in keeper.races().items()})


# -- dmuon ------------------------------------------------------------------------------------------------------------


def trains(name: str, streams: str = "", **muon: Any) -> Callable[[], None]:
    """A program that waits as torch says that one has to.

    Args:
        streams: what of ``forward backward step`` runs on a stream of its own.
    """

    def run() -> None:
        laid: Laid = lay(name, build().to(DEVICE), device=torch.device(DEVICE))
        optimizer = laid.optimizer(ns_dtype=torch.float32, **muon)
        beside = {part: Beside() for part in streams.split()}
        for step in range(3):
            optimizer.zero_grad()
            with beside.get("forward", nullcontext()):
                loss = laid.loss(step)
            with beside.get("backward", nullcontext()):
                loss.backward()
            with beside.get("step", nullcontext()):
                optimizer.step()

    return run


class Beside:
    """A stream that runs after what is queued before, and before what is queued after."""

    def __init__(self) -> None:
        self._module = torch.pretend  # type: ignore[attr-defined]
        self.stream = self._module.Stream()

    def __enter__(self) -> None:
        self.stream.wait_stream(self._module.current_stream())
        self._entered = self._module.stream(self.stream)
        self._entered.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._entered.__exit__(*exception)
        self._module.current_stream().wait_stream(self.stream)


def races(_rank: int, _world: int, name: str, muon: dict[str, Any]) -> Counter[str]:
    return seen(trains(name, **muon))


def planted(_rank: int, _world: int) -> Counter[str]:
    kept = streams.Stream.join
    streams.Stream.join = lambda self: None  # type: ignore[method-assign]
    try:
        return seen(trains("1d-two-lines", overlap_backward=True))
    finally:
        streams.Stream.join = kept  # type: ignore[method-assign]


def unrelated(_rank: int, _world: int, name: str) -> Counter[str]:
    def run() -> None:
        module = torch.pretend  # type: ignore[attr-defined]
        laid: Laid = lay(name, build().to(DEVICE), device=torch.device(DEVICE))
        optimizer = laid.optimizer(ns_dtype=torch.float32)
        side = module.Stream()
        for step in range(3):
            optimizer.zero_grad()
            loss = laid.loss(step)
            side.wait_stream(module.current_stream())
            with module.stream(side):
                loss.backward()
            torch.zeros(4, device=DEVICE)  # takes what was freed on this stream, and has nothing to wait for
            module.current_stream().wait_stream(side)
            optimizer.step()

    return seen(run)


@pytest.mark.parametrize("name", ["1d-two-lines", "ddp-2"])
def test_memory_of_hooks_is_not_given_away_while_the_end_of_backward_reads_it(device_ranks: Ranks, name: str) -> None:
    for found in device_ranks(2, unrelated, name):
        assert not found, found


class Branches(Block):
    """Its first layer runs on a stream of its own. No gradient of its input would make others wait for that."""

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self.beside = Beside()

    def forward(self, x: Tensor) -> Tensor:
        with self.beside:
            wide = self.up(self.norm(x.detach().clone()))
        return x + self.mix(x) + self.down(torch.tanh(wide))


class Towers(Network):
    """Its blocks run beside each other."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        outputs = []
        for block in self.blocks:
            with Beside():
                outputs.append(block(x))
        logits: Tensor = self.head(self.norm(torch.stack(outputs).sum(0)))
        return logits


def branches(_rank: int, _world: int, name: str, kind: type[Network], micro: int, plant: Plant | None) -> Counter[str]:
    def run() -> None:
        comm = dmuon.CommOptions(merge_bytes=10**6 if kind is Towers else 0)
        model = kind(SIZE, Branches).to(DEVICE)
        laid: Laid = lay(name, model, device=torch.device(DEVICE), comm=comm)
        optimizer = laid.optimizer(ns_dtype=torch.float32)
        for step in range(2):
            optimizer.zero_grad()
            for part in range(micro - 1):
                with dmuon.no_sync(laid.model):
                    laid.loss(micro * step + part).backward()
            laid.backward(micro * step + micro - 1)
            for block in model.blocks:
                with torch.pretend.stream(block.beside.stream):  # type: ignore[attr-defined]
                    torch.zeros(4, device=DEVICE)  # takes what was freed on this stream, and has nothing to wait for
            optimizer.step()

    with nullcontext() if plant is None else planted_bug(plant):
        found = seen(run)
    # Not what the program does wrong itself, with its own outputs.
    return Counter({race: count for race, count in found.items() if "dedicated." in race})


@pytest.mark.pitfall("P65")
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("kind", [Network, Towers])
@pytest.mark.parametrize("name", ["1d", "hsdp", "ddp-2"])
def test_gradients_of_a_part_on_its_own_stream_are_waited_for(
    device_ranks: Ranks, name: str, kind: type[Network], micro: int
) -> None:
    for found in device_ranks(LAYOUTS[name].world, branches, name, kind, micro, None):
        assert not found, found


@pytest.mark.parametrize(
    ("plant", "kind"),
    [
        (Plant("GradReduction._pack", "origin.join"), Towers),
        (Plant("GradReduction._pack", "origin.await_users"), Network),
        (Plant("Gradients.join", "origins[id(matrix.full)].join"), Network),
    ],
    ids=str,
)
def test_a_gradient_that_is_not_waited_for_is_seen(device_ranks: Ranks, plant: Plant, kind: type[Network]) -> None:
    for found in device_ranks(2, branches, "1d", kind, 1, plant):
        assert found
