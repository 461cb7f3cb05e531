"""What the names of a mesh's dimensions say, and the grid that they make."""

from __future__ import annotations

import pytest
from torch.distributed.device_mesh import DeviceMesh

from dmuon.layout.rank_grid import RankGrid, grid_of_mesh

NAMES = {
    "tp": ("tp", "tensor", "tensor_parallel"),
    "fsdp": ("fsdp", "dp_shard", "shard", "dp_shard_cp"),
    "dp": ("replicate", "dp_replicate", "ddp", "dp", "data_parallel"),
    "cp": ("cp", "context"),
    "ep": ("ep", "expert"),
}


def mesh_of(ranks: list[list[int]], rank: int = 0) -> DeviceMesh:
    """As ``rank`` has it, without process groups."""
    return DeviceMesh("cpu", ranks, _init_backend=False, _rank=rank)


@pytest.mark.parametrize(("role", "name"), [(role, name) for role, names in NAMES.items() for name in names])
def test_names_of_mesh_dimensions_tell_their_roles(role: str, name: str) -> None:
    assert grid_of_mesh(mesh_of([[0, 1]]), ["pp", name], 0) == RankGrid((role,), (2,), (0, 1))
    assert grid_of_mesh(mesh_of([[0], [1]], 1), [name, "pp"], 1) == RankGrid((role,), (2,), (0, 1))


def test_stages_of_a_pipeline_are_grids_of_their_own() -> None:
    for rank, stage in enumerate([(0, 2), (1, 3), (0, 2), (1, 3)]):
        assert grid_of_mesh(mesh_of([[0, 1], [2, 3]], rank), ["tp", "pp"], rank) == RankGrid(("tp",), (2,), stage)
    assert grid_of_mesh(mesh_of([[0, 1]]), ["dp", "pipeline"], 0) == RankGrid((), (), (0,))


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
        grid_of_mesh(mesh_of([[0, 1]]), names, rank)


def test_a_mesh_may_have_two_dimensions_of_a_role() -> None:
    mesh = mesh_of([[0, 1], [2, 3]])
    assert grid_of_mesh(mesh, ["dp_replicate", "dp"], 0) == RankGrid(("dp", "dp"), (2, 2), (0, 1, 2, 3))


@pytest.mark.parametrize("rank", [5, 3, 8, 1, 9, 7])
def test_a_line_differs_in_the_named_dimensions_only(rank: int) -> None:
    grid = RankGrid(("fsdp", "dp"), (3, 2), (5, 3, 8, 1, 9, 7))
    row, column = divmod(grid.ranks.index(rank), 2)
    assert grid.line(rank, []) == (rank,)
    assert grid.line(rank, [0]) == grid.ranks[column::2]
    assert grid.line(rank, [1]) == grid.ranks[2 * row : 2 * row + 2]
    assert grid.line(rank, [0, 1]) == grid.ranks
