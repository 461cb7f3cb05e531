"""What lies side by side in the fused tensors of known models: by class, and by the path at which it holds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn as nn

from dmuon.model.matrix_spec import MatrixSpec

# What a class holds at one path, from its attributes and the outputs of the tensor. Raises Unknown if they say nothing.
Layout = Callable[[nn.Module, int], MatrixSpec]


class Unknown(Exception):
    """The attributes of a module do not say how its tensor is made."""


class Rule(NamedTuple):
    """The layout of some parameters of some classes; blanks stand between paths, and between classes.

    Attributes:
        paths: of the parameters, from the class: ``qkv.weight``; ``#`` stands for a number, as elements of lists have.
        classes: their names, where ``*`` stands for anything. Conventions with ``*`` hold in ``package``s alone.
        layout: what they are made of.
        package: where the classes must come from; anywhere if empty.
    """

    paths: str
    classes: str
    layout: Layout
    package: str = ""


# -- layouts --------------------------------------------------------------------------------------------------------


def size(owner: nn.Module, name: str) -> int:
    """A size by the name of an attribute of ``owner`` or of its ``config``; ``a*b/c`` as in Python, ``a|b`` either."""
    product, _, divisor = name.partition("/")
    result = 1
    for factor in product.split("*"):
        values = (_attribute(owner, option) for option in factor.split("|"))
        found = next((value for value in values if value is not None), None)
        if found is None or found < 1:
            raise Unknown
        result *= found
    return result // size(owner, divisor) if divisor else result


def _attribute(owner: nn.Module, name: str) -> int | None:
    if name.isdigit():
        return int(name)
    for holder in (owner, getattr(owner, "config", None)):
        value = getattr(holder, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def whole(owner: nn.Module, rows: int) -> MatrixSpec:
    """One matrix, or a stack of them, whatever its name suggests."""
    return MatrixSpec()


def transposed_stack(owner: nn.Module, rows: int) -> MatrixSpec:
    """Matrices ``(e, in, out)``."""
    return MatrixSpec(transposed=True)


def equal(count: int | str) -> Layout:
    """``count`` parts of equal length, one behind the other."""

    def layout(owner: nn.Module, rows: int) -> MatrixSpec:
        parts = count if isinstance(count, int) else size(owner, count)
        if rows % parts:
            raise Unknown
        return MatrixSpec((rows // parts,) * parts)

    return layout


def blocked(*lengths: str) -> Layout:
    """Parts of these lengths, one behind the other."""

    def layout(owner: nn.Module, rows: int) -> MatrixSpec:
        return MatrixSpec(tuple(size(owner, length) for length in lengths))

    return layout


def first_or(length: str, otherwise: Layout) -> Layout:
    """One matrix if it has this length; else ``otherwise``."""
    return lambda owner, rows: MatrixSpec() if rows == size(owner, length) else otherwise(owner, rows)


def per_head(*lengths: str, heads: str = "") -> Layout:
    """Parts of these lengths in each head, head behind head; ``"1"`` of each are rows by turns."""

    def layout(owner: nn.Module, rows: int) -> MatrixSpec:
        parts = tuple(size(owner, length) for length in lengths)
        return _repeated(parts, rows, size(owner, heads) if heads else None)

    return layout


def groups(count: str) -> Layout:
    """Matrices of equal height, one below the other: experts, or the blocks of a block-diagonal matrix."""

    def layout(owner: nn.Module, rows: int) -> MatrixSpec:
        return MatrixSpec(num_heads=size(owner, count))

    return layout


def equal_if(attribute: str, value: object, count: int, otherwise: int = 1) -> Layout:
    """``count`` equal parts if the class has this attribute with this value; else ``otherwise``."""
    return lambda owner, rows: equal(count if getattr(owner, attribute, None) == value else otherwise)(owner, rows)


def listed(attribute: str) -> Layout:
    """Parts as long as a list says that the class keeps."""

    def layout(owner: nn.Module, rows: int) -> MatrixSpec:
        lengths = getattr(owner, attribute, None)
        if not isinstance(lengths, (list, tuple)) or not all(isinstance(n, int) for n in lengths):
            raise Unknown
        return MatrixSpec(tuple(lengths))

    return layout


def _repeated(parts: tuple[int, ...], rows: int, heads: int | None) -> MatrixSpec:
    period = sum(parts)
    if rows % period or (heads is not None and rows != heads * period):
        raise Unknown
    return MatrixSpec(parts, repeats=rows // period)


def _multi_query(owner: nn.Module, rows: int) -> MatrixSpec:
    """Of one head of keys and values, or of several that heads of queries share, or of as many."""
    if hasattr(owner, "q_attn"):
        raise Unknown  # GPTBigCode's cross-attention splits by other sizes than it is built with
    head, heads = size(owner, "head_dim"), size(owner, "num_heads|num_attention_heads")
    if getattr(owner, "new_decoder_architecture", False):
        shared = size(owner, "num_kv_heads")
        return _repeated((heads // shared * head, head, head), rows, shared)
    if getattr(owner, "multi_query", False):
        return MatrixSpec((heads * head, head, head))
    return _repeated((head, head, head), rows, heads)


def _focal(owner: nn.Module, rows: int) -> MatrixSpec:
    """Queries, context, and a gate for each focal level and the global one."""
    levels = size(owner, "focal_level") + 1
    width = (rows - levels) // 2
    if width < 1:
        raise Unknown
    return MatrixSpec((width, width, levels))


def _timm_qkv(owner: nn.Module, rows: int) -> MatrixSpec:
    if getattr(owner, "head_first", False):
        return per_head("dim_head", "dim_head", "dim_head")(owner, rows)
    if hasattr(owner, "val_dim") and hasattr(owner, "key_dim"):
        return per_head("key_dim", "key_dim", "val_dim", heads="num_heads")(owner, rows)
    if hasattr(owner, "dim_out_qk"):
        return blocked("dim_out_qk", "dim_out_qk", "dim_out_v")(owner, rows)
    return equal(2 if getattr(owner, "use_global", False) else 3)(owner, rows)


def _timm_kv(owner: nn.Module, rows: int) -> MatrixSpec:
    if hasattr(owner, "val_dim") and hasattr(owner, "key_dim"):
        return per_head("key_dim", "val_dim", heads="num_heads")(owner, rows)
    return equal(2)(owner, rows)


def _gated_by_halves(owner: nn.Module, rows: int) -> MatrixSpec:
    """gMLP's: halves if what follows gates one by the other."""
    gate = type(getattr(owner, "gate", None)).__name__
    return equal(2)(owner, rows) if gate == "SpatialGatingUnit" else MatrixSpec()


def _cross_modulation(own: str, other: str) -> Layout:
    """Shift and scale of one stream, and the gate of it, or of the other one."""
    return lambda owner, rows: blocked(own, own, other if getattr(owner, "cross_gates", False) else own)(owner, rows)


# -- experts --------------------------------------------------------------------------------------------------------

_INTERLEAVED = frozenset({"GptOssExperts"})


def _experts_whole(owner: nn.Module, rows: int) -> MatrixSpec:
    return MatrixSpec(transposed=_experts_transposed(owner))


def _experts_gate_up(owner: nn.Module, rows: int) -> MatrixSpec:
    transposed = _experts_transposed(owner)
    stack: Any = owner._parameters["gate_up_proj"]
    length: int = stack.shape[2 if transposed else 1]
    concatenated = getattr(owner, "is_concatenated", None)
    if not isinstance(concatenated, bool):
        concatenated = _INTERLEAVED.isdisjoint(base.__name__ for base in type(owner).__mro__)
    parts = (length // 2, length // 2) if concatenated else (1, 1)
    return MatrixSpec(parts, repeats=1 if concatenated else length // 2, transposed=transposed)


def _experts_transposed(owner: nn.Module) -> bool:
    """Whether experts are stored ``(e, in, out)``: what the class says, which must agree with the shapes."""
    down, up, factor = owner._parameters.get("down_proj"), owner._parameters.get("gate_up_proj"), 2
    if up is None:
        up, factor = owner._parameters.get("up_proj"), 1
    if down is None or up is None or down.ndim != 3 or up.ndim != 3:
        raise Unknown
    fits = (
        up.shape[1] == factor * down.shape[2] and up.shape[2] == down.shape[1],
        up.shape[2] == factor * down.shape[1] and up.shape[1] == down.shape[2],
    )
    stated = getattr(owner, "is_transposed", fits[1] and not fits[0])
    if not isinstance(stated, bool) or not fits[stated]:
        raise Unknown
    return stated


# -- the table ------------------------------------------------------------------------------------------------------

_HF, _TIMM, _TITAN, _DIFFUSERS = "transformers.", "timm.", "torchtitan.", "diffusers."

_HEAD = ("head_dim", "head_dim", "head_dim")  # queries, keys and values of a head
_KEYS_VALUES = ("num_key_value_heads*head_dim", "num_key_value_heads*head_dim")
_KEYS_VALUES_ALONE = equal_if("is_cross_attention", True, 2, 3)  # if queries come from another layer
_WINDOWS = first_or("head_dim", blocked("head_dim", "head_dim"))  # one, or two that overlap
_STATE = ("time_step_rank|dt_rank", "ssm_state_size|d_state", "ssm_state_size|d_state")
_SSM = ("n_groups|ngroups*ssm_state_size|d_state",) * 2 + ("num_heads|nheads",)


RULES: tuple[Rule, ...] = (
    # torch, and copies of nanoGPT
    Rule("in_proj_weight", "MultiheadAttention", blocked("embed_dim", "embed_dim", "embed_dim"), "torch."),
    Rule("c_attn.weight", "CausalSelfAttention", blocked("n_embd", "n_embd", "n_embd")),
    # queries, keys and values, one behind the other
    Rule("c_attn.weight", "GPT2Attention DecisionTransformerGPT2Attention ImageGPTAttention", _KEYS_VALUES_ALONE),
    Rule("c_attn.weight", "Attention", equal(3), "transformers.models.openai."),
    Rule("att_proj.weight", "BarkSelfAttention", equal(3)),
    Rule("Wqkv.weight", "ModernBertAttention MptAttention", equal(3)),
    Rule("Wqkv.weight", "DbrxAttention", blocked("hidden_size", *_KEYS_VALUES)),
    Rule(
        "qkv_proj.weight", "Phi3Attention Phi4MultimodalAttention",
        blocked("num_attention_heads|num_heads*head_dim", *_KEYS_VALUES),
    ),
    Rule("qkv.weight", "Exaone4_5_VisionAttention", blocked("q_dim", "kv_dim", "kv_dim")),
    Rule("qkv.weight", "*Attention", equal(3), _HF),
    Rule("qkv_linear.weight", "LayoutLMv2SelfAttention", equal(3)),
    Rule("qkv.weight", "ShiftedWindowAttention ShiftedWindowAttentionV2 ShiftedWindowAttention3d", equal(3)),
    Rule("to_qkv.weight", "RelativePositionalMultiHeadAttention", equal(3)),
    Rule(
        "qkv_proj.convolution.weight", "MobileViTV2LinearSelfAttention", blocked("1", "embed_dim", "embed_dim"), _HF
    ),
    Rule("qkv_opreact.weight", "xLSTM*", blocked("qk_dim", "qk_dim", "v_dim", "v_dim"), _HF),
    Rule("ifgate_preact.weight proj_up_gate_z.weight", "xLSTM*", equal(2), _HF),
    Rule(
        "index_qk_proj.weight", "*Indexer",
        blocked("index_n_heads*index_head_dim", "index_kv_heads*index_head_dim"), _HF,
    ),
    Rule("dense.weight", "*GlobalPointer", equal(2), _HF),
    Rule("gru_rel_pos_linear.weight", "WavLMAttention", equal(2), _HF),
    # the same in each head
    Rule("query_key_value.weight", "GPTNeoXAttention GPTNeoXJapaneseAttention", per_head(*("head_size",) * 3)),
    Rule("query_key_value.weight", "BloomAttention PersimmonAttention", per_head(*_HEAD, heads="num_heads")),
    Rule("query_key_value.weight", "FalconAttention", _multi_query),
    Rule("c_attn.weight", "GPTBigCodeAttention", _multi_query),
    Rule(
        "qkv_proj.weight", "CodeGenAttention",  # made for four devices: each has its heads' queries, values and keys
        per_head(*("num_attention_heads*head_dim/4",) * 3, heads="4"),
    ),
    Rule("qkv_proj.weight", "MiniMaxLightningAttention", per_head(*_HEAD, heads="num_attention_heads")),
    Rule(
        "in_proj.weight", "DisentangledSelfAttention",
        per_head(*("attention_head_size",) * 3, heads="num_attention_heads"),
    ),
    Rule("proj.weight", "EsmFoldSelfAttention", per_head(*("head_width",) * 3, heads="num_heads")),
    Rule("linear_kv.weight", "EsmFoldInvariantPointAttention", per_head("hidden_dim", "hidden_dim")),
    Rule(
        "linear_kv_points.weight", "EsmFoldInvariantPointAttention",
        per_head("num_qk_points", "num_v_points", heads="3*num_heads"),  # of each coordinate
    ),
    Rule(
        "queries_keys_values.linear.weight", "LevitAttention",
        per_head("key_dim", "key_dim", "attention_ratio*key_dim"),
    ),
    Rule("keys_values.linear.weight", "LevitAttentionSubsample", per_head("key_dim", "attention_ratio*key_dim")),
    Rule("wqkv.weight", "FusedQKVLinear", per_head("heads_per_kv*head_dim", "head_dim", "head_dim")),
    # queries beside their gates
    Rule(
        "q_proj.weight", "Qwen3NextAttention Qwen3_5*Attention Qwen4ExpTextAttention",
        per_head("head_dim", "head_dim", heads="num_attention_heads"),
    ),
    Rule("q_gate_proj.weight", "AXK2Attention", per_head("qk_head_dim", "v_head_dim", heads="num_heads")),
    # keys and values
    Rule(
        "kv_a_proj_with_mqa.weight wkv_a.weight", "*",
        first_or("kv_lora_rank", blocked("kv_lora_rank", "qk_rope_head_dim")),
    ),
    Rule("kv_b_proj.weight", "*", per_head("qk_nope_head_dim", "v_head_dim", heads="num_heads|num_attention_heads")),
    Rule("wkv_b.weight", "*", per_head("qk_nope_head_dim", "v_head_dim", heads="num_heads|n_heads|n_local_heads")),
    Rule("kv_proj.weight", "JetMoeAttention", equal(2)),
    Rule("to_kv.weight", "GraniteSpeech*Attention EvollaSequenceCompressorAttention", equal(2), _HF),
    Rule("kv_proj.weight gate_proj.weight", "DeepseekV4*Indexer DeepseekV4*Compressor", _WINDOWS, _HF),
    Rule("kv_proj.weight", "DeepseekV4Attention", whole),
    # gates beside what they gate
    Rule("gate_up_proj.weight", "*", equal(2), _HF),
    Rule("gate_up_proj_adapter_list.#.#.weight", "Zamba2MLP", first_or("adapter_rank", equal(2))),
    Rule("Wi.weight", "ModernBert*MLP", equal(2), _HF),
    Rule("fc1.weight", "Moonshine*DecoderMLP MoshiGatingMLP KyutaiSpeechToTextGatingMLP", equal(2), _HF),
    Rule("input_linear.weight", "GraniteMoe*MLP GraniteMoe*MoE JetMoeMoE", equal(2), _HF),
    Rule("weights_in.weight", "*SwiGLUFFN", equal(2), _HF),
    Rule("linear_1.weight", "AyaVisionMultiModalProjector Cohere2VisionMultiModalProjector", equal(2)),
    Rule("proj.weight", "ClvpGatedLinearUnit EsmFoldSequenceToPair", equal(2)),
    Rule("gate.weight", "DFineGate Deimv2Gate", equal(2)),
    Rule("input_proj.weight", "EsmFold2OuterProductMean", equal(2)),
    Rule("proj_bundle.weight", "EsmFold2TriangleMultiplicativeUpdate", equal(4)),
    Rule("projection_in.weight", "FocalNetModulation", _focal),
    # gated convolutions of speech models
    Rule("pointwise_conv1.weight", "*ConvolutionModule", equal(2), _HF),
    Rule("up_conv.weight", "GraniteSpeech*ConvModule", equal(2), _HF),
    Rule("pointwise_lin1.weight", "GraniteSpeech5*ConvolutionModule", equal(2), _HF),
    Rule("ext_pw_conv_1d.weight", "Phi4MultimodalAudioGluPointWiseConv", equal(2)),
    Rule("linear_start.weight linear_start.linear.weight", "*LightConv1d", equal(2), _HF),
    Rule("conv.weight", "Wav2Vec2*AdapterLayer WavLMAdapterLayer Data2VecAudioAdapterLayer", equal(2), _HF),
    Rule(
        "residual_conv.weight self_attn_conv.weight", "SeamlessM4T*AdapterLayer Wav2Vec2Bert*AdapterLayer",
        equal(2), _HF,
    ),
    # shifts, scales and gates of adaptive norms
    Rule("adaln_linear.weight", "EsmFold2AtomLayer", equal(6)),
    Rule("adaln_proj.weight", "*", equal("num_chunks"), _HF),
    Rule("linear.weight", "Qwen2_5_OmniAdaLayerNormZero", equal(6)),
    Rule("linear.weight", "Qwen2_5_OmniAdaLayerNormZero_Final", equal(2)),
    Rule("linear.weight", "VibeVoiceDiffusionHeadAdaLayerNorm", equal("num_chunks")),
    Rule("linear_1.weight", "VibeVoiceDiffusionHeadFinalLayer", equal("num_chunks")),
    Rule("lin.weight", "Modulation", equal("multiplier"), _TITAN),
    Rule("linear1.weight", "SingleStreamBlock", blocked(*("hidden_size",) * 3, "mlp_hidden_dim"), _TITAN),
    Rule("qkv.weight", "SelfAttention", equal(3), _TITAN),
    # state spaces, short convolutions and linear attention
    Rule("in_proj.weight", "MambaMixer FalconMambaMixer JambaMambaMixer", equal(2)),
    Rule("in_proj.weight", "Mamba", equal(2), "mamba_ssm."),
    Rule("in_proj.weight", "ZambaMambaMixer", per_head("1", "1")),
    Rule("x_proj.weight", "Mamba MambaMixer FalconMambaMixer JambaMambaMixer", blocked(*_STATE)),
    Rule("x_proj_weight", "ZambaMambaMixer", blocked(*_STATE)),
    Rule("dt_proj_weight", "ZambaMambaMixer", whole),
    Rule(
        "in_proj.weight",
        "Mamba2 Mamba2Simple Mamba2Mixer Zamba2MambaMixer BambaMixer FalconH1Mixer NemotronHMamba2Mixer "
        "GraniteMoeHybridMambaLayer",
        blocked(*("intermediate_size|d_ssm|d_inner",) * 2, *_SSM),
    ),
    Rule("in_proj.weight", "Lfm*ShortConv", equal(3), _HF),
    Rule(  # queries, keys, values and gates of each head of keys, which several heads of values share
        "in_proj_qkvz.weight", "Qwen3Next*",
        per_head("head_k_dim", "head_k_dim", *("num_v_heads*head_v_dim/num_k_heads",) * 2, heads="num_k_heads"), _HF,
    ),
    Rule("in_proj_ba.weight", "Qwen3Next*", per_head(*("num_v_heads/num_k_heads",) * 2, heads="num_k_heads"), _HF),
    Rule("in_proj_qkv.weight", "*GatedDeltaNet", blocked("key_dim", "key_dim", "value_dim"), _HF),
    Rule("in_proj_z.weight in_proj_a.weight in_proj_b.weight", "*GatedDeltaNet", whole, _HF),
    Rule("patch_embedding_projection.weight", "BltLocal*", whole, _HF),
    # experts, and other stacks
    Rule("gate_up_proj", "*Experts", _experts_gate_up, _HF),
    Rule("down_proj up_proj gate_proj", "*Experts", _experts_whole, _HF),
    Rule("w1 v1 w2", "DbrxExpertGLU", groups("moe_num_experts")),  # w2: (in, out) of each, one below the other
    Rule("weight", "*ParallelExperts *FlexibleLinear", whole, _HF),
    Rule("weight", "DeepseekV4GroupedLinear", groups("n_groups")),
    Rule("weight", "GroupedLinearLayer", transposed_stack, _HF),
    Rule("input_gate_weight recurrent_gate_weight", "RecurrentGemmaRglru", transposed_stack),
    Rule("mlp1_weight mlp1_weight_EGD", "GptOssGroupedExperts", per_head("1", "1")),
    Rule("mlp2_weight mlp2_weight_EDF", "GptOssGroupedExperts", whole),
    Rule("w1 w2 w3 w1_EFD w2_EDF w3_EFD", "GroupedExperts", whole),
    # diffusers: queries, keys and values, also of attention whose projections were fused after it was built
    Rule("to_qkv.weight", "*", equal_if("use_differential", True, 5, 3), _DIFFUSERS),
    Rule("to_kv.weight", "*", equal_if("use_differential", True, 3, 2), _DIFFUSERS),
    Rule("to_q.weight", "StableAudio3CrossAttention", equal_if("use_differential", True, 2), _DIFFUSERS),
    Rule("to_added_qkv.weight", "*", equal(3), _DIFFUSERS),
    Rule("to_added_kv.weight", "*", equal(2), _DIFFUSERS),
    Rule(
        "to_qkv_mlp_proj.weight", "Flux2ParallelSelfAttention",
        blocked("inner_dim", "inner_dim", "inner_dim", "mlp_hidden_dim", "mlp_hidden_dim"), _DIFFUSERS,
    ),
    Rule("qkv.weight", "MMAudio*", per_head("1", "1", "1"), _DIFFUSERS),
    Rule("qkv.weight", "*", equal(3), _DIFFUSERS),
    Rule("kv_linear.weight", "MultiHeadCrossAttention", equal(2), _DIFFUSERS),
    Rule("img_attn_qkv.weight txt_attn_qkv.weight", "JoyImage*", equal(3), _DIFFUSERS),
    Rule("img_qkv_proj.weight", "PRXAttention", equal(3), _DIFFUSERS),
    Rule("txt_kv_proj.weight", "PRXAttention", equal(2), _DIFFUSERS),
    # diffusers: gates beside what they gate
    Rule("proj.weight", "GEGLU SwiGLU", equal(2), _DIFFUSERS),
    Rule("linear_in.weight", "Flux2FeedForward Flux3FeedForward", equal(2), _DIFFUSERS),
    Rule("proj_in.weight", "FeedForward StableAudio3FeedForward", equal(2), _DIFFUSERS),
    Rule("ff_in.weight", "MiniMaxMusic3TransformerBlock", equal(2), _DIFFUSERS),
    Rule("gate_up_proj.weight", "OmniGenFeedForward", equal(2), _DIFFUSERS),
    Rule("swish_linear.#.weight", "RFD4ProteinaTransition", equal(2), _DIFFUSERS),
    Rule("linear_x.weight", "RFD4ProteinaPairUpdate", equal(2), _DIFFUSERS),
    Rule("conv_inverted.weight", "GLUMBConv GLUMBTempConv", equal(2), _DIFFUSERS),
    Rule("inverted_conv.conv.weight", "GLUMBConvTemp", equal(2), _DIFFUSERS),
    Rule("proj_mlp.weight", "OvisImageSingleTransformerBlock", equal(2), _DIFFUSERS),
    Rule("proj_mlp.weight", "*", whole, _DIFFUSERS),
    Rule("dec_in_proj.weight", "*MiniMax*", whole, _DIFFUSERS),
    Rule("gate_up_proj", "SwiGLUExperts", _experts_gate_up, _DIFFUSERS),
    Rule("down_proj", "SwiGLUExperts", _experts_whole, _DIFFUSERS),
    # diffusers: shifts, scales and gates by what a block is conditioned on
    *(
        Rule("linear.weight", classes, equal(count), _DIFFUSERS)
        for count, classes in (
            (2, "AdaLayerNorm AdaGroupNorm AdaLayerNormContinuous CogView4AdaLayerNormContinuous"),
            (2, "GlmImageAdaLayerNormContinuous ErnieImageAdaLNContinuous AudioDiTAdaLayerNormZeroFinal"),
            (2, "MiniMaxH3AdaLayerNormOut AuraFlowPreFinalBlock Flux3AdaLayerNorm *AdaNorm"),
            (3, "*AdaLayerNormZeroSingle Flux3Modulation"),
            (4, "LuminaRMSNormZero MochiRMSNormZero"),
            (6, "AdaLayerNormZero AdaLayerNormSingle CogVideoXLayerNormZero EasyAnimateLayerNormZero"),
            (6, "HunyuanVideoTokenReplaceAdaLayerNormZero"),
            (9, "SD35AdaLayerNormZeroX"),
            (12, "CogView3PlusAdaLayerNormZeroTextImage CogView4AdaLayerNormZero GlmImageAdaLayerNormZero"),
            (18, "MiniMaxH3AdaLayerNormModulation"),  # six for each of three modalities
        )
    ),
    Rule("linear.weight", "LTX2AdaLayerNormSingle", equal("num_mod_params"), _DIFFUSERS),
    Rule("linear.weight", "Flux2Modulation", equal("3*mod_param_sets"), _DIFFUSERS),
    Rule("linear_2.weight", "CosmosAdaLayerNorm", equal(2), _DIFFUSERS),
    Rule("linear_2.weight", "CosmosAdaLayerNormZero", equal(3), _DIFFUSERS),
    Rule("lin.weight", "Modulation", equal(6), _DIFFUSERS),
    Rule("proj.weight", "LTX2VideoVaeAdaLNZero", equal("num_chunks"), _DIFFUSERS),
    Rule("adaln_proj.weight", "IPAdapterTimeImageProjectionBlock", equal(4), _DIFFUSERS),
    Rule("mlp.#.weight", "AudioDiTAdaLNMLP", equal(6), _DIFFUSERS),
    Rule("adaLN_modulation.#.weight", "HiDreamImageTransformerBlock", equal(12), _DIFFUSERS),
    Rule("adaLN_modulation.#.weight", "HiDreamImageSingleTransformerBlock", equal(6), _DIFFUSERS),
    Rule("adaLN_modulation.#.weight", "HiDreamImageOutEmbed", equal(2), _DIFFUSERS),
    Rule("adaLN_modulation.#.weight", "ZImage*Block BriaFibo2TransformerBlock", equal(4), _DIFFUSERS),
    Rule("adaln_modulation.weight", "Ideogram4TransformerBlock", equal(4), _DIFFUSERS),
    Rule("img_mod.#.weight txt_mod.#.weight", "QwenImage*Block", equal(6), _DIFFUSERS),
    Rule("img_mod.#.weight", "NucleusMoEImageTransformerBlock", equal(4), _DIFFUSERS),
    Rule("text_modulation.out_layer.weight", "Kandinsky*Block", equal(6), _DIFFUSERS),
    Rule("visual_modulation.out_layer.weight", "Kandinsky6SRTransformerBlock", equal(6), _DIFFUSERS),
    Rule("visual_modulation.out_layer.weight", "Kandinsky*Block", equal(9), _DIFFUSERS),
    Rule("modulation.out_layer.weight", "Kandinsky*", equal(2), _DIFFUSERS),
    Rule("va_modulation.out_layer.weight", "Kandinsky6*", _cross_modulation("model_dim", "model_dim_a"), _DIFFUSERS),
    Rule("av_modulation.out_layer.weight", "Kandinsky6*", _cross_modulation("model_dim_a", "model_dim"), _DIFFUSERS),
    Rule("time_emb_proj.weight", "ResnetBlock2D*", equal_if("time_embedding_norm", "scale_shift", 2), _DIFFUSERS),
    Rule(
        "time_embedder.timestep_embedder.linear_2.weight", "LTX*Block3d",  # of the resnets that it is given to
        equal(4), _DIFFUSERS,
    ),
    Rule("context_mlp.#.weight", "Kandinsky3ConditionalGroupNorm", equal(2), _DIFFUSERS),
    Rule("cond_embeds_mapper.weight", "ConvNextBlock", equal(2), _DIFFUSERS),
    Rule("scale_bias.weight", "T5FiLMLayer", equal(2), _DIFFUSERS),
    Rule("mapper.weight mapper_sca.weight mapper_crp.weight", "SDCascadeTimestepBlock", equal(2), _DIFFUSERS),
    # timm
    Rule("qkv.conv.weight", "LiteMLA", per_head("dim", "dim", "dim"), _TIMM),
    Rule("qkv.c.weight", "SHSA", blocked("qk_dim", "qk_dim", "pdim"), _TIMM),
    Rule("qkv.weight", "LambdaLayer", blocked("num_heads*dim_qk", "dim_qk", "dim_v"), _TIMM),
    Rule("qkvs.#.conv.weight", "CascadedGroupAttention", blocked("key_dim", "key_dim", "val_dim"), _TIMM),
    Rule("kv.weight", "HaloAttn", per_head("dim_head_qk", "dim_head_v", heads="num_heads"), _TIMM),
    Rule("pwise.weight", "ConvAttention", per_head(*_HEAD, heads="num_heads"), _TIMM),
    Rule("qk.weight", "*", equal(2), _TIMM),
    Rule("v_gate.c.weight", "SHMA", equal(2), _TIMM),
    Rule("BCdt_proj.conv.weight", "HSMSSD", equal(3), _TIMM),
    Rule("hz_proj.conv.weight", "HSMSSD", equal(2), _TIMM),
    Rule("f.weight", "FocalModulation", listed("input_split"), _TIMM),
    Rule("fc1.weight", "GatedConvBlock", listed("split_indices"), _TIMM),
    Rule("fc1.weight", "GatedMlp", _gated_by_halves, _TIMM),
    Rule("qkv.weight qkv.linear.weight qkv.conv.weight qkv.c.weight", "*", _timm_qkv, _TIMM),
    Rule("kv.weight kv.linear.weight kv.conv.weight kv.c.weight", "*", _timm_kv, _TIMM),
    Rule("in_proj.weight", "ParallelScalingBlock DiffParallelScalingBlock", listed("in_split"), _TIMM),
    Rule("qkv_proj.weight", "LinearSelfAttention", blocked("1", "embed_dim", "embed_dim"), _TIMM),
    Rule("fc1.weight", "GluMlp", equal(2), _TIMM),
)  # fmt: skip
