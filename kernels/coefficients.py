"""Newton–Schulz coefficients: presets, how many steps each defines, and when the Gram form must restart.

One step maps the singular values of ``X`` by the odd quintic ``p(s) = a s + b s³ + c s⁵``. A preset is a
sequence of ``(a, b, c)``; the sequence used is a prefix of it, or a continuation where the method defines
one. ``"squares"`` has no such steps: it is two polynomials of higher degree, restart blocks of squares.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias, overload

import torch

from .device import MIXED, Storage, storage_spans

# Addends of a square, for each of which the Triton kernel has an argument.
MOST_ADDENDS = 4


@dataclass(frozen=True, slots=True)
class Square:
    """One product of a block: ``S_{j+1} = square · S_j² + Σ addends[i] · S_{i+1} + identity · I``.

    ``S_1`` is the Gram matrix ``R = XXᵀ``, and addends count from it. The last ``S`` of a block is ``Q``.
    """

    square: float
    addends: tuple[float, ...]
    identity: float


@dataclass(frozen=True, slots=True)
class Squares:
    """Restart blocks, each of which turns ``X`` into ``Q X``: ``k`` squares make ``Q`` of degree ``2^k`` in ``R``.

    A square of a symmetric matrix is symmetric however it is rounded, so all products but ``Q X`` are halves, and
    nothing is mirrored that was not equal before.

    Attributes:
        name: the preset.
        blocks: the squares of each block, in their order.
        steps: the quintic Newton–Schulz steps that they stand for.

    Raises:
        ValueError: a square without addends, with more than the kernel adds, or with some that its block has not
            computed yet.
    """

    name: str
    blocks: tuple[tuple[Square, ...], ...]
    steps: int = 5

    def __post_init__(self) -> None:
        for block in self.blocks:
            for stored, square in enumerate(block, start=1):
                if not 1 <= len(square.addends) <= min(stored, MOST_ADDENDS):
                    raise ValueError(
                        f"square {stored} of a block has {len(square.addends)} addends; "
                        f"it takes from 1 to {min(stored, MOST_ADDENDS)}"
                    )


Coefficients: TypeAlias = "tuple[tuple[float, float, float], ...]"
Polynomial: TypeAlias = "Coefficients | Squares"
Quintics: TypeAlias = Literal["classic", "you", "polar_express"]
Preset: TypeAlias = "Quintics | Literal['squares']"

# Keller Jordan, "Muon: An optimizer for hidden layers in neural networks"; also torch.optim.Muon's default.
_CLASSIC = (3.4445, -4.7750, 2.0315)

# Jiacheng You's five-step schedule, as used by the modded-nanogpt speed runs.
_YOU: Coefficients = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

# Polar Express (arXiv 2505.16932): smallest singular value aimed at, the ratio of the interval's ends below
# which a step optimizes for a narrower interval, and the divisor that keeps rounding from leaving the
# interval.
_POLAR_LOWER = 1e-3
_POLAR_CUSHION = 0.02407327424182761
_POLAR_SAFETY = 1.05

# Found and proven by bench/coefficients.py.
SQUARES = Squares(
    "squares",
    (
        (
            Square(-4.124837864, (4.717843571,), -0.7329757916),
            Square(4.492384266, (-1.11362233,), -0.5636565879),
            Square(2.4280446, (-6.881188693, 5.351092051), 1.045606054),
            Square(-0.9210602026, (0.1095247615, 1.081066511, -0.2787307673), -0.7524013065),
        ),
        (
            Square(-0.9180727088, (1.781970604,), -0.5025694187),
            Square(-12.16943335, (-0.2220003322,), 1.037373863),
            Square(0.4231678025, (0.2090444017, 0.2605228535), -0.4793936584),
            Square(2.159873118, (0.6804375611, 0.6262487896, 0.05581775953), -0.1348878379),
            Square(-4.084881089, (4.087900984, 2.245706066, 0.273521433, -1.959990847), -3.394311456),
        ),
    ),
)

QUINTICS: tuple[Quintics, ...] = ("classic", "you", "polar_express")
PRESETS: tuple[Preset, ...] = (*QUINTICS, "squares")

# Rounding noise in near-null directions of the Gram form grows by a² a step, so the amplification A times the unit
# roundoff u bounds the damage. Above the limit, stress sets show singular values out of range, and NaN above 4.
_UNIT_ROUNDOFF = {
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
    torch.float32: 2.0**-24,
    torch.float64: 2.0**-53,
}
_SAFE = {torch.float16: 0.1, torch.bfloat16: 0.05, torch.float32: 0.05, torch.float64: 0.05}

# What automatic restarts aim at: in fp32 and fp64 a Gram form within 5e-4 and 1e-9 of the standard form.
_TARGET = {**_SAFE, torch.float32: 1e-5, torch.float64: 1e-9}


@overload
def coefficient_sequence(coefficients: Quintics, steps: int) -> Coefficients: ...
@overload
def coefficient_sequence(coefficients: str | Sequence[float] | Sequence[Sequence[float]], steps: int) -> Polynomial: ...
def coefficient_sequence(coefficients: str | Sequence[float] | Sequence[Sequence[float]], steps: int) -> Polynomial:
    """The ``(a, b, c)`` of each of ``steps`` Newton–Schulz steps, or the blocks of ``"squares"``.

    Args:
        coefficients: a preset name, one ``(a, b, c)`` that every step repeats (as ``torch.optim.Muon``), or a
            sequence of ``(a, b, c)``, of which the first ``steps`` are used.
        steps: number of steps, at least 1. ``"squares"`` stands for five, and is not divided.

    Raises:
        ValueError: unknown preset, malformed coefficients, more steps than the preset or sequence has, or other than
            the five of ``"squares"``.
        TypeError: ``steps`` is no integer.
    """
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise TypeError(f"steps must be an int, got {steps!r}; pass steps=5 for the presets' full length")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}; pass steps=5 for the presets' full length")
    if isinstance(coefficients, str):
        if coefficients == "classic":
            return (_CLASSIC,) * steps
        if coefficients == "polar_express":
            return polar_express(steps)
        if coefficients == "you":
            return _prefix(_YOU, steps, "coefficients='you'")
        if coefficients == SQUARES.name:
            if steps != SQUARES.steps:
                raise ValueError(
                    f"steps={steps}, but coefficients='{SQUARES.name}' is {len(SQUARES.blocks)} blocks that stand for "
                    f"{SQUARES.steps} steps together; pass steps={SQUARES.steps}, or coefficients='polar_express', "
                    "which defines any number"
                )
            return SQUARES
        raise ValueError(
            f"coefficients={coefficients!r} is no preset; use one of {', '.join(PRESETS)} or (a, b, c) values "
            "('classic' is that of torch and Keller Jordan, 'you' Megatron's quintic)"
        )
    sequence = _explicit(coefficients) if isinstance(coefficients, Sequence) else None
    if sequence is None:
        raise ValueError(
            f"coefficients={coefficients!r} is no sequence of finite (a, b, c); "
            f"use one of {', '.join(PRESETS)}, (a, b, c), or ((a, b, c), ...)"
        )
    # One triple repeats, as in torch.optim.Muon; a sequence of triples means itself.
    repeats = len(sequence) == 1 and isinstance(coefficients[0], (int, float))
    return sequence * steps if repeats else _prefix(sequence, steps, "the coefficients sequence")


def _prefix(sequence: Coefficients, steps: int, name: str) -> Coefficients:
    if steps > len(sequence):
        raise ValueError(
            f"steps={steps}, but {name} defines {len(sequence)}; pass steps={len(sequence)} or fewer, "
            "or coefficients='polar_express', which defines any number"
        )
    return sequence[:steps]


def _explicit(coefficients: Sequence[object]) -> Coefficients | None:
    """``coefficients`` as triples, a single one alone; ``None`` if malformed."""
    rows: list[object] = [coefficients] if _is_triple(coefficients) else list(coefficients)
    if not rows or not all(_is_triple(row) for row in rows):
        return None
    return tuple((float(row[0]), float(row[1]), float(row[2])) for row in rows)  # type: ignore[index]


def _is_triple(row: object) -> bool:
    return (
        isinstance(row, Sequence)
        and len(row) == 3
        and all(isinstance(v, (int, float)) and abs(v) <= sys.float_info.max for v in row)
    )


@lru_cache(maxsize=64)
def polar_express(steps: int) -> Coefficients:
    """Polar Express coefficients: each step is the minimax odd quintic for what the steps before it left.

    Amsel et al., "The Polar Express" (arXiv 2505.16932), with its cushion; divided by the safety factor as
    ``(a/s, b/s³, c/s⁵)`` so that singular values slightly above one stay inside the interval.
    """
    lower, upper = _POLAR_LOWER, 1.0
    sequence = []
    for _ in range(steps):
        a, b, c = _minimax_quintic(max(lower, _POLAR_CUSHION * upper), upper)
        if _POLAR_CUSHION * upper > lower:
            # Optimal for a narrower interval: recentre the image of [lower, upper] on one.
            scale = 2.0 / (_quintic(lower, a, b, c) + _quintic(upper, a, b, c))
            a, b, c = a * scale, b * scale, c * scale
        sequence.append((a / _POLAR_SAFETY, b / _POLAR_SAFETY**3, c / _POLAR_SAFETY**5))
        lower = _quintic(lower, a, b, c)
        upper = 2.0 - lower
    return tuple(sequence)


def _quintic(s: float, a: float, b: float, c: float) -> float:
    return s * (a + s * s * (b + s * s * c))


def _minimax_quintic(lower: float, upper: float) -> tuple[float, float, float]:
    """``(a, b, c)`` that minimizes ``max |1 - p(s)|`` over ``[lower, upper]``, by the Remez exchange."""
    if lower >= (1.0 - 5e-6) * upper:  # the limit for a vanishing interval: the Padé (Newton–Schulz) quintic
        return 1.875 / upper, -1.25 / upper**3, 0.375 / upper**5
    # Four alternation points: the ends, and the two interior extrema, which the exchange moves.
    inner, outer = (3 * lower + upper) / 4, (lower + 3 * upper) / 4
    error = math.inf
    for _ in range(100):
        points = (lower, inner, outer, upper)
        rows = [[s, s**3, s**5, sign] for s, sign in zip(points, (1.0, -1.0, 1.0, -1.0), strict=True)]
        solved = torch.linalg.solve(
            torch.tensor(rows, dtype=torch.float64, device="cpu"), torch.ones(4, dtype=torch.float64, device="cpu")
        ).tolist()
        a, b, c, new_error = (float(v) for v in solved)
        if abs(error - new_error) <= 1e-15:
            break
        error = new_error
        root = math.sqrt(9 * b * b - 20 * a * c)  # p'(s) = a + 3b s² + 5c s⁴
        inner, outer = (math.sqrt((-3 * b + sign * root) / (10 * c)) for sign in (-1.0, 1.0))
    return a, b, c


def amplification(coefficients: Coefficients, restarts: Sequence[int]) -> float:
    """How much the Gram form magnifies noise: largest ``Π a²`` over a restart block but its last step."""
    edges = [0, *restarts, len(coefficients)]
    return max(
        math.prod(a * a for a, _, _ in coefficients[start : stop - 1]) for start, stop in itertools.pairwise(edges)
    )


def is_safe(coefficients: Coefficients, restarts: Sequence[int], storage: Storage) -> bool:
    """Whether the Gram form in ``storage`` keeps amplified rounding noise below the limit.

    Where the dtype changes, it must restart: what it carries on is ``X``.
    """
    spans = storage_spans(storage, len(coefficients))
    changes = {start for _, start, _ in spans[1:]}
    return changes <= set(restarts) and all(
        _noise(coefficients[start:stop], span_restarts(restarts, start, stop), dtype) <= _SAFE[dtype]
        for dtype, start, stop in spans
    )


def span_restarts(restarts: Sequence[int], start: int, stop: int) -> tuple[int, ...]:
    """Those inside the steps from ``start`` to ``stop``, counted from ``start``."""
    return tuple(restart - start for restart in restarts if start < restart < stop)


def _noise(coefficients: Coefficients, restarts: Sequence[int], dtype: torch.dtype) -> float:
    return amplification(coefficients, restarts) * _UNIT_ROUNDOFF[dtype]


@lru_cache(maxsize=256)
def safe_restarts(coefficients: Polynomial, storage: Storage) -> tuple[int, ...]:
    """The fewest restarts that are accurate in ``storage``; among equals, the least amplification, and then the latest.

    A restart ``i`` comes before the 0-based step ``i``. At five steps in fp16 and fp32: ``(3,)`` for classic, whose
    steps are all equal, else ``(2,)``; bench/numerics.py compares them on its stress set. Of squares, before each
    block but the first. In mixed storage every step in bf16 is a block of its own: a step of the standard form.
    """
    if isinstance(coefficients, Squares):
        return tuple(range(1, len(coefficients.blocks)))
    if not isinstance(storage, torch.dtype):
        (dtype, _, stop), *_ = storage_spans(storage, len(coefficients))
        return (*safe_restarts(coefficients[:stop], dtype), *range(stop, len(coefficients)))
    every = tuple(range(1, len(coefficients)))
    for count in range(len(every)):
        latest = reversed(list(itertools.combinations(every, count)))  # of equals, min takes the first
        best = min(latest, key=lambda r: amplification(coefficients, r))
        if _noise(coefficients, best, storage) <= _TARGET[storage]:
            return best
    return every  # nothing is left to amplify


def check_storage(coefficients: Polynomial, storage: Storage) -> None:
    """Raise ``ValueError`` where ``coefficients`` have no form that is safe in ``storage``.

    In bf16 blocks of squares take singular values of the stress set (bench/numerics.py) out of range. Quintics have the
    standard form there, which multiplies ``X`` after every step.
    """
    if isinstance(coefficients, Squares) and storage in (torch.bfloat16, MIXED):
        raise ValueError(
            f"coefficients='{coefficients.name}' is not safe in {storage}, whose rounding its long blocks amplify; use "
            "torch.float16, or coefficients='polar_express'"
        )


def restarts_hold(restarts: tuple[int, ...], coefficients: Polynomial, storage: Storage) -> bool:
    """Whether a Gram form with these restarts, which may be of other coefficients, computes these safely."""
    if isinstance(coefficients, Squares):
        return restarts == safe_restarts(coefficients, storage)
    return max(restarts, default=0) < len(coefficients) and is_safe(coefficients, restarts, storage)


def checked_restarts(
    restarts: Literal["auto"] | Sequence[int], coefficients: Polynomial, storage: Storage
) -> tuple[int, ...]:
    """``restarts`` as a tuple, chosen by ``safe_restarts`` if ``"auto"``.

    Raises:
        ValueError: not strictly increasing indices inside ``1 … steps-1``, unsafe in ``storage``, or other than those
            that squares have by themselves; or as :func:`check_storage`.
    """
    check_storage(coefficients, storage)
    if isinstance(restarts, str):
        if restarts != "auto":
            raise ValueError(f"restarts={restarts!r} is unknown; use 'auto' or step indices such as (2,)")
        return safe_restarts(coefficients, storage)
    schedule = tuple(restarts)
    if isinstance(coefficients, Squares):
        if schedule != safe_restarts(coefficients, storage):
            raise ValueError(
                f"restarts={schedule!r} are not those of coefficients='{coefficients.name}', which begins each of its "
                "blocks with one; use restarts='auto'"
            )
        return schedule
    steps = len(coefficients)
    if any(isinstance(r, bool) or not isinstance(r, int) or not 0 < r < steps for r in schedule):
        raise ValueError(f"restarts={schedule!r} must be step indices from 1 to {steps - 1}; or use restarts='auto'")
    if any(later <= earlier for earlier, later in itertools.pairwise(schedule)):
        raise ValueError(f"restarts={schedule!r} must be strictly increasing; or use restarts='auto'")
    if not is_safe(coefficients, schedule, storage):
        if isinstance(storage, torch.dtype):
            why = f"amplified rounding noise {_noise(coefficients, schedule, storage):.2g} is above {_SAFE[storage]:g}"
        else:
            why = "it must restart where bf16 begins, and seldom have two steps without one from there on"
        raise ValueError(
            f"restarts={schedule!r} is unsafe for these coefficients in {storage}: {why}; use restarts='auto' "
            f"({safe_restarts(coefficients, storage)!r}) or method='standard'"
        )
    return schedule
