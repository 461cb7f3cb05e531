"""What a rank knows of its model before it talks to any other, and what of that all ranks must have in common."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from dmuon.dedicated.matrix import holders_of
from dmuon.dedicated.nesting import own_buffers
from dmuon.layout.topology import GlobalRank, Topology
from dmuon.model.blocks import canonical_fqn
from dmuon.model.matrix_spec import MatrixSpec
from dmuon.model.routing import Route
from dmuon.platform.host import HostShare
from dmuon.solver import Matrix

Seat = tuple[HostShare, list[GlobalRank]]  # a process on its host, and the ranks that tensor parallelism splits it over


@dataclass(frozen=True, slots=True)
class Inspected:
    """What a rank knows of its model before it talks to any other.

    Attributes:
        roots: the model; or the modules that are dedicated together, by the prefix of their names.
        whole: the model, or a list of them.
        tensor_mesh: over which tensor parallelism has split matrices, 1-D; None without.
        description: what all ranks must have in common, by name.
        seat: this process on its host, and the global ranks over which tensor parallelism splits its model.
    """

    roots: dict[str, nn.Module]
    whole: nn.Module
    routes: list[Route]
    policy: MixedPrecisionPolicy
    tensor_mesh: DeviceMesh | None
    description: list[tuple[str, str]]
    seat: Seat

    def dtype_of(self, route: Route) -> torch.dtype:
        """The dtype in which the matrix of ``route`` travels and is computed with."""
        return self.policy.param_dtype or route.param.dtype

    def matrices(self) -> list[Matrix]:
        """The matrices that need owners, as the solver takes them."""
        return [
            Matrix(name, m, n, r.block, m * n * self.dtype_of(r).itemsize, _pool(holders))
            for r in self.routes
            if r.block is not None
            for (name, m, n), holders in zip(r.spec.named(r.fqn, r.param.shape), holders_of(r.param), strict=True)
        ]

    def pools(self, topology: Topology) -> list[frozenset[str]] | None:
        """What each rank may own: of a stack that tensor parallelism has cut by its matrices, those that it has.

        None: everything.
        """
        cut = {holders for r in self.routes if r.block is not None for holders in holders_of(r.param)}
        if cut == {()}:
            return None
        return [frozenset(_pool(held) for held in cut if not held or at.t in held) for at in topology.coordinates]


def _pool(holders: Sequence[int]) -> str:
    return f"tensor-parallel ranks {' '.join(map(str, holders))}" if holders else ""


def describe(
    model: nn.Module, taken: Collection[nn.Module], routes: Sequence[Route], options: dict[str, object]
) -> list[tuple[str, str]]:
    """By name, what must be the same on all ranks; parameters come in the order of their collectives."""
    items = [(f"option {name}", str(value)) for name, value in options.items()]
    for r in routes:
        by = "" if r.spec == MatrixSpec() else f" by {r.spec}"
        route = f"Muon{'' if r.block is None else f' in block {r.block}'}{by}" if r.muon else "AdamW"
        frozen = "" if r.param.requires_grad else ", frozen"
        items.append(
            (f"parameter {r.fqn!r}", f"{tuple(r.param.shape)}, {r.param.dtype}, {route}{frozen}{_where(r.param)}")
        )
    for name, buffer in own_buffers(model, taken):
        items.append((f"buffer {canonical_fqn(name)!r}", f"{tuple(buffer.shape)}, {buffer.dtype}{_where(buffer)}"))
    return items


def _where(tensor: Tensor) -> str:
    return ", on the meta device" if tensor.is_meta else ""
