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

from dmuon.model.blocks import blocks_by_module, stacked_blocks
from dmuon.model.families import known_spec, stored_form
from dmuon.model.fused_hints import fused_look
from dmuon.model.matrix_spec import MatrixSpec
from dmuon.model.module_tree import ModuleTree

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
    tree = ModuleTree.of(model)
    params: dict[str, nn.Parameter] = {}
    specs: dict[str, MatrixSpec] = {}
    for prefix, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            form = stored_form(module, name, param)
            if param.ndim > 1 and form is not None and not isinstance(module, nn.Embedding):
                params[f"{prefix}.{name}"] = param
                specs[f"{prefix}.{name}"] = known_spec(tree, module, name, param) or form
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


def families() -> list[str]:
    """Model types whose code may fuse something, one for each file of models."""
    mapping = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    root = Path(transformers.__file__).parent / "models"
    words = ("chunk(", "split(", "unbind(", "glu(", "qkv", "gate_up", "in_proj", "query_key_value", "nn.Parameter(")
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
        tree = ModuleTree.of(model)
        inside = blocks_by_module(stacked_blocks(model, {id(m) for m in model.modules()}))
        for prefix, module in model.named_modules():
            if id(module) not in inside:
                continue
            for name, param in module.named_parameters(recurse=False):
                if param.ndim < 2:
                    continue
                spec = known_spec(tree, module, name, param)
                looks = spec is None and fused_look(tree, module, name, param) is not None
                experts = param.ndim == 3 and "expert" in type(module).__name__.lower()
                stacks += experts
                if looks or (experts and spec is None):
                    left.append((kind, type(module).__name__, f"{prefix}.{name}", str(tuple(param.shape))))
    assert not left
    assert built > 150 and stacks > 100, "most families build without weights"
