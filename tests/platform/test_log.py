"""What the logger ``dmuon`` says, at which level, and from which ranks."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch.distributed as dist
from harness.heard import recorded
from harness.on_ranks import on_ranks
from harness.topologies import LAYOUTS, lay
from harness.toy import OPTIONS, build, train

import dmuon

ROOT = Path(__file__).parents[2]


def texts(records: list[logging.LogRecord], level: int) -> list[str]:
    return [record.getMessage() for record in records if record.levelno == level]


@pytest.mark.parametrize("layout", ["1d-two-lines", "fsdp2-2", "ddp"])
@on_ranks(2)
def test_one_rank_says_once_what_is_owned_or_exchanged_and_at_what_cost(rank: int, world: int, layout: str) -> None:
    with recorded(logging.INFO) as records:
        laid = lay(layout, build())
        optimizer = laid.optimizer()
        laid.train(optimizer, range(1))
        count = len(records)
        laid.train(optimizer, range(1, 4))
    said = texts(records, logging.INFO)
    assert len(records) == count, "nothing step by step"
    assert all(record.name.startswith("dmuon.") and record.rank == rank for record in records)
    if rank > 0:
        assert not [text for text in said if "timing" not in text]
        return
    assert all(text.startswith("rank 0: ") for text in said)
    elements = sum(p.numel() for name, p in build().named_parameters() if p.ndim == 2 and "blocks" in name)
    [what] = [text for text in said if f"9 matrices of {elements:,} elements over 2 ranks" in text]
    is_dedicated = LAYOUTS[layout].dedicated
    assert ("dedicated" in what) == is_dedicated and ("exchange" in what) != is_dedicated
    times = re.search(r"([\d.]+) ms on the slowest, ([\d.]+) ms on average", what)
    assert times is not None and float(times[1]) >= float(times[2]) >= float(times[1]) / world
    assert layout == "ddp" or "estimated from FLOPs" in what
    owns, exchanges = (9, 0) if is_dedicated else (0, 9)
    assert any(
        f"{owns} parameters that dmuon owns, {exchanges} that other layouts shard or replicate and 0 that" in text
        for text in said
    )


def test_messages_of_a_single_process_name_no_rank(caplog: pytest.LogCaptureFixture) -> None:
    assert not dist.is_initialized()
    model = build()
    with caplog.at_level(logging.INFO, logger="dmuon"):
        optimizer = dmuon.Muon(model, **OPTIONS)
        train(model, optimizer, range(2))
    assert caplog.records[0].getMessage().startswith("Muon takes 0 parameters that dmuon owns")


def test_every_module_logs_by_the_one_that_names_the_rank() -> None:
    files = [path for folder in ("dmuon", "solver", "kernels") for path in (ROOT / folder).rglob("*.py")]
    assert [path.name for path in files if "getLogger(" in path.read_text()] == ["host.py"]
