"""What is known of the layouts of `transformers`' models, against what their forwards keep apart."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from harness.row_groups import row_groups
from harness.tiny_configs import TINY

import dmuon
from dmuon.model.config import read_model
from dmuon.model.makeup import ModuleTree, known_spec, looks_fused
from dmuon.model.routing import route_to_blocks

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra 'frameworks')")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def build(key: str) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(key.partition("#")[0], **TINY[key])
    try:
        model = transformers.AutoModel.from_config(config, attn_implementation="eager")
    except ValueError:  # has no attention
        model = transformers.AutoModel.from_config(config)
    for param in model.parameters():
        if param.ndim > 1:
            nn.init.normal_(param, std=0.3)  # a forward that keeps nothing apart by chance
    return model.eval()


@pytest.mark.pitfall("P77", "P78")
@pytest.mark.parametrize("key", TINY)
def test_parts_are_what_a_forward_keeps_apart(key: str) -> None:
    model = build(key)
    routes = [route for route in route_to_blocks(model) if route.muon]
    params = {route.fqn: route.param for route in routes}
    specs = {route.fqn: route.spec for route in routes}
    dims = {n: specs[n].dim - 3 + p.ndim if not specs[n].flattened else 0 for n, p in params.items()}
    options: dict[str, Any] = {"input_ids": torch.randint(3, 60, (2, 24))}
    if "use_cache" in inspect.signature(model.forward).parameters:
        options["use_cache"] = False
    found = row_groups(model, options, params, dims)
    for name, param in params.items():
        runs = specs[name].runs(param.shape[dims[name]])
        assert found[name] in ([], sorted([i for start, stop in part for i in range(start, stop)] for part in runs)), (
            name, tuple(param.shape), specs[name],
        )  # fmt: skip
    assert any(spec.parts for spec in specs.values()) == (key not in ("llama", "bert"))
    check_update(model, found, params, dims)


def check_update(
    model: nn.Module, groups: dict[str, list[list[int]]], params: dict[str, nn.Parameter], dims: dict[str, int]
) -> None:
    """The update of Muon is orthogonal in each group of outputs that the forward keeps apart."""
    optimizer = dmuon.Muon(model, lr=1.0, weight_decay=0.0)
    taken = {id(p) for group in optimizer.param_groups if group["use_muon"] for p in group["params"]}
    before = {name: param.detach().clone() for name, param in params.items()}
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    checked = 0
    for name, param in params.items():
        if id(param) not in taken:
            continue
        update = param.detach() - before[name]
        flattened = update.ndim > 3 or (update.ndim == 3 and dims[name] == 0)
        for rows in groups[name] or [list(range(update.shape[dims[name]]))]:
            part = update.index_select(dims[name], torch.tensor(rows))
            for matrix in part.flatten(1)[None] if flattened else part if part.ndim == 3 else part[None]:
                scale = 0.2 * max(matrix.shape) ** 0.5
                values = torch.linalg.svdvals(matrix) / scale
                assert values.median() > 0.8 and values.max() < 1.3, (name, rows[:4], values)
                checked += 1
    assert checked > 3


def families() -> list[str]:
    """Model types whose code may fuse something, one for each file of models."""
    mapping = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    root = Path(transformers.__file__).parent / "models"
    words = ("chunk(", "unbind(", "glu(", "qkv", "gate_up", "in_proj", "query_key_value")
    seen: set[Path] = set()
    found = []
    for kind in mapping:
        folder = transformers.models.auto.configuration_auto.model_type_to_module_name(kind)
        files = set(root.joinpath(folder).glob("modeling_*.py")) - seen
        seen |= files
        if any(word in file.read_text() for file in files for word in words):
            found.append(kind)
    return found


def on_meta(kind: str) -> nn.Module | None:
    """The model of a default configuration with few layers; None for one that needs a configuration or a package."""
    try:
        config = transformers.AutoConfig.for_model(kind)
        for inner in [config, *(v for v in vars(config).values() if hasattr(v, "to_dict"))]:
            for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"):
                if isinstance(getattr(inner, name, None), int) and getattr(inner, name) > 2:
                    setattr(inner, name, 2)
            for name in ("layer_types", "layers_block_type", "mlp_layer_types"):
                if isinstance(getattr(inner, name, None), list):
                    setattr(inner, name, getattr(inner, name)[:2])
        with torch.device("meta"):
            return transformers.AutoModel.from_config(config)
    except Exception:
        return None


@pytest.mark.parametrize(
    "kind", ["llama", "mistral", "qwen2", "qwen3", "bert", "t5", "vit", "clip", "dinov2", "whisper"]
)
def test_layers_of_dense_families_are_on_muon_and_all_else_on_adamw(kind: str) -> None:
    model = on_meta(kind)
    assert model is not None
    layers = [block for m in model.modules() if isinstance(m, nn.ModuleList) for block in m]
    expected = {id(m.weight) for block in layers for m in block.modules() if isinstance(m, nn.Linear)}
    routes = route_to_blocks(model)
    assert {id(route.param) for route in routes if route.muon} == expected and len(expected) > 10


@pytest.mark.pitfall("P77", "P78")
def test_nothing_of_any_family_looks_fused_and_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    left: list[tuple[str, ...]] = []
    stacks = built = 0
    for kind in families():
        model = on_meta(kind)
        if model is None:
            continue
        built += 1
        try:
            route_to_blocks(model)
        except ValueError as refused:
            if "is shared by blocks" not in str(refused):
                left.append((kind, str(refused)))
        tree = ModuleTree(model.modules())
        inside = {id(m) for stack in model.modules() if isinstance(stack, nn.ModuleList) for m in stack.modules()}
        for prefix, module in model.named_modules():
            if id(module) not in inside:
                continue
            for name, param in module.named_parameters(recurse=False):
                if param.ndim < 2:
                    continue
                spec = known_spec(tree, module, name, param)
                looks = spec is None and looks_fused(tree, module, name, param)
                experts = param.ndim == 3 and "expert" in type(module).__name__.lower()
                stacks += experts
                if looks or (experts and spec is None):
                    left.append((kind, type(module).__name__, f"{prefix}.{name}", str(tuple(param.shape))))
    assert not left
    assert built > 150 and stacks > 100, "most families build without weights"


BASE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
READ: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), BASE),
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "qwen3_moe": BASE | {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2},
    "deepseek_v3": BASE
    | {
        "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    },
}  # fmt: skip


@pytest.mark.pitfall("P78")
@pytest.mark.parametrize("kind", READ)
def test_a_plan_from_a_configuration_has_just_the_matrices_that_dedication_owns(kind: str, tmp_path: Path) -> None:
    """Of the model types that dmuon reads itself, from what this transformers saves."""
    config = transformers.AutoConfig.for_model(kind, **READ[kind])
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    owned = {
        (name, rows, cols, route.block)
        for route in route_to_blocks(model)
        if route.block is not None
        for name, rows, cols in route.spec.named(route.fqn, route.param.shape)
    }
    assert {(m.name, m.rows, m.cols, m.block) for m in read_model(tmp_path)} == owned
