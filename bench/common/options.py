"""The command line of every bench: its options are the fields of its settings."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Options:
    """What every bench takes.

    Attributes:
        json: a file to write the record to.
        read: a record that was written before: its tables are printed, and nothing is measured.
    """

    json: str | None = None
    read: str | None = None


@dataclass(frozen=True, slots=True)
class RankOptions(Options):
    """What benches on ranks take as well."""

    world: int = 2


def option(default: Any, *, least: int | None = None, choices: Collection[str] | None = None) -> Any:
    """A field of settings, and what it, or each of its values, may be. Whole numbers are at least 1 otherwise."""
    return field(default=default, metadata={"least": least, "choices": choices})


@dataclass(frozen=True, slots=True)
class TurnOptions(RankOptions):
    """What benches take whose programs take turns.

    Attributes:
        costs: of the planner, as ``dmuon`` takes them.
    """

    rounds: int = 15
    warmup: int = option(3, least=0)
    costs: str | None = None


def parse(kind: type[S], text: str | None, argv: Sequence[str] | None = None) -> tuple[argparse.ArgumentParser, S]:
    """Settings from ``argv``, an option per field; a wrong value ends the program with status 2 and its name.

    Args:
        kind: a dataclass with a default for each field. None stands for a string or, as its annotation says, a whole
            number; a tuple for values with commas or blanks between them; False for an option without a value.
        text: the program's docstring.
    """
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    for one in fields(kind):  # type: ignore[arg-type]
        name, default = "--" + one.name.replace("_", "-"), one.default
        if default is False:
            parser.add_argument(name, action="store_true")
        elif isinstance(default, tuple):
            of = type(default[0]) if default else str
            parser.add_argument(name, type=_several(of), nargs="+", help=f"default {','.join(map(str, default))}")
        else:
            kind_of: Any = type(default) if default is not None else int if one.type == "int | None" else str
            parser.add_argument(name, type=kind_of, default=default, help=f"default {default}")
    given = vars(parser.parse_args(argv))
    for one in fields(kind):  # type: ignore[arg-type]
        if isinstance(one.default, tuple):
            given[one.name] = tuple(itertools.chain(*given[one.name])) if given[one.name] else one.default
    settings = kind(**given)
    for one in fields(kind):  # type: ignore[arg-type]
        name, found = "--" + one.name.replace("_", "-"), getattr(settings, one.name)
        values = found if isinstance(found, tuple) else (found,)
        numbers = [value for value in values if type(value) is int]
        least, choices = one.metadata.get("least"), one.metadata.get("choices")
        if numbers and min(numbers) < (1 if least is None else least):
            parser.error(f"{name} must be at least {1 if least is None else least}")
        if choices is not None and not set(values) <= set(choices):
            parser.error(f"{name} must be one of {', '.join(choices)}")
    return parser, settings


def _several(of: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    def values(text: str) -> tuple[Any, ...]:
        return tuple(of(one) for one in text.split(","))

    return values
