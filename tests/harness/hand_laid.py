"""Weights that a program lays out itself, and what ``torch.optim.Muon`` makes of the whole ones in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

import dmuon
from dmuon import MatrixSpec
from harness.assertions import assert_close
from harness.dtensors import give, noise, placements_of, spread, whole
from harness.oracle import Twin
from harness.toy import DECAY

NONE: Mapping[str, int] = MappingProxyType({})


class Cut:
    """How one weight is cut: by role the dimension, and the lengths or None for torch.chunk's."""

    def __init__(self, shape: tuple[int, ...], apart: tuple[str, ...] = (), **cuts: Any) -> None:
        self.shape = shape
        self.apart = apart
        self.cuts = {role: cut if isinstance(cut, tuple) else (cut, None) for role, cut in cuts.items()}

    def part(self, whole: Tensor, sizes: Mapping[str, int], at: Mapping[str, int]) -> Tensor:
        for role in ("tp", "ep", "fsdp"):  # in this order where two cut one dimension
            if role in self.cuts and role in sizes:
                dim, lengths = self.cuts[role]
                size = sizes[role]
                lengths = lengths or [len(range(whole.shape[dim])[i::size]) for i in range(size)]
                whole = whole.split(list(lengths), dim)[at[role]]
        return whole.contiguous()

    def number(self, sizes: Mapping[str, int], at: Mapping[str, int]) -> int:
        """Of the whole of which this rank has a part: along roles that are apart, each has another."""
        return sum(at[role] for role in self.apart)

    def matrices(self) -> int:
        return self.shape[0] if len(self.shape) == 3 else 1


@dataclass(frozen=True)
class Split:
    """A tensor that is several matrices.

    Attributes:
        cut: takes the tensor apart by hand, into matrices ``(out, in)`` in any order.
    """

    name: str
    shape: tuple[int, ...]
    spec: MatrixSpec
    cut: Callable[[Tensor], list[Tensor]]


def be_made_of(param: nn.Parameter, spec: MatrixSpec) -> None:
    """Let a parameter remember of which matrices it is made, as one of a model does."""
    dmuon.param_groups(nn.ParameterList([param]), select=lambda *_: spec)


SPLITS = [
    Split("queries, keys, values", (6, 5), MatrixSpec((2, 2, 2)), lambda w: [w[:2], w[2:4], w[4:]]),
    Split("grouped queries", (10, 4), MatrixSpec((6, 2, 2)), lambda w: [w[:6], w[6:8], w[8:]]),
    Split(
        "by head",
        (12, 5),
        MatrixSpec((2, 2, 2), repeats=2),
        lambda w: [torch.cat([w[i : i + 2], w[i + 6 : i + 8]]) for i in (0, 2, 4)],
    ),
    Split("by turns", (8, 3), MatrixSpec((1, 1), repeats=4), lambda w: [w[::2], w[1::2]]),
    Split(
        "each head alone",
        (8, 5),
        MatrixSpec((4, 2, 2), num_heads=(2, 1, 1)),
        lambda w: [w[:2], w[2:4], w[4:6], w[6:]],
    ),
    Split(
        "each head of what comes by head",
        (12, 5),
        MatrixSpec((2, 1), repeats=4, num_heads=(2, 1)),
        lambda w: [w[[0, 1, 3, 4]], w[[6, 7, 9, 10]], w[2::3]],
    ),
    Split("transposed", (4, 6), MatrixSpec(transposed=True), lambda w: [w.T]),
    Split("transposed, fused", (5, 6), MatrixSpec((2, 4), transposed=True), lambda w: [w[:, :2].T, w[:, 2:].T]),
    Split(
        "transposed, by turns",
        (3, 6),
        MatrixSpec((1, 1), repeats=3, transposed=True),
        lambda w: [w[:, ::2].T, w[:, 1::2].T],
    ),
    Split("experts, fused", (3, 6, 4), MatrixSpec((2, 4)), lambda w: [*w[:, :2], *w[:, 2:]]),
    Split(
        "experts, transposed, by turns",
        (3, 4, 6),
        MatrixSpec((1, 1), repeats=3, transposed=True),
        lambda w: [*w[:, :, ::2].mT, *w[:, :, 1::2].mT],
    ),
    Split("kernel", (5, 3, 2, 2), MatrixSpec(flattened=True), lambda w: [w.flatten(1)]),
    Split(
        "kernel, fused", (6, 3, 2), MatrixSpec((2, 4), flattened=True), lambda w: [w[:2].flatten(1), w[2:].flatten(1)]
    ),
]


class Weights:
    """Weights that a program lays out itself, given random gradients, beside ``torch.optim.Muon`` on the whole ones."""

    def __init__(self, lr: float = 0.02, decay: float = DECAY, twin: Twin | None = None) -> None:
        self.params: list[nn.Parameter] = []
        self.twin = twin or Twin([], lr, decay)
        self.options = {"lr": lr, "weight_decay": decay, "ns_coefficients": "classic"}
        self.laid: list[tuple[int, tuple[int, ...], Callable[[Tensor], Tensor]]] = []
        self.steps = 0

    def add(
        self,
        seed: int,
        shape: Sequence[int],
        part: Callable[[Tensor], Tensor] = torch.clone,
        scale: float = 1.0,
        split: Split | None = None,
    ) -> nn.Parameter:
        """One more, which begins as ``scale`` times noise; ``part`` gives what this rank has of the whole."""
        whole_value = scale * noise(seed, *shape)
        self.twin.add(whole_value, None if split is None else split.cut)
        self.laid.append((seed, tuple(shape), part))
        self.params.append(nn.Parameter(part(whole_value)))
        if split is not None:
            be_made_of(self.params[-1], split.spec)
        return self.params[-1]

    def shard(
        self,
        seed: int,
        shape: Sequence[int],
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        scale: float = 1.0,
        split: Split | None = None,
    ) -> nn.Parameter:
        return self.add(seed, shape, partial(spread, mesh=mesh, placements=placements), scale, split)

    def shard_everywhere(
        self, world: int, tensors: Iterable[tuple[Sequence[int], Split | None]], some: slice = slice(None)
    ) -> None:
        """Each tensor on all of its placements over ``world`` ranks, or on ``some``. Collective."""
        meshes = {extents: init_device_mesh("cpu", extents) for extents, _ in placements_of(world, 2)}
        for seed, (shape, split) in enumerate(tensors):
            places = placements_of(world, 2 if split is not None and split.spec.flattened else len(shape))
            for extents, placements in places[some]:
                self.shard(seed, shape, meshes[extents], placements, split=split)

    def cut(self, cuts: Sequence[Cut], sizes: Mapping[str, int] = NONE, at: Mapping[str, int] = NONE) -> Weights:
        """``at``: this rank's place along each of the roles in ``sizes``."""
        for i, cut in enumerate(cuts):
            self.add(10 * i + cut.number(sizes, at), cut.shape, partial(cut.part, sizes=sizes, at=at))
        return self

    def optimizer(self, config: dmuon.DistributedConfig | None, groups: Any = None, **options: Any) -> dmuon.Muon:
        groups = groups or [{"params": list(self.params), "use_muon": True}]
        return dmuon.Muon(groups, distributed_config=config, **self.options, **options)

    def give(self, scale: float = 1.0) -> list[Tensor | None]:
        """Let every parameter have the next gradient, times ``scale``; the whole gradients."""
        grads: list[Tensor | None] = []
        for param, (seed, shape, part) in zip(self.params, self.laid, strict=True):
            grad = noise(1000 * (self.steps + 1) + seed, *shape)
            grads.append(grad)
            if isinstance(param, DTensor):
                give(param, scale * grad)  # it may lie otherwise by now
            else:
                param.grad = part(scale * grad)
        return grads

    def step(self, optimizer: dmuon.Muon, grads: Sequence[Tensor | None]) -> int:
        """Of both, the twin's with ``grads``; how many matrices this rank orthogonalized."""
        optimizer.step()
        self.twin.step(grads)
        self.steps += 1
        return optimizer.last_step.ns_matrices

    def train(self, optimizer: dmuon.Muon, steps: int) -> int:
        return sum(self.step(optimizer, self.give()) for _ in range(steps))

    def check(self, optimizer: dmuon.Muon | None = None) -> None:
        """Weights, and with an optimizer momentum, equal the twin's. Collective for DTensors."""
        weights = self.twin.weights()
        for i, param in enumerate(self.params):
            self.check_one(param, i, weights[i], "weights", 1e-5)
            if optimizer is not None:
                momentum = optimizer.state[param]["momentum_buffer"]
                assert momentum.shape == param.shape
                assert not isinstance(param, DTensor) or momentum.placements == param.placements
                self.check_one(momentum, i, self.twin.momentum(i), "momentum", 1e-6)

    def check_one(self, found: Tensor, index: int, expected: Tensor, what: str, tolerance: float) -> None:
        _, shape, part = self.laid[index]
        expected = expected.reshape(shape)
        about = f"{what} {index} of shape {shape} as {getattr(found, 'placements', part)}"
        assert_close(whole(found), expected if isinstance(found, DTensor) else part(expected), about, tolerance)
