"""The fused passes of the Muon update: what they compute, in Triton's interpreter."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from dmuon.kernels import apply_update_, momentum_update
from dmuon.kernels.normalization import normalize
from dmuon.kernels.update_triton import (
    _stacked_tile,
    _tile_at,
    apply_update,
    momentum_norms,
    normalized_update,
    norms_of,
    unsupported,
)
from dmuon.kernels.update_triton import momentum_update as fused_momentum_update

_MARGIN = 7.0

# Of an output entry, over the largest. The interpreter truncates to bf16, a device rounds.
OUT_ERROR = {torch.float32: 5e-7, torch.float16: 2.0**-11 + 1e-5, torch.bfloat16: 2.0**-7}
BROKEN = ("nan", "inf", "both infinities")


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
    "low beta": MomentumCase(beta=0.3),
    "zero beta": MomentumCase(beta=0.0),
    "no momentum decay": MomentumCase(beta=1.0),
    "fp32 out": MomentumCase(out=torch.float32),
    "bf16 out": MomentumCase(out=torch.bfloat16),
    "bf16 gradients": MomentumCase(grad=torch.bfloat16),
    "bf16 gradients, no nesterov, bf16 out": MomentumCase(
        grad=torch.bfloat16, nesterov=False, out=torch.bfloat16, shape=(16, 130)
    ),
    "fp16 gradients": MomentumCase(grad=torch.float16),
    "two tiles": MomentumCase(shape=(40, 60)),
    "whole tiles": MomentumCase(shape=(64, 64)),
    "ragged": MomentumCase(shape=(37, 61)),
    "ragged bf16 gradients": MomentumCase(shape=(37, 61), grad=torch.bfloat16),
    "unaligned": MomentumCase(offset=1),
    "unaligned, ragged, bf16": MomentumCase(offset=1, shape=(37, 61), grad=torch.bfloat16, out=torch.bfloat16),
    "one row": MomentumCase(shape=(1, 2049)),
    "one column": MomentumCase(shape=(3000, 1)),
    "one element": MomentumCase(shape=(1, 1), k=1),
    "many of one element": MomentumCase(shape=(1, 1), k=9, out=torch.float32),
    "one matrix": MomentumCase(k=1),
    "1e-30": MomentumCase(magnitude=1e-30),
    "1e-15, no nesterov": MomentumCase(magnitude=1e-15, nesterov=False),
    "1e30": MomentumCase(magnitude=1e30),
    "1e-30 bf16 gradients": MomentumCase(magnitude=1e-30, grad=torch.bfloat16),
    "1e30 fp32 out": MomentumCase(magnitude=1e30, out=torch.float32),
    "1e-36 fp32 out": MomentumCase(magnitude=1e-36, out=torch.float32),
    "1e37 fp32 out": MomentumCase(magnitude=1e37, out=torch.float32),
    "eps": MomentumCase(magnitude=1e-9, eps=1e-3, out=torch.float32),
    "zero": MomentumCase(special="zero"),
    "zero, eps": MomentumCase(special="zero", eps=1e-7),
    "nan": MomentumCase(special="nan", shape=(40, 60)),
    "inf": MomentumCase(special="inf", nesterov=False),
    "both infinities": MomentumCase(special="infs"),
    "spread": MomentumCase(special="spread", shape=(40, 60), out=torch.float32),
    "subnormal": MomentumCase(special="subnormal", out=torch.float32),
}

APPLY_CASES = {
    "default": ApplyCase(),
    "no decay": ApplyCase(weight_decay=0.0),
    "zero lr": ApplyCase(lr=0.0),
    "fp32 update": ApplyCase(update=torch.float32),
    "bf16 update": ApplyCase(update=torch.bfloat16),
    "fp16 parameters": ApplyCase(param=torch.float16),
    "bf16 parameters": ApplyCase(param=torch.bfloat16),
    "ragged": ApplyCase(shape=(37, 61)),
    "unaligned": ApplyCase(offset=1),
    "two tiles": ApplyCase(shape=(40, 60)),
    "whole tiles": ApplyCase(shape=(64, 64)),
    "one row": ApplyCase(shape=(1, 2049)),
    "one element": ApplyCase(shape=(1, 1), k=1),
    "many of one element": ApplyCase(shape=(1, 1), k=9),
}


class Buffers:
    """Tensors inside larger buffers, whose margins a kernel must leave alone."""

    def __init__(self, offset: int) -> None:
        self._offset = offset
        self.margins: list[Tensor] = []

    def place(self, values: Tensor) -> Tensor:
        """``values`` in a buffer of their own."""
        stop = self._offset + values.numel()
        buffer = torch.full((stop + 48,), _MARGIN, dtype=values.dtype)
        self.margins += [buffer[: self._offset], buffer[stop:]]
        return buffer[self._offset : stop].view(values.shape).copy_(values)

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
        case "inf":
            grad[3] = float("inf")
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


@pytest.mark.pitfall("P32", "P35", "P38", "P39", "P44", "P45")
@pytest.mark.parametrize("name", MOMENTUM_CASES)
def test_momentum_norm_and_update_equal_fp64_and_nothing_else_changes(name):
    case = MOMENTUM_CASES[name]
    values, start = inputs(case)
    buffers = Buffers(case.offset)
    grads = [buffers.place(value) for value in values]
    momentum, out = buffers.place(start), buffers.place(torch.zeros(start.shape, dtype=case.out))
    version = momentum._version, out._version
    norms = momentum_norms(grads, momentum, beta=case.beta, nesterov=case.nesterov)
    after = momentum.clone()
    normalized_update(grads, momentum, norms, beta=case.beta, nesterov=case.nesterov, eps=case.eps, out=out)
    assert same(after, momentum), "the second pass leaves momentum alone"
    assert all(same(grad, value) for grad, value in zip(grads, values, strict=True))
    assert buffers.margins_intact()
    assert momentum._version == version[0] + 1, "autograd must see a write in place"
    assert out._version == version[1] + 1, "autograd must see a write in place"

    grad64 = torch.stack([value.double() for value in values])
    momentum64 = start.double().lerp(grad64, 1 - case.beta)
    update64 = grad64.lerp(momentum64, case.beta) if case.nesterov else momentum64
    norm64 = torch.linalg.vector_norm(update64, dim=(1, 2))
    divisor = norm64.clamp(min=case.eps)
    out64 = update64 / torch.where(divisor == 0, 1.0, divisor)[:, None, None]
    terms = start.double().abs() + grad64.abs()
    subnormal = case.special == "subnormal"  # has few digits
    assert worst(after - momentum64, terms) <= (1e-3 if subnormal else 2e-7)
    assert worst(norms - norm64, norm64) <= 1e-6
    assert worst(out - out64, largest(out64)) <= (1e-5 if subnormal else OUT_ERROR[case.out])

    torch_momentum = start.clone()
    torch_update = momentum_update(values, torch_momentum, beta=case.beta, nesterov=case.nesterov)
    torch_out, torch_norms = normalize(torch_update, case.out, case.eps)
    # Triton 3.6's interpreter rounds a fused multiply-add twice; 3.9's, and devices, agree with torch in every bit.
    assert worst(after.double() - torch_momentum, terms) <= 1.2e-7
    assert worst(norms - torch_norms, torch_norms) <= 1e-6
    assert worst(out.double() - torch_out, largest(out64)) <= 2 * OUT_ERROR[case.out]

    special = [index == case.k // 2 for index in range(case.k)]
    finite = [not (name in BROKEN and here) for here in special]
    assert norms.isfinite().tolist() == finite, "a norm is finite exactly if its matrix is"
    assert out.isfinite().flatten(1).all(1).tolist() == finite
    assert (out == 0).flatten(1).all(1).tolist() == [case.special == "zero" and here for here in special]

    single = [run_single(case, value, row) for value, row in zip(values, start, strict=True)]
    for batched, rows in zip((after, norms, out), zip(*single, strict=True), strict=True):
        assert same(batched, torch.stack(rows)), "a batch equals second runs of its matrices alone"


QUICK_PARTS = ("default", "unaligned, ragged, bf16", "both infinities")
SLOW_PARTS = (
    "no nesterov",
    "zero beta",
    "two tiles",
    "one element",
    "1e-36 fp32 out",
    "1e37 fp32 out",
    "zero",
    "spread",
)


@pytest.mark.pitfall("P32", "P35", "P38", "P39", "P44", "P45")
@pytest.mark.parametrize("name", [*QUICK_PARTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_PARTS)])
def test_a_part_is_folded_and_the_whole_divided_as_in_one(name):
    """What an exchanged matrix takes: momentum and update in one pass, then norm and division of what was gathered."""
    case = MOMENTUM_CASES[name]
    values, start = inputs(case)
    options = {"beta": case.beta, "nesterov": case.nesterov}
    whole, expected = start.clone(), torch.zeros(start.shape, dtype=case.out)
    norms = momentum_norms(values, whole, **options)
    normalized_update(values, whole, norms, eps=case.eps, out=expected, **options)

    buffers = Buffers(case.offset)
    grads = [buffers.place(value) for value in values]
    momentum, update = buffers.place(start), buffers.place(torch.zeros_like(start))
    version = momentum._version, update._version
    fused_momentum_update(grads, momentum, out=update, **options)
    assert (momentum._version, update._version) == (version[0] + 1, version[1] + 1)
    assert same(momentum, whole), "the same bits as the pass that sums squares"
    assert all(same(grad, value) for grad, value in zip(grads, values, strict=True))
    assert same(norms_of(update), norms)
    out = buffers.place(torch.zeros(start.shape, dtype=case.out))
    normalized_update(list(update.unbind(0)), update, norms, beta=0.0, nesterov=False, eps=case.eps, out=out)
    assert same(out, expected)
    assert buffers.margins_intact()


def run_single(case: MomentumCase, grad: Tensor, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Momentum, norm and output of one matrix alone, in aligned memory."""
    momentum, out = row[None].clone(), torch.zeros(1, *row.shape, dtype=case.out)
    norms = momentum_norms([grad], momentum, beta=case.beta, nesterov=case.nesterov)
    normalized_update([grad], momentum, norms, beta=case.beta, nesterov=case.nesterov, eps=case.eps, out=out)
    return momentum[0], norms[0], out[0]


@pytest.mark.pitfall("P39", "P44", "P45")
@pytest.mark.parametrize("name", APPLY_CASES)
def test_apply_equals_fp64_and_the_torch_path_and_nothing_else_changes(name):
    case = APPLY_CASES[name]
    torch.manual_seed(4)
    values = [torch.randn(case.shape).to(case.param) for _ in range(case.k)]
    change = (torch.randn(case.k, *case.shape) * 0.3).to(case.update)
    options = {"lr": case.lr, "weight_decay": case.weight_decay, "scale": case.scale}
    runs = []
    for _ in range(2):
        buffers = Buffers(case.offset)
        params = [torch.nn.Parameter(buffers.place(value)) for value in values]
        update = buffers.place(change)
        version = params[0]._version
        apply_update(params, update, **options)
        assert params[0]._version == version + 1, "autograd must see a write in place"
        assert same(update, change)
        assert buffers.margins_intact()
        runs.append(params)
    assert all(same(first, second) for first, second in zip(*runs, strict=True))

    result, before = torch.stack(runs[0]).detach(), torch.stack(values)
    decay, step = 1 - case.lr * case.weight_decay, case.lr * case.scale
    exact = before.double() * decay - step * change.double()
    terms = decay * before.double().abs() + step * change.double().abs()
    torch_params = [value.clone() for value in values]
    apply_update_(torch_params, change, **options)
    if case.param == torch.float32:
        assert worst(result - exact, terms) <= 2e-7
        assert worst(result.double() - torch.stack(torch_params), terms) <= 1.2e-7
    elif case.param == torch.float16:
        twice = worst(torch.stack(torch_params) - exact, exact)
        assert worst(result - exact, exact) <= 2.0**-11 * 1.001 < twice, "one rounding, where torch has two"
    else:
        assert worst(result - exact, exact) <= 2.0**-7, "the interpreter truncates to bf16"
    assert same(result, before) == (case.lr == 0)


def test_bf16_without_rounding_is_exact():
    param = torch.ones(5, 3, dtype=torch.bfloat16)
    apply_update([param], torch.ones(1, 5, 3), lr=0.25, weight_decay=0.0, scale=1.0)
    assert (param == 0.75).all()


@pytest.mark.pitfall("P44")
@pytest.mark.parametrize(("k", "m", "expected"), [(0, 3, []), (2, 0, [0.0, 0.0])])
def test_empty_batches_and_matrices(k, m, expected):
    grads, momentum = [torch.zeros(m, 5) for _ in range(k)], torch.zeros(k, m, 5)
    norms = momentum_norms(grads, momentum, beta=0.9, nesterov=True)
    out = torch.zeros(k, m, 5, dtype=torch.float16)
    normalized_update(grads, momentum, norms, beta=0.9, nesterov=True, eps=0.0, out=out)
    apply_update(grads, out, lr=0.1, weight_decay=0.1, scale=1.0)
    assert norms.tolist() == expected


@triton.jit
def _offsets_kernel(table, stacked, out, numel, start, BLOCK: tl.constexpr):
    """Store the addresses at which this program's matrix has element ``start``, in the stack and by table."""
    matrix, start = tl.program_id(0), start.to(tl.int64)
    in_stack = _stacked_tile(stacked, matrix, numel, start, ALIGNED=False, BLOCK=BLOCK)
    by_table = _tile_at(table, matrix, start, DTYPE=tl.float32, ALIGNED=False, BLOCK=BLOCK)
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
    "strided matrix": ([GOOD[0], torch.zeros(6, 4).T], STACKED, "matrix 1 has strides (1, 4); it is not contiguous"),
    "strided stack": (
        GOOD,
        torch.zeros(2, 6, 4).mT,
        "the stacked tensor has strides (24, 1, 4); it is not contiguous",
    ),
    "mixed dtypes": ([GOOD[0], GOOD[1].half()], STACKED, "matrix 1 is torch.float16, not torch.float32"),
    "fp64": (
        [matrix.double() for matrix in GOOD],
        STACKED,
        "matrix 0 is torch.float64, not torch.float32 or torch.float16 or torch.bfloat16",
    ),
    "fp64 stack": (
        GOOD,
        STACKED.double(),
        "the stacked tensor is torch.float64, not torch.float32 or torch.float16 or torch.bfloat16",
    ),
    "too few": (GOOD[:1], STACKED, "the stacked tensor is (2, 4, 6), not (1, m, n)"),
    "another shape": ([GOOD[0], torch.zeros(6, 4)], STACKED, "matrix 1 is (6, 4), not (4, 6)"),
    "two dimensions": (GOOD, STACKED[0], "the stacked tensor is (4, 6), not (2, m, n)"),
    "another device": ([GOOD[0], GOOD[1].to("meta")], STACKED, "matrix 1 is on meta, not on cpu"),
    "wrong device": (GOOD, STACKED.to("meta"), "the tensors are on meta, not on cpu"),
    "sparse": (
        [GOOD[0], GOOD[1].to_sparse()],
        STACKED,
        "matrix 1 is a Tensor of layout torch.sparse_coo, not a plain dense tensor",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_unfit_tensors_are_named_and_refused(name):
    matrices, stacked, reason = UNFIT[name]
    assert unsupported(matrices, stacked) == reason
    with pytest.raises(ValueError) as refused:
        apply_update(matrices, stacked, lr=0.1, weight_decay=0.0, scale=1.0)
    assert str(refused.value) == f"{reason}; ask `unsupported` first and take the foreach path"


def test_fit_tensors_are_taken():
    assert unsupported(GOOD, STACKED) is None
    apply_update(GOOD, STACKED, lr=0.1, weight_decay=0.0, scale=1.0)


@pytest.mark.pitfall("P23", "P32")
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"norms": torch.zeros(1)}, "norms is torch.float32, not torch.float64"),
        ({"norms": torch.zeros(2, dtype=torch.float64)}, "norms is (2,), not (1,)"),
        ({"out": torch.zeros(1, 6, 4).mT}, "out has strides (24, 1, 4)"),
    ],
)
def test_unfit_arguments_are_refused(changed, message):
    momentum = torch.zeros(1, 4, 6)
    options = {"beta": 0.9, "nesterov": True}
    tensors = {"norms": torch.zeros(1, dtype=torch.float64), "out": momentum, **changed}
    with pytest.raises(ValueError, match=re.escape(message)):
        normalized_update(GOOD[:1], momentum, **tensors, **options, eps=0.0)
    with pytest.raises(ValueError, match=re.escape("momentum must be fp32, got torch.float16")):
        momentum_norms(GOOD[:1], momentum.half(), **options)


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
