"""Products that are repeated: what a race does to one of fifty, planted in products that are right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dmuon.kernels import Arithmetic, Square, Variant
from dmuon.planning import repetition
from dmuon.planning.repetition import REPEATS, product_fault

LOADED = Variant("gram", (2,), "triton", 1, "128x64w8s4dhplg8")
QUACK = Variant("gram", (2,), "quack", 1)
KINDS = ("gram", "symmetric", "added", "square")
NAMES = {
    "gram": "Gram matrix",
    "symmetric": "product",
    "added": "product and addend",
    "square": "square and two addends",
}
Plant = Callable[[Tensor, int], object]  # changes a result, of which it is the how-manieth


class Planted(Arithmetic):
    """Mirrors what torch computes in fp32, and lets ``plant`` at the results of one ``kind``."""

    __slots__ = ("calls", "kind", "plant")

    def _stored(self, kind: str, result: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        lower = result.tril()
        result = (lower + lower.mT - torch.diag_embed(lower.diagonal(dim1=-2, dim2=-1))).to(x.dtype)
        if kind == self.kind:
            self.calls.append(kind)
            self.plant(result, len(self.calls))
        return result if out is None else out.copy_(result)

    def gram(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return self._stored("gram", x.float() @ x.mT.float(), x, out)

    def symmetric(self, a, b, c=None, *, alpha=1.0, beta=1.0, out=None, b_symmetric=True):
        result = alpha * (a.float() @ b.float())
        kind = "symmetric" if c is None else "added"
        return self._stored(kind, result if c is None else result + beta * c.float(), a, out)

    def square(self, s: Tensor, square: Square, stored, *, out: Tensor | None = None) -> Tensor:
        total = square.square * s.float() @ s.float() + square.identity * torch.eye(s.shape[-1])
        total += sum(factor * x.float() for factor, x in zip(square.addends, stored, strict=True))
        return self._stored("square", total, s, out)


def _fault(monkeypatch: pytest.MonkeyPatch, variant: Variant, kind: str, plant: Plant) -> str | None:
    def make(used: Variant, device: torch.device, dtype: torch.dtype) -> Planted:
        result = Planted(dtype, dtype)
        planted = used == variant
        for name, value in (("kind", kind if planted else ""), ("calls", []), ("plant", plant)):
            object.__setattr__(result, name, value)
        return result

    monkeypatch.setattr(repetition, "make_arithmetic", make)
    x = torch.randn(2, 24, 40, generator=torch.Generator().manual_seed(0))
    return product_fault(x, variant, torch.float16)


def _nothing(result: Tensor, call: int) -> None:
    pass


@pytest.mark.parametrize("variant", [LOADED, QUACK])
def test_what_is_the_same_each_time_is_not_at_fault(monkeypatch, variant):
    assert _fault(monkeypatch, variant, "", _nothing) is None


@pytest.mark.parametrize("variant", [LOADED, QUACK])
@pytest.mark.parametrize("kind", KINDS)
def test_one_entry_that_differs_once_is_seen(monkeypatch, variant, kind):
    """In the last of all repeats, and by one unit in the last place."""
    counts = []

    def count(result: Tensor, call: int) -> None:
        counts.append(call)

    assert _fault(monkeypatch, variant, kind, count) is None
    last = max(counts)
    assert last >= REPEATS

    def race(result: Tensor, call: int) -> None:
        if call == last:
            for at in ((1, 20, 3), (1, 3, 20)):
                result[at] = torch.nextafter(result[at], result.new_tensor(torch.inf))

    assert _fault(monkeypatch, variant, kind, race) == f"gives another {NAMES[kind]} in 1 of {REPEATS - 1} repeats"


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_that_is_none_is_seen(monkeypatch, kind):
    def once(result: Tensor, call: int) -> None:
        if call == 20:
            result[0, 5, 5] = torch.nan

    assert f"gives another {NAMES[kind]} in 1 of" in _fault(monkeypatch, QUACK, kind, once)

    def always(result: Tensor, call: int) -> None:
        result[0, 5, 5] = torch.nan

    assert _fault(monkeypatch, LOADED, kind, always) is not None


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_symmetric_is_seen(monkeypatch, kind):
    def above(result: Tensor, call: int) -> None:
        result[1, 2, 9] = torch.nextafter(result[1, 2, 9], result.new_tensor(torch.inf))

    told = _fault(monkeypatch, QUACK, kind, above)
    expected = "Gram matrix" if kind == "gram" else NAMES[kind]
    assert told == f"gives a {expected} that is not symmetric bitwise"


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tiles_without_a_loader_give_the_same(monkeypatch, kind):
    """Bitwise, where nothing is added; else a compiler may contract other pairs of operations."""

    def by(steps: int) -> Plant:
        def off(result: Tensor, call: int) -> None:
            value = result.float().abs().max()
            result[1, 4, 4] += 2.0**-10 * steps * value

        return off

    told = f"gives a {NAMES[kind]} that is off by"
    peer = "from that of gram r2 triton 128x64w8s4dhg8 by1"
    exact = kind in ("gram", "symmetric")
    small = _fault(monkeypatch, LOADED, kind, by(1))
    assert small.startswith(told) and small.endswith(peer) if exact else small is None
    large = _fault(monkeypatch, LOADED, kind, by(8))
    assert large.startswith(told) and large.endswith(peer)
    assert _fault(monkeypatch, QUACK, kind, by(8)) is None, "nothing sums in its order"


def test_what_sums_in_the_same_order():
    assert str(LOADED.same_sums) == "gram r2 triton 128x64w8s4dhg8 by1" and not LOADED.same_sums.unproven
    both = Variant("gram", (2,), "quack", 1, LOADED.tile)
    assert QUACK.same_sums is None and both.same_sums is None and LOADED.same_sums.same_sums is None
