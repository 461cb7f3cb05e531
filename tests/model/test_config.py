"""The matrices of real architectures, by configurations that dmuon reads and those that only `transformers` knows."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch.nn as nn
from harness.configs import LLAMA_8B, TOWER, towers, written
from harness.trees import node, stack

from dmuon.model.config import read_model
from dmuon.solver import CostTable, Matrix, plan

GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257}
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "first_k_dense_replace": 3, "num_attention_heads": 128, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
    "n_shared_experts": 1,
}  # fmt: skip


def read(folder: Path, config: Any) -> list[Any]:
    return read_model(written(folder, config))


def elements(matrices: list[Any]) -> int:
    return sum(m.rows * m.cols for m in matrices)


def test_llama_has_every_parameter_but_embeddings_and_norms(tmp_path: Path) -> None:
    outside = 2 * 128256 * 4096 + 65 * 4096
    assert elements(read(tmp_path, LLAMA_8B)) + outside == 8_030_261_248


def test_gpt2_lists_fused_qkv_as_three_squares(tmp_path: Path) -> None:
    matrices = read(tmp_path, GPT2)
    outside = (50257 + 1024) * 768 + 12 * 13 * 768 + 2 * 768
    assert elements(matrices) + outside == 124_439_808
    first = [(m.name, m.rows, m.cols) for m in matrices if m.block == "transformer.h.0"]
    assert first[:3] == [(f"transformer.h.0.attn.c_attn.weight[{part}]", 768, 768) for part in range(3)]
    assert Counter(shape for *_, a, b in first for shape in [(a, b)])[(768, 768)] == 4


@pytest.mark.slow
def test_deepseek_has_671_billion_parameters_with_dense_first_layers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    matrices = read(tmp_path, DEEPSEEK)
    assert elements(matrices) + 2 * 129280 * 7168 == pytest.approx(671.0e9, rel=1e-3)
    per_block = Counter(m.block for m in matrices)
    assert per_block["model.layers.2"] == 7 + 3  # keys and values have two latents, and two parts made of them
    assert per_block["model.layers.3"] == 7 + 1 + 3 * 256 + 3


@pytest.mark.parametrize(("kind", "keys"), [("llama", 4096), ("mistral", 2048), ("qwen2", 8192), ("qwen3", 4096)])
def test_a_field_that_is_left_out_is_what_transformers_takes_for_it(tmp_path: Path, kind: str, keys: int) -> None:
    fields = {name: value for name, value in LLAMA_8B.items() if name not in ("num_key_value_heads", "head_dim")}
    fields |= {"model_type": kind, "num_attention_heads": 16}
    found = {m.rows for m in read(tmp_path, fields) if "k_proj" in m.name}
    assert found == {keys}


def test_towers_hold_plain_and_gated_blocks(tmp_path: Path) -> None:
    gated = {**TOWER, "name": "text", "gated_mlp": True, "num_key_value_heads": 1}
    matrices = read(tmp_path, towers(TOWER, gated))
    assert Counter(m.block for m in matrices)["vision.layers.0"] == 6
    assert Counter(m.block for m in matrices)["text.layers.0"] == 7
    assert {(m.rows, m.cols) for m in matrices if m.name.startswith("text") and "k_proj" in m.name} == {(64, 768)}


UNKNOWN = [
    Matrix(f"trunk.{i}.{name}", *shape, f"trunk.{i}")
    for i in range(32)
    for name, shape in {"a": (768, 768), "zz.b": (768, 1536), "c": (112, 768), "d": (112, 768)}.items()
]


@pytest.mark.pitfall("P20")
@pytest.mark.parametrize(
    "config", [LLAMA_8B, GPT2, towers(TOWER), UNKNOWN], ids=["llama", "gpt2", "vit", "what no model is called"]
)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_owners_are_balanced_whatever_the_layers_are_called(tmp_path: Path, config: Any, ranks: int) -> None:
    matrices = config
    if config is not UNKNOWN:
        matrices = [Matrix(m.name, m.rows, m.cols, m.block) for m in read(tmp_path, config)]
    result = plan(matrices, ranks, CostTable.from_flops({m.shape for m in matrices}))
    assert sorted(result.owners) == sorted(m.name for m in matrices)
    assert max(result.loads_ns) <= 1.02 * sum(result.loads_ns) / ranks
    assert max(result.rank_bytes) <= 1.1 * sum(result.rank_bytes) / ranks
    for block, (largest, least) in result.block_balance.items():
        assert largest <= 2 * least, block
        assert len({result.owners[m.name] for m in matrices if m.block == block}) > 1, f"{block} is all on one owner"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({**LLAMA_8B, "model_type": "mamba"}, "'mamba'; use one of .*install transformers, .* dmuon-profile --shapes"),
        ({"model_type": "llama"}, "field 'hidden_size' is missing; set it to an integer"),
        ({**LLAMA_8B, "num_hidden_layers": 0}, "field 'num_hidden_layers' is 0; set it to at least 1"),
        ({**GPT2, "add_cross_attention": True}, "field 'add_cross_attention' is True; set it to false"),
        ({**LLAMA_8B, "num_attention_heads": 3000}, "field 'num_attention_heads' is 3000; set it to a divisor of 4096"),
        (towers(), r"'towers' is \[\]; set it to a non-empty list of objects"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused_by_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Any, says: str
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # as where it is not installed
    with pytest.raises(ValueError, match=says):
        read(tmp_path, config)


REMEDY = "; pass a model's config.json"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        *((data, f"corrupt or truncated JSON .*{REMEDY}") for data in (b"\xff{", b"{", b"", b"[" * 100_000)),
        (b'{"model_type": "gpt2", "model_type": "llama"}', f"field 'model_type' appears twice{REMEDY}"),
        (None, f"no such file{REMEDY}, or the folder"),
        (..., f"not a file{REMEDY}"),  # a folder
    ],
)
def test_what_is_no_config_is_refused_by_name(tmp_path: Path, content: Any, says: str) -> None:
    path = tmp_path / "config.json"
    if content is ...:
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    for source in (tmp_path,) if content is ... else (path, tmp_path):  # a folder stands for the config in it
        with pytest.raises(ValueError, match=rf"config.json: {says}"):
            read_model(source)


# -- what only transformers knows, without memory, code or downloads ---------------------------------------------------


def model_of(config: SimpleNamespace) -> nn.Module:
    width = config.width

    def layer() -> nn.Module:
        return node(up=nn.Linear(width, 3 * width), down=nn.Linear(3 * width, width))

    model = node(embed=nn.Embedding(100, width), layers=stack(layer))
    assert model.embed.weight.is_meta, "a model must take no memory"
    if config.fused:
        model.layers[1].qkv = nn.Linear(width, 3 * width)
    return model


class Fake(ModuleType):
    """As much of ``transformers`` as is used; records the fields that reach the configuration."""

    __version__ = "99"

    def __init__(self, causal: bool = True) -> None:
        super().__init__("transformers")
        self.fields: dict[str, Any] = {}
        self.AutoConfig = SimpleNamespace(for_model=self.for_model)
        self.AutoModelForCausalLM = SimpleNamespace(from_config=self.from_config if causal else self.refuse)
        self.AutoModel = SimpleNamespace(from_config=self.from_config)

    def for_model(self, kind: str, **fields: Any) -> SimpleNamespace:
        if kind != "novel":
            raise ValueError(f"Unrecognized model identifier: {kind}. Should contain one of " + "llama, " * 500)
        self.fields = fields
        if not isinstance(fields["width"], int):
            raise TypeError("Field 'width'\n    expected int")
        return SimpleNamespace(**{"fused": False, **fields})

    @staticmethod
    def from_config(config: SimpleNamespace, attn_implementation: str) -> nn.Module:
        assert attn_implementation == "eager"
        return model_of(config)

    @staticmethod
    def refuse(config: SimpleNamespace, attn_implementation: str) -> nn.Module:
        raise ValueError("Unrecognized configuration class")


@pytest.fixture(params=[True, False], ids=["causal", "other"])
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Fake:
    module = Fake(request.param)
    monkeypatch.setitem(sys.modules, "transformers", module)
    return module


def write(folder: Path, **fields: Any) -> Path:
    return written(folder, {"model_type": "novel", "width": 16, **fields})


def test_the_matrices_are_those_that_muon_would_own(tmp_path: Path, fake: Fake) -> None:
    write(tmp_path)
    assert [(m.name, m.rows, m.cols, m.block) for m in read_model(tmp_path)] == [
        (f"layers.{i}.{name}.weight", rows, cols, f"layers.{i}")
        for i in range(2)
        for name, rows, cols in (("up", 48, 16), ("down", 16, 48))
    ]


def test_code_weights_and_dtypes_of_the_config_are_left_out(tmp_path: Path, fake: Fake) -> None:
    dangers = {
        "auto_map": {"AutoModel": "modeling.Evil"}, "quantization_config": {"bits": 4}, "torch_dtype": "float8",
        "_name_or_path": "somebody/model", "attn_implementation": "flash_attention_2",
    }  # fmt: skip
    read_model(write(tmp_path, **dangers))
    assert fake.fields == {"width": 16}


def test_the_class_that_a_file_names_is_built(tmp_path: Path, fake: Fake) -> None:
    def wrapped(config: SimpleNamespace, attn_implementation: str) -> nn.Module:
        return node(novel=model_of(config))

    named = SimpleNamespace(config_class=SimpleNamespace, _from_config=wrapped)
    fake.NovelForTasks = named  # type: ignore[attr-defined]
    names = [m.name for m in read_model(write(tmp_path, architectures=["OfCodeOfItsOwn", "NovelForTasks"]))]
    assert len(names) == 4 and all(name.startswith("novel.layers.") for name in names)


def test_downloads_are_forbidden_meanwhile(tmp_path: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = ModuleType("huggingface_hub.constants")
    constants.HF_HUB_OFFLINE = False  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", ModuleType("huggingface_hub"))
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", constants)
    seen = []
    real = fake.AutoConfig.for_model
    fake.AutoConfig.for_model = lambda kind, **fields: (seen.append(constants.HF_HUB_OFFLINE), real(kind, **fields))[1]
    read_model(write(tmp_path))
    with pytest.raises(ValueError, match="cannot build"):
        read_model(write(tmp_path, width="x"))
    assert seen == [True, True] and constants.HF_HUB_OFFLINE is False


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model_type": "unheard-of"}, r"transformers 99 cannot build model_type 'unheard-of' .*….*--sh"),
        ({"width": "16"}, r"cannot build .* \(TypeError: Field 'width' expected int\); correct them, .* --shapes"),
        ({"fused": True}, r"'layers.1.qkv.weight' of shape \(48, 16\) looks like several .* --shapes"),
    ],
)
def test_what_transformers_or_muon_cannot_take_is_refused_by_file(
    tmp_path: Path, fake: Fake, fields: dict[str, Any], says: str
) -> None:
    path = write(tmp_path, **fields)
    with pytest.raises(ValueError, match=says) as caught:
        read_model(path)
    assert str(caught.value).startswith(f"{path}: ") and len(str(caught.value)) < 1000
