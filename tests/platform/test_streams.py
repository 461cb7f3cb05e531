"""What dmuon asks of NCCL, without it."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dmuon.platform.torch_private import in_one_launch


class Group:
    """As a process group of NCCL: what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def _get_backend(self, _device: torch.device) -> Any:
        return SimpleNamespace(name=lambda: "nccl")

    def _start_coalescing(self, _device: torch.device) -> None:
        self.told.append("start")

    def _end_coalescing(self, _device: torch.device) -> str:
        self.told.append("end")
        return "work"


def test_collectives_of_a_launch_are_one_work() -> None:
    group: Any = Group()
    works = in_one_launch(group, torch.device("cpu"), [partial(group.told.append, name) for name in "ab"])
    assert group.told == ["start", "a", "b", "end"] and works == ["work"]


def test_a_launch_that_fails_leaves_no_group_call_open() -> None:
    """Whatever the process starts afterwards, on any communicator, would wait for its end."""
    group: Any = Group()

    def fail() -> None:
        raise torch.OutOfMemoryError

    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            in_one_launch(group, torch.device("cpu"), [fail, fail])
    assert group.told == ["start", "end"] * 2
