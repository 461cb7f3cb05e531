"""Planted bugs: one for each place in dmuon that waits for a stream, or keeps memory until another stream is done."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, cast
from unittest import mock

from torch import Tensor

from streams.observer import ROOT, functions_of, named_functions

_FOLDERS = ("platform", "comm", "dedicated", "exchanged", "optimizer", "step", "kernels")  # what runs in training
# Names of methods that wait, or that make somebody else wait; others of the latter two take more arguments.
_WAITS = (
    "alone",
    "await_users",
    "beside",
    "join_up_to",
    "record_event",
    "record_stream",
    "synchronize",
    "wait",
    "wait_event",
    "wait_stream",
)
_MOST_ARGUMENTS = {"join": 0, "record": 1}
_KEEPS = re.compile(r"(self\.\w+).*#.*\[Note: who keeps a tensor alive\]")


@dataclass(frozen=True, order=True)
class Plant:
    """A place that is broken.

    Attributes:
        function: as ``Class.method``.
        what: the method that is not called, as the source has it; or the attribute that is dropped too early.
        number: among several that read the same.
        keeps: it is an attribute.
    """

    function: str
    what: str
    number: int = 0
    keeps: bool = False

    def __str__(self) -> str:
        return f"{self.what} in {self.function}" + (f" ({self.number})" if self.number else "")


def plants() -> list[Plant]:
    """All that the source has a place for."""
    found: list[Plant] = []
    for path in sources():
        for node, function in functions_of(path):
            seen: Counter[str] = Counter()
            for name in map(_text, _places(node)):
                found.append(Plant(function, name, seen[name]))
                seen[name] += 1
        lines = (ROOT / path).read_text().splitlines()
        for number, line in enumerate(lines, 1):
            match = _KEEPS.search(line)
            if match:
                found.append(Plant(_function_at(path, number), match[1], keeps=True))
    return found


def sources() -> list[Path]:
    """Files of what runs in training, relative to the root."""
    paths = [path.relative_to(ROOT) for folder in ("dmuon", "kernels") for path in (ROOT / folder).rglob("*.py")]
    return sorted(path for path in paths if not {*_FOLDERS}.isdisjoint(path.parts))


def _function_at(path: Path, line: int) -> str:
    return next(name for node, name in functions_of(path) if node.lineno <= line <= (node.end_lineno or node.lineno))


def _places(function: ast.FunctionDef) -> list[ast.Attribute]:
    """The methods that wait, called here or handed on to be called."""
    calls = {id(node.func): node for node in ast.walk(function) if isinstance(node, ast.Call)}
    found = []
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and not isinstance(node.value, ast.Constant):
            call = calls.get(id(node))
            few = call is not None and len(call.args) <= _MOST_ARGUMENTS.get(node.attr, -1) and not call.keywords
            if node.attr in _WAITS or few:
                found.append(node)
    return sorted(found, key=lambda node: (node.lineno, node.col_offset))


def _text(place: ast.Attribute) -> str:
    """As the source has it, without the arguments of what is called before."""
    if isinstance(place.value, ast.Call) and len(place.value.args) > 1:
        return f"{ast.unparse(place.value.func)}(…).{place.attr}"
    return ast.unparse(place)


@contextmanager
def planted(plant: Plant) -> Iterator[None]:
    """Break that place meanwhile."""
    path = next(p for p in sources() if any(name == plant.function for _, name in functions_of(p)))
    with _forgotten(path, plant) if plant.keeps else _skipped(path, plant):
        yield


@contextmanager
def _skipped(path: Path, plant: Plant) -> Iterator[None]:
    """Without the call, by other code in the function."""
    function = _live(path, plant.function)
    tree = ast.parse((ROOT / path).read_text())
    places = [place for node, name in named_functions(tree) if name == plant.function for place in _places(node)]
    place = [place for place in places if _text(place) == plant.what][plant.number]
    module = compile(ast.fix_missing_locations(_Skipper(place).visit(tree)), function.__code__.co_filename, "exec")
    original = function.__code__
    function.__code__ = next(c for c in _codes(module) if _same_place(c, original))
    try:
        yield
    finally:
        function.__code__ = original


class _Skipper(ast.NodeTransformer):
    """Puts :func:`without` around one method."""

    def __init__(self, place: ast.Attribute) -> None:
        self.place = place

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node is not self.place:
            return node
        skipper = ast.parse(f"__import__({__name__!r}, fromlist=['without']).without", mode="eval").body
        return ast.copy_location(ast.Call(skipper, [node], []), node)


def without(method: Any) -> Callable[..., Any]:
    """What is called in place of ``method``, which waits."""
    match getattr(method, "__name__", ""):
        case "beside" | "alone":
            return lambda *args, **kwargs: _unordered(method.__self__, *args, **kwargs)
        case _:
            return lambda *_, **__: None


@contextmanager
def _unordered(stream: Any, reads: Sequence[Tensor] = ()) -> Iterator[None]:
    """``dmuon.platform.streams.Stream.beside`` or ``alone``, but nothing waits."""
    own = stream._stream
    for tensor in reads:
        tensor.record_stream(own)
    with stream._module.stream(own):
        yield


@contextmanager
def _forgotten(path: Path, plant: Plant) -> Iterator[None]:
    """The attribute keeps nothing of what it is given."""
    kind = getattr(_module(path), plant.function.partition(".")[0])
    with mock.patch.object(kind, plant.what.removeprefix("self."), _Forgetful(), create=True):
        yield


class _Forgetful:
    """An attribute that is an empty list, or None, whatever it is set to."""

    is_list = False

    def __set__(self, _owner: Any, value: Any) -> None:
        self.is_list = isinstance(value, list)

    def __get__(self, _owner: Any, _kind: type) -> Any:
        return [] if self.is_list else None


def _module(path: Path) -> Any:
    parts = path.with_suffix("").parts
    return import_module(".".join(parts if parts[0] == "dmuon" else ("dmuon", *parts)))


def _live(path: Path, function: str) -> FunctionType:
    found: Any = _module(path)
    for name in function.split("."):
        found = inspect.getattr_static(found, name)
    found = found.fget if isinstance(found, property) else found
    return cast(FunctionType, inspect.unwrap(found))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _same_place(code: CodeType, original: CodeType) -> bool:
    return (code.co_name, code.co_firstlineno) == (original.co_name, original.co_firstlineno)
