"""What FSDP2 shards beside owned matrices, in a state dict: shards, which nobody may write to a file as if whole."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from functools import cache
from typing import Any

import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from dmuon.platform.log import logger
from dmuon.platform.torch_private import DTensorSpec, local_tensor

_log = logger(__name__)
_COPIES = ("alias", "clone", "detach", "_to_copy")  # and what `.cpu()` and the like call
REMEDY = (
    "on every rank call whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, "
    "cpu_offload=True)) of torch.distributed.checkpoint.state_dict (for an optimizer get_optimizer_state_dict), and "
    "write that on rank 0: model.save_pretrained(folder, state_dict=whole) or torch.save(whole, file); "
    "torch.distributed.checkpoint saves shards. With accelerate take "
    "dmuon.integrations.accelerate.DedicatedAccelerator"
)


def in_parts(fqn: str) -> RuntimeError:
    """What libraries are told that write one file, such as safetensors, and ask a tensor for its memory.

    They would write what this rank has under the name of the whole, or say nothing of what to do.
    """
    return RuntimeError(
        f"{fqn!r} in a state dict of a dedicated model cannot be written to one file as it is, since each rank has "
        f"some of it: {REMEDY}"
    )


@cache
def warn_of_parts() -> None:
    """What every rank writes for itself is whole, what one writes for all is not."""
    _log.warning(
        "a state dict of a dedicated model is pickled, of which each rank has a part: every rank must write and load "
        "its own file, on as many ranks, by torch.load(file, weights_only=False). For one file of all, %s",
        REMEDY,
    )


class StateShard(DTensor):
    """An ordinary even DTensor that refuses to be written to one file. What is pickled is an ordinary DTensor.

    Attributes:
        fqn: name of the parameter.
    """

    fqn: str

    @classmethod
    def of(cls, local: Tensor, spec: DTensorSpec, fqn: str) -> StateShard:
        """Around ``local``, whose memory it shares, which lies as ``spec`` says."""
        shard = cls(local, spec, requires_grad=False)
        shard.fqn = fqn
        return shard

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        flat, spec = tree_flatten((list(args), kwargs or {}))
        twins: dict[int, StateShard] = {}
        plain = []
        fqn = ""
        for leaf in flat:
            if isinstance(leaf, StateShard):
                twin = DTensor(leaf._local_tensor, leaf._spec, requires_grad=False)
                twins[id(twin)], fqn = leaf, leaf.fqn
                leaf = twin
            plain.append(leaf)
        plain_args, plain_kwargs = tree_unflatten(plain, spec)
        out = func(*plain_args, **plain_kwargs)
        if not isinstance(out, DTensor):
            return out
        if id(out) in twins:
            return twins[id(out)]
        return cls.of(local_tensor(out), out._spec, fqn) if func.overloadpacket.__name__ in _COPIES else out

    def storage(self) -> Any:
        raise in_parts(self.fqn)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = twin = self.clone()
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        warn_of_parts()
        return DTensor(local_tensor(self), self._spec, requires_grad=False).__reduce_ex__(protocol)


def is_of_another_rank(value: Tensor, meshes: MutableMapping[int, bool]) -> bool:
    """Whether a DTensor was pickled by another rank: it keeps where that lies in the mesh.

    Args:
        meshes: what was found of the meshes of other values, by ``id``; keep the values as long as this.
    """
    if not isinstance(value, DTensor):
        return False
    mesh = value.device_mesh
    found = meshes.get(id(mesh))
    if found is None:
        own, here = (mesh.mesh == dist.get_rank()).nonzero().tolist(), mesh.get_coordinate()
        found = meshes[id(mesh)] = len(own) == 1 and here is not None and list(here) != own[0]
    return found


def mark_shards(state_dict: dict[str, Any], prefix: str) -> None:
    """Make a :class:`StateShard` of every DTensor below ``prefix`` that is no parameter itself."""
    for key, value in state_dict.items():
        if key.startswith(prefix) and type(value) is DTensor and not isinstance(value, nn.Parameter):
            state_dict[key] = StateShard.of(local_tensor(value), value._spec, key[len(prefix) :])
