"""Which strategy each matrix has, of those that several ranks hold: what ``strategy=`` may say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias, get_args

from dmuon.dedicated.dedication import sharded_together
from dmuon.dedicated.owned_tensor import OwnedTensor
from dmuon.layout.matrices import Strategy
from dmuon.model.matrix_spec import flat_of

Given: TypeAlias = Strategy | Literal["auto"]
STRATEGIES: tuple[str, ...] = (*get_args(Strategy), "auto")
STRATEGY = "strategy"  # the option of a group that has its own


def check_strategy(strategy: object) -> None:
    """Raise TypeError or ValueError for what ``strategy=`` cannot be: no name, and no mapping of patterns to names."""
    names = list(strategy.values()) if isinstance(strategy, Mapping) else [strategy]
    if isinstance(strategy, Mapping) and not all(isinstance(pattern, str) for pattern in strategy):
        raise TypeError(f"strategy must map patterns of names of parameters to strategies, got {strategy!r}")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(
                f"strategy must be a name, or a mapping of patterns of names of parameters to names, got {name!r}; "
                f"use one of {', '.join(STRATEGIES)}"
            )
        if name not in STRATEGIES:
            raise ValueError(f"strategy={name!r} is unknown; use one of {', '.join(STRATEGIES)}")


def strategies_of(
    groups: Iterable[Mapping[str, Any]], names: Mapping[int, str], default: str | Mapping[str, str]
) -> dict[int, Given]:
    """By ``id``, the strategies of those of Muon's parameters that have not just owners.

    Of a mapping the first pattern counts that fits the name, as ``fnmatch`` has it.

    Args:
        names: of the parameters, by ``id``.
        default: of groups that do not say; what ``dedicate_params`` has left to all ranks is theirs.

    Raises:
        ValueError: by name, a parameter that dmuon owns, and so one rank orthogonalizes; or one that cannot be cut
            into slices.
    """
    found: dict[int, Given] = {}
    left = sharded_together()
    for group in groups:
        given = group.get(STRATEGY, default) if group["use_muon"] else "owner"
        for param in group["params"] if given != "owner" or (left and group["use_muon"]) else ():
            name = names[id(param)]
            chosen: Any = given
            if isinstance(given, Mapping):
                chosen = next((way for pattern, way in given.items() if fnmatchcase(name, pattern)), "owner")
            if id(param) in left:
                if chosen not in ("owner", "sharded"):
                    raise ValueError(
                        f"strategy={chosen!r} for {name!r}, and dedicate_params was told 'sharded': leave it out here"
                    )
                chosen = "sharded"
            if chosen != "owner" and isinstance(param, OwnedTensor):
                raise ValueError(
                    f"strategy={chosen!r} for {name!r}, which dedicate_params gave an owner that has it whole: leave "
                    "strategy= out for it, or leave it to FSDP2 by dedicate_params(exclude=…) and fully_shard"
                )
            if chosen in ("sharded", "auto") and flat_of(param) is not None:
                raise ValueError(
                    f"strategy={chosen!r} for {name!r}, of which FSDP1 has a flat shard on each rank: use 'owner' or "
                    "'replicated', or torch's fully_shard (FSDP2)"
                )
            if chosen in ("sharded", "auto") and group.get("orthogonalize") is not None:
                raise ValueError(
                    f"strategy={chosen!r} for {name!r}, of which orthogonalize= wants whole matrices, at costs that "
                    "no plan knows: use 'owner' or 'replicated'"
                )
            if chosen != "owner":
                found[id(param)] = chosen
    return found
