"""Modules that were dedicated on their own, inside a model that is dedicated after them: they keep all that they hold.

Groups of experts are: these have other owners, and other weights, than what all ranks share.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator

import torch.nn as nn
from torch import Tensor

ATTRIBUTE = "_dmuon_dedication"  # of a module that ``dedicate_params`` was called with

_roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # all of these


def mark(root: nn.Module, dedication: object) -> None:
    """Leave on ``root`` what was made of it."""
    setattr(root, ATTRIBUTE, dedication)
    _roots.add(root)


def living() -> list[nn.Module]:
    """All of these that are left."""
    return list(_roots)


def taken_modules(model: nn.Module) -> set[nn.Module]:
    """The modules in ``model``, which was not dedicated, that belong to what was."""
    return {module for root in model.modules() if ATTRIBUTE in root.__dict__ for module in root.modules()}


def shared_with(model: nn.Module) -> nn.Module | None:
    """A module that lies in what was dedicated in ``model`` before, and outside of it too; None without."""
    outside: set[nn.Module] = set()
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if module not in outside:
            outside.add(module)
            waiting += [child for child in module.children() if ATTRIBUTE not in child.__dict__]
    return next((module for module in taken_modules(model) if module in outside), None)


def holder_of(module: nn.Module) -> nn.Module | None:
    """A dedicated model that has ``module`` in it; None without."""
    return next((root for root in _roots if any(module is one for one in root.modules())), None)


def own_modules(model: nn.Module, taken: Collection[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """As ``named_modules``, without ``taken``."""
    return ((name, module) for name, module in model.named_modules() if module not in taken)


def own_parameters(model: nn.Module, taken: Collection[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """As ``named_parameters``, without those that ``taken`` modules hold."""
    theirs = {id(param) for module in taken for param in module.parameters(recurse=False)}
    return ((name, param) for name, param in model.named_parameters() if id(param) not in theirs)


def own_buffers(model: nn.Module, taken: Collection[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """As ``named_buffers``, without those that ``taken`` modules hold."""
    theirs = {id(buffer) for module in taken for buffer in module.buffers(recurse=False)}
    return ((name, buffer) for name, buffer in model.named_buffers() if id(buffer) not in theirs)
