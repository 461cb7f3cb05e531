"""Of which matrices the parameters consist that go to Muon, by default, by `select` and without `exclude`."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.nn as nn
from harness.trees import HEADS, Conv1D, D, H, experts, linear, llama, node, of, stack
from torch.distributed.tensor import Replicate

import dmuon
from dmuon import MatrixSpec
from dmuon.layout.matrices import numbered
from dmuon.layout.shards import layout_of
from dmuon.model.routing import route_to_blocks


def routes(layer: Callable[[], nn.Module], **options: Any) -> dict[str, Any]:
    """Of the first of two blocks, by the names inside it."""
    found = route_to_blocks(node(h=stack(layer)), **options)
    return {r.fqn.removeprefix("h.0."): r for r in found if r.fqn.startswith("h.0.")}


def attention() -> nn.Module:
    return node(attn=of("BloomAttention", query_key_value=linear(D, 3 * D), **HEADS), mlp=linear())


def unknown() -> nn.Module:
    return node(attn=of("MyAttention", qkv=linear(D, 3 * D)), mlp=linear())


@pytest.mark.pitfall("P78")
@pytest.mark.parametrize(
    ("layer", "name", "form"),
    [
        (unknown, "attn.qkv.weight", ""),
        (lambda: node(attn=of("A", c_attn=Conv1D(3 * D, D))), "attn.c_attn.weight", "transposed=True"),
        (lambda: node(moe=of("MyExperts", **experts())), "moe.gate_up_proj", ""),
        (
            lambda: node(a=nn.Conv1d(3, D, 1), glu=node(gate_up=nn.Conv1d(D, 2 * H, 1))), "glu.gate_up.weight",
            "flattened=True",
        ),
    ],
)  # fmt: skip
def test_the_remedies_of_a_refusal_work_as_they_are_written(
    layer: Callable[[], nn.Module], name: str, form: str
) -> None:
    layer = partial(lambda inner: node(inner=inner(), plain=linear()), layer)
    fqn = f"inner.{name}"
    with pytest.raises(ValueError, match=rf"'h\.0\.{fqn}' .*fused into one tensor") as refused:
        routes(layer)
    written = re.search(r"select=(lambda .* else \.\.\.) \(.*; dmuon\.(.*) if it is one matrix\)", str(refused.value))
    assert written is not None and written[2] == f"MatrixSpec({form})" and "parts=(…" in written[1], "no guess"
    param = layer().get_parameter(fqn)
    length = param.shape[1] if form == "transposed=True" or (param.ndim == 3 and form == "") else param.shape[0]
    chosen = written[1].replace("(…)", f"({length // 2}, {length - length // 2})")
    found = routes(layer, select=eval(chosen, {"dmuon": dmuon}))
    assert found[fqn].spec.parts == (length // 2, length - length // 2) and found[fqn].reason == "chosen by select"
    assert found["plain.weight"].reason == "matrix inside a block", "... leaves the rest to the default rule"
    excluded = re.search(r"exclude=(\[.*\])$", str(refused.value))
    assert excluded is not None
    assert routes(layer, exclude=eval(excluded[1]))[fqn].reason == "excluded by exclude"


def test_select_overrides_what_is_known() -> None:
    def chosen(answer: Any, layer: Callable[[], nn.Module] = attention) -> Any:
        name = "attn.query_key_value.weight" if layer is attention else "attn.qkv.weight"
        return routes(layer, select=lambda fqn, *_: answer if fqn.endswith(name) else ...)[name]

    assert chosen(True).spec == MatrixSpec((4, 4, 4), repeats=2), "as it is known"
    assert chosen(MatrixSpec()).spec == MatrixSpec(), "as one matrix"
    assert chosen(MatrixSpec((12, 12))).spec == MatrixSpec((12, 12))
    assert not chosen(False).muon and chosen(...).reason == "3 matrices inside a block"
    assert chosen(True, unknown).spec == MatrixSpec(), "nothing is known: as one matrix"
    with pytest.raises(ValueError, match=r"'h\.0\.attn\.query_key_value\.weight': .*describes 25 outputs"):
        chosen(MatrixSpec((12, 13)))


@pytest.mark.parametrize(
    "exclude",
    [
        ["*.gate_proj.weight"],
        ["*.mlp.gate_proj"],
        lambda fqn, module, param: "gate_proj" in fqn,
        ("model.layers.0.mlp.gate_proj.*", "model.layers.1.mlp.gate_pro?.weight"),
    ],
)
def test_exclude_keeps_on_adamw_what_it_names_and_nothing_else(exclude: Any) -> None:
    model = llama()
    default, found = route_to_blocks(model), route_to_blocks(model, exclude=exclude)
    kept = {r.fqn for r in default if "gate_proj" in r.fqn}
    assert {r.fqn for r in default if r.muon} - {r.fqn for r in found if r.muon} == kept and len(kept) == 2
    assert {r.reason for r in found if r.fqn in kept} == {"excluded by exclude"}
    assert [r.reason for r in found if r.fqn not in kept] == [r.reason for r in default if r.fqn not in kept]
    both = route_to_blocks(model, exclude=exclude, select=lambda fqn, *_: fqn.endswith("_proj.weight"))
    assert {r.fqn for r in both if r.muon} == {r.fqn for r in found if r.muon}, "whatever select says"


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((12, 5), MatrixSpec((2, 2, 2), repeats=2)),
        ((5, 6), MatrixSpec((2, 4), transposed=True)),
        ((3, 6, 4), MatrixSpec((2, 4))),
        ((3, 4, 6), MatrixSpec((1, 1), repeats=3, transposed=True)),
        ((6, 3, 2), MatrixSpec((2, 4), flattened=True)),
        ((8, 5), MatrixSpec((4, 2, 2), num_heads=(2, 1, 1))),
        ((3, 4, 6), MatrixSpec()),
    ],
)
def test_plans_list_the_matrices_that_dedication_gives_owners(shape: tuple[int, ...], spec: MatrixSpec) -> None:
    found = {}
    for share, numbers in numbered(layout_of(shape, [1], [Replicate()]), spec):
        found |= dict.fromkeys(numbers, share.spread.layout.shape)
    listed = {name: (rows, cols) for name, rows, cols in spec.named("w", shape)}
    assert {f"w[{number}]": sides for number, sides in found.items()} == listed
