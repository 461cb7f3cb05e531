"""What a user keeps on AdamW, leaving the rest to the default rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import torch.nn as nn

Exclude = Callable[[str, nn.Module, nn.Parameter], bool] | Sequence[str]
_Predicate = Callable[[str, nn.Module, nn.Parameter], bool]


def exclusion(exclude: Exclude | None, names: Sequence[str]) -> _Predicate:
    """``exclude`` as a function that says whether it names a parameter.

    Args:
        exclude: such a function, or patterns of names as in a shell, where ``*`` stands for anything, dots too. A
            pattern names parameters and modules; a module means all that is in it.
        names: of all parameters. A pattern that names none is a mistake.

    Raises:
        TypeError, ValueError: neither, or a pattern that names nothing.
    """
    if exclude is None:
        return lambda fqn, module, param: False
    if callable(exclude):
        return _checked(exclude)
    if isinstance(exclude, str) or not isinstance(exclude, Sequence) or not all(isinstance(p, str) for p in exclude):
        raise TypeError(
            f"exclude must be a function of (fqn, module, param) or a list of patterns of names, got {exclude!r}"
        )
    patterns = list(exclude)
    for pattern in patterns:
        if not any(_names(pattern, name) for name in names):
            raise ValueError(f"exclude: the pattern {pattern!r} names no parameter and no module of the model")
    return lambda fqn, module, param: any(_names(pattern, fqn) for pattern in patterns)


def _checked(exclude: _Predicate) -> _Predicate:
    def predicate(fqn: str, module: nn.Module, param: nn.Parameter) -> bool:
        answer = exclude(fqn, module, param)
        if not isinstance(answer, bool):
            raise TypeError(f"exclude({fqn!r}, …) returned {answer!r}; return True to keep it on AdamW, or False")
        return answer

    return predicate


def _names(pattern: str, fqn: str) -> bool:
    parts = fqn.split(".")
    return any(fnmatchcase(".".join(parts[: i + 1]), pattern) for i in range(len(parts)))
