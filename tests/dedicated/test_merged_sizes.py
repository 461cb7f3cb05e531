"""How large a block is for ``merge_bytes``: the same on all tensor-parallel ranks, also where their parts differ."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from harness.on_ranks import on_ranks, over_ranks
from harness.topologies import lay
from harness.toy import build

from dmuon.dedicated.dedicate import _nbytes
from dmuon.dedicated.dedication import dedications


@on_ranks(2)
def test_a_block_is_as_large_as_on_the_tensor_parallel_rank_with_most(rank: int, world: int) -> None:
    matrices = list(dedications(lay("tp", build()).model)[0].runtime.matrices())
    weights: list[Any] = [SimpleNamespace(param=matrix.rest, tensor=matrix.tensor) for matrix in matrices]
    here = sum(matrix.local_shape.numel() for matrix in matrices) * 4
    on_first = over_ranks(here if rank == 0 else 0)
    assert over_ranks(here) < 2 * on_first, "29 rows over 2 ranks are 15 and 14"
    assert _nbytes(weights, torch.float32) == on_first
