"""Shapes of matrices as text, as files and command lines have them."""

from __future__ import annotations

import re

from dmuon.solver import Shape


def parse_shape(text: str) -> Shape:
    """The two sides that ``text`` names, such as ``"1024x4096"``, in its order.

    Raises:
        ValueError: ``text`` is something else.
    """
    match = re.fullmatch(r"([1-9][0-9]{0,8})x([1-9][0-9]{0,8})", text)
    if match is None:
        raise ValueError(f"shape {text!r} is not like '1024x4096'")
    return int(match[1]), int(match[2])
