"""Sees what a program queues on pretended streams, and tells the clock.

The program runs on the CPU, in turn, and computes what it always does. But dmuon is told that the device has streams,
so it goes the ways that it goes on an accelerator, and each operation that torch dispatches counts as queued on
whichever pretended stream is current then.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any
from unittest import mock

import torch
from harness.forks import load_all
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from dmuon.kernels import streams_of
from dmuon.platform.streams import pinned_like
from dmuon.platform.torch_private import current_backward
from streams import clock
from streams.clock import Block, Clock, Knowledge, Memory, Site

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("dmuon", "kernels")  # folders
# What these do is named by who called them.
PLUMBING = (
    "dmuon/comm/monitor.py",
    "dmuon/comm/context.py",
    "dmuon/comm/process_groups.py",
    "dmuon/platform/torch_private.py",
)
PROGRAM, BACKWARD = "the program", "the backward of the program"
_ALLOCATES = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")  # and queues nothing
_READS_NOTHING = (*_ALLOCATES, "full_like", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like")
_VIEWS = ("_unsafe_view", "_reshape_alias")  # whose schemas do not say so
_HOST_WAITS = ("_local_scalar_dense", "equal", "masked_select", "nonzero", "unique_dim", "_unique2")


class Event:
    """As ``torch.Event``."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.moment: Knowledge = {}  # what has ended once this has come

    def record(self, stream: Stream | None = None) -> None:
        self.moment = (stream or self.module.current).moment

    def synchronize(self) -> None:
        self.module.wait_on_host(self.moment, "Event.synchronize")

    def elapsed_time(self, _end: Event) -> float:
        return 0.0


class Stream:
    """As ``torch.Stream``."""

    def __init__(self, module: Module, name: str) -> None:
        self.module = module
        self.queue = clock.Stream(name)

    @property
    def moment(self) -> Knowledge:
        """What has ended once everything queued so far has."""
        return self.module.clock.moment(self.queue)

    def wait_stream(self, other: Stream) -> None:
        self.module.clock.wait(self.queue, other.moment)

    def wait_event(self, event: Event) -> None:
        self.module.clock.wait(self.queue, event.moment)

    def record_event(self) -> Event:
        event = Event(self.module)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.module.wait_on_host(self.moment, "Stream.synchronize")


class Module:
    """As ``torch.cuda``, of one pretended device.

    Attributes:
        current: the current stream.
        waits: how often the host has waited for the device, by where.
    """

    def __init__(self) -> None:
        self.clock = Clock()
        self.current = Stream(self, "main")
        self.waits: Counter[Site] = Counter()

    def Stream(self, _device: Any = None, priority: int = 0) -> Stream:
        return Stream(self, "beside")

    def Event(self, enable_timing: bool = False) -> Event:
        return Event(self)

    def current_stream(self, _device: Any = None) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def wait_on_host(self, moment: Knowledge, what: str) -> None:
        self.waits[site_of(what)] += 1
        self.clock.wait_on_host(moment)


class Observer(TorchDispatchMode):
    """While it is entered, everything that torch does counts as queued on pretended streams.

    Attributes:
        module: has the streams.
        memory: has the races.
    """

    def __init__(self) -> None:
        super().__init__()
        self.module = Module()
        self.memory = Memory(self.module.clock)
        self.blocks: dict[int, tuple[StorageWeakRef, Block]] = {}  # a weak reference keeps the address from others
        self.on_host: set[int] = set()
        self.is_hidden = False
        self.entered = ExitStack()

    @property
    def queue(self) -> clock.Stream:
        """The current stream, as the clock knows it."""
        return self.module.current.queue

    def __enter__(self) -> Observer:
        stack = self.entered
        stack.enter_context(replaced({streams_of: lambda _device: self.module, pinned_like: self.pinned_like}))
        stack.enter_context(_method(torch.UntypedStorage, "resize_", self.resize))
        stack.enter_context(_method(Tensor, "record_stream", self.record_stream))
        stack.enter_context(_method(Tensor, "tolist", self.tolist))
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.entered.close()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """What is done inside is no operation of the device."""
        before, self.is_hidden = self.is_hidden, True
        try:
            yield
        finally:
            self.is_hidden = before

    # -- operations ------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_hidden or any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # a wrapper: what it does with its parts comes here again
        name = func.overloadpacket.__name__
        if func.is_view or name in _VIEWS:
            return func(*args, **kwargs)
        site = site_of(name)
        out = func(*args, **kwargs)
        foreign = func.namespace == "c10d"  # not by way of ``collectives``, for torch's own purposes
        given: set[int] = set()
        for value, writes in _arguments(func, args, kwargs):
            for tensor in _tensors(value):
                given.add(_id_of(tensor.untyped_storage()))
                if writes or foreign or name not in _READS_NOTHING:
                    self.access(tensor, writes or foreign, site)
                if writes and isinstance(value, (list, tuple)) and not tensor.is_inference():
                    increment_version(tensor)  # which torch does not under a mode, of lists alone
        for tensor in _tensors(out):
            if _id_of(tensor.untyped_storage()) not in given:
                self.block(tensor.untyped_storage(), site)
                if name not in _ALLOCATES:
                    self.access(tensor, True, site)
        if name in _HOST_WAITS:
            self.module.wait_on_host(self.module.current.moment, name)
        return out

    def access(self, tensor: Tensor, writes: bool, site: Site, queue: clock.Stream | None = None) -> None:
        """An operation on ``queue``, by default the current stream, uses ``tensor``."""
        if tensor.device.type != "meta" and tensor.numel():
            block = self.block(tensor.untyped_storage(), None)
            self.memory.access(block, queue or self.queue, *_span(tensor), writes, site)

    def block(self, storage: torch.UntypedStorage, site: Site | None) -> Block:
        """That of ``storage``; allocated now at ``site`` if it is not known, or for ever if there is none."""
        key = _id_of(storage)
        if key not in self.blocks:
            block = Block(None, Site(PROGRAM, "what was there before"))
            if site is not None:
                self.free_expired()
                block = self.memory.allocate(self.queue, storage.nbytes(), site)
            self.blocks[key] = StorageWeakRef(storage), block
        return self.blocks[key][1]

    def free_expired(self) -> None:
        for key in [key for key, (reference, _) in self.blocks.items() if reference.expired()]:
            self.memory.free(self.blocks.pop(key)[1])
            self.on_host.discard(key)

    # -- what torch does without dispatching it --------------------------------------------------------------------

    def resize(self, original: Callable[..., Any], storage: torch.UntypedStorage, size: int) -> Any:
        known = self.blocks.pop(_id_of(storage), None)
        if known is not None:
            self.memory.free(known[1])
        result = original(storage, size)
        if size:
            self.block(storage, site_of("resize_"))
        return result

    def record_stream(self, _original: Callable[..., Any], tensor: Tensor, stream: Stream) -> None:
        self.memory.record(self.block(tensor.untyped_storage(), None), stream.queue)

    def tolist(self, original: Callable[..., Any], tensor: Tensor) -> Any:
        if type(tensor) is Tensor and tensor.device.type != "meta" and not self.is_hidden:
            site = site_of("tolist")
            storage = tensor.untyped_storage()
            if _id_of(storage) in self.on_host:
                self.memory.read_on_host(self.block(storage, None), site)
            else:
                self.access(tensor, False, site)
                self.module.wait_on_host(self.module.current.moment, "tolist")
        return original(tensor)

    def pinned_like(self, values: Tensor) -> Tensor:
        with self.hidden():
            pinned = torch.empty_like(values)
        storage = pinned.untyped_storage()
        self.blocks[_id_of(storage)] = StorageWeakRef(storage), Block(None, site_of("pinned memory"))
        self.on_host.add(_id_of(storage))
        return pinned


# -- where the program is ---------------------------------------------------------------------------------------------


def site_of(what: str) -> Site:
    """The innermost function of dmuon that is running, but for what merely passes on."""
    frame = sys._getframe(1)
    while frame is not None:
        name = _function(frame.f_code)
        if name:
            return Site(name, what)
        frame = frame.f_back  # type: ignore[assignment]
    return Site(PROGRAM if current_backward() is None else BACKWARD, what)


@cache
def _function(code: CodeType) -> str:
    """Class and function of dmuon that ``code`` is of; empty if it is none of dmuon's."""
    path = Path(code.co_filename)
    if not path.is_relative_to(ROOT):
        return ""
    relative = path.relative_to(ROOT)
    if relative.parts[0] not in PRODUCT or str(relative) in PLUMBING:
        return ""
    inside = [(node, name) for node, name in functions_of(relative) if node.lineno <= code.co_firstlineno <= _end(node)]
    decorated = [(n, name) for n, name in functions_of(relative) if code.co_firstlineno in map(_line, n.decorator_list)]
    return next((name for _, name in [*decorated, *inside]), relative.stem)


@cache
def functions_of(path: Path) -> list[tuple[ast.FunctionDef, str]]:
    """The functions of a module, relative to the root, and of its classes, and what they are called."""
    return named_functions(ast.parse((ROOT / path).read_text()))


def named_functions(tree: ast.Module) -> list[tuple[ast.FunctionDef, str]]:
    """As :func:`functions_of`. What is inside of a function has no name of its own."""
    found = [(node, node.name) for node in tree.body if isinstance(node, ast.FunctionDef)]
    for kind in tree.body:
        if isinstance(kind, ast.ClassDef):
            found += [(node, f"{kind.name}.{node.name}") for node in kind.body if isinstance(node, ast.FunctionDef)]
    return found


def _line(node: ast.expr) -> int:
    return node.lineno


def _end(node: ast.FunctionDef) -> int:
    return node.end_lineno or node.lineno


# -- what an operation uses -------------------------------------------------------------------------------------------


@cache
def _roles(func: Any) -> list[tuple[str, bool]]:
    """Name of each argument, and whether the operation writes it."""
    return [(a.name, a.alias_info is not None and a.alias_info.is_write) for a in func._schema.arguments]


def _arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Any, bool]]:
    for position, (name, writes) in enumerate(_roles(func)):
        if position < len(args):
            yield args[position], writes
        elif name in kwargs:
            yield kwargs[name], writes


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.device.type != "meta" and value.layout is torch.strided:
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _id_of(storage: torch.UntypedStorage) -> int:
    """Of what a weak reference refers to, whatever memory it has."""
    return storage._cdata


def _span(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage between its first and its last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset()
    return start * tensor.itemsize, (start + last + 1) * tensor.itemsize


# -- replacing --------------------------------------------------------------------------------------------------------


@contextmanager
def replaced(functions: Mapping[Any, Any]) -> Iterator[None]:
    """Put others into the place of functions, under every name that ``torch.distributed`` and dmuon have for them."""
    load_all()
    by_id = {id(old): new for old, new in functions.items()}
    places = []
    for name, module in list(sys.modules.items()):
        if name == "torch.distributed" or name.partition(".")[0] == "dmuon":
            places += [(module, key, value) for key, value in vars(module).items() if id(value) in by_id]
    for module, key, value in places:
        setattr(module, key, by_id[id(value)])
    try:
        yield
    finally:
        for module, key, value in places:
            setattr(module, key, value)


def _method(kind: type, name: str, replacement: Callable[..., Any]) -> Any:
    """Call ``replacement(original, self, …)`` in place of a method meanwhile."""
    original = getattr(kind, name)
    return mock.patch.object(kind, name, lambda self, *args, **kwargs: replacement(original, self, *args, **kwargs))
