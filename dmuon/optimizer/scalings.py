"""Which members of the family scale the updates of which group, and where they cannot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from dmuon.model.matrix_spec import flat_of
from dmuon.step.adamuon import ElementMoments
from dmuon.step.half_weights import has_master
from dmuon.step.hyperball import Hyperball
from dmuon.step.normuon import RowMoments
from dmuon.step.rounds import Round
from dmuon.step.scaling import Scaling

Groups = Sequence[Mapping[str, Any]]


def moments_of(groups: Groups, rounds: Sequence[Round]) -> dict[int, Scaling]:
    """By number of the group, its second moments, which begin as zeros."""
    found: dict[int, Scaling] = {}
    for kind in ("row", "element"):
        having = {i for i, group in enumerate(groups) if group.get("second_moment") == kind}
        if not having:
            continue
        batches = [batch for round_ in rounds if round_.index in having for batch in round_.batches]
        held = frozenset[int]().union(*(batch.ids for batch in batches))
        every = (param for i in sorted(having) for param in groups[i]["params"])
        params = [param for param in every if param.requires_grad or id(param) in held]
        found |= dict.fromkeys(having, RowMoments(params, batches) if kind == "row" else ElementMoments(params))
    return found


def scalings_of(groups: Groups, moments: Mapping[int, Scaling]) -> dict[int, list[Scaling]]:
    """By number of the group, what scales its updates, in this order."""
    found = {number: [scaling] for number, scaling in moments.items()}
    for number, group in enumerate(groups):
        if group.get("weight_decay_mode") == "hyperball":
            found.setdefault(number, []).append(Hyperball())
    return found


def check_scalings(groups: Groups, rounds: Sequence[Round], names: Mapping[int, str], clipped: Set[int]) -> None:
    """Refuse what scales updates of matrices of which it cannot know where they lie, or what else changes them.

    Args:
        names: of parameters, by ``id``.
        clipped: ids of those that QK-clip scales.

    Raises:
        ValueError: names group or parameter.
    """
    for round_ in rounds:
        group = groups[round_.index]
        on_sphere = group.get("weight_decay_mode") == "hyperball"
        if not (on_sphere or group.get("second_moment") is not None):
            continue
        option = "weight_decay_mode='hyperball'" if on_sphere else "second_moment"
        if not round_.scales:
            raise ValueError(
                f"{option} of group {round_.index}: in a {type(round_).__name__} dmuon does not know where the rows of "
                f"matrices lie; leave {option} out, or gather_fn and redistribute_fn of your own"
            )
        for batch in round_.batches:
            for param in batch.params:
                name = repr(names[id(param)])
                if flat_of(param) is not None:
                    raise ValueError(
                        f"{option} for {name}, of which FSDP1 has a flat shard on each rank, and no rows: leave "
                        f"{option} out, or use torch's fully_shard (FSDP2)"
                    )
                if on_sphere and param.dtype != batch.dtype and not has_master(group, param):
                    raise ValueError(
                        f"{option} for {name}, whose weights are {param.dtype}: rounding would let their norm grow. "
                        f"Keep them in {batch.dtype}, with FSDP2 by a MixedPrecisionPolicy, or let the optimizer keep "
                        "master_weights=True, or use dedicate_params"
                    )
                if on_sphere and id(param) in clipped:
                    raise ValueError(
                        f"{option} for {name}, whose norm qk_clip changes: give it a group of its own with another mode"
                    )
