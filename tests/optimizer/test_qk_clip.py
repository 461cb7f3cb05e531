"""QK-clip over ranks, residencies and kinds of attention, against one process that is written from the paper."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from harness import network, topologies
from harness.network import Network, Size, full_state, loss_of, shard
from harness.on_ranks import on_ranks, slowly
from harness.topologies import lay
from harness.toy import CPU
from harness.trees import linear, node, of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import dmuon

HEADS, HEAD, WIDTH = 4, 4, 16
SIZE = Size(WIDTH, 24, layers=2, vocabulary=17)
OPTIONS: dict[str, Any] = {"lr": 2e-3, "ns_coefficients": "classic"}
THRESHOLD = 0.25
Split = tuple[Tensor, Tensor, Tensor]


class Attention(nn.Module):
    """Causal; a kind says how queries, keys and values are made."""

    def __init__(self, bias: bool) -> None:
        """``bias`` of keys moves all logits of a query alike: its gradient is rounding, which AdamW magnifies."""
        super().__init__()
        self.head_dim = self.head_size = HEAD
        self.make(bias)
        self.o_proj = nn.Linear(HEADS * HEAD, WIDTH, bias=False)

    def make(self, bias: bool) -> None:
        raise NotImplementedError

    def split(self, x: Tensor) -> Split:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        self.seen = q.detach(), k.detach()
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def heads_of(x: Tensor, width: int = HEAD) -> Tensor:
    return x.unflatten(-1, (-1, width)).transpose(1, 2)


class Apart(Attention):
    keys = HEADS

    def make(self, bias: bool) -> None:
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.k_proj = nn.Linear(WIDTH, self.keys * HEAD, bias=bias)
        self.v_proj = nn.Linear(WIDTH, self.keys * HEAD, bias=False)

    def split(self, x: Tensor) -> Split:
        return heads_of(self.q_proj(x)), heads_of(self.k_proj(x)), heads_of(self.v_proj(x))

    def clip(self, gamma: Tensor) -> None:
        shared = gamma.view(self.keys, -1).amin(1)  # of the heads that share a key
        for layer, factor in ((self.q_proj, shared.repeat_interleave(HEADS // self.keys)), (self.k_proj, shared)):
            for param in layer.parameters():
                param.view(len(factor), HEAD, -1).mul_(factor.sqrt().view(-1, 1, 1))


class Grouped(Apart):
    keys = 2


class GPTNeoXAttention(Attention):  # known by its name: queries, keys and values of one head, then of the next
    def make(self, bias: bool) -> None:
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH, bias=bias)

    def split(self, x: Tensor) -> Split:
        q, k, v = heads_of(self.query_key_value(x), 3 * HEAD).chunk(3, -1)
        return q, k, v

    def clip(self, gamma: Tensor) -> None:
        for param in self.query_key_value.parameters():
            param.view(HEADS, 3, HEAD, -1)[:, :2].mul_(gamma.sqrt().view(-1, 1, 1, 1))


class Conv1D(nn.Module):
    """Stored (in, out)."""

    def __init__(self, wide: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, wide) / 4)
        self.bias = nn.Parameter(torch.randn(wide)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight if self.bias is None else x @ self.weight + self.bias


class GPT2Attention(Attention):
    def make(self, bias: bool) -> None:
        self.c_attn = Conv1D(3 * WIDTH, bias)

    def split(self, x: Tensor) -> Split:
        q, k, v = map(heads_of, self.c_attn(x).chunk(3, -1))
        return q, k, v

    def clip(self, gamma: Tensor) -> None:
        self.c_attn.weight.view(WIDTH, 3, HEADS, HEAD)[:, :2].mul_(gamma.sqrt().view(-1, 1))
        if self.c_attn.bias is not None:
            self.c_attn.bias.view(3, HEADS, HEAD)[:2].mul_(gamma.sqrt().view(-1, 1))


class Latent(Attention):
    """MLA: a part of every key is the same in all heads."""

    qk_nope_head_dim, qk_rope_head_dim, v_head_dim, kv_lora_rank, num_heads = 3, 2, HEAD, 6, HEADS

    def make(self, bias: bool) -> None:
        self.q_a_proj, self.q_b_proj = nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, HEADS * 5, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(WIDTH, 6 + 2, bias=False)
        self.kv_b_proj = nn.Linear(6, HEADS * (3 + HEAD), bias=False)

    def split(self, x: Tensor) -> Split:
        latent, rotated = self.kv_a_proj_with_mqa(x).split((6, 2), -1)
        k, v = heads_of(self.kv_b_proj(latent), 3 + HEAD).split((3, HEAD), -1)
        k = torch.cat([k, rotated.unsqueeze(1).expand(-1, k.shape[1], -1, -1)], -1)
        return heads_of(self.q_b_proj(self.q_a_proj(x)), 5), k, v

    def clip(self, gamma: Tensor) -> None:
        gamma = gamma.view(-1, 1, 1)
        queries, keys = self.q_b_proj.weight.view(HEADS, 5, -1), self.kv_b_proj.weight.view(HEADS, 3 + HEAD, -1)
        queries[:, :3].mul_(gamma.sqrt())
        queries[:, 3:].mul_(gamma)
        keys[:, :3].mul_(gamma.sqrt())


KINDS: dict[str, Callable[[bool], Attention]] = {
    "mha": Apart, "gqa": Grouped, "interleaved": GPTNeoXAttention, "transposed": GPT2Attention, "mla": Latent,
}  # fmt: skip


def build(kind: str, bias: bool = False) -> Network:
    class Block(nn.Module):
        def __init__(self, size: Size) -> None:
            super().__init__()
            self.attn = KINDS[kind](bias)
            self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attn(2 * x)
            return x + self.down(F.gelu(self.up(x)))

    return network.build(SIZE, CPU, block=Block)


def batch(step: int) -> tuple[Tensor, Tensor]:
    return network.batch(SIZE, 24, 6, step, CPU)


def plain_maxima(q: Tensor, k: Tensor, mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    """Of each head, all logits at once, in fp64."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    logits = q.double() @ k.double().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    allowed = torch.ones_like(logits, dtype=torch.bool) if mask is None else mask
    return logits.masked_fill(~allowed, -math.inf).amax((0, 2, 3))


@cache
def paper(kind: str, steps: int = 3) -> tuple[dict[str, Tensor], list[list[float]]]:
    """Weights of one process behind these steps, and the largest logit of each head in each of them."""
    model = build(kind)
    optimizer = dmuon.Muon(model, **OPTIONS)
    seen: list[list[float]] = []
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, *batch(step)).backward()
        causal = torch.ones(6, 6, dtype=torch.bool).tril()
        maxima = [plain_maxima(*block.attn.seen, mask=causal) for block in model.blocks]
        optimizer.step()
        with torch.no_grad():
            for block, largest in zip(model.blocks, maxima, strict=True):
                block.attn.clip((THRESHOLD / largest).clamp(max=1.0).float())
        seen.append(torch.cat(maxima).tolist())
    return full_state(model), seen


def tensor_parallel(model: Network, mesh: DeviceMesh) -> None:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for name in ("q_proj", "k_proj", "v_proj", "query_key_value", "q_b_proj", "kv_b_proj"):
        if hasattr(model.blocks[0].attn, name):
            plan[f"attn.{name}"] = ColwiseParallel()
    plan["attn.o_proj"] = RowwiseParallel()
    for block in model.blocks:
        parallelize_module(block, mesh, plan)


def laid(layout: str, kind: str, bias: bool = False) -> topologies.Laid:
    return lay(layout, build(kind, bias), split=tensor_parallel)


TRAINED = [("1d", "mla"), ("tp", "gqa"), ("fsdp2-2", "transposed")]
TRAINED_SLOWLY = [("fsdp2-hsdp", "mha")]


# Without MLA under tensor parallelism, whose shared keys would need a reduction that this small model lacks.
@pytest.mark.parametrize(("layout", "kind"), [*TRAINED, *slowly(*TRAINED_SLOWLY)])
@on_ranks("layout")
def test_training_equals_one_process_written_from_the_paper(rank: int, world: int, layout: str, kind: str) -> None:
    """With two micro-batches a step, whose maxima join; some heads are clipped, and some are not."""
    expected, maxima = paper(kind)
    clipped = [logit > THRESHOLD for of_step in maxima for logit in of_step]
    assert any(clipped) and not all(clipped)
    made = laid(layout, kind)
    clip = dmuon.QKClip(made.model, THRESHOLD)
    optimizer = made.optimizer(**OPTIONS | {"weight_decay": 0.1, "qk_clip": clip})
    for step, of_step in enumerate(maxima):
        optimizer.zero_grad()
        tokens, targets = made.mine(batch(step))
        for half in range(2):  # of this rank's part
            with clip.collect():
                (loss_of(made.model, *shard((tokens, targets), half, 2)) / 2).backward()
        made.reduce()
        optimizer.step()
        stats = optimizer.last_step
        assert [logit for of_module in stats.qk_logits.values() for logit in of_module] == pytest.approx(
            of_step, rel=1e-4
        )
        assert stats.qk_max_logit == max(map(max, stats.qk_logits.values()))
        least, most = (sum(logit > THRESHOLD * near for logit in of_step) for near in (1.001, 0.999))
        assert least <= stats.qk_clipped <= most
    found = full_state(made.network)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-4, atol=2e-6, msg=lambda told, name=name: f"{name}: {told}"
        )


SCALED = [("1d-3", "gqa"), ("tp-fsdp", "mla"), ("fsdp2-3", "interleaved")]
SCALED_SLOWLY = [("tp-alone", "mla"), ("ddp", "transposed")]
BY_OTHERS = [("fsdp2-2", "transposed", "sharded")]


@pytest.mark.parametrize(
    ("layout", "kind", "strategy"),
    [*((*place, "owner") for place in SCALED), *BY_OTHERS, *slowly(*((*place, "owner") for place in SCALED_SLOWLY))],
)
@on_ranks("layout")
def test_one_step_is_that_without_clipping_times_the_factors(
    rank: int, world: int, layout: str, kind: str, strategy: str
) -> None:
    """Biases too, and bit for bit the same below the threshold. One rank alone knows of logits."""
    logits = torch.tensor([[90.0, 400.0, 100.0, 250.0], [1000.0, 7.0, 100.5, 99.0]])
    found = []
    for threshold in (None, 2000.0, 100.0):
        made = laid(layout, kind, bias=True)
        clip = None if threshold is None else dmuon.QKClip(made.model, threshold)
        optimizer = made.optimizer(**OPTIONS | {"weight_decay": 0.1, "qk_clip": clip, "strategy": strategy})
        made.backward(0)
        if clip is not None and rank == world - 1:  # the others have nothing to tell, and hear of it
            for number, name in enumerate(("blocks.0.attn", "blocks.1.attn")):
                clip.report(name, logits[number])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
        found.append(full_state(made.network))
    without, below, clipped = found
    assert all(torch.equal(below[name], value) for name, value in without.items())
    by_hand = build(kind, bias=True)
    by_hand.load_state_dict(without)
    with torch.no_grad():
        for block, largest in zip(by_hand.blocks, logits, strict=True):
            block.attn.clip((100.0 / largest.double()).clamp(max=1.0))
    for name, value in by_hand.state_dict().items():
        torch.testing.assert_close(clipped[name], value, rtol=2e-7, atol=0)
        assert name.endswith(("q_proj.weight", "c_attn.weight")) <= (not torch.equal(clipped[name], without[name]))


def clipped_model(threshold: float = THRESHOLD) -> tuple[Network, Any, dmuon.Muon]:
    model = build("mha")
    clip = dmuon.QKClip(model, threshold)
    return model, clip, dmuon.Muon(model, qk_clip=clip, **OPTIONS)


class Calls(nn.Module):
    """Attention of which a test says what it calls."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(8, 16), nn.Linear(8, 16)
        self.head_dim, self.call = HEAD, call

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.call(*args, **options)


def collected(call: Callable[..., Any], *args: Any, **options: Any) -> Tensor:
    """The largest logits as a step sees them."""
    model = nn.Sequential()
    model.attn = Calls(call)
    clip = dmuon.QKClip(model)
    optimizer = dmuon.Muon([model.attn.q_proj.weight, model.attn.k_proj.weight], qk_clip=clip, **OPTIONS)
    with clip.collect():
        model.attn(*args, **options)
    optimizer.step()
    return torch.tensor(optimizer.last_step.qk_logits["attn"], dtype=torch.float64)


LENGTH = 11
Q, K = torch.randn(3, HEADS, LENGTH, HEAD), torch.randn(3, HEADS, LENGTH + 2, HEAD)
MASK = torch.rand(3, 1, LENGTH, LENGTH + 2) > 0.6
SDPA = {
    "plain": (Q, K, {}, None, None),
    "scale": (Q, K, {"scale": 3.0}, None, 3.0),
    "causal": (Q, K, {"is_causal": True}, torch.ones(LENGTH, LENGTH + 2).tril().bool(), None),
    "mask": (Q, K, {"attn_mask": MASK}, MASK, None),
    "bias": (Q, K, {"attn_mask": torch.where(MASK, -5.0, torch.finfo(torch.float32).min)}, MASK, None),
    "shared keys": (Q, K[:, :2], {"enable_gqa": True}, None, None),
    "wide": (Q.double(), K.double(), {}, None, None),
}  # fmt: skip


@pytest.mark.parametrize("block", [1, 2**24])
@pytest.mark.parametrize("case", SDPA)
def test_collected_logits_are_those_of_all_positions_that_count(
    monkeypatch: pytest.MonkeyPatch, case: str, block: int
) -> None:
    monkeypatch.setattr("dmuon.optimizer.qk_clip._BLOCK_NUMEL", block)
    q, k, options, mask, scale = SDPA[case]
    found = collected(F.scaled_dot_product_attention, q, k, value=k, **options)
    torch.testing.assert_close(found, plain_maxima(q, k, mask, scale), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("compiled", "block"), [(False, 2**24), (True, 1)])
def test_flex_attention_is_collected(monkeypatch: pytest.MonkeyPatch, compiled: bool, block: int) -> None:
    """Torch has no backward of it on the CPU."""
    monkeypatch.setattr("dmuon.optimizer.qk_clip._BLOCK_NUMEL", block)
    causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, LENGTH, LENGTH + 2, device="cpu")

    def near(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(i - j < 4, score - 1, -float("inf"))

    call = torch.compile(flex_attention, backend="eager") if compiled else flex_attention
    with torch.no_grad():
        found = collected(call, Q, K[:, :2], K[:, :2], score_mod=near, block_mask=causal, enable_gqa=True)
    band = torch.ones(LENGTH, LENGTH + 2).tril().triu(-3).bool()
    torch.testing.assert_close(found, plain_maxima(Q, K[:, :2], band), rtol=1e-6, atol=0)


def test_own_reports_join_those_that_were_collected_until_the_step() -> None:
    model, clip, optimizer = clipped_model(threshold=100.0)
    with clip.collect():
        loss_of(model, *batch(0)).backward()
    clip.report("blocks.0.attn", torch.tensor([1.0, 300.0, 2.0, 3.0]))
    clip.report("blocks.0.attn", torch.tensor([[4.0, 1.0, 1.0, 1.0], [5.0, 1.0, 1.0, 400.0]]).unsqueeze(-1))
    clip.reset()
    clip.report("blocks.0.attn", torch.tensor([[4.0, 1.0, 1.0, 1.0], [5.0, 200.0, 1.0, 400.0]]).unsqueeze(-1))
    clip.report("blocks.0.attn", torch.tensor([1.0, 300.0, 2.0, 3.0]))
    optimizer.step()
    stats = optimizer.last_step
    assert stats.qk_logits == {"blocks.0.attn": (5.0, 300.0, 2.0, 400.0), "blocks.1.attn": (-math.inf,) * HEADS}
    assert (stats.qk_max_logit, stats.qk_clipped) == (400.0, 2)
    with pytest.warns(UserWarning, match=r"no logits were noted on this rank"):
        optimizer.step()
    assert optimizer.last_step.qk_max_logit == -math.inf


@pytest.mark.parametrize("logit", [math.nan, math.inf])
def test_a_head_without_finite_logits_is_told_and_stays_as_it_is(logit: float) -> None:
    model, clip, optimizer = clipped_model(threshold=1.0)
    before = copy.deepcopy(model.state_dict())
    clip.report("blocks.0.attn", torch.tensor([logit, 4.0, 0.5, 0.5]))
    optimizer.step()
    stats = optimizer.last_step
    assert stats.qk_clipped == 1 and not math.isfinite(stats.qk_max_logit)
    weight, old = model.blocks[0].attn.q_proj.weight, before["blocks.0.attn.q_proj.weight"]
    assert torch.equal(weight[:HEAD], old[:HEAD]) and torch.equal(weight[HEAD : 2 * HEAD], old[HEAD : 2 * HEAD] / 2)


@pytest.mark.parametrize("way", ["checkpoint", "compile"])
def test_checkpointed_and_compiled_attention_is_collected_and_compiled_once(way: str) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    plain, other = build("mha"), build("mha")
    for block in other.blocks:
        if way == "compile":
            block.attn.compile(backend="eager")
        else:
            block.forward = lambda x, run=block.forward: checkpoint(run, x, use_reentrant=False)
    logits = []
    for model in (plain, other):
        clip = dmuon.QKClip(model)
        optimizer = dmuon.Muon(model, qk_clip=clip, **OPTIONS)
        graphs = []
        for step in range(2):
            with clip.collect():
                loss_of(model, *batch(step)).backward()
            optimizer.step()
            graphs.append(counters["stats"]["unique_graphs"])
        assert graphs[0] == graphs[1]
        logits.append(optimizer.last_step.qk_logits)
    assert logits[0] == logits[1] and optimizer.last_step.qk_max_logit > 0
    assert (counters["stats"]["unique_graphs"] > 0) == (way == "compile")


@on_ranks(4)
def test_attention_that_is_a_block_itself_is_collected_where_it_is_dedicated_and_tensor_parallel(
    rank: int, world: int
) -> None:
    """When its forward ends, its weights are gone; heads of this rank are told by the layout at rest."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(Apart(False), Apart(False))
    x, alone = torch.randn(2, 6, WIDTH), copy.deepcopy(model)
    plan = {**dict.fromkeys(("q_proj", "k_proj", "v_proj"), ColwiseParallel()), "o_proj": RowwiseParallel()}
    for block in model:
        parallelize_module(block, mesh["tp"], plan)
    dmuon.dedicate_params(model, mesh["dp"], costs="flops")
    clip = dmuon.QKClip(model)
    optimizer = dmuon.Muon(model, qk_clip=clip, **OPTIONS)
    with clip.collect():
        model(x).square().sum().backward()
    optimizer.step()
    alone(x)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    for name, block in alone.named_children():
        expected = plain_maxima(*block.seen, mask=causal).tolist()
        assert optimizer.last_step.qk_logits[name] == pytest.approx(expected, rel=1e-4)


def _with_child(name: str, child: Any) -> Network:
    model = build("mha")
    setattr(model.blocks[1].attn, name, child)
    return model


def _frozen(model: Network) -> Network:
    model.blocks[1].attn.k_proj.weight.requires_grad_(False)
    return model


def _known(query: str = "q_proj", key: str = "k_proj", heads: int = HEADS, **options: Any) -> dict[str, Any]:
    return {"heads": {"blocks.*.attn": dmuon.AttentionHeads(query, key, heads, **options)}}


def muon(model: nn.Module, **options: Any) -> dmuon.Muon:
    return dmuon.Muon(model, qk_clip=dmuon.QKClip(model, **options), **OPTIONS)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "threshold": (lambda: muon(build("mha"), threshold=0.0), "threshold must be a positive number, got 0.0"),
    "unknown": (lambda: muon(nn.TransformerEncoderLayer(8, 2)), "nothing is known of 'self_attn' .MultiheadAttention."),
    "name": (lambda: muon(build("mha"), heads={"x": dmuon.AttentionHeads("q", "k", 2)}), "is called 'x'"),
    "heads": (lambda: muon(build("mha"), **_known(heads=3)), "has 16 rows of queries and 16 of keys, which"),
    "norm": (
        lambda: muon(_with_child("q_norm", nn.RMSNorm(HEAD))),
        "'blocks.1.attn' normalizes queries or keys by 'q_norm'",
    ),
    "added": (
        lambda: muon(_with_child("add_q_proj", nn.Linear(WIDTH, WIDTH))),
        "'blocks.1.attn' .Apart. makes queries or keys by 'add_q_proj' too",
    ),
    "frozen": (lambda: muon(_frozen(build("mha"))), "does not update blocks.1.attn.k_proj by Muon"),
    "twice": (lambda: [dmuon.Muon(made[0], qk_clip=made[1]) for made in [clipped_model()]], "is another optimizer's"),
    "module": (lambda: clipped_model()[1].report("blocks.7", torch.ones(4)), "logits were reported for 'blocks.7'"),
    "no call": (lambda: collected(lambda x: x, Q), "the forward of 'attn' called neither"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_clipped_is_refused_by_name(case: str) -> None:
    program, message = REFUSED[case]
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
        program()


LATER = {"to_q": linear(), "to_k": linear(), "to_v": linear(), "heads": 2, "fused_projections": True}
BY_NAME: dict[str, tuple[nn.Module, tuple[str, str]]] = {
    "fused later": (of("Attention", "diffusers.any", to_qkv=linear(8, 24), **LATER), ("to_qkv[0]", "to_qkv[1]")),
    "beside a norm, as in T5": (
        of("T5LayerSelfAttention", norm=nn.RMSNorm(8), attn=of("T5Attention", q=linear(), k=linear(), n_heads=2)),
        ("q", "k"),
    ),
}


@pytest.mark.parametrize("case", BY_NAME)
def test_what_makes_queries_and_keys_is_told_by_class_and_names(case: str) -> None:
    module, expected = BY_NAME[case]
    (spec,) = (spec for _, spec in dmuon.QKClip(node(attn=module))._modules.values())
    assert (spec.query, spec.key) == expected and spec.num_heads == spec.keys == 2


@on_ranks(2, expect=dmuon.CollectiveError, match="qk_clip")
def test_ranks_with_different_thresholds_are_told(rank: int, world: int) -> None:
    made = laid("fsdp2-2", "mha")
    optimizer = made.optimizer(qk_clip=dmuon.QKClip(made.model, 100.0 + rank))
    made.backward(0)
    optimizer.step()


@on_ranks(2)
def test_updates_that_wait_for_fsdp_are_refused(rank: int, world: int) -> None:
    model = nn.Sequential()
    model.attn = Apart(False)
    fully_shard(model)
    matrices = [model.attn.q_proj.weight, model.attn.k_proj.weight]
    with pytest.raises(ValueError, match=r"qk_clip scales weights in step.*, and strategy='fused' changes them later"):
        dmuon.Muon(matrices, qk_clip=dmuon.QKClip(model), strategy="fused", **OPTIONS)
