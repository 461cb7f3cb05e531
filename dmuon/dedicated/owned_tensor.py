"""The resting form of an owned matrix: an uneven row-sharded DTensor, whole on its owner and empty elsewhere.

On a mesh of several dimensions its placement is ``Shard(0)`` on each of them. With tensor parallelism a last dimension
follows with the placement of that, and each tensor-parallel rank of the owner holds its part.

The global shape is true, and so is the local tensor: norms, elementwise arithmetic and optimizers can use both. What
redistributes a DTensor, however, assumes even shards, and would return zeros, mix up data or hang. Therefore every
operation outside a list of allowed ones raises before it communicates.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_leaves

from dmuon.comm.norm import answer_norm, check_and_unscale, named_tensor, require_summed
from dmuon.layout.topology import Position
from dmuon.platform.torch_private import (
    Box,
    SavedInBoxes,
    clip_by_lists,
    even_shape,
    local_tensor,
    owned_spec,
    spec_like,
)
from dmuon.step.residency import like_param

_ELEMENTWISE = (
    "abs", "add", "addcdiv", "addcmul", "clamp", "clamp_max", "clamp_min", "div", "exp", "lerp", "log", "masked_fill",
    "maximum", "minimum", "mul", "neg", "pow", "reciprocal", "rsqrt", "sgn", "sign", "sqrt", "sub", "zero", "copy",
    "fill", "eq", "ne", "gt", "ge", "lt", "le", "isnan", "isinf", "logical_and", "logical_not", "logical_or",
)  # fmt: skip
_CREATION = ("clone", "detach", "full_like", "ones_like", "zeros_like")
_NORMS = ("linalg_vector_norm", "norm", "_foreach_norm")
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"  # what GradScaler calls
LOCAL = frozenset(
    [f"{name}{suffix}" for name in _ELEMENTWISE for suffix in ("", "_")]
    + [f"_foreach_{name}{suffix}" for name in _ELEMENTWISE for suffix in ("", "_")]
    + list(_CREATION)
)

# What loading and saving does to every parameter: these go straight to what this rank holds.
_COPY, _DETACH = torch.ops.aten.copy_.default, torch.ops.aten.detach.default
REDUCED_GRAD: Any = Tensor.grad  # the attribute itself, which ``OwnedTensor.grad`` hides: nothing but what was reduced

_REMEDY = (
    "use `with dmuon.summon_full_params(model):` to read or edit whole weights, and to save them, or averages of them, "
    "values of `model.state_dict()` and copies of these, which torch.distributed.checkpoint takes"
)
_IN_FORWARD = "if a forward computes with it there, name its module, or the model, in dedicate_params(…, blocks=[…])"
_FRAMEWORKS = (
    "in Hugging Face's Trainer take dmuon.integrations.transformers.DedicatedTrainer, with accelerate "
    "dmuon.integrations.accelerate.DedicatedAccelerator"
)
_WRAPPER_REMEDY = (
    "DistributedDataParallel is not needed around a dedicated model, whose gradients dmuon averages: "
    f"{_FRAMEWORKS}; pipelines take GPipe, 1F1B or Interleaved1F1B, not zero bubbles, which split backward; "
    "to read whole weights use `with dmuon.summon_full_params(model):`"
)
_CONVERSIONS = ("_to_copy", "empty_like")  # what Module.to(…), .half(), .cuda() and .to_empty(…) call
_CONVERSION_REMEDY = (
    "convert and move the model before dedicate_params, or a copy of it in the values of model.state_dict(), and for "
    f"another dtype in forward and backward pass mp_policy=MixedPrecisionPolicy(param_dtype=…); {_FRAMEWORKS}"
)
_NUMBERS = ("all", "amax", "amin", "any", "max", "mean", "min", "sum")
_NUMBER_REMEDY = f"take norm(), which all ranks have together, and is not finite where an element is not; or {_REMEDY}"
_REMEDIES = {
    **dict.fromkeys(_CONVERSIONS, _CONVERSION_REMEDY),
    **dict.fromkeys(_NUMBERS, _NUMBER_REMEDY),
    "view": _WRAPPER_REMEDY,  # DDP flattens parameters; zero-bubble pipelines find nodes of the graph by it
}


class OwnedTensor(SavedInBoxes, DTensor):
    """A DTensor whose local tensor is all of it on its owner, and empty elsewhere.

    Of global shape ``(m, n)`` it is ``(m, n)`` on the owner and ``(0, n)`` elsewhere. If it is made of several
    matrices, each has an owner, and a local tensor is flat: all that this rank owns, in order.

    Attributes:
        fqn: canonical name of the parameter.
        owners: for each matrix, the position of the rank that holds it, among the data-parallel ones.
    """

    fqn: str
    owners: tuple[Position, ...]
    _keeper: weakref.ref[Any] | None = None  # the runtime of its model, which holds the parameter itself
    allowed: ClassVar[frozenset[str]] = LOCAL  # operations
    kept: ClassVar[tuple[str, ...]] = ("owners",)  # attributes of what lies alike
    keeps: ClassVar[str] = "dmuon keeps"
    remedy: ClassVar[str] = _REMEDY

    @property
    def owner(self) -> Position:
        """Of its only matrix, or the first one."""
        return self.owners[0]

    @property
    def _where(self) -> str:
        ranks = sorted(set(self.owners))
        if len(ranks) == 1:
            return f"whole on rank {ranks[0]}"
        return f"in parts on ranks {', '.join(map(str, ranks))}"

    @property
    def keeper(self) -> Any:
        """The ``Runtime`` that is told before and after an operation writes to the parameter, or to an alias of it.

        ``detach`` makes such. None on gradients, optimizer state and copies, and if nothing is left of the model and
        its optimizers.
        """
        return None if self._keeper is None else self._keeper()

    @keeper.setter
    def keeper(self, keeper: Any) -> None:
        self._keeper = None if keeper is None else weakref.ref(keeper)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DETACH:
            twin = args[0].like(local_tensor(args[0]).detach())
            twin.keeper = args[0].keeper
            return twin
        if func is _COPY and len(args) == 2 and not kwargs and _layout(args[0]) == _layout(args[1]):
            with _told(args[:1]):
                local_tensor(args[0]).copy_(local_tensor(args[1]))
            return args[0]
        name = func.overloadpacket.__name__
        owned = [t for t in tree_leaves((args, kwargs)) if isinstance(t, OwnedTensor)]
        if name in _NORMS:
            return answer_norm(args, kwargs or {}, owned[0].refused)
        if name == _UNSCALE:
            increment_version([local_tensor(grad) for grad in args[0]])  # by which early updates go
            return check_and_unscale(func, *args)
        if name not in owned[0].allowed:
            raise owned[0].refused(str(func), name)
        return _run(func, args, kwargs or {}, owned)

    @property
    def layout_key(self) -> Hashable:
        """Equal for tensors of one shape and mesh whose local parts belong together element by element."""
        return self.owners

    def like(self, local: Tensor, fqn: str | None = None) -> OwnedTensor:
        """Wrap ``local``, which lies as what this rank has of this tensor, and share its storage."""
        like: OwnedTensor = type(self)(local, spec_like(self, local.dtype), requires_grad=False)
        for name in self.kept:
            setattr(like, name, getattr(self, name))
        like.fqn = fqn or self.fqn
        return like

    def refused(self, what: str, operation: str = "") -> RuntimeError:
        """Why ``what`` is not available, and what to do instead of the ``operation``."""
        remedy = _REMEDIES.get(operation, f"{_REMEDY}; {_IN_FORWARD}")
        return RuntimeError(
            f"{what} is not available on {self.fqn!r}: outside the forward and backward of its block, dmuon "
            f"keeps it {self._where} and empty on the others; {remedy}"
        )

    @property
    def grad(self) -> Tensor | None:
        """The reduced gradient; where none is, this rank's own that waits for a backward with synchronization.

        Raises:
            RuntimeError: there are both, of which an edit would reach one.
        """
        grad: Tensor | None = REDUCED_GRAD.__get__(self)
        if self._keeper is None or (keeper := self._keeper()) is None or not keeper.may_wait:
            return grad
        waiting: Tensor | None = keeper.waiting_grad(self)
        if grad is not None and waiting is not None:
            raise RuntimeError(
                f"part of the gradient of {self.fqn!r} is not reduced: a backward inside no_sync() came after one that "
                "averaged; the last backward before step(), or before you read or edit it, must run outside no_sync(), "
                "and optimizer.zero_grad() clears both parts"
            )
        return waiting if grad is None else grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if self._keeper is not None and (keeper := self._keeper()) is not None:
            keeper.drop_waiting(self)
        REDUCED_GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def full_tensor(self, **_: Any) -> Tensor:
        raise self._wrong_data("full_tensor()")

    def redistribute(self, *_: Any, **__: Any) -> DTensor:
        raise self._wrong_data("redistribute()")

    def refuse_writes(self) -> None:
        """Raise if what is written to it would be lost."""

    def _wrong_data(self, call: str) -> RuntimeError:
        return RuntimeError(f"{call} of {self.fqn!r} would return wrong data: it is {self._where}; {_REMEDY}")

    def _laid_otherwise(self, func: Any, other: Tensor) -> RuntimeError:
        return RuntimeError(
            f"{func} mixes {self.fqn!r}, which {self.keeps} {self._where}, with {named_tensor(other)} that is laid out "
            f"otherwise; {self.remedy}"
        )

    def to_local(self, **_: Any) -> Tensor:
        """What this rank owns, of gradients, optimizer state and copies. Of a parameter, what can only be written."""
        if self.keeper is None:
            return local_tensor(self)
        return self.even_shard()

    def even_shard(self) -> EvenShard:
        """What checkpointing may write an even shard to, for which it would take what it reads from ``to_local``."""
        return EvenShard(self, f"to_local() of {self.fqn!r} is not an even shard: it is {self._where}; {self.remedy}")

    def write_even(self, shard: Tensor) -> None:
        """Make the even shards of all ranks the value of this parameter. Collective over the mesh."""
        self.keeper.write_even(self, shard)

    def boxed(self) -> list[tuple[Box, Tensor]]:
        # Nobody would be told of a load, which writes to this memory.
        raise self._wrong_data("saving")

    def share_memory_(self) -> Tensor:
        # Tensor's own method reads a storage, which a wrapper does not have.
        raise RuntimeError(f"parameter {self.fqn!r} is owned by dmuon and cannot move to shared memory; {_REMEDY}")

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if isinstance(value, OwnedTensor) and local_tensor(value).is_set_to(local_tensor(self)):
            return  # `p.data *= 2` sets what it has written to
        # Tensor's own setter would change the wrapper and leave the weights as they are.
        raise RuntimeError(f"the data of {self.fqn!r}, which is owned by dmuon, cannot be replaced; {_REMEDY}")

    def is_contiguous(self, *_: Any, **__: Any) -> bool:
        # FSDP2's fully_shard calls this before anything else on a parameter that it was not told to ignore.
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
        raise RuntimeError(
            f"parameter {self.fqn!r} is owned by dmuon and cannot be pickled: save model.state_dict() by "
            "torch.distributed.checkpoint, or get_model_state_dict(model, options=StateDictOptions("
            "full_state_dict=True)) by torch.save"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        kind = type(self).__name__
        return f"{kind}({self.fqn!r}, shape={tuple(self.shape)}, dtype={self.dtype}, owners={self.owners})"


class EvenShard(Tensor):
    """The even shard that torch asks an owned tensor for. It can only be written, by all ranks together.

    ``StateDictOptions(broadcast_from_rank0=True)`` copies each rank's slice of the whole matrix into the ``to_local()``
    of what the module or the state dict holds. That copy is collective and brings the slices to the owner. Every other
    operation raises, since only the owner has the values.

    Args:
        target: whose mesh and placements give the shape.
        refusal: the message of every other operation.
    """

    target: OwnedTensor
    refusal: str

    @staticmethod
    def __new__(cls, target: OwnedTensor, refusal: str) -> EvenShard:
        shape = even_shape(target.shape, target.device_mesh, target.placements)
        shard: EvenShard = Tensor._make_wrapper_subclass(cls, shape, dtype=target.dtype, device=target.device)
        shard.target, shard.refusal = target, refusal
        return shard

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        shard = args[0]
        if func is not torch.ops.aten.copy_.default or not isinstance(shard, EvenShard):
            raise RuntimeError(next(leaf.refusal for leaf in tree_leaves(args) if isinstance(leaf, EvenShard)))
        shard.target.write_even(args[1])
        return shard

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        # What takes sizes of layers from here, as peft does for adapters that come later, would take those of a shard.
        raise RuntimeError(self.refusal)

    def storage(self) -> Any:
        target: Any = self.target  # which refuses it
        return target.storage()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"EvenShard({self.target!r}, shape={tuple(self.size())})"


def owned_tensor(
    local: Tensor,
    mesh: DeviceMesh,
    shape: torch.Size,
    *,
    fqn: str,
    owners: tuple[Position, ...],
    placements: Sequence[Placement],
) -> OwnedTensor:
    """Wrap ``local``, what this rank owns, and share its storage."""
    spec = owned_spec(mesh, placements, shape, local.dtype)
    tensor: OwnedTensor = OwnedTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    tensor.fqn, tensor.owners = fqn, owners
    return tensor


clip_by_lists(OwnedTensor)


def _run(func: Any, args: Sequence[Any], kwargs: dict[str, Any], owned: Sequence[OwnedTensor]) -> Any:
    """An elementwise operation on tensors, or on lists of them, in which others may stand beside owned ones.

    The parts of the results are the results of the parts. Nothing travels, but numbers that are spread over ranks.

    Raises:
        RuntimeError: tensors that meet are laid out differently, or not summed yet.
    """
    name = func.overloadpacket.__name__
    if "out" in kwargs:  # whose keeper would not hear of it
        raise owned[0].refused(f"{func} with out=")
    of_lists = name.startswith("_foreach")
    # Beside values of a state dict, which can be saved, the result is one, too.
    first = args[0] if of_lists else [next((t for t in owned if type(t) is not OwnedTensor), owned[0])]
    require_summed(first, str(func))
    for argument in (*args, *kwargs.values()):
        others = argument if isinstance(argument, (list, tuple)) else [argument] * len(first)
        for tensor, other in zip(first, others, strict=False):
            if isinstance(other, Tensor) and other.ndim and other is not tensor and _layout(tensor) != _layout(other):
                if not of_lists:
                    raise tensor._laid_otherwise(func, other)
                raise RuntimeError(
                    f"{func} mixes {named_tensor(tensor)} with {named_tensor(other)}, which is laid out otherwise; lay "
                    "both out alike, or do it on whole weights under `with dmuon.summon_full_params(model):`"
                )
    inplace = name.endswith("_")
    written = () if not inplace else args[0] if of_lists else args[:1]
    with _told(written):
        out = func(*map(_parts, args), **{option: _parts(value) for option, value in kwargs.items()})
    if of_lists and inplace:
        # Early updates go by versions, which torch does not count here under a TorchDispatchMode.
        increment_version([local_tensor(tensor) for tensor in written])
    if inplace:
        return None if of_lists else args[0]
    if not of_lists:
        return first[0].like(out) if isinstance(out, Tensor) else out
    pairs = zip(first, out, strict=True)
    return [t.like(local) if isinstance(t, OwnedTensor) else like_param(t, local) for t, local in pairs]


def _layout(tensor: Tensor) -> Hashable:
    """Equal for tensors whose local parts belong together element by element."""
    if not isinstance(tensor, DTensor):
        return None
    return tensor.shape, tensor.device_mesh, tensor.placements, getattr(tensor, "layout_key", None)


def _parts(value: Any) -> Any:
    """What this rank holds of owned tensors, or of all of a list; of another one, the number, wherever that lies."""
    if isinstance(value, (list, tuple)):
        return [local_tensor(item) if isinstance(item, Tensor) else item for item in value]
    if isinstance(value, OwnedTensor):
        return local_tensor(value)
    return value.full_tensor() if isinstance(value, DTensor) else value


@contextmanager
def _told(written: Sequence[Any]) -> Iterator[None]:
    """Inside, what is owned of ``written`` is written to, of which each keeper is told once."""
    owned = [t for t in written if isinstance(t, OwnedTensor)]
    for tensor in owned:
        tensor.refuse_writes()
    keepers = {id(t.keeper): t.keeper for t in owned if t.keeper is not None}.values()
    for keeper in keepers:
        keeper.before_write()
    yield
    for keeper in keepers:  # not where the operation failed, perhaps on this rank alone: generations are alike on all
        keeper.weights_changed()
