"""Where the symmetric product with a loader can run, and what it is launched with; Gluon is imported there only."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .storage import HALF

_CAPABILITY = 9  # its matrix instruction reads both operands from shared memory, and is no other's


def loader_obstacle(dtype: torch.dtype, capability: tuple[int, int]) -> str | None:
    """Why tiles with a loader cannot be computed in ``dtype``, or ``None``; imports Gluon, to see if it is there."""
    if capability[0] != _CAPABILITY:
        return f"its instructions are those of compute capability {_CAPABILITY}, not {capability[0]}.{capability[1]}"
    if dtype not in HALF:
        return f"its matrix instruction is for half precision, not {dtype}"
    return _gluon_fault()


@lru_cache(maxsize=1)
def _gluon_fault() -> str | None:
    """Why Gluon does not load the kernel, or ``None``."""
    try:
        kernel = loaded_kernel()
        tile = importlib.import_module(f"{__package__}.symmetric_triton_kernel").lower_tile
    except (ImportError, AttributeError) as error:  # it is experimental: what it has changes between versions
        return f"this Triton's Gluon lacks something ({type(error).__name__}: {error})"
    return None if isinstance(kernel, type(tile)) else "Gluon has no interpreter, and Triton's is on"


@lru_cache(maxsize=1)
def loaded_kernel() -> Any:
    """The kernel."""
    from .symmetric_gluon_kernel import loaded_product_kernel

    return loaded_product_kernel


def gluon_descriptor(x: Tensor, shape: Sequence[int], strides: Sequence[int], block: tuple[int, ...]) -> object:
    """``x`` as the kernel takes it; ``block`` is what one load or store moves."""
    make, layout = _descriptors(tuple(block), x.dtype)
    return make(x, list(shape), list(strides), list(block), layout)


@lru_cache(maxsize=64)
def _descriptors(block: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, Any]:
    """The type of descriptors, and the layout of ``block`` in shared memory."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    element = gl.float16 if dtype == torch.float16 else gl.bfloat16
    return TensorDescriptor, gl.NVMMASharedLayout.get_default_for(list(block), element)
