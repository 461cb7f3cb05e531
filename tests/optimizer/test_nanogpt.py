"""A model of nanoGPT's names and structure, in its own ways of building an optimizer; embeddings by their modules."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from harness.assertions import assert_equal_weights
from harness.on_ranks import assert_same_over_ranks, on_ranks, over_ranks
from harness.oracle import fp32_newton_schulz
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import dmuon

LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH, STEPS = 2, 24, 3, 40, 8, 3
OPTIONS: dict[str, Any] = {"lr": 0.01, "adamw_lr": 0.003, "ns_coefficients": "classic"}
MATRICES = LAYERS * (3 + 3)  # queries, keys and values apart, and three layers


class LayerNorm(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias)


class CausalSelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.n_head, self.n_embd = HEADS, WIDTH

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (
            t.view(rows, length, self.n_head, -1).transpose(1, 2) for t in self.c_attn(x).split(self.n_embd, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.c_proj(y.transpose(1, 2).reshape(rows, length, WIDTH))
        return out


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c_proj(F.gelu(self.c_fc(x)))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn = LayerNorm(WIDTH, True), CausalSelfAttention()
        self.ln_2, self.mlp = LayerNorm(WIDTH, True), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(LENGTH, WIDTH),
                "drop": nn.Dropout(0.0),
                "h": nn.ModuleList(Block() for _ in range(LAYERS)),
                "ln_f": LayerNorm(WIDTH, True),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.transformer["wte"].weight = self.lm_head.weight
        for name, p in self.named_parameters():
            if p.dim() > 1:
                nn.init.normal_(p, 0.0, 0.02 / (math.sqrt(2 * LAYERS) if name.endswith("c_proj.weight") else 1.0))

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.transformer["wte"](idx) + self.transformer["wpe"](torch.arange(idx.shape[1]))
        for block in self.transformer["h"]:  # type: ignore[attr-defined]
            x = block(x)
        logits = self.lm_head(self.transformer["ln_f"](x))
        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.flatten())

    def groups(self) -> list[dict[str, Any]]:
        """As its ``configure_optimizers`` makes them: what is decayed and what is not."""
        trained = [p for p in self.parameters() if p.requires_grad]
        return [
            {"params": [p for p in trained if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
        ]


def build(tied: bool = True) -> GPT:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT(tied)


def train(model: Any, optimizer: Any, rank: int = 0, world: int = 1) -> None:
    for step in range(STEPS):
        tokens = torch.randint(VOCABULARY, (4, LENGTH + 1), generator=torch.Generator().manual_seed(step))[rank::world]
        optimizer.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def reference(*, embeddings: bool = False) -> dict[str, Tensor]:
    """torch's optimizers in one process, with the fused matrix cut by hand; embeddings go to Muon, or to AdamW."""
    model = build()
    blocks = list(model.transformer["h"])  # type: ignore[arg-type]
    fused = [block.attn.c_attn.weight for block in blocks]
    whole = [w for block in blocks for w in (block.attn.c_proj.weight, block.mlp.c_fc.weight, block.mlp.c_proj.weight)]
    whole += [model.transformer["wte"].weight, model.transformer["wpe"].weight] if embeddings else []
    taken = {id(p) for p in fused + whole}
    parts = [nn.Parameter(part.detach().clone()) for weight in fused for part in weight.chunk(3)]
    muon = torch.optim.Muon(parts + whole, 0.01, adjust_lr_fn="match_rms_adamw", weight_decay=0.1, eps=1e-30)
    others = [p for p in model.parameters() if id(p) not in taken]
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in others if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
        ],
        0.003,
        (0.9, 0.95),
    )
    for step in range(STEPS):
        tokens = torch.randint(VOCABULARY, (4, LENGTH + 1), generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        for i, weight in enumerate(fused):
            assert weight.grad is not None
            for part, grad in zip(parts[3 * i : 3 * i + 3], weight.grad.chunk(3), strict=True):
                part.grad = grad.clone()
        with fp32_newton_schulz():
            muon.step()
        adamw.step()
        with torch.no_grad():
            for i, weight in enumerate(fused):
                weight.copy_(torch.cat(parts[3 * i : 3 * i + 3]))
    return weights(model)


WAYS: dict[str, Callable[[GPT], dmuon.Muon]] = {
    "model": lambda model: dmuon.Muon(model, **OPTIONS),
    "compiled": lambda model: dmuon.Muon(torch.compile(model, backend="eager"), **OPTIONS),
    "parameters": lambda model: dmuon.Muon(model.parameters(), **OPTIONS),
    "named parameters": lambda model: dmuon.Muon(model.named_parameters(), **OPTIONS),
    "compiled parameters": lambda model: dmuon.Muon(torch.compile(model, backend="eager").parameters(), **OPTIONS),
    "its groups, added": lambda model: with_added(model.groups()),
}


def with_added(groups: list[dict[str, Any]]) -> dmuon.Muon:
    optimizer = dmuon.Muon([nn.Parameter(torch.zeros(1))], **OPTIONS)
    for group in groups:
        optimizer.add_param_group(group)
    return optimizer


@pytest.mark.pitfall("P75")
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.slow) if way.startswith("compiled") else way for way in WAYS]
)
def test_its_fused_projection_is_cut_and_embeddings_are_told(way: str, caplog: Any) -> None:
    model = build()
    with caplog.at_level(logging.WARNING, "dmuon"):
        optimizer = WAYS[way](model)
    alone = way not in ("model", "compiled")
    for name in ("wte", "wpe"):
        warning = f"'transformer.{name}.weight' is an embedding, which Muon(model) leaves to AdamW"
        assert caplog.text.count(warning) == alone, caplog.text
    train(model, optimizer)
    assert optimizer.last_step.ns_matrices == MATRICES + 2 * alone
    assert_equal_weights(weights(model), reference(embeddings=alone))


@pytest.mark.slow
@on_ranks(2, timeout=60.0)
def test_its_loop_under_ddp_equals_one_process(rank: int, world: int) -> None:
    for way in ("ddp", "parameters of ddp", "before ddp"):
        model = build()
        early = dmuon.Muon(model, **OPTIONS) if way == "before ddp" else None
        ddp = DistributedDataParallel(model)
        optimizer = early or dmuon.Muon(ddp if way == "ddp" else ddp.parameters(), **OPTIONS)
        train(ddp, optimizer, rank, world)
        alone = way == "parameters of ddp"
        assert_equal_weights(weights(model), reference(embeddings=alone))
        assert_same_over_ranks(weights(model))
        assert over_ranks(optimizer.last_step.ns_matrices) == MATRICES + 2 * alone


def test_its_groups_are_refused_with_the_line_that_sorts_them(caplog: Any) -> None:
    model = build()
    with pytest.raises(ValueError, match=r"group 0 lacks use_muon.*or pass the model: Muon\(model\) sorts its"):
        dmuon.Muon(model.groups(), **OPTIONS)
    optimizer = dmuon.Muon(dmuon.param_groups(model), **OPTIONS)
    train(model, optimizer)
    assert_equal_weights(weights(model), reference())


def test_group_that_says_so_gives_an_embedding_to_muon_with_a_warning(caplog: Any) -> None:
    model = build()
    embeddings = [model.transformer["wte"].weight, model.transformer["wpe"].weight]
    with caplog.at_level(logging.WARNING, "dmuon"):
        optimizer = dmuon.Muon([{"params": embeddings, "use_muon": True}], **OPTIONS)
    assert [p is q for p, q in zip(optimizer.param_groups[0]["params"], embeddings, strict=True)] == [True, True]
    assert "'transformer.wte.weight' is an embedding, which Muon(model) leaves to AdamW" in caplog.text


def test_heads_that_are_declared_are_told(caplog: Any) -> None:
    class Declaring(GPT):
        def get_output_embeddings(self) -> nn.Module:
            return self.lm_head

    for kind, told in ((GPT, False), (Declaring, True)):
        model = kind(tied=False)
        with caplog.at_level(logging.WARNING, "dmuon"):
            dmuon.Muon(model.parameters(), **OPTIONS)
        assert ("'lm_head.weight' is an output head" in caplog.text) == told


def test_tensors_that_no_module_holds_go_by_dimension_without_a_word(caplog: Any) -> None:
    tensors = [nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(6, 4))]
    with caplog.at_level(logging.WARNING, "dmuon"):
        groups = dmuon.Muon(tensors, **OPTIONS).param_groups
    assert [(group["use_muon"], len(group["params"])) for group in groups] == [(True, 2)] and not caplog.text
