"""Updates that are orthogonalized while backward still runs, and used only if nothing changed until the step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dmuon.kernels import normalized_momentum
from dmuon.platform.streams import PhaseTimer, Stream
from dmuon.platform.torch_private import local_tensor
from dmuon.step.batches import Batch
from dmuon.step.rounds import AloneRound
from dmuon.step.update import Done, fold, kernel_of, numerics_of, orthogonalize, trial_of

_OPTIONS = (
    "momentum", "nesterov", "ns_coefficients", "ns_steps", "eps", "ns_dtype", "orthogonalize", "weight_decay_mode",
)  # fmt: skip


@dataclass(slots=True)
class _Early:
    """An update, and the gradients, momentum and options that it was computed from.

    Attributes:
        grads: by parameter, the gradient and its versions.
        momentum: versions of the momentum.
    """

    ready: tuple[Tensor, Done]
    grads: list[tuple[weakref.ref[Tensor], tuple[int, int]]]
    momentum: list[int]
    options: dict[str, Any]

    def holds(self, group: Mapping[str, Any], batch: Batch) -> bool:
        """Whether gradients and options are what they were."""
        if self.options != _options(group):
            return False
        for param, (grad, version) in zip(batch.params, self.grads, strict=True):
            if param.grad is None or grad() is not param.grad or _version(param.grad) != version:
                return False
        return True


class EarlyUpdates:
    """Starts a batch as soon as the last of its gradients has been reduced, on a stream of its own.

    An early update computes with a copy of the momentum, so nothing changes before ``take``. It is dropped if its
    inputs were changed meanwhile: by clipping, another backward, a load or new options. Version counters and
    identities show that. They do not show edits through ``tensor.data`` of a local tensor.

    Args:
        rounds: of all batches that this rank has whole; they will ask for early updates.
        group_at: the options of a group.
        shown: what the optimizer's state shows of the momentum, by ``id`` of the parameter.
        proven: trials of users' functions that have succeeded.
    """

    def __init__(
        self,
        rounds: Sequence[AloneRound],
        group_at: Callable[[int], Mapping[str, Any]],
        shown: Mapping[int, Tensor],
        proven: Collection[object],
        device: torch.device,
    ) -> None:
        self._group_at = group_at
        self._shown = shown
        self._proven = proven
        self._index = {id(round_.batches[0]): round_.index for round_ in rounds}
        self._batches_of: dict[int, list[Batch]] = {}  # by id of the parameter
        for round_ in rounds:
            round_.early = self.take
            for param in round_.batches[0].params:
                self._batches_of.setdefault(id(param), []).append(round_.batches[0])
        self._landed: dict[int, set[int]] = {}
        self._ready: dict[int, _Early] = {}
        self._side = Stream(device)
        self._timer = PhaseTimer(device)
        self._last = PhaseTimer(device)  # of what came before the last step
        self.taken = 0  # batches of the last step

    def landed(self, params: Sequence[Tensor]) -> None:
        """Gradients of ``params`` have just been reduced."""
        for param in params:
            for batch in self._batches_of.get(id(param), ()):
                landed = self._landed.setdefault(id(batch), set())
                landed.add(id(param))
                if len(landed) == len(batch.params):
                    del self._landed[id(batch)]
                    self._start(batch)

    @torch.no_grad()
    def _start(self, batch: Batch) -> None:
        grads = [p.grad for p in batch.params]
        if any(grad is None for grad in grads) or any(id(p) not in self._shown for p in batch.params):
            return  # of a matrix that was frozen until now, the step shows the momentum
        present = [grad for grad in grads if grad is not None]
        group = self._group_at(self._index[id(batch)])
        if group["weight_decay_mode"] == "l2":
            return  # weights may change until the step, which nothing here would show
        function = group["orthogonalize"]
        if function is not None and trial_of(function, batch) not in self._proven:
            return  # the step tries it: one that fails in backward would leave other ranks waiting in theirs
        momentum = self._momentum_versions(batch)
        parts = [local_tensor(grad) for grad in present]
        with self._side.beside(parts), torch.autocast(batch.device.type, enabled=False):
            numerics, matrices = numerics_of(group, batch.dtype, batch.device), batch.split(parts)
            copy = batch.momentum(0, len(batch.params)).clone(memory_format=torch.contiguous_format)
            with self._timer.phase("momentum"):
                x, norms = kernel_of(group, normalized_momentum)(
                    matrices,
                    copy,
                    beta=group["momentum"],
                    nesterov=group["nesterov"],
                    storage=numerics.storage,
                    eps=group["eps"],
                )
            ready = orthogonalize(numerics, batch, batch.whole[0], x, norms, self._timer)
        seen = [(weakref.ref(g), _version(g)) for g in present]
        self._ready[id(batch)] = _Early(ready, seen, momentum, _options(group))

    def take(self, group: Mapping[str, Any], batch: Batch) -> tuple[Tensor, Done] | None:
        """The update of ``batch`` if its inputs are unchanged; then the gradients go into its momentum."""
        early = self._ready.pop(id(batch), None)
        if early is None or not early.holds(group, batch):
            return None
        fold(group, batch, batch.whole, _average)
        self.taken += 1
        return early.ready

    def _momentum_versions(self, batch: Batch) -> list[int]:
        return [*(m._version for m in batch.momenta), *(self._shown[id(p)]._version for p in batch.params)]

    def join(self) -> None:
        """A step begins: what it queues on the device from now on runs after the early updates."""
        self.taken = 0
        # Now, as batches of one parameter write to one momentum.
        current = {id(batch): batch for of_param in self._batches_of.values() for batch in of_param}
        for key, early in list(self._ready.items()):
            if early.momentum != self._momentum_versions(current[key]):
                del self._ready[key]
        self._timer, self._last = self._last, self._timer
        self._timer.reset()
        self._side.join()

    def seconds(self) -> dict[str, float]:
        """By phase, of the backward before the last step."""
        return {f"{phase} in backward": seconds for phase, seconds in self._last.seconds().items()}

    def forget(self) -> None:
        """Drop updates that were not taken."""
        self._side.join()
        self._timer.reset()
        self._ready.clear()
        self._landed.clear()


def _average(grads: Sequence[Tensor], momentum: Tensor, *, beta: float, nesterov: bool) -> None:
    """What ``momentum_update`` does to the momentum, and nothing else."""
    converted = [grad.to(momentum.dtype) for grad in grads]
    torch._foreach_lerp_(list(momentum.unbind(0)), converted, 1 - beta)


def _version(grad: Tensor) -> tuple[int, int]:
    """Of a DTensor and of its local tensor: each counts the operations that were called on it."""
    return grad._version, local_tensor(grad)._version


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in _OPTIONS}
