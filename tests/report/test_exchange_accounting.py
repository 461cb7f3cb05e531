"""All-to-alls and their bytes equal the formula on every layout, and memory of what is in flight has a bound."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.pool import RankPool
from harness.topologies import LAYOUTS, lay
from harness.toy import build

import dmuon
from dmuon.report.accounting import expected_exchange

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from common.ledger import Ledger

EXCHANGES = ("alltoall_base_", "broadcast_")
SLACK_BYTES = 2048  # votes, norms, and numbers of AdamW: none of them grows with the matrices


def count_step(
    _rank: int,
    _world: int,
    name: str,
    together: bool,
    prefetch: int,
    chunk_bytes: int,
    dtype: Any = None,
    strategy: str = "owner",
) -> tuple[dict[str, int], dict[str, int], int, int]:
    """What was counted, what the formula says, rounds, and bytes of the largest matrix."""
    model = build(layers=4, hidden=509)
    laid = lay(name, model)
    config = dmuon.create_dtensor_config(together, prefetch, costs="flops", chunk_bytes=chunk_bytes)
    optimizer = dmuon.Muon(model, distributed_config=config, ns_dtype=dtype, strategy=strategy)
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
    rounds = sum(round_.exchanged for round_ in optimizer._rounds)
    return found, asdict(expected_exchange(optimizer)), rounds, 4 * 13 * 509


@pytest.mark.parametrize(
    ("name", "together", "prefetch", "chunk_bytes"),
    [
        ("fsdp2-2", True, 0, 2**28),
        ("fsdp2-2", False, 3, 2**14),
        ("fsdp2-hsdp", True, 2, 2**14),
        ("tp-alone", True, 1, 2**14),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("fsdp2-2", True, 1, 2**14),
                ("fsdp2-4", True, 2, 2**16),
                ("fsdp2-4", False, 0, 2**14),
                ("fsdp2-hsdp", True, 1, 2**28),
                ("tp-alone", True, 0, 2**28),
                ("fsdp2-tp", True, 1, 2**16),
                ("fsdp2-tp", False, 2, 2**28),
            )
        ),
    ],
)
def test_exchanges_equal_the_formula(
    ranks: RankPool, name: str, together: bool, prefetch: int, chunk_bytes: int
) -> None:
    for rank, (found, budget, _, _) in enumerate(
        ranks(LAYOUTS[name].world, count_step, name, together, prefetch, chunk_bytes)
    ):
        expected = {
            "calls": budget["calls"],
            "received": budget["received_before"] + budget["received_after"],
            "sent": budget["sent_before"] + budget["sent_after"],
        }
        assert expected == {key: found[key] for key in expected}, f"rank {rank}: counted {found}, formula {budget}"


@pytest.mark.parametrize(
    ("name", "strategy", "dtype"),
    [
        ("fsdp2-2", "replicated", None),
        ("fsdp2-2", "sharded", torch.float16),
        ("fsdp2-2", "full_replication", torch.float16),
        ("tp-alone", "sharded", None),
        ("fsdp2-3", "sharded:2", None),
        ("replicate-fsdp", "replicated", None),
        pytest.param("fsdp2-hsdp", "replicated", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("fsdp2-hsdp", "sharded", None, marks=pytest.mark.slow),
        pytest.param("fsdp2-tp", "sharded", torch.float16, marks=pytest.mark.slow),
        pytest.param("fsdp2-hsdp", "sharded:3", None, marks=pytest.mark.slow),
    ],
)
def test_strategies_send_what_the_formula_says(ranks: RankPool, name: str, strategy: str, dtype: Any) -> None:
    world = LAYOUTS[name].world
    _, _, size = strategy.partition(":")
    team = int(size or world)  # the first ranks: there is one
    counted = ranks(world, count_step, name, True, 1, 2**14, dtype, strategy)
    for rank, (found, budget, _, _) in enumerate(counted):
        assert found["received"] == budget["received_before"] + budget["received_after"]
        assert found["sent"] == budget["sent_before"] + budget["sent_after"]
        assert budget["copied"] == 0
        assert (budget["summed"] > 0) == (strategy.startswith("sharded") and rank < team)
        by_all = found["summed"] - 2 * budget["summed"] * (team - 1) // team
        assert 0 < by_all <= SLACK_BYTES, "votes and norms"
        if name == "replicate-fsdp":
            assert found["received"] == 0, "each copy does all by itself"
        if not strategy.startswith("sharded"):
            assert budget["received_after"] == 0, "each rank has the result"


def test_memory_in_flight_grows_with_prefetching_and_not_with_the_number_of_rounds(ranks: RankPool) -> None:
    counted = {p: ranks(2, count_step, "fsdp2-2", False, p, 1) for p in (0, 1, 3)}
    for rank in range(2):
        largest = {p: found[rank][0]["in_flight"] for p, found in counted.items()}
        rounds, matrix = counted[0][rank][2:]
        assert rounds == 12
        assert largest[0] < largest[1] < largest[3], largest
        # A round of one matrix keeps at most it, its update, and a copy of what of them is sent.
        for prefetch, nbytes in largest.items():
            assert nbytes <= (2 + 3 * (prefetch + bool(prefetch))) * matrix + SLACK_BYTES, largest


@pytest.mark.parametrize(
    ("layout", "dtype", "before"),
    [
        ("fsdp2-2", torch.float16, 2),
        pytest.param("fsdp2-hsdp", torch.bfloat16, 2, marks=pytest.mark.slow),
        pytest.param("fsdp2-tp", torch.float16, 2, marks=pytest.mark.slow),
    ],
)
def test_pieces_travel_as_newton_schulz_begins_and_updates_as_it_ends(
    ranks: RankPool, layout: str, dtype: Any, before: int
) -> None:
    """Half of the bytes, also where tensors hold them in fp32."""
    of_fp32, of_half = (
        ranks(LAYOUTS[layout].world, count_step, layout, True, 0, 2**28, dtype) for dtype in (None, dtype)
    )
    for (found, budget, _, _), (_, whole, _, _) in zip(of_half, of_fp32, strict=True):
        assert found["calls"] == budget["calls"]
        assert found["sent"] == budget["sent_before"] + budget["sent_after"]
        assert found["received"] == budget["received_before"] + budget["received_after"]
        assert budget["sent_before"] * before == whole["sent_before"]
        assert budget["sent_after"] * 2 == whole["sent_after"] > 0
