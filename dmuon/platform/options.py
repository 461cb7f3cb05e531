"""Checks of what a user passes as an option: integers, numbers, flags and choices, refused by name."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeGuard


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
    """Refuse what is not an integer of at least ``least``.

    Raises:
        TypeError: ``value`` is no integer.
        ValueError: it is less.
    """
    if not is_integer(value):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if not is_integer(value, least):
        raise ValueError(f"{name} must be at least {least}, got {value}")


def check_flag(name: str, value: object) -> None:
    """Refuse what is not a bool.

    Raises:
        TypeError: ``value`` is neither ``True`` nor ``False``.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Refuse what is not one of ``choices``.

    Raises:
        ValueError: ``value`` is something else.
    """
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
