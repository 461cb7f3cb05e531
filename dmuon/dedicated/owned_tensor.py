"""The resting form of an owned matrix: an uneven row-sharded DTensor, whole on its owner and empty elsewhere.

On a mesh of several dimensions it says ``Shard(0)`` on each of them; a last one of tensor parallelism keeps its
placement, and the owner's part then lies on every tensor-parallel rank.

Such a tensor has a true global shape and a local tensor that norms, elementwise arithmetic and optimizers can use
exactly. Anything that redistributes it would assume even shards and silently return zeros, partial data or hang, so
every operation outside an allow-list raises before it communicates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_flatten, tree_unflatten

from dmuon.dedicated.even_shard import EvenShard
from dmuon.layout.ranks import Position
from dmuon.platform.torch_private import local_tensor, owned_spec

if TYPE_CHECKING:
    from dmuon.dedicated.runtime import Runtime

__all__ = ["OwnedTensor", "owned_tensor"]

_ELEMENTWISE = (
    "abs", "add", "addcdiv", "addcmul", "clamp", "clamp_max", "clamp_min", "div", "exp", "lerp", "log", "maximum",
    "minimum", "mul", "neg", "pow", "reciprocal", "rsqrt", "sign", "sqrt", "sub", "zero", "copy", "fill",
)  # fmt: skip
_CREATION = ("clone", "detach", "full_like", "ones_like", "zeros_like")
_NORMS = ("linalg_vector_norm", "norm", "_foreach_norm")
_LOCAL = frozenset(
    [f"{name}{suffix}" for name in _ELEMENTWISE for suffix in ("", "_")]
    + [f"_foreach_{name}{suffix}" for name in _ELEMENTWISE for suffix in ("", "_")]
    + list(_CREATION)
)

_REMEDY = (
    "use `with dmuon.summon_full_params(model):` to read or edit whole weights, `model.state_dict()` or "
    "torch.distributed.checkpoint to save them"
)
_WRAPPER_REMEDY = (
    f"{_REMEDY}; DistributedDataParallel is not needed around a dedicated model: dmuon averages all gradients over the "
    "mesh"
)
_CONVERSIONS = ("_to_copy", "empty_like")  # what Module.to(…), .half(), .cuda() and .to_empty(…) call
_CONVERSION_REMEDY = (
    "convert and move the model before dedicate_params, which takes it to the mesh's device; for another dtype in "
    "forward and backward pass mp_policy=MixedPrecisionPolicy(param_dtype=…)"
)
_REMEDIES = {**dict.fromkeys(_CONVERSIONS, _CONVERSION_REMEDY), "view": _WRAPPER_REMEDY}  # DDP flattens parameters


class OwnedTensor(DTensor):
    """A DTensor of global shape ``(m, n)`` whose local tensor is ``(m, n)`` on ``owner`` and ``(0, n)`` elsewhere.

    Attributes:
        fqn: canonical name of the parameter.
        owner: position of the rank that holds it, among the data-parallel ones.
        runtime: moves the weights; told when an operation writes to a parameter or an alias of one, so that
            published copies are renewed. None on gradients, optimizer state and copies.
    """

    fqn: str
    owner: Position
    runtime: Runtime | None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        flat, spec = tree_flatten((list(args), kwargs or {}))
        owned = [t for t in flat if isinstance(t, OwnedTensor)]
        if name in _NORMS:
            _check_norm(name, args, kwargs or {}, owned[0])
        elif name not in _LOCAL:
            raise RuntimeError(
                f"{func} is not available on {owned[0].fqn!r}: outside the forward and backward of its block, dmuon "
                f"keeps it whole on rank {owned[0].owner} and empty on the others; "
                f"{_REMEDIES.get(name, _REMEDY)}"
            )
        twins: dict[int, OwnedTensor] = {}
        plain = []
        for leaf in flat:
            if isinstance(leaf, OwnedTensor):
                twin = DTensor(leaf._local_tensor, leaf._spec, requires_grad=False)
                twins[id(twin)] = leaf
                leaf = twin
            plain.append(leaf)
        if name in _LOCAL:
            _check_same_owner(func, flat, owned)
        plain_args, plain_kwargs = tree_unflatten(plain, spec)
        if name == "detach":
            return _like(owned[0], owned[0]._local_tensor.detach(), runtime=owned[0].runtime)
        out = func(*plain_args, **plain_kwargs)
        if name.endswith("_"):
            _notify(args[0])
        if name in _NORMS:
            return out
        return _rewrap(out, twins, owned)

    def full_tensor(self, **_: Any) -> Tensor:
        raise RuntimeError(
            f"full_tensor() of {self.fqn!r} would return wrong data: it is whole on rank {self.owner}; {_REMEDY}"
        )

    def redistribute(self, *_: Any, **__: Any) -> DTensor:
        raise RuntimeError(
            f"redistribute() of {self.fqn!r} would return wrong data: it is whole on rank {self.owner}; {_REMEDY}"
        )

    def to_local(self, **_: Any) -> Tensor:
        # Checkpointing reads shards through this, and would take them for even ones; it may write them.
        refusal = f"to_local() of {self.fqn!r} is not an even shard: it is whole on rank {self.owner}; {_REMEDY}"
        if self.runtime is None:
            raise RuntimeError(refusal)
        return EvenShard(self, self.runtime.write_even, refusal)

    def share_memory_(self) -> Tensor:
        # Tensor's own reads the storage that a wrapper has not got.
        raise RuntimeError(f"parameter {self.fqn!r} is owned by dmuon and cannot move to shared memory; {_REMEDY}")

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        # Tensor's own would change the wrapper and leave the weights as they are.
        raise RuntimeError(f"the data of {self.fqn!r}, which is owned by dmuon, cannot be replaced; {_REMEDY}")

    def is_contiguous(self, *_: Any, **__: Any) -> bool:
        # The first thing that FSDP2's fully_shard asks of a parameter that was not ignored.
        raise TypeError(
            f"parameter {self.fqn!r} is owned by dmuon and cannot be sharded or laid out again; call "
            "dmuon.fully_shard instead of torch's fully_shard (it fills in ignored_params), or pass "
            "ignored_params=dmuon.owned_parameters(model) to every call"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise RuntimeError(
            f"parameter {self.fqn!r} is owned by dmuon and cannot be copied: copy the model before dedicate_params, or "
            "load its state_dict() into a fresh model"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(f"parameter {self.fqn!r} is owned by dmuon and cannot be pickled: save model.state_dict()")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OwnedTensor({self.fqn!r}, shape={tuple(self.shape)}, dtype={self.dtype}, owner={self.owner})"


def owned_tensor(
    local: Tensor,
    mesh: DeviceMesh,
    shape: torch.Size,
    *,
    fqn: str,
    owner: Position,
    placements: Sequence[Placement] | None = None,
    runtime: Runtime | None = None,
) -> OwnedTensor:
    """Wrap ``local`` (``shape`` on the owner, ``(0, n)`` elsewhere); shares its storage.

    Args:
        placements: on each dimension of ``mesh``; ``None`` is ``Shard(0)``.
    """
    spec = owned_spec(mesh, placements or (Shard(0),) * mesh.ndim, shape, local.dtype)
    tensor: OwnedTensor = OwnedTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    tensor.fqn, tensor.owner, tensor.runtime = fqn, owner, runtime
    return tensor


def _like(source: OwnedTensor, local: Tensor, runtime: Runtime | None = None) -> OwnedTensor:
    return owned_tensor(
        local,
        source.device_mesh,
        source.shape,
        fqn=source.fqn,
        owner=source.owner,
        placements=source.placements,
        runtime=runtime,
    )


def _rewrap(out: Any, twins: dict[int, OwnedTensor], owned: list[OwnedTensor]) -> Any:
    """Give back the argument that an in-place operation returned; wrap new results with their argument's owner."""
    if isinstance(out, (list, tuple)):
        # A foreach result stands for the list's own element: elements may have different owners.
        sources = owned if len(owned) >= len(out) else owned[:1] * len(out)
        return type(out)(_rewrap(o, twins, [s]) for o, s in zip(out, sources, strict=False))
    if not isinstance(out, DTensor):
        return out
    if id(out) in twins:
        return twins[id(out)]
    return _like(owned[0], local_tensor(out)) if out.shape == owned[0].shape else out


def _check_same_owner(func: Any, flat: list[Any], owned: list[OwnedTensor]) -> None:
    """Elementwise work on local tensors is exact only between tensors that live on the same rank, or with scalars."""
    by_shape = {(t.shape, t.owner) for t in owned}
    for leaf in flat:
        if not isinstance(leaf, Tensor) or isinstance(leaf, OwnedTensor) or leaf.ndim == 0:
            continue
        if "foreach" in func.overloadpacket.__name__ and isinstance(leaf, DTensor):
            continue  # another element of the list, with arguments of its own
        raise RuntimeError(
            f"{func} mixes {owned[0].fqn!r}, which dmuon keeps whole on rank {owned[0].owner}, with a tensor of shape "
            f"{tuple(leaf.shape)} that is laid out otherwise; {_REMEDY}"
        )
    if "foreach" not in func.overloadpacket.__name__ and len(by_shape) > 1:
        names = ", ".join(repr(t.fqn) for t in owned)
        raise RuntimeError(f"{func} mixes {names}, which have different owners or shapes; {_REMEDY}")


def _check_norm(name: str, args: Sequence[Any], kwargs: dict[str, Any], tensor: OwnedTensor) -> None:
    order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
    order = 2.0 if order is None else float(order)
    if not 0.0 < order < math.inf:
        raise RuntimeError(
            f"{name} of order {order} is not defined on the empty shards of {tensor.fqn!r}; dmuon.clip_grad_norm_ "
            "computes it exactly"
        )
    dims = args[2] if len(args) > 2 else kwargs.get("dim")
    if name != "_foreach_norm" and dims not in (None, [], [0, 1]):
        raise RuntimeError(f"{name} over dim={dims} of {tensor.fqn!r} is not available; {_REMEDY}")


def _notify(target: Any) -> None:
    for tensor in target if isinstance(target, (list, tuple)) else (target,):
        if isinstance(tensor, OwnedTensor) and tensor.runtime is not None:
            tensor.runtime.weights_changed()
