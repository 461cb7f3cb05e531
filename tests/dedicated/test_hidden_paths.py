"""Backward may enter a block by a tensor that no output shows: its weights are whole before they are read."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from harness.assertions import about, assert_equal_weights
from harness.on_ranks import on_ranks
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import dmuon

pytestmark = pytest.mark.pitfall("P83")

WIDTH = 16


def pass_through() -> Any:
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


class Stash(torch.autograd.Function):
    """Keeps what backward needs on the context, where no hook on saved tensors sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad @ ctx.weight, grad.t() @ ctx.x


class Layer(nn.Module):
    """Multiplies by its weight, each way of which saves something else: a view, the parameter, a product of it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))
        nn.init.xavier_uniform_(self.weight)
        self.register_buffer("mask", torch.linspace(0.5, 1.5, WIDTH * WIDTH).view(WIDTH, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        match self.how:
            case "view":
                return F.linear(x, self.weight)
            case "parameter":
                return x @ self.weight
            case "product":
                return F.linear(x, self.weight * self.mask * self.weight)
            case _:
                return Stash.apply(x, self.weight)


INSIDE: dict[str, Callable[[], Any]] = {
    "nothing": contextlib.nullcontext,
    "pass through": pass_through,
    "cpu": save_on_cpu,
}
AROUND: dict[str, Callable[..., Any]] = {
    "nothing": lambda block, *args: block(*args),
    "reentrant": lambda block, *args: checkpoint(block, *args, use_reentrant=True),
    "non-reentrant": lambda block, *args: checkpoint(block, *args, use_reentrant=False),
}


class Keys:
    """A cache: an object, which no one looks into."""

    def __init__(self) -> None:
        self.of_layers: list[Tensor] = []


class Writer(nn.Module):
    """Leaves keys in a cache that later blocks read."""

    def __init__(self, how: str, inside: str) -> None:
        super().__init__()
        self.norm, self.key, self.up, self.down = nn.LayerNorm(WIDTH), Layer(how), Layer(how), Layer(how)
        self.inside = inside

    def forward(self, x: Tensor, keys: Keys) -> Tensor:
        with INSIDE[self.inside]():
            h = self.norm(x)
            keys.of_layers.append(torch.tanh(self.key(h)))
            return x + self.down(torch.relu(self.up(h)))


class Reader(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.norm, self.query, self.out = nn.LayerNorm(WIDTH), Layer(how), Layer(how)

    def forward(self, y: Tensor, key: Tensor) -> Tensor:
        return y + self.out(self.query(self.norm(y)) * key)


class Towers(nn.Module):
    """Two towers as in a vision-language-action model: the output of the first is thrown away, its keys are not."""

    def __init__(self, how: str = "view", inside: str = "nothing", around: str = "nothing") -> None:
        super().__init__()
        self.writers = nn.ModuleList(Writer(how, inside) for _ in range(4))
        self.readers = nn.ModuleList(Reader(how) for _ in range(4))
        self.around = around

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        keys = Keys()
        for writer in self.writers:
            x = writer(x, keys)
        for reader, key in zip(self.readers, keys.of_layers, strict=True):
            y = AROUND[self.around](reader, y, key)
        return y


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(8, WIDTH, generator=draw), torch.randn(8, WIDTH, generator=draw)


def train(model: nn.Module, rows: slice, outside: Callable[[], Any], optimizer: dmuon.Muon) -> list[dict[str, float]]:
    """The norm of every gradient, of each of two steps."""
    norms = []
    for _ in range(2):
        x, y = (part[rows].clone().requires_grad_() for part in batch())
        optimizer.zero_grad()
        with outside():
            loss = model(x, y).square().mean()
        loss.backward()
        norms.append(
            {name: float(p.grad.norm()) for name, p in model.named_parameters() if p.ndim == 2 and p.grad is not None}
        )
        optimizer.step()
    return norms


@contextlib.contextmanager
def late_fills(rank: int, seed: int) -> Iterator[None]:
    """Ranks send their parts of a block's weights at random times."""
    draw, send = random.Random(1000 * seed + rank), dist.broadcast

    def late(*args: Any, **options: Any) -> Any:
        time.sleep(draw.choice((0.0, 0.0, 0.002, 0.006)))
        return send(*args, **options)

    dist.broadcast = late
    try:
        yield
    finally:
        dist.broadcast = send


def is_matrix(_fqn: str, _module: nn.Module, param: nn.Parameter) -> bool:
    return param.ndim == 2


def check(
    rank: int, world: int, layout: str, outside: str = "nothing", seed: int | None = None, **program: str
) -> None:
    torch.manual_seed(0)
    twin = Towers(**program)
    expected = train(twin, slice(None), contextlib.nullcontext, dmuon.Muon(twin, select=is_matrix, lr=0.02))
    torch.manual_seed(0)
    model = Towers(**program)
    sizes, names = ((2, world // 2), ("replicate", "shard")) if layout == "hsdp" else ((world,), ("shard",))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    dmuon.dedicate_params(model, mesh, costs="flops", select=is_matrix)
    if layout != "alone":
        for block in (*model.writers, *model.readers):  # what FSDP2 frees it does not find on such a path
            dmuon.fully_shard(block, mesh=mesh, reshard_after_forward=False)
        dmuon.fully_shard(model, mesh=mesh)
    rows = slice(8 * rank // world, 8 * (rank + 1) // world)
    with contextlib.nullcontext() if seed is None else late_fills(rank, seed):
        found = train(model, rows, INSIDE[outside], dmuon.Muon(model, lr=0.02))
    with about((layout, program, outside)):
        assert found == [pytest.approx(norms, rel=1e-4) for norms in expected]
        whole = {name: p.detach() for name, p in twin.named_parameters()}
        with dmuon.summon_full_params(model, writeback=False):
            assert_equal_weights(
                {n: p.detach() for n, p in model.named_parameters() if p.ndim == 2},
                {n: p for n, p in whole.items() if p.ndim == 2},
                1e-4,
            )


@on_ranks(2)
def test_keys_in_a_cache_give_the_gradients_of_one_process(rank: int, world: int) -> None:
    for seed, (how, inside, around, outside) in enumerate(
        [
            ("view", "nothing", "nothing", "nothing"),
            ("view", "pass through", "nothing", "nothing"),
            ("parameter", "pass through", "non-reentrant", "cpu"),
            ("product", "cpu", "reentrant", "nothing"),
            ("stash", "nothing", "nothing", "pass through"),
        ]
    ):
        layout = ("sharded", "alone")[seed % 2]
        check(rank, world, layout, outside, seed, how=how, inside=inside, around=around)


class Toy(nn.Module):
    """One block, of whose forward ``forward`` is the body."""

    def __init__(self, forward: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Toy.Block(forward), Toy.Block(forward)])

    class Block(nn.Module):
        def __init__(self, forward: Callable[[nn.Module, Any], Any]) -> None:
            super().__init__()
            self.first, self.second, self.body = nn.Linear(4, 4), nn.Linear(4, 4), forward
            self.forwards = 0

        def forward(self, x: Any) -> Any:
            self.forwards += 1
            return self.body(self, x)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


def dedicated(forward: Callable[[nn.Module, Any], Any], **options: Any) -> Toy:
    model = Toy(forward)
    dmuon.dedicate_params(model, init_device_mesh("cpu", (2,)), costs="flops", **options)
    return model


def plain(block: nn.Module, x: Tensor) -> Tensor:
    return torch.relu(block.second(torch.tanh(block.first(x))))


def hooks_now() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


@on_ranks(2)
def test_changes_in_place_of_what_backward_needs_are_noticed(rank: int, world: int) -> None:
    def changes(block: nn.Module, x: Tensor) -> Tensor:
        return torch.exp(block.first(x)).add_(1)

    with pytest.raises(RuntimeError, match=r"a tensor of shape \(2, 4\) that backward needs was changed in place"):
        dedicated(changes)(torch.ones(2, 4)).sum().backward()


@on_ranks(2)
def test_checkpointing_around_a_block_recomputes_it_once_and_hooks_outside_see_all_that_is_no_weight(
    rank: int, world: int
) -> None:
    seen: dict[bool, list[tuple[int, ...]]] = {}
    for owned in (False, True):
        model = dedicated(plain) if owned else Toy(plain)
        x = torch.ones(2, 4, requires_grad=True)
        checkpoint(model.blocks[0], x, use_reentrant=False).sum().backward()
        assert model.blocks[0].forwards == 2
        seen[owned] = []
        note = partial(_note, seen[owned])
        with saved_tensors_hooks(note, lambda tensor: tensor):
            model.blocks[1](x).sum().backward()
    weights = [(4, 4)] * (len(seen[False]) - len(seen[True]))
    assert sorted([*seen[True], *weights]) == sorted(seen[False]) and len(weights) == 2


def _note(seen: list[tuple[int, ...]], tensor: Tensor) -> Tensor:
    seen.append(tuple(tensor.shape))
    return tensor


@on_ranks(2)
def test_the_hooks_come_off_whatever_ends_a_forward(rank: int, world: int) -> None:
    ends: list[type[BaseException]] = []

    def body(block: nn.Module, x: Tensor) -> Tensor:
        for kind in ends:
            raise kind
        return plain(block, x)

    model, twin = dedicated(body), Toy(body)
    x = torch.ones(2, 4, requires_grad=True)
    for kind, outside in product((ValueError, KeyboardInterrupt), (contextlib.nullcontext, save_on_cpu)):
        ends[:] = [kind]
        with pytest.raises(kind), outside():
            model(x)
        ends.clear()
        found, expected = model(x), twin(x)
        assert hooks_now() is None and torch.equal(found, expected)
        found.sum().backward()


@on_ranks(2)
def test_functions_of_torch_func_inside_a_block_are_told_what_to_do(rank: int, world: int) -> None:
    def forces(block: nn.Module, x: Tensor) -> Tensor:
        return torch.func.grad(lambda at: at.sin().sum())(x.detach()) + block.first(x)

    with pytest.raises(RuntimeError, match=r"saved tensor hooks.* block 'blocks\.0'.*reshard_after_forward=False"):
        dedicated(forces)(torch.ones(2, 4))
    model, twin = dedicated(forces, reshard_after_forward=False), Toy(forces)
    assert torch.equal(model(torch.ones(2, 4)), twin(torch.ones(2, 4)))


@on_ranks(2)
def test_an_edit_of_a_weight_in_forward_is_refused(rank: int, world: int) -> None:
    def clamps(block: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            block.first.weight.clamp_(-0.1, 0.1)
        return block.first(x)

    for keep in (False, True):
        with pytest.raises(RuntimeError, match=r"'blocks\.0\.first\.weight' was changed in place inside the forward"):
            dedicated(clamps, reshard_after_forward=not keep)(torch.ones(2, 4))


@on_ranks(2)
def test_a_block_may_add_to_the_containers_that_it_is_given(rank: int, world: int) -> None:
    def writes(block: nn.Module, given: Any) -> Any:
        x, (notes, table) = given
        notes.append(block.first(x).square().mean())
        table["last"] = block.second(x)
        return x + table["last"], (notes, table)

    norms = []
    for owned in (False, True):
        model = dedicated(writes) if owned else Toy(writes)
        notes: list[Tensor] = []
        table: dict[str, Tensor] = {}
        x = torch.ones(2, 4, requires_grad=True)
        out, _ = model((x, (notes, table)))
        (out.sum() + sum(notes) + table["last"].sum()).backward()
        assert len(notes) == 2
        norms.append({name: float(p.grad.norm()) for name, p in model.named_parameters()})
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


@on_ranks(2)
def test_saved_weights_are_not_read_outside_of_backward(rank: int, world: int) -> None:
    model = dedicated(lambda block, x: block.first(x))
    node = model(torch.ones(2, 4, requires_grad=True)).grad_fn
    with pytest.raises(RuntimeError, match=r"block 'blocks\.1' has saved for backward was read outside of one"):
        _ = node._saved_mat2


class Reads(nn.Module):
    """Is given tuples of several kinds, and lends a view of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.lent: Tensor | None = None

    def forward(self, x: Tensor, size: torch.Size, best: torch.return_types.max) -> Tensor:
        assert isinstance(size, torch.Size)
        self.lent = self.linear.weight.detach()[0]
        return self.linear(x).view(size) + best.values


class Given(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Reads() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, x.size(), torch.max(x, 0))
        return self.head(x)


@pytest.mark.parametrize("trains", [True, False])
@on_ranks(2)
def test_blocks_get_tuples_as_they_are_and_may_lend_their_weights(rank: int, world: int, trains: bool) -> None:
    torch.manual_seed(0)
    model = Given()
    wholes = [layer.linear.weight.detach().clone() for layer in model.layers]
    dmuon.dedicate_params(model, init_device_mesh("cpu", (world,)))
    with torch.set_grad_enabled(trains):
        result = model(torch.ones(4, WIDTH, requires_grad=True))
    for layer, whole in zip(model.layers, wholes, strict=True):
        assert torch.equal(layer.lent, whole[0])
    if trains:
        result.sum().backward()
