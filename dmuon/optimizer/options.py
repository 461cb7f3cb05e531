"""The options of a parameter group: what each route takes, what is refused, and how ranks compare them."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence, Set
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, get_args

import torch
from torch import Tensor

from dmuon.dedicated.owned_tensor import OwnedTensor
from dmuon.kernels import HALF, check_storage, coefficient_sequence, storage_dtype, update_scale
from dmuon.layout.matrices import Strategy, team_size, ways_of
from dmuon.model.matrix_spec import Names, flat_of, is_one_matrix
from dmuon.platform.options import check_flag, is_integer, told_apart
from dmuon.step.adamuon import ElementMoments
from dmuon.step.batches import SharedBatch
from dmuon.step.half_weights import ON_HOST, has_master
from dmuon.step.hyperball import Hyperball
from dmuon.step.normuon import RowMoments
from dmuon.step.rounds import Round
from dmuon.step.scaling import Scaling
from dmuon.step.update import orthogonalized_by, trial_of

STRATEGIES: tuple[str, ...] = (*get_args(Strategy), "auto")
STRATEGY = "strategy"  # the option of a group that has its own

MUON_OPTIONS = (
    "lr", "weight_decay", "weight_decay_mode", "momentum", "momentum_dtype", "momentum_device", "nesterov",
    "ns_coefficients", "ns_steps", "eps", "ns_dtype", "orthogonalize", "second_moment", "second_moment_beta",
    "adjust_lr_fn", "lr_multiplier", "master_weights", "bf16_stochastic_round",
)  # fmt: skip
ADAMW_OPTIONS = ("lr", "weight_decay", "betas", "eps", "lr_multiplier", "master_weights", "bf16_stochastic_round")
STATE_OPTIONS = ("second_moment", "momentum_dtype", "momentum_device", "master_weights")  # what state there is
# Groups have these only where they are not as here: state dicts that are older than the options have the same keys.
USUAL: Mapping[str, Any] = {
    "weight_decay_mode": "decoupled", "momentum_dtype": None, "momentum_device": None, "orthogonalize": None,
    "second_moment": None, "second_moment_beta": 0.95, "lr_multiplier": 1.0, "master_weights": False,
    "bf16_stochastic_round": False,
}  # fmt: skip
RARE = USUAL.keys() - {"lr_multiplier"}  # which who has groups of his own writes there
_OF_HALVES = ("master_weights", "bf16_stochastic_round")
DECAY_MODES = ("decoupled", "cautious", "independent", "l2", "hyperball")
MOST_NS_STEPS = 20

_OF_THE_CONSTRUCTOR = (
    "adamw_lr", "adamw_betas", "adamw_eps", "adamw_weight_decay", "select", "overlap_backward", "distributed_config",
    "lr_multipliers",
)  # fmt: skip
_UNSUPPORTED = ("maximize", "amsgrad", "differentiable")  # of torch's optimizers: True would change the update
_ELSEWHERE = told_apart(  # keys that groups of other libraries have, which would be ignored here
    ("mu momentum_beta", "momentum=…"),
    ("use_nesterov", "nesterov=…"),
    ("beta1 beta2", "betas=(…, …) in a group with use_muon=False"),
    ("epsilon ns_epsilon", "eps=…"),
    ("wd", "weight_decay=…"),
    ("num_ns_steps backend_steps", "ns_steps=…"),
    ("coefficient_type ns_schedule", "ns_coefficients=…"),
    ("adjust_lr scale_mode extra_scale_factor rms_scale", "adjust_lr_fn=…, a name, a number or a function"),
    ("fp32_matmul_prec", "ns_dtype=…"),
    ("algorithm", "use_muon=True (Muon) or use_muon=False (AdamW)"),
    ("flatten", "MatrixSpec(flattened=True), which a function select=… returns"),
    ("num_heads split_sizes split_fn split_qkv qkv_split_shapes", "MatrixSpec, which a function select=… returns"),
    ("cautious_wd weight_decay_method", "weight_decay_mode=…, such as 'cautious'"),
    ("fraction rank_fraction rank_multiple_of ef_decay", "nothing: all of a matrix is orthogonalized"),
    ("muon_beta2", "second_moment='row' or 'element', and second_moment_beta=…"),
    ("tp_mode", "strategy='owner', 'replicated' or 'sharded'"),
    ("backend use_triton use_syrk use_gram_newton_schulz ns_use_kernels", "nothing: the plan chooses kernels"),
)
KEYWORDS_ELSEWHERE = _ELSEWHERE | told_apart(  # and keywords of their constructors
    ("betas beta1 beta2 adam_betas", "adamw_betas=(…, …)"),
    ("epsilon", "adamw_eps=… of AdamW, or eps=… of the norm that scales a matrix for Muon"),
    ("use_muon algorithm muon_params adamw_params", "groups with use_muon=True or False in place of the model"),
    ("rank world_size process_group pg distributed_mesh mesh device_mesh", "nothing: parameters know their ranks"),
    ("newton_schulz_func", "orthogonalize=…, a function of several matrices at once"),
    ("ns_backend", "nothing: the plan chooses kernels; ns_coefficients=… says which polynomials"),
    ("foreach fused capturable", "nothing: updates are batched and fused already"),
    ("replicate_async", "nothing: new weights are published asynchronously, and are exact"),
    ("amsgrad maximize differentiable", "nothing: dmuon.Muon does not do it"),
    ("warmup_step prefetch_count", "distributed_config=dmuon.create_dtensor_config(prefetch_count=…)"),
    ("chunk_size chunk_bytes", "distributed_config=dmuon.create_dtensor_config(chunk_bytes=…)"),
    (
        "small_param_numel_threshold async_gpu_parallelism",
        "it as an option of distributed_config=dmuon.create_dtensor_config(…)",
    ),
)
_TYPO = 0.85  # likeness from which an unknown name is taken for a mistake: "beta" is, "max_momentum" not

_COMPARED = {"use_muon", STRATEGY, *MUON_OPTIONS, *ADAMW_OPTIONS, *_UNSUPPORTED, *_ELSEWHERE}
_CONSTANT = {bool, int, float, str, type(None), torch.dtype}  # others may change in place, or must not be kept alive

Groups = Sequence[Mapping[str, Any]]  # of an optimizer
Description = tuple[tuple[str, str], ...]  # of one group: name and value of its options


def options_of(group: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the options that the group's route reads."""
    return MUON_OPTIONS if group["use_muon"] else ADAMW_OPTIONS


def describe(group: Mapping[str, Any]) -> Description:
    """All options of a group that ranks must agree on.

    It is exact, hashable and the same in every process: numbers are written so that none is lost, whatever type they
    have; a function is called by its name. A tensor has its value if it is on the CPU; no device is waited for.
    """
    options: list[tuple[str, Any, Any]] = []
    for name, value in group.items():  # in every backward and step
        if name in _COMPARED:
            kind: Any = type(value)
            if kind is tuple and _CONSTANT.issuperset(map(type, value)):
                kind = tuple(map(type, value))  # betas
            elif kind not in _CONSTANT:
                kind, value = None, _described(value)
            options.append((name, kind, value))
    return _in_words(tuple(options))


@functools.lru_cache(maxsize=64)
def _in_words(options: tuple[tuple[str, Any, Any], ...]) -> Description:
    """What an earlier step has asked for already, most often.

    Args:
        options: name, type (since True, 1 and 1.0 are equal) and value; without a type those that are in words.
    """
    words = {name: value if kind is None else _described(value) for name, kind, value in options}
    group = {name: value for name, _, value in options}
    names = ("use_muon", *options_of(group), *_UNSUPPORTED, *sorted({STRATEGY, *_ELSEWHERE} & group.keys()))
    return tuple((name, words.get(name, "None")) for name in names if name not in _UNSUPPORTED or group.get(name))


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return _described(value.tolist()) if value.device.type == "cpu" else f"a tensor on {value.device.type}"
    if isinstance(value, bool):
        return repr(value)
    if isinstance(value, numbers.Real):
        return repr(_number(value) + 0.0)  # no -0.0
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_described, value))})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name!r}: {_described(of_name)}' for name, of_name in value.items())}}}"
    if isinstance(value, functools.partial):
        words = [f"{name}={_described(of_name)}" for name, of_name in sorted(value.keywords.items())]
        return f"{_described(value.func)}({', '.join([*map(_described, value.args), *words])})"
    if callable(value) and not isinstance(value, torch.dtype):
        named = value if hasattr(value, "__qualname__") else type(value)
        return f"{named.__module__}.{named.__qualname__}"
    return repr(value)


def check_options(group: Mapping[str, Any], *, wait: bool = True) -> None:
    """Refuse options that the group's route cannot take.

    Args:
        wait: for an accelerator, whose tensors may hold an option; False leaves these unchecked.
    """
    for name in sorted(_ELSEWHERE.keys() & group.keys()):
        raise ValueError(f"option {name!r} is one of another library and means nothing here; write {_ELSEWHERE[name]}")
    missing = [name for name in options_of(group) if name not in group and name not in USUAL]
    if missing:
        raise ValueError(f"option {missing[0]!r} is missing; set it to what it was")
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr must have one element, got a tensor of shape {tuple(lr.shape)}")
    numbers_of = {name: group[name] for name in ("lr", "weight_decay", "eps", "lr_multiplier") if name in group}
    below_one: dict[str, Any] = {}
    halves = [name for name in _OF_HALVES if group.get(name, False) is not False]
    masters = group.get("master_weights", False)
    if not (isinstance(masters, bool) or masters == ON_HOST):
        raise TypeError(f"master_weights must be True, False or {ON_HOST!r}, got {masters!r}")
    check_flag("bf16_stochastic_round", group.get("bf16_stochastic_round", False))
    if len(halves) > 1:
        raise ValueError("bf16_stochastic_round=True is for weights without masters: leave it or master_weights out")
    if group["use_muon"]:
        full = {**USUAL, **group}
        below_one |= {name: full[name] for name in ("momentum", "second_moment_beta")}
        _check_muon_options(full)
    else:
        betas = group["betas"]
        if not isinstance(betas, Sequence) or len(betas) != 2:
            raise ValueError(f"betas must be two numbers, got {betas!r}")
        below_one = {f"betas[{i}]": beta for i, beta in enumerate(betas)}
    for some, bound in ((numbers_of, math.inf), (below_one, 1.0)):
        for name, value in some.items():
            if wait or not isinstance(value, Tensor) or value.device.type == "cpu":
                _check_range(name, value, bound)
    for name in _UNSUPPORTED:
        if group.get(name):
            raise ValueError(f"option {name!r} is {group[name]!r}, which dmuon.Muon does not do; leave it out")


def _check_muon_options(group: Mapping[str, Any]) -> None:
    check_flag("nesterov", group["nesterov"])
    check_strategy(group.get(STRATEGY, "owner"))
    if group["weight_decay_mode"] not in DECAY_MODES:
        raise ValueError(f"weight_decay_mode must be one of {DECAY_MODES}, got {group['weight_decay_mode']!r}")
    ns_dtype = group["ns_dtype"]
    if ns_dtype is not None and not isinstance(ns_dtype, torch.dtype):
        raise TypeError(f"ns_dtype must be a torch.dtype, such as torch.bfloat16, or None, got {ns_dtype!r}")
    for kind in {p.device.type for p in group["params"]} - {"meta"}:
        try:
            storage_dtype(torch.float32, torch.device(kind), ns_dtype)
        except (TypeError, ValueError) as fault:
            raise type(fault)(f"ns_{fault}") from None
    if group["momentum_dtype"] not in (None, torch.bfloat16):
        raise ValueError(
            f"momentum_dtype must be torch.bfloat16 or None (fp32, or wider where parameters are), got "
            f"{group['momentum_dtype']!r}"
        )
    if group["momentum_device"] not in (None, "cpu"):
        raise ValueError(
            f"momentum_device must be 'cpu' or None (where the parameters are), got {group['momentum_device']!r}"
        )
    if group["weight_decay_mode"] == "hyperball" and group["adjust_lr_fn"] != "match_rms_adamw":
        raise ValueError(
            f"adjust_lr_fn={group['adjust_lr_fn']!r} with weight_decay_mode='hyperball', by which lr is the part of "
            "its norm that a weight moves, whatever its shape: leave adjust_lr_fn out"
        )
    if group["second_moment"] not in (None, "row", "element"):
        raise ValueError(
            f"second_moment must be 'row' (NorMuon), 'element' (AdaMuon) or None, got {group['second_moment']!r}"
        )
    if not (group["orthogonalize"] is None or callable(group["orthogonalize"])):
        raise TypeError(f"orthogonalize must be a function or None, got {group['orthogonalize']!r}")
    if is_integer(group["ns_steps"]) and group["ns_steps"] > MOST_NS_STEPS:
        raise ValueError(
            f"ns_steps must be at most {MOST_NS_STEPS}, got {group['ns_steps']}: five steps orthogonalize, and each "
            "more costs as much as they do"
        )
    coefficients = coefficient_sequence(group["ns_coefficients"], group["ns_steps"])
    if ns_dtype is not None:
        check_storage(coefficients, ns_dtype)
    update_scale(group["adjust_lr_fn"], (2, 2))


def check_halves(groups: Groups, names: Names) -> None:
    """Refuse parameters that an option for half precision cannot take, and the option where it is for none."""
    for option, dtypes in zip(_OF_HALVES, (HALF, (torch.bfloat16,)), strict=True):
        params = [param for group in groups if group.get(option) for param in group["params"]]
        for param in params:
            about = f"{option} for parameter {names[id(param)]!r}"
            if flat_of(param) is not None:
                raise ValueError(
                    f"{about}, of which FSDP1 has a flat shard on each rank: use its MixedPrecision, which keeps fp32 "
                    "shards, or torch's fully_shard (FSDP2)"
                )
            is_owned = isinstance(param, OwnedTensor)
            if option == "bf16_stochastic_round" and (param.dtype == torch.float16 or is_owned):
                why = "of which its owner has an fp32 master" if is_owned else "which is torch.float16"
                raise ValueError(
                    f"{about}, {why}: leave it out, or put it into those groups of dmuon.param_groups(model) that have "
                    "weights in bf16"
                )
        if params and not any(param.dtype in dtypes or isinstance(param, OwnedTensor) for param in params):
            raise ValueError(
                f"{option}=True, and no parameter is in {' or '.join(map(str, dtypes))}, such as "
                f"{names[id(params[0])]!r}, which is {params[0].dtype}: leave it out"
            )


def check_names(group: Mapping[str, Any]) -> None:
    """Refuse names in a group that were meant for an option, and would be ignored. Others are the user's own."""
    options = (*options_of(group), STRATEGY) if group["use_muon"] else options_of(group)
    known = (*MUON_OPTIONS, STRATEGY, *ADAMW_OPTIONS, *_OF_THE_CONSTRUCTOR)
    for name in group:
        if name not in options and isinstance(name, str) and get_close_matches(name, known, 1, _TYPO):
            route = "Muon" if group["use_muon"] else "AdamW"
            raise ValueError(f"option {name!r} is unknown to a {route} group; it takes {', '.join(options)}")


def _check_range(name: str, value: Any, below: float) -> None:
    """Refuse what is not a number from 0 on, and less than ``below``."""
    if isinstance(value, Tensor):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    number = _number(value)
    if not 0.0 <= number < below:
        bound = "finite and >= 0" if below == math.inf else f"in [0, {below:g})"
        raise ValueError(f"{name} must be {bound}, got {number}")


def _number(value: numbers.Real) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer beyond all floats
        return math.inf


def check_functions(groups: Groups, rounds: Iterable[Round], proven: set[Any]) -> None:
    """Ask a user's ``adjust_lr_fn`` for all shapes, and try ``orthogonalize`` on a matrix of each that this rank owns.

    No weight has changed by then: in a step, a function that fails on one rank would leave others waiting.

    Args:
        proven: trials of ``orthogonalize`` that have succeeded before; changed.

    Raises:
        Exception: whatever they raise, or of what they return.
    """
    for round_ in rounds:
        scale, function = groups[round_.index]["adjust_lr_fn"], groups[round_.index].get("orthogonalize")
        for batch in round_.batches if round_.knows_shapes else ():
            if callable(scale):
                update_scale(scale, batch.scaled_shape)
            if function is None or trial_of(function, batch) in proven:
                continue
            if not isinstance(batch, SharedBatch) or batch.parcel.is_for(batch.domain.position):
                generator = torch.Generator(batch.device).manual_seed(0)
                x = torch.randn((1, *batch.shape), generator=generator, dtype=batch.dtype, device=batch.device)
                orthogonalized_by(function, x.div_(x.norm()))
                proven.add(trial_of(function, batch))


# -- strategies: who orthogonalizes a matrix that several ranks hold ---------------------------------------------------


def check_strategy(strategy: object) -> None:
    """Raise TypeError or ValueError for what ``strategy=`` cannot be: no name, and no mapping of patterns to names."""
    for name in ways_of(strategy).values():
        if name not in STRATEGIES and team_size(name) < 2:
            raise ValueError(
                f"strategy={name!r} is unknown; use one of {', '.join(STRATEGIES)}, or 'sharded:2' or more"
            )


def strategies_of(
    groups: Iterable[Mapping[str, Any]], names: Names, default: str | Mapping[str, str], left: Mapping[int, str]
) -> dict[int, str]:
    """By ``id``, the strategies of those of Muon's parameters that have not just owners.

    Of a mapping the first pattern counts that fits the name, as ``fnmatch`` has it.

    Args:
        default: of groups that do not say.
        left: by ``id``, of those that ``dedicate_params`` has given no owner.

    Raises:
        ValueError: by name, a parameter that dmuon owns, and so one rank orthogonalizes; or one that cannot be cut
            into slices.
    """
    found: dict[int, str] = {}
    for group in groups:
        given = group.get(STRATEGY, default) if group["use_muon"] else "owner"
        ways = ways_of(given).items()
        for param in group["params"] if given != "owner" or (left and group["use_muon"]) else ():
            name = names[id(param)]
            chosen = next((way for pattern, way in ways if fnmatchcase(name, pattern)), "owner")
            if id(param) in left:
                if chosen not in ("owner", "sharded", left[id(param)]) and not team_size(chosen):
                    raise ValueError(
                        f"strategy={chosen!r} for {name!r}, which dedicate_params has left to {left[id(param)]!r}: "
                        "leave it out here"
                    )
                chosen = left[id(param)] if chosen == "owner" else chosen
            if chosen != "owner" and isinstance(param, OwnedTensor):
                raise ValueError(
                    f"strategy={chosen!r} for {name!r}, which dedicate_params gave an owner that has it whole: leave "
                    "strategy= out for it, or leave it to FSDP2 by dedicate_params(exclude=…) and fully_shard"
                )
            if team_size(chosen) and not is_one_matrix(param):
                raise ValueError(
                    f"strategy={chosen!r} for {name!r}, which is several matrices: use 'sharded' or 'owner'"
                )
            may_cut = chosen in ("sharded", "auto") or team_size(chosen) > 0
            if may_cut and flat_of(param) is not None:
                raise ValueError(
                    f"strategy={chosen!r} for {name!r}, of which FSDP1 has a flat shard on each rank: use 'owner' or "
                    "'replicated', or torch's fully_shard (FSDP2)"
                )
            if may_cut and group.get("orthogonalize") is not None:
                raise ValueError(
                    f"strategy={chosen!r} for {name!r}, of which orthogonalize= wants whole matrices, at costs that "
                    "no plan knows: use 'owner' or 'replicated'"
                )
            if chosen != "owner":
                found[id(param)] = chosen
    return found


# -- members of the family: what scales the updates of a group, and where it cannot -----------------------------------


def moments_of(groups: Groups, rounds: Sequence[Round]) -> dict[int, Scaling]:
    """By number of the group, its second moments, which begin as zeros."""
    found: dict[int, Scaling] = {}
    for number, group in enumerate(groups):
        if group.get("second_moment") is None:
            continue
        batches = [batch for round_ in rounds if round_.index == number for batch in round_.batches]
        held = frozenset[int]().union(*(batch.ids for batch in batches))
        params = [param for param in group["params"] if param.requires_grad or id(param) in held]
        by_row = group["second_moment"] == "row"
        found[number] = RowMoments(params, batches) if by_row else ElementMoments(params)
    return found


def scalings_of(groups: Groups, moments: Mapping[int, Scaling]) -> dict[int, list[Scaling]]:
    """By number of the group, what scales its updates, in this order."""
    found = {number: [scaling] for number, scaling in moments.items()}
    for number, group in enumerate(groups):
        if group.get("weight_decay_mode") == "hyperball":
            found.setdefault(number, []).append(Hyperball())
    return found


def check_scalings(groups: Groups, rounds: Sequence[Round], names: Names, clipped: Set[int]) -> None:
    """Refuse what scales updates of matrices of which it cannot know where they lie, or what else changes them.

    Args:
        clipped: ids of those that QK-clip scales.
    """
    for round_ in rounds:
        group = groups[round_.index]
        on_sphere = group.get("weight_decay_mode") == "hyperball"
        if not (on_sphere or group.get("second_moment") is not None):
            continue
        option = "weight_decay_mode='hyperball'" if on_sphere else "second_moment"
        if not round_.knows_shapes:
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
