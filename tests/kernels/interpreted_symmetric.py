"""Runs the symmetric-product kernel in Triton's interpreter; prints one line of JSON for each case.

The interpreter is chosen when a kernel is decorated, so this is a process of its own:
``TRITON_INTERPRET=1 python interpreted_symmetric.py``. Without the interpreter on, importing it only names the
cases.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmuon.kernels.symmetric_tiles import TileConfig
from dmuon.kernels.symmetric_triton import symmetric_product
from dmuon.kernels.symmetric_triton_kernel import lower_tile, triangular_root

POINTERS = TileConfig(32, 16, 4, 2, group=2)
DESCRIPTORS = TileConfig(32, 16, 4, 2, descriptors=True, group=2)
VARIANTS = {"pointers": POINTERS, "descriptors": DESCRIPTORS}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
LAYOUTS = ("nn", "nt", "tn", "tt")  # of A and B: contiguous, or the transpose of a contiguous matrix

Case = dict[str, Any]


@triton.jit
def _decode(rows, cols, side, GROUP: tl.constexpr, COUNT: tl.constexpr):
    index = tl.minimum(tl.arange(0, COUNT), side * (side + 1) // 2 - 1)
    row, col = lower_tile(index, side, GROUP)
    tl.store(rows + tl.arange(0, COUNT), row)
    tl.store(cols + tl.arange(0, COUNT), col)


@triton.jit
def _root(indices, roots, COUNT: tl.constexpr):
    offsets = tl.arange(0, COUNT)
    tl.store(roots + offsets, triangular_root(tl.load(indices + offsets)))


@triton.jit
def _count(out, stop):
    for index in tl.range(0, stop):
        tl.store(out, index + 1)


def unusable() -> str | None:
    """Why the interpreter itself does not work: Triton 3.6's with NumPy 2.4 has no loops."""
    try:
        _count[(1,)](torch.zeros(1, dtype=torch.int32), 3)
    except triton.runtime.errors.InterpreterError as error:
        return str(error)
    return None


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def commuting(k: int, m: int) -> tuple[Tensor, Tensor]:
    """Two different polynomials of one symmetric matrix each: ``(k, m, m)``, fp64."""
    x = normal(k, m, m) / m**0.5
    s = x + x.mT
    return s @ s - 0.3 * s, 0.5 * s @ s + s + 0.1 * torch.eye(m, dtype=torch.float64)


def laid_out(x: Tensor, layout: str) -> Tensor:
    return x.contiguous() if layout == "n" else x.mT.contiguous().mT


def facts(a: Tensor, b: Tensor, c: Tensor | None = None, **options: Any) -> Case:
    """Runs the product twice; what came out, against fp64."""
    copies = [None if x is None else x.clone() for x in (a, b, c)]
    alpha, beta = options.get("alpha", 1.0), options.get("beta", 0.0)
    exact = alpha * (a.double() @ b.double())
    if c is not None and beta:
        exact += beta * c.double()
    first = symmetric_product(a, b, c, **options).clone()
    second = symmetric_product(a, b, c, **options)
    inputs = zip(copies, (a, b, c), strict=True)
    out = options.get("out")
    return {
        "error": ((second.double() - exact).abs().max() / exact.abs().max()).item(),
        "tolerance": 1e-6 if a.dtype == torch.float32 else 1e-3,
        "symmetric": torch.equal(second, second.mT),
        "repeats": torch.equal(first, second),
        "inputs_unchanged": all(x is None or x is out or torch.equal(copy, x) for copy, x in inputs),
        "out_returned": out is None or second is out,
    }


@dataclass(frozen=True)
class Products:
    """Products in one variant and dtype."""

    config: TileConfig
    dtype: torch.dtype

    def gram(self, k: int, m: int, p: int, layouts: str, **options: Any) -> Case:
        x = normal(k, m, p).to(self.dtype)
        a, b = laid_out(x, layouts[0]), laid_out(x.mT, layouts[1])
        return facts(a, b, config=self.config, **options)

    def layout(self, layouts: str) -> Case:
        return self.gram(1, 48, 64, layouts)

    def matrices_without_batch(self) -> Case:
        x = normal(48, 24).to(self.dtype)
        return facts(x, x.mT, config=self.config)

    def ragged(self) -> Case:
        # Descriptors need strides of 16 bytes.
        m, p = (40, 24) if self.config.descriptors else (37, 29)
        return self.gram(2, m, p, "nt")

    def smaller_than_a_tile(self) -> Case:
        return self.gram(2, 8, 8, "nt")

    def commuting_factors(self) -> Case:
        a, b = (x.to(self.dtype) for x in commuting(2, 64))
        return facts(a, b, config=self.config)

    def symmetric_b_read_as_transpose(self) -> Case:
        a, b = (x.to(self.dtype) for x in commuting(2, 64))
        return facts(a, b, config=self.config, b_symmetric=True)

    def scaled_with_addend(self) -> Case:
        a, b = (x.to(self.dtype) for x in commuting(2, 48))
        return facts(a, b, a, alpha=0.75, beta=-1.5, config=self.config)

    def addend_column_major(self) -> Case:
        a, b = (x.to(self.dtype) for x in commuting(2, 48))
        c = laid_out(a, "t")
        return facts(a, b, c, beta=2.0, config=self.config)

    def lower_triangle_is_mirrored(self) -> Case:
        """The product is not symmetric at all: exactly its lower triangle must come out, twice."""
        a, b = normal(64, 32, seed=1).to(self.dtype), normal(32, 64, seed=2).to(self.dtype)
        result = symmetric_product(a, b, config=self.config)
        exact = (a.double() @ b.double()).tril()
        exact = exact + exact.tril(-1).mT
        return {
            "error": ((result.double() - exact).abs().max() / exact.abs().max()).item(),
            "tolerance": 1e-6 if self.dtype == torch.float32 else 1e-3,
            "symmetric": torch.equal(result, result.mT),
        }

    def out_is_the_addend(self) -> Case:
        a, b = (x.to(self.dtype) for x in commuting(2, 64))
        c = a + b
        apart = symmetric_product(a, b, c, alpha=0.5, beta=1.5, config=self.config)
        for view in (c, c.mT):  # symmetric, so its transpose is the same matrix
            target = c.clone()
            addend = target if view is c else target.mT
            result = symmetric_product(a, b, addend, alpha=0.5, beta=1.5, out=target, config=self.config)
            if result is not target or not torch.equal(target, apart):
                return {"in_place_equals_apart": False}
        return {"in_place_equals_apart": True}

    def out_column_major(self) -> Case:
        out = torch.full((2, 48, 48), torch.nan, dtype=self.dtype).mT
        return self.gram(2, 48, 32, "nt", out=out)

    def unread_addend_is_nan(self) -> Case:
        c = torch.full((2, 48, 48), torch.nan, dtype=self.dtype)
        x = normal(2, 48, 32).to(self.dtype)
        apart = facts(x, x.mT, c, beta=0.0, config=self.config, out=torch.full_like(c, torch.nan))
        in_place = facts(x, x.mT, c, beta=0.0, config=self.config, out=c)
        del apart["inputs_unchanged"]  # NaN equals nothing
        return {**apart, "error": max(apart["error"], in_place["error"])}

    def batch_of_rows_in_a_buffer(self) -> Case:
        """Batch strides larger than a matrix, for operands and result."""
        buffer = torch.zeros(3, 5000, dtype=self.dtype)
        a = buffer[:, : 48 * 32].view(3, 48, 32)
        a.copy_(normal(3, 48, 32))
        out = torch.full((3, 4096), torch.nan, dtype=self.dtype)[:, : 48 * 48].view(3, 48, 48)
        return facts(a, a.mT, out=out, config=self.config)

    def nan_stays_in_its_matrix(self) -> Case:
        x = normal(2, 48, 32).to(self.dtype)
        x[0, 5, 7] = torch.nan
        result = symmetric_product(x, x.mT, config=self.config)
        other = symmetric_product(x[1], x[1].mT, config=self.config)
        return {"isolated": bool(result[0, 5].isnan().all()) and torch.equal(result[1], other)}

    def many_super_rows(self) -> Case:
        config = TileConfig(16, 16, 4, 2, descriptors=self.config.descriptors, group=3)
        x = normal(128, 16).to(self.dtype)
        return facts(x, x.mT, config=config)


def strided_without_unit_stride() -> Case:
    x = normal(2, 80, 60).to(torch.float32)[:, ::2, ::3]
    c = normal(2, 80, 80).to(torch.float32)
    c = (c + c.mT)[:, ::2, ::2]
    return facts(x, x.mT, c, beta=0.5, config=POINTERS)


def batch_in_the_last_dimension() -> Case:
    x = normal(40, 24, 3).to(torch.float32).permute(2, 0, 1)
    out = torch.empty(40, 40, 3).permute(2, 0, 1)
    return facts(x, x.mT, out=out, config=POINTERS)


def expanded_batch() -> Case:
    x = normal(1, 40, 24).to(torch.float16).expand(3, 40, 24)
    c = torch.eye(40, dtype=torch.float16).expand(3, 40, 40)
    return facts(x, x.mT, c, beta=2.0, config=POINTERS)


def unaligned_addresses() -> Case:
    x = torch.zeros(48 * 32 + 1, dtype=torch.float16)[1:].view(48, 32)
    x.copy_(normal(48, 32))
    return facts(x, x.mT, config=POINTERS)


def default_config_without_descriptors_where_impossible() -> Case:
    x = normal(20, 12, seed=3).to(torch.float16)[:, 1:8]  # the default here takes descriptors
    return facts(x, x.mT)


def one_by_one() -> Case:
    x = normal(3, 1, 5).to(torch.float32)
    return facts(x, x.mT, config=POINTERS)


def no_inner_dimension() -> Case:
    a, c = torch.empty(2, 40, 0), normal(2, 40, 40).to(torch.float32)
    c = c + c.mT
    plain = symmetric_product(a, a.mT, config=POINTERS, out=torch.full((2, 40, 40), torch.nan))
    scaled = symmetric_product(a, a.mT, c, beta=0.5, config=POINTERS)
    return {"zero": bool((plain == 0).all()), "scaled_addend": torch.equal(scaled, 0.5 * c)}


def nothing_to_do() -> Case:
    shapes = {}
    for shape in ((0, 4, 3), (2, 0, 3), (0, 3), (2, 0, 0)):
        a = torch.empty(shape)
        shapes[str(shape)] = list(symmetric_product(a, a.mT, config=POINTERS).shape)
    return {"shapes": shapes}


def far_rows_and_batches() -> Case:
    """Offsets beyond 2**31 elements; the memory between is reserved, and never touched."""
    storage = torch.empty(2**32 + 2**20, dtype=torch.float16)
    errors = []
    for shape, strides in (
        ((2, 16, 16), (2**32, 16, 1)),  # a stride that alone takes 64 bits
        ((4, 16, 16), (2**30, 16, 1)),  # batch · stride
        ((32, 16), (2**27, 1)),  # row · stride
        ((16, 32), (1, 2**27)),  # inner · stride, and its step through the loop
    ):
        x = storage.as_strided(shape, strides)
        x.copy_(normal(*shape))
        errors.append(facts(x, x.mT, config=TileConfig(16, 16, 4, 2))["error"])
    for shape, strides in (((4, 16, 16), (2**30, 16, 1)), ((32, 32), (2**27, 1))):
        x = normal(*shape[:-1], 16).to(torch.float16)
        out = storage.as_strided(shape, strides)
        errors.append(facts(x, x.mT, out=out, config=TileConfig(16, 16, 4, 2))["error"])
        errors.append(facts(x, x.mT, out, beta=0.5, config=TileConfig(16, 16, 4, 2))["error"])
    return {"error": max(errors), "tolerance": 1e-3}


def decoding_covers_the_lower_triangle() -> Case:
    wrong = []
    for side, group in itertools.product((*range(1, 34), 63, 64, 65, 128, 257, 699, 700), (1, 3, 8)):
        tiles = side * (side + 1) // 2
        count = triton.next_power_of_2(tiles)
        rows, cols = torch.empty(2, count, dtype=torch.int32).unbind()
        _decode[(1,)](rows, cols, side, GROUP=group, COUNT=count)
        rows, cols = rows[:tiles].long(), cols[:tiles].long()
        inside = bool(((cols >= 0) & (cols <= rows) & (rows < side)).all())
        in_order = bool((rows.div(group, rounding_mode="floor").diff() >= 0).all())
        if not inside or not in_order or (rows * side + cols).unique().numel() != tiles:
            wrong.append([side, group])
    return {"wrong": wrong}


def roots_are_exact_at_every_edge() -> Case:
    """At each triangular number, and one below it, as far as an index goes."""
    roots = torch.arange(1, 23169, dtype=torch.int64)
    edges = roots * (roots + 1) // 2
    indices = torch.cat([edges, edges - 1])
    expected = torch.cat([roots, roots - 1])
    count = triton.next_power_of_2(indices.numel())
    padded = torch.zeros(count, dtype=torch.int32)
    padded[: indices.numel()] = indices
    result = torch.empty_like(padded)
    _root[(1,)](padded, result, COUNT=count)
    return {"exact": torch.equal(result[: indices.numel()].long(), expected), "largest": int(indices.max())}


def refusals() -> Case:
    """The messages of calls that must not launch."""
    x = normal(2, 32, 32).to(torch.float32)
    buffer, odd = torch.zeros(3, 32, 32), torch.zeros(31, 31)
    calls: dict[str, Callable[[], object]] = {
        "out is a": lambda: symmetric_product(x, x.mT.clone(), out=x),
        "out is b": lambda: symmetric_product(x.clone(), x, out=x),
        "out meets a": lambda: symmetric_product(buffer[:2], x, out=buffer[1:]),
        "out meets c": lambda: symmetric_product(x, x, buffer[:2], beta=1.0, out=buffer[1:]),
        "out overlaps itself": lambda: symmetric_product(x, x, out=torch.zeros(32, 32).expand(2, 32, 32)),
        "dtypes": lambda: symmetric_product(x, x.half()),
        "dimensions": lambda: symmetric_product(x[None], x[None]),
        "shape of b": lambda: symmetric_product(x, x[:, :16]),
        "shape of c": lambda: symmetric_product(x, x, x[0], beta=1.0),
        "shape of out": lambda: symmetric_product(x, x, out=x[0]),
        "fp64": lambda: symmetric_product(x.double(), x.double()),
        "bf16": lambda: symmetric_product(x.bfloat16(), x.bfloat16()),
        "b_symmetric": lambda: symmetric_product(x[..., :16], x[:, :16], b_symmetric=True),
        "descriptors, address": lambda: symmetric_product(torch.zeros(1025)[1:].view(32, 32), x[0], config=DESCRIPTORS),
        "descriptors, stride": lambda: symmetric_product(odd, odd, config=DESCRIPTORS),
        "descriptors, expanded": lambda: symmetric_product(x[:1].expand(2, 32, 32), x, config=DESCRIPTORS),
        "descriptors, strided": lambda: symmetric_product(x[:, :, ::2], x[:, ::2], config=DESCRIPTORS),
        "too many tiles": lambda: symmetric_product(
            torch.zeros(1, 1).expand(1_000_000, 0), torch.zeros(1, 1).expand(0, 1_000_000), config=POINTERS
        ),
    }
    messages = {}
    for name, call in calls.items():
        try:
            call()
            messages[name] = "nothing was raised"
        except ValueError as error:
            messages[name] = str(error)
    return {"messages": messages}


SPECIAL: tuple[Callable[[], Case], ...] = (
    strided_without_unit_stride,
    batch_in_the_last_dimension,
    expanded_batch,
    unaligned_addresses,
    default_config_without_descriptors_where_impossible,
    one_by_one,
    no_inner_dimension,
    nothing_to_do,
    decoding_covers_the_lower_triangle,
    roots_are_exact_at_every_edge,
    refusals,
    far_rows_and_batches,  # last: if it fails, it may take the process with it
)
PRODUCTS = tuple(
    name for name in vars(Products) if not name.startswith("_") and name not in ("config", "dtype", "gram", "layout")
)


def cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    for (variant, config), (dtype, torch_dtype) in itertools.product(VARIANTS.items(), DTYPES.items()):
        products = Products(config, torch_dtype)
        for layouts in LAYOUTS:
            yield f"layout_{layouts}-{variant}-{dtype}", partial(products.layout, layouts)
        for name in PRODUCTS:
            yield f"{name}-{variant}-{dtype}", getattr(products, name)
    for case in SPECIAL:
        yield case.__name__, case


def main() -> None:
    torch.set_num_threads(1)
    reason = unusable()
    if reason is not None:
        print(json.dumps({"unusable": reason}))
        return
    for name, case in cases():
        try:
            result = case()
        except Exception as error:
            result = {"raised": f"{type(error).__name__}: {error}"}
        print(json.dumps({"case": name, **result}), flush=True)


if __name__ == "__main__":
    main()
