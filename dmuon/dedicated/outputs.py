"""Tensors from which a backward may enter a block: in what it returned, and in what it left on its modules."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import chain, islice
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_flatten

_PLAIN = frozenset([type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size])
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
        self._module = weakref.ref(module)  # which owns its hooks, and so this
        # As the first forward finds them: listing takes longer than looking.
        self._modules: list[weakref.ref[nn.Module]] = []
        self._barren: dict[tuple[int, str], int] = {}  # ids of large attributes without a differentiable tensor

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
        block = self._module()
        if not self._modules and block is not None:
            layers = [m for m in block.modules() if m is block or not type(m).__module__.startswith("torch.nn.")]
            self._modules = [weakref.ref(m) for m in layers]
        for reference in self._modules:
            module = reference()
            if module is None:
                continue
            for name, value in module.__dict__.items():
                if type(value) in _PLAIN or name in _OF_MODULES or name.startswith("_dmuon"):
                    continue
                key = id(module), name
                if self._barren.get(key) == id(value):
                    continue
                found, ended = _walk([value], visited)
                left += found
                if not ended and not found:
                    self._barren[key] = id(value)
        return left


def _walk(items: Iterable[Any], visited: dict[int, Any]) -> tuple[list[Tensor], bool]:
    """The tensors with a graph that ``items`` lead to, and whether everything was looked at.

    Args:
        visited: by ``id``, what needs no second look.
    """
    found: list[Tensor] = []
    waiting = deque(items)
    for _ in range(_LIMIT):
        if not waiting:
            break
        item = waiting.popleft()
        if type(item) in _PLAIN or id(item) in visited:
            continue
        visited[id(item)] = item
        if issubclass(type(item), Tensor) and _has_graph(item):
            found.append(item)
        with suppress(Exception):  # of a class that is no such container after all, or a proxy of nothing
            waiting.extend(islice(_inside(item), _LIMIT))
    return found, not waiting


def _inside(item: Any) -> Iterable[Any]:
    """What ``item`` holds, without running any code of its class unless it is a container."""
    kind: Any = type(item)
    of_kind, slots = _look(kind)
    held: list[Iterable[Any]] = [] if of_kind is None else [of_kind(item)]
    with suppress(AttributeError):
        attributes = object.__getattribute__(item, "__dict__") if of_kind is not _nothing else {}
        held.append([value for value in attributes.values() if type(value) not in _PLAIN])
    for slot in slots:
        with suppress(AttributeError):  # never set
            held.append((slot.__get__(item),))
    return held[0] if len(held) == 1 else chain.from_iterable(held)


@lru_cache(maxsize=4096)
def _look(kind: type) -> tuple[Callable[[Any], Iterable[Any]] | None, tuple[Any, ...]]:
    """How to look into objects of a class, beside their attributes: by a function, and by descriptors of slots."""
    slots: list[Any] = []
    if issubclass(kind, _CLOSED):
        return _nothing, ()
    for base in kind.__mro__[:-1]:
        names = base.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            hidden = name.startswith("__") and not name.endswith("__")
            slots.append(base.__dict__.get(f"_{base.__name__.lstrip('_')}{name}" if hidden else name))
    looks = (look for known, look in _LOOKS.items() if issubclass(kind, known))
    return next(looks, None), tuple(slot for slot in slots if slot is not None)


def _nothing(_item: Any) -> Iterable[Any]:
    return ()


def _of_function(function: FunctionType) -> Iterable[Any]:
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it is empty
            yield cell.cell_contents


_LOOKS: dict[Any, Callable[[Any], Iterable[Any]]] = {
    Mapping: lambda mapping: mapping.values(),
    (list, tuple, set, frozenset, deque): iter,
    FunctionType: _of_function,
    MethodType: lambda method: (method.__self__,),
    functools.partial: lambda bound: (bound.func, bound.args, bound.keywords),
}


def _has_graph(tensor: Tensor) -> bool:
    return tensor.requires_grad and tensor.grad_fn is not None


def _mark(tensor: Tensor) -> bool:
    """Note that a block knows ``tensor``; whether none did."""
    assert tensor.grad_fn is not None
    metadata: Any = tensor.grad_fn.metadata
    known = _SEEN in metadata
    metadata[_SEEN] = True
    return not known
