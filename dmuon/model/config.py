"""The matrices of a model, read from its ``config.json``, without any memory for its weights."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import torch
import torch.nn as nn

from dmuon.model.routing import route_to_blocks
from dmuon.platform.files import UnreadableFile, read_json
from dmuon.platform.options import is_integer
from dmuon.solver import Matrix


def read_model(path: str | Path) -> list[Matrix]:
    """List every matrix inside the blocks of a model: what Muon owns by default, so no embeddings and no output head.

    Reads Hugging Face ``config.json`` files of the model types llama, mistral, qwen2, qwen3 and gpt2, and ``towers`` (a
    list of transformer stacks under ``"towers"``), with the names and parts that dedication gives to the matrices of
    these models as ``transformers`` 5 builds them. Other model types are built by ``transformers`` on the meta device,
    where it is installed, as the class that ``architectures`` name in the file. Experts are one matrix per expert and
    projection, and fused tensors are listed part by part.

    Args:
        path: the file, or a folder that holds it as ``config.json``.

    Raises:
        ValueError: the file cannot be read or is not JSON, its architecture is unknown, or a field is missing or
            ill-typed; the message names file, field and remedy.
    """
    return matrices_of(ModelConfig.load(path))


def matrices_of(config: ModelConfig) -> list[Matrix]:
    """The matrices of :func:`read_model`, of a file that is read already."""
    kind = config.data.get("model_type")
    names = ", ".join(sorted((*_DECODERS, "gpt2", "towers")))
    if not isinstance(kind, str):
        raise ValueError(f"{config.path}: field 'model_type' is {kind!r}; use one of {names}")
    if kind == "towers":
        return list(_towers(config))
    if kind == "gpt2":
        crosses = config.data.get("add_cross_attention")
        config.check("add_cross_attention", not crosses, "false: what it adds is not listed here", crosses)
        hidden = config.integer("n_embd")
        sizes = {"hidden": hidden, "inner": config.integer("n_inner", 4 * hidden)}
        return list(_stack("transformer.h", config.integer("n_layer"), sizes, _GPT2))
    if kind in _DECODERS:
        sizes = _sizes(replace(config, data={**_DEFAULTS.get(kind, {}), **config.data}))
        return list(_stack("model.layers", config.integer("num_hidden_layers"), sizes, _ATTENTION + _GATED))
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        raise ValueError(
            f"{config.path}: field 'model_type' is {kind!r}; use one of {names}, install transformers, which knows "
            "others, or time its shapes with dmuon-profile --shapes"
        ) from None
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

    def check(self, name: str, holds: bool, what: str, value: object) -> None:
        """Refuse ``value`` of field ``name`` unless it ``holds``: the field must be ``what``."""
        if not holds:
            state = "is missing" if name not in self.data else f"is {value!r}"
            raise ValueError(f"{self.path}: field '{self.prefix}{name}' {state}; set it to {what}")


_EXPERT_COUNTS = ("num_local_experts", "n_routed_experts", "num_experts")


def expert_count(config: ModelConfig) -> int:
    """Routed experts of a block, under the name that this version of ``transformers`` gives them."""
    return config.integer(next((name for name in _EXPERT_COUNTS if config.data.get(name) is not None), "num_experts"))


# -- model types that are read without transformers ------------------------------------------------------------------

_DECODERS = ("llama", "mistral", "qwen2", "qwen3")
_DEFAULTS: dict[str, dict[str, int]] = {  # what transformers takes for a field that a file leaves out
    "mistral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
}

# The matrices of one block: name, rows and columns, by the names of ``_sizes``.
_Table: TypeAlias = tuple[tuple[str, str, str], ...]
_ATTENTION: _Table = (
    ("self_attn.q_proj.weight", "queries", "hidden"),
    ("self_attn.k_proj.weight", "keys", "hidden"),
    ("self_attn.v_proj.weight", "keys", "hidden"),
    ("self_attn.o_proj.weight", "hidden", "queries"),
)
_GATED: _Table = (
    ("mlp.gate_proj.weight", "inner", "hidden"),
    ("mlp.up_proj.weight", "inner", "hidden"),
    ("mlp.down_proj.weight", "hidden", "inner"),
)
_PLAIN: _Table = (("mlp.fc1.weight", "inner", "hidden"), ("mlp.fc2.weight", "hidden", "inner"))
_GPT2: _Table = (  # as Conv1D stores them: (in, out)
    *((f"attn.c_attn.weight[{part}]", "hidden", "hidden") for part in range(3)),
    ("attn.c_proj.weight", "hidden", "hidden"),
    ("mlp.c_fc.weight", "hidden", "inner"),
    ("mlp.c_proj.weight", "inner", "hidden"),
)


def _stack(name: str, layers: int, sizes: Mapping[str, int], table: _Table) -> Iterator[Matrix]:
    """The matrices of ``layers`` alike blocks."""
    for layer in range(layers):
        block = f"{name}.{layer}"
        for matrix, rows, cols in table:
            yield Matrix(f"{block}.{matrix}", sizes[rows], sizes[cols], block)


def _towers(config: ModelConfig) -> Iterator[Matrix]:
    towers, names = config.data.get("towers"), set()
    is_list = isinstance(towers, list) and towers != [] and all(isinstance(item, dict) for item in towers)
    config.check("towers", is_list, "a non-empty list of objects", towers)
    for i, item in enumerate(towers or []):
        tower, name = ModelConfig(config.path, item, f"towers[{i}]."), item.get("name")
        tower.check("name", isinstance(name, str) and name != "", "a non-empty string", name)
        if name in names:
            raise ValueError(f"{config.path}: field '{tower.prefix}name' repeats {name!r}; name each tower once")
        names.add(name)
        table = _ATTENTION + (_GATED if tower.flag("gated_mlp") else _PLAIN)
        yield from _stack(f"{name}.layers", tower.integer("num_hidden_layers"), _sizes(tower), table)


def _sizes(config: ModelConfig) -> dict[str, int]:
    """Sides of the matrices of a block of attention and an MLP."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if config.data.get("head_dim") is None:
        config.check("num_attention_heads", hidden % heads == 0, f"a divisor of {hidden}, or add head_dim", heads)
    width = config.integer("head_dim", hidden // heads)
    keys = config.integer("num_key_value_heads", heads) * width
    return {"hidden": hidden, "inner": config.integer("intermediate_size"), "queries": heads * width, "keys": keys}


# -- all others, by transformers --------------------------------------------------------------------------------------

# What would fetch code or weights, or ask for packages and dtypes that shapes do not depend on.
_LEFT_OUT = frozenset({
    "model_type", "auto_map", "_name_or_path", "quantization_config", "torch_dtype", "dtype", "transformers_version",
    "attn_implementation", "_attn_implementation", "use_pretrained_backbone",
})  # fmt: skip
_MAX_MESSAGE = 300  # transformers answers an unknown name with all that it knows


def read_with_transformers(transformers: ModuleType, path: Path, config: Mapping[str, Any]) -> list[Matrix]:
    """List what :func:`dmuon.model.routing.route_to_blocks` gives to Muon in the model that ``config`` describes.

    The model is built on the meta device.

    Args:
        path: the file that ``config`` is from, for messages.
        config: a Hugging Face configuration with a ``model_type``.

    Raises:
        ValueError: ``transformers`` does not know or cannot build the model, or Muon would take none of its
            parameters or refuse one; names file and remedy.
    """
    kind = config["model_type"]
    try:
        with _offline(), torch.device("meta"):
            model = _build(transformers, kind, {k: v for k, v in config.items() if k not in _LEFT_OUT})
    except Exception as error:  # whatever a third party's model raises, the file is what the user can change
        version = getattr(transformers, "__version__", "of unknown version")
        told = f"{type(error).__name__}: {' '.join(str(error).split())}"
        told = told if len(told) <= _MAX_MESSAGE else f"{told[:_MAX_MESSAGE]}…"
        raise ValueError(
            f"{path}: transformers {version} cannot build model_type {kind!r} from these fields ({told}); "
            "correct them, install a transformers that can, or time its shapes with dmuon-profile --shapes"
        ) from error
    try:
        routes = route_to_blocks(model)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; or time the shapes themselves with dmuon-profile --shapes") from error
    return [
        Matrix(name, rows, cols, route.block)
        for route in routes
        if route.block is not None
        for name, rows, cols in route.spec.named(route.fqn, route.param.shape)
    ]


def _build(transformers: ModuleType, kind: str, fields: dict[str, Any]) -> nn.Module:
    config = transformers.AutoConfig.for_model(kind, **fields)
    named: list[Any] = [getattr(transformers, str(name), None) for name in fields.get("architectures") or ()]
    makers = [cls._from_config for cls in named if getattr(cls, "config_class", None) is type(config)][:1]
    if not makers:
        # A language model first, since only it declares its output head, but not one that is a part of the model.
        kinds = ["AutoModelForCausalLM", "AutoModel"]
        if getattr(config, "is_encoder_decoder", False):
            kinds[:1] = ["AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq"]
        elif getattr(config, "sub_configs", None):
            kinds.insert(0, "AutoModelForMultimodalLM")
        makers = [getattr(transformers, name).from_config for name in kinds if hasattr(transformers, name)]
    for make in makers[:-1]:
        with contextlib.suppress(ValueError):
            return _made(make, config)
    return _made(makers[-1], config)


def _made(make: Callable[..., Any], config: Any) -> nn.Module:
    model = make(config, attn_implementation="eager")
    assert isinstance(model, nn.Module)
    return model


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Forbid Hugging Face downloads for a while: some models fetch a pretrained part when they are built."""
    try:
        constants: Any = importlib.import_module("huggingface_hub.constants")
    except ImportError:
        yield
        return
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
