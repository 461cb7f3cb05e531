"""The command line of a bench whose options are the fields of its settings."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

S = TypeVar("S")


def parse(
    kind: type[S],
    text: str | None,
    argv: Sequence[str] | None,
    *,
    least: Mapping[str, int],
    choices: Mapping[str, Collection[str]] | None = None,
) -> tuple[argparse.ArgumentParser, S]:
    """Settings from ``argv``, an option per field; a wrong value ends the program with status 2 and its name.

    Args:
        kind: a dataclass with a default for each field; None stands for a string.
        text: the program's docstring.
        least: the smallest value of a field.
        choices: the values of a field.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults: dict[str, Any] = asdict(kind())  # type: ignore[call-overload]
    for name, default in defaults.items():
        of = str if default is None else type(default)
        parser.add_argument(f"--{name}", type=of, default=default, help=f"default {default}")
    settings = kind(**vars(parser.parse_args(argv)))
    for name, names in (choices or {}).items():
        if getattr(settings, name) not in names:
            parser.error(f"--{name} must be one of {', '.join(names)}")
    for name, value in least.items():
        if getattr(settings, name) < value:
            parser.error(f"--{name} must be at least {value}")
    return parser, settings
