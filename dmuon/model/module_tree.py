"""Where the modules of a model hang: from a module up to those that hold it, by a model or by all that live."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator

import torch.nn as nn
from torch import Tensor

Holder = tuple[nn.Module, str]  # a module, and the name under which it holds another one or a parameter

# What stands between a layer and the module that was written to hold it: of compiled, checkpointed and adapted layers.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "base_layer"})
_DEPTH = 4


class ModuleTree:
    """What holds each module; several may, such as a model and a list that a framework keeps of its layers."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._holders: dict[int, list[Holder]] = {}
        for module in modules:
            for name, child in module.__dict__.get("_modules", {}).items():  # none before Module.__init__
                if child is not None:
                    self._holders.setdefault(id(child), []).append((module, name))

    @classmethod
    def of(cls, model: nn.Module) -> ModuleTree:
        return cls(model.modules())

    def above(self, module: nn.Module, name: str) -> list[Holder]:
        """``module`` and what holds it, upwards, each with the path from it to the parameter ``name``.

        Wrappers around layers are left out of paths, and are nobody themselves.
        """
        level = [(module, name)]
        found: list[Holder] = []
        for _ in range(_DEPTH):
            found += level
            level = [
                (holder, f"{attribute}.{path}") for module, path in level for holder, attribute in self._holding(module)
            ]
        return found

    def _holding(self, module: nn.Module) -> Iterator[Holder]:
        for holder, attribute in self._holders.get(id(module), ()):
            if attribute in _WRAPPERS:
                yield from self._holding(holder)
            else:
                yield holder, attribute


def longest_path(holders: Iterable[Holder]) -> str:
    """Of the paths to one parameter."""
    return max((path for _, path in holders), key=lambda path: path.count("."))


def sites_of(parameters: Iterable[Tensor]) -> tuple[ModuleTree, dict[int, tuple[Holder, ...]]]:
    """The modules of parameters that came without a model, found among all modules that live.

    A parameter remembers no module, but a module holds its parameters, and the collector of garbage knows every module.

    Returns:
        The tree of all modules, and by ``id`` of each parameter the modules that hold it under a name; nothing for one
        that no module holds.
    """
    wanted = {id(parameter) for parameter in parameters}
    modules = [module for module in gc.get_objects() if issubclass(type(module), nn.Module)]
    sites: dict[int, list[Holder]] = {}
    for module in modules:
        for name, parameter in module.__dict__.get("_parameters", {}).items():
            if id(parameter) in wanted and parameter is not None:
                sites.setdefault(id(parameter), []).append((module, name))
    return ModuleTree(modules), {key: tuple(found) for key, found in sites.items()}
