"""The small model on one topology, step by step, with what has to hold after each."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.utils._pytree import tree_map_only

import dmuon
from dmuon.check.accounting import Traffic, at_rest, compare_exchange, compare_traffic, owned_once, placement
from dmuon.check.model import SMALL, batch, build, is_matrix, loss_of
from dmuon.check.reference import ADAMW_EPS, CONTEXT, DECAY, LR, MAX_NORM, MOMENTUM, STEPS, Twin, relative_difference
from dmuon.check.report import Reading
from dmuon.check.topologies import Grid, Laid, full_state, lay, mesh_of

_FP32, _NORM = 1e-5, 1e-4  # of weights, of a gradient norm: sums in another order
# Of what training changed. Newton-Schulz magnifies small singular values and their noise with them: on real gradients
# fp16 stays within 0.1, and bf16 products, whose noise differs by how a batch is divided, were seen to make 0.09.
_HALF_NEWTON_SCHULZ, _BF16 = 0.1, 0.25
ROWS = 2  # of a global batch per rank, so that every topology can divide it and each part be halved


@dataclass(frozen=True, slots=True)
class Kind:
    """How a trial runs.

    Attributes:
        keep: whole weights stay after forward.
        dtype: of owned weights in forward and backward.
        ns_dtype: of Newton-Schulz; None is dmuon's choice.
        tolerance: factor on all limits of differences.
    """

    grid: Grid
    keep: bool
    dtype: torch.dtype
    ns_dtype: torch.dtype | None
    device: torch.device
    timeout: timedelta
    tolerance: float

    def __str__(self) -> str:
        name = {torch.float32: "fp32", torch.bfloat16: "bf16"}[self.dtype]
        newton = " default NS" if self.ns_dtype is None and self.device.type != "cpu" else ""
        return f"{self.grid} {'keep' if self.keep else 'reshard'} {name}{newton}"


def start(kind: Kind, seed: int = 0, *, asynchronous: bool = True, overlap: bool = False) -> tuple[Laid, dmuon.Muon]:
    """The small model, laid out, and its optimizer. Collective over all ranks.

    Args:
        asynchronous: False: every collective ends before anything else begins, in either residency.
        overlap: owned matrices are orthogonalized during backward.
    """
    laid = lay(
        kind.grid,
        build(SMALL, kind.device, seed),
        mesh_of(kind.grid, kind.device),
        keep=kind.keep,
        mp_policy=None if kind.dtype == torch.float32 else MixedPrecisionPolicy(param_dtype=kind.dtype),
        costs="flops",
        comm=dmuon.CommOptions(timeout=kind.timeout, asynchronous=asynchronous),
    )
    exchange = dmuon.create_dtensor_config(asynchronous, int(asynchronous), costs="flops")
    optimizer = dmuon.Muon(
        laid.model,
        lr=LR,
        weight_decay=DECAY,
        momentum=MOMENTUM,
        ns_dtype=kind.ns_dtype,
        adamw_eps=ADAMW_EPS,
        overlap_backward=overlap,
        distributed_config=None if kind.grid.dedicated else exchange,
    )
    return laid, optimizer


def backward(laid: Laid, kind: Kind, rows: int, step: int, micro: int = 1) -> None:
    """Gradients of this rank's part of a global batch of ``rows`` rows, in ``micro`` parts."""
    tokens, targets = laid.mine(batch(SMALL, rows, CONTEXT, step, kind.device))
    parts = list(zip(tokens.chunk(micro), targets.chunk(micro), strict=True))
    for i, (x, y) in enumerate(parts):
        last = i == len(parts) - 1
        if kind.grid.dedicated:
            dmuon.set_requires_gradient_sync(laid.model, last)
        else:
            assert isinstance(laid.model, FSDPModule)
            laid.model.set_requires_gradient_sync(last)
        (loss_of(laid.model, x, y, kind.dtype) / len(parts)).backward()


class Trial:
    """A model in training. Its methods are collective and return what this rank measured, in this order:
    :meth:`parity`, :meth:`accumulation`, :meth:`structure`, :meth:`checkpoint`."""

    def __init__(self, kind: Kind, twin: Twin, rows: int) -> None:
        self._kind = kind
        self._twin = twin
        self._rows = rows
        self._laid, self._optimizer = start(kind, seed=0)
        self._steps = 0

    def _backward(self, laid: Laid, step: int, micro: int = 1) -> None:
        backward(laid, self._kind, self._rows, step, micro)

    def _step(self, laid: Laid, optimizer: dmuon.Muon) -> None:
        optimizer.step()
        optimizer.zero_grad()

    def parity(self) -> list[Reading]:
        """Weights after a few steps: those of one process, and the same bits on all ranks."""
        for _ in range(STEPS):
            self._backward(self._laid, self._steps)
            self._step(self._laid, self._optimizer)
            self._steps += 1
        found = full_state(self._laid.model)
        exact = self._kind.dtype == torch.float32 and self._kind.ns_dtype == torch.float32
        if exact:
            difference = self._difference("parity", "weights of one process", found, self._twin.trained)
        else:  # of what Muon did to its matrices: the weights themselves would hide most of it
            initial = {name: start for name, start in self._twin.initial.items() if is_matrix(name)}
            changes, expected = (
                {name: weights[name] - start for name, start in initial.items()}
                for weights in (found, self._twin.trained)
            )
            limit = _BF16 if self._kind.dtype == torch.bfloat16 else _HALF_NEWTON_SCHULZ
            difference = self._difference("parity", "matrices of one process", changes, expected, limit, " of a change")
        return [difference, Reading("same bits", "weights on all ranks", 0, 0, same=digest(found))]

    def _difference(
        self,
        check: str,
        what: str,
        found: dict[str, Tensor],
        expected: dict[str, Tensor],
        limit: float = _FP32,
        of: str = "",
    ) -> Reading:
        errors = {name: relative_difference(found[name], value) for name, value in expected.items()}
        worst = max(errors, key=errors.__getitem__)
        unit = f"largest relative difference{of}, in {worst},"
        return Reading(check, what, errors[worst], limit * self._kind.tolerance, unit)

    def accumulation(self) -> list[Reading]:
        """A step of two micro-batches whose gradients are clipped: that of one process on the whole batch."""
        self._backward(self._laid, self._steps, micro=2)
        norm = float(dmuon.clip_grad_norm_(self._laid.model.parameters(), MAX_NORM))
        self._step(self._laid, self._optimizer)
        found = full_state(self._laid.model)
        self._steps += 1
        error = abs(norm - self._twin.norm) / self._twin.norm
        what = f"norm {norm:.4f} of all gradients"
        return [
            Reading("clip", what, error, _NORM * self._kind.tolerance, "relative difference"),
            self._difference("accumulate", "two micro-batches, clipped", found, self._twin.clipped),
        ]

    def structure(self) -> list[Reading]:
        """Who holds what between backward and step, and what a whole step sends."""
        if not self._kind.grid.dedicated:
            return self._exchanges()
        runtime = self._laid.dedication.runtime
        full_state(self._laid.model)  # nothing left under way from it in what follows
        self._backward(self._laid, self._steps)
        readings = placement(self._laid.dedication)
        self._step(self._laid, self._optimizer)
        stats = self._optimizer.last_step
        readings.append(at_rest(self._laid.dedication, self._optimizer, stats.ns_matrices))
        traffic = Traffic()
        with traffic:
            self._backward(self._laid, self._steps + 1)
            self._step(self._laid, self._optimizer)
        self._steps += 2
        return [*readings, compare_traffic(traffic.of(runtime.comm), runtime)]

    def _exchanges(self) -> list[Reading]:
        """What a step sends and orthogonalizes where FSDP2 holds the matrices."""
        traffic = Traffic()
        self._backward(self._laid, self._steps)
        with traffic:
            self._step(self._laid, self._optimizer)
        self._steps += 1
        return [owned_once(self._optimizer), compare_exchange(traffic, self._optimizer)]

    def checkpoint(self) -> list[Reading]:
        """State dicts into a fresh model: the same weights, and the same bits after another step."""
        # Copies, as a file would hold: what is loaded is not shared with what was saved.
        model_state, optimizer_state = tree_map_only(
            Tensor, torch.clone, get_state_dict(self._laid.model, self._optimizer)
        )
        fresh, optimizer = start(self._kind, seed=1)
        set_state_dict(fresh.model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
        loaded = len(differing(full_state(fresh.model), full_state(self._laid.model)))
        for laid, muon in ((self._laid, self._optimizer), (fresh, optimizer)):
            self._backward(laid, self._steps)
            self._step(laid, muon)
        self._steps += 1
        stepped = len(differing(full_state(fresh.model), full_state(self._laid.model)))
        text = f"{loaded} tensors differ in a fresh model after loading, {stepped} after one more step"
        return [Reading("checkpoint", text, loaded + stepped, 0)]


def digest(tensors: dict[str, Tensor]) -> str:
    """SHA-256 of names and bits."""
    hasher = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        hasher.update(name.encode())
        hasher.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names of tensors that are missing on one side, or whose bits differ."""
    names = found.keys() | expected.keys()
    return sorted(n for n in names if n not in found or n not in expected or not torch.equal(found[n], expected[n]))
