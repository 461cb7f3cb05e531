"""Models that only ``transformers`` knows: what Muon would own of them, without memory, code or downloads."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
from harness.configs import written
from harness.trees import node, stack

from dmuon.model.config import read_model


def model_of(config: SimpleNamespace) -> nn.Module:
    width = config.width

    def layer() -> nn.Module:
        experts = {"experts": nn.Parameter(torch.empty(config.experts, width, width))} if config.experts else {}
        return node(up=nn.Linear(width, 3 * width), down=nn.Linear(3 * width, width), **experts)

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
        return SimpleNamespace(**{"experts": 0, "fused": False, **fields})

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


@pytest.mark.parametrize(
    ("field", "kind"), [("is_encoder_decoder", "AutoModelForSeq2SeqLM"), ("sub_configs", "AutoModelForMultimodalLM")]
)
def test_a_decoder_is_not_taken_for_what_it_is_a_part_of(tmp_path: Path, fake: Fake, field: str, kind: str) -> None:
    setattr(fake, kind, SimpleNamespace(from_config=fake.from_config))
    fake.AutoModelForCausalLM = fake.AutoModel = SimpleNamespace(from_config=None)
    assert len(read_model(write(tmp_path, **{field: True}))) == 4


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


def test_each_expert_of_a_stack_is_a_matrix(tmp_path: Path, fake: Fake) -> None:
    matrices = read_model(write(tmp_path, experts=4))
    assert len(matrices) == 4 + 2 * 4
    first = [(m.name, m.rows, m.cols) for m in matrices if "experts" in m.name and m.block == "layers.0"]
    assert first == [(f"layers.0.experts[{i}]", 16, 16) for i in range(4)]


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
