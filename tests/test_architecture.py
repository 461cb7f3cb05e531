"""The law of imports, as docs/architecture.md states it: packages form a chain, and nothing imports back up."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FLOORS = (  # a package imports from the floors below its own; packages of one floor never import each other
    {"platform"},
    {"model"},
    {"layout"},
    {"comm"},
    {"planning", "step"},
    {"dedicated", "exchanged"},
    {"optimizer"},
    {"report", "integrations"},
    {"hardware"},
    {"check", "simulation"},
    {"cli"},
    {"tools"},  # only a docstring
)
ALONE = {"kernels", "solver"}  # import nothing of dmuon; others see only what their __init__ exports
PREDICTING = {"hardware", "simulation"}
KNOWN_TO_PREDICTIONS = {"hardware", "planning", "model", "platform"}  # and what stands alone
OPTIONAL = {"matplotlib", "transformers", "triton", "pulp"}  # what a function may import, and what needs it
MAY_USE_THE_FACE = {"check", "cli"}


def modules() -> dict[str, Path]:
    paths = {}
    for folder, package in (("dmuon", "dmuon"), ("kernels", "dmuon.kernels"), ("solver", "dmuon.solver")):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            paths[".".join((package, *parts)).removesuffix(".__init__")] = path
    return paths


MODULES = modules()


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(name: str, node: ast.AST) -> Iterator[str]:
    """Full names of what ``node`` imports, as modules where they are modules of the project."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            package = name.split(".") if MODULES[name].name == "__init__.py" else name.split(".")[:-1]
            base = ".".join([*package[: len(package) - node.level + 1], *base.split(".")]).strip(".")
        for alias in node.names:
            yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base


@cache
def edges() -> dict[str, set[str]]:
    """Every import of one module by another, those in functions and under conditions included."""
    return {
        name: {
            target
            for node in ast.walk(parsed(path))
            for target in imported(name, node)
            if target in MODULES and target != name
        }
        for name, path in MODULES.items()
    }


def needs_optional(module: str) -> bool:
    """Whether ``module`` imports an optional package at its top: where that is missing, so must the module be."""
    if module not in MODULES:
        return False
    tops = parsed(MODULES[module]).body
    return any(target.split(".")[0] in OPTIONAL for node in tops for target in imported(module, node))


def package_of(module: str) -> str:
    """The package of a module; of what lies in ``dmuon.tools``, the one below that."""
    parts = module.removeprefix("dmuon.tools.").removeprefix("dmuon.").split(".")
    return "" if module == "dmuon" else parts[0]


def floor_of(package: str) -> int:
    return next(i for i, floor in enumerate(FLOORS) if package in floor)


def fault(importer: str, target: str) -> str:
    """What is wrong with the import; empty if nothing."""
    own, other = package_of(importer), package_of(target)
    if own == other or not own:
        return ""
    if own in ALONE:
        return f"{own} stands alone"
    if other in ALONE:
        return "" if target == f"dmuon.{other}" else f"{other} is used through its __init__ only"
    if not other:
        return "" if own in MAY_USE_THE_FACE else "only check and cli import the public face"
    if own in PREDICTING and other not in KNOWN_TO_PREDICTIONS:
        return f"predictions know {', '.join(sorted(KNOWN_TO_PREDICTIONS))} only"
    return "" if floor_of(other) < floor_of(own) else f"{other} does not stand below {own}"


def test_imports_only_go_down() -> None:
    faults = [
        f"{importer} imports {target}: {why}"
        for importer, targets in sorted(edges().items())
        for target in sorted(targets)
        if (why := fault(importer, target))
    ]
    assert not faults, "\n".join(faults)


def test_a_training_program_loads_no_tools() -> None:
    graph, seen, waiting = edges(), {"dmuon"}, ["dmuon"]
    while waiting:
        new = graph.get(waiting.pop(), set()) - seen
        seen |= new
        waiting += new
    assert len(seen) > 50 and not [module for module in seen if module.startswith("dmuon.tools")]


def test_imports_stand_at_the_top() -> None:
    """Elsewhere only optional packages are imported, and modules that need one; nothing for type checkers alone.

    The public face is no such module: it loads a name when that is first used.
    """
    faults = []
    for name, path in MODULES.items():
        if name == "dmuon":
            continue
        tree = parsed(path)
        top = {id(node) for node in tree.body}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id == "TYPE_CHECKING":
                faults.append(f"{name}:{node.lineno}: TYPE_CHECKING")
            if isinstance(node, (ast.Import, ast.ImportFrom)) and id(node) not in top:
                faults += [
                    f"{name}:{node.lineno}: imports {target} inside of something"
                    for target in imported(name, node)
                    if target.split(".")[0] not in OPTIONAL and not needs_optional(target)
                ]
    assert not faults, "\n".join(faults)
