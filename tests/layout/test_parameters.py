"""Which ranks hold a parameter and which elements each has, on real meshes and process groups."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness.pool import RankPool
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dmuon.comm.group_grid import grid_of_groups
from dmuon.layout.parameters import ParameterLayout, place, place_dtensor, place_replicated
from dmuon.layout.rank_grid import RankGrid, grid_of_mesh
from dmuon.layout.shards import Piece

SHAPES = [(1, 1), (1, 7), (5, 3), (6, 1), (8, 4)]


def numbered(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(*shape)


def part_of(whole: Tensor, piece: Piece) -> Tensor:
    """The local tensor of a piece."""
    local = torch.full(piece.shape, -1.0)
    for here, there in piece.blocks():
        local[here] = whole[there]
    return local


def assert_placed(*cases: tuple[ParameterLayout | None, Tensor, Tensor]) -> None:
    """Of each parameter, its whole and the local tensor: this rank's piece is what it has, and what the pieces of a
    copy have makes up the whole."""
    sent: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(sent, [(local, placed) for placed, _, local in cases])
    for case, (placed, whole, local) in enumerate(cases):
        assert placed is not None
        assert placed.layout.shape == tuple(whole.shape)
        assert list(placed.ranks) == sorted(set(placed.ranks))
        mine = placed.ranks.index(dist.get_rank())
        assert torch.equal(part_of(whole, placed.layout.pieces[mine]), local), f"{placed} gives not {local}"
        together = torch.full(whole.shape, -1.0)
        for i in placed.layout.sources(mine):
            of_rank, same = sent[placed.ranks[i]][case]
            assert same == placed, "ranks differ on where the parameter lies"
            for here, there in placed.layout.pieces[i].blocks():
                assert (together[there] == -1).all(), "pieces overlap"
                together[there] = of_rank[here]
        assert torch.equal(together, whole)


def no_share(_: object) -> list[object]:
    raise AssertionError("nothing has to be gathered")


def share(value: object) -> list[object]:
    """Gathers over all ranks, which are in the order of the grids below."""
    found: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def line_groups(sizes: dict[str, int]) -> dict[str, dist.ProcessGroup]:
    """Groups of all ranks along each dimension of a grid, in row-major order of ``sizes``."""
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return {name: mesh.get_group(name) for name in sizes}


# -- DTensors -------------------------------------------------------------------------------------------------------


def dtensors(rank: int, world: int) -> int:
    """Every placement of every shape on every mesh of this world."""
    cases: list[tuple[ParameterLayout | None, Tensor, Tensor]] = []
    for sizes in [(world,), (2, 2), (1, world)] if world == 4 else [(world,), (1, world), (world, 1)]:
        mesh = init_device_mesh("cpu", sizes)
        choices: list[Placement] = [Shard(0), Shard(1), Replicate()]
        for shape, placements in product(SHAPES, product(choices, repeat=len(sizes))):
            whole = numbered(*shape)
            param = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            cases.append((place_dtensor(param, "w"), whole, param.to_local()))
    assert_placed(*cases)
    return len(cases)


@pytest.mark.pitfall("P14")
@pytest.mark.parametrize("world", [1, 3, 4])
def test_a_dtensor_lies_where_torch_put_it(ranks: RankPool, world: int) -> None:
    assert ranks(world, dtensors) == [15 + 2 * 45] * world


class Pair(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)


def fsdp_over_tp(rank: int, world: int) -> int:
    """FSDP2 over tensor parallelism, even and uneven: some of its shards are strided, some empty."""
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("fsdp", "tp"))
    strided = 0
    for width, hidden in [(8, 8), (5, 7), (3, 2), (1, 6)]:
        torch.manual_seed(1)
        model = Pair(width, hidden)
        wholes = {name: param.detach().clone() for name, param in model.named_parameters()}
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["fsdp"])
        for name, param in model.named_parameters():
            assert isinstance(param, DTensor)
            placed = place_dtensor(param, name)
            assert placed.ranks == tuple(range(world))
            assert_placed((placed, wholes[name], param.to_local().detach()))
            strided += any(isinstance(placement, _StridedShard) for placement in param.placements)
    return strided


def test_fsdp_over_tensor_parallelism_lies_where_its_shards_are(ranks: RankPool) -> None:
    assert ranks(4, fsdp_over_tp) == [8] * 4


def meshes_in_turn(rank: int, world: int) -> list[tuple[int, ...]]:
    """Meshes of one shape with the ranks in another order each time."""
    found = []
    whole = numbered(5, 2)
    for order in ([[0, 1], [2, 3]], [[3, 1], [2, 0]], [[0, 2], [1, 3]]):
        param = distribute_tensor(whole, DeviceMesh("cpu", order), [Shard(0), Replicate()], src_data_rank=None)
        placed = place_dtensor(param, "w")
        assert_placed((placed, whole, param.to_local()))
        found.append(tuple(piece.numel for piece in placed.layout.pieces))
    return found


@pytest.mark.pitfall("P24")
def test_a_new_mesh_of_the_same_shape_places_anew(ranks: RankPool) -> None:
    expected = [(6, 6, 4, 4), (4, 6, 4, 6), (6, 4, 6, 4)]
    assert ranks(4, meshes_in_turn) == [expected] * 4


def refused_dtensors(rank: int, world: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    far = DeviceMesh("cpu", [1 - rank], _init_backend=False)
    cases = [
        DTensor.from_local(torch.ones(2, 2), mesh, [Partial()]),
        DTensor.from_local(torch.ones(1 + 2 * rank, 2), mesh, [Shard(0)], shape=torch.Size((4, 2)), stride=(2, 1)),
        DTensor.from_local(torch.ones(2, 2), far, [Replicate()], run_check=False),
    ]
    found = []
    for param in cases:
        with pytest.raises(ValueError, match=r"parameter 'layer\.w' is a DTensor") as caught:
            place_dtensor(param, "layer.w")
        found.append(str(caught.value))
    return found


def test_dtensors_without_elements_here_are_refused_by_name(ranks: RankPool) -> None:
    for rank, (partial, uneven, far) in enumerate(ranks(2, refused_dtensors)):
        assert "redistribute it to Shard or Replicate" in partial
        assert f"rank {rank} has shape ({1 + 2 * rank}, 2), torch's chunks have (2, 2)" in uneven
        assert f"without this rank, {rank}" in far


def test_replicas_are_whole_and_named_once() -> None:
    placed = place_replicated(torch.ones(3, 2), [4, 1])
    assert placed.ranks == (1, 4) and placed.layout.replicas == (1, 0)
    assert all(piece.covers((3, 2)) for piece in placed.layout.pieces)
    with pytest.raises(ValueError, match=r"ranks \[2\] are named twice"):
        place_replicated(torch.ones(3, 2), [2, 1, 2])


# -- grids ----------------------------------------------------------------------------------------------------------


def grids(rank: int, world: int, sizes: dict[str, int]) -> RankGrid:
    found = grid_of_groups({**line_groups(sizes), "cp": None})
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    assert found == grid_of_mesh(mesh, list(sizes))
    return found


@pytest.mark.parametrize(
    ("sizes", "roles", "order"),
    [
        ({"fsdp": 2, "tp": 2}, ("tp", "fsdp"), [(0, 2, 1, 3)] * 4),
        ({"dp": 2, "fsdp": 2}, ("fsdp", "dp"), [(0, 2, 1, 3)] * 4),
        ({"ep": 2, "fsdp": 2}, ("ep", "fsdp"), [(0, 1, 2, 3)] * 4),
        ({"fsdp": 4, "tp": 1}, ("fsdp",), [(0, 1, 2, 3)] * 4),
        ({"pp": 2, "fsdp": 2}, ("fsdp",), [(0, 1), (0, 1), (2, 3), (2, 3)]),
        ({"tp": 2, "pp": 2}, ("tp",), [(0, 2), (1, 3), (0, 2), (1, 3)]),
        ({"tp": 1}, (), [(0,)]),
    ],
)
def test_groups_and_meshes_make_one_grid(
    ranks: RankPool, sizes: dict[str, int], roles: tuple[str, ...], order: list[tuple[int, ...]]
) -> None:
    found = ranks(len(order), grids, sizes)
    assert found == [RankGrid(roles, found[0].sizes, of_rank) for of_rank in order]
    assert found[0].sizes == tuple(sizes[role] for role in roles)


def overlapping(rank: int, world: int, groups: dict[str, list[list[int]]]) -> None:
    made: dict[str, dist.ProcessGroup | None] = {}
    for role, lines in groups.items():
        for line in lines:
            group = dist.new_group(line)
            if rank in line:
                made[role] = group
    grid_of_groups(made)


@pytest.mark.parametrize(
    ("world", "groups", "message"),
    [
        (
            4,
            {"fsdp": [[0, 1, 2, 3]], "dp": [[0, 1], [2, 3]]},
            r"fsdp_pg holds ranks \[0, 1, 2, 3\] and dp_pg ranks \[0, 1\] on rank 0: both hold \[0, 1\]",
        ),
        (2, {"fsdp": [[0, 1]], "tp": [[0, 1]]}, r"tp_pg holds ranks \[0, 1\] and fsdp_pg ranks \[0, 1\]"),
        (  # any two groups of a rank share that rank only, but three of them span four ranks
            4,
            {"tp": [[0, 1], [2, 3]], "fsdp": [[0, 2], [1, 3]], "dp": [[0, 3], [1, 2]]},
            r"tp_pg with ranks .* are not lines of one grid: 4 ranks \[0, 1, 2, 3\] where extents \(2, 2, 2\) make 8",
        ),
        (  # ranks 1 and 3 have one group, which alone is a grid
            4,
            {"tp": [[0, 1], [2, 3]], "fsdp": [[0, 2], [1], [3]]},
            r"tp_pg with ranks .* are not lines of one grid.*any two groups of a rank must share that rank only",
        ),
        (4, {"pp": [[0, 1], [2, 3]], "fsdp": [[0, 1], [2, 3]]}, r"fsdp_pg holds ranks .* and pp_pg ranks .*: both"),
        (  # the groups of the second stage are a grid
            4,
            {"pp": [[0, 2], [1, 3]], "fsdp": [[0, 1], [2, 3]], "cp": [[0, 1], [2], [3]]},
            r"fsdp_pg holds ranks \[0, 1\] and cp_pg ranks \[0, 1\] on rank 0",
        ),
    ],
)
def test_groups_that_are_no_grid_are_refused_on_all_ranks(
    ranks: RankPool, world: int, groups: dict[str, list[list[int]]], message: str
) -> None:
    ranks(world, overlapping, groups, expect=ValueError, match=message)


def strangers(rank: int, world: int) -> list[str]:
    other = [dist.new_group([r]) for r in range(world)][1 - rank]
    found = []
    for groups, kind in [
        ({"fsdp": other}, ValueError),
        ({"fsdp": dist.group.WORLD, "zero": dist.group.WORLD}, ValueError),
        ({"fsdp": init_device_mesh("cpu", (2,))}, TypeError),
    ]:
        with pytest.raises(kind) as caught:
            grid_of_groups(groups)
        found.append(str(caught.value))
    return found


def test_a_group_without_this_rank_is_refused_before_anything_communicates(ranks: RankPool) -> None:
    for rank, (stranger, unknown, mesh) in enumerate(ranks(2, strangers)):
        assert f"fsdp_pg does not contain this rank, {rank}" in stranger
        assert "'zero'" in unknown and "tp, ep, fsdp" in unknown
        assert "fsdp_pg must be a torch.distributed ProcessGroup, got DeviceMesh" in mesh


def roles_of_names(rank: int, world: int, cases: list[tuple[list[str], Any]]) -> None:
    mesh = DeviceMesh("cpu", [[0, 1]])
    two = DeviceMesh("cpu", [[0], [1]])
    for names, expected in cases:
        if isinstance(expected, str):
            with pytest.raises(ValueError, match=expected):
                grid_of_mesh(mesh, names)
        else:
            assert grid_of_mesh(mesh, names).roles == expected, names
            assert grid_of_mesh(two, names[::-1]).roles == expected, names


def test_names_of_mesh_dimensions_tell_their_roles(ranks: RankPool) -> None:
    names = {
        "tp": ("tp", "tensor", "tensor_parallel"),
        "fsdp": ("fsdp", "dp_shard", "shard", "dp_shard_cp"),
        "dp": ("replicate", "dp_replicate", "ddp", "dp", "data_parallel"),
        "cp": ("cp", "context"),
        "ep": ("ep", "expert"),
    }
    cases: list[tuple[list[str], Any]] = [(["pp", name], (role,)) for role, of in names.items() for name in of]
    cases += [(["dp", "pipeline"], ()), (["dp", "mystery"], "'mystery' has no known role.*'shard'")]
    cases += [(["dp"], r"2 dimensions and names \('dp',\)")]
    ranks(2, roles_of_names, cases)


def two_of_one_role(rank: int, world: int) -> RankGrid:
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
    return grid_of_mesh(mesh, ["dp_replicate", "dp"])


def test_a_mesh_may_have_two_dimensions_of_a_role(ranks: RankPool) -> None:
    assert ranks(4, two_of_one_role) == [RankGrid(("dp", "dp"), (2, 2), (0, 1, 2, 3))] * 4


# -- parameters -----------------------------------------------------------------------------------------------------


def one(param: Tensor, grid: RankGrid, shard_dims: Any = None, gather: Any = no_share) -> ParameterLayout | None:
    (placed,) = place([param], ["w"], grid, shard_dims, gather)
    return placed


def gathered_over(grid: RankGrid) -> Any:
    """Gathers from the ranks of a grid in their order."""

    def gather(value: object) -> list[object]:
        everything = share(value)
        return [everything[rank] for rank in grid.ranks]

    return gather


def uneven_shards(rank: int, world: int) -> None:
    """FSDP cuts rows, unevenly and down to none; tensor parallelism cuts columns, or the same rows before it."""
    grid = grid_of_groups(line_groups({"fsdp": 2, "tp": 2}))
    f, t = divmod(rank, 2)
    gather = gathered_over(grid)
    whole = numbered(5, 7)
    for rows, columns in [([4, 1], [3, 4]), ([5, 0], [7, 0]), ([0, 5], [1, 6])]:
        local = whole.split(rows)[f].split(columns, 1)[t]
        placed = one(local, grid, {"fsdp": 0, "tp": -1}, gather)
        assert_placed((placed, whole, local))
    for outer, inner in [([3, 2], [[2, 1], [0, 2]]), ([5, 0], [[1, 4], [0, 0]])]:
        local = whole.split(outer)[t].split(inner[t])[f]
        placed = one(local, grid, lambda param: {"fsdp": 0, "tp": 0}, gather)
        assert_placed((placed, whole, local))
    placed = one(whole, grid, {"fsdp": None, "tp": None})
    assert placed is not None and set(placed.layout.replicas) == {0, 1, 2, 3}
    assert_placed((placed, whole, whole))
    local = whole.split([1, 4])[f]
    both = place([local, whole, local.T], ["a", "b", "c"], grid, lambda p: dims_of(p, whole, local), gather)
    assert_placed(*zip(both, [whole, whole, whole.T], [local, whole, local.T], strict=True))


def dims_of(param: Tensor, whole: Tensor, local: Tensor) -> dict[str, int | None]:
    if param is whole:
        return {"fsdp": None, "tp": None}
    return {"fsdp": 0 if param is local else 1, "tp": None}


@pytest.mark.pitfall("P14")
def test_plain_shards_of_any_lengths_are_placed(ranks: RankPool) -> None:
    ranks(4, uneven_shards)


def copies_beside(rank: int, world: int, role: str) -> list[Any]:
    """FSDP over pairs of ranks, and ``role`` across the pairs."""
    mesh = DeviceMesh("cpu", [[0, 2], [1, 3]])
    pair = DeviceMesh("cpu", mesh.mesh[rank % 2].tolist(), _init_backend=False)
    groups: list[dist.ProcessGroup] = [mesh.get_group(dim) for dim in (1, 0)]
    grid = grid_of_groups({"fsdp": groups[0], role: groups[1]})
    whole = numbered(3, 2)
    param = DTensor.from_local(
        whole.split([2, 1])[rank // 2], pair, [Shard(0)], shape=whole.shape, stride=(2, 1), run_check=False
    )
    placed = one(param, grid)
    assert placed is not None
    assert_placed((placed, whole, param.to_local()))
    everywhere = one(distribute_tensor(whole, mesh, [Replicate(), Shard(0)], src_data_rank=None), grid)
    assert everywhere is not None
    return [placed.ranks, placed.layout.replicas, everywhere.layout.replicas]


@pytest.mark.parametrize("role", ["cp", "dp", "tp"])
def test_a_dtensor_has_copies_where_its_mesh_does_not_reach(ranks: RankPool, role: str) -> None:
    """Ranks of one sequence hold the same FSDP shards, on a mesh of their own."""
    assert ranks(4, copies_beside, role) == [[(0, 1, 2, 3), (0, 1, 0, 1), (0, 1, 0, 1)]] * 4


def experts(rank: int, world: int) -> list[Any]:
    """Expert parallelism over neighbours, FSDP across; the experts of each have sizes of their own."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
    pair = DeviceMesh("cpu", [rank % 2, rank % 2 + 2], _init_backend=False)
    groups: list[dist.ProcessGroup] = [mesh.get_group(dim) for dim in range(2)]
    grid = grid_of_groups({"ep": groups[1], "fsdp": groups[0]})
    whole = numbered(3 + rank % 2, 2)
    local = whole.split([1, whole.shape[0] - 1])[rank // 2]
    plain = one(local, grid, {"fsdp": 0}, gathered_over(grid))
    param = distribute_tensor(whole, pair, [Shard(0)], src_data_rank=None)
    placed = one(param, grid)
    assert placed is not None and plain is not None
    assert torch.equal(part_of(whole, plain.layout.pieces[rank // 2]), local)
    assert torch.equal(part_of(whole, placed.layout.pieces[rank // 2]), param.to_local())
    stack = numbered(3, 4, 2)
    mine = stack.split([1, 2])[rank % 2].split([3, 1], 1)[rank // 2]
    cut = one(mine, grid, {"ep": 0, "fsdp": 1}, gathered_over(grid))
    assert_placed((cut, stack, mine))
    alone = grid_of_groups({"ep": groups[1]})
    return [plain.ranks, placed.ranks, one(whole, alone)]


def test_experts_are_independent_of_those_of_other_ranks(ranks: RankPool) -> None:
    assert ranks(4, experts) == [[(rank % 2, rank % 2 + 2)] * 2 + [None] for rank in range(4)]


def gatherings(rank: int, world: int) -> list[int]:
    grid = grid_of_groups({"fsdp": dist.group.WORLD})
    counts = []
    for dims in ({"fsdp": 0}, {"fsdp": None}):
        calls: list[object] = []

        def counted(value: object, calls: list[object] = calls) -> list[object]:
            calls.append(value)
            return share(value)

        place([torch.ones(2, 2) for _ in range(3)], ["a", "b", "c"], grid, dims, counted)
        counts.append(len(calls))
    return counts


def test_all_plain_shards_are_told_of_at_once(ranks: RankPool) -> None:
    assert ranks(2, gatherings) == [[1, 0]] * 2


def refused(rank: int, world: int) -> list[str]:
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
    groups: list[dist.ProcessGroup] = [mesh.get_group(dim) for dim in range(2)]
    grid = grid_of_groups({"fsdp": groups[0], "tp": groups[1]})
    line = grid_of_groups({"fsdp": groups[0]})
    experts = grid_of_groups({"fsdp": groups[0], "ep": groups[1]})
    whole = numbered(4, 4)
    across = DeviceMesh("cpu", [[0, 3], [1, 2]][rank in (1, 2)], _init_backend=False)
    ragged = torch.ones(2, 2 + (rank == 3))
    cases: list[tuple[Tensor, RankGrid, Any]] = [
        (whole, line, None),
        (whole, grid, {"fsdp": 0}),
        (whole, grid, {"fsdp": 2, "tp": None}),
        (whole, grid, {"zero": 0}),
        (whole, grid, {"pp": 0}),
        (distribute_tensor(whole, mesh, [Shard(0), Shard(1)], src_data_rank=None), line, None),
        (distribute_tensor(whole, across, [Shard(0)], src_data_rank=None), grid, None),
        (ragged, experts, {"fsdp": 0}),
    ]
    found = []
    for param, of_case, dims in cases:
        with pytest.raises(ValueError) as caught:
            one(param, of_case, dims, gathered_over(of_case))
        found.append(str(caught.value))
    with pytest.raises(ValueError) as caught:
        place([whole], [f"w{rank // 2}"], grid, {"fsdp": 0, "tp": 1}, gathered_over(grid))
    return [*found, str(caught.value)]


def test_what_has_no_place_is_refused_by_name(ranks: RankPool) -> None:
    for rank, found in enumerate(ranks(4, refused)):
        unsaid, half, beyond, unknown, stage, unreached, across, ragged, unlike = found
        assert "parameter 'w' is a plain tensor, and fsdp_pg=… shards it" in unsaid and "{'fsdp': 0}" in unsaid
        assert "tp_pg=… shards it along a dimension that nothing says" in half
        assert "'w'" in beyond and "shard_dims={'fsdp': 2} cuts along a dimension that it lacks" in beyond
        assert "shard_dims names 'zero'" in unknown and "shard_dims names 'pp'" in stage
        line = [rank % 2, rank % 2 + 2]
        assert f"over ranks [0, 1, 2, 3], but the given process groups join ranks {line}" in unreached
        assert "'w'" in unreached and "tp_pg=…" in unreached
        assert "parameter 'w'" in across and "run across the process groups" in across
        assert "over ranks [1, 3]: the local tensor has shape (2, 2) at position 0 and (2, 3)" in ragged
        assert "rank 2 has sharded parameters ['w1'] and rank 0 has ['w0']" in unlike
