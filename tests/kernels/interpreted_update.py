"""The fused passes of the Muon update: what they compute, in Triton's interpreter; run by ``test_interpreted.py``."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from dmuon.kernels import (
    apply_update_,
    momentum_norms,
    momentum_update,
    normalized,
    normalized_update,
    update_triton,
)
from dmuon.kernels.update_triton import stacked_tile, tile_at

_MARGIN = 7.0

# Of an output entry, over the largest. The interpreter truncates to bf16, a device rounds.
OUT_ERROR = {torch.float32: 5e-7, torch.float16: 2.0**-11 + 1e-5, torch.bfloat16: 2.0**-7}
BROKEN = ("nan", "both infinities")


@dataclass(frozen=True, slots=True)
class MomentumCase:
    """``k`` gradients of ``shape``, ``offset`` elements into their buffers: 16 is aligned, 1 is not.

    ``special`` is what the middle matrix holds.
    """

    shape: tuple[int, int] = (24, 40)
    k: int = 3
    grad: torch.dtype = torch.float32
    out: torch.dtype = torch.float16
    beta: float = 0.95
    nesterov: bool = True
    eps: float = 0.0
    magnitude: float = 1.0
    offset: int = 16
    special: str = ""


@dataclass(frozen=True, slots=True)
class ApplyCase:
    """``k`` parameters of ``shape``, ``offset`` elements into their buffers, and what they are updated by."""

    shape: tuple[int, int] = (24, 40)
    k: int = 3
    param: torch.dtype = torch.float32
    update: torch.dtype = torch.float16
    lr: float = 0.02
    weight_decay: float = 0.1
    scale: float = 1.3
    offset: int = 16


MOMENTUM_CASES = {
    "default": MomentumCase(),
    "no nesterov": MomentumCase(nesterov=False),
    "zero beta": MomentumCase(beta=0.0),
    "bf16 out": MomentumCase(out=torch.bfloat16),
    "bf16 gradients": MomentumCase(grad=torch.bfloat16),
    "unaligned, ragged, bf16": MomentumCase(offset=1, shape=(37, 61), grad=torch.bfloat16, out=torch.bfloat16),
    "one row": MomentumCase(shape=(1, 2049)),
    "many of one element": MomentumCase(shape=(1, 1), k=9, out=torch.float32),
    "1e-36 fp32 out": MomentumCase(magnitude=1e-36, out=torch.float32),
    "1e37 fp32 out": MomentumCase(magnitude=1e37, out=torch.float32),
    "eps": MomentumCase(magnitude=1e-9, eps=1e-3, out=torch.float32),
    "zero": MomentumCase(special="zero"),
    "nan": MomentumCase(special="nan", shape=(40, 60)),
    "both infinities": MomentumCase(special="infs"),
    "spread": MomentumCase(special="spread", shape=(40, 60), out=torch.float32),
    "subnormal": MomentumCase(special="subnormal", out=torch.float32),
}

APPLY_CASES = {
    "default": ApplyCase(),
    "zero lr": ApplyCase(lr=0.0),
    "bf16 update": ApplyCase(update=torch.bfloat16),
    "bf16 parameters": ApplyCase(param=torch.bfloat16),
    "unaligned, ragged": ApplyCase(offset=1, shape=(37, 61)),
    "one row": ApplyCase(shape=(1, 2049)),
    "many of one element": ApplyCase(shape=(1, 1), k=9),
}


class Buffers:
    """Tensors inside larger buffers, whose margins a kernel must leave alone."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.margins: list[Tensor] = []

    def place(self, values: Tensor) -> Tensor:
        """``values`` in a buffer of their own."""
        stop = self.offset + values.numel()
        buffer = torch.full((stop + 48,), _MARGIN, dtype=values.dtype)
        self.margins += [buffer[: self.offset], buffer[stop:]]
        return buffer[self.offset : stop].view(values.shape).copy_(values)

    def margins_intact(self) -> bool:
        return all(bool((margin == _MARGIN).all()) for margin in self.margins)


def inputs(case: MomentumCase) -> tuple[list[Tensor], Tensor]:
    """Gradients and momentum of a case."""
    torch.manual_seed(3)
    grads = [(torch.randn(case.shape) * case.magnitude).to(case.grad) for _ in range(case.k)]
    momentum = torch.randn(case.k, *case.shape) * case.magnitude
    middle = case.k // 2
    grad, state = grads[middle].view(-1), momentum[middle].view(-1)
    match case.special:
        case "zero":
            grad.zero_()
            state.zero_()
        case "nan":
            grad[-1] = float("nan")
        case "infs":
            grad[3] = float("inf")
            state[-1] = float("-inf")
        case "spread":
            grad.copy_(torch.logspace(-30, 30, grad.numel()) * torch.randn(grad.numel()).sign())
            state.copy_(grad.flip(0))
        case "subnormal":
            grad.mul_(1e-40)
            state.mul_(1e-40)
    return grads, momentum


@pytest.fixture(autouse=True)
def all_take_the_kernels(monkeypatch):
    """Torch's way would pass most of this as well."""
    monkeypatch.setattr(torch, "_foreach_mul_", lambda *_: pytest.fail("torch's way"))
    monkeypatch.setattr(torch, "stack", lambda *_, **__: pytest.fail("torch's way"))


def stack(tensors) -> Tensor:
    return torch.cat([tensor[None] for tensor in tensors])


def writes(tensor: Tensor) -> int:
    """What autograd counts of a tensor's writes in place."""
    return tensor._version


@pytest.mark.pitfall("P32", "P35", "P38", "P39", "P44", "P45")
@pytest.mark.parametrize("name", MOMENTUM_CASES)
def test_momentum_norm_and_update_equal_fp64_and_nothing_else_changes(name):
    case = MOMENTUM_CASES[name]
    values, start = inputs(case)
    buffers = Buffers(case.offset)
    grads, momentum = [buffers.place(value) for value in values], buffers.place(start)
    before = writes(momentum)
    options = {"beta": case.beta, "nesterov": case.nesterov}
    norms = momentum_norms(grads, momentum, **options)
    after = momentum.clone()
    out = normalized_update(grads, momentum, norms, **options, eps=case.eps, storage=case.out)
    assert same(after, momentum), "the second pass leaves momentum alone"
    assert all(same(grad, value) for grad, value in zip(grads, values, strict=True))
    assert buffers.margins_intact()
    assert writes(momentum) == before + 1, "autograd must see a write in place"

    grad64 = stack([value.double() for value in values])
    momentum64 = start.double().lerp(grad64, 1 - case.beta)
    update64 = grad64.lerp(momentum64, case.beta) if case.nesterov else momentum64
    norm64 = torch.linalg.vector_norm(update64, dim=(1, 2))
    divisor = norm64.clamp(min=case.eps)
    out64 = update64 / torch.where(divisor == 0, 1.0, divisor)[:, None, None]
    terms = start.double().abs() + grad64.abs()
    subnormal = case.special == "subnormal"  # has few digits
    assert out.dtype == case.out
    assert worst(after - momentum64, terms) <= (1e-3 if subnormal else 2e-7)
    assert worst(norms - norm64, norm64) <= 1e-6
    assert worst(out - out64, largest(out64)) <= (1e-5 if subnormal else OUT_ERROR[case.out])

    special = [index == case.k // 2 for index in range(case.k)]
    finite = [not (name in BROKEN and here) for here in special]
    assert norms.isfinite().tolist() == finite, "a norm is finite exactly if its matrix is"
    assert out.isfinite().flatten(1).all(1).tolist() == finite
    assert (out == 0).flatten(1).all(1).tolist() == [case.special == "zero" and here for here in special]

    single = [run_single(case, value, row) for value, row in zip(values, start, strict=True)]
    for batched, rows in zip((after, norms, out), zip(*single, strict=True), strict=True):
        assert same(batched, stack(rows)), "a batch equals second runs of its matrices alone"


def run_single(case: MomentumCase, grad: Tensor, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Momentum, norm and output of one matrix alone, in aligned memory."""
    momentum = row[None].clone()
    norms = momentum_norms([grad], momentum, beta=case.beta, nesterov=case.nesterov)
    options = {"beta": case.beta, "nesterov": case.nesterov, "eps": case.eps, "storage": case.out}
    return momentum[0], norms[0], normalized_update([grad], momentum, norms, **options)[0]


@pytest.mark.pitfall("P32", "P35", "P38", "P39", "P44", "P45")
@pytest.mark.parametrize("name", ["default", "unaligned, ragged, bf16", "both infinities", "1e37 fp32 out", "spread"])
def test_a_part_is_folded_and_the_whole_divided_as_in_one(name):
    """What an exchanged matrix takes: momentum and update in one pass, then norm and division of what was gathered."""
    case = MOMENTUM_CASES[name]
    values, start = inputs(case)
    options = {"beta": case.beta, "nesterov": case.nesterov}
    whole = start.clone()
    norms = momentum_norms(values, whole, **options)
    expected = normalized_update(values, whole, norms, eps=case.eps, storage=torch.float32, **options)
    buffers = Buffers(case.offset)
    grads, momentum = [buffers.place(value) for value in values], buffers.place(start)
    before = writes(momentum)
    update = momentum_update(grads, momentum, **options)
    assert writes(momentum) == before + 1 and same(momentum, whole), "the same bits as the pass that sums squares"
    assert all(same(grad, value) for grad, value in zip(grads, values, strict=True))
    out, of_update = normalized(buffers.place(update), storage=torch.float32, eps=case.eps)
    assert same(of_update, norms) and same(out, expected)
    assert buffers.margins_intact()


@pytest.mark.pitfall("P39", "P44", "P45")
@pytest.mark.parametrize("name", APPLY_CASES)
def test_apply_equals_fp64_with_one_rounding_and_nothing_else_changes(name):
    case = APPLY_CASES[name]
    torch.manual_seed(4)
    values = [torch.randn(case.shape).to(case.param) for _ in range(case.k)]
    change = (torch.randn(case.k, *case.shape) * 0.3).to(case.update)
    runs = []
    for _ in range(2):
        buffers = Buffers(case.offset)
        params = [torch.nn.Parameter(buffers.place(value)) for value in values]
        update, before = buffers.place(change), writes(params[0])
        apply_update_(params, update, lr=case.lr, weight_decay=case.weight_decay, scale=case.scale)
        assert writes(params[0]) > before and same(update, change) and buffers.margins_intact()
        runs.append(params)
    assert all(same(first, second) for first, second in zip(*runs, strict=True))
    result, values = stack(runs[0]).detach(), stack(values)
    decay, step = 1 - case.lr * case.weight_decay, case.lr * case.scale
    exact = values.double() * decay - step * change.double()
    if case.param == torch.float32:
        assert worst(result - exact, decay * values.double().abs() + step * change.double().abs()) <= 2e-7
    else:  # the interpreter truncates to bf16
        assert worst(result - exact, exact) <= 2.0**-7
    assert same(result, values) == (case.lr == 0)


@triton.jit
def _offsets_kernel(table, stacked, out, numel, start, BLOCK: tl.constexpr):
    """Store the addresses at which this program's matrix has element ``start``, in the stack and by table."""
    matrix, start = tl.program_id(0), start.to(tl.int64)
    in_stack = stacked_tile(stacked, matrix, numel, start, ALIGNED=False, BLOCK=BLOCK)
    by_table = tile_at(table, matrix, start, DTYPE=tl.float32, ALIGNED=False, BLOCK=BLOCK)
    tl.store(out + 2 * matrix, tl.min(in_stack.to(tl.int64), axis=0))
    tl.store(out + 2 * matrix + 1, tl.min(by_table.to(tl.int64), axis=0))


@pytest.mark.pitfall("P44")
def test_offsets_pass_32_bits():
    """To the last tile of matrices of 2³⁰ elements, in the stack and by table; no memory is touched."""
    size, start = 2**30, 2**30 - 2048
    stacked, table, out = torch.zeros(1), torch.zeros(5, dtype=torch.int64), torch.zeros(5, 2, dtype=torch.int64)
    _offsets_kernel[(5,)](table, stacked, out, size, start, BLOCK=16)
    in_stack, by_table = out.unbind(1)
    assert ((in_stack - stacked.data_ptr()) // 4).tolist() == [index * size + start for index in range(5)]
    assert (by_table // 4).tolist() == [start] * 5


GOOD, STACKED = [torch.zeros(4, 6), torch.zeros(4, 6)], torch.zeros(2, 4, 6)
UNFIT = {
    "strided matrix": ([GOOD[0], torch.zeros(6, 4).T], STACKED),
    "strided stack": (GOOD, torch.zeros(2, 6, 4).mT),
    "mixed dtypes": ([GOOD[0], GOOD[1].half()], STACKED),
    "fp64": ([matrix.double() for matrix in GOOD], STACKED),
    "fp64 stack": (GOOD, STACKED.double()),
    "another device": ([GOOD[0], GOOD[1].to("meta")], STACKED),
    "wrong device": (GOOD, STACKED.to("meta")),
    "sparse": ([GOOD[0], GOOD[1].to_sparse()], STACKED),
    "a subclass": ([GOOD[0], GOOD[1].as_subclass(type("Other", (Tensor,), {}))], STACKED),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_kernels_see_wrongly_by_its_address_is_not_theirs(name):
    assert update_triton.takes(GOOD, STACKED) and not update_triton.takes(*UNFIT[name])


def same(a: Tensor, b: Tensor) -> bool:
    """Bitwise equality, where all NaNs are equal."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def largest(x: Tensor) -> Tensor:
    """The largest magnitude of each matrix, (k, 1, 1)."""
    return x.abs().amax(dim=(1, 2), keepdim=True)


def worst(error: Tensor, size: Tensor) -> float:
    """The largest error in units of ``size``, where that is finite."""
    valid = (size.isfinite() & error.isfinite()).expand(error.shape)
    ratio = (error.abs() / torch.where(size == 0, 1.0, size).abs()).expand(error.shape)[valid]
    return float(ratio.max()) if ratio.numel() else 0.0
