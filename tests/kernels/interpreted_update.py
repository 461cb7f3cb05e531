"""Runs the fused passes of the Muon update in Triton's interpreter and prints, as JSON, what they did.

Triton reads TRITON_INTERPRET when a kernel is decorated, so this runs in a process of its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmuon.kernels import apply_update_, momentum_update
from dmuon.kernels.normalization import normalize
from dmuon.kernels.update_triton import (
    _stacked_tile,
    _tile_at,
    apply_update,
    momentum_norms,
    normalized_update,
    unsupported,
)

_MARGIN = 7.0


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
        self._buffers: list[Tensor] = []

    def place(self, values: Tensor) -> Tensor:
        """``values`` in a buffer of their own."""
        size = values.numel()
        buffer = torch.full((self._offset + size + 48,), _MARGIN, dtype=values.dtype)
        self._buffers.append(buffer)
        placed = buffer[self._offset : self._offset + size].view(values.shape)
        buffer[self._offset + size :] = _MARGIN
        return placed.copy_(values)

    def margins_intact(self, sizes: Sequence[int]) -> bool:
        pairs = zip(self._buffers, sizes, strict=True)
        return all(
            bool((b[: self._offset] == _MARGIN).all() and (b[self._offset + n :] == _MARGIN).all()) for b, n in pairs
        )


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


def run_momentum(case: MomentumCase) -> dict[str, object]:
    """What the first two passes make of a case, against fp64 and against the torch path."""
    values, start = inputs(case)
    buffers = Buffers(case.offset)
    grads = [buffers.place(value) for value in values]
    momentum, out = buffers.place(start), buffers.place(torch.zeros(start.shape, dtype=case.out))
    version = momentum._version, out._version
    norms = momentum_norms(grads, momentum, beta=case.beta, nesterov=case.nesterov)
    after = momentum.clone()
    normalized_update(grads, momentum, norms, beta=case.beta, nesterov=case.nesterov, eps=case.eps, out=out)
    single = [run_single(case, value, row) for value, row in zip(values, start, strict=True)]

    grad64 = torch.stack([value.double() for value in values])
    momentum64 = start.double().lerp(grad64, 1 - case.beta)
    update64 = grad64.lerp(momentum64, case.beta) if case.nesterov else momentum64
    norm64 = torch.linalg.vector_norm(update64, dim=(1, 2))
    divisor = norm64.clamp(min=case.eps)
    out64 = update64 / torch.where(divisor == 0, 1.0, divisor)[:, None, None]

    torch_momentum = start.clone()
    torch_update = momentum_update(values, torch_momentum, beta=case.beta, nesterov=case.nesterov)
    torch_out, torch_norms = normalize(torch_update, case.out, case.eps)

    terms = start.double().abs() + grad64.abs()
    sizes = [*(value.numel() for value in values), start.numel(), start.numel()]
    return {
        "finite norms": norms.isfinite().tolist(),
        "finite out": out.isfinite().flatten(1).all(1).tolist(),
        "zero out": (out == 0).flatten(1).all(1).tolist(),
        "momentum error": worst(after - momentum64, terms),
        "momentum against torch": worst(after.double() - torch_momentum, terms),
        "norm error": worst(norms - norm64, norm64),
        "norm against torch": worst(norms - torch_norms, torch_norms),
        "out error": worst(out - out64, largest(out64)),
        "out against torch": worst(out.double() - torch_out, largest(out64)),
        "margins intact": buffers.margins_intact(sizes),
        "gradients intact": all(same(grad, value) for grad, value in zip(grads, values, strict=True)),
        "momentum left alone by the second pass": same(after, momentum),
        "second runs alone are equal": all(
            same(batched, torch.stack(rows))
            for batched, rows in zip((after, norms, out), zip(*single, strict=True), strict=True)
        ),
        "versions": [momentum._version - version[0], out._version - version[1]],
    }


def run_single(case: MomentumCase, grad: Tensor, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Momentum, norm and output of one matrix alone, in aligned memory."""
    momentum, out = row[None].clone(), torch.zeros(1, *row.shape, dtype=case.out)
    norms = momentum_norms([grad], momentum, beta=case.beta, nesterov=case.nesterov)
    normalized_update([grad], momentum, norms, beta=case.beta, nesterov=case.nesterov, eps=case.eps, out=out)
    return momentum[0], norms[0], out[0]


def run_apply(case: ApplyCase) -> dict[str, object]:
    """What the last pass makes of a case, against fp64 and against the torch path."""
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
        runs.append(params)
    params = runs[0]

    result = torch.stack(params).detach()
    decay, step = 1 - case.lr * case.weight_decay, case.lr * case.scale
    exact = torch.stack(values).double() * decay - step * change.double()
    terms = decay * torch.stack(values).double().abs() + step * change.double().abs()
    torch_params = [value.clone() for value in values]
    apply_update_(torch_params, change, **options)
    return {
        "error": worst(result - exact, terms),
        "rounding": worst(result - exact, exact),
        "torch rounding": worst(torch.stack(torch_params) - exact, exact),
        "against torch": worst(result.double() - torch.stack(torch_params), terms),
        "unchanged": same(result, torch.stack(values)),
        "margins intact": buffers.margins_intact([t.numel() for t in [*values, change]]),
        "update intact": same(update, change),
        "repeats": all(same(first, second) for first, second in zip(*runs, strict=True)),
        "versions": [params[0]._version - version],
    }


def run_empty() -> dict[str, object]:
    """The passes on no matrices and on matrices without elements."""
    results: dict[str, object] = {}
    for name, (k, m, n) in {"no matrices": (0, 3, 5), "no elements": (2, 0, 5)}.items():
        grads, momentum = [torch.zeros(m, n) for _ in range(k)], torch.zeros(k, m, n)
        norms = momentum_norms(grads, momentum, beta=0.9, nesterov=True)
        out = torch.zeros(k, m, n, dtype=torch.float16)
        normalized_update(grads, momentum, norms, beta=0.9, nesterov=True, eps=0.0, out=out)
        apply_update(grads, out, lr=0.1, weight_decay=0.1, scale=1.0)
        results[name] = norms.tolist()
    return results


def run_exact_bf16() -> list[float]:
    """A bf16 parameter where no result needs rounding."""
    param = torch.ones(5, 3, dtype=torch.bfloat16)
    apply_update([param], torch.ones(1, 5, 3), lr=0.25, weight_decay=0.0, scale=1.0)
    return sorted(set(param.flatten().tolist()))


@triton.jit
def _offsets_kernel(table, stacked, out, numel, start, BLOCK: tl.constexpr):
    """Store the addresses at which this program's matrix has element ``start``, in the stack and by table."""
    matrix, start = tl.program_id(0), start.to(tl.int64)
    in_stack = _stacked_tile(stacked, matrix, numel, start, ALIGNED=False, BLOCK=BLOCK)
    by_table = _tile_at(table, matrix, start, DTYPE=tl.float32, ALIGNED=False, BLOCK=BLOCK)
    tl.store(out + 2 * matrix, tl.min(in_stack.to(tl.int64), axis=0))
    tl.store(out + 2 * matrix + 1, tl.min(by_table.to(tl.int64), axis=0))


def run_offsets() -> list[list[int]]:
    """Elements to the last tile of matrices of 2³⁰ elements, in the stack and by table; no memory is touched."""
    stacked, table, out = torch.zeros(1), torch.zeros(5, dtype=torch.int64), torch.zeros(5, 2, dtype=torch.int64)
    _offsets_kernel[(5,)](table, stacked, out, 2**30, 2**30 - 2048, BLOCK=16)
    in_stack, by_table = out.unbind(1)
    return [((in_stack - stacked.data_ptr()) // 4).tolist(), (by_table // 4).tolist()]


def run_unsupported() -> dict[str, list[object]]:
    """For unfit tensors, the reason, and whether the passes refuse them with it."""
    good = [torch.zeros(4, 6), torch.zeros(4, 6)]
    stacked = torch.zeros(2, 4, 6)
    cases = {
        "fit": (good, stacked),
        "strided matrix": ([good[0], torch.zeros(6, 4).T], stacked),
        "strided stack": (good, torch.zeros(2, 6, 4).mT),
        "mixed dtypes": ([good[0], good[1].half()], stacked),
        "fp64": ([matrix.double() for matrix in good], stacked),
        "fp64 stack": (good, stacked.double()),
        "too few": (good[:1], stacked),
        "another shape": ([good[0], torch.zeros(6, 4)], stacked),
        "two dimensions": (good, stacked[0]),
        "another device": ([good[0], torch.zeros(4, 6, device="meta")], stacked),
        "wrong device": (good, stacked.to("meta")),
        "sparse": ([good[0], good[1].to_sparse()], stacked),
    }
    results: dict[str, list[object]] = {}
    for name, (matrices, stack) in cases.items():
        try:
            apply_update(matrices, stack, lr=0.1, weight_decay=0.0, scale=1.0)
            refused = None
        except ValueError as error:
            refused = str(error)
        results[name] = [unsupported(matrices, stack), refused]
    return results


def run_refused() -> dict[str, str]:
    """Messages of ValueErrors beyond those of ``unsupported``."""
    grads, momentum, norms = [torch.zeros(4, 6)], torch.zeros(1, 4, 6), torch.zeros(1, dtype=torch.float64)
    options = {"beta": 0.9, "nesterov": True}
    calls = {
        "half momentum": lambda: momentum_norms(grads, momentum.half(), **options),
        "fp32 norms": lambda: normalized_update(grads, momentum, norms.float(), **options, eps=0.0, out=momentum),
        "two norms": lambda: normalized_update(
            grads, momentum, torch.zeros(2, dtype=torch.float64), **options, eps=0.0, out=momentum
        ),
        "strided out": lambda: normalized_update(
            grads, momentum, norms, **options, eps=0.0, out=torch.zeros(1, 6, 4).mT
        ),
    }
    messages = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            messages[name] = str(error)
    return messages


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


def main() -> None:
    torch.set_num_threads(1)
    results = {
        "momentum": {name: run_momentum(case) for name, case in MOMENTUM_CASES.items()},
        "apply": {name: run_apply(case) for name, case in APPLY_CASES.items()},
        "empty": run_empty(),
        "offsets": run_offsets(),
        "exact bf16": run_exact_bf16(),
        "unsupported": run_unsupported(),
        "refused": run_refused(),
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
