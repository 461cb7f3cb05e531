"""What dmuon asks of NCCL, without it."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dmuon.platform.streams import group_options
from dmuon.platform.torch_private import in_one_launch


class Options:
    """As ``ProcessGroupNCCL.Options``."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(minutes=10)


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize(("is_first", "timeout"), [(False, timedelta(minutes=30)), (True, timedelta(seconds=7))])
def test_options_are_what_is_asked_for(is_first: bool, timeout: timedelta) -> None:
    """With another timeout than the group's torch warns, once for each group."""
    options: Any = group_options("cuda", is_first, timeout)
    assert (options.is_high_priority_stream, options._timeout) == (is_first, timeout)


def test_other_back_ends_have_none() -> None:
    assert group_options("cpu", True, timedelta(seconds=7)) is None


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
