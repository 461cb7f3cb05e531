"""Newton–Schulz in restart blocks of squares: one polynomial of high degree a block, products of equal factors only."""

from __future__ import annotations

from dataclasses import dataclass

from .symmetric_tiles import MOST_ADDENDS


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
