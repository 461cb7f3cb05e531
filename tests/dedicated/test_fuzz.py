"""Random mode switches never hang and never diverge from a single process; the driver itself notices what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.pool import RankPool
from programs.fuzz import Divergence, run_case, run_segment
from programs.fuzz_actions import possible_actions
from programs.fuzz_twin import MODES, Case, Twin

ACTIONS = 50  # more than one deck: every possible action comes at least once


@pytest.mark.pitfall("P11", "P12", "P16", "P17", "P19", "P22", "P25", "P28", "P30", "P34", "P36", "P48")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("actions", [15, pytest.param(ACTIONS, marks=pytest.mark.slow)])
def test_random_actions_never_diverge(ranks: RankPool, tmp_path: Path, actions: int) -> None:
    mode = "1d-reshard"
    report = run_segment(ranks, Case(mode, seed=0, actions=actions, world=3, folder=str(tmp_path)))
    assert report.actions.total() == actions
    if actions == ACTIONS:
        assert set(report.actions) == possible_actions(mode), "every action that this mode allows was taken"
    assert {"gradient", "weight", "momentum_buffer", "logits", "norm"} <= set(report.worst), "something was compared"
    assert bool(report.overlapped) == MODES[mode].overlap, "Newton-Schulz ran during backward"


OTHERS = [
    (1, "1d-keep"),
    (2, "tp"),
    (3, "1d-overlap"),
    (3, "1d-merged"),
    (4, "hsdp-reshard"),
    (4, "hsdp-two-lines"),
    (4, "tp-two-lines"),
]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("world", "mode"), OTHERS)
def test_random_actions_never_diverge_in_other_modes(ranks: RankPool, tmp_path: Path, world: int, mode: str) -> None:
    seed = 10 + OTHERS.index((world, mode))
    run_segment(ranks, Case(mode, seed, actions=35, world=world, folder=str(tmp_path)))


class MissesAStep(Twin):
    steps = 0

    def step(self) -> None:
        self.steps += 1
        if self.steps != 3:
            super().step()


class KeepsDroppedGradients(Twin):
    clears = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.clears += 1
        if self.clears % 3:
            super().zero_grad(set_to_none)


class ForgetsTheMomentumOfACheckpoint(Twin):
    def load(self) -> None:
        momenta = {
            name: state["momentum_buffer"].clone() for name, state in self.state().items() if "step" not in state
        }
        super().load()
        for name, momentum in momenta.items():
            self.state()[name]["momentum_buffer"].copy_(momentum)


@pytest.mark.parametrize("twin", [MissesAStep, KeepsDroppedGradients, ForgetsTheMomentumOfACheckpoint])
def test_a_difference_is_noticed_and_can_be_replayed(ranks: RankPool, tmp_path: Path, twin: type[Twin]) -> None:
    case = Case("two-lines-reshard", seed=0, actions=ACTIONS, world=3, folder=str(tmp_path))
    outcomes = ranks(3, run_case, case, twin, expect=Divergence, match=r"seed 0: action \d+ on rank \d of 3: Assertion")
    for outcome in outcomes:
        lines = outcome.message.splitlines()
        action = int(lines[0].split("action ")[1].split()[0])
        assert lines[1] == "last actions:" and lines[-2].startswith(f"  {action} ")
        assert lines[-1] == f"replay: {case.replay(action + 1)}"
