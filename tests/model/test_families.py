"""What is known of fused tensors, by the classes of real models, made by hand: their sizes and their faults."""

from __future__ import annotations

import pytest
import torch.nn as nn
from harness.trees import HEADS, D, H, adapted, bare, linear, node, of
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import dmuon
from dmuon import MatrixSpec
from dmuon.model.makeup import ModuleTree, known_spec, looks_fused

HF = "transformers.models.any.modeling_any"


def spec_in(owner: nn.Module, path: str) -> MatrixSpec | None:
    holder, _, name = path.rpartition(".")
    module = owner.get_submodule(holder)
    return known_spec(ModuleTree(owner.modules()), module, name, getattr(module, name))


def in_a_block(owner: nn.Module) -> nn.Module:
    """A model, of which all matrices of ``owner`` are hidden."""
    return node(layers=nn.ModuleList([owner]))


THIRDS = MatrixSpec((D, D, D))
LATENT = {"kv_lora_rank": 6, "qk_rope_head_dim": 2, "qk_nope_head_dim": 4, "v_head_dim": 3, "num_heads": 2}

# Of what no model of ``transformers`` has; those that it has run in test_transformers_families.py.
KNOWN: dict[str, tuple[nn.Module, str, MatrixSpec]] = {
    "torch": (nn.MultiheadAttention(D, 2), "in_proj_weight", THIRDS),
    "state spaces": (
        of("Mamba2", "mamba_ssm.modules.mamba2", in_proj=linear(D, 48), d_ssm=16, ngroups=2, d_state=3, nheads=4),
        "in_proj.weight", MatrixSpec((16, 16, 6, 6, 4)),
    ),
    "torchtitan": (of("GroupedExperts", w1_EFD=bare(3, H, D)), "w1_EFD", MatrixSpec()),
    "a kernel": (
        of("ParakeetEncoderConvolutionModule", HF, pointwise_conv1=nn.Conv1d(D, 2 * D, 1)), "pointwise_conv1.weight",
        MatrixSpec((D, D), flattened=True),
    ),
    "an adapter of a layer": (
        of("BloomAttention", query_key_value=adapted(linear(D, 3 * D), out=3 * D), **HEADS),
        "query_key_value.lora_B.default.weight", MatrixSpec((4, 4, 4), repeats=2),
    ),
    "before GLU": (
        nn.Sequential(linear(D, 2 * H), nn.Dropout(), nn.GLU(), linear(H, D)), "0.weight", MatrixSpec((H, H)),
    ),
}  # fmt: skip


@pytest.mark.pitfall("P77", "P78")
@pytest.mark.parametrize("name", KNOWN)
def test_families_are_known_by_class_and_sizes(name: str) -> None:
    owner, path, expected = KNOWN[name]
    assert spec_in(owner, path) == expected


def test_wrappers_and_classes_made_from_known_ones_change_nothing() -> None:
    attention = of("BloomAttention", query_key_value=checkpoint_wrapper(linear(D, 3 * D)), **HEADS)
    path = "query_key_value._checkpoint_wrapped_module.weight"
    assert spec_in(attention, path) == MatrixSpec((4, 4, 4), repeats=2)
    adapted = of("BloomAttention", query_key_value=node(base_layer=linear(D, 3 * D)), **HEADS)
    assert spec_in(adapted, "query_key_value.base_layer.weight") == MatrixSpec((4, 4, 4), repeats=2)
    sharded = type("FSDPBloomAttention", (type(attention),), {})()
    sharded.query_key_value, sharded.num_heads, sharded.head_dim = linear(D, 3 * D), 2, 4
    assert spec_in(sharded, "query_key_value.weight") == MatrixSpec((4, 4, 4), repeats=2)


@pytest.mark.parametrize(
    ("owner", "path"),
    [
        (of("BloomAttention", query_key_value=linear(D, 3 * D), num_heads=4, head_dim=4), "query_key_value.weight"),
        (of("DeepseekV3Attention", kv_a_proj_with_mqa=linear(D, 9), **LATENT), "kv_a_proj_with_mqa.weight"),
        (of("MixtralExperts", HF, gate_up_proj=bare(3, 2 * H, D)), "gate_up_proj"),
        (of("Attention", qkv=linear(D, 3 * D)), "qkv.weight"),  # of nobody's package
        (of("Attention", qkv=adapted(linear(D, 3 * D), out=3 * D)), "qkv.lora_B.default.weight"),
    ],
)
def test_what_does_not_agree_is_not_known_but_looks_fused(owner: nn.Module, path: str) -> None:
    assert spec_in(owner, path) is None
    with pytest.raises(ValueError, match=rf"{path}' of shape .* looks like several projections fused"):
        dmuon.param_groups(in_a_block(owner))


@pytest.mark.pitfall("P05", "P91")
@pytest.mark.parametrize(
    ("owner", "path", "refused"),
    [
        (of("Attention", qkv=linear(D, D + 4)), "qkv.weight", True),
        (of("MLP", w12=linear(D, 2 * H), w3=linear(H, D)), "w12.weight", True),
        (of("ModernBertMLP", HF, Wi=linear(D, 2 * H + 1)), "Wi.weight", True),  # known, but not so
        (of("DiTBlock", adaLN=nn.Sequential(nn.SiLU(), linear(D, 6 * D))), "adaLN.1.weight", False),
        (of("Attention", one=linear(D, 3 * D), two=linear()), "one.weight", False),
        (of("MLP", one=linear(D, 2 * H), two=linear(H, D)), "one.weight", False),
        (of("Experts", w1=bare(3, 2 * H, D), w2=bare(3, D, H)), "w1", False),
        (of("Attention", one=linear(D, D + 4), two=linear()), "one.weight", False),  # fewer keys and values
        (of("Block", linear1=linear(D, 7 * D), linear2=linear(5 * D, D)), "linear1.weight", False),
        (of("MLP", in_proj=linear(D, H), out_proj=linear(H, D)), "in_proj.weight", None),
        (of("Block", protein_proj=linear(H, D)), "protein_proj.weight", None),
        (of("Attention", q=linear(), k=linear(D, D // 2), v=linear(D, D // 2), o=linear()), "k.weight", None),
        (nn.Sequential(linear(), nn.ReLU(), linear(D, 2 * D)), "2.weight", None),
        (of("SwiGLU", w1=linear(D, H), w3=linear(D, H), w2=linear(H, D)), "w1.weight", None),
        (of("MLP", up=linear(D, 4 * D), down=linear(4 * D, D), inner=linear()), "up.weight", None),
    ],
)  # fmt: skip
def test_names_are_refused_sizes_are_told_and_neither_says_where_parts_lie(
    owner: nn.Module, path: str, refused: bool | None
) -> None:
    holder, _, name = path.rpartition(".")
    module = owner.get_submodule(holder)
    assert looks_fused(ModuleTree(owner.modules()), module, name, getattr(module, name)) == (refused is not None)
    if not refused:
        dmuon.param_groups(in_a_block(owner))
        return
    with pytest.raises(ValueError, match=rf"{path}' of shape .* looks like several projections fused") as caught:
        dmuon.param_groups(in_a_block(owner))
    assert "parts=(…)" in str(caught.value) and "exclude=" in str(caught.value)


def test_modules_that_are_not_built_yet_disturb_nobody() -> None:
    class Halfway(nn.Module):
        def __init__(self) -> None:
            pass

    halfway = Halfway()
    weight = linear().weight
    dmuon.Muon([{"params": [weight], "use_muon": True}], lr=0.01)
    assert isinstance(halfway, nn.Module)
