"""Options of process groups on NCCL, without it."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from dmuon.platform.streams import group_options


class Options:
    """As ``ProcessGroupNCCL.Options``."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(minutes=10)
        self.config = SimpleNamespace(max_ctas=-1)


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)


@pytest.mark.usefixtures("nccl")
def test_options_agree_with_the_group_about_its_timeout() -> None:
    """Otherwise torch warns, once for each group."""
    options: Any = group_options("cuda", False, timedelta(minutes=30), None)
    assert options._timeout == timedelta(minutes=30)
    assert not options.is_high_priority_stream
    assert options.config.max_ctas == -1, "NCCL's own choice"


@pytest.mark.usefixtures("nccl")
def test_what_is_asked_for_is_handed_on() -> None:
    options: Any = group_options("cuda", True, timedelta(seconds=7), 4)
    assert options._timeout == timedelta(seconds=7)
    assert options.is_high_priority_stream
    assert options.config.max_ctas == 4


def test_other_back_ends_have_none() -> None:
    assert group_options("cpu", True, timedelta(seconds=7), None) is None
