"""The grid that real process groups make, and groups that make none."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from harness.on_ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh

from dmuon.comm.process_groups import grid_of_groups
from dmuon.layout.topology import RankGrid, grid_of_mesh

GRIDS = [
    ({"fsdp": 2, "tp": 2}, ("tp", "fsdp"), [(0, 2, 1, 3)] * 4),
    ({"dp": 2, "fsdp": 2}, ("fsdp", "dp"), [(0, 2, 1, 3)] * 4),
    ({"ep": 2, "fsdp": 2}, ("ep", "fsdp"), [(0, 1, 2, 3)] * 4),
    ({"fsdp": 4, "tp": 1}, ("fsdp",), [(0, 1, 2, 3)] * 4),
    ({"pp": 2, "fsdp": 2}, ("fsdp",), [(0, 1), (0, 1), (2, 3), (2, 3)]),
    ({"tp": 2, "pp": 2}, ("tp",), [(0, 2), (1, 3), (0, 2), (1, 3)]),
]


def grid_of(rank: int, sizes: dict[str, int]) -> RankGrid:
    """From the groups along each dimension of a mesh, which must say what the mesh says."""
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    grid = grid_of_groups({"cp": None, **{name: mesh.get_group(name) for name in sizes}})
    assert grid == grid_of_mesh(mesh, list(sizes), rank)
    return grid


@on_ranks(4)
def test_groups_and_meshes_make_one_grid(rank: int, world: int) -> None:
    for sizes, roles, order in GRIDS:
        assert grid_of(rank, sizes) == RankGrid(roles, tuple(sizes[role] for role in roles), order[rank]), sizes


@on_ranks(1)
def test_one_rank_makes_a_grid_without_dimensions(rank: int, world: int) -> None:
    assert grid_of(rank, {"tp": 1}) == RankGrid((), (), (0,))


NO_GRIDS = [
    (
        {"fsdp": [[0, 1, 2, 3]], "dp": [[0, 1], [2, 3]]},
        r"fsdp_pg holds ranks \[0, 1, 2, 3\] and dp_pg ranks \[0, 1\] on rank 0: both hold \[0, 1\]",
    ),
    (
        {"fsdp": [[0, 1], [2, 3]], "tp": [[0, 1], [2, 3]]},
        r"tp_pg holds ranks \[[02], [13]\] and fsdp_pg ranks \[[02], ",
    ),
    (  # any two groups of a rank share that rank only, but three of them span four ranks
        {"tp": [[0, 1], [2, 3]], "fsdp": [[0, 2], [1, 3]], "dp": [[0, 3], [1, 2]]},
        r"tp_pg with ranks .* are not lines of one grid: 4 ranks \[0, 1, 2, 3\] where extents \(2, 2, 2\) make 8",
    ),
    (  # ranks 1 and 3 have one group, which alone is a grid
        {"tp": [[0, 1], [2, 3]], "fsdp": [[0, 2], [1], [3]]},
        r"tp_pg with ranks .* are not lines of one grid.*any two groups of a rank must share that rank only",
    ),
    ({"pp": [[0, 1], [2, 3]], "fsdp": [[0, 1], [2, 3]]}, r"fsdp_pg holds ranks .* and pp_pg ranks .*: both"),
    (  # the groups of the second stage are a grid
        {"pp": [[0, 2], [1, 3]], "fsdp": [[0, 1], [2, 3]], "cp": [[0, 1], [2], [3]]},
        r"fsdp_pg holds ranks \[0, 1\] and cp_pg ranks \[0, 1\] on rank 0",
    ),
]


@on_ranks(4)
def test_groups_that_are_no_grid_are_refused_on_all_ranks(rank: int, world: int) -> None:
    for groups, message in NO_GRIDS:
        made: dict[str, dist.ProcessGroup | None] = {}
        for role, lines in groups.items():
            for line in lines:
                group = dist.new_group(line)
                if rank in line:
                    made[role] = group
        with pytest.raises(ValueError, match=message):
            grid_of_groups(made)


@on_ranks(2)
def test_a_group_without_this_rank_is_refused_before_anything_communicates(rank: int, world: int) -> None:
    other = [dist.new_group([r]) for r in range(world)][1 - rank]
    for groups, kind, message in [
        ({"fsdp": other}, ValueError, f"fsdp_pg does not contain this rank, {rank}"),
        ({"fsdp": dist.group.WORLD, "zero": dist.group.WORLD}, ValueError, "'zero'.*tp, ep, fsdp|tp, ep, fsdp.*'zero'"),
        ({"fsdp": init_device_mesh("cpu", (2,))}, TypeError, "fsdp_pg must be a .*ProcessGroup, got DeviceMesh"),
    ]:
        with pytest.raises(kind, match=message):
            grid_of_groups(groups)
