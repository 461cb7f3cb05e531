"""Whatever a block returns or leaves behind, its matrices train as in a single process, or somebody is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from harness.assertions import about, assert_equal_weights
from harness.dtensors import local_tensor
from harness.heard import heard
from harness.network import Block, Network, Size, full_state
from harness.on_ranks import on_ranks
from harness.oracle import Reference
from harness.topologies import lay
from harness.toy import OPTIONS, batch, build
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import dmuon
from dmuon.dedicated.dedication import dedications

pytestmark = pytest.mark.pitfall("P66")

BOARD: list[Tensor] = []  # what blocks leave where nothing of theirs refers to it


@dataclass
class Out:
    hidden: Tensor
    aux: Tensor


class Slots:
    __slots__ = ("aux", "hidden", "never_set")

    def __init__(self, hidden: Tensor, aux: Tensor) -> None:
        self.hidden, self.aux = hidden, aux


class Notes:
    """An object that all blocks share."""

    def __init__(self) -> None:
        self.losses: dict[str, list[Tensor]] = {"aux": []}


class Gated(Block):
    """Beside the toy's block a matrix that only an auxiliary loss trains; a way is how both come out."""

    def __init__(self, size: Size, way: str) -> None:
        super().__init__(size)
        self.gate = nn.Linear(size.width, size.width)
        self.way = way
        self.notes = Notes()
        self.register_buffer("kept", torch.zeros(()), persistent=False)
        self.left: Any = None

    def forward(self, x: Tensor) -> Any:
        hidden, aux = super().forward(x), self.gate(x.detach()).square().mean()
        return getattr(self, f"by_{self.way}")(hidden, aux)

    def by_tuple(self, hidden: Tensor, aux: Tensor) -> Any:
        return hidden, aux

    def by_dataclass(self, hidden: Tensor, aux: Tensor) -> Any:
        return Out(hidden, aux)

    def by_slots(self, hidden: Tensor, aux: Tensor) -> Any:
        return [Slots(hidden, aux)]

    def by_closure(self, hidden: Tensor, aux: Tensor) -> Any:
        return partial(lambda of, also: (of, also()), hidden, lambda: aux)

    def by_attribute(self, hidden: Tensor, aux: Tensor) -> Any:
        self.left = aux
        return hidden

    def by_buffer(self, hidden: Tensor, aux: Tensor) -> Any:
        self.kept = aux
        return hidden

    def by_notes(self, hidden: Tensor, aux: Tensor) -> Any:
        self.notes.losses["aux"].append(aux)
        return hidden

    def by_board(self, hidden: Tensor, aux: Tensor) -> Any:
        BOARD.append(aux)
        return hidden

    def by_board_alone(self, hidden: Tensor, aux: Tensor) -> Any:
        BOARD[:] = [*BOARD, hidden, aux]


class Reading(Network):
    """Reads what the blocks leave; ``total`` is the sum of the auxiliary losses of the last forward."""

    total: Tensor

    def forward(self, tokens: Tensor) -> Tensor:
        x, aux = self.embed(tokens), []
        BOARD.clear()
        for block in self.blocks:
            block.notes.losses["aux"].clear()
            out = block(x)
            match block.way:
                case "tuple":
                    x, found = out
                case "dataclass":
                    x, found = out.hidden, out.aux
                case "slots":
                    x, found = out[0].hidden, out[0].aux
                case "closure":
                    x, found = out()
                case "attribute":
                    x, found = out, block.left
                case "buffer":
                    x, found = out, block.kept
                case "notes":
                    x, found = out, block.notes.losses["aux"][0]
                case "board":
                    x, found = out, BOARD[-1]
                case _:
                    x, found = BOARD[-2:]
            aux.append(found)
        self.total = torch.stack(aux).sum()
        return self.head(self.norm(x))


def model_of(way: str) -> Reading:
    model = build(block=partial(Gated, way=way))
    model.__class__ = Reading
    return model


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + model.total


def expected_after(steps: int) -> dict[str, Tensor]:
    model = model_of("tuple")
    optimizer = Reference(model)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, *batch(step)).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


SEEN = ("dataclass", "slots", "closure", "attribute", "buffer", "notes")
UNSEEN = ("board", "board_alone")


@pytest.mark.parametrize(
    ("layout", "keep", "ways"),
    [
        ("1d-two-lines", False, (*SEEN, "board_alone")),
        ("1d-two-lines", True, ("attribute", *UNSEEN)),
        ("ddp-2", False, ("attribute", *UNSEEN)),
        pytest.param("hsdp-two-lines", False, (*SEEN, "board_alone"), marks=pytest.mark.slow),
        pytest.param("tp-two-lines", False, (*SEEN, "board_alone"), marks=pytest.mark.slow),
        pytest.param("hsdp-two-lines", True, UNSEEN, marks=pytest.mark.slow),
    ],
)
@on_ranks("layout")
def test_blocks_train_whatever_they_return(
    rank: int, world: int, layout: str, keep: bool, ways: tuple[str, ...]
) -> None:
    expected = expected_after(2)
    for way in ways:
        model = model_of(way)
        laid = lay(layout, model, keep=keep)
        optimizer = laid.optimizer()
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, *laid.mine(batch(step))).backward()
            optimizer.step()
        with about(way):
            assert_equal_weights(full_state(model), expected)


@on_ranks(2)
def test_unseen_gradients_accumulate_and_wait_as_others_do(rank: int, world: int) -> None:
    """Without synchronization first, then with it: the mean of both micro-batches, of all ranks."""
    twin = model_of("tuple")
    for step in range(2):
        loss_of(twin, *batch(step)).backward()
    expected = {n: p.grad for n, p in twin.named_parameters() if n.endswith("gate.weight")}
    model = model_of("board")
    laid = lay("ddp-2", model)
    with dmuon.no_sync(model):
        loss_of(model, *laid.mine(batch(0))).backward()
    loss_of(model, *laid.mine(batch(1))).backward()
    for matrix in dedications(model)[0].runtime.matrices():
        if matrix.fqn in expected and matrix.rest.owner == rank:
            found = local_tensor(matrix.rest.grad)
            torch.testing.assert_close(found, expected[matrix.fqn], rtol=1e-5, atol=1e-7)


@on_ranks(1)
def test_a_graph_of_older_weights_is_refused_though_no_output_shows_it(rank: int, world: int) -> None:
    model = model_of("board")
    laid = lay("1d-1-two-lines", model)
    optimizer = laid.optimizer()
    loss_of(model, *batch(0)).backward(retain_graph=True)
    total = model.total
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"the weights of block 'blocks\.\d' changed between its forward and its b"):
        total.backward()


@on_ranks(2)
def test_a_forward_that_raises_leaves_no_weights_behind(rank: int, world: int) -> None:
    """Nothing comes out of it either, but no backward will enter it."""
    model = model_of("attribute")
    laid = lay("1d-two-lines", model)
    block = dedications(model)[0].runtime.blocks[0]
    handle = model.blocks[0].down.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, *laid.mine(batch(0)))
    handle.remove()
    assert sum(storage.nbytes() for storage in block.buffer.storages) == 0


# -- groups that leave something out ------------------------------------------------------------------------------


def warnings_of(groups: Callable[[nn.Module], Any]) -> list[str]:
    model = build()
    dmuon.dedicate_params(model, init_device_mesh("cpu", (1,)), costs="flops")
    optimizer = dmuon.Muon(groups(model), **OPTIONS)
    with heard() as messages:
        for step in range(2):
            F.cross_entropy(model(batch(step)[0]).flatten(0, 1), batch(step)[1].flatten()).backward()
            optimizer.step()
    return [m for m in messages if "no group" in m]


@on_ranks(1)
def test_groups_that_leave_parameters_out_say_so_once(rank: int, world: int) -> None:
    assert warnings_of(lambda model: model) == []
    assert warnings_of(dmuon.param_groups) == []
    (told,) = warnings_of(lambda model: [p for p in dmuon.owned_parameters(model) if p.fqn != "blocks.0.mix.weight"])
    assert "'blocks.0.mix.weight'" in told and "'embed.weight'" in told
    (told,) = warnings_of(lambda model: dmuon.param_groups(model)[:1])
    assert "blocks" not in told and "'embed.weight'" in told and "'head.weight'" in told
