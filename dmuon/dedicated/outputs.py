"""Tensors from which a backward may enter a block: in what it returned, and in what it left on its modules."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_flatten

_PLAIN = frozenset([type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size])
_CONTAINERS = (list, tuple, set, frozenset, deque)
_CLOSED = (type, ModuleType, nn.Module, nn.Parameter, DeviceMesh, dist.ProcessGroup, torch.Generator)
_OF_MODULES = frozenset(nn.Module().__dict__) - {"_buffers"}  # what every module has; a buffer may have a graph
_LIMIT = 512  # objects that are looked at in one output or attribute
_SEEN = "dmuon"  # in the metadata of an autograd node: some block knows its tensor


class Outputs:
    """Finds the differentiable tensors that a forward of ``module`` made, as far as Python objects lead to them.

    Outputs may be of any class: containers, dataclasses, objects with attributes or slots, functions with what they
    close over. Attributes of the module and of those below it are looked at likewise, except in torch's own layers,
    which leave nothing there. What only a global, or an object that nothing here refers to, holds is not found.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._modules: list[nn.Module] = []  # as the first forward finds them: listing takes longer than looking
        self._barren: dict[tuple[int, str], Any] = {}  # large attributes without any tensor that needs a gradient

    def find(self, output: Any) -> tuple[list[Tensor], list[Tensor]]:
        """Those in ``output``, and those in attributes that no earlier call has found."""
        returned: list[Tensor] = []
        for leaf in tree_flatten(output)[0]:
            if isinstance(leaf, Tensor) and not getattr(leaf, "__dict__", None):
                returned += [leaf] if _has_graph(leaf) else []
            elif type(leaf) not in _PLAIN:
                returned += _walk([leaf], {})[0]
        for tensor in returned:
            _mark(tensor)
        return returned, [tensor for tensor in self._left() if _mark(tensor)]

    def _left(self) -> list[Tensor]:
        left: list[Tensor] = []
        visited: dict[int, Any] = {}
        if not self._modules:
            layers = self._module.modules()
            self._modules = [m for m in layers if m is self._module or not type(m).__module__.startswith("torch.nn.")]
        for module in self._modules:
            for name, value in module.__dict__.items():
                if type(value) in _PLAIN or name in _OF_MODULES or name.startswith("_dmuon"):
                    continue
                key = id(module), name
                if key in self._barren and self._barren[key] is value:
                    continue
                found, ended = _walk([value], visited)
                left += found
                if not ended and not found:
                    self._barren[key] = value
        return left


def _walk(items: Iterable[Any], visited: dict[int, Any]) -> tuple[list[Tensor], bool]:
    """The tensors with a graph that ``items`` lead to, and whether everything was looked at.

    Args:
        visited: by ``id``, what needs no second look.
    """
    found: list[Tensor] = []
    most = len(visited) + _LIMIT
    waiting = deque(items)
    while waiting:
        item = waiting.popleft()
        if type(item) in _PLAIN or id(item) in visited:
            continue
        if len(visited) >= most:
            return found, False
        visited[id(item)] = item
        if isinstance(item, Mapping):
            waiting.extend(item.values())
        elif isinstance(item, _CONTAINERS):
            waiting.extend(item)
        elif isinstance(item, FunctionType):
            waiting.extend(_contents(cell) for cell in item.__closure__ or ())
        elif isinstance(item, MethodType):
            waiting.append(item.__self__)
        elif isinstance(item, functools.partial):
            waiting.extend([item.func, item.args, item.keywords])
        elif not isinstance(item, _CLOSED):
            if isinstance(item, Tensor) and _has_graph(item):
                found.append(item)
            waiting.extend(value for value in _attributes(item) if type(value) not in _PLAIN)
    return found, True


def _has_graph(tensor: Tensor) -> bool:
    return tensor.requires_grad and tensor.grad_fn is not None


def _mark(tensor: Tensor) -> bool:
    """Note that a block knows ``tensor``; whether none did."""
    assert tensor.grad_fn is not None
    metadata: Any = tensor.grad_fn.metadata
    known = _SEEN in metadata
    metadata[_SEEN] = True
    return not known


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _attributes(item: Any) -> list[Any]:
    """The values of its attributes, without running any code of its class."""
    values: list[Any] = []
    with suppress(AttributeError):
        values += object.__getattribute__(item, "__dict__").values()
    for base in type(item).__mro__[:-1]:
        slots = base.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            descriptor = base.__dict__.get(slot)
            try:
                values.append(descriptor.__get__(item) if descriptor is not None else None)
            except AttributeError:  # never set
                continue
    return values
