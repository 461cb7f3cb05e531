"""Steps of models whose tensors are several matrices, however these were handed over, against weights cut by hand."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from harness.oracle import Twin
from harness.trees import HEADS, Conv1D, D, H, bare, experts, linear, node, of, stack
from torch import Tensor

import dmuon

Cut = Callable[[Tensor], list[Tensor]]


def layer() -> nn.Module:
    """One of each kind; nothing runs."""
    return node(
        stem=nn.Conv2d(3, 4, 1),  # is on AdamW, since it takes the input
        gpt2=of("GPT2Attention", c_attn=Conv1D(3 * D, D)),
        bloom=of("BloomAttention", query_key_value=linear(D, 3 * D), **HEADS),
        torch=nn.MultiheadAttention(D, 2, bias=False),
        moe=of("MixtralExperts", "transformers.models.x", **experts()),
        titan=of("GroupedExperts", w1=bare(3, H, D), w2=bare(3, D, H)),
        kernel=nn.Conv2d(4, D, 3, bias=False),
        groups=nn.Conv2d(D, D, 3, groups=2, bias=False),
        depthwise=nn.Conv2d(D, D, 3, groups=D, bias=False),
        plain=linear(D, H),
    )


def heads(w: Tensor) -> list[Tensor]:
    """Queries of both heads, keys of both, values of both."""
    return [torch.cat([w[i : i + 4], w[i + 12 : i + 16]]) for i in (0, 4, 8)]


CUTS: dict[str, Cut] = {
    "stem.weight": lambda w: [w.flatten(1)],
    "gpt2.c_attn.weight": lambda w: list(w.T.chunk(3)),
    "bloom.query_key_value.weight": heads,
    "torch.in_proj_weight": lambda w: [w[:D], w[D : 2 * D], w[2 * D :]],
    "torch.out_proj.weight": lambda w: [w],
    "moe.gate_up_proj": lambda w: [*w[:, :H], *w[:, H:]],
    "moe.down_proj": lambda w: list(w),
    "titan.w1": lambda w: list(w),
    "titan.w2": lambda w: list(w),
    "kernel.weight": lambda w: [w.flatten(1)],
    "groups.weight": lambda w: [w[: D // 2].flatten(1), w[D // 2 :].flatten(1)],
    "plain.weight": lambda w: [w],
}
OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "ns_coefficients": "classic"}


def matrices(model: nn.Module, *, stems: bool) -> list[tuple[str, nn.Parameter, Cut]]:
    return [
        (name, param, CUTS[name.split(".", 2)[2]])
        for name, param in model.named_parameters()
        if name.split(".", 2)[2] in CUTS and (stems or not name.endswith("stem.weight"))
    ]


def of_groups(model: nn.Module) -> Any:
    chosen = {id(p) for _, p, _ in matrices(model, stems=False)}
    return [
        {"params": [p for p in model.parameters() if id(p) in chosen], "use_muon": True},
        {"params": [p for p in model.parameters() if id(p) not in chosen], "use_muon": False},
    ]


HANDED_OVER: dict[str, Callable[[nn.Module], Any]] = {
    "model": lambda model: model,
    "parameters": lambda model: list(model.parameters()),
    "names": lambda model: list(model.named_parameters()),
    "groups": of_groups,
    "groups of dmuon": dmuon.param_groups,
}


@pytest.mark.pitfall("P77", "P78")
@pytest.mark.parametrize("how", HANDED_OVER)
def test_each_matrix_of_a_fused_tensor_is_updated_on_its_own(how: str) -> None:
    torch.manual_seed(0)
    model = node(h=stack(layer))
    chosen = matrices(model, stems=how in ("parameters", "names"))
    twin = Twin([], OPTIONS["lr"], OPTIONS["weight_decay"])
    for _, param, cut in chosen:
        twin.add(param.detach().clone(), cut)
    optimizer = dmuon.Muon(HANDED_OVER[how](model), **OPTIONS)
    taken = {id(p) for group in optimizer.param_groups if group["use_muon"] for p in group["params"]}
    assert taken == {id(p) for _, p, _ in chosen}
    for _ in range(3):
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        count = twin.step([param.grad for _, param, _ in chosen])
        optimizer.step()
        assert optimizer.last_step.ns_matrices == count
    for (name, param, _), expected in zip(chosen, twin.weights(), strict=True):
        torch.testing.assert_close(param.detach(), expected, rtol=0, atol=3e-5, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.pitfall("P78")
@pytest.mark.parametrize("how", ["model", "groups"])
def test_what_only_looks_fused_is_refused_however_it_comes(how: str) -> None:
    CUTS["mine.qkv.weight"] = list
    try:
        model = node(h=stack(lambda: node(mine=of("Mine", qkv=linear(D, 3 * D)), plain=linear())))
        with pytest.raises(ValueError, match=r"mine\.qkv\.weight' of shape .* looks like several.*select="):
            dmuon.Muon(HANDED_OVER[how](model), **OPTIONS)
        groups = dmuon.param_groups(
            model, select=lambda fqn, module, param: dmuon.MatrixSpec() if fqn.endswith("mine.qkv.weight") else ...
        )
        assert len(dmuon.Muon(groups, **OPTIONS).param_groups[0]["params"]) == 4, "what was decided is not asked again"
    finally:
        del CUTS["mine.qkv.weight"]


@pytest.mark.pitfall("P91")
def test_what_looks_fused_by_its_sizes_alone_is_taken_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """A plain layer beside square ones, as in parallel blocks, may look like four of these."""
    layers = {"up": linear(D, 4 * D), "v": linear(), "out": linear(5 * D, D)}
    model = node(h=stack(lambda: node(**{name: copy.deepcopy(layer) for name, layer in layers.items()})))
    optimizer = dmuon.Muon(model, **OPTIONS)
    with caplog.at_level(logging.WARNING, logger="dmuon"):
        for _ in range(2):
            for param in model.parameters():
                param.grad = torch.randn_like(param)
            optimizer.step()
    assert optimizer.last_step.ns_matrices == 6
    told = [record.getMessage() for record in caplog.records if "fused into one tensor" in record.getMessage()]
    assert len(told) == 1 and "'h.0.up.weight', 'h.1.up.weight': looks like" in told[0] and ".v." not in told[0]


def test_a_tensor_without_a_module_is_one_matrix_and_a_kernel_of_groups_stays_on_adamw_aloud(
    caplog: pytest.LogCaptureFixture,
) -> None:
    conv = nn.Conv2d(D, D, 3, groups=D, bias=False)
    loose = nn.Parameter(torch.randn(3 * D, D))
    with caplog.at_level(logging.WARNING, logger="dmuon"):
        optimizer = dmuon.Muon([loose, conv.weight], **OPTIONS)
    assert [len(g["params"]) for g in optimizer.param_groups if g["use_muon"]] == [1]
    assert "(8, 1, 3, 3) goes to AdamW: kernel of a depthwise convolution" in caplog.text
    with pytest.raises(ValueError, match=r"has shape \(2, 3, 4\): dmuon cannot tell"):
        dmuon.Muon([bare(2, 3, 4)])


def test_parts_outlive_what_torch_does_to_move_a_module() -> None:
    """``Module.to`` swaps the contents of tensors of a class of their own, with all that was set on them."""
    model = node(h=stack(layer))
    optimizer = dmuon.Muon(model, **OPTIONS)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to(torch.float64)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    weight = model.h[0].bloom.query_key_value.weight
    optimizer.zero_grad()
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    assert optimizer.last_step.ns_matrices == 3


def test_a_saved_parameter_is_loaded_without_dmuon(tmp_path: Path) -> None:
    model = node(h=stack(layer))
    dmuon.Muon(model, **OPTIONS)
    torch.save(model.h[0].bloom.query_key_value.weight, tmp_path / "weight.pt")
    assert torch.load(tmp_path / "weight.pt", weights_only=True).shape == (3 * D, D)
