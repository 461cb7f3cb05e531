"""Loggers below ``dmuon``, in whose messages the rank stands that speaks."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

import torch.distributed as dist


class RankLogger(logging.LoggerAdapter):  # type: ignore[type-arg]  # of which Python 3.10 knows no kinds
    """Says first which rank speaks, where there are several; records have it as ``rank`` too.

    A message that nobody wants costs the comparison of a level. No handler is installed: programs decide what is shown.
    """

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        kwargs["extra"] = {**(kwargs.get("extra") or {}), "rank": rank}
        return (msg if world == 1 else f"rank {rank}: {msg}"), kwargs


def logger(name: str) -> RankLogger:
    """The logger of a module, below ``dmuon``.

    At INFO it tells what a user wants to know once, one rank of a group for all of them. At DEBUG it tells what a
    maintainer asks for. What somebody has to act on is a WARNING.
    """
    return RankLogger(logging.getLogger(name))
