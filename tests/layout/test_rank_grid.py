"""What the names of a mesh's dimensions say, and the grid and the topology that they make."""

from __future__ import annotations

import pytest
import torch
from harness.pieces import mesh_on

from dmuon.layout.parameters import place
from dmuon.layout.topology import RankGrid, grid_of_mesh, mesh_dim, topology_of

NAMES = {
    "tp": ("tp", "tensor", "tensor_parallel"),
    "fsdp": ("fsdp", "dp_shard", "shard", "dp_shard_cp"),
    "dp": ("replicate", "dp_replicate", "ddp", "dp", "data_parallel"),
    "cp": ("cp", "context"),
    "ep": ("ep", "expert"),
}


@pytest.mark.parametrize(("role", "name"), [(role, name) for role, names in NAMES.items() for name in names])
def test_names_of_mesh_dimensions_tell_their_roles(role: str, name: str) -> None:
    assert grid_of_mesh(mesh_on(0, [[0, 1]]), ["pp", name], 0) == RankGrid((role,), (2,), (0, 1))
    assert grid_of_mesh(mesh_on(1, [[0], [1]]), [name, "pp"], 1) == RankGrid((role,), (2,), (0, 1))


def test_stages_of_a_pipeline_are_grids_of_their_own() -> None:
    for rank, stage in enumerate([(0, 2), (1, 3), (0, 2), (1, 3)]):
        assert grid_of_mesh(mesh_on(rank, [[0, 1], [2, 3]]), ["tp", "pp"], rank) == RankGrid(("tp",), (2,), stage)
    assert grid_of_mesh(mesh_on(0, [[0, 1]]), ["dp", "pipeline"], 0) == RankGrid((), (), (0,))


@pytest.mark.parametrize(
    ("names", "rank", "message"),
    [
        (["dp", "mystery"], 0, "'mystery' has no known role.*'shard'"),
        (["dp"], 0, r"2 dimensions and names \('dp',\)"),
        (["dp", "tp"], 7, r"mesh holds ranks \[\[0, 1\]\], without this rank, 7"),
    ],
)
def test_what_makes_no_grid_is_refused(names: list[str], rank: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grid_of_mesh(mesh_on(0, [[0, 1]]), names, rank)


def test_a_mesh_may_have_two_dimensions_of_a_role() -> None:
    mesh = mesh_on(0, [[0, 1], [2, 3]])
    assert grid_of_mesh(mesh, ["dp_replicate", "dp"], 0) == RankGrid(("dp", "dp"), (2, 2), (0, 1, 2, 3))


@pytest.mark.parametrize("rank", [5, 3, 8, 1, 9, 7])
def test_a_line_differs_in_the_named_dimensions_only(rank: int) -> None:
    grid = RankGrid(("fsdp", "dp"), (3, 2), (5, 3, 8, 1, 9, 7))
    row, column = divmod(grid.ranks.index(rank), 2)
    assert grid.line(rank, []) == (rank,)
    assert grid.line(rank, [0]) == grid.ranks[column::2]
    assert grid.line(rank, [1]) == grid.ranks[2 * row : 2 * row + 2]
    assert grid.line(rank, [0, 1]) == grid.ranks


# By name of a dimension over two ranks: what weights are that dedicate_params lays out, and what plain tensors are.
COPIES, SHARDS, REFUSED = "copies", "shards", "refused"
READINGS = {
    "replicate": (COPIES, COPIES), "dp_replicate": (COPIES, COPIES), "cp": (COPIES, COPIES),
    "context_parallel": (COPIES, COPIES), "shard": (SHARDS, SHARDS), "dp_shard": (SHARDS, SHARDS),
    "dp_shard_cp": (SHARDS, SHARDS), "fsdp": (SHARDS, SHARDS), "hsdp": (SHARDS, SHARDS), "dp": (SHARDS, COPIES),
    "ddp": (SHARDS, COPIES), "dp_cp": (SHARDS, COPIES), "data_parallel": (SHARDS, COPIES), "tp": (REFUSED, SHARDS),
    "tensor_parallel": (REFUSED, SHARDS), "EP": (REFUSED, None), "pipeline": (REFUSED, None), "rows": (SHARDS, REFUSED),
    "expert_dp": (SHARDS, None), "step": (SHARDS, None), "wrapped": (SHARDS, None), "output": (SHARDS, SHARDS),
}  # fmt: skip


@pytest.mark.parametrize("name", READINGS)
def test_one_table_says_what_dedicated_and_plain_weights_are_along_a_dimension(name: str) -> None:
    """They differ only where a name says neither copies nor shards: there who lays the weights out decides."""
    mesh = mesh_on(0, [0, 1], [name])
    dedicated, plain = READINGS[name]
    if dedicated == REFUSED:
        with pytest.raises(ValueError, match=f"{name!r} is one of .* parallelism"):
            topology_of(mesh)
    else:
        topology = topology_of(mesh)
        assert (topology.replicas, topology.shards) == ((2, 1) if dedicated == COPIES else (1, 2))
    if plain == REFUSED:
        with pytest.raises(ValueError, match="has no known role"):
            grid_of_mesh(mesh, [name], 0)
        return
    grid, weight = grid_of_mesh(mesh, [name], 0), torch.ones(2, 2)
    if plain == SHARDS:
        with pytest.raises(ValueError, match="shards it along a dimension that nothing says"):
            place([weight], ["w"], grid, 0, None, lambda _: [])
        return
    (placed,) = place([weight], ["w"], grid, 0, None, lambda _: [])
    assert (placed is not None and placed.layout.replicas == (0, 1)) == (plain == COPIES)
    dim = mesh_dim(name)
    assert dim is not None and (dedicated == plain or dim.weights in ("as laid out", "parts") or name == "dp_cp")
