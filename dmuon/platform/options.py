"""Checks of what a user passes as an option: integers, numbers, flags, choices and keywords, refused by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from typing import ParamSpec, TypeGuard, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


def is_integer(value: object, least: int | None = None, most: int | None = None) -> TypeGuard[int]:
    """Whether ``value`` is an integer from ``least`` to ``most``.

    ``True`` is an ``int`` to Python; where a number is asked for it is a mistake.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return (least is None or value >= least) and (most is None or value <= most)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether ``value`` is an integer or a float; neither ``True`` nor a tensor."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_integer(name: str, value: object, least: int | None = None) -> None:
    """Refuse what is not an integer of at least ``least``."""
    if not is_integer(value):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if not is_integer(value, least):
        raise ValueError(f"{name} must be at least {least}, got {value}")


def check_flag(name: str, value: object) -> None:
    """Refuse what is not a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Refuse what is not one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def told_apart(*rows: tuple[str, str]) -> dict[str, str]:
    """A table of names of other libraries and of what to write instead, from rows of names with one such line each."""
    return {name: instead for names, instead in rows for name in names.split()}


def refuse_unknown(public_name: str, elsewhere: Mapping[str, str]) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Let a function say what to write instead of a keyword that it does not take.

    Args:
        public_name: of the function, as users write it.
        elsewhere: keywords of other libraries, and what to write instead.
    """

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        known = [name for name in inspect.signature(function).parameters if name != "self"]

        @functools.wraps(function)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            for name in kwargs:
                if name not in known:
                    close = get_close_matches(name, known, 1)
                    instead = elsewhere.get(name) or (f"{close[0]}=…" if close else f"one of {', '.join(known)}")
                    raise TypeError(f"{public_name}() got an unexpected keyword argument {name!r}; write {instead}")
            return function(*args, **kwargs)

        return checked

    return decorate
