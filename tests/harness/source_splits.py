"""Into how many parts a forward takes the output of a layer, read off its source: an oracle of what is fused."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from types import CodeType
from typing import Any

import torch.nn as nn
from torch.nn.modules.conv import _ConvNd

from dmuon.model.routing import route_parameters

_SPLITS = frozenset({"chunk", "split", "unbind", "split_with_sizes", "tensor_split"})


@dataclass
class Output:
    """What a layer gives, or a part of that, and the parts that are taken of it."""

    layer: nn.Module | None
    parts: list[Output] = field(default_factory=list)

    def count(self) -> int:
        return sum(part.count() for part in self.parts) if self.parts else 1


def parts_of(module: nn.Module) -> dict[int, set[int]]:
    """By ``id`` of each layer that ``module`` calls: into how many parts functions of its class take the output."""
    reader = _Reader(module)
    for base in type(module).__mro__:
        if base.__module__.startswith("torch"):
            break
        for function in _functions(base):
            reader.read(function)
    processor = getattr(module, "processor", None)
    if processor is not None:
        for function in (*_functions(type(processor)), *_helpers(type(processor).__module__)):
            if any(argument.arg == "attn" for argument in function.args.args):
                reader.read(function)
    counts: dict[int, set[int]] = {}
    for output in reader.outputs:
        if output.layer is not None and output.parts:
            counts.setdefault(id(output.layer), set()).add(output.count())
    return counts


@cache
def _source(module: str) -> list[ast.stmt]:
    """Parsed once: ``inspect.getsource`` of a class parses all of its module for each."""
    try:
        return ast.parse(inspect.getsource(sys.modules[module])).body
    except (OSError, TypeError, SyntaxError):
        return []


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    nodes = ast.walk(ast.Module(_source(module), []))
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


def _functions(cls: type) -> list[ast.FunctionDef]:
    found = _classes(cls.__module__).get(cls.__name__)
    body = [] if found is None else found.body
    return [node for node in body if isinstance(node, ast.FunctionDef) and node.name != "__init__"]


def _helpers(module: str) -> list[ast.FunctionDef]:
    return [node for node in _source(module) if isinstance(node, ast.FunctionDef)]


@cache  # of which there are few, read for every module of a class
def _compiled(expression: ast.expr) -> CodeType:
    return compile(ast.Expression(expression), "", "eval")


class _Reader:
    """Follows the outputs of layers through the statements of one function after the other."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.names: dict[str, Output] = {}
        self.outputs: list[Output] = []

    def read(self, function: ast.FunctionDef) -> None:
        self.names = {}
        self.read_all(function.body)

    def read_all(self, body: list[ast.stmt]) -> None:
        for statement in body:
            match statement:
                case ast.If(test=test, body=then, orelse=otherwise):
                    known = self.evaluate(test)
                    if known is not False:
                        self.read_all(then)
                    if known is not True:
                        self.read_all(otherwise)
                case ast.For(body=inner) | ast.With(body=inner) | ast.While(body=inner):
                    self.read_all(inner)
                case ast.Assign(targets=[target], value=value):
                    self.assign(target, value)

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        output = self.output(value)
        if isinstance(target, ast.Name):
            self.names.pop(target.id, None)
            if output is not None:
                self.names[target.id] = output
        elif isinstance(target, ast.Tuple) and output is not None and self.is_split(value):
            output.parts = [Output(None) for _ in target.elts]
            for element, part in zip(target.elts, output.parts, strict=True):
                if isinstance(element, ast.Name):
                    self.names[element.id] = part
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for element, item in zip(target.elts, value.elts, strict=False):
                self.assign(element, item)

    def output(self, value: ast.expr) -> Output | None:
        """The output of a layer that an expression passes on, whatever its shape."""
        match value:
            case ast.Name(id=name):
                return self.names.get(name)
            case ast.Subscript(value=inner):
                return None if isinstance(value.slice, ast.Constant) else self.output(inner)
            case ast.BinOp(left=left, right=right, op=ast.Add()):
                return self.output(left) or self.output(right)
            case ast.ListComp(generators=[generator]) | ast.GeneratorExp(generators=[generator]):
                return self.output(generator.iter)
            case ast.Call(func=function, args=arguments):
                layer = self.evaluate(function)
                if isinstance(layer, nn.Module):
                    weighted = _weighted(layer)
                    if len(weighted) == 1:
                        self.outputs.append(Output(weighted[0]))
                        return self.outputs[-1]
                    return self.output(arguments[0]) if arguments and not weighted else None
                if isinstance(function, ast.Attribute):  # a method of a tensor, or a function of torch
                    found = self.output(function.value)
                    if found is not None:
                        return found
                return self.output(arguments[0]) if arguments else None
        return None

    def is_split(self, value: ast.expr) -> bool:
        """Whether the last thing that happens to a tensor is that it is taken apart, by sizes that its module knows."""
        match value:
            case ast.ListComp() | ast.GeneratorExp():
                return True
            case ast.Call(func=ast.Attribute(attr=name), args=arguments):
                lists = [a for a in arguments if isinstance(a, (ast.List, ast.Tuple))]
                return name in _SPLITS and all(self.evaluate(sizes) is not None for sizes in lists)
        return False

    def evaluate(self, expression: ast.expr) -> Any:
        """What the module itself says; None if that is not all there is to it."""
        scope = {"self": self.module, "attn": self.module, "hasattr": hasattr, "getattr": getattr}
        try:
            return eval(_compiled(expression), {"__builtins__": {}}, scope)
        except Exception:
            return None


def _weighted(layer: nn.Module) -> list[nn.Module]:
    """The layers below one that multiply by a matrix."""
    convolutions = (m for m in layer.modules() if isinstance(m, _ConvNd) and m.in_channels != m.groups)  # not depthwise
    return [*(m for m in layer.modules() if isinstance(m, nn.Linear)), *convolutions]


Sites = Mapping[tuple[str, str], int]


def disagreements(model: nn.Module, by_hand: Sites) -> tuple[int, list[tuple[Any, ...]]]:
    """Where what Muon takes of ``model`` is split into another number of parts than its forward takes apart.

    Args:
        by_hand: by class and path of a layer in it: what the source says, where it is not read here.

    Returns:
        How many tensors are split, and the faults.
    """
    routes = {id(route.param): route for route in route_parameters(model) if route.muon}
    splits = sum(len(route.spec.parts) > 1 for route in routes.values())
    expected: dict[int, tuple[str, set[int]]] = {}
    modules = [*model.modules()]
    for module in modules:
        kind = type(module).__name__
        for key, counts in parts_of(module).items():
            expected.setdefault(key, (kind, counts))
    for (kind, path), count in by_hand.items():
        for module in modules:
            if type(module).__name__ == kind:
                with suppress(AttributeError):
                    expected[id(module.get_submodule(path))] = (kind, {count})
    faults: list[tuple[Any, ...]] = []
    for prefix, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            route = routes.get(id(param))
            if route is None or param.ndim < 2:
                continue
            parts = len(route.spec.parts) or 1
            kind, counts = expected.get(id(module), ("", {1}))
            if (type(module).__name__, name) in by_hand:
                counts = {by_hand[type(module).__name__, name]}
            if parts not in counts:
                faults.append((kind, f"{prefix}.{name}", f"{sorted(counts)} by its source, here {parts}"))
    return splits, faults
