"""Hosts that ranks pretend to run on."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from dmuon.platform import host


def on_hosts(rank: int, hosts: str) -> AbstractContextManager[Any]:
    """This rank runs on the host whose name is its letter of ``hosts``."""
    return patch.object(host.socket, "gethostname", lambda: hosts[rank])
