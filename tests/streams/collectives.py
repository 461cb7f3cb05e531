"""Collectives as kernels of their communicator's stream, and the order in which this rank has started them.

What is modelled is NCCL as torch uses it: an asynchronous collective runs on a stream of its communicator, behind what
was queued on the current stream; its work keeps the tensors until somebody waits for it, which makes the current stream
wait and never the host. A blocking collective runs on the current stream. Data moves by gloo, from and to copies: so
gloo keeps no tensor alive, and a result is there when it has been waited for and not before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dmuon.platform.torch_private import backend_of, in_one_launch
from streams import clock
from streams.observer import Observer, replaced, site_of

# Arguments that are read and that are written, with names as in torch 2.11 and in 2.13.
ROLES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "broadcast": ((), ("tensor",)),
    "reduce": ((), ("tensor",)),
    "all_reduce": ((), ("tensor",)),
    "all_gather_single": (("input_tensor",), ("output_tensor",)),
    "all_gather_into_tensor": (("input_tensor",), ("output_tensor",)),
    "reduce_scatter_single": (("input",), ("output",)),
    "reduce_scatter_tensor": (("input",), ("output",)),
    "all_to_all_single": (("input",), ("output",)),
}


@dataclass(frozen=True, slots=True)
class Launched:
    """One collective that a rank has started.

    Attributes:
        communicator: name and ranks of the group.
    """

    communicator: tuple[str, tuple[int, ...]]
    operation: str
    site: str


class Work(dist.Work):
    """An asynchronous collective. It keeps what it uses until somebody waits for it."""

    def __init__(
        self,
        collectives: Collectives,
        works: list[dist.Work],
        moves: list[tuple[Tensor, Tensor]],
        kept: list[Tensor],
        end: clock.Knowledge,
    ) -> None:
        """``moves``: where results belong, and where they are; ``kept``: what the kernel uses."""
        super().__init__()
        self.collectives = collectives
        self.works = works
        self.moves = moves
        self.kept = kept
        self.end = end

    def wait(self, timeout: timedelta | None = None) -> bool:  # type: ignore[override]
        observer = self.collectives.observer
        observer.module.clock.wait(observer.queue, self.end)
        with observer.hidden(), torch.no_grad():
            for work in self.works:
                work.wait(*([] if timeout is None else [timeout]))
            for tensor, copy in self.moves:
                if tensor.untyped_storage().nbytes():  # perhaps freed since
                    tensor.data.copy_(copy)  # as a version counter sees it, nothing
        self.works, self.moves, self.kept = [], [], []
        return True


@dataclass
class Collectives:
    """Replaces the collectives of ``torch.distributed``, and the names that dmuon has for them.

    Attributes:
        nccl: groups say that they are NCCL's, so that transports are chosen as on a GPU.
        journal: what this rank has started, in the order of the host.
    """

    observer: Observer
    nccl: bool = False
    journal: list[Launched] = field(default_factory=list)
    kernels: dict[str, clock.Stream] = field(default_factory=dict)  # by name of the group

    @contextmanager
    def entered(self) -> Iterator[Collectives]:
        originals = {name: getattr(dist, name) for name in ROLES if hasattr(dist, name)}
        table = {original: self.replacement(name, original) for name, original in originals.items()}
        if self.nccl:
            table[backend_of] = lambda _group, _device: "nccl"
            table[in_one_launch] = self.in_one_launch
        with replaced(table):
            yield self

    def in_one_launch(
        self, group: dist.ProcessGroup, _device: torch.device, launches: Sequence[Callable[[], Any]]
    ) -> list[Any]:
        """As NCCL's groups of calls, whose parts run one after the other here."""
        if len(launches) > 1:
            ranks = tuple(dist.get_process_group_ranks(group))
            self.journal.append(
                Launched((group.group_name, ranks), f"{len(launches)} at once", site_of("group").function)
            )
        return [launch() for launch in launches]

    def replacement(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def call(*args: Any, **kwargs: Any) -> Work | None:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return self.start(name, original, bound.arguments)

        return call

    def start(self, name: str, original: Callable[..., Any], arguments: dict[str, Any]) -> Work | None:
        site = site_of(name)
        group = arguments["group"] or dist.group.WORLD
        ranks = tuple(dist.get_process_group_ranks(group))
        self.journal.append(Launched((group.group_name, ranks), name, site.function))
        reads, writes = ROLES[name]
        observer, asynchronous = self.observer, arguments["async_op"]
        queue = observer.queue
        if asynchronous:
            queue = self.kernels.setdefault(group.group_name, clock.Stream(f"kernels of {group.group_desc}"))
            observer.module.clock.wait(queue, observer.module.current.moment)
        copies = dict(arguments)
        moves: list[tuple[Tensor, Tensor]] = []
        kept: list[Tensor] = []
        with observer.hidden(), torch.no_grad():
            for role in (*reads, *writes):
                tensor = arguments[role]
                copies[role] = tensor.clone()
                kept.append(tensor)
                if role in writes and not _is_source(name, arguments, group):
                    moves.append((tensor, copies[role]))
            work = original(**{**copies, "async_op": True})
        for role in (*reads, *writes):
            observer.access(arguments[role], role in writes and not _is_source(name, arguments, group), site, queue)
        works = [] if work is None else [work]
        work = Work(self, works, moves, kept, observer.module.clock.moment(queue))
        if asynchronous:
            return work
        work.wait()
        return None


def _is_source(name: str, arguments: dict[str, Any], group: dist.ProcessGroup) -> bool:
    """Whether this rank only reads what it broadcasts."""
    if name != "broadcast":
        return False
    if arguments["group_src"] is not None:
        return bool(arguments["group_src"] == dist.get_rank(group))
    return bool(arguments["src"] == dist.get_rank())
