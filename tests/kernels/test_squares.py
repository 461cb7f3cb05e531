"""Newton–Schulz in two restart blocks of squares: polynomial, range, products, back ends, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from zoo import gaussian, relative

from dmuon.kernels import (
    Variant,
    coefficient_sequence,
    iterate,
    orthogonalize,
)
from dmuon.kernels.arithmetic import SplitArithmetic

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from numerics import polynomial

CPU = torch.device("cpu")
FP16, FP32, FP64 = torch.float16, torch.float32, torch.float64
SQUARES: Any = coefficient_sequence("squares", 5)
SPLIT = Variant("gram", (1,), "split", 2)
ZOO = zoo.matrices(48, 128)
WELL_CONDITIONED = ("gaussian", "orthogonal", "condition_10", "identity")


def exact(x: torch.Tensor) -> torch.Tensor:
    """The polynomial of the singular values, in fp64."""
    u, sigma, vh = torch.linalg.svd(x.double(), full_matrices=False)
    norm = torch.linalg.vector_norm(sigma, dim=-1, keepdim=True)
    return u * polynomial(sigma / norm, SQUARES).unsqueeze(-2) @ vh


def squares(x: torch.Tensor, **options: object) -> torch.Tensor:
    return orthogonalize(x, coefficients="squares", **options)


# -- the polynomial ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", "split"])
@pytest.mark.parametrize("shape", [(40, 40), (3, 40, 100), (2, 100, 40), (1, 7), (5, 1), (300, 520)], ids=str)
def test_it_is_the_polynomial_of_the_singular_values(shape, backend):
    x = gaussian(*shape).double()
    assert relative(squares(x, backend=backend), exact(x)) <= 1e-10


@pytest.mark.parametrize("backend", ["torch", "split"])
def test_hard_matrices_equal_fp64_in_fp32_and_stay_in_range_in_fp16(backend):
    top = polynomial(torch.linspace(0, 1, 100_001, dtype=FP64), SQUARES).max().item()
    for name, x in ZOO.items():
        limit = 2e-3 if name in ("ones", "spike") else 5e-4
        assert relative(squares(x, backend=backend), exact(x)) <= limit, name
        half = squares(x, backend=backend, dtype=FP16)
        assert name not in WELL_CONDITIONED or relative(half, exact(x)) <= 1e-2, name
        assert half.isfinite().all() and torch.linalg.matrix_norm(half, 2).item() <= top + 0.06, name


@pytest.mark.pitfall("P35", "P38", "P40")
@pytest.mark.parametrize("dtype", [None, FP16])
def test_scale_zero_and_nan_are_as_with_other_coefficients(dtype):
    x = torch.stack([ZOO["gaussian"], ZOO["heavy_tail"], 0 * ZOO["gaussian"], ZOO["ones"]])
    ours = squares(x, dtype=dtype)
    assert torch.equal(squares(x * 2.0**40, dtype=dtype), ours) and not ours[2].any()
    assert relative(squares(ZOO["gaussian"] * 1e-42), exact(ZOO["gaussian"] * 1e-42)) <= 5e-5
    poisoned = x.clone()
    poisoned[1, 3, 5] = torch.inf
    found = squares(poisoned, dtype=dtype)
    assert found[1].isnan().any() and torch.equal(found[[0, 2, 3]], ours[[0, 2, 3]])
    tall = squares(x.mT, dtype=dtype)
    assert relative(tall.mT, ours) <= (1e-4 if dtype is None else 0.1)
    alone = torch.stack([squares(matrix, dtype=dtype) for matrix in x])
    assert relative(alone, ours) <= (1e-5 if dtype is None else 0.05)


# -- its products --------------------------------------------------------------------------------------------


def test_every_stored_matrix_is_symmetric_bitwise():
    seen = []

    class Recording(SplitArithmetic):
        def square(self, *arguments, **options):
            seen.append(super().square(*arguments, **options).clone())
            return seen[-1].clone()

    x = torch.stack([ZOO["real_gradient"], ZOO["half_null"]])
    x /= torch.linalg.matrix_norm(x)[:, None, None]
    iterate(x, SPLIT, SQUARES, Recording(FP16, FP32))
    assert len(seen) == 9 and all(torch.equal(s, s.mT) and torch.equal(s, s.half().float()) for s in seen)


# -- how it runs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 6}, r"steps=6.*or coefficients='polar_express'"),
        ({"restarts": (2,)}, r"restarts=\(2,\) are not those of coefficients='squares'"),
        ({"dtype": torch.bfloat16}, r"coefficients='squares' is not safe in torch.bfloat16.*'polar_express'"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        squares(gaussian(8, 16), **options)


# -- what they do to singular values -----------------------------------------------------------------------------------


def test_the_preset_keeps_its_range_on_the_whole_interval() -> None:
    """On [1e-3, 1] inside [0.74, 1.13], as Polar Express or closer; and nothing between 0 and 1 goes further up.

    A little above one lies what rounding adds to the norm. Between two points the slope lets nothing move further.
    """
    sigma = torch.linspace(0, 1.002, 400_001, dtype=FP64, requires_grad=True)
    taken = polynomial(sigma, SQUARES)
    (slope,) = torch.autograd.grad(taken.sum(), sigma)
    between = slope.abs().max() * sigma[1].detach() / 2
    assert between < 3e-3
    assert taken[(sigma >= 1e-3) & (sigma <= 1)].min() - between >= 0.74
    assert taken.min() >= 0 and taken[sigma <= 1].max() + between <= 1.13
    assert taken[sigma > 1].max() + between <= 1.13 + 0.06


def test_stored_matrices_stay_far_inside_the_range_of_fp16() -> None:
    """Their largest eigenvalues, of singular values in [0, 1]."""
    sigma, largest = torch.linspace(0, 1, 100_001, dtype=FP64), 0.0
    for block in SQUARES.blocks:
        stored = [sigma * sigma]
        for square in block:
            added = sum(factor * s for factor, s in zip(square.addends, stored, strict=False))
            stored.append(square.square * stored[-1] ** 2 + added + square.identity)
        largest = max(largest, *(s.abs().max().item() for s in stored))
        sigma = sigma * stored[-1]
    assert largest < 100
