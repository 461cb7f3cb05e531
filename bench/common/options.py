"""The command line of every bench: its options are the fields of its settings."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
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


@dataclass(frozen=True, slots=True)
class TurnOptions(RankOptions):
    """What benches take whose programs take turns.

    Attributes:
        costs: of the planner, as ``dmuon`` takes them.
    """

    rounds: int = 15
    warmup: int = 3
    costs: str | None = None


def parse(
    kind: type[S],
    text: str | None,
    argv: Sequence[str] | None,
    *,
    least: Mapping[str, int] | None = None,
    choices: Mapping[str, Collection[str]] | None = None,
) -> tuple[argparse.ArgumentParser, S]:
    """Settings from ``argv``, an option per field; a wrong value ends the program with status 2 and its name.

    Args:
        kind: a dataclass with a default for each field. None stands for a string, a tuple for values with commas
            between them, False for an option without a value.
        text: the program's docstring.
        least: the smallest value of a field, or of each of a tuple.
        choices: the values of a field, or of each of a tuple.
    """
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    for one in fields(kind):  # type: ignore[arg-type]
        option, default = "--" + one.name.replace("_", "-"), one.default
        if default is False:
            parser.add_argument(option, action="store_true")
        elif isinstance(default, tuple):
            shown = ",".join(map(str, default))
            parser.add_argument(option, type=_several(type(default[0])), default=default, help=f"default {shown}")
        else:
            of: Any = str if default is None else type(default)
            parser.add_argument(option, type=of, default=default, help=f"default {default}")
    settings = kind(**vars(parser.parse_args(argv)))
    for name, names in (choices or {}).items():
        if not set(_each(settings, name)) <= set(names):
            parser.error(f"--{name.replace('_', '-')} must be one of {', '.join(names)}")
    for name, value in (least or {}).items():
        if min(_each(settings, name)) < value:
            parser.error(f"--{name.replace('_', '-')} must be at least {value}")
    return parser, settings


def _each(settings: object, name: str) -> tuple[Any, ...]:
    value = getattr(settings, name)
    return value if isinstance(value, tuple) else (value,)


def _several(of: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    def values(text: str) -> tuple[Any, ...]:
        return tuple(of(one) for one in text.split(","))

    return values
