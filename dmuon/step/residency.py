"""What a step asks of the places where matrices live, and this rank's parts of tensors that lie as torch says."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from dmuon.comm.process_groups import this_rank
from dmuon.layout.matrices import local_regions
from dmuon.layout.parameters import place_dtensor
from dmuon.layout.topology import position_in
from dmuon.model.matrix_spec import MatrixSpec, Names, spec_of
from dmuon.platform.torch_private import contiguous_strides, lies_evenly, local_tensor, share_spec, spec_like
from dmuon.solver import unmeasured_batch
from dmuon.step.adamuon import ElementMoments
from dmuon.step.batches import Batch, Task, make_batches
from dmuon.step.normuon import RowMoments
from dmuon.step.rounds import AloneRound, Round


@dataclass(frozen=True, slots=True, eq=False)
class Sharing:
    """Matrices of which the ranks of ``group`` have parts or copies.

    Attributes:
        device: of the group's communication.
        matrices: parameter, number in it (None if it is one matrix) and shape; in one order on all these ranks.
    """

    group: dist.ProcessGroup
    device: torch.device
    matrices: Sequence[tuple[Tensor, int | None, tuple[int, int]]]


Options = Callable[[Sequence[int]], list[tuple[str, str]]]  # of some groups, by name
MOMENTUM = "momentum_buffer"  # in the optimizer's state
MATRIX_STATE = (MOMENTUM, RowMoments.key, ElementMoments.key)


class Residency(ABC):
    """Some of an optimizer's matrices, which live in one way.

    It says what this rank takes part in orthogonalizing (:meth:`tasks`), how that travels (:meth:`rounds`), and which
    of it a step updates (:meth:`before_step`). The defaults are those of matrices that lie as torch says.

    Attributes:
        params: the matrices, whether or not this rank has a task of them.
    """

    params: Sequence[Tensor]

    @abstractmethod
    def tasks(self) -> list[Task]:
        """What this rank orthogonalizes, and what it has parts of."""

    @abstractmethod
    def rounds(self, batches: Sequence[Sequence[Batch]]) -> list[Round]:
        """The order of a step. Rounds with collectives come in one order on all ranks that share them.

        Args:
            batches: made of :meth:`tasks`, for each group of the optimizer.
        """

    def compare(self, options: Options, groups: Sequence[Sequence[Tensor]], names: Names) -> None:
        """Let ranks that share parameters compare who is in which group, and its options, with votes that they send.

        Args:
            options: a method, which is asked before every vote as long as its object lives.
        """

    # -- a step ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def before_step(self, changed: bool, fault: Exception | None = None) -> set[int] | None:
        """Ids of the parameters to update: some rank has a gradient. None if they lie differently than in the tasks.

        Args:
            changed: this rank's optimizer has other parameters than those that it made its residencies for.
            fault: why this rank cannot take the step; where ranks vote, the others hear of it.

        Raises:
            RuntimeError: weights or gradients are in no state for a step.
        """

    def shared(self) -> list[Sharing]:
        """Which of the matrices ranks have together; those who do come to it in one order."""
        return []

    # -- momentum --------------------------------------------------------------------------------------------------

    def shown(self, param: Tensor, local: Tensor) -> Tensor:
        """``local``, this rank's momentum of ``param``, as the optimizer's state shows it; shares its storage."""
        return like_param(param, local)

    def shown_moment(self, param: Tensor, local: Tensor, key: str) -> Tensor:
        """``local``, this rank's second moment of the updates of ``param``, as the optimizer's state shows it.

        It stands for ``param`` in :meth:`shown`, :meth:`saved` and :meth:`part_of` of such moments.

        Args:
            key: of that in the state, which says whether it has one number for each output or for each element.
        """
        if key != RowMoments.key or not isinstance(param, DTensor):
            return like_param(param, local)
        shape = spec_of(param).with_one_input(param.shape)
        placements = placed_with_one_input(spec_of(param), param.ndim, param.placements)
        strides = contiguous_strides(torch.Size(shape))
        return DTensor.from_local(
            local, param.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides
        )

    def saved(self, param: Tensor, momentum: Tensor) -> Tensor:
        """A copy of the momentum of ``param``, as shown, for a state dict. Nothing travels."""
        return momentum.clone()  # a view would save the whole stack

    def part_of(self, param: Tensor, momentum: Tensor, name: str) -> Tensor:
        """This rank's part of the momentum of ``param``. Collective for a DTensor that lies otherwise.

        Args:
            momentum: shaped as ``param``, however it lies, or this rank's part already.
            name: of ``param``, for errors.
        """
        return part_like(param, momentum, name)

    def loading_groups(self) -> list[tuple[dist.ProcessGroup, set[int]]]:
        """Ranks that must load the same kind of value for some parameters, and the ids of these."""
        return []


class Alone(Residency):
    """Matrices that this rank has to itself; and those that are frozen, wherever they lie, which have no tasks."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = list(params)
        self._trained = [param for param in self.params if param.requires_grad]
        self._layouts, _ = layouts_and_gradients(self._trained)
        self._frozen = [param for param in self.params if not param.requires_grad]

    def before_step(self, changed: bool, fault: Exception | None = None) -> set[int] | None:
        for param in self._frozen:
            if param.requires_grad:
                return None
        layouts, present = layouts_and_gradients(self._trained)
        return present if layouts == self._layouts else None

    def tasks(self) -> list[Task]:
        tasks = []
        for position, param in enumerate(self.params):
            local, spec = local_tensor(param), spec_of(param)
            if not local.numel() or not param.requires_grad:
                continue
            regions = local_regions(local.shape, spec)
            for part, region in enumerate(regions):
                m, n = region.shape
                numbers = tuple(range(part, len(regions) * region.count, len(regions)))
                whole = local.ndim == 2 and len(regions) == 1
                size = unmeasured_batch((m, n))
                tasks.append(Task(param, position, (m, n), size, None if whole else region, spec.transposed, numbers))
        return tasks

    def rounds(self, batches: Sequence[Sequence[Batch]]) -> list[Round]:
        return [AloneRound(index, batch) for index, of_group in enumerate(batches) for batch in of_group]


def placed_with_one_input(spec: MatrixSpec, ndim: int, placements: Sequence[Placement]) -> list[Placement]:
    """Placements of what has one number for each output of a tensor: what is cut along inputs has copies."""
    of_outputs = spec.with_one_input((2,) * ndim)  # sizes that tell dimensions apart, also where there is one input
    found: list[Placement] = []
    for one in placements:
        dim = getattr(one, "dim", None)
        found.append(one if dim is None or of_outputs[dim] > 1 else Replicate())
    return found


def layouts_and_gradients(params: Iterable[Tensor]) -> tuple[list[tuple[Any, ...]], set[int]]:
    """How parameters lie, as far as this rank can see without asking, and the ids of those that have a gradient.

    A model may be moved or converted between two steps: what lies otherwise than before is laid out anew.
    """
    layouts: list[tuple[Any, ...]] = []
    present: set[int] = set()
    for param in params:
        local = local_tensor(param)
        spec = (param.device_mesh, param.placements) if isinstance(param, DTensor) else ()
        layouts.append((local.device, local.dtype, local.shape, *spec))
        if param.grad is not None:
            present.add(id(param))
    return layouts, present


def lay_out(groups: Sequence[Mapping[str, Any]], residencies: Iterable[Residency]) -> list[Round]:
    """The rounds of a step of an optimizer with ``groups``, whose batches have momentum of zeros."""
    rounds: list[Round] = []
    for residency in residencies:
        tasks = residency.tasks()
        batches = []
        for group in groups:
            ids = {*map(id, group["params"])}
            of_group = (task for task in tasks if id(task.param) in ids)
            where = group.get("momentum_device")
            device = None if where is None else torch.device(where)
            batches.append(make_batches(of_group, device, group.get("momentum_dtype")))
        rounds += residency.rounds(batches)
    return rounds


def memberships(groups: Sequence[Sequence[Tensor]], names: Names) -> list[tuple[str, str]]:
    """In which group each parameter is, and at which place of it, to be compared by name; and that no other one is.

    What has no name of its own is called by its place, which ranks share that have the same ones.
    """
    found = []
    for number, params in enumerate(filter(None, groups)):  # a rank may have others besides
        for place, param in enumerate(params):
            name = names[id(param)]
            label = f"number {place} of the shared ones in group {number}" if " " in name else repr(name)
            trained = "trained" if param.requires_grad else "frozen"
            found.append((f"parameter {label}", f"{place} of group {number}, {trained}"))
    return [*found, ("digest of the groups' parameters", f"{zlib.crc32(repr(found).encode()):08x}")]


def like_param(param: Tensor, local: Tensor) -> Tensor:
    """``local``, which lies as ``param`` does, as a DTensor if that is one. Shares its storage."""
    if not isinstance(param, DTensor):
        return local
    return DTensor(local, spec_like(param, local.dtype), requires_grad=False)


def needs_gather(param: Tensor, value: Any) -> bool:
    """Whether :func:`part_like` is collective: a DTensor lies otherwise."""
    if not isinstance(value, DTensor) or value.device_mesh.size() == 1:
        return False
    if not isinstance(param, DTensor) or lies_evenly(param) != lies_evenly(value):
        return True
    return (value.device_mesh, value.placements) != (param.device_mesh, param.placements)


def part_like(param: Tensor, value: Tensor, name: str) -> Tensor:
    """What this rank holds of ``value`` if it lies as ``param`` does.

    Collective for a DTensor that lies otherwise, also on ranks that hold nothing of it.

    Args:
        value: a DTensor or plain tensor shaped as ``param``, or this rank's part already.
        name: of ``param``, for errors.
    """
    local = local_tensor(param)
    if isinstance(value, DTensor):
        # By way of no other placements: torch does not convert into strided shards.
        gathered = needs_gather(param, value) or not lies_evenly(value)
        value = value.full_tensor() if gathered else local_tensor(value)
    if value.shape == local.shape:
        return value
    assert isinstance(param, DTensor)  # this rank has all of anything else
    placed = place_dtensor(param, name, this_rank())
    part = value.new_empty(local.shape)
    for block, of_whole in placed.layout.pieces[position_in(placed.ranks, this_rank())].blocks():
        part[block] = value[of_whole]
    return part


def misfit(param: Tensor, local: Tensor | None, value: Any) -> str | None:
    """Why ``value`` cannot be a gradient or state of ``param``, however it lies; None if it can.

    Args:
        local: whose shape this rank's part may have; None if only the whole is given.
    """
    shapes = (param.shape,) if local is None or isinstance(value, DTensor) else (param.shape, local.shape)
    if not isinstance(value, Tensor):
        what = type(value).__name__
    elif value.layout is not torch.strided:
        what = str(value.layout)  # of which some elements have no place
    elif value.shape in shapes and value.is_complex() == param.is_complex():
        return None
    else:
        what = f"{tuple(value.shape)} of {value.dtype}"
    return f"is {what}, not a dense tensor of shape {tuple(param.shape)} for {param.dtype}"


def laid_out(param: Tensor, value: Any, name: str, *, dtype: torch.dtype | None = None) -> Tensor:
    """This rank's part of ``value``, a gradient or moment of ``param``, which has its elements in the same order.

    Kernels that are elementwise walk both, and check neither sizes nor strides. It has no gaps, shares the storage of
    ``value`` where that lies so already, and is a DTensor if ``param`` is one.

    Args:
        name: of ``value``, for errors.
        dtype: of the result; None is the parameter's.

    Raises:
        ValueError: it cannot be the parameter's, or is a DTensor that lies otherwise.
    """
    local = local_tensor(param)
    fault = misfit(param, local, value)
    if fault is not None:
        raise ValueError(f"{name} {fault}")
    if needs_gather(param, value):
        raise ValueError(
            f"{name} is a DTensor with placements {value.placements}, which lies otherwise than its parameter: pass "
            "it to load_state_dict, which gathers it on all ranks"
        )
    part = part_like(param, value.detach(), name)
    strides = torch.empty_like(local, device="meta").stride()
    if (part.device, part.dtype, part.stride()) != (local.device, dtype or local.dtype, strides):
        part = torch.empty_like(local, dtype=dtype).copy_(part)
    return like_param(param, part)


def align_gradients(groups: Iterable[Mapping[str, Any]], names: Names) -> None:
    """Lay gradients out as their parameters: autograd leaves some DTensors Partial, or sharded otherwise.

    Sparse ones, which no module has announced, become dense, and whole ones of sharded parameters are cut.

    Raises:
        ValueError: one cannot be its parameter's. The others are laid out: other ranks may take part in that.
    """
    fault: str | None = None
    for param in chain.from_iterable(map(itemgetter("params"), groups)):
        grad = param.grad
        if grad is None:
            continue
        if isinstance(param, DTensor):
            if share_spec(param, grad):
                continue
        elif type(grad) is Tensor and grad.layout is torch.strided:
            continue
        if grad.layout is torch.sparse_coo:
            param.grad = grad = grad.to_dense()
        local = local_tensor(param)
        unfit = misfit(param, local, grad)
        if isinstance(grad, DTensor) and not (isinstance(param, DTensor) and grad.device_mesh == param.device_mesh):
            unfit = unfit or f"is a DTensor over {grad.device_mesh}, and the parameter is none over these ranks"
        if unfit is not None:
            fault = fault or f"the gradient of {names[id(param)]!r} {unfit}; lay it out as the parameter"
            continue
        if isinstance(grad, DTensor):
            if isinstance(param, DTensor) and grad.placements != param.placements:
                param.grad = grad.redistribute(placements=param.placements)
        elif local.numel() and grad.shape != local.shape:
            param.grad = like_param(param, part_like(param, grad, names[id(param)]))
    if fault is not None:
        raise ValueError(fault)
