"""The matrices of a model, read from its ``config.json``, without any memory for its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmuon.model.blocks import MatrixShape
from dmuon.model.matrix_spec import MatrixSpec
from dmuon.model.transformers_config import read_with_transformers, transformers_or_none
from dmuon.platform.files import UnreadableFile, read_json
from dmuon.platform.options import is_integer


def read_model(path: str | Path) -> list[MatrixShape]:
    """List every matrix inside the blocks of a model: what Muon owns by default, so no embeddings and no output head.

    Reads Hugging Face ``config.json`` files of the model types llama, mistral, qwen2, qwen3, qwen3_moe, gpt2 and
    deepseek_v3, and ``towers`` (a list of transformer stacks under ``"towers"``), with the names and parts that
    dedication gives to the matrices of these models as ``transformers`` 5 builds them. Experts are one matrix per
    expert and projection, fused tensors are listed part by part, and routers (``mlp.gate``, experts × hidden)
    are matrices of their block like any other.
    Other model types are built by ``transformers`` on the meta device, where it is installed.

    Args:
        path: the file, or a folder that holds it as ``config.json``.

    Raises:
        ValueError: the file cannot be read or is not JSON, its architecture is unknown, or a field is missing or
            ill-typed; the message names file, field and remedy.
    """
    return matrices_of(ModelConfig.load(path))


def matrices_of(config: ModelConfig) -> list[MatrixShape]:
    """The matrices of :func:`read_model`, of a file that is read already."""
    kind = config.data.get("model_type")
    names = ", ".join(sorted(_READERS))
    if not isinstance(kind, str):
        raise ValueError(f"{config.path}: field 'model_type' is {kind!r}; use one of {names}")
    if kind in _READERS:
        return list(_READERS[kind](config))
    transformers = transformers_or_none()
    if transformers is None:
        raise ValueError(
            f"{config.path}: field 'model_type' is {kind!r}; use one of {names}, install transformers, which knows "
            "others, or time its shapes with dmuon-profile --shapes"
        )
    return read_with_transformers(transformers, config.path, config.data)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Fields of one JSON object, checked as they are read.

    Attributes:
        path: the file, for messages.
        data: the fields.
        prefix: where in the file the object is; empty at its top.
    """

    path: Path
    data: Mapping[str, Any]
    prefix: str = ""

    @classmethod
    def load(cls, path: str | Path) -> ModelConfig:
        """Read a file, or the ``config.json`` of a folder.

        Raises:
            ValueError: it cannot be read or is no JSON object; names file and remedy.
        """
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        try:
            data = read_json(path)
        except UnreadableFile as error:
            raise ValueError(f"{path}: {error}; pass a model's config.json, or the folder that holds it") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}; pass a model's config.json") from None
        if not isinstance(data, dict):
            raise ValueError(f"{path}: holds {type(data).__name__}, not an object; pass a model's config.json")
        return cls(path, data)

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A whole number; ``default`` replaces a field that is missing or null."""
        value = self.data.get(name)
        if value is None and default is not None:
            return default
        self.check(name, is_integer(value), "an integer", value)
        assert isinstance(value, int)
        self.check(name, value >= least, f"at least {least}", value)
        return value

    def flag(self, name: str, default: bool | None = None) -> bool:
        """True or false; ``default`` replaces a field that is missing."""
        value = self.data.get(name, default)
        self.check(name, isinstance(value, bool), "true or false", value)
        return bool(value)

    def text(self, name: str) -> str:
        """A string that is not empty."""
        value = self.data.get(name)
        self.check(name, isinstance(value, str) and value != "", "a non-empty string", value)
        return str(value)

    def integers(self, name: str) -> list[int]:
        """A list of whole numbers; empty if the field is missing or null."""
        value = self.data.get(name)
        if value is None:
            return []
        self.check(
            name,
            isinstance(value, list) and all(type(item) is int for item in value),
            "a list of integers",
            value,
        )
        return list(value)

    def objects(self, name: str) -> list[ModelConfig]:
        """A list of objects that is not empty."""
        value = self.data.get(name)
        self.check(
            name,
            isinstance(value, list) and value != [] and all(isinstance(item, dict) for item in value),
            "a non-empty list of objects",
            value,
        )
        return [ModelConfig(self.path, item, f"{name}[{i}].") for i, item in enumerate(value or [])]

    def check(self, name: str, holds: bool, what: str, value: object) -> None:
        """Refuse ``value`` of field ``name`` unless it ``holds``: the field must be ``what``."""
        if not holds:
            state = "is missing" if name not in self.data else f"is {value!r}"
            raise ValueError(f"{self.path}: field '{self.prefix}{name}' {state}; set it to {what}")


_EXPERT_COUNTS = ("num_local_experts", "n_routed_experts", "num_experts")


def expert_count(config: ModelConfig) -> int:
    """Routed experts of a block, under the name that this version of ``transformers`` gives them."""
    return config.integer(next((name for name in _EXPERT_COUNTS if config.data.get(name) is not None), "num_experts"))


def _decoder(config: ModelConfig) -> Iterator[MatrixShape]:
    """Llama, Mistral, Qwen2 and Qwen3: attention and a gated MLP."""
    hidden, inner = config.integer("hidden_size"), config.integer("intermediate_size")
    for layer in range(config.integer("num_hidden_layers")):
        block = f"model.layers.{layer}"
        yield from _attention(config, block)
        yield from _gated_mlp(block, "mlp", hidden, inner)


def _qwen3_moe(config: ModelConfig) -> Iterator[MatrixShape]:
    hidden = config.integer("hidden_size")
    experts = expert_count(config)
    step, dense = config.integer("decoder_sparse_step", 1), config.integers("mlp_only_layers")
    for layer in range(config.integer("num_hidden_layers")):
        block = f"model.layers.{layer}"
        yield from _attention(config, block)
        if layer in dense or (layer + 1) % step:
            yield from _gated_mlp(block, "mlp", hidden, config.integer("intermediate_size"))
        else:
            yield from _experts(block, hidden, experts, config.integer("moe_intermediate_size"))


def _deepseek_v3(config: ModelConfig) -> Iterator[MatrixShape]:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    experts, inner = expert_count(config), config.integer("moe_intermediate_size")
    if config.integer("moe_layer_freq", 1) != 1:
        raise ValueError(f"{config.path}: field 'moe_layer_freq' must be 1: other spacings are not supported")
    dense = config.integer("first_k_dense_replace", least=0)
    shared = config.integer("n_shared_experts", 0, least=0)
    for layer in range(config.integer("num_hidden_layers")):
        block = f"model.layers.{layer}"
        yield from _latent_attention(config, block, hidden, heads)
        if layer < dense:
            yield from _gated_mlp(block, "mlp", hidden, config.integer("intermediate_size"))
            continue
        yield from _experts(block, hidden, experts, inner)
        if shared:
            yield from _gated_mlp(block, "mlp.shared_experts", hidden, inner * shared)


def _gpt2(config: ModelConfig) -> Iterator[MatrixShape]:
    hidden = config.integer("n_embd")
    inner = config.integer("n_inner", 4 * hidden)
    for layer in range(config.integer("n_layer")):
        block = f"transformer.h.{layer}"
        # As Conv1D stores them: (in, out).
        yield from _several(
            block, "attn.c_attn.weight", (hidden, 3 * hidden), MatrixSpec((hidden,) * 3, transposed=True)
        )
        yield _matrix(block, "attn.c_proj", hidden, hidden)
        yield _matrix(block, "mlp.c_fc", hidden, inner)
        yield _matrix(block, "mlp.c_proj", inner, hidden)


def _towers(config: ModelConfig) -> Iterator[MatrixShape]:
    names = set()
    for tower in config.objects("towers"):
        name = tower.text("name")
        if name in names:
            raise ValueError(f"{config.path}: field '{tower.prefix}name' repeats {name!r}; name each tower once")
        names.add(name)
        hidden, inner = tower.integer("hidden_size"), tower.integer("intermediate_size")
        gated = tower.flag("gated_mlp")
        for layer in range(tower.integer("num_hidden_layers")):
            block = f"{name}.layers.{layer}"
            yield from _attention(tower, block)
            if gated:
                yield from _gated_mlp(block, "mlp", hidden, inner)
            else:
                yield _matrix(block, "mlp.fc1", inner, hidden)
                yield _matrix(block, "mlp.fc2", hidden, inner)


def _attention(config: ModelConfig, block: str) -> Iterator[MatrixShape]:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    shared = config.integer("num_key_value_heads", heads)
    width = config.integer("head_dim", _even_share(config, hidden, heads))
    yield _matrix(block, "self_attn.q_proj", heads * width, hidden)
    yield _matrix(block, "self_attn.k_proj", shared * width, hidden)
    yield _matrix(block, "self_attn.v_proj", shared * width, hidden)
    yield _matrix(block, "self_attn.o_proj", hidden, heads * width)


def _even_share(config: ModelConfig, hidden: int, heads: int) -> int | None:
    """The head width that a config without ``head_dim`` implies."""
    if config.data.get("head_dim") is not None:
        return None
    config.check("num_attention_heads", hidden % heads == 0, f"a divisor of {hidden}, or add head_dim", heads)
    return hidden // heads


def _latent_attention(config: ModelConfig, block: str, hidden: int, heads: int) -> Iterator[MatrixShape]:
    rope, plain = config.integer("qk_rope_head_dim"), config.integer("qk_nope_head_dim")
    value, latent = config.integer("v_head_dim"), config.integer("kv_lora_rank")
    # A null rank is how a config says that the query projection is not factored.
    if config.data.get("q_lora_rank", 0) is None:
        yield _matrix(block, "self_attn.q_proj", heads * (plain + rope), hidden)
    else:
        rank = config.integer("q_lora_rank")
        yield _matrix(block, "self_attn.q_a_proj", rank, hidden)
        yield _matrix(block, "self_attn.q_b_proj", heads * (plain + rope), rank)
    compressed, expanded = MatrixSpec((latent, rope)), MatrixSpec((plain, value), repeats=heads)
    yield from _several(block, "self_attn.kv_a_proj_with_mqa.weight", (latent + rope, hidden), compressed)
    yield from _several(block, "self_attn.kv_b_proj.weight", (heads * (plain + value), latent), expanded)
    yield _matrix(block, "self_attn.o_proj", hidden, heads * value)


def _gated_mlp(block: str, name: str, hidden: int, inner: int) -> Iterator[MatrixShape]:
    yield _matrix(block, f"{name}.gate_proj", inner, hidden)
    yield _matrix(block, f"{name}.up_proj", inner, hidden)
    yield _matrix(block, f"{name}.down_proj", hidden, inner)


def _experts(block: str, hidden: int, experts: int, inner: int) -> Iterator[MatrixShape]:
    yield _matrix(block, "mlp.gate", experts, hidden)
    yield from _several(block, "mlp.experts.gate_up_proj", (experts, 2 * inner, hidden), MatrixSpec((inner, inner)))
    yield from _several(block, "mlp.experts.down_proj", (experts, hidden, inner), MatrixSpec())


def _several(block: str, name: str, shape: tuple[int, ...], spec: MatrixSpec) -> Iterator[MatrixShape]:
    """The matrices of a tensor that is made of several."""
    for matrix, rows, cols in spec.named(f"{block}.{name}", shape):
        yield MatrixShape(matrix, rows, cols, block)


def _matrix(block: str, name: str, rows: int, cols: int) -> MatrixShape:
    return MatrixShape(f"{block}.{name}.weight", rows, cols, block)


_READERS: Mapping[str, Callable[[ModelConfig], Iterator[MatrixShape]]] = {
    "llama": _decoder,
    "mistral": _decoder,
    "qwen2": _decoder,
    "qwen3": _decoder,
    "qwen3_moe": _qwen3_moe,
    "gpt2": _gpt2,
    "deepseek_v3": _deepseek_v3,
    "towers": _towers,
}
