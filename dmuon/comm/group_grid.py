"""The grid that process groups form: which ranks meet along which dimension."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from itertools import combinations
from math import prod
from typing import TypeVar

import torch.distributed as dist

from dmuon.comm.process_groups import ranks_of, this_rank
from dmuon.layout.rank_grid import ROLES, RankGrid
from dmuon.layout.ranks import GlobalRank

__all__ = ["grid_of_groups"]

_T = TypeVar("_T")


def grid_of_groups(groups: Mapping[str, dist.ProcessGroup | None]) -> RankGrid:
    """The grid whose lines are process groups; collective over every group given.

    Args:
        groups: by role. Groups that are None or have one rank are left out. Stages of a pipeline, ``"pp"``, are
            independent and no part of the grid.

    Raises:
        TypeError, ValueError: before anything communicates, for something else than a group, an unknown role, and a
            group without this rank.
        ValueError: on all ranks alike, for groups that are not the lines of a grid.
    """
    checked = _checked(groups)
    along = {role: group for role, group in checked.items() if role != "pp"}
    lines = {role: ranks_of(group) for role, group in checked.items()}
    sizes = tuple(len(lines[role]) for role in along)
    views: list[tuple[GlobalRank, str]] = _gathered((this_rank(), _overlap(lines)), along.values())
    grid = RankGrid(tuple(along), sizes, tuple(rank for rank, _ in views))
    # A rank whose view all ranks in it share has seen all that the groups join. So either all of them share one view
    # or none finds that they do, and what one raises they all raise.
    digests = _gathered(hashlib.sha256(repr((grid, views)).encode()).hexdigest(), along.values())
    fault = next((fault for _, fault in views if fault), "")
    if not fault and (len(set(grid.ranks)) < prod(sizes) or len(set(digests)) > 1):
        fault = (
            f"{_named(lines)} are not lines of one grid: {len(set(grid.ranks))} ranks {sorted(set(grid.ranks))} where "
            f"extents {sizes} make {prod(sizes)}, or ranks with other groups"
        )
    if "pp" in checked:
        of_stages = _gathered(fault, [checked["pp"]])
        fault = next((one for one in [fault, *of_stages] if one), "")
    if fault:
        raise ValueError(f"{fault}; any two groups of a rank must share that rank only, as those of a DeviceMesh do")
    return grid


def _checked(groups: Mapping[str, dist.ProcessGroup | None]) -> dict[str, dist.ProcessGroup]:
    """The groups of several ranks in the order of ``ROLES``."""
    for role, group in groups.items():
        if role not in ROLES:
            raise ValueError(f"role {role!r} of a process group is none of {', '.join(ROLES)}")
        if group is None:
            continue
        member: object = group
        if member == dist.GroupMember.NON_GROUP_MEMBER or (
            isinstance(member, dist.ProcessGroup) and dist.get_rank(member) < 0
        ):
            raise ValueError(
                f"{role}_pg does not contain this rank, {this_rank()}; give each rank the group that it is in"
            )
        if not isinstance(member, dist.ProcessGroup):
            raise TypeError(f"{role}_pg must be a torch.distributed ProcessGroup, got {type(member).__name__}")
    ordered = {role: groups.get(role) for role in ROLES}
    return {role: group for role, group in ordered.items() if group is not None and group.size() > 1}


def _overlap(lines: Mapping[str, tuple[GlobalRank, ...]]) -> str:
    """What is wrong where two groups share another rank than this one; empty if nothing is."""
    for (role, line), (other, of_other) in combinations(lines.items(), 2):
        shared = sorted(set(line) & set(of_other))
        if len(shared) > 1:
            return (
                f"{role}_pg holds ranks {list(line)} and {other}_pg ranks {list(of_other)} on rank {this_rank()}: "
                f"both hold {shared}"
            )
    return ""


def _named(lines: Mapping[str, tuple[GlobalRank, ...]]) -> str:
    return " and ".join(f"{role}_pg with ranks {list(line)}" for role, line in lines.items())


def _gathered(value: _T, groups: Iterable[dist.ProcessGroup]) -> list[_T]:
    """``value`` of each rank of a grid, in row-major order; ``groups`` from the outermost dimension inwards."""
    values = [value]
    for group in reversed(list(groups)):
        of_ranks: list[list[_T]] = [[] for _ in range(group.size())]
        dist.all_gather_object(of_ranks, values, group=group)
        values = [one for of_rank in of_ranks for one in of_rank]
    return values
