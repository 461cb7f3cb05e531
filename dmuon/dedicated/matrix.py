"""One owned matrix at run time: its resting form, the form that modules compute with, and its gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from dmuon.comm.context import Comm
from dmuon.dedicated.owned_tensor import OwnedTensor, owned_tensor
from dmuon.layout.parcels import Parcel
from dmuon.layout.ranks import Position, positions
from dmuon.layout.shards import layout_of
from dmuon.layout.topology import Coordinate
from dmuon.platform.torch_private import local_tensor

__all__ = ["OwnedMatrix", "Sites", "TensorSharding"]

Sites = tuple[tuple[nn.Module, str], ...]


@dataclass(frozen=True, slots=True)
class TensorSharding:
    """How tensor parallelism splits a matrix.

    Attributes:
        mesh: 1-D.
        placement: ``Shard(0)``, ``Shard(1)`` or ``Replicate()``.
        owner: position in ``mesh`` of the rank that orthogonalizes the matrix.
    """

    mesh: DeviceMesh
    placement: Placement
    owner: Position

    def wrap(self, part: Tensor, shape: torch.Size) -> DTensor:
        """The DTensor of global ``shape`` whose part here is ``part``; shares its storage."""
        return DTensor.from_local(part, self.mesh, [self.placement], run_check=False, shape=shape, stride=(shape[1], 1))


@dataclass(slots=True, eq=False)
class OwnedMatrix:
    """One owned matrix.

    Attributes:
        shape: of the whole matrix.
        owner: position of the data-parallel rank that keeps the master.
        at: its coordinate.
        sites: every ``(module, attribute)`` that holds it.
        rest: what the modules hold outside forward and backward; its local tensor is the fp32 master.
        full: what they hold inside; a view of the group's buffer in communication dtype. Created once.
        tensor: how tensor parallelism splits it; masters and buffers then hold this rank's part.
        unreduced: the gradient in ``full`` has not been reduced yet (backward without synchronization).
        partial: what shard-only reductions have brought to this row's source so far, ``local_shape``.
        empty_grad: the gradient on ranks that do not own it; one serves all steps.
        placeholder_grad: stands in ``rest.grad`` meanwhile: whoever clears it has dropped the unreduced part too.
    """

    fqn: str
    shape: torch.Size
    owner: Position
    at: Coordinate
    sites: Sites
    rest: nn.Parameter
    full: nn.Parameter
    tensor: TensorSharding | None = None
    unreduced: bool = False
    partial: Tensor | None = None
    empty_grad: Tensor | None = None
    placeholder_grad: Tensor | None = None
    _untouched: int = 0

    @property
    def master(self) -> Tensor:
        """fp32; on the data-parallel rank ``owner`` ``(m, n)``, or its tensor-parallel part; elsewhere no rows."""
        return local_tensor(self.rest)

    @property
    def local_shape(self) -> torch.Size:
        """``(m, n)`` of what one data-parallel rank computes with."""
        return local_tensor(self.full).shape

    @property
    def parcel(self) -> Parcel | None:
        """Where tensor parallelism has the matrix; None without."""
        if self.tensor is None:
            return None
        size = self.tensor.mesh.size()
        return Parcel(
            1,
            layout_of(self.shape, [size], [self.tensor.placement]),
            positions(size),
            self.tensor.owner,
        )

    def place(self, param: nn.Parameter) -> None:
        """Register ``param`` wherever the modules hold this entry."""
        for module, name in self.sites:
            module._parameters[name] = param

    def full_grad(self) -> Tensor | None:
        """The gradient that backward left, ``local_shape``, not reduced."""
        grad = self.full.grad
        if isinstance(grad, DTensor) and self.tensor is not None:
            if tuple(grad.placements) != (self.tensor.placement,):
                grad = grad.redistribute(placements=[self.tensor.placement])
            return local_tensor(grad)
        return grad

    def drop_unreduced(self) -> None:
        self.full.grad = None
        self.partial = None
        self.unreduced = False
        if self.placeholder_grad is not None and self.rest.grad is self.placeholder_grad:
            self.rest.grad = None
        self.placeholder_grad = None

    def hold(self) -> None:
        """What has come of the gradient so far waits for a backward with synchronization."""
        self.unreduced = True
        if self.rest.grad is None:
            local = self.master
            self.placeholder_grad = self.as_grad(local.new_zeros(()).expand(local.shape))
            self.rest.grad = self.placeholder_grad
            self._untouched = self.placeholder_grad._version

    @property
    def was_dropped(self) -> bool:
        """Whether gradients that wait have been cleared since, by whoever: set to None, or the placeholder to zero."""
        grad = self.rest.grad
        if grad is None:
            return self.unreduced
        return self.unreduced and grad is self.placeholder_grad and grad._version != self._untouched

    def like_rest(self, local: Tensor, name: str) -> OwnedTensor:
        """Wrap ``local``, shaped as the master, in the layout of the resting form."""
        rest = self.rest
        assert isinstance(rest, OwnedTensor)
        return owned_tensor(local, rest.device_mesh, self.shape, fqn=name, owner=self.owner, placements=rest.placements)

    def as_grad(self, local: Tensor) -> OwnedTensor:
        return self.like_rest(local, f"{self.fqn}.grad")

    def set_grad(self, comm: Comm, local: Tensor) -> None:
        """Add ``local``, shaped as the master, to the gradient of the resting parameter."""
        if self.rest.grad is not None and self.rest.grad is not self.placeholder_grad:
            local_tensor(self.rest.grad).add_(local)
        elif self.owner == comm.position:
            self.rest.grad = self.as_grad(local)
        else:
            if self.empty_grad is None:
                self.empty_grad = self.as_grad(local)
            self.rest.grad = self.empty_grad
        self.placeholder_grad = None
