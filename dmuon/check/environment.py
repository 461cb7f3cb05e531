"""Where the check runs, and what would hurt there."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from dmuon.check.report import Board, Status
from dmuon.planning.cost_lookup import cached_entries
from dmuon.planning.device_key import NsOptions, device_key
from dmuon.platform.host import HostShare


@dataclass(frozen=True, slots=True)
class Machine:
    """One rank's software and device.

    Attributes:
        unit: tells devices of one host apart; empty for CPUs.
        cached: measured costs of the device would be found.
    """

    torch_version: str
    dmuon_version: str
    backend: str
    device: str
    unit: str
    place: HostShare
    cached: bool

    @classmethod
    def here(cls, device: torch.device, version: str) -> Machine:
        """This process, which computes on ``device``; ``version`` is dmuon's."""
        key = device_key(device, NsOptions())
        backend, unit = "gloo", ""
        if device.type == "cuda":
            backend = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
            unit = str(torch.cuda.get_device_properties(device).uuid)
        return cls(
            torch.__version__, version, backend, key.device, unit, HostShare.here(), bool(cached_entries(key)[0])
        )


def describe(board: Board, machines: Sequence[Machine]) -> int:
    """Lines about ranks, devices and versions, and warnings; returns the number of hosts."""
    hosts = Counter(m.place.host for m in machines)
    first = machines[0]
    where = f"{len(machines)} ranks" if len(machines) > 1 else "1 rank"
    devices = ", ".join(f"{n} × {name}" for name, n in Counter(m.device for m in machines).items())
    spread = f"{len(hosts)} host{'s' if len(hosts) > 1 else ''}"

    def say(status: Status, text: str) -> None:
        board.say(status, "environment", where, text)

    say("info", f"torch {first.torch_version}, dmuon {first.dmuon_version}, {first.backend}, {spread}, {devices}")
    for fault in _differences(machines):
        say("fail", fault)
    for host in hosts:
        here = [m.place for m in machines if m.place.host == host]
        threads, cpus = sum(p.threads for p in here), len(frozenset().union(*(p.cpus for p in here)))
        if threads > cpus:
            fitting = cpus // len(here)
            advice = f"set OMP_NUM_THREADS={fitting}" if fitting else "start fewer ranks there"
            say("warn", f"{len(here)} ranks on host {host} compute with {threads} threads on {cpus} CPUs; {advice}")
    if importlib.util.find_spec("pulp") is None:
        say("warn", "no solver: plans are heuristic; pip install pulp")
    if not all(m.cached for m in machines):
        name = next(m.device for m in machines if not m.cached)
        measured = "dedicate_params measures for up to ten seconds; run dmuon-profile MODEL"
        say("warn", f"no measured costs of {name}: {measured}")
    return len(hosts)


def _differences(machines: Sequence[Machine]) -> Iterator[str]:
    """What must be alike on all ranks and is not, and devices that several ranks share."""
    for name in ("torch_version", "dmuon_version", "backend"):
        found = {getattr(m, name): rank for rank, m in reversed(list(enumerate(machines)))}
        if len(found) > 1:
            text = ", ".join(f"{value} on rank {rank}" for value, rank in found.items())
            yield f"ranks differ in {name.replace('_', ' ')}: {text}; install the same everywhere"
    units = Counter((m.place.host, m.unit) for m in machines if m.unit)
    for (host, _), count in units.items():
        if count > 1:
            yield f"{count} ranks share one device of host {host}"
