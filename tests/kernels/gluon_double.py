"""A double of Gluon on the CPU: runs the kernel with a loader on threads, each asynchronous step as late as it may be.

Gluon has no interpreter. What stands here of it is what the kernel uses: barriers with phases, slots of shared memory,
copies, and products that read their operands only when they are waited for. So a slot that is overwritten too early, or
read too early, gives wrong results, and a barrier that nobody arrives at ends with :class:`Stuck`.

Any one call of the kernel can be left out, by its line: :func:`order_calls` has those that order what runs at once.
"""

from __future__ import annotations

import ast
import operator
import random
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from dmuon.kernels import symmetric_gluon_kernel
from dmuon.kernels import symmetric_triton as triton_symmetric

_SECONDS = 5.0  # that a wait may take
_UNEVEN = 2.0**-12  # relative rounding of a product, other on each side of the diagonal
_INT64 = object()


class Stuck(AssertionError):
    """A barrier was waited for too long."""


class Tile:
    """A tensor in registers."""

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.type = SimpleNamespace(layout=None)

    def to(self, dtype: torch.dtype) -> Tile:
        return Tile(self.data.to(dtype))

    def reshape(self, shape: Sequence[int]) -> Tile:
        return Tile(self.data.reshape(*shape))

    def permute(self, order: Sequence[int]) -> Tile:
        return Tile(self.data.permute(*order))

    def split(self) -> tuple[Tile, Tile]:
        left, right = self.data.unbind(-1)
        return Tile(left), Tile(right)

    def __getitem__(self, index: Any) -> Tile:
        return Tile(self.data[index])


def _of(x: Any) -> Any:
    return x.data if isinstance(x, Tile) else x


def _lift(function: Callable[..., Any]) -> Callable[..., Tile]:
    return lambda *values: Tile(function(*map(_of, values)))


for _name in ("add", "radd", "mul", "rmul", "eq", "ge"):
    setattr(Tile, f"__{_name}__", _lift(getattr(operator, _name.removeprefix("r"))))


class Memory:
    """Shared memory, which starts as NaN. ``written`` are those whose stores no fence has followed."""

    def __init__(self, data: Tensor, written: set[int]) -> None:
        self.data, self.written = data, written

    def index(self, i: int) -> Memory:
        return Memory(self.data[i], self.written)

    def reshape(self, shape: Sequence[int]) -> Memory:
        return Memory(self.data.view(*shape), self.written)

    def permute(self, order: Sequence[int]) -> Memory:
        return Memory(self.data.permute(*order), self.written)

    def load(self, layout: object) -> Tile:
        return Tile(self.data.clone())

    def store(self, value: Tile) -> None:
        self.data.copy_(value.data)
        self.written.add(self.data.data_ptr())


class Barrier:
    """One arrival ends a phase, and the bytes that it said are expected. It holds anything until it is set up."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.phase, self.arrivals, self.bytes = 0, -1, 0

    def begin(self) -> None:
        self.arrivals = 1

    def arrive(self, expected: int = 0, landed: int = 0, count: int = 1) -> None:
        with self.changed:
            self.bytes += expected - landed
            self.arrivals -= count
            if not self.arrivals and not self.bytes:
                self.phase, self.arrivals = self.phase + 1, 1
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.phase & 1 != parity, _SECONDS):
                raise Stuck(f"phase {self.phase} is not over")


class Descriptor:
    """A tensor in global memory."""

    def __init__(self, x: Tensor, shape: Sequence[int], strides: Sequence[int], block: Sequence[int]) -> None:
        self.data = x.as_strided(tuple(shape), tuple(strides))
        self.dtype, self.layout = x.dtype, None
        self.block_type = SimpleNamespace(shape=list(block), nbytes=x.itemsize * block[1] * block[2])

    def region(self, at: Sequence[int]) -> tuple[Tensor, tuple[slice, ...]]:
        """What of the tensor a block ``at`` covers, and where that is in the block."""
        ends = [max(0, min(n - i, b)) for i, b, n in zip(at, self.block_type.shape, self.data.shape, strict=True)]
        inside = self.data[tuple(slice(i, i + end) for i, end in zip(at, ends, strict=True))]
        return inside, tuple(slice(0, end) for end in ends)


@dataclass
class Accumulator:
    """A sum of products, and those that nobody has waited for."""

    total: Tensor
    pending: list[tuple[Memory, Memory]]

    def reshape(self, shape: Sequence[int]) -> Tile:
        assert not self.pending, "the product is read before it is done"
        return Tile(self.total.reshape(*shape))


class Device:
    """Runs the kernel. What it calls in the line ``without`` does nothing, to see that this shows."""

    def __init__(self, without: int = 0) -> None:
        self.without = without
        self.delays = random.Random(0)
        self.stores: list[tuple[Descriptor, list[int], Memory]] = []
        self.written: set[int] = set()
        kernel = vars(symmetric_gluon_kernel)
        tma = SimpleNamespace(store_wait=self._unless_left_out(self._store_wait))
        mbarrier = SimpleNamespace(
            MBarrierLayout=lambda: None,
            init=self._unless_left_out(self._begin),
            expect=self._unless_left_out(lambda barrier, size: barrier.arrive(expected=size)),
            arrive=self._unless_left_out(lambda barrier, count, pred=True: pred and barrier.arrive(count=count)),
            wait=self._unless_left_out(Barrier.wait),
        )
        self.names: dict[str, Any] = {
            "_load": self._unless_left_out(self._load),
            "_store": self._unless_left_out(self._store),
            "_LOADER_REGISTERS": 24,
            "tma": tma,
            "mbarrier": mbarrier,
            "fence_async_shared": self._unless_left_out(self.written.clear),
            "warpgroup_mma_init": lambda x: x if isinstance(x, Accumulator) else Accumulator(x.data, []),
            "warpgroup_mma": self._multiply,
            "warpgroup_mma_wait": self._unless_left_out(self._multiply_wait, lambda pending, deps: deps[0]),
            "lower_tile": self._lower_tile,
            "gl": self._language(),
        }
        for name, value in kernel.items():
            if hasattr(value, "fn") and name != "lower_tile":  # with these names in place of Gluon's
                self.names[name] = types.FunctionType(value.fn.__code__, self.names, name)

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*arguments: object, num_warps: int, enable_fp_fusion: bool, **constants: object) -> None:
            self.programs, self.warps = grid[0], num_warps
            for self.program in range(grid[0]):
                self.names["loaded_product_kernel"](*arguments, **constants)
                assert not self.stores, "the program ends before its results are stored"

        return launch

    def _unless_left_out(
        self, function: Callable[..., Any], otherwise: Callable[..., Any] = lambda *_, **__: None
    ) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            left_out = sys._getframe(1).f_lineno == self.without
            return (otherwise if left_out else function)(*arguments, **options)

        return call

    def _begin(self, barrier: Barrier, count: int) -> None:
        barrier.begin()
        self.written.add(id(barrier))

    def _language(self) -> SimpleNamespace:
        def layout(*arguments: object) -> None:
            return None

        def where(condition: Any, x: Any, y: Any) -> Any:
            if isinstance(condition, Tile):
                return Tile(torch.where(condition.data, _of(x), _of(y)))
            return x if condition else y

        return SimpleNamespace(
            constexpr=object,
            float32=torch.float32,
            int64=_INT64,
            SliceLayout=layout,
            NVMMADistributedLayout=layout,
            program_id=lambda axis: self.program,
            num_programs=lambda axis: self.programs,
            num_warps=lambda: self.warps,
            static_range=range,
            zeros=lambda shape, dtype, of: Tile(torch.zeros(shape, dtype=dtype)),
            arange=lambda start, stop, layout: Tile(torch.arange(start, stop)),
            where=where,
            convert_layout=lambda x, to: x,
            allocate_shared_memory=self._allocate,
            warp_specialize=self._specialize,
        )

    def _allocate(self, dtype: Any, shape: Sequence[int], layout: object) -> Any:
        if dtype is not _INT64:
            return Memory(torch.full(tuple(shape), torch.nan, dtype=dtype), self.written)
        if len(shape) == 1:
            return Barrier()
        barriers = [Barrier() for _ in range(shape[0])]
        return SimpleNamespace(index=barriers.__getitem__)

    def _specialize(self, parts: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], *_: object) -> None:
        (multiply, own), (load, others) = parts
        failed: list[BaseException] = []
        assert not self.written, "no fence is between what sets barriers up and those who use them"

        def work() -> None:
            try:
                load(*others)
            except BaseException as error:  # told where the kernel was launched
                failed.append(error)

        loader = threading.Thread(target=work)
        loader.start()
        try:
            multiply(*own)
        finally:
            loader.join()
        if failed:
            raise failed[0]

    def _load(self, source: Descriptor, at: list[int], barrier: Barrier, target: Memory) -> None:
        def copy() -> None:
            time.sleep(self.delays.random() * 5e-4)
            inside, where = source.region(at)
            target.data.zero_()
            target.data[where] = inside
            barrier.arrive(landed=source.block_type.nbytes, count=0)

        threading.Thread(target=copy).start()

    def _store(self, target: Descriptor, at: list[int], source: Memory) -> None:
        assert source.data.data_ptr() not in self.written, "no fence is between what was written and its store"
        self.stores.append((target, at, source))

    def _store_wait(self, pending: int) -> None:
        while len(self.stores) > pending:
            target, at, source = self.stores.pop(0)
            inside, where = target.region(at)
            inside.copy_(source.data[where])

    def _multiply(self, x: Memory, y: Memory, total: Accumulator, is_async: bool) -> Accumulator:
        return Accumulator(total.total, [*total.pending, (x, y)])

    def _multiply_wait(self, pending: int, deps: tuple[Accumulator]) -> Accumulator:
        (total,) = deps
        result = total.total
        done = total.pending[: len(total.pending) - pending]
        for x, y in done:
            result = result + x.data.float() @ y.data.float()
            result = result * (1 + _UNEVEN * torch.ones_like(result).triu())
        return Accumulator(result, total.pending[len(done) :])

    @staticmethod
    def _lower_tile(index: int, side: int, group: int) -> tuple[int, int]:
        """In another order, in which ``group`` does not count; the interpreter tests the kernel's."""
        return [(row, col) for row in range(side) for col in range(row + 1)][index]


def order_calls() -> dict[str, int]:
    """What the kernel calls that orders asynchronous work, or is such work, and its line: ``"_load 2"`` is the 2nd."""
    of_barriers = [f"mbarrier.{name}" for name in ("init", "expect", "arrive", "wait")]
    names = ["_load", "_store", "tma.store_wait", *of_barriers, "fence_async_shared", "warpgroup_mma_wait"]
    tree = ast.parse(Path(symmetric_gluon_kernel.__file__).read_text())
    lines: dict[str, list[int]] = {name: [] for name in names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in lines:
            lines[ast.unparse(node.func)].append(node.lineno)
    assert all(lines.values()), lines
    return {f"{name} {i}": line for name, found in lines.items() for i, line in enumerate(sorted(found), 1)}


@contextmanager
def doubled(without: int = 0, processors: int = 3) -> Iterator[None]:
    """Inside, ``symmetric_product`` of CPU tensors runs the kernel with a loader on the double."""
    triton_symmetric._plan.cache_clear()
    device = Device(without)
    with mock.patch.multiple(
        triton_symmetric,
        loaded_kernel=lambda: device,
        gluon_descriptor=Descriptor,
        loader_obstacle=lambda *_: None,
        unsupported=lambda *_: None,
        _processors=lambda _: processors,
    ):
        yield
    triton_symmetric._plan.cache_clear()
