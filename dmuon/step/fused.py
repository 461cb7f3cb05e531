"""Matrices whose owners orthogonalize them before FSDP2 next unshards them: strategy ``"fused"``, FSDP-fused elsewhere.

``step()`` folds gradients into momentum, notes learning rates, and starts the gathers to the owners. Before FSDP2 next
gathers the parameters of a block, for whatever reason, all updates up to the last one of that block are computed, sent
back and applied, in the order of the model, which is the same on all ranks. So do state dicts of optimizer and model,
``flush()`` and the next ``step()`` with all that is left. Whoever reads weights in between sees old ones, and whoever
changes them is told of it, by the versions that torch counts.

Momentum is not folded in backward, as the article that names this way has it: clipping, scaling and accumulation come
after that, and so does the vote of the ranks.

Communication: that of owners, rank-conditional elsewhere; gathers may be under way until the next forward, and keep
what they send and get until then.

Break-even: it gains what ``step()`` would wait for gathers, which data loading, AdamW and the first layers then hide.
A block has few matrices, and batches are those of owners: with all of a batch its first block waits.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from dmuon.model.matrix_spec import Names
from dmuon.platform.torch_private import before_unshard, local_tensor
from dmuon.step.rounds import ExchangedRound, Step, join_norms


class FusedRound(ExchangedRound):
    """Batches of owners whose updates wait."""


class Deferred:
    """Rounds whose updates wait until FSDP2 unshards what they are of, or until somebody asks for all.

    Args:
        rounds: in the order in which they run, whichever is asked for.
        blocks: by ``id`` of the parameter, what FSDP2 unshards it with, and a module of that.

    Raises:
        ValueError: FSDP2 unshards one with nothing.
    """

    def __init__(self, rounds: Sequence[FusedRound], blocks: Mapping[int, tuple[Any, nn.Module]], names: Names) -> None:
        self._rounds, self._names = rounds, names
        self._seen: dict[int, tuple[Tensor, int]] = {}  # what waiting updates are of
        self._waiting: dict[int, Iterator[bool]] = {}  # by number of the round
        self._last: dict[int, tuple[Any, int]] = {}  # a block, and the last round that it waits for
        modules: dict[int, nn.Module] = {}
        for number, round_ in enumerate(rounds):
            for param in (param for batch in round_.batches for param in batch.params):
                if id(param) not in blocks:
                    raise ValueError(
                        f"strategy='fused' for {names[id(param)]!r}, which no fully_shard unshards: use 'owner', or "
                        "torch's fully_shard (FSDP2)"
                    )
                block, module = blocks[id(param)]
                self._last[id(block)] = block, number
                modules[id(module)] = module
        for module in modules.values():
            hooks: list[Any] = [module.register_state_dict_pre_hook, module.register_load_state_dict_pre_hook]
            for register in hooks:
                weakref.finalize(self, register(partial(_finish, weakref.ref(self))).remove)

    def begin(self, step: Step) -> None:
        """Fold gradients into momentum, and send that to the owners. Collective."""
        for round_ in self._rounds:
            round_.fold(step)
        join_norms(self._rounds)
        for number, round_ in enumerate(self._rounds):
            stages = round_.run(step)
            if next(stages, None) is not None:
                self._waiting[number] = stages
        self._seen = self._weights(self._waiting)
        for block, last in self._last.values() if self._waiting else ():
            before_unshard(block, self, partial(self.finish, last))

    def finish(self, last: int | None = None) -> None:
        """Apply what waits, up to the round of number ``last``. Collective if anything does.

        Raises:
            RuntimeError: somebody has changed these weights meanwhile. The update decays, and is added to, others.
        """
        due = [number for number in self._waiting if last is None or number <= last]
        if not due:
            return
        for key, (local, version) in self._weights(due).items():
            before, counted = self._seen[key]
            if local is before and version != counted:
                raise RuntimeError(
                    f"{self._names[key]!r} was changed while its update waits for FSDP2 (strategy='fused'): call "
                    "optimizer.flush() before you change weights"
                )
        device = self._rounds[0].batches[0].device.type
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(device, enabled=False):
            started = [self._waiting.pop(number) for number in due]
            for stages in started:
                next(stages)
            for stages in started:
                for _ in stages:
                    pass
        self._seen |= self._weights(due)  # of a stack other matrices may wait

    def _weights(self, numbers: Iterable[int]) -> dict[int, tuple[Tensor, int]]:
        """By ``id``, this rank's parts, and how often torch has seen these or their DTensors change."""
        batches = (batch for number in numbers for batch in self._rounds[number].batches)
        held = [(param, local_tensor(param)) for batch in batches for param in batch.params]
        return {id(param): (local, local._version + param._version) for param, local in held}


def _finish(deferred: weakref.ref[Deferred], *_: object) -> None:
    if (waiting := deferred()) is not None:
        waiting.finish()
