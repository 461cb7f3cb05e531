"""Console scripts, ``dmuon-check``, ``dmuon-plan`` and ``dmuon-profile``.

Here is what they share: exit statuses, values of arguments, and files that are to be written.
"""

from __future__ import annotations

import argparse
import functools
import math
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from dmuon.platform.files import check_target

FAILED, BAD_INPUT = 1, 2  # exit statuses
WIDTH = 100  # columns


class BadArgument(ValueError):
    """Names the argument and the remedy."""


class Parser(argparse.ArgumentParser):
    """Whose errors are one line, as those of the commands themselves, and whose help is at most 100 columns wide."""

    def __init__(
        self, prog: str, description: str, formatter_class: type[argparse.HelpFormatter] = argparse.HelpFormatter
    ) -> None:
        width = min(WIDTH, shutil.get_terminal_size().columns - 2)
        super().__init__(
            prog=prog,
            description=fitted(description.replace("``", "")),
            formatter_class=functools.partial(formatter_class, width=width),
        )
        self.add_argument("--version", action="version", version=f"%(prog)s {version('dmuon')}")

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}\n")

    def run(self, argv: Sequence[str] | None, command: Callable[[argparse.Namespace], int]) -> int:
        """The exit status of ``command`` with these arguments: 2, after a message on stderr, if it refuses them."""
        arguments = self.parse_args(argv)
        try:
            return command(arguments)
        except (OSError, ValueError) as error:
            print(f"{self.prog}: {error}", file=sys.stderr)
            return BAD_INPUT


def fitted(text: str) -> str:
    """``text`` with lines that are too wide broken at spaces, and their rest indented."""
    wrapper = textwrap.TextWrapper(WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(line if len(line) <= WIDTH else wrapper.fill(line) for line in text.splitlines())


def count(text: str) -> int:
    """A positive integer, as the ``type`` of an argument.

    Raises:
        argparse.ArgumentTypeError: ``text`` is something else, or of more than nine digits.
    """
    if not re.fullmatch(r"[0-9]{1,9}", text) or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive integer")
    return int(text)


def number(what: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    """A finite number that ``fits``, as the ``type`` of an argument; messages call it ``what``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and fits(value)):
            raise argparse.ArgumentTypeError(f"{text!r} is no {what}")
        return value

    return parse


def removed(instead: str) -> Callable[[str], NoReturn]:
    """The ``type`` of an option that is no more: it says what to write."""

    def refuse(text: str) -> NoReturn:
        raise argparse.ArgumentTypeError(f"was removed; {instead}")

    return refuse


seconds = number("number of seconds above 0 and at most 1e6", lambda value: 0 < value <= 1e6)  # as clocks can count


def require_target(flag: str, path: Path) -> None:
    """Refuse a path that no file can be written to, before minutes are spent on what it is to hold.

    Raises:
        BadArgument: it is a folder or another thing that is no file, or it lies in no folder.
    """
    if path.is_dir():
        raise BadArgument(f"{flag} {path}: is a folder; name a file in it")
    if not path.absolute().parent.is_dir():
        raise BadArgument(f"{flag} {path}: no such folder {path.parent}; create it")
    try:
        check_target(path)
    except OSError as error:
        raise BadArgument(f"{flag} {path}: {error.strerror}") from error
