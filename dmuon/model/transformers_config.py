"""The matrices of a model that only ``transformers`` knows: built from its configuration without memory or download."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn as nn

from dmuon.model.blocks import MatrixShape
from dmuon.model.routing import route_to_blocks

# What would fetch code or weights, or ask for packages and dtypes that shapes do not depend on.
_LEFT_OUT = frozenset({
    "model_type", "auto_map", "_name_or_path", "quantization_config", "torch_dtype", "dtype", "transformers_version",
    "attn_implementation", "_attn_implementation", "use_pretrained_backbone",
})  # fmt: skip
_MAX_MESSAGE = 300  # transformers answers an unknown name with all that it knows


def transformers_or_none() -> ModuleType | None:
    """The ``transformers`` package, or ``None`` where it is not installed."""
    try:
        return importlib.import_module("transformers")
    except ImportError:
        return None


def read_with_transformers(transformers: ModuleType, path: Path, config: Mapping[str, Any]) -> list[MatrixShape]:
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
        raise ValueError(
            f"{path}: transformers {version} cannot build model_type {kind!r} from these fields ({_brief(error)}); "
            "correct them, install a transformers that can, or time its shapes with dmuon-profile --shapes"
        ) from error
    try:
        routes = route_to_blocks(model)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; or time the shapes themselves with dmuon-profile --shapes") from error
    return [
        MatrixShape(name, rows, cols, route.block)
        for route in routes
        if route.block is not None
        for name, rows, cols in route.spec.named(route.fqn, route.param.shape)
    ]


def _build(transformers: ModuleType, kind: str, fields: dict[str, Any]) -> nn.Module:
    config = transformers.AutoConfig.for_model(kind, **fields)
    try:  # a language model first, since only it declares its output head
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    except ValueError:
        model = transformers.AutoModel.from_config(config, attn_implementation="eager")
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


def _brief(error: Exception) -> str:
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}…"
