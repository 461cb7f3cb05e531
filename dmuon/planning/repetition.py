"""Whether a kernel computes the same each time: what two warps race for comes out wrong once in many times."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dmuon.kernels import Square, Variant, make_arithmetic

REPEATS = 50
_AGREEMENT = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # of the largest entry, between two sums rounded apart


def product_fault(x: Tensor, variant: Variant, dtype: torch.dtype) -> str | None:
    """What is wrong with products whose result is symmetric, as ``variant`` computes them, or ``None``.

    Each is computed :data:`REPEATS` times without the host waiting: every result must be the first one bitwise, and the
    first one symmetric bitwise. Where other kernels sum in the same order (``Variant.same_sums``), it is their result:
    bitwise where nothing is added, else but for rounding. Of two addends the last is also where the result is written.

    Args:
        x: ``(k, m, n)``, ``m`` the small side, of any layout.
        dtype: half precision.
    """
    x = (x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)).to(dtype)
    peer = variant.same_sums
    alone = _products(x, variant)
    beside = _products(x, peer) if peer is not None else None
    for name, adds, product in alone:
        first = product()
        if not torch.equal(first, first.mT):
            return f"gives a {name} that is not symmetric bitwise"
        if beside is not None:
            expected = next(beside)[2]()
            most = float(expected.abs().max()) * (_AGREEMENT[dtype] if adds else 0.0)
            error = float((first.float() - expected.float()).abs().max())
            if not error <= most:
                return f"gives a {name} that is off by {error:.2g} from that of {peer}"
        others = torch.zeros((), dtype=torch.int64, device=x.device)
        for _ in range(REPEATS - 1):
            others += (product() != first).any()
        if int(others):
            return f"gives another {name} in {int(others)} of {REPEATS - 1} repeats"
    return None


def _products(x: Tensor, variant: Variant) -> Iterator[tuple[str, int, Callable[[], Tensor]]]:
    """Name, number of addends, and what computes it anew: all kinds of which Newton–Schulz consists."""
    arithmetic = make_arithmetic(variant, x.device, x.dtype)
    gram = arithmetic.gram(x)
    # Both factors are symmetric and commute, but are not the same tensor.
    power = arithmetic.symmetric(gram, gram)
    square = Square(0.5, (1.5, -0.25), 0.125)
    yield "Gram matrix", 0, lambda: arithmetic.gram(x)
    yield "product", 0, lambda: arithmetic.symmetric(gram, power)
    yield "product and addend", 1, lambda: arithmetic.symmetric(gram, gram, power, alpha=0.5, beta=-1.5)

    def sum_in_place() -> Tensor:
        out = power.clone()
        return arithmetic.square(gram, square, [gram, out], out=out)

    yield "square and two addends", 2, sum_in_place
