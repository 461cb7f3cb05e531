"""All-to-alls and their bytes equal the formula on every layout, and memory of what is in flight has a bound."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.on_ranks import on_ranks, slowly
from harness.topologies import lay
from harness.toy import build

import dmuon
from dmuon.report.accounting import exchanged_messages

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from common.ledger import Ledger

EXCHANGES = ("alltoall_base_", "broadcast_")
HIDDEN = 509
SLACK_BYTES = 2048  # votes, norms, and numbers of AdamW: none of them grows with the matrices


def formula(optimizer: dmuon.Muon) -> dict[str, int]:
    """Collectives and bytes of a step, by their way."""
    rows = list(exchanged_messages(optimizer))

    def total(is_sent: bool, *purposes: str) -> int:
        return sum(row.nbytes for row in rows if row.is_sent is is_sent and row.purpose in purposes)

    return {
        "calls": sum(row.calls for row in rows),
        "received_before": total(False, "gather"),
        "received_after": total(False, "scatter", "copy"),
        "sent_before": total(True, "gather"),
        "sent_after": total(True, "scatter", "copy"),
        "copied": total(True, "copy"),
        "summed": total(False, "sum"),
    }


def counted(
    name: str,
    together: bool,
    prefetch: int,
    chunk_bytes: int,
    dtype: Any = None,
    strategy: str = "owner",
) -> tuple[dict[str, int], dict[str, int], int]:
    """What this rank was counted to send, which must be what the formula says; that; and rounds."""
    laid = lay(name, build(layers=4, hidden=HIDDEN))
    config = dmuon.create_dtensor_config(together, prefetch, costs="flops", chunk_bytes=chunk_bytes)
    optimizer = dmuon.Muon(laid.network, distributed_config=config, ns_dtype=dtype, strategy=strategy)
    in_flight = []
    for step in range(4):  # the least: a thread of gloo may keep what has arrived for a moment
        laid.backward(step)
        with Ledger() as ledger:
            optimizer.step()
        optimizer.zero_grad()
        in_flight.append(ledger.in_flight)
    found = {
        "calls": sum(ledger.calls[name] for name in EXCHANGES),
        "received": sum(ledger.received[name] for name in EXCHANGES),
        "sent": sum(ledger.sent[name] for name in EXCHANGES),
        "in_flight": min(in_flight),
        "summed": ledger.received["allreduce_"],
    }
    budget = formula(optimizer)
    for way in ("received", "sent"):
        assert found[way] == budget[f"{way}_before"] + budget[f"{way}_after"], f"counted {found}, formula {budget}"
    assert strategy != "owner" or found["calls"] == budget["calls"], f"counted {found}, formula {budget}"
    return found, budget, sum(round_.exchanged for round_ in optimizer._rounds)


@pytest.mark.parametrize(
    ("layout", "together", "prefetch", "chunk_bytes"),
    [
        ("fsdp2-2", True, 0, 2**28),
        ("fsdp2-hsdp", True, 2, 2**14),
        *slowly(("fsdp2-4", False, 0, 2**14), ("fsdp2-hsdp", True, 1, 2**28), ("fsdp2-tp", True, 1, 2**16)),
    ],
)
@on_ranks("layout")
def test_exchanges_equal_the_formula(
    rank: int, world: int, layout: str, together: bool, prefetch: int, chunk_bytes: int
) -> None:
    counted(layout, together, prefetch, chunk_bytes)


@pytest.mark.parametrize(
    ("layout", "strategy", "dtype"),
    [
        ("fsdp2-2", "sharded", torch.float16),
        ("fsdp2-2", "full_replication", torch.float16),
        ("fsdp2-3", "sharded:2", None),
        ("replicate-fsdp", "replicated", None),
        *slowly(
            ("fsdp2-hsdp", "replicated", torch.bfloat16),
            ("fsdp2-tp", "sharded", torch.float16),
            ("fsdp2-hsdp", "sharded:3", None),
        ),
    ],
)
@on_ranks("layout")
def test_strategies_send_what_the_formula_says(rank: int, world: int, layout: str, strategy: str, dtype: Any) -> None:
    found, budget, _ = counted(layout, True, 1, 2**14, dtype, strategy)
    _, _, size = strategy.partition(":")
    team = int(size or world)  # the first ranks: there is one
    assert budget["copied"] == 0
    assert (budget["summed"] > 0) == (strategy.startswith("sharded") and rank < team)
    by_all = found["summed"] - 2 * budget["summed"] * (team - 1) // team
    assert 0 < by_all <= SLACK_BYTES, "votes and norms"
    if layout == "replicate-fsdp":
        assert found["received"] == 0, "each copy does all by itself"
    if not strategy.startswith("sharded"):
        assert budget["received_after"] == 0, "each rank has the result"


@on_ranks(2)
def test_memory_in_flight_grows_with_prefetching_and_not_with_the_number_of_rounds(rank: int, world: int) -> None:
    largest = {}
    for prefetch in (0, 1, 3):
        found, _, rounds = counted("fsdp2-2", False, prefetch, 1)
        largest[prefetch] = found["in_flight"]
        assert rounds == 12
        # A round of one matrix keeps at most it, its update, and a copy of what of them is sent.
        most = (2 + 3 * (prefetch + bool(prefetch))) * 4 * 13 * HIDDEN + SLACK_BYTES
        assert largest[prefetch] <= most, largest
    assert largest[0] < largest[1] < largest[3], largest


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [("fsdp2-2", torch.float16), *slowly(("fsdp2-hsdp", torch.bfloat16), ("fsdp2-tp", torch.float16))],
)
@on_ranks("layout")
def test_pieces_travel_as_newton_schulz_begins_and_updates_as_it_ends(
    rank: int, world: int, layout: str, dtype: Any
) -> None:
    """Half of the bytes, also where tensors hold them in fp32."""
    (_, whole, _), (_, half, _) = (counted(layout, True, 0, 2**28, of_pieces) for of_pieces in (None, dtype))
    assert half["sent_before"] * 2 == whole["sent_before"]
    assert half["sent_after"] * 2 == whole["sent_after"] > 0
