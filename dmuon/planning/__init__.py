"""Who owns what: costs that are looked up or measured, and a plan that all ranks agree on."""

from importlib import import_module
from types import ModuleType

_WITH_A_PLAN = ("cost_lookup", "profiler")


def __getattr__(name: str) -> ModuleType:
    """What finds and measures costs is loaded when a plan is made, and not by ``import dmuon``."""
    if name not in _WITH_A_PLAN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")
