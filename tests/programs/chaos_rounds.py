"""What a round of chaos is: a layout, a fault and a moment, by the seed and the round's number alone."""

from __future__ import annotations

import random
from dataclasses import dataclass

from harness.topologies import LAYOUTS

STEPS = 4
SAVED_AFTER = (2, 4)  # steps; the first is loaded again at once
EVALUATED_AFTER = 3

# dmuon's matrices have one name for each parameter in these: a checkpoint of one can be loaded on any other.
ROOMS = [name for name, grid in LAYOUTS.items() if 2 <= grid.world <= 4 and name != "ddp-inside"]
MEASURED = ("ddp", "ddp-of-3", "replicate-ddp")  # plans by measured costs, whatever is asked for: other last bits
VARIANTS = ("", "keep", "single", "overlap")  # of dedicated layouts: how they communicate

PHASES = ("construct", "forward", "backward", "clip", "step", "evaluate", "save", "load")
SHORT, LONG = "short", "long"


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        weight: how often it comes.
        phases: where it may come.
        details: one of them is drawn.
        dedicated: only where dmuon owns the matrices; elsewhere torch's own collectives would go wrong.
        planning: needs a layout whose plans are told something.
        harmless: the run ends with its numbers.
        diverges: ranks compute something else until they are told, which is before gradients are used.
        own_numbers: the run may end with numbers that are right for this fault alone.
    """

    weight: int
    phases: tuple[str, ...]
    details: tuple[str, ...] = ("",)
    dedicated: bool = False
    planning: bool = False
    harmless: bool = False
    diverges: bool = False
    own_numbers: bool = False


TRAINING = ("forward", "backward", "clip", "step")
FAULTS = {
    "kill": Fault(12, (*PHASES, "step", "save")),
    "stop": Fault(4, PHASES),
    "pause": Fault(4, PHASES, (SHORT, LONG)),
    "raise": Fault(8, ("data", "forward", "loss", "backward", "save")),
    "interrupt one": Fault(8, PHASES),
    "interrupt all": Fault(6, PHASES),
    "slow disk": Fault(2, ("save",), ("write", "finish"), harmless=True),
    "full disk": Fault(5, ("save",), ("one", "all", "one, goes on", "all, goes on")),
    "full disk for costs": Fault(1, ("construct",), planning=True, harmless=True),
    "torn checkpoint": Fault(5, ("load",), ("truncated", "missing", "metadata", "empty", "on one rank")),
    "bad plan": Fault(3, ("construct",), ("truncated", "edited", "empty", "folder"), dedicated=True),
    "bad costs": Fault(3, ("construct",), ("truncated", "junk", "folder"), planning=True),
    "bad cost cache": Fault(2, ("construct",), ("truncated", "junk", "pipe"), planning=True, harmless=True),
    "solver": Fault(
        6,
        ("construct",),
        ("killed", "hangs", "floods", "garbage", "fails", "missing"),
        planning=True,
        harmless=True,
    ),
    "skips the step": Fault(3, ("step",), diverges=True),
    "skips a batch": Fault(3, ("data",), diverges=True),
    "extra forward": Fault(2, ("forward",), dedicated=True, diverges=True),
    "extra backward": Fault(2, ("forward",), dedicated=True, diverges=True),
    "other order": Fault(3, ("forward",), dedicated=True, diverges=True),
    "skipped block": Fault(2, ("forward",), dedicated=True, diverges=True),
    "other order in evaluation": Fault(3, ("evaluate",), dedicated=True, diverges=True),
    "other rate": Fault(2, ("step",), ("lr", "weight_decay"), diverges=True),
    "other options": Fault(2, ("construct",), ("lr", "momentum", "ns_steps", "weight_decay", "costs"), diverges=True),
    "other model": Fault(2, ("construct",), diverges=True),
    "frozen": Fault(2, ("forward",), dedicated=True, diverges=True),
    "empty batch": Fault(2, ("forward",), own_numbers=True),
    "not a number": Fault(2, ("loss",), own_numbers=True),
    # What no product does: tests see that it is found.
    "planted wrong number": Fault(0, ("step",), harmless=True),
    "planted hang": Fault(0, ("forward",)),
}


@dataclass(frozen=True)
class Round:
    """One of them.

    Attributes:
        step: at which the fault comes.
        moment: how far into the phase, as a part of the calls that dmuon makes in it.
        other: a layout of another number of ranks, on which the checkpoint is loaded afterwards; empty for none.
        rank_0_hosts_store: the rendezvous store ends with rank 0.
    """

    seed: int
    number: int
    layout: str
    variant: str
    fault: str
    detail: str
    victim: int
    phase: str
    step: int
    moment: float
    other: str
    rank_0_hosts_store: bool

    @property
    def world(self) -> int:
        return LAYOUTS[self.layout].world

    @property
    def kind(self) -> Fault:
        return FAULTS[self.fault]

    def __str__(self) -> str:
        where = f"{self.phase} of step {self.step}, {self.moment:.2f} into it"
        detail = f" ({self.detail})" if self.detail else ""
        variant = f" {self.variant}" if self.variant else ""
        return f"{self.layout}{variant}: {self.fault}{detail} on rank {self.victim}, {where}"

    def command(self) -> str:
        return f"python tests/programs/chaos.py --seed {self.seed} --first {self.number} --rounds 1"


def steps_of(phase: str) -> tuple[int, ...]:
    """At which steps a phase comes."""
    at = {"construct": (0,), "save": tuple(n - 1 for n in SAVED_AFTER), "load": (1,), "evaluate": (2,)}
    return at.get(phase, tuple(range(STEPS)))


def part_of(layout: str, rank: int) -> tuple[int, int]:
    """Which part of a batch a rank gets, of how many."""
    part, parts, below = 0, 1, LAYOUTS[layout].world
    for name, extent in LAYOUTS[layout].dims:
        below //= extent
        if name != "tp":
            part, parts = part * extent + rank // below % extent, parts * extent
    return part, parts


def draw(seed: int, number: int, only: str | None = None) -> Round:
    """The round ``number``, with the fault ``only`` if that is given."""
    dice = random.Random(f"{seed}/{number}")
    fault = dice.choices(list(FAULTS), [kind.weight for kind in FAULTS.values()])[0]
    if only is not None:
        fault = only
    kind = FAULTS[fault]
    rooms = [name for name in ROOMS if LAYOUTS[name].dedicated or not kind.dedicated]
    layout = dice.choice([name for name in rooms if name not in MEASURED or not kind.planning])
    world = LAYOUTS[layout].world
    phase = dice.choice(kind.phases)
    return Round(
        seed,
        number,
        layout,
        dice.choice(VARIANTS) if LAYOUTS[layout].dedicated else "",
        fault,
        dice.choice(kind.details),
        dice.randrange(world),
        phase,
        dice.choice(steps_of(phase)),
        dice.random(),
        dice.choice([name for name in ROOMS if LAYOUTS[name].world != world]) if dice.random() < 0.4 else "",
        dice.random() < 0.2,
    )
