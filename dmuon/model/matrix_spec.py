"""How a stored tensor is made of the matrices that Muon orthogonalizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from torch import Tensor

Run = tuple[int, int]  # half-open [start, stop)
Names = Mapping[int, str]  # of parameters, by ``id``


@dataclass(frozen=True, slots=True)
class MatrixSpec:
    """How a stored tensor splits into matrices, each of which Muon orthogonalizes on its own.

    A tensor of two dimensions is ``(out, in)``, as ``nn.Linear`` stores it. One of three dimensions is a stack
    ``(e, out, in)``, every matrix of which splits in the same way.

    Args:
        parts: lengths of what lies side by side along the output dimension, such as queries, keys and values; empty if
            that is not cut.
        repeats: how many times the pattern of ``parts`` comes, one behind the other. Part ``i`` of all repeats together
            is one matrix: ``MatrixSpec((d, d, d), repeats=h)`` is a projection whose ``h`` heads each have their
            queries, keys and values side by side, ``MatrixSpec((1, 1), repeats=n)`` has rows of two matrices by turns.
        transposed: the tensor is stored ``(in, out)``, as ``Conv1D`` of GPT-2 does.
        flattened: all dimensions behind the first one are the input dimension, as in the kernel of a convolution
            ``(out, in, …)``.
        num_heads: into how many matrices of equal height each part is cut further; one number for each part, where 1
            leaves the part whole, or one for all of them.

    Raises:
        TypeError, ValueError: not positive integers, or a part that its heads do not divide.
    """

    parts: tuple[int, ...] = ()
    repeats: int = 1
    transposed: bool = False
    flattened: bool = False
    num_heads: int | tuple[int, ...] = 1

    def __post_init__(self) -> None:
        for name in ("parts", "num_heads"):
            value = getattr(self, name)
            if isinstance(value, Sequence) and not isinstance(value, str):
                object.__setattr__(self, name, tuple(value))
            elif name == "parts":
                raise TypeError(f"MatrixSpec.parts must be a tuple of integers, got {value!r}")
        for name, value in (("repeats", self.repeats), *(("parts", n) for n in self.parts)):
            _check_positive(name, value)
        heads_of_parts = self._heads()
        for heads in heads_of_parts:
            _check_positive("num_heads", heads)
        for name in ("transposed", "flattened"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"MatrixSpec.{name} must be True or False, got {getattr(self, name)!r}")
        if self.transposed and self.flattened:
            raise ValueError("MatrixSpec: a tensor that is flattened is (out, in, …); it cannot be transposed too")
        if self.repeats > 1 and not self.parts:
            raise ValueError(f"MatrixSpec.repeats={self.repeats} says how often parts come; give the parts too")
        if isinstance(self.num_heads, tuple) and len(self.num_heads) != max(1, len(self.parts)):
            raise ValueError(f"MatrixSpec.num_heads={self.num_heads} must have a number for each of {self.parts}")
        for length, heads in zip(self.parts, heads_of_parts, strict=False):
            if length * self.repeats % heads:
                raise ValueError(
                    f"MatrixSpec: a part of {length * self.repeats} rows cannot be cut into num_heads={heads}"
                )

    @property
    def is_whole(self) -> bool:
        """Whether the tensor, or each matrix of a stack, is one matrix."""
        return len(self.parts) < 2 and set(self._heads()) == {1}

    def matrix_shape(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """``(e, m, n)``: a tensor of ``shape`` as a stack of ``e`` matrices, as they are stored, before they are cut.

        Raises:
            ValueError: for a shape that is no such thing, or whose output dimension has another length than the parts.
        """
        sizes = tuple(shape)
        if self.flattened:
            if len(sizes) < 2:
                raise ValueError(f"a tensor of shape {sizes} has no dimensions to flatten")
            stacked = (1, sizes[0], prod(sizes[1:]))
        elif len(sizes) == 2:
            stacked = (1, *sizes)
        elif len(sizes) == 3:
            stacked = (sizes[0], sizes[1], sizes[2])
        else:
            raise ValueError(
                f"a tensor of shape {sizes} is no matrix and no stack of them; a kernel (out, in, …) needs "
                "MatrixSpec(flattened=True)"
            )
        length = stacked[self.dim]
        if self.parts and sum(self.parts) * self.repeats != length:
            raise ValueError(
                f"{self} describes {sum(self.parts) * self.repeats} outputs, a tensor of shape {sizes} has {length}"
            )
        if not self.parts and length % self._heads()[0]:
            raise ValueError(f"{length} outputs of a tensor of shape {sizes} cannot be cut into {self.num_heads} heads")
        return stacked

    @property
    def dim(self) -> int:
        """The output dimension of ``(e, m, n)``, along which parts lie."""
        return 2 if self.transposed else 1

    def with_one_input(self, shape: Sequence[int]) -> tuple[int, ...]:
        """``shape`` of such a tensor, or of a part of it, if each output had one element."""
        last = len(shape) - 1
        kept = {0} if self.flattened else {0, last - 1, last} - {last - 1 if self.transposed else last}
        if last == 1 and self.transposed:
            kept = {1}
        return tuple(size if dim in kept else 1 for dim, size in enumerate(shape))

    def runs(self, length: int) -> list[tuple[Run, ...]]:
        """The outputs that each matrix has of ``length`` ones, as runs that do not touch; in the order of the parts."""
        pattern = self.parts or (length,)
        period = sum(pattern)
        result = []
        begin = 0
        for size, heads in zip(pattern, self._heads(), strict=True):
            rows = size * self.repeats // heads  # of each matrix, counted along all repeats of the part
            for head in range(heads):
                result.append(_runs_of(head * rows, (head + 1) * rows, size, begin, period))
            begin += size
        return result

    def matrices(self, shape: Sequence[int]) -> list[tuple[int, int]]:
        """The shapes of the matrices of a tensor of ``shape``, as they are stored, in the order of their numbers."""
        e, m, n = self.matrix_shape(shape)
        lengths = [sum(stop - start for start, stop in runs) for runs in self.runs(n if self.transposed else m)]
        return [(m, length) if self.transposed else (length, n) for _ in range(e) for length in lengths]

    def named(self, name: str, shape: Sequence[int]) -> list[tuple[str, int, int]]:
        """What plans call the matrices of a tensor, and their shapes; ``name`` itself if that is one matrix."""
        shapes = self.matrices(shape)
        if len(shape) == 2 and self.is_whole:
            return [(name, *shapes[0])]
        return [(f"{name}[{number}]", m, n) for number, (m, n) in enumerate(shapes)]

    def _heads(self) -> tuple[int, ...]:
        return self.num_heads if isinstance(self.num_heads, tuple) else (self.num_heads,) * max(1, len(self.parts))


def _runs_of(start: int, stop: int, size: int, begin: int, period: int) -> tuple[Run, ...]:
    """Rows ``[start, stop)`` of a part of which each ``period`` has ``size`` rows from ``begin`` on."""
    runs: list[Run] = []
    while start < stop:
        repeat, offset = divmod(start, size)
        count = min(stop - start, size - offset)
        first = repeat * period + begin + offset
        if runs and runs[-1][1] == first:
            runs[-1] = runs[-1][0], first + count
        else:
            runs.append((first, first + count))
        start += count
    return tuple(runs)


def is_one_matrix(param: Tensor) -> bool:
    """Whether ``param`` is one matrix just as it is stored."""
    return len(shape_of(param)) == 2 and spec_of(param).is_whole


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"MatrixSpec.{name} must be integers, got {value!r}")
    if value < 1:
        raise ValueError(f"MatrixSpec.{name} must be positive, got {value}")


_WHOLE = MatrixSpec()
_REMEMBERED, _FAULT, _FLAT = "_dmuon_matrices", "_dmuon_fault", "_dmuon_flat"
NAME = "_dmuon_name"  # attribute of a parameter, by which others know what its optimizer calls it


class FlatShard(NamedTuple):
    """Of which tensor a flat parameter is a piece, and where that lies: in a longer flat tensor, cut into shards.

    Attributes:
        shape: of the tensor.
        begin: its first element in the longer tensor.
        length: of each shard of that.
        ranks: of the shards, for each copy.
    """

    shape: tuple[int, ...]
    begin: int
    length: int
    ranks: tuple[tuple[int, ...], ...]


def remember_flat(param: Tensor, shard: FlatShard) -> None:
    """Let every optimizer know ``param`` as that piece; as :func:`remember_spec` does."""
    setattr(param, _FLAT, tuple(shard))


def flat_of(param: Tensor) -> FlatShard | None:
    """What was remembered of ``param``; None of a tensor that is no flat piece."""
    fields = getattr(param, _FLAT, None)
    return None if fields is None else FlatShard(*fields)


def shape_of(param: Tensor) -> tuple[int, ...]:
    """The shape of what Muon takes: of a flat piece that of the tensor it is a piece of."""
    fields = getattr(param, _FLAT, None)
    return tuple(param.shape) if fields is None else fields[0]


def remember_spec(param: Tensor, spec: MatrixSpec, fault: str | None = None) -> None:
    """Let every optimizer split ``param`` as ``spec`` says, which belongs to it, whoever optimizes it.

    ``fault`` says why Muon cannot train it, which matters once it is not frozen any more.

    The tensor itself has it. Of a tensor that is weakly referenced torch could not swap the contents, which it does to
    move a module of DTensors. It has plain numbers, which a file may hold that is loaded without dmuon.
    """
    setattr(param, _REMEMBERED, (spec.parts, spec.repeats, spec.transposed, spec.flattened, spec.num_heads))
    setattr(param, _FAULT, fault)


def fault_of(param: Tensor) -> str | None:
    """Why Muon cannot train ``param``, as whoever remembered its matrices found; None if it can."""
    return getattr(param, _FAULT, None)


def is_remembered(param: Tensor) -> bool:
    """Whether somebody has decided of what ``param`` is made, be it one matrix."""
    return hasattr(param, _REMEMBERED)


def spec_of(param: Tensor) -> MatrixSpec:
    """What was remembered of ``param``; otherwise that it is one matrix, or a stack of them."""
    fields = getattr(param, _REMEMBERED, None)
    return _WHOLE if fields is None else _spec(fields)


@lru_cache(maxsize=4096)
def _spec(fields: tuple[tuple[int, ...], int, bool, bool, int | tuple[int, ...]]) -> MatrixSpec:
    return MatrixSpec(*fields)
