"""What is known of fused tensors, by the classes of real models, made by hand: their sizes and their faults."""

from __future__ import annotations

import pytest
import torch.nn as nn
from harness.trees import HEADS, Conv1D, D, H, adapted, bare, experts, linear, node, of
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
SSM = {"intermediate_size": 16, "n_groups": 2, "ssm_state_size": 3, "num_heads": 4}
LATENT = {"kv_lora_rank": 6, "qk_rope_head_dim": 2, "qk_nope_head_dim": 4, "v_head_dim": 3, "num_heads": 2}
EXPERTS = experts()
TRANSPOSED = {"gate_up_proj": bare(3, D, 2 * H), "down_proj": bare(3, H, D)}

# Of what no model of ``transformers`` has; those that it has run in test_transformers_families.py.
KNOWN: dict[str, tuple[nn.Module, str, MatrixSpec]] = {
    "torch": (nn.MultiheadAttention(D, 2), "in_proj_weight", THIRDS),
    "as the class says": (
        of("NewExperts", HF, is_transposed=True, is_concatenated=False, **TRANSPOSED), "gate_up_proj",
        MatrixSpec((1, 1), repeats=H, transposed=True),
    ),
    "state spaces": (
        of("Mamba2", "mamba_ssm.modules.mamba2", in_proj=linear(D, 48), d_ssm=16, ngroups=2, d_state=3, nheads=4),
        "in_proj.weight", MatrixSpec((16, 16, 6, 6, 4)),
    ),
    "torchtitan": (of("GroupedExperts", w1_EFD=bare(3, H, D)), "w1_EFD", MatrixSpec()),
    "torchtitan, fused": (
        of("FusedQKVLinear", wqkv=linear(D, 32), heads_per_kv=2, head_dim=4), "wqkv.weight",
        MatrixSpec((8, 4, 4), repeats=2),
    ),
    "a layer in a layer": (
        of("LevitAttention", queries_keys_values=of("MLPLayerWithBN", linear=linear(D, 32)), key_dim=4,
           attention_ratio=2),
        "queries_keys_values.linear.weight", MatrixSpec((4, 4, 8), repeats=2),
    ),
    "a kernel": (
        of("ParakeetEncoderConvolutionModule", HF, pointwise_conv1=nn.Conv1d(D, 2 * D, 1)), "pointwise_conv1.weight",
        MatrixSpec((D, D), flattened=True),
    ),
    "an adapter in a model": (
        of(
            "Zamba2MLP", adapter_rank=2,
            gate_up_proj_adapter_list=nn.ModuleList([nn.Sequential(linear(D, 2), linear(2, 2 * H))]),
        ),
        "gate_up_proj_adapter_list.0.1.weight", MatrixSpec((H, H)),
    ),
    "an adapter of a layer": (
        of("BloomAttention", query_key_value=adapted(linear(D, 3 * D), out=3 * D), **HEADS),
        "query_key_value.lora_B.default.weight", MatrixSpec((4, 4, 4), repeats=2),
    ),
    "an adapter of a transposed layer": (
        of("GPT2Attention", c_attn=adapted(Conv1D(3 * D, D), out=3 * D)), "c_attn.lora_B.default.weight", THIRDS,
    ),
    "an adapter of torch's attention": (
        node(attn=adapted(nn.MultiheadAttention(D, 2), out=3 * D)), "attn.lora_B.default.weight", THIRDS,
    ),
    "adapters of experts": (
        node(experts=adapted(
            adapted(of("MixtralExperts", HF, **experts()), rank=6, num_experts=3, parameter_name="gate_up_proj"),
            H, rank=12, num_experts=3, parameter_name="down_proj",
        )),
        "experts.lora_A.default.weight", MatrixSpec(num_heads=3),
    ),
    "before GLU": (
        nn.Sequential(linear(D, 2 * H), nn.Dropout(), nn.GLU(), linear(H, D)), "0.weight", MatrixSpec((H, H)),
    ),
    "before GLU, and a norm": (
        nn.Sequential(nn.Conv1d(D, 2 * D, 1), nn.GroupNorm(1, 2 * D), nn.GLU(dim=1)), "0.weight",
        MatrixSpec((D, D), flattened=True),
    ),
    "before GLU, a kernel": (
        nn.Sequential(nn.Conv1d(D, 2 * D, 1), nn.GLU(dim=1)), "0.weight", MatrixSpec((D, D), flattened=True),
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
        (of("BloomAttention", query_key_value=linear(D, 3 * D)), "query_key_value.weight"),
        (of("CausalSelfAttention", c_attn=linear(D, 3 * D), n_embd=D + 1), "c_attn.weight"),
        (of("DeepseekV3Attention", kv_a_proj_with_mqa=linear(D, 9), **LATENT), "kv_a_proj_with_mqa.weight"),
        (of("Mamba2Mixer", in_proj=linear(D, 49), **SSM), "in_proj.weight"),
        (of("MixtralExperts", HF, is_transposed=True, **EXPERTS), "gate_up_proj"),
        (of("MixtralExperts", HF, gate_up_proj=bare(3, 2 * H, D)), "gate_up_proj"),
        (of("Attention", qkv=linear(D, 3 * D)), "qkv.weight"),  # of nobody's package
        (of("MyMLP", gate_up_proj=linear(D, 2 * H)), "gate_up_proj.weight"),
        (of("MyExperts", **EXPERTS), "gate_up_proj"),
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
        (of("Attention", qkv=nn.Sequential(nn.Conv1d(D, 3 * D, 1), nn.BatchNorm1d(3 * D))), "qkv.0.weight", True),
        (of("Attention", c_attn=Conv1D(3 * D, D), c_proj=Conv1D(D, D)), "c_attn.weight", True),
        (of("Mixer", in_proj=linear(D, 5 * D + 1), out_proj=linear(2 * D, D)), "in_proj.weight", True),
        (of("MLP", w12=linear(D, 2 * H), w3=linear(H, D)), "w12.weight", True),
        (of("GEGLU", proj=linear(D, 2 * H)), "proj.weight", True),
        (of("SwiGLU", proj=linear(D, 2 * H), out=linear(H, D)), "proj.weight", True),
        (of("ModernBertMLP", HF, Wi=linear(D, 2 * H + 1)), "Wi.weight", True),  # known, but not so
        (of("DiTBlock", adaLN=nn.Sequential(nn.SiLU(), linear(D, 6 * D))), "adaLN.1.weight", False),
        (of("Attention", one=linear(D, 3 * D), two=linear()), "one.weight", False),
        (of("MLP", one=linear(D, 2 * H), two=linear(H, D)), "one.weight", False),
        (of("Experts", w1=bare(3, 2 * H, D), w2=bare(3, D, H)), "w1", False),
        (of("Experts", w1=bare(3, D, 2 * H), w2=bare(3, H, D)), "w1", False),
        (of("GatedLinearUnit", fc=linear(D, 2 * D)), "fc.weight", True),
        (of("Attention", Wq=linear(), Wkv=linear(D, D // 2), out=linear()), "Wkv.weight", False),
        (of("Attention", one=linear(D, D + 4), two=linear()), "one.weight", False),  # fewer keys and values
        (of("Block", linear1=linear(D, 7 * D), linear2=linear(5 * D, D)), "linear1.weight", False),
        (of("Block", fused_in=linear(D, 7 * D + 2), last=linear(4 * D, 3)), "fused_in.weight", False),
        (node(img_mod=of("Modulation", lin=linear(D, 6 * D))), "img_mod.lin.weight", False),
        (of("Block", ada_lin=nn.Sequential(nn.SiLU(), linear(D, 6 * D))), "ada_lin.1.weight", False),
        (nn.Sequential(linear(D, 2 * H), of("SwiGLU")), "0.weight", False),
        (of("GRUCell", layers=nn.Sequential(linear(2 * D, 3 * D))), "layers.0.weight", False),
        (node(up=of("ParallelLinear", weight=bare(2 * H, D)), down=linear(H, D)), "up.weight", False),
        (
            node(a=nn.Conv2d(D, 2 * D, 1), b=nn.Conv2d(2 * D, 2 * D, 3, groups=2 * D), c=nn.Conv2d(D, D, 1)),
            "a.weight", False,
        ),
        (of("SwiGLU", w1=linear(D, H), w2=linear(D, H), w3=linear(H, 12)), "w3.weight", None),
        (of("MLP", in_proj=linear(D, H), out_proj=linear(H, D)), "in_proj.weight", None),
        (of("MLP", proj_up_gate=linear(D, H), proj_up=linear(D, H), down=linear(H, D)), "proj_up_gate.weight", None),
        (of("MLA", kv_down=linear(D, 4), k_up=linear(4, D), v_up=linear(4, D)), "kv_down.weight", None),
        (of("Block", protein_proj=linear(H, D)), "protein_proj.weight", None),
        (of("Block", group_gate=linear(D, 4)), "group_gate.weight", None),
        (of("Block", enc_attn=linear(D, 1)), "enc_attn.weight", None),
        (of("Block", one=nn.Conv1d(4, D, 3), two=nn.Conv1d(D, D, 3), shortcut=nn.Conv1d(4, D, 1)), "two.weight", None),
        (of("Attention", q=linear(), k=linear(D, D // 2), v=linear(D, D // 2), o=linear()), "k.weight", None),
        (nn.Sequential(linear(), nn.ReLU(), linear(D, 2 * D)), "2.weight", None),
        (of("SwiGLU", w1=linear(D, H), w3=linear(D, H), w2=linear(H, D)), "w1.weight", None),
        (of("SwiGLU", w1=linear(D, H), w3=linear(D, H), w2=linear(H, D)), "w2.weight", None),
        (of("LightGlueMLP", fc1=linear(2 * D, 2 * D), fc2=linear(2 * D, D)), "fc2.weight", None),
        (of("GatedUnit", value=linear(D, H), gate=linear(D, H)), "gate.weight", None),
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
