"""Every scheduler of torch drives dmuon's groups as it drives torch's own optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness.assertions import assert_equal_weights
from harness.oracle import Reference
from harness.toy import OPTIONS, build, train
from torch.optim import Optimizer, lr_scheduler
from torch.optim.swa_utils import SWALR

import dmuon

CYCLE = {"base_lr": 1e-3, "max_lr": 4e-3, "step_size_up": 3}
SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1.0 / (1 + step)),
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=4),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5), lr_scheduler.ExponentialLR(o, 0.8)], milestones=[2]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=4e-3, total_steps=8),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, **CYCLE),
    "CyclicLR without momentum": lambda o: lr_scheduler.CyclicLR(o, cycle_momentum=False, **CYCLE),
    "SWALR": lambda o: SWALR(o, swa_lr=1e-4, anneal_epochs=3),
}

TENSORS = ("LambdaLR", "CosineAnnealingLR", "OneCycleLR", "SWALR")


def advance(scheduler: Any) -> None:
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(1.0)
    else:
        scheduler.step()


def cycled(optimizer: Optimizer) -> list[tuple[float, float]]:
    """Learning rate and momentum of each group; the first beta stands for AdamW's."""
    return [(float(g["lr"]), g["betas"][0] if "betas" in g else g["momentum"]) for g in optimizer.param_groups]


@pytest.mark.pitfall("P09", "P75")
@pytest.mark.parametrize(
    ("schedule", "tensor"),
    [
        *((name, False) for name in SCHEDULES),
        *((name, True) for name in TENSORS),
    ],
)
def test_each_scheduler_drives_both_routes_as_it_drives_torchs(schedule: str, tensor: bool) -> None:
    ours, theirs = build(), build()
    options = {**OPTIONS, "lr": torch.tensor(OPTIONS["lr"], dtype=torch.float64)} if tensor else OPTIONS
    optimizer, reference = dmuon.Muon(ours, **options), Reference(theirs)
    rates = [g["lr"] for g in optimizer.param_groups]
    scheduler = SCHEDULES[schedule](optimizer)
    expected = [SCHEDULES[schedule](reference.muon), SCHEDULES[schedule](reference.adamw)]
    seen = set()
    for step in range(6):
        train(ours, optimizer, [step])
        train(theirs, reference, [step])
        for either in (scheduler, *expected):
            advance(either)
        found, wanted = cycled(optimizer), [*cycled(reference.muon), *cycled(reference.adamw)]
        for mine, other in zip(found, wanted, strict=True):
            assert mine == pytest.approx(other, rel=1e-12)
        seen.update(found)
    assert len(seen) > 1
    assert_equal_weights(dict(ours.state_dict()), dict(theirs.state_dict()))
    if tensor:
        assert all(g["lr"] is rate for g, rate in zip(optimizer.param_groups, rates, strict=True)), "filled in place"


@pytest.mark.pitfall("P75")
@pytest.mark.parametrize("schedule", ["OneCycleLR", "CyclicLR", "SWALR"])
def test_a_schedule_goes_on_from_a_state_dict(schedule: str) -> None:
    model = build()
    optimizer = dmuon.Muon(model, **OPTIONS)
    scheduler = SCHEDULES[schedule](optimizer)
    for step in range(3):
        train(model, optimizer, [step])
        scheduler.step()
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()])
    again = build()
    optimizer2 = dmuon.Muon(again, **{**OPTIONS, "lr": 1.0, "momentum": 0.1, "adamw_betas": (0.1, 0.2)})
    scheduler2 = SCHEDULES[schedule](optimizer2)
    for part, of_part in zip((again, optimizer2, scheduler2), saved, strict=True):
        part.load_state_dict(of_part)
    for step in range(3, 6):
        for some, driven, schedule_ in ((model, optimizer, scheduler), (again, optimizer2, scheduler2)):
            train(some, driven, [step])
            schedule_.step()
        assert cycled(optimizer) == cycled(optimizer2)
    assert_equal_weights(dict(again.state_dict()), dict(model.state_dict()), 0.0)


def test_momentum_of_an_adamw_group_is_its_first_beta_and_nothing_that_is_saved() -> None:
    optimizer = dmuon.Muon(build(), **OPTIONS)
    group = optimizer.param_groups[1]
    assert group["momentum"] == group.get("momentum") == group["betas"][0] == 0.9
    group["momentum"] = 0.5
    assert group["betas"] == (0.5, 0.95) and "momentum" not in {**group}
    saved = optimizer.state_dict()["param_groups"][1]
    assert type(saved) is dict and sorted(saved) == ["betas", "eps", "lr", "params", "use_muon", "weight_decay"]
    with pytest.raises(KeyError, match="nesterov"):
        group["nesterov"]
