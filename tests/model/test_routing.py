"""Which parameters go to Muon, for the module trees of real models, and which are refused by name."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn as nn
from harness.heard import heard
from harness.small_convnets import CONVNETS
from harness.small_models import CASES, Case, Model, chain, tied_layers
from harness.trees import Called, Conv1D, D, H, V, adapted, bare, linear, llama, node, of, stack
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import dmuon
from dmuon.model.routing import notice, route_parameters, route_to_blocks


def routes(model: nn.Module, **options: Any) -> dict[str, Any]:
    found = {r.fqn: r for r in route_to_blocks(model, **options)}
    assert sorted(found) == sorted(
        n.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "") for n, _ in model.named_parameters()
    ), "every parameter has one route"
    return found


def muon(model: nn.Module, **options: Any) -> dict[str, str]:
    """Canonical name to block of what Muon takes."""
    return {r.fqn: str(r.block) for r in routes(model, **options).values() if r.muon}


def each(blocks: str, layers: int, *names: str) -> dict[str, str]:
    return {f"{blocks}.{i}.{n}.weight": f"{blocks}.{i}" for i in range(layers) for n in names}


# -- the module trees of real models ------------------------------------------------------------------------------


LLAMA = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj") + (
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip


def gpt2() -> nn.Module:
    def layer() -> nn.Module:
        mlp = node(c_fc=Conv1D(4 * D, D), c_proj=Conv1D(D, 4 * D), act=nn.GELU())
        return node(ln_1=nn.LayerNorm(D), attn=node(c_proj=Conv1D(D, D)), ln_2=nn.LayerNorm(D), mlp=mlp)

    inner = node(
        wte=nn.Embedding(V, D), wpe=nn.Embedding(6, D), drop=nn.Dropout(), h=stack(layer), ln_f=nn.LayerNorm(D)
    )
    model = node(transformer=inner, lm_head=linear(D, V))
    model.lm_head.weight = inner.wte.weight
    return model


@pytest.mark.pitfall("P02", "P03", "P20")
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (llama, each("model.layers", 2, *LLAMA)),
        (lambda: llama(1), each("model.layers", 1, *LLAMA)),
        (gpt2, each("transformer.h", 2, "attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
    ],
)
def test_matrices_of_real_models_go_to_muon_and_nothing_else(
    make: Callable[[], nn.Module], expected: dict[str, str]
) -> None:
    """For more of them see test_transformers_families.py."""
    assert muon(make()) == expected


@pytest.mark.pitfall("P03", "P06", "P07")
@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (lambda: nn.Embedding(5, D), "embedding h.0.extra"),
        (lambda: nn.LayerNorm((4, D)), "weight of LayerNorm"),
        (lambda: of("VocabularyEmbedding", weight=bare(5, D)), "weight of VocabularyEmbedding, which multiplies no"),
        (lambda: of("CondConv2d", weight=bare(4, 9 * D)), "weight of CondConv2d, which"),  # a kernel in each row
        (lambda: nn.LSTM(D, D), "recurrent weight of LSTM"),
        (lambda: nn.Conv1d(D, D, 3, groups=D), "depthwise"),
        (lambda: nn.ConvTranspose2d(D, D, 2), "kernel of ConvTranspose2d"),
        (lambda: nn.Bilinear(D, D, 2), "3-D, not known to be a stack"),
        (lambda: bare(5, D), "bare parameter of Called"),  # positions, Mamba's A_log, stacked biases
        (lambda: bare(2, D, D), "3-D, not known to be a stack"),
        (lambda: nn.Parameter(torch.zeros(D, D, dtype=torch.int64), requires_grad=False), "not floating point"),
        (lambda: nn.Parameter(torch.zeros(0, D)), "empty"),
    ],
)  # fmt: skip
def test_inside_a_block_only_matrices_of_layers_go_to_muon(extra: Callable[[], Any], reason: str) -> None:
    model = node(h=stack(lambda: node(a=linear(), extra=extra())))
    found = routes(model)
    assert {n for n, r in found.items() if r.muon} == {"h.0.a.weight", "h.1.a.weight"}
    reasons = [r.reason for n, r in found.items() if n.startswith("h.0.extra") and r.param.ndim >= 2]
    assert reasons and all(reason in r for r in reasons)


@pytest.mark.pitfall("P03", "P60")
def test_unusual_linear_layers_inside_a_block_go_to_muon() -> None:
    class Mine(nn.Linear):
        pass

    def layer() -> nn.Module:
        q = adapted(linear())
        return node(score=nn.Linear(D, 1), embedding_like_name=linear(), head=Mine(D, D), norm_proj=linear(), q=q)

    names = ("score", "embedding_like_name", "head", "norm_proj", "q.lora_A.default", "q.lora_B.default")
    model = node(h=stack(layer))
    frozen = {f"h.{i}.q.base_layer.weight": "None" for i in range(2)}
    assert muon(model) == each("h", 2, *names) | frozen, "names decide nothing; frozen base weights have no block"


# -- blocks -------------------------------------------------------------------------------------------------------


def mlp(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(part for pair in pairwise(widths) for part in (linear(*pair), nn.ReLU())))


MORE_ENDS: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "heads that guess further tokens": (
        lambda: node(llama=llama(), heads=stack(lambda: nn.Sequential(node(linear=linear()), linear(D, V)))),
        {f"heads.{i}.1.weight": "output" for i in range(2)},
    ),
    "critics": (
        lambda: node(actor=mlp(3, H, H, 2), critics=stack(lambda: mlp(5, H, H, 1))),
        {f"critics.{i}.{j}.weight": end for i in range(2) for j, end in ((0, "input"), (4, "output"))},
    ),
    "parts that are joined or split again": (
        lambda: node(
            stem=nn.Conv2d(3, D, 3), h=stack(Small), pools=stack(lambda: nn.Sequential(nn.Conv2d(D, 8, 1))),
            shifts=stack(lambda: nn.Sequential(nn.SiLU(), linear(D, 6 * D))), joined=nn.Conv2d(3 * D, D, 3),
        ),
        {},
    ),
    "a vocabulary that is as large as a layer is wide": (
        lambda: node(embed=nn.Embedding(H, D), h=stack(lambda: node(up=linear(D, H), act=nn.GELU(), down=linear(H)))),
        {},
    ),
    "stages of a pipeline, of which one has the head": (
        lambda: nn.ModuleList([node(layers=stack(Small)), node(layers=stack(Small), head=linear(D, V))]),
        {"1.head.weight": "output"},
    ),
}  # fmt: skip


@pytest.mark.pitfall("P03")
@pytest.mark.parametrize("name", MORE_ENDS)
def test_what_takes_the_input_and_heads_are_not_hidden_in_blocks_either(name: str) -> None:
    make, expected = MORE_ENDS[name]
    found = {fqn: route.reason for fqn, route in routes(make()).items() if route.block is None and route.param.ndim > 1}
    assert {fqn: why for fqn, why in found.items() if why.endswith(" layer")} == {
        fqn: f"{end} layer" for fqn, end in expected.items()
    }


class Small(Called):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()


def stages(*depths: int) -> nn.Module:
    """As ResNets: stages of layers of one class, a stem and a head."""
    parts = {f"layer{i}": nn.Sequential(*(Small() for _ in range(depth))) for i, depth in enumerate(depths)}
    return node(stem=linear(3), **parts, head=linear(D, 2))


# Models in which no layer repeats are in harness/small_models.py and harness/small_convnets.py.
CONTAINERS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "stem, blocks and head in one Sequential": (
        lambda: nn.Sequential(node(patch=linear()), Small(), Small(), nn.Sequential(linear(), nn.Tanh())), ["1", "2"],
    ),
    "stages of different depth": (
        lambda: nn.Sequential(
            nn.Sequential(nn.Conv2d(3, D, 2), nn.LayerNorm(D)),
            nn.Sequential(Small()), node(reduction=linear(4 * D, 3 * D)),
            nn.Sequential(Small(), Small()), node(reduction=linear(4 * D, 3 * D)),
            nn.Sequential(Small(), Small(), Small()),
        ),
        ["1.0", "2", "3.0", "3.1", "4", "5.0", "5.1", "5.2"],
    ),
    "lists of lists": (
        lambda: node(layers=stack(lambda: nn.ModuleList([Small(), nn.Sequential(linear(), nn.GELU())]))),
        ["layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"],
    ),
    "task heads in a ModuleDict are no stack": (
        lambda: node(layers=stack(Small), heads=nn.ModuleDict({"a": Small(), "b": Small()})), ["layers.0", "layers.1"],
    ),
    "lists inside blocks belong to the block": (
        lambda: node(layers=stack(lambda: node(experts=stack(Small)))), ["layers.0", "layers.1"],
    ),
    "layers of the same class elsewhere": (
        lambda: node(stem=linear(3), first=Small(), down=nn.Sequential(nn.ReLU(), Small()), head=linear(D, 2)),
        ["first.a", "first.b", "down.1.a", "down.1.b"],
    ),
    "a list of bare layers": (
        lambda: node(layers=nn.ModuleList([linear(3), linear(), linear(), linear(D, 2)])), ["layers.1", "layers.2"],
    ),
    "a stack beside layers that are attributes": (
        lambda: node(encoder=stack(Small, 1), fc1=linear(), fc2=linear(), out=linear(D, 2)), ["encoder.0"],
    ),
}  # fmt: skip


@pytest.mark.pitfall("P03", "P20")
@pytest.mark.parametrize("name", CONTAINERS)
def test_blocks_are_the_elements_of_the_outermost_stacks_or_hidden_layers(name: str) -> None:
    make, blocks = CONTAINERS[name]
    found = muon(make())
    assert list(dict.fromkeys(found.values())) == blocks
    inside = [n for n, p in make().named_parameters() if p.ndim == 2 and n.startswith(tuple(f"{b}." for b in blocks))]
    assert list(found) == inside == [r.fqn for r in route_parameters(make()) if r.muon]


@pytest.mark.pitfall("P03")
def test_wrapped_blocks_keep_canonical_names() -> None:
    model = llama()
    for i, layer in enumerate(model.model.layers):
        layer.mlp = checkpoint_wrapper(layer.mlp)
        if i:
            model.model.layers[i] = checkpoint_wrapper(layer)
    assert muon(model) == each("model.layers", 2, *LLAMA)
    assert muon(torch.compile(llama(), backend="eager")) == each("model.layers", 2, *LLAMA)
    wrapped = nn.Sequential(checkpoint_wrapper(node(patch=linear())), checkpoint_wrapper(Small()), Small(), linear())
    assert set(muon(wrapped).values()) == {"1", "2"}, "a wrapper is not what repeats"
    block = route_to_blocks(wrapped)[1]
    assert block.block_module is wrapped[1], "hooks belong outside the wrapper, which calls its module anew in backward"


@pytest.mark.pitfall("P03", "P19")
def test_shared_weights_inside_one_block_are_one_matrix_and_between_blocks_an_error() -> None:
    inside = node(h=stack(lambda: node(a=linear(), b=linear())))
    inside.h[0].b.weight = inside.h[0].a.weight
    assert set(muon(inside)) == {"h.0.a.weight", "h.1.a.weight", "h.1.b.weight"}
    assert len(routes(inside)["h.0.a.weight"].sites) == 2

    between = node(h=stack(lambda: node(a=linear())))
    between.h[1].a.weight = between.h[0].a.weight
    with pytest.raises(ValueError, match=r"'h\.0\.a\.weight' is shared by blocks h\.0, h\.1; untie it"):
        route_to_blocks(between)
    assert [r.fqn for r in route_parameters(between) if r.muon] == ["h.0.a.weight"], "no block is asked for"
    found = route_to_blocks(between, blocks=[between])
    assert [(r.fqn, r.block, r.reason) for r in found if r.muon] == [
        ("h.0.a.weight", "(model)", "matrix inside a block")
    ]
    kept = node(h=stack(lambda: node(a=linear(), b=linear())))
    kept.h[1].a.weight = kept.h[0].a.weight
    assert set(muon(kept, select=lambda fqn, *_: fqn.endswith("b.weight"))) == {"h.0.b.weight", "h.1.b.weight"}

    outside = node(h=stack(lambda: node(a=linear(), b=linear())), out=linear())
    outside.out.weight = outside.h[1].b.weight
    assert routes(outside)["h.1.b.weight"].reason == "outside blocks", "a weight that is also used outside stays there"


@pytest.mark.pitfall("P03")
def test_heads_and_embeddings_that_a_model_declares_stay_out_even_inside_a_block() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h = nn.ModuleList([node(a=linear()), node(a=linear(), lm_head=linear(D, V), codes=linear())])

        def get_output_embeddings(self) -> nn.Module:
            return self.h[1].lm_head

        def get_input_embeddings(self) -> nn.Module:
            return self.h[1].codes

    found = routes(Model())
    assert {n for n, r in found.items() if r.muon} == {"h.0.a.weight", "h.1.a.weight"}
    assert found["h.1.lm_head.weight"].reason == "output head"
    assert found["h.1.codes.weight"].reason == "input embedding"

    tied = node(embed=nn.Embedding(V, D), h=nn.ModuleList([node(a=linear()), node(head=linear(D, V))]))
    tied.h[1].head.weight = tied.embed.weight
    assert "tied to embedding embed" in routes(tied)["embed.weight"].reason


class Merging(nn.Module):
    """As peft's wrapper of trained tokens, whose weight is computed, which shards do not allow."""

    @property
    def weight(self) -> torch.Tensor:
        raise RuntimeError("aten.index_copy.default got mixed torch.Tensor and DTensor")


@pytest.mark.parametrize("answer", [lambda: None, lambda tokens: tokens, Merging])
def test_declared_heads_that_are_something_else_are_ignored(answer: Callable[..., Any]) -> None:
    model = llama()
    model.get_output_embeddings = answer
    assert muon(model) == each("model.layers", 2, *LLAMA)


# -- reparametrized weights ---------------------------------------------------------------------------------------


@pytest.mark.pitfall("P60")
@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (nn.utils.parametrizations.weight_norm, r"a\.parametrizations\.weight\.original[01]"),
        (nn.utils.parametrizations.orthogonal, r"a\.parametrizations\.weight\.original"),
        (nn.utils.weight_norm, r"a\.weight_[gv]"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_reparametrized_weights_are_refused_by_name(wrap: Callable[[nn.Module], nn.Module], name: str) -> None:
    model = node(h=nn.ModuleList([node(a=wrap(linear()), b=linear())]))
    with pytest.raises(ValueError, match=rf"'h\.0\.{name}' is parametrized by \w+.*select=") as told:
        route_to_blocks(model)
    patterns = re.search(r"exclude=(\[.*\]), or", str(told.value))
    assert patterns is not None
    assert muon(model, exclude=ast.literal_eval(patterns[1])) == {"h.0.b.weight": "h.0"}, "the remedy works"
    with pytest.raises(ValueError, match="is parametrized by"):
        route_to_blocks(model, select=lambda fqn, _, p: p.ndim == 2)
    assert muon(model, select=lambda fqn, _, p: fqn == "h.0.b.weight") == {"h.0.b.weight": "h.0"}


# -- select and blocks --------------------------------------------------------------------------------------------


def everything(*_: Any) -> bool:
    return True


@pytest.mark.pitfall("P02")
@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"select": lambda *_: None}, TypeError, r"select\('model.embed_tokens.weight', …\) returned None"),
        ({"select": lambda *_: False}, ValueError, "no matrix was selected.*select returned True for no parameter"),
        ({"select": lambda fqn, *_: fqn == "lm_head.weight"}, ValueError, "'lm_head.weight', which lies.*blocks="),
        ({"select": lambda fqn, *_: "norm" in fqn}, ValueError, r"layernorm.weight' of shape \(8,\).*return False"),
        ({"exclude": ["*"]}, ValueError, r"exclude keeps every matrix away .*; exclude less"),
        ({"exclude": ["*.gat"]}, ValueError, r"the pattern '\*.gat' names no parameter and no module"),
        ({"blocks": [nn.Linear(2, 2)]}, ValueError, "blocks: Linear is not a submodule of the model; pass"),
        ({"blocks": lambda fqn, m: fqn == "model.layers"}, ValueError, "is a ModuleList, which nobody calls"),
        ({"blocks": lambda fqn, m: fqn == "model.norm"}, ValueError, "no matrix was selected.*inside the given blocks"),
    ],
)  # fmt: skip
def test_bad_select_exclude_and_blocks_name_the_remedy(
    options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        route_to_blocks(llama(), **options)
    if "exclude" in options:
        with pytest.raises(error, match=match):
            dmuon.Muon(llama(), **options)


@pytest.mark.pitfall("P06", "P60")
def test_select_cannot_choose_what_muon_cannot_update() -> None:
    kernels = node(h=stack(lambda: node(up=nn.ConvTranspose2d(D, D, 2))))
    with pytest.raises(ValueError, match=r"select chose 'h\.0\.up\.weight': .*MatrixSpec\(flattened=True\)"):
        route_to_blocks(kernels, select=lambda _, __, p: p.ndim == 4)
    with pytest.raises(ValueError, match=r"'h\.0\.up\.bias' of shape \(8,\).*return False for it"):
        route_to_blocks(kernels, select=lambda _, __, p: p.ndim == 1)
    recurrent = node(h=stack(lambda: node(rnn=nn.LSTM(D, D))))
    with pytest.raises(ValueError, match=r"'h\.0\.rnn.weight_ih_l0' of a LSTM, which keeps references"):
        route_to_blocks(recurrent, select=lambda fqn, _, p: p.ndim == 2)


def test_select_may_choose_what_the_default_rule_would_not() -> None:
    model = node(h=stack(lambda: node(a=linear(), table=bare(5, D), frozen=linear().requires_grad_(False))))
    expected = {f"h.{i}.{n}" for i in range(2) for n in ("a.weight", "table", "frozen.weight")}
    assert set(muon(model, select=everything)) == expected


def test_blocks_by_list_and_by_predicate_override_the_default() -> None:
    model = llama()
    by_list = muon(model, blocks=[layer.mlp for layer in model.model.layers])
    assert by_list == muon(model, blocks=lambda fqn, module: fqn.endswith(".mlp"))
    assert set(by_list.values()) == {"model.layers.0.mlp", "model.layers.1.mlp"} and len(by_list) == 6
    assert muon(model, blocks=model.model.layers) == muon(model), "a ModuleList is a list of modules"
    assert muon(model, blocks=[*model.model.layers, model.lm_head])["lm_head.weight"] == "lm_head"
    one = node(fc=linear(), out=linear(D, V))
    assert muon(one, blocks=[one.fc]) == {"fc.weight": "fc"}


def bare_block() -> nn.Module:
    attention = node(qkvo_w=bare(4, D, D), relative_bias=bare(D, D))
    return node(attn=attention, mlp=node(c_fc=bare(H, D), c_proj=bare(H, D)), pos=bare(5, 1, D), lambdas=bare(2))


NONE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "one layer": (lambda: nn.Linear(D, V), r"no layer is hidden \('weight': output layer; choose"),
    "tables that are no layer's": (
        lambda: node(embed=nn.Embedding(V, D), pos=bare(5, D), cls=bare(1, 1, D)), "no layer inside a block, or hidden",
    ),
    "a head of several layers that trains": (
        lambda: node(h=stack(lambda: node(a=linear())).requires_grad_(False), a=linear(), b=linear(), head=linear()),
        "the 2 that its rule gives it are frozen; AdamW trains 3$",
    ),
    "everything frozen": (
        lambda: node(h=stack(lambda: node(a=linear().requires_grad_(False)))), "the 2 that its rule gives it are frozen"
    ),
}  # fmt: skip


@pytest.mark.pitfall("P02", "P53", "P87")
@pytest.mark.parametrize("route", [route_parameters, route_to_blocks])
@pytest.mark.parametrize("name", NONE)
def test_a_model_that_trains_nothing_by_muon_is_adamw_s_with_reasons_and_a_remedy_that_works(
    name: str, route: Callable[..., list[Any]]
) -> None:
    make, why = NONE[name]
    found = route(make())
    assert not any(r.muon and r.param.requires_grad for r in found)
    told = notice(found)
    assert told is not None and re.search(f"^Muon trains no parameter: {why}", told), told
    with heard() as said:
        dmuon.param_groups(make())
    assert said == [told], "once"
    remedy = re.search(r"select=(lambda fqn, module, param: fqn == '[\w.]+')", told)
    if remedy is not None:
        taken = [r for r in route(make(), select=eval(remedy[1])) if r.muon]
        assert len(taken) == 1 and (taken[0].block is not None) == (route is route_to_blocks)


BARE_MODELS: dict[str, tuple[Callable[[], nn.Module], set[str], bool]] = {
    "blocks of bare matrices": (
        lambda: node(enter=linear(3), h=stack(bare_block), head=linear(D, V)),
        {f"h.{i}.{name}" for i in range(2) for name in ("attn.qkvo_w", "mlp.c_fc", "mlp.c_proj")}, True,
    ),
    "no blocks": (lambda: node(a=bare(D, D), b=bare(D, H), cls=bare(1, 1, D), head=linear(D, V)), {"a", "b"}, True),
    "some layers": (
        lambda: node(h=stack(lambda: node(
            q=linear(), up=bare(4 * D, D), A_log=bare(D, 5), A_b_log=bare(D, 5), mu=bare(169, 3)
        ))),
        {"h.0.up", "h.1.up"}, False,
    ),
}  # fmt: skip


@pytest.mark.pitfall("P87")
@pytest.mark.parametrize("route", [route_parameters, route_to_blocks])
@pytest.mark.parametrize("name", BARE_MODELS)
def test_bare_matrices_get_the_line_for_all_of_them(name: str, route: Callable[..., list[Any]]) -> None:
    make, expected, refused = BARE_MODELS[name]
    if refused:
        with pytest.raises(ValueError, match=r"no matrix was selected for Muon: what is hidden are .* bare") as caught:
            route(make())
        told = str(caught.value)
    else:
        told = str(notice(route(make())))
        assert re.search("^AdamW trains 2 bare parameters that may be matrices .* To give them to Muon: ", told)
    line = told.partition("select=")[2]
    found = route(make(), select=eval(line))
    assert {r.fqn for r in found if r.muon and not r.fqn.endswith(".weight")} == expected
    assert notice(found) is None or "are frozen" in str(notice(found))
    declined = route(make(), select=lambda fqn, _, __: False if fqn in expected else ...) if not refused else found
    assert not any(r.bare for r in declined), "what the user decided is told no more"


# -- models without stacks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [*CASES.values(), *CONVNETS.values()], ids=[*CASES, *CONVNETS])
def test_muon_takes_the_hidden_matrices_of_models_without_stacks_and_blocks_are_their_layers(case: Case) -> None:
    taken = [f"{name}.weight" for name in case.hidden]
    assert [r.fqn for r in route_parameters(case.make()) if r.muon] == taken
    found = {r.fqn: r.block for r in route_to_blocks(case.make()) if r.muon}
    assert list(found) == taken
    assert tuple(dict.fromkeys(found.values())) == (case.blocks or case.hidden)


def test_a_weight_that_layers_share_needs_a_model_that_is_called() -> None:
    model = tied_layers()
    parts = nn.ModuleDict(dict(model.named_children()))
    with pytest.raises(ValueError, match=r"'fc2.weight' is shared by blocks fc2, fc3; untie it, .*blocks=\[model\]"):
        route_to_blocks(parts)
    assert [r.fqn for r in route_parameters(parts) if r.muon] == ["fc2.weight"], "without blocks nothing is asked for"
    assert {r.block for r in route_to_blocks(Model(chain("body"), body=model)) if r.muon} == {"(model)"}


def test_blocks_may_be_the_whole_model_which_hides_nothing() -> None:
    for case in CASES.values():
        model = case.make()
        found = {r.fqn: r.block for r in route_to_blocks(model, blocks=[model]) if r.muon}
        assert found == {f"{name}.weight": "(model)" for name in case.hidden}


@pytest.mark.parametrize(
    ("holder", "block"),
    [
        (lambda: nn.ParameterList([nn.Parameter(torch.ones(3, 3))]), "part"),
        (lambda: nn.TransformerDecoderLayer(D, 2, H), "part.holder"),  # evaluation reads its children's weights
        (lambda: nn.MultiheadAttention(D, 2, kdim=3, vdim=4), "part.holder"),
        (lambda: checkpoint_wrapper(linear()), "part.holder"),  # recomputation happens inside of it
        (linear, "part.holder"),
    ],
)
def test_a_block_is_what_is_called_when_its_weights_are_used(holder: Callable[[], nn.Module], block: str) -> None:
    model = node(part=node(holder=holder()), head=linear())

    def inside(fqn: str, module: nn.Module, param: nn.Parameter) -> bool:
        return "holder" in fqn and param.ndim == 2

    found = [r for r in route_to_blocks(model, select=inside) if r.muon]
    assert found and {r.block for r in found} == {block}
    assert {r.block_module for r in found} == {model.get_submodule(block)}
