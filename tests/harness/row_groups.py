"""Which outputs of a weight a forward keeps apart, by autograd: the oracle of what is fused in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.overrides import TorchFunctionMode

_PRODUCTS = frozenset({
    "mul", "mul_", "__mul__", "__rmul__", "__imul__", "div", "__truediv__", "matmul", "__matmul__", "bmm", "baddbmm",
    "addcmul", "einsum", "scaled_dot_product_attention", "where", "grouped_mm", "_grouped_mm",
})  # fmt: skip


class _Products(TorchFunctionMode):
    """The factors of all products of two things that depend on weights: scores, gates, states."""

    def __init__(self) -> None:
        super().__init__()
        self.factors: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _PRODUCTS:
            given = [*args, *(kwargs or {}).values()]
            flat = [t for item in given for t in (item if isinstance(item, (tuple, list)) else [item])]
            factors = [t for t in flat if isinstance(t, Tensor) and t.requires_grad and not isinstance(t, nn.Parameter)]
            if len(factors) > 1:
                self.factors += factors
        return func(*args, **(kwargs or {}))


def row_groups(
    model: nn.Module, inputs: Mapping[str, Tensor], params: Mapping[str, Tensor], dims: Mapping[str, int]
) -> dict[str, list[list[int]]]:
    """The outputs of each of ``params``, along its dimension ``dims``, grouped by the factors that depend on them.

    Outputs of one projection go into the same products. Those of queries and of keys, of a gate and of what it gates
    meet as two factors of one, and so lie in different groups, however they lie in memory.
    """
    with _Products() as products:
        model(**inputs)
    generator = torch.Generator().manual_seed(0)
    touched: dict[str, list[tuple[bool, ...]]] = {name: [] for name in params}
    for factor in products.factors:
        direction = torch.randn(factor.shape, generator=generator, dtype=factor.dtype)
        grads = torch.autograd.grad(factor, list(params.values()), direction, retain_graph=True, allow_unused=True)
        for (name, param), grad in zip(params.items(), grads, strict=True):
            length = param.shape[dims[name]]
            if grad is None:
                touched[name].append((False,) * length)
            else:
                size = grad.movedim(dims[name], 0).reshape(length, -1).abs().amax(1)
                touched[name].append(tuple((size > 0).tolist()))
    groups: dict[str, list[list[int]]] = {}
    for name, rows in touched.items():
        by_factors: dict[tuple[bool, ...], list[int]] = {}
        for index, factors in enumerate(zip(*rows, strict=True)):
            by_factors.setdefault(factors, []).append(index)
        groups[name] = sorted(by_factors.values())
    return groups
