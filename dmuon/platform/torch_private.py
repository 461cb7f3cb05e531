"""Every semi-private PyTorch call that dmuon makes, behind one version check."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from itertools import accumulate
from math import prod
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.distributed._composable.replicate import replicate
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._init_utils import HYBRID_SHARDING_STRATEGIES
from torch.distributed.tensor import DTensor, _random
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

_P = ParamSpec("_P")
_T = TypeVar("_T")

_OLDEST = (2, 12)

# Renamed in PyTorch 2.13.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def require_supported_torch() -> None:
    """Raise RuntimeError when the installed PyTorch is older than what dmuon supports."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < _OLDEST:
        raise RuntimeError(
            f"dmuon needs PyTorch >= {_OLDEST[0]}.{_OLDEST[1]}, found {torch.__version__}: upgrade torch"
        )


def owned_spec(mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, dtype: torch.dtype) -> DTensorSpec:
    """Spec of a contiguous tensor on ``mesh``, evenly sharded or not."""
    meta = TensorMeta(shape=shape, stride=contiguous_strides(shape), dtype=dtype)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta)


def spec_like(tensor: DTensor, dtype: torch.dtype) -> DTensorSpec:
    """Spec of a contiguous tensor that lies as ``tensor``, itself contiguous, but has ``dtype``."""
    spec = tensor._spec  # shared where that is possible: to make and verify one costs more than all else of a wrapper
    return spec if tensor.dtype == dtype else owned_spec(spec.mesh, spec.placements, tensor.shape, dtype)


def share_spec(one: DTensor, other: Any) -> bool:
    """Whether ``other`` is a DTensor that was made to lie as ``one``; False if nobody knows without a comparison."""
    return isinstance(other, DTensor) and other._spec is one._spec


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """In elements."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def even_shape(shape: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Size:
    """Shape of this rank's part of a tensor that ``placements`` split evenly."""
    return torch.Size(compute_local_shape_and_global_offset(shape, mesh, placements)[0])


Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets in a whole tensor, and sizes


class SavedInBoxes:
    """A tensor that tells ``torch.distributed.checkpoint`` itself which boxes of the whole this rank has.

    That asks a tensor by these methods before it takes what a rank holds of a DTensor for an even shard. Boxes of all
    ranks make up the whole tensor; nothing is sent to save or load them, on any number of ranks.
    """

    def boxed(self) -> list[tuple[Box, Tensor]]:
        """What this rank has, perhaps nothing: boxes, and the memory of each, which is read and written."""
        raise NotImplementedError

    def __create_write_items__(self, fqn: str, whole: Any) -> list[WriteItem]:
        items = []
        for (offsets, sizes), tensor in self.boxed():
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            data = TensorWriteData(chunk, TensorProperties.create_from_tensor(tensor), whole.size())
            items.append(WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for (offsets, sizes), _ in self.boxed()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(tensor for (offsets, _), tensor in self.boxed() if torch.Size(offsets) == index.offset)


def lies_evenly(tensor: DTensor) -> bool:
    """Whether the local parts of a DTensor are those that its placements say."""
    return not isinstance(tensor, SavedInBoxes)


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank holds of ``tensor``: itself, or a DTensor's local tensor, without autograd and not a view."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def clip_by_lists(kind: type[Tensor]) -> None:
    """Let torch's clipping ask for the norms of lists of ``kind`` at once, as of plain tensors and DTensors."""
    _foreach_utils._foreach_supported_types.append(kind)


def without_torch_function() -> AbstractContextManager[None]:
    """Inside, functions of torch do not ask ``__torch_function__`` of their arguments."""
    disabled: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return disabled


def declared_backend(device_type: str) -> str:
    """What the default group moves tensors of this kind of device with; all of its back ends where it has none."""
    c10d: Any = dist.distributed_c10d
    kind, _ = c10d._world.pg_map[c10d._get_default_group()]
    of_devices: dict[str, str] = c10d.BackendConfig(dist.Backend(kind)).get_device_backend_map()
    return str(of_devices.get(device_type, kind))


def new_named_group(
    ranks: Sequence[int], name: str, backend: str, timeout: timedelta, options: Any, description: str
) -> dist.ProcessGroup:
    """A process group on the store of the default one. Collective over ``ranks``, in this order, and over no others.

    ``dist.new_group(use_local_synchronization=True)`` derives the name, by which the ranks find each other, from how
    many groups each of them has: it waits for ever where ranks have different numbers of groups. A default group that
    is bound to a device (``init_process_group(device_id=…)``) would be split instead, for which all its ranks must
    come, so it is not bound meanwhile.

    Args:
        name: the same on all of ``ranks``, and of no other group.
        backend: as ``init_process_group`` takes it.
    """
    c10d: Any = dist.distributed_c10d
    default = c10d._get_default_group()
    _, store = c10d._world.pg_map[default]
    made: dist.ProcessGroup
    if callable(getattr(default, "new_group", None)):  # back ends in Python make their own
        made = dist.new_group(
            list(ranks), timeout, pg_options=options, use_local_synchronization=True, group_desc=description
        )
        return made
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            list(ranks).index(dist.get_rank()),
            list(ranks),
            dist.Backend(backend),
            store,
            name,
            backend_options=options,
            timeout=timeout,
            group_desc=description,
        )
    finally:
        default.bound_device_id = bound
    c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}
    made = group
    return made


def default_timeout(device_type: str) -> timedelta:
    """Of collectives of the default group, as ``init_process_group`` was told; else what its back end comes with."""
    c10d: Any = dist.distributed_c10d
    default = c10d._get_default_group()
    timeout: timedelta
    with suppress(AttributeError, RuntimeError):  # a back end without such options, or none for this device
        timeout = default._get_backend(torch.device(device_type)).options._timeout
        return timeout
    kind, _ = c10d._world.pg_map[default]
    timeout = c10d._get_default_timeout(dist.Backend(kind))
    return timeout


def in_one_launch(
    group: dist.ProcessGroup, device: torch.device, launches: Sequence[Callable[[], dist.Work | None]]
) -> list[dist.Work | None]:
    """Start asynchronous collectives of one group: on NCCL by one group call, elsewhere one after the other."""
    if len(launches) < 2 or group._get_backend(device).name() != "nccl":
        works = []
        for launch in launches:
            works.append(launch())
        return works
    c10d: Any = dist.distributed_c10d
    try:
        with c10d._coalescing_manager(group, device, async_ops=True) as coalesced:
            for launch in launches:
                launch()
    except BaseException:  # which leaves the group call open, for everything that follows in this process
        with suppress(Exception):
            c10d._world.pg_coalesce_state.pop(group, None)
            group._end_coalescing(device)
        raise
    return list(coalesced.works)


def has_group(group: dist.ProcessGroup) -> bool:
    """Whether ``group`` was not destroyed yet, by itself or with all others."""
    return group in dist.distributed_c10d._world.pg_map


def default_store() -> Any:
    """By which the ranks of the default group have found each other."""
    store: Any = dist.distributed_c10d._get_default_store()
    return store


def share_random_state(mesh: DeviceMesh) -> None:
    """Let DTensors over ``mesh`` draw random numbers on some of its replicas alone. Collective over ``mesh``, 1-D.

    The first random operation on a DTensor would have torch synchronize all ranks, of which some may be elsewhere. The
    state of the first rank of ``mesh`` becomes that of the others. Nothing to do on a CPU.
    """
    if not _random.is_rng_supported_mesh(mesh):
        return
    module = torch.get_device_module(mesh.device_type)
    group = mesh.get_group()
    state = module.get_rng_state().to(mesh.device_type)
    dist.broadcast(state, src=dist.get_process_group_ranks(group)[0], group=group)
    module.set_rng_state(state.cpu())
    if _random._rng_tracker is None:
        _random._rng_tracker = _random.OffsetBasedRNGTracker(mesh, run_state_sync=False)


def managed_by_ddp() -> dict[str, Tensor]:
    """The parameters of the ``DistributedDataParallel`` whose forward runs now, by name; none outside of one."""
    wrapper = nn.parallel.DistributedDataParallel._get_active_ddp_module()
    if wrapper is None:
        return {}
    return {n: p for n, p in wrapper.module.named_parameters() if n not in wrapper.parameters_to_ignore}


def reduced_by_ddp(module: nn.Module) -> list[Tensor]:
    """The parameters whose gradients ``DistributedDataParallel``, or ``replicate``, averages for ``module``.

    DDP's reducer gets those that are trained when the module is wrapped. Its buckets, which come with zeros, are asked
    only if that may not be all. A ``replicate`` before its first forward will take what is trained by then.
    """
    wrapper = _ddp_of(module)
    if wrapper is None:
        replicated = replicate_group(module) is not None
        return [param for param in module.parameters() if param.requires_grad] if replicated else []
    taken: list[Tensor] = [*{id(param): param for param in wrapper._module_parameters}.values()]
    if wrapper.parameters_to_ignore or wrapper._get_ddp_logging_data()["num_parameter_tensors"] != len(taken):
        try:
            buckets = wrapper.reducer._get_zeros_like_grad_buckets()
            taken = [param for bucket in buckets for param in bucket.parameters()]
        except RuntimeError:  # there are none of sparse gradients
            taken = [param for param in taken if param.requires_grad]
    return [*taken, *wrapper._delay_all_reduce_params]


def left_by_ddp(module: nn.Module) -> list[Tensor]:
    """Parameters that :func:`reduced_by_ddp` has not, though nobody told DDP to ignore them."""
    wrapper = _ddp_of(module)
    if wrapper is None:
        return []
    taken, ignored = set(map(id, reduced_by_ddp(module))), wrapper.parameters_to_ignore
    return [p for name, p in wrapper.module.named_parameters() if id(p) not in taken and name not in ignored]


def _ddp_of(module: nn.Module) -> Any:
    """The ``DistributedDataParallel`` that ``module`` is, or that ``replicate`` has made for it; None without."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return module
    if any(base.__module__ == replicate.__module__ for base in type(module).__mro__):
        state: Any = replicate.state(module)
        return getattr(state, "_ddp_weakref", lambda: None)()  # it exists from the first forward on
    return None


def replicate_group(module: nn.Module) -> dist.ProcessGroup | None:
    """Over which ``DistributedDataParallel``, or its composable form ``replicate``, averages gradients; None else."""
    wrapper = _ddp_of(module)
    if wrapper is not None:
        replicas: dist.ProcessGroup = wrapper.process_group
        return replicas
    if not any(base.__module__ == replicate.__module__ for base in type(module).__mro__):
        return None
    state: Any = replicate.state(module)
    mesh, group = state._init_kwargs.get("device_mesh"), state._init_kwargs.get("process_group")
    default: dist.ProcessGroup | None = dist.group.WORLD
    return mesh.get_group() if mesh is not None else group or default


@cache
def ddp_wraps() -> list[None]:
    """One item for each module that ``DistributedDataParallel`` has wrapped since this was first called."""
    wraps: list[None] = []

    def note(module: nn.Module, _name: str, _submodule: nn.Module | None) -> None:
        if isinstance(module, nn.parallel.DistributedDataParallel):
            wraps.append(None)

    nn.modules.module.register_module_module_registration_hook(note)
    return wraps


def takes_uneven_inputs(module: nn.parallel.DistributedDataParallel) -> bool:
    """Whether ``module`` is in a ``Join`` context, in which ranks may leave the loop early."""
    return bool(module._join_config.enable)


def unwrapped_for_ddp(param: Tensor) -> bool:
    """Whether torch's recipe for DDP over tensor parallelism has put a DTensor's local part into its place."""
    return hasattr(param, "_st_info")


def accumulation_hooks(param: Tensor) -> dict[int, Callable[[Tensor], None]]:
    """What ``register_post_accumulate_grad_hook`` has left on ``param``."""
    return param._post_accumulate_grad_hooks or {}


def move_hooks(source: Tensor, target: Tensor) -> None:
    """Give ``target`` the gradient hooks of ``source``; their handles remove them from there."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(source, name)
        if hooks:
            setattr(target, name, hooks)
            setattr(source, name, None)


def flattened_by_fsdp1(param: Tensor) -> bool:
    """Whether ``FullyShardedDataParallel`` has flattened ``param``, or made it of what it flattened."""
    return bool(getattr(param, "_fsdp_flattened", False))


@dataclass(frozen=True, slots=True)
class FlatUnit:
    """The parameters that one module of FSDP1 holds in one flat tensor, cut into shards of ``length``.

    Attributes:
        sharded: otherwise every rank of ``group`` has all of it, and the parameters have their shapes.
        tensor_parallel: parameters are DTensors beside.
        copies: ranks that have the same shard; None where nobody has.
        rows: the ranks of the shards of each copy, where a mesh says that.
        members: of each parameter its shape, where it begins, and all modules that hold it, with its name there; none
            without ``use_orig_params=True``.
    """

    sharded: bool
    tensor_parallel: bool
    group: dist.ProcessGroup
    copies: dist.ProcessGroup | None
    rows: list[list[int]] | None
    length: int
    members: list[tuple[nn.Parameter, tuple[int, ...], int, list[tuple[nn.Module, str]]]]


def flat_unit(module: nn.Module) -> FlatUnit | None:
    """What ``FullyShardedDataParallel`` holds for ``module`` itself, without modules that it has wrapped below."""
    handle: Any = module._handle if isinstance(module, FullyShardedDataParallel) else None
    if handle is None:
        return None
    state: Any = module
    flat, hybrid = handle.flat_param, state.sharding_strategy in HYBRID_SHARDING_STRATEGIES
    mesh = state._device_mesh if hybrid else None
    params = flat._params or ()  # none without use_orig_params=True
    starts = [0, *accumulate(flat._numels_with_padding)]
    begins = [starts[i] for i, is_padding in enumerate(flat._is_padding_mask) if not is_padding]
    sites: dict[int, list[tuple[nn.Module, str]]] = {}
    shared = zip(flat._shared_params or (), flat._shared_param_infos, strict=False)
    for param, (name, holder, *_) in [*zip(params, flat._param_infos, strict=False), *shared]:
        sites.setdefault(id(param), []).append((holder, name))
    members = zip(params, flat._shapes, begins, strict=False)
    return FlatUnit(
        handle.uses_sharded_strategy,
        any(extension is not None for extension in flat._param_extensions),
        handle.process_group,
        state._inter_node_pg if hybrid else None,
        mesh.mesh.tolist() if mesh is not None else None,
        flat._sharded_size.numel(),
        [(param, tuple(shape), begin, sites[id(param)]) for param, shape, begin in members],
    )


def managed_by_fsdp(module: FSDPModule) -> list[Tensor]:
    """All tensors that FSDP2 puts into the places of this module's parameters, shards and whole ones."""
    names = ("sharded_param", "_unsharded_param", "_sharded_post_forward_param")
    places = [place for group in _fsdp_groups(module) for place in group.fsdp_params]
    tensors = [getattr(place, name, None) for place in places for name in names]
    return [tensor for tensor in tensors if tensor is not None]


def _fsdp_groups(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def divide_factor(module: FSDPModule) -> float | None:
    """By what FSDP2 was told to divide sums of gradients of this module; None: by the number of ranks."""
    factors = (group.gradient_divide_factor for group in _fsdp_groups(module))
    return next((factor for factor in factors if factor is not None), None)


def unsharded_together(module: FSDPModule) -> list[tuple[Any, list[Tensor]]]:
    """What FSDP2 gathers at once of the parameters of this module, and the sharded ones of each."""
    return [(group, [place.sharded_param for place in group.fsdp_params]) for group in _fsdp_groups(module)]


def before_unshard(group: Any, who: object, act: Callable[[], None]) -> None:
    """Let ``act``, which changes weights, run once, before FSDP2 next gathers those of ``group``, whoever asks.

    Of several who have matrices in it, such as two optimizers, each acts.
    """
    if "unshard" not in group.__dict__:
        group.unshard = partial(_unshard_behind, {}, group)
    group.unshard.args[0][who] = act


def _unshard_behind(acts: Mapping[object, Callable[[], None]], group: Any, *args: Any, **options: Any) -> None:
    del group.unshard  # FSDP2's own is left
    for act in acts.values():
        act()
    if group.device.type != "cpu":  # FSDP2 lets these streams wait for an optimizer where a root begins only
        current = group.device_handle.current_stream()
        group.comm_ctx.all_gather_copy_in_stream.wait_stream(current)
        group.comm_ctx.all_gather_stream.wait_stream(current)
    group.unshard(*args, **options)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Name of the back end that moves tensors of ``device``, whatever the group was declared with."""
    name: str = group._get_backend(device).name()
    return name


def current_backward() -> int | None:
    """Identity of the backward pass that runs now (nested ones differ), or None outside of one."""
    task: int = torch._C._current_graph_task_id()
    return None if task == -1 else task


# Runs a function when the backward pass that runs now has computed its last gradient.
on_backward_end: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback

SavedTensorHooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]  # pack and unpack

# What a pair of ``torch.autograd.graph.saved_tensors_hooks`` does when it is entered, and when it is left; the
# innermost pair around what this thread computes, or None; why none can be entered, as inside ``torch.func``, or None.
push_saved_tensor_hooks: Callable[..., None] = torch._C._autograd._push_saved_tensors_default_hooks
pop_saved_tensor_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks
saved_tensor_hooks: Callable[[], SavedTensorHooks | None] = partial(
    torch._C._autograd._top_saved_tensors_default_hooks, False
)
saved_tensor_hooks_refusal: Callable[[], str | None] = (
    torch._C._autograd._saved_tensors_hooks_get_disabled_error_message
)

# The same number for all tensors that share a storage, also while it has no memory.
storage_id: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")


def spec_of_dtensor(tensor: Tensor) -> DTensorSpec | None:
    """How a DTensor is laid out; None of any other tensor."""
    return tensor._spec if isinstance(tensor, DTensor) else None


def with_spec(local: Tensor, spec: DTensorSpec) -> Tensor:
    """``local`` as the DTensor of ``spec``, without autograd."""
    return DTensor(local, spec, requires_grad=False)


@cache
def _references_of_graph() -> int:
    """How many references to a parameter in Python its graph counts for, which depends on the version of PyTorch."""
    leaf = torch.zeros((), requires_grad=True)
    without = sys.getrefcount(leaf)
    result = leaf * 1  # keeps the graph
    return sys.getrefcount(leaf) - without + 0 * len(result.shape)


def count_holders(storages: Iterable[torch.UntypedStorage], params: Sequence[Tensor]) -> int:
    """How many hold memory: tensors on ``storages``, and in Python ``params``, which view these.

    Graphs of ``params`` do not count. As a difference the number tells whether anybody has come.
    """
    count = 0
    for storage in storages:
        count += torch._C._storage_Use_Count(storage._cdata)
    listed: Sequence[Any] = params
    for i in range(len(listed)):  # without another reference to what is counted
        count += sys.getrefcount(listed[i]) - (_references_of_graph() if listed[i]._use_count() > 1 else 0)
    return count


# The transformation of ``torch.func`` (``grad``, ``vmap``, ``jvp``) that is running, or None.
current_transformation: Callable[[], object] = torch._C._functorch.peek_interpreter_stack


def outside_compile(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Keep ``function`` out of ``torch.compile``: hooks move storage, which no graph can hold."""
    disabled: Callable[_P, _T] = _disable_dynamo(function)
    return disabled
