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
from typing import Any, Literal, TypeAlias, overload

import torch

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
        blocks: the squares of each block, in their order.
    """

    blocks: tuple[tuple[Square, ...], ...]


Coefficients: TypeAlias = "tuple[tuple[float, float, float], ...]"
Polynomial: TypeAlias = "Coefficients | Squares"
Quintics: TypeAlias = Literal["classic", "you", "polar_express"]

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

# Polar Express (Amsel et al., arXiv 2505.16932): each step is the minimax odd quintic for what the steps before it left
# of [1e-3, 1], with its cushion; divided by the safety factor 1.05 as (a/s, b/s³, c/s⁵), so that singular values
# slightly above one stay inside the interval. tests/kernels/test_coefficients.py derives them. All later steps are as
# the last one.
_POLAR_EXPRESS: Coefficients = (
    (7.892582874424405, -20.38301394587956, 13.555306149406919),
    (3.9114848681354224, -2.5464635929060826, 0.4268988319673066),
    (3.76065795569742, -2.512819018216559, 0.4323647349070063),
    (3.1603996736862876, -2.149649518898499, 0.39963669076643893),
    (2.191097161861733, -1.441662010214666, 0.32814648762315557),
    (1.8012394359879962, -1.0953424703117007, 0.2952358637440129),
    (1.7857156960413125, -1.0797984195053003, 0.29382244134500624),
    (1.7857142838574653, -1.0797969947959636, 0.29382231089806143),
    (1.7857142857142856, -1.079796998164345, 0.293822312425672),
)

# tests/kernels/test_squares.py bounds their range, docs/kernels.md says how they were found.
SQUARES = Squares(
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
PRESETS = (*QUINTICS, "squares")

# Rounding noise in near-null directions of the Gram form grows by a² a step, so the amplification A times the unit
# roundoff u bounds the damage. Above the limit, stress sets show singular values out of range, and NaN above 4.
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
            return (_POLAR_EXPRESS + _POLAR_EXPRESS[-1:] * steps)[:steps]
        if coefficients == "you":
            return _prefix(_YOU, steps, "coefficients='you'")
        if coefficients == "squares":
            if steps != 5:
                raise ValueError(
                    f"steps={steps}, but coefficients='squares' is {len(SQUARES.blocks)} blocks that stand for 5 steps "
                    "together; pass steps=5, or coefficients='polar_express', which defines any number"
                )
            return SQUARES
        raise ValueError(
            f"coefficients={coefficients!r} is no preset; use one of {', '.join(PRESETS)} or (a, b, c) values "
            "('classic' is that of torch and Keller Jordan, 'you' Megatron's quintic)"
        )
    is_one = _is_triple(coefficients)  # which repeats, as in torch.optim.Muon; a sequence of triples means itself
    rows: Sequence[Any] = [coefficients] if is_one else coefficients
    if not isinstance(rows, Sequence) or not rows or not all(map(_is_triple, rows)):
        raise ValueError(
            f"coefficients={coefficients!r} is no sequence of finite (a, b, c); "
            f"use one of {', '.join(PRESETS)}, (a, b, c), or ((a, b, c), ...)"
        )
    sequence = tuple((float(a), float(b), float(c)) for a, b, c in rows)
    return sequence * steps if is_one else _prefix(sequence, steps, "the coefficients sequence")


def _prefix(sequence: Coefficients, steps: int, name: str) -> Coefficients:
    if steps > len(sequence):
        raise ValueError(
            f"steps={steps}, but {name} defines {len(sequence)}; pass steps={len(sequence)} or fewer, "
            "or coefficients='polar_express', which defines any number"
        )
    return sequence[:steps]


def _is_triple(row: object) -> bool:
    return (
        isinstance(row, Sequence)
        and len(row) == 3
        and all(isinstance(v, (int, float)) and abs(v) <= sys.float_info.max for v in row)
    )


def noise(coefficients: Coefficients, restarts: Sequence[int], storage: torch.dtype) -> float:
    """What rounding to ``storage`` costs the Gram form: the largest ``Π a²`` over a restart block but its last step."""
    blocks = itertools.pairwise((0, *restarts, len(coefficients)))
    amplified = max(math.prod(a * a for a, _, _ in coefficients[start : stop - 1]) for start, stop in blocks)
    return amplified * torch.finfo(storage).eps / 2


@lru_cache(maxsize=256)
def safe_restarts(coefficients: Polynomial, storage: torch.dtype) -> tuple[int, ...]:
    """The fewest restarts that are accurate in ``storage``; among equals, those with the least noise, and the latest.

    A restart ``i`` comes before the 0-based step ``i``. At five steps in fp16 and fp32: ``(3,)`` for classic, whose
    steps are all equal, else ``(2,)``; bench/numerics.py compares them on its stress set. Of squares, before each
    block but the first.
    """
    if isinstance(coefficients, Squares):
        return tuple(range(1, len(coefficients.blocks)))
    every = tuple(range(1, len(coefficients)))
    for count in range(len(every)):
        latest = reversed(list(itertools.combinations(every, count)))  # of equals, min takes the first
        best = min(latest, key=lambda restarts: noise(coefficients, restarts, storage))
        if noise(coefficients, best, storage) <= _TARGET[storage]:
            return best
    return every  # nothing is left to amplify


def check_storage(coefficients: Polynomial, storage: torch.dtype) -> None:
    """Raise ``ValueError`` where ``coefficients`` have no form that is safe in ``storage``.

    In bf16 blocks of squares take singular values of the stress set (bench/numerics.py) out of range. Quintics have the
    standard form there, which multiplies ``X`` after every step.
    """
    if isinstance(coefficients, Squares) and storage == torch.bfloat16:
        raise ValueError(
            f"coefficients='squares' is not safe in {storage}, whose rounding its long blocks amplify; use "
            "torch.float16, or coefficients='polar_express'"
        )


def checked_restarts(
    restarts: Literal["auto"] | Sequence[int], coefficients: Polynomial, storage: torch.dtype
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
                f"restarts={schedule!r} are not those of coefficients='squares', which begins each of its "
                "blocks with one; use restarts='auto'"
            )
        return schedule
    steps = len(coefficients)
    if any(type(r) is not int for r in schedule) or [r for r in range(1, steps) if r in schedule] != [*schedule]:
        raise ValueError(
            f"restarts={schedule!r} must be step indices from 1 to {steps - 1} that increase; or use restarts='auto'"
        )
    found = noise(coefficients, schedule, storage)
    if found > _SAFE[storage]:
        raise ValueError(
            f"restarts={schedule!r} is unsafe for these coefficients in {storage}: amplified rounding noise "
            f"{found:.2g} is above {_SAFE[storage]:g}; use restarts='auto' "
            f"({safe_restarts(coefficients, storage)!r}) or method='standard'"
        )
    return schedule
