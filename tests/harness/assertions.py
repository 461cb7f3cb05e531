"""What tests claim about tensors: how far they may be from others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of ``expected``."""
    expected = expected.double()
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1e-30))


def assert_close(found: Tensor, expected: Tensor, about: object, tolerance: float = 1e-5) -> None:
    """Relative in the Frobenius norm; ``expected`` may carry a leading dimension of one."""
    error = relative_difference(found, expected.reshape(found.shape))
    assert error <= tolerance, f"{about}: relative error {error:.2e} > {tolerance:.0e}"


def relative_errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return {name: relative_difference(found[name], tensor) for name, tensor in expected.items()}


def assert_equal_weights(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    errors = relative_errors(found, expected)
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= tolerance, f"{worst}: relative error {errors[worst]:.2e} > {tolerance:.0e}; all: {errors}"


def assert_same_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The same names and bits."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), f"{name} differs"


def assert_same_bits(results: Sequence[Mapping[str, Tensor]]) -> None:
    """Of every rank's weights."""
    for weights in results[1:]:
        assert_same_tensors(weights, results[0])


@contextmanager
def about(what: object) -> Iterator[None]:
    """Say which of several cases it is that fails inside."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from None


@dataclass(frozen=True)
class Raised:
    """What somebody was told; the kind is NoneType if it was nothing."""

    kind: type
    message: str

    def matches(self, kind: type[BaseException], match: str) -> bool:
        return issubclass(self.kind, kind) and re.search(match, self.message) is not None


def raised_by(use: Callable[[], Any]) -> Raised:
    try:
        use()
    except Exception as error:
        return Raised(type(error), str(error))
    return Raised(type(None), "")


@cache
def documented_messages() -> list[re.Pattern[str]]:
    """What docs/troubleshooting.md quotes; ``…`` stands for what varies."""
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    headings = [line for line in page.splitlines() if line.startswith("### `")]
    quoted = [message for heading in headings for message in re.findall(r"`([^`]+)`", heading) if len(message) > 8]
    return [re.compile(".*".join(re.escape(part.strip()) for part in m.split("…")), re.DOTALL) for m in quoted]


REMEDIES = "build|call|check|count|dedicate_params|exclude|give|leave|make|measure|move|pass|sort|split|train|use|write"
# What is wrong says here what would be right.
EVIDENT = ("must be|must return", "unexpected keyword", "none of", "one per stage", "has one owner", "part here is")


def says_what_to_do(message: str) -> bool:
    """Whether a refusal names its remedy, needs none, or stands in docs/troubleshooting.md."""
    patterns = [rf"[;:,] (then )?({REMEDIES})\b", *EVIDENT, *documented_messages()]
    return any(re.search(pattern, message) is not None for pattern in patterns)
