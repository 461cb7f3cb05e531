"""Values of a dedicated model's state dict go where torch takes DTensors, and into no file as if they were whole."""

from __future__ import annotations

import copy
import io
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.assertions import assert_same_tensors
from harness.checkpoints import FULL_ON_RANK_0, Run, load, start
from harness.dtensors import whole
from harness.fused import FusedModel, fused
from harness.heard import heard
from harness.network import full_state
from harness.on_ranks import on_ranks
from harness.toy import build
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)

REFUSED = r"in a state dict of a dedicated model cannot be written to one file as it is, since each rank has "


def saved(thing: Any) -> Any:
    return torch.load(pickled(thing))


@on_ranks(2, timeout=60.0)
def test_shards_are_written_by_nobody_and_the_remedy_writes_the_whole(rank: int, world: int) -> None:
    run = start("1d")
    expected = dict(build().state_dict())
    weights, moments = run.model.state_dict(), run.optimizer.state_dict()
    on_cpu = {name: value.cpu() for name, value in weights.items()}
    kept = {name: value.detach().clone() for name, value in weights.items()}
    half = {name: value.to(torch.bfloat16) for name, value in weights.items()}
    for thing in (weights, on_cpu, kept, half):
        copy.deepcopy(thing)
        owned = [value for name, value in thing.items() if name.endswith("up.weight")]
        assert owned
        for value in owned:
            with pytest.raises(RuntimeError, match=REFUSED):
                value.storage()
    copy.deepcopy(moments)

    whole = get_model_state_dict(run.model, options=FULL_ON_RANK_0)
    state = get_optimizer_state_dict(run.model, run.optimizer, options=FULL_ON_RANK_0)
    if rank == 0:
        assert_same_tensors(saved(whole), expected)
        assert saved(state)["state"].keys() == state["state"].keys() != set()


@on_ranks(2, timeout=60.0)
def test_each_rank_may_pickle_its_own_shards_which_no_other_loads(rank: int, world: int) -> None:
    run, other = start("1d"), start("1d", seed=rank + 3)
    run.train(range(2))
    with heard() as told:
        files = [pickled(part.state_dict()) for part in (run.model, run.optimizer)]
    assert any("every rank must write and load its own file" in text for text in told)
    of_first: list[Any] = [files[0].getvalue()]
    dist.broadcast_object_list(of_first, 0)
    with pytest.raises(RuntimeError, match="or the rows of another rank, which alone wrote them to a file"):
        other.model.load_state_dict(torch.load(io.BytesIO(of_first[0]), weights_only=False))
    for part, file in zip((other.model, other.optimizer), files, strict=True):
        part.load_state_dict(torch.load(file, weights_only=False))
    run.train(range(2, 4))
    other.train(range(2, 4))
    assert_same_tensors(full_state(other.model), full_state(run.model))


def pickled(thing: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return file


@on_ranks(2)
def test_writes_to_a_state_dict_of_the_model_are_refused_and_to_what_is_made_of_it_are_not(
    rank: int, world: int
) -> None:
    """As in average.state_dict()[name].copy_(value), by which torch's own would change the average."""
    model = start("1d-two-lines").model
    name, value = next((n, v) for n, v in model.state_dict().items() if n.endswith("up.weight"))
    writes: tuple[Callable[[], Any], ...] = (
        lambda: value.copy_(value.clone()),
        lambda: value.mul_(0.5),
        lambda: torch._foreach_mul_([value], 0.5),
    )
    for write in writes:
        with pytest.raises(RuntimeError, match=rf"'{name}' in state_dict\(\) of a dedicated model is a copy"):
            write()
    asks: tuple[Callable[[], Any], ...] = (
        lambda: value @ value.mT,
        lambda: value[:1],
        lambda: value + torch.ones(value.shape),
        lambda: value.view(-1),
    )
    for ask in asks if rank == 0 else ():  # what would need the other one raises here
        with pytest.raises(RuntimeError, match=rf"{name}.*full_tensor\(\) on every rank gives the whole"):
            ask()
    for kept in (value.clone(), copy.deepcopy(value), torch.load(pickled(value), weights_only=False)):
        assert kept.lerp_(value, 0.5) is kept
    with torch.no_grad():
        model.get_parameter(name).mul_(2.0)
    value.copy_(model.state_dict()[name])  # as torchtitan does with the one that it keeps
    torch.testing.assert_close(value.full_tensor(), model.state_dict()[name].full_tensor(), rtol=0.0, atol=0.0)


USES: dict[str, Callable[[Tensor], Tensor]] = {
    "detach": lambda value: value.detach(),
    "to bf16": lambda value: value.to(torch.bfloat16),
    "deepcopy": copy.deepcopy,
    "average": lambda value: torch.lerp(value * 0.5, value, 0.5),
    "in place": lambda value: value.clone().mul_(0.25).add_(value, alpha=0.5),
}


@pytest.mark.parametrize(("layout", "world"), [("shard-2", 2), pytest.param("tp", 4, marks=pytest.mark.slow)])
@on_ranks(timeout=120.0)
def test_what_users_make_of_a_state_dict_is_saved_as_it_is_of_one_process(
    rank: int, world: int, layout: str, tmp_path: Path
) -> None:
    """Of matrices, fused projections, kernels and stacks, each file is loaded by one process that knows no dmuon.

    One rank alone may make state dicts.
    """
    model, optimizer, _ = fused(layout)
    alone = FusedModel().state_dict()
    if rank == 0:
        assert get_model_state_dict(model).keys() == alone.keys()
        assert len(optimizer.state_dict()["state"]) == len(alone)
        copy.deepcopy(model.state_dict())
    dist.barrier()
    saved, expected = (
        {f"{name}, {key}": use(value) for name, use in USES.items() for key, value in state.items()}
        for state in (model.state_dict(), alone)
    )
    dcp.save(saved, checkpoint_id=tmp_path)
    found = {key: torch.zeros_like(value) for key, value in expected.items()}
    dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
    assert_same_tensors(found, expected)
    assert_same_tensors({key: whole(value) for key, value in saved.items()}, expected)


# -- files of earlier versions: even shards as dmuon once saved them, in tests/data/checkpoints ---------------------

OLD = Path(__file__).parent.parent / "data" / "checkpoints"


def old_value(name: str, shape: torch.Size) -> Tensor:
    """Whole numbers, each exact in any dtype, which tell one element from its neighbours."""
    return ((torch.arange(shape.numel()) * 7 + zlib.crc32(name.encode())) % 251 - 125).float().reshape(shape)


def flat(state: dict[str, Any]) -> dict[str, Tensor]:
    """Of the model, and of the optimizer by names."""
    found = dict(state["model"])
    for name, values in state["optimizer"]["state"].items():
        found |= {f"{name}.{key}": tensor for key, tensor in values.items() if key != "step"}
    return found


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old")
    for path in OLD.glob("*.tar.xz"):
        with tarfile.open(path) as archive:
            archive.extractall(folder / path.name.removesuffix(".tar.xz"), filter="data")
    return folder


@pytest.mark.parametrize(("layout", "world"), [("shard-2", 2), pytest.param("tp", 4, marks=pytest.mark.slow)])
@on_ranks()
def test_old_checkpoints_load_bit_for_bit_and_are_saved_by_the_same_keys(
    rank: int, world: int, layout: str, old: Path, tmp_path: Path
) -> None:
    """Of three topologies into others; what is saved then has the keys, shapes and values of what was loaded."""
    model, optimizer, _ = fused(layout)
    for name in ("shard", "hsdp", "tp"):
        load(Run(model, optimizer, lambda part: part), str(old / name))
        weights, state = get_state_dict(model, optimizer)
        again = {"model": weights, "optimizer": state}
        found = flat(again)
        expected = {key: old_value(key, tensor.shape) for key, tensor in found.items()}
        assert_same_tensors({key: whole(tensor) for key, tensor in found.items()}, expected)
        dcp.save(again, checkpoint_id=tmp_path / f"again-{name}")
        before, after = (
            dcp.FileSystemReader(path).read_metadata().state_dict_metadata
            for path in (old / name, tmp_path / f"again-{name}")
        )
        assert before.keys() == after.keys()
        for key, of_key in before.items():
            assert getattr(of_key, "size", None) == getattr(after[key], "size", None), key
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()


@pytest.mark.parametrize("name", ["shard", "hsdp", "tp"])
def test_old_checkpoints_load_in_one_process(old: Path, name: str) -> None:
    model = FusedModel()
    saved = {"model": dict(model.state_dict())}
    dcp.load(saved, checkpoint_id=old / name)
    assert_same_tensors(saved["model"], {key: old_value(key, tensor.shape) for key, tensor in saved["model"].items()})
