"""Matrices that each rank orthogonalizes, or all ranks together: the same as with owners, and as in one process."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise, product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
from harness.assertions import about, assert_equal_weights
from harness.dtensors import local_tensor, whole
from harness.hand_laid import SPLITS, Weights
from harness.network import full_state, is_matrix
from harness.on_ranks import assert_same_over_ranks, on_ranks, slowly
from harness.oracle import reference_weights
from harness.topologies import lay
from harness.toy import OPTIONS, build
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import dmuon
from dmuon import create_dtensor_config
from dmuon.exchanged import layouts
from dmuon.planning import strategies
from dmuon.solver import CostTable

WAYS = ("replicated", "sharded", "full_replication")
SHAPES = [(12, 8), (7, 13), (2, 11), (9, 1), (4, 6, 5)]


def laid_by_hand(world: int) -> Weights:
    """Every shape cut along each dimension, and whole on all ranks; and tensors that are several matrices."""
    weights, mesh = Weights(), init_device_mesh("cpu", (world,))
    for shape in SHAPES:
        for placement in (*map(Shard, range(len(shape))), Replicate()):
            weights.shard(len(weights.params), shape, mesh, [placement])
    for split in (SPLITS[0], SPLITS[6], SPLITS[9], SPLITS[11]):
        weights.shard(len(weights.params), split.shape, mesh, [Shard(0)], split=split)
    return weights


def optimizer_of(weights: Weights, prefetch: int = 1, **options: Any) -> dmuon.Muon:
    return weights.optimizer(create_dtensor_config(costs="flops", prefetch_count=prefetch, chunk_bytes=1000), **options)


# -- what is computed -----------------------------------------------------------------------------------------------


@pytest.mark.pitfall("P19", "P48")
@pytest.mark.parametrize(
    ("world", "prefetch", "strategy"),
    [*((3, 2, way) for way in WAYS), (2, 0, "sharded"), *slowly((4, 1, "sharded"))],
)
@on_ranks()
def test_the_update_is_that_of_one_process(rank: int, world: int, prefetch: int, strategy: str) -> None:
    """Of three steps, in the second of which some matrices have no gradient, on any rank or on one."""
    weights = laid_by_hand(world)
    optimizer = optimizer_of(weights, prefetch, strategy=strategy)
    weights.train(optimizer, 1)
    grads = weights.give()
    for i in range(0, len(grads), 3):
        weights.params[i].grad = grads[i] = None
    lacking = weights.params[1]  # (12, 8) by Shard(1)
    if rank == world - 1:
        lacking.grad = None
    assert grads[1] is not None
    grads[1].chunk(world, 1)[world - 1].zero_()
    weights.step(optimizer, grads)
    weights.train(optimizer, 1)
    weights.check(optimizer)


QUICK_CASES = [
    *(("fsdp2-2", way) for way in WAYS),
    ("tp-alone", "sharded"),
    ("fsdp2-3", "sharded:2"),
]
SLOW_CASES = [
    *zip(("fsdp2-tp", "fsdp2-hsdp", "replicate-fsdp", "cp-groups"), (*WAYS, "sharded"), strict=True),
    ("ddp", "full_replication"),
    ("fsdp2-hsdp", "sharded:3"),
]


@pytest.mark.parametrize(("name", "strategy"), [*QUICK_CASES, *slowly(*SLOW_CASES)])
@on_ranks("name")
def test_a_model_on_a_layout_trains_as_in_one_process(rank: int, world: int, name: str, strategy: str) -> None:
    laid = lay(name, build())
    optimizer = laid.optimizer(strategy=strategy)
    laid.train(optimizer, range(3))
    weights = full_state(laid.network)
    assert_equal_weights(weights, reference_weights(3, matrix=is_matrix))
    assert_same_over_ranks(weights)
    assert {one.strategy for one in optimizer.exchanged()} == {strategy}
    assert {one.owner for one in optimizer.exchanged()} == {None}


# -- teams: some of the ranks together ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "dims", "sizes", "prefetch"),
    [(3, (3,), (2, 8), 1), *slowly((4, (2, 2), (2, 3), 0))],
)
@on_ranks()
def test_teams_of_some_ranks_are_as_one_process(
    rank: int, world: int, dims: tuple[int, ...], sizes: tuple[int, ...], prefetch: int
) -> None:
    """Beside owners, replicas and matrices of all ranks; a state dict of these loads where all have owners."""
    ways = (*(f"sharded:{size}" for size in sizes), "owner", "sharded", "replicated")
    weights, mesh = Weights(), init_device_mesh("cpu", dims)
    for i, shape in enumerate([*SHAPES[:4], (1, 5), (1, 1), (64, 8)] * 2):
        cut = (Shard(i % 2), Replicate(), Shard(0))[i % 3]
        weights.shard(i, shape, mesh, [Replicate(), cut][-len(dims) :])
    groups = [{"params": [*weights.params[i::5]], "use_muon": True, "strategy": way} for i, way in enumerate(ways)]
    config = create_dtensor_config(costs="flops", prefetch_count=prefetch, chunk_bytes=1000)
    optimizer = weights.optimizer(config, groups)
    found = Counter(one.strategy for one in optimizer.exchanged())
    expected = {way if size < world else "sharded" for way, size in zip(ways, sizes, strict=False)}
    assert found.keys() == expected | {*ways[2:]}
    weights.train(optimizer, 1)
    grads = weights.give()
    for i in range(0, len(grads), 3):
        weights.params[i].grad = grads[i] = None
    weights.step(optimizer, grads)
    weights.train(optimizer, 1)
    weights.check(optimizer)
    for text in ("\n".join(optimizer.exchange_report()), dmuon.explain(nn.ParameterList(weights.params), optimizer)):
        assert "sharded:2, predicted" in text and "ms on ranks 0 1 each" in text
    after = weights.optimizer(config, [{**group, "strategy": "owner"} for group in groups])
    after.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    weights.train(after, 1)
    weights.check(after)


@pytest.mark.parametrize(
    ("strategy", "options", "limit"),
    [
        ("full_replication", {"ns_dtype": torch.bfloat16}, 0.05),
        ("sharded", {"ns_dtype": torch.float16}, 0.03),
    ],
)
@on_ranks(2)
def test_other_dtypes_come_to_what_they_do_with_owners(
    rank: int, world: int, strategy: str, options: dict[str, Any], limit: float
) -> None:
    changes = []
    for of_test in ("owner", strategy):
        weights = laid_by_hand(world)
        before = [whole(param) for param in weights.params]
        weights.options |= options
        weights.train(optimizer_of(weights, strategy=of_test), 2)
        changes.append([whole(param) - old for param, old in zip(weights.params, before, strict=True)])
    for by_owner, found in zip(*changes, strict=True):
        assert (found - by_owner).norm() <= limit * by_owner.norm()


@on_ranks(4)
def test_ranks_take_part_that_hold_other_matrices_of_a_stack(rank: int, world: int) -> None:
    """As where those of some ranks do not follow each other in it, so that these do not exchange them by themselves."""
    mesh = init_device_mesh("cpu", (2, 2))
    for strategy in WAYS:
        weights = Weights()
        for dim in (1, 2):
            weights.shard(dim, (4, 6, 5), mesh, [Shard(0), Shard(dim)])
        with mock.patch.object(layouts, "part_among_holders", lambda placed, _: placed), about(strategy):
            optimizer = optimizer_of(weights, strategy=strategy)
            weights.train(optimizer, 2)
            weights.check(optimizer)


@pytest.mark.pitfall("P35")
@on_ranks(2)
def test_the_scale_of_gradients_does_not_matter(rank: int, world: int) -> None:
    for strategy, scale in product(("owner", *WAYS), (1e-30, 1e30)):
        weights = Weights(decay=0.0)
        for i, placement in enumerate((Shard(0), Shard(1), Replicate())):
            weights.shard(i, (6, 9), init_device_mesh("cpu", (world,)), [placement], scale=0.0)
        optimizer = optimizer_of(weights, strategy=strategy)
        weights.step(optimizer, weights.give(scale))
        weights.check()


# -- which matrices, and what goes with it --------------------------------------------------------------------------


@on_ranks(2)
def test_a_state_dict_of_one_strategy_loads_under_another(rank: int, world: int) -> None:
    """One after the other; momentum is that of all steps."""
    weights = laid_by_hand(world)
    optimizer = optimizer_of(weights, strategy="owner")
    for before, after in pairwise(("owner", "sharded", "full_replication", "replicated", "owner")):
        weights.train(optimizer, 1)
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][0]["strategy"] = before  # as that of a group would be saved
        groups = [{"params": list(weights.params), "use_muon": True, "strategy": after}]
        optimizer = weights.optimizer(create_dtensor_config(costs="flops"), groups)
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["strategy"] == after
        weights.train(optimizer, 1)
        with about(f"{before} to {after}"):
            weights.check(optimizer)


@on_ranks(2)
def test_ranks_that_keep_momentum_whole_follow_what_others_change(rank: int, world: int) -> None:
    """It is loaded, scaled by all ranks, replaced, cleared, and changed by one rank that has a part of it."""
    states: dict[str, list[Tensor]] = {}
    for strategy in ("owner", "full_replication"):
        weights = laid_by_hand(world)
        optimizer = optimizer_of(weights, 1, strategy=strategy)
        for change in range(6):
            weights.give()
            optimizer.step()
            state = [optimizer.state[param] for param in weights.params]
            if change == 0:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            elif change == 1:
                for one in state:
                    one["momentum_buffer"].mul_(0.25)
            elif change == 2:
                for one in state:
                    one["momentum_buffer"] = one["momentum_buffer"] * 3
            elif change == 3:
                for one in state[::2]:
                    del one["momentum_buffer"]
            elif change == 4 and rank == 0:  # not of a copy, which are not alike then
                for one in (one["momentum_buffer"] for one in state):
                    if one.placements != (Replicate(),):
                        local_tensor(one).neg_()
        momenta = [optimizer.state[param]["momentum_buffer"] for param in weights.params]
        states[strategy] = [whole(value).float() for value in (*momenta, *weights.params)]
    for by_owner, kept in zip(*states.values(), strict=True):
        assert (kept - by_owner).norm() <= 1e-5 * by_owner.norm()


# -- what dedicate_params leaves to all ranks --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1d", *slowly("hsdp", "tp-fsdp")])
@on_ranks("name")
def test_a_dedicated_model_leaves_matrices_to_all_ranks(rank: int, world: int, name: str) -> None:
    laid = lay(name, build(), strategy={"*.up.*": "sharded", "blocks.1.down.weight": "sharded"})
    optimizer = laid.optimizer()
    laid.train(optimizer, range(3))
    assert optimizer.last_step.ns_matrices
    shared = {one.name: one.strategy for one in optimizer.exchanged()}
    expected = {f"blocks.{i}.up.weight" for i in range(3)} | {"blocks.1.down.weight"}
    assert shared == dict.fromkeys(expected, "sharded")
    weights = full_state(laid.network)
    assert_equal_weights(weights, reference_weights(3, matrix=is_matrix))
    assert_same_over_ranks(weights)
    for text in (dmuon.explain(laid.model), dmuon.explain(laid.model, optimizer)):
        assert text.count("left to fully_shard") == 4
    with pytest.raises(ValueError, match="which dedicate_params has left to 'sharded': leave it out here"):
        laid.optimizer(strategy={"*.up.*": "replicated"})


@pytest.mark.parametrize(
    ("strategy", "error", "message"),
    [
        ("replicated", ValueError, "strategy='replicated' of dedicate_params: a matrix has an owner"),
        (None, TypeError, "strategy must be a name, or a mapping of patterns"),
    ],
)
@on_ranks(2)
def test_dedication_knows_strategies_of_several_ranks(
    rank: int, world: int, strategy: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        lay("1d", build(), strategy=strategy)
    if isinstance(strategy, str):
        with pytest.raises(ValueError, match="rank 1"):
            lay("1d", build(), strategy={f"blocks.{rank}.*": "sharded"})
        for patterns in ({"*.upp.*": "sharded"}, {"*.up.*": "sharded", "block.0.*": "sharded"}):
            with pytest.raises(ValueError, match=r"strategy: the pattern .*, such as 'blocks\.\d\."):
                lay("1d", build(), strategy=patterns)
        with pytest.raises(ValueError, match=r"'blocks\.0\.up\.weight', which is several .*: use 'sharded'"):
            lay("1d", build(), strategy="sharded:2", select=halves)
        with pytest.raises(ValueError, match="strategy='auto' chooses that anew; leave plan= out"):
            lay("1d", build(), strategy="auto", plan="plan.json", costs=None)


def halves(fqn: str, _module: nn.Module, _param: nn.Parameter) -> bool | dmuon.MatrixSpec:
    return dmuon.MatrixSpec((14, 15)) if fqn.endswith("up.weight") else is_matrix(fqn)


def is_mixed_or_up(name: str) -> bool:
    return is_matrix(name) and "down" not in name


SECOND = 10**9
# Of the 13 x 13 and 13 x 29 matrices of one block but the last: what Newton-Schulz takes, and who has them then.
COSTS = {
    "sharded": (1, SECOND, {"blocks.0.up.weight": "sharded"}),  # one huge matrix among small ones
    "replicated": (1, 1, dict.fromkeys(("blocks.0.mix.weight", "blocks.0.up.weight"), "replicated")),  # latency is all
}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *(("1d", way) for way in ("sharded", "replicated")),
        ("tp", "sharded"),
        *slowly(("1d-two-lines", "sharded"), ("hsdp", "replicated"), ("ddp-2", "sharded")),
    ],
)
@on_ranks("name")
def test_dedication_leaves_to_others_what_takes_less_time_so(rank: int, world: int, name: str, way: str) -> None:
    square, wide, expected = COSTS[way]
    table = CostTable({(13, 13): {1: square}, (13, 29): {1: wide}})
    laid = lay(name, build(layers=1), strategy="auto", costs=table, exclude=["*.down.*"])
    optimizer = laid.optimizer()
    laid.train(optimizer, range(3))
    expected = {} if name == "tp" else expected  # which cuts matrices
    assert {one.name: one.strategy for one in optimizer.exchanged()} == expected
    weights = full_state(laid.network)
    assert_equal_weights(weights, reference_weights(3, matrix=is_mixed_or_up, layers=1))
    assert_same_over_ranks(weights)
    text = dmuon.explain(laid.model, optimizer)
    assert text.count(f"strategy={way!r}, chosen since all matrices are predicted to take") == len(expected)


# -- when FSDP2 unshards -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "prefetched", "options"),
    [
        ("fsdp2-2", False, {}),
        ("fsdp2-2", True, {"second_moment": "element", "weight_decay_mode": "hyperball", "ns_dtype": torch.float16}),
        *slowly(("fsdp2-hsdp", True, {"second_moment": "row"}), ("fsdp2-tp", False, {})),
    ],
)
@on_ranks("name")
def test_updates_wait_until_fsdp_unshards(
    rank: int, world: int, name: str, prefetched: bool, options: dict[str, Any]
) -> None:
    """Weights change no sooner than a block is unsharded, and state dicts hold what they change to."""
    laid, other = lay(name, build()), lay(name, build())
    if prefetched:
        for block, coming in pairwise(laid.network.blocks):
            block.set_modules_to_forward_prefetch([coming])
    optimizer, by_owners = laid.optimizer(strategy="fused", **options), other.optimizer(**options)
    assert {one.strategy for one in optimizer.exchanged()} == {"fused"}
    muon = optimizer.param_groups[0]["params"]
    for step in range(5):
        for one, of_one in ((laid, optimizer), (other, by_owners)):
            of_one.zero_grad()
            one.backward(step)
        before = [local_tensor(param).clone() for param in muon]
        by_owners.step()
        optimizer.step()
        assert all(map(torch.equal, before, map(local_tensor, muon)))
        if step == 1:
            with torch.inference_mode():
                laid.loss(step)
        elif step == 2:
            optimizer.state_dict()
        elif step == 3:
            laid.network.blocks[1].unshard()
            laid.network.blocks[1].reshard()
            changed = [not torch.equal(*pair) for pair in zip(before, map(local_tensor, muon), strict=True)]
            assert any(changed)
    weights, state = full_state(laid.network), copy.deepcopy(get_model_state_dict(laid.network))  # flushed by that
    assert_equal_weights(weights, full_state(other.network))
    assert options or not assert_equal_weights(weights, reference_weights(5, matrix=is_matrix))
    assert_same_over_ranks(weights)
    for one, of_one in ((laid, optimizer), (other, by_owners)):
        one.backward(5)
        of_one.step()
    assert {one.ns_matrices for one in (optimizer.last_step,)} == {0}
    optimizer.flush()
    assert optimizer.last_step.ns_matrices == by_owners.last_step.ns_matrices
    assert_equal_weights(full_state(laid.network), full_state(other.network))
    optimizer.step()
    set_model_state_dict(laid.network, copy.deepcopy(state))  # which comes after the step
    optimizer.flush()
    assert_equal_weights(full_state(laid.network), weights)
    for _ in range(2):  # a state dict holds the last update also of an optimizer that is gone
        by_owners.step()
    set_model_state_dict(other.network, copy.deepcopy(state))
    by_owners.load_state_dict(optimizer.state_dict())
    optimizer.step()
    by_owners.step()
    del optimizer
    assert_equal_weights(full_state(laid.network), full_state(other.network))


@on_ranks(2)
def test_updates_of_several_optimizers_wait_for_one_block(rank: int, world: int) -> None:
    """Also of one whose updates have been applied, while the other's still wait."""
    losses = []
    for strategy in ("owner", "fused"):
        laid = lay("fsdp2-2", build())
        muon = dmuon.param_groups(laid.model)[0]["params"]
        groups = [[{"params": muon[i::2], "use_muon": True}] for i in range(2)]
        halves = [dmuon.Muon(group, lr=0.1, strategy=strategy) for group in groups]
        for step, stepped in enumerate((halves, halves[::-1], halves[:1], halves)):
            laid.model.zero_grad()
            laid.backward(step)
            for optimizer in stepped:
                optimizer.step()
            if step == 1:
                halves[0].flush()
            with torch.no_grad():
                losses.append(laid.loss(step))
            laid.network.reshard()
    for by_owners, found in zip(losses[:4], losses[4:], strict=True):
        torch.testing.assert_close(found, by_owners, rtol=1e-6, atol=0.0)


@on_ranks(2)
def test_weights_that_change_while_their_update_waits_are_told(rank: int, world: int) -> None:
    """Such as by a mask, or a clip, behind the step: what waits is of the weights as they were."""
    laid = lay("fsdp2-2", build())
    optimizer = laid.optimizer(strategy="fused")
    weight = laid.network.blocks[1].up.weight
    for changes in (False, True):
        laid.backward(0)
        optimizer.step()
        if not changes:
            optimizer.flush()
        with torch.no_grad():
            weight.mul_(0.5)
    for read in (lambda: laid.loss(1), optimizer.flush, laid.network.state_dict):
        with pytest.raises(RuntimeError, match=r"'blocks\.1\.up\.weight' was changed .*optimizer\.flush\(\) before"):
            read()


@on_ranks(2)
def test_what_fsdp_does_not_unshard_cannot_wait(rank: int, world: int) -> None:
    for laid in (lay("ddp", build()), lay("tp-alone", build())):
        with pytest.raises(ValueError, match=r"strategy='fused' for '.*blocks.*', which no fully_shard unshards"):
            laid.optimizer(strategy="fused")


@on_ranks(2)
def test_patterns_and_groups_say_which_matrices(rank: int, world: int) -> None:
    """The first pattern that fits counts, the rest have owners; and what is recorded is the same."""
    records = []
    for given in ("owner", {"*.up.*": "sharded", "blocks.0.*": "replicated"}):
        laid = lay("fsdp2-2", build())
        groups = dmuon.param_groups(laid.model)
        if given == "owner":
            optimizer = laid.optimizer(strategy=given)
        else:
            names = {id(p): n for n, p in laid.model.named_parameters()}
            groups = [{**g, "param_names": [names[id(p)] for p in g["params"]]} for g in groups]
            groups[0]["strategy"] = given
            optimizer = dmuon.Muon(groups, distributed_config=laid.config, **OPTIONS)
            found = {one.name: one.strategy for one in optimizer.exchanged()}
            for name, strategy in found.items():
                expected = "sharded" if ".up." in name else "replicated" if "blocks.0." in name else "owner"
                assert strategy == expected, name
            assert len(set(found.values())) == 3
        laid.backward(0)
        record = optimizer.record_next_step()
        optimizer.step()
        records.append(record.gather())
    assert records[0].keys() == records[1].keys()
    for name, one in records[0].items():
        assert records[1][name].update_rms == pytest.approx(one.update_rms, rel=1e-4), name
    text = dmuon.explain(laid.model, optimizer)
    assert "sharded" in text and "replicated" in text


# -- chosen by prediction -------------------------------------------------------------------------------------------

WIDE = [(64, 512), *[(8, 8)] * 6]
EVEN = [(64, 512)] * 4


def costs_of(wide: int, small: int) -> CostTable:
    return CostTable({(64, 512): {1: wide}, (8, 8): {1: small}})


@contextmanager
def links(latency_ns: int) -> Iterator[None]:
    """Of 32 GB/s."""
    with (
        mock.patch.object(strategies, "link_ns_per_byte", lambda _: 2.0**-5),
        mock.patch.object(strategies, "link_latency_ns", lambda _: float(latency_ns)),
    ):
        yield


@pytest.mark.parametrize(
    ("world", "shapes", "wide", "small", "latency", "expected"),
    [
        (2, WIDE, 10**8, 10**5, 10**4, {"sharded": 1, "owner": 6}),  # one matrix outweighs all others
        (2, WIDE, 10**8, 10**5, 25 * 10**6, {"owner": 7}),  # its two sums and two exchanges take as long as it does
        (2, WIDE, 10**8, 10**5, 10**9, {"replicated": 7}),  # and here nothing else matters
        (2, EVEN, 10**8, 10**5, 10**4, {"owner": 4}),  # owners have as many
        # As many ranks as are free.
        (4, EVEN[:2], 10**8, 10**5, 10**4, {"sharded:2": 2}),  # rather than one after the other on all ranks
        (4, WIDE[:3], 10**8, 6 * 10**7, 10**4, {"sharded:2": 1, "owner": 2}),  # whose owners work meanwhile
        (4, EVEN, 10**8, 10**5, 10**4, {"owner": 4}),
    ],
)
@on_ranks()
def test_auto_gives_a_matrix_what_is_predicted_to_be_shorter(
    rank: int, world: int, shapes: Any, wide: int, small: int, latency: int, expected: dict[str, int]
) -> None:
    mesh = init_device_mesh("cpu", (world,))
    weights = Weights()
    for i, shape in enumerate(shapes):
        weights.shard(i, shape, mesh, [Shard(0)])
    with links(latency):
        optimizer = weights.optimizer(create_dtensor_config(costs=costs_of(wide, small)), strategy="auto")
    assert Counter(one.strategy for one in optimizer.exchanged()) == expected
    report = "\n".join(optimizer.exchange_report())
    if world == 2:
        assert report.count("strategy of") == sum(expected.values()) - expected.get("owner", 0)
        chosen = min(expected, key=lambda way: (way == "owner", way))
        assert f"predicted of all matrices, and chosen: {chosen} " in report
        assert re.search("next best: (owner|sharded|replicated) [0-9.]+ ms", report)
        assert "next best:" in dmuon.explain(nn.ParameterList(weights.params), optimizer)
    weights.train(optimizer, 2)
    weights.check(optimizer)


@on_ranks(2)
def test_auto_on_a_model_with_stacks_is_as_one_process(rank: int, world: int) -> None:
    """By estimated costs of a GPU, beside whose latency these matrices take no time."""
    weights = laid_by_hand(world)
    optimizer = optimizer_of(weights, strategy="auto")
    found = Counter(one.strategy for one in optimizer.exchanged())
    assert found["replicated"] > found["owner"] > 0, "matrices of stacks that one rank has stay with it"
    weights.train(optimizer, 2)
    weights.check(optimizer)


# -- refusals -------------------------------------------------------------------------------------------------------


@on_ranks(2, expect=ValueError, match=r"(?s)(?=.*parameter).*strategy='sharded'")
def test_ranks_that_differ_hear_of_the_parameter(rank: int, world: int) -> None:
    optimizer_of(laid_by_hand(world), strategy="sharded" if rank else "owner")


@on_ranks(2)
def test_what_has_owners_by_other_means_is_refused_by_name(rank: int, world: int) -> None:
    weights = laid_by_hand(world)
    config = create_dtensor_config(costs="flops")
    own = dmuon.DistributedConfig(lambda *a: config.assign_fn(*a), config.gather_fn, config.redistribute_fn, {})
    with pytest.raises(ValueError, match="functions of the user's own"):
        weights.optimizer(own, strategy="replicated")
    with pytest.raises(ValueError, match="momentum_device of group 0: strategy='full_replication' keeps"):
        optimizer_of(weights, strategy="full_replication", momentum_device="cpu")
    laid = lay("1d", build())
    with pytest.raises(ValueError, match="which dedicate_params gave an owner") as refused:
        laid.optimizer(strategy="sharded")
    assert "blocks." in str(refused.value)
    optimizer = laid.optimizer(strategy={"embed.*": "sharded"})
    optimizer.param_groups[0]["strategy"] = "replicated"
    laid.backward(0)
    with pytest.raises(ValueError, match="which dedicate_params gave an owner"):
        optimizer.step()


@on_ranks(2)
def test_an_edited_strategy_is_refused_before_anything_has_changed(rank: int, world: int) -> None:
    weights = laid_by_hand(world)
    optimizer = optimizer_of(weights)
    weights.give()
    before: list[Tensor] = [local_tensor(param).clone() for param in weights.params]
    optimizer.param_groups[0]["strategy"] = "sharded"
    with pytest.raises(ValueError, match="the strategy of a group was edited"):
        optimizer.step()
    assert all(map(torch.equal, before, map(local_tensor, weights.params)))
