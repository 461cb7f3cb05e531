"""Where ranks come from: processes forked from one that has imported everything, which takes seconds once."""

from __future__ import annotations

import multiprocessing
import pkgutil
from importlib import import_module

import dmuon

_OTHERS = ("dmuon.tools", "dmuon.integrations")


def modules() -> list[str]:
    """Those of dmuon that a program may load as it trains."""
    names = [module.name for module in pkgutil.walk_packages(dmuon.__path__, "dmuon.")]
    return [name for name in names if not name.startswith(_OTHERS)]


def load_all() -> None:
    """A module that is loaded later would find, and keep, what a test has put into the place of a function."""
    for name in modules():
        import_module(name)


CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "torch",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.debug",
        "torch.distributed.tensor.parallel",
        *modules(),
    ]
)
