"""An installed quack is used for equal factors only, and only while it keeps its contract; a fake one stands for it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest import mock

import pytest
import torch
from torch import Tensor

from dmuon.kernels import Variant, adapted, alternatives, choose_variant, coefficient_sequence, symmetric_quack, variant
from dmuon.kernels import arithmetic as arithmetic_module
from dmuon.kernels.arithmetic import QuackArithmetic, make_arithmetic
from dmuon.kernels.iteration import iterate, make_iteration
from dmuon.kernels.symmetric_quack import equal_factors, quack_fault

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
NAMED = Variant("gram", (2,), "quack", 4)


def right(a: Tensor, b: Tensor, *, C: Tensor | None, out: Tensor, alpha: float, beta: float) -> None:
    """What quack promises."""
    result = alpha * a.float() @ b.float() + (0 if C is None else beta * C.float())
    out.copy_(result.tril() + result.tril(-1).mT)


def scaled(a: Tensor, b: Tensor, **rest: object) -> None:
    right(a, b, **rest)
    rest["out"].mul_(1.01)


def lopsided(a: Tensor, b: Tensor, **rest: object) -> None:
    right(a, b, **rest)
    rest["out"][0, 0, 1] += 2**-10


def empty(a: Tensor, b: Tensor, **rest: object) -> None:
    """Writes nothing."""


def failing(a: Tensor, b: Tensor, **rest: object) -> None:
    raise RuntimeError("no such kernel")


class Fake:
    """An installed quack; what it was called with."""

    def __init__(self) -> None:
        self.product: Callable[..., None] = right
        self.calls: list[tuple[int, ...]] = []

    def gemm_symmetric(self, a: Tensor, b: Tensor, **rest: object) -> None:
        assert a.ndim == 3 and torch.equal(b, a.mT), "equal factors, in a batch"
        self.calls.append(tuple(a.shape))
        self.product(a, b, **rest)


def _forget() -> None:
    symmetric_quack._checked.clear()
    symmetric_quack._installed.cache_clear()
    quack_fault.cache_clear()


@pytest.fixture
def quack(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    fake, module = Fake(), ModuleType("quack.gemm_interface")
    module.gemm_symmetric = fake.gemm_symmetric
    package = ModuleType("quack")
    package.__spec__ = ModuleSpec("quack", None)
    monkeypatch.setitem(sys.modules, "quack", package)
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", module)
    _forget()
    yield fake
    _forget()


def _matrices(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_equal_factors_are_multiplied_and_checked_once_of_a_kind(quack, transposed, adds):
    x = _matrices(2, 16, 24)
    x = x.mT.contiguous().mT if transposed else x
    c = _matrices(2, 16, 16, seed=1)
    c = c + c.mT if adds else None
    expected = 0.25 * x.double() @ x.mT.double() + (0 if c is None else -2.0 * c.double())
    for _ in range(2):
        found = equal_factors(x, c, alpha=0.25, beta=-2.0)
        assert (found - expected).abs().max() <= 1e-3 * expected.abs().max()
        assert torch.equal(found, found.mT)
    assert quack.calls == [(1, 16, 24)] + [(2, 16, 24)] * 2, "one matrix is checked, once"
    equal_factors(x[:1], None if c is None else c[:1], alpha=0.25, beta=-2.0)
    assert quack.calls[3:] == [(1, 16, 24)], "the same kind, however many there are"
    equal_factors(x[:, :8], None if c is None else c[:, :8, :8], alpha=0.25, beta=-2.0)
    assert quack.calls[4:] == [(1, 8, 24), (2, 8, 24)], "another kind is checked, too"


def test_strides_that_no_descriptor_takes_are_left_to_others(quack):
    assert equal_factors(_matrices(1, 12, 24)) is None and equal_factors(_matrices(1, 16, 20)) is None
    assert not quack.calls


def test_memory_that_is_short_once_is_no_fault(quack, monkeypatch):
    def short(*_: object) -> str:
        raise torch.OutOfMemoryError("no room")

    x = _matrices(1, 16, 24)
    with monkeypatch.context() as patched:
        patched.setattr(symmetric_quack, "_fault", short)
        assert equal_factors(x) is None
    assert equal_factors(x) is not None


def test_one_matrix_is_a_batch_of_one_and_is_written_where_it_belongs(quack):
    x, out = _matrices(16, 24), torch.empty(16, 16, dtype=torch.float16)
    assert equal_factors(x, out=out).data_ptr() == out.data_ptr() and quack.calls == [(1, 16, 24)] * 2
    torch.testing.assert_close(out, x @ x.mT, atol=2e-2, rtol=1e-3)


@pytest.mark.parametrize(
    ("product", "told"),
    [
        (scaled, r"differs from torch's by 0\.01 of the largest entry; not used"),
        (empty, "differs from torch's by nan of the largest entry; not used"),
        (lopsided, "is not symmetric bitwise; not used"),
        (failing, r"failed \(RuntimeError: no such kernel\); not used"),
    ],
)
def test_a_product_that_breaks_the_contract_is_dropped_once_and_for_all(quack, product, told):
    quack.product = product
    x = _matrices(2, 16, 24)
    with pytest.warns(UserWarning, match=told):
        assert equal_factors(x) is None
    quack.product = right
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert equal_factors(x) is None and len(quack.calls) == 1


@pytest.mark.parametrize("case", ["the addend is overwritten", "an address is odd", "a graph is captured", "nothing"])
def test_what_was_not_checked_is_left_to_our_kernel(quack, monkeypatch, case):
    x, c = _matrices(2, 16, 24), _matrices(2, 16, 16)
    if case == "the addend is overwritten":
        assert equal_factors(x, c, out=c) is None
    elif case == "an address is odd":
        assert equal_factors(_matrices(2 * 16 * 24 + 1)[1:].view(2, 16, 24)) is None
    elif case == "a graph is captured":
        monkeypatch.setattr(symmetric_quack, "is_capturing", lambda device: True)
        assert equal_factors(x) is None
    else:
        assert equal_factors(x[:0]) is None
    assert quack.calls == []


def test_newton_schulz_takes_quack_for_squares_and_our_kernel_for_the_rest(quack, monkeypatch):
    """Against the same iteration with torch's products."""
    ours: list[bool] = []

    def tiled(a: Tensor, b: Tensor, c: Tensor | None = None, *, out: Tensor | None = None, **rest: object) -> Tensor:
        ours.append(a is b)
        alpha, beta = rest.get("alpha", 1.0), rest.get("beta", 0.0)
        result = (alpha * a.float() @ b.float() + (0 if c is None else beta * c.float())).half()
        return result if out is None else out.copy_(result)

    monkeypatch.setattr(arithmetic_module, "symmetric_product", tiled)
    sequence = coefficient_sequence("polar_express", 5)
    x = _matrices(2, 24, 40)
    x = x / x.float().flatten(1).norm(dim=1)[:, None, None].half()
    arithmetic = make_arithmetic(NAMED, CUDA, torch.float16)
    assert type(arithmetic) is QuackArithmetic
    found = iterate(x.clone(), make_iteration(NAMED, sequence, torch.float16), arithmetic)
    assert ours == [False] * 8, "no square is left to it"
    assert len(quack.calls) == 2 + 5 + 2, "two Gram matrices, five squares, and a check of either kind"
    plain = Variant("gram", (2,), "torch", 4)
    expected = iterate(
        x.double(), make_iteration(plain, sequence, torch.float64), make_arithmetic(plain, CPU, torch.float64)
    )
    assert (found - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "told"),
    [
        (CUDA, (9, 0), torch.float16, None),
        (CUDA, (8, 0), torch.bfloat16, None),
        (CUDA, (9, 0), torch.float32, "half precision"),
        (CUDA, (7, 5), torch.float16, "no kernel for compute capability 7.5"),
        (CPU, (9, 0), torch.float16, "NVIDIA"),
    ],
)
def test_where_quack_cannot_run_it_says_why(quack, monkeypatch, device, capability, dtype, told):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    found = quack_fault(device, dtype)
    assert found is None if told is None else told in found


def test_without_quack_it_is_not_offered_and_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setitem(sys.modules, "quack", None)
    _forget()
    assert quack_fault(CUDA, torch.float16) == "it is not installed"
    _forget()


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named 'cutlass'"), AttributeError("gemm_symmetric")])
def test_where_quack_does_not_import_it_says_so_and_is_not_used(quack, monkeypatch, error):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    with (
        mock.patch.object(symmetric_quack.importlib, "import_module", side_effect=error),
        pytest.warns(UserWarning, match="quack is installed, but it does not import"),
    ):
        assert "does not import" in quack_fault(CUDA, torch.float16)
        assert equal_factors(_matrices(2, 16, 24)) is None


def test_only_a_measurement_chooses_quack(quack, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(variant, "unsupported", lambda *_: None)
    monkeypatch.setattr(variant, "_build_fault", lambda *_: None)
    sequence = coefficient_sequence("polar_express", 5)
    best = Variant("gram", (2,), "torch", 4)
    unasked, forms = (next(alternatives((2048, 2048), 4, sequence, torch.float16, CUDA, asked)) for asked in (0, 1))
    assert "quack" not in {form.backend for form in unasked(best)}
    with mock.patch.object(symmetric_quack, "_installed", side_effect=AssertionError("imported to be offered")):
        offered = [form for form in forms(best) if form.backend == "quack"]
    assert [form.method for form in offered] == ["standard", "gram"]
    assert all(Variant.parse(str(form)) == form for form in offered)
    assert adapted(NAMED, (64, 64), coefficient_sequence("classic", 5), torch.float16, CUDA).backend == "quack"
    with pytest.raises(ValueError, match="backend='quack' is unknown"):
        choose_variant((64, 64), 1, sequence, torch.float16, CUDA, backend="quack")
