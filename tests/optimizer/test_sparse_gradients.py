"""Sparse gradients of embeddings are refused by name where a module announces them; elsewhere see tests/parity."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch.nn as nn
from harness.network import Network
from harness.on_ranks import on_ranks
from harness.toy import OPTIONS, VOCAB, WIDTH, build, train
from torch.distributed.device_mesh import init_device_mesh

import dmuon


def announced(kind: type[nn.Module]) -> Network:
    model = build()
    model.embed = kind(VOCAB, WIDTH, sparse=True)  # type: ignore[assignment]
    return model


@pytest.mark.pitfall("P54")
@on_ranks(2)
def test_an_embedding_with_sparse_gradients_is_refused_on_every_rank(rank: int, world: int) -> None:
    """By every way to build an optimizer."""
    mesh = init_device_mesh("cpu", (world,))
    uses: list[Any] = [
        lambda m: dmuon.dedicate_params(m, mesh, costs="flops"),
        lambda m: dmuon.Muon(m),
        lambda m: dmuon.Muon(nn.parallel.DistributedDataParallel(m)),
    ]
    for kind, use in product((nn.Embedding, nn.EmbeddingBag), uses):
        with pytest.raises(ValueError, match=r"'embed\.weight'.*sparse=False"):
            use(announced(kind))


def test_a_frozen_embedding_may_announce_sparse_gradients() -> None:
    model = announced(nn.Embedding)
    model.embed.weight.requires_grad_(False)
    optimizer = dmuon.Muon(model, **OPTIONS)
    train(model, optimizer, range(2))
