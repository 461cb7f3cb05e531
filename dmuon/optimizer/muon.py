"""The optimizer: Muon for matrices, AdamW for everything else, as one ``torch.optim.Optimizer``."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, overload

import torch
import torch.nn as nn
from torch import Tensor

from dmuon.comm.monitor import FirstError
from dmuon.dedicated.dedication import Dedicated, left_to_others
from dmuon.exchanged.config import DistributedConfig
from dmuon.exchanged.exchange import Exchange, Exchanged
from dmuon.exchanged.generators import recipe_of
from dmuon.layout.matrices import ways_of
from dmuon.model.matrix_spec import NAME, MatrixSpec, fault_of, spec_of
from dmuon.model.routing import Exclude, Select, require_fitting
from dmuon.optimizer.groups import (
    Remembered,
    as_group,
    carry_over,
    check_param,
    groups_from,
    inherit_ns,
    names_in,
    names_of,
    restore_specs,
    routed_groups,
)
from dmuon.optimizer.options import (
    KEYWORDS_ELSEWHERE,
    MUON_OPTIONS,
    RARE,
    STATE_OPTIONS,
    STRATEGY,
    USUAL,
    Description,
    check_functions,
    check_halves,
    check_names,
    check_options,
    check_scalings,
    check_strategy,
    describe,
    moments_of,
    scalings_of,
    strategies_of,
)
from dmuon.optimizer.qk_clip import QKClip
from dmuon.optimizer.record import MatrixRecord, StepStats, step_stats, tell_first_step, tell_products, tell_scale
from dmuon.optimizer.state import Momentum, keep_state_of_route
from dmuon.optimizer.wrapping import (
    Wrapping,
    blocks_of_fsdp,
    check_moment,
    fault_of_flat,
    find_residencies,
)
from dmuon.planning.cost_cache import NsOptions
from dmuon.platform import host
from dmuon.platform.options import check_flag, refuse_unknown
from dmuon.platform.streams import PhaseTimer, await_device
from dmuon.platform.torch_private import local_tensor, outside_compile
from dmuon.step.adamw import AdamWUpdate
from dmuon.step.full_replication import FullReplicationRound
from dmuon.step.fused import Deferred, FusedRound
from dmuon.step.half_weights import ROUNDING_STEP, Places, is_rounded, new_masters
from dmuon.step.overlap import EarlyUpdates
from dmuon.step.residency import align_gradients, lay_out
from dmuon.step.rounds import AloneRound, Schedule, Step
from dmuon.step.update import Done, Orthogonalize

_SELDOM = 64  # steps between giving free memory back to the system, and looking for what the model has got since


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) for matrices and AdamW for the rest.

    A matrix's update is the orthogonal factor of its momentum, by Newton-Schulz. On a model that went through
    ``dmuon.dedicate_params`` each owner updates its own matrices and publishes the result. Of a model that is sharded
    or replicated already, each matrix is gathered to one owner, orthogonalized once, and its update sent back. A tensor
    that one rank has to itself is updated there. Momentum is fp32 or wider, and so are the masters of what dmuon owns.

    Building it for a sharded or replicated model is collective over the ranks that hold its matrices together, and so
    is ``step()``.

    Args:
        params: a module (routed by policy: matrices inside blocks to Muon), an iterable of tensors (two dimensions to
            Muon, fewer to AdamW), ``dmuon.owned_parameters(model)``, or groups with ``use_muon`` flags, in which a
            tensor of three dimensions is a stack of matrices, such as grouped experts ``(e, m, n)``.
        lr: learning rate of Muon.
        weight_decay: how strongly Muon's matrices decay.
        weight_decay_mode: ``"decoupled"``: ``W ← (1 - lr · weight_decay) · W`` before the update, by the base ``lr``;
            ``"cautious"`` (arXiv 2510.12402): the same, of elements that have the sign of the update, which is
            subtracted; ``"independent"``: ``W ← (1 - weight_decay) · W``, whatever ``lr`` is; ``"l2"``: ``weight_decay
            · W`` is added to the gradient before momentum; ``"hyperball"`` (arXiv 2606.16899): no decay, but weights of
            a constant norm: each step is ``lr`` times as long as the weight, and ends on the sphere of its norm.
            ``weight_decay`` and ``adjust_lr_fn`` mean nothing then.
        momentum, nesterov: as in ``torch.optim.Muon``.
        momentum_dtype: ``torch.bfloat16`` keeps momentum in half the bytes. It is folded in fp32 and rounded to the
            nearest. Loading a state dict converts momentum to it.
        momentum_device: ``"cpu"`` keeps momentum in the host's memory, pinned, from where it travels while the device
            computes the update before. The host waits for the end of each step.
        ns_coefficients: ``"polar_express"``, ``"you"``, ``"classic"``, ``"squares"``, or one or several ``(a, b, c)``.
            ``None``: as ``dedicate_params`` was told, else ``"polar_express"``.
        ns_steps: Newton-Schulz steps; ``"squares"`` stands for five. ``None``: as ``dedicate_params`` was told, else 5.
        eps: lower clamp of the norm that scales a matrix before Newton-Schulz; 0 is exact.
        ns_dtype: dtype of Newton-Schulz; ``None``: as ``dedicate_params`` was told, else fp16 on CUDA, fp32 on the CPU.
        orthogonalize: a function of your own in place of Newton-Schulz. It gets whole matrices on their owner, stored
            as they are, ``(k, m, n)`` in the dtype of the momentum, each divided by its Frobenius norm, and returns a
            tensor like that. It is tried on random matrices before the first step. ``ns_…`` mean nothing then.
        second_moment: ``"row"``: NorMuon (arXiv 2510.05491). Each output's row of the orthogonal factor is divided by
            the root of the average of its mean square, and the whole is scaled to the norm of an orthogonal factor. The
            average is state, ``row_second_moment``, one number for each output. ``"element"``: AdaMuon (arXiv
            2507.11005). The same of each element, and what is orthogonalized are the signs of the momentum. The average
            is ``element_second_moment``, as large as the momentum.
        second_moment_beta: of that average.
        master_weights: keep an fp32 master of each weight in bf16 or fp16, AdamW's too: it is updated, and rounded to
            the weight. It is state, ``master_weight``; AdamW's moments are fp32 then. What dmuon owns has one anyway.
            ``"cpu"`` keeps masters of matrices in the host's memory, as ``momentum_device`` does momentum.
        bf16_stochastic_round: in place of masters, round updated weights in bf16, AdamW's too, up or down at random, so
            that the mean is right. All copies of a weight get the same, and so does a run that is resumed.
        adjust_lr_fn: factor on ``lr`` by shape: ``"match_rms_adamw"``, ``"original"`` (``None`` is that too, as in
            ``torch.optim.Muon``), ``"spectral"``, a number ``r``, which stands for ``r · √max(m, n)`` and so for the
            root mean square of an update, or ``f((m, n)) -> float``.
        lr_multipliers: factors on the learning rate, of Muon's and of AdamW's parameters, by patterns of names as in
            ``fnmatch``; the first that fits counts. What has a factor goes into groups of its own, which have it as
            ``lr_multiplier``: schedulers change ``lr``, and it stays. Groups that you make say it themselves.
        adamw_lr: ``None`` means ``lr``.
        adamw_betas, adamw_eps: of AdamW.
        adamw_weight_decay: ``None`` means ``weight_decay``; tensors of fewer than two dimensions are not decayed.
        select, exclude: as in ``dedicate_params``; only with a module that was not dedicated.
        overlap_backward: orthogonalize what dmuon owns as soon as its gradients have been reduced, while backward goes
            on, on a stream of its own. Whatever changes a gradient before ``step()`` (clipping, another backward) makes
            the step do it again. Matrices that are exchanged, and those with L2 decay, wait for ``step()``. Costs one
            update per matrix of memory.
        distributed_config: who orthogonalizes matrices that dmuon does not own, and how they get there. ``None``: for
            DTensors :func:`dmuon.create_dtensor_config`, for what a ``DistributedDataParallel`` module replicates its
            process group; other tensors are whole on this rank. If given, all ranks of its groups build the optimizer,
            those without such matrices too. Several optimizers may have one configuration; each plans for itself, on
            process groups of its own.
        qk_clip: scales queries and keys of heads with too large logits after each step.
        strategy: who orthogonalizes a matrix that several ranks hold and dmuon does not own: ``"owner"``: one rank, as
            planned; ``"replicated"``: each of them; ``"full_replication"``: that, with momentum of the whole on each;
            ``"sharded"``: all of them together, or so many as ``"sharded:4"`` says while others have other matrices;
            ``"fused"``: one rank, before FSDP2 next unshards it; ``"auto"``: what is predicted to take less time by a
            fifth. Or a mapping of patterns of names of parameters to these, such as ``{"*.embed.*": "sharded"}``, of
            which the first that fits counts; the rest have owners. ``docs/ways.md`` says what each costs. State dicts
            fit whatever the strategy.

    Raises:
        TypeError, ValueError: an option or parameter that cannot be used, with the remedy.
    """

    @refuse_unknown("dmuon.Muon", KEYWORDS_ELSEWHERE)
    @tell_scale
    def __init__(
        self,
        params: nn.Module | Iterable[Tensor] | Iterable[Mapping[str, Any]],
        lr: float | Tensor = 1e-3,
        *,
        weight_decay: float = 0.1,
        weight_decay_mode: str = "decoupled",
        momentum: float = 0.95,
        momentum_dtype: torch.dtype | None = None,
        momentum_device: str | None = None,
        nesterov: bool = True,
        ns_coefficients: str | tuple[Any, ...] | None = None,
        ns_steps: int | None = None,
        eps: float = 0.0,
        ns_dtype: torch.dtype | None = None,
        orthogonalize: Orthogonalize | None = None,
        second_moment: str | None = None,
        second_moment_beta: float = 0.95,
        master_weights: bool | str = False,
        bf16_stochastic_round: bool = False,
        adjust_lr_fn: str | float | Callable[[Any], float] | None = "match_rms_adamw",
        lr_multipliers: Mapping[str, float] | None = None,
        adamw_lr: float | Tensor | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float | None = None,
        select: Select | None = None,
        exclude: Exclude | None = None,
        overlap_backward: bool = False,
        distributed_config: DistributedConfig | None = None,
        qk_clip: QKClip | None = None,
        strategy: str | Mapping[str, str] = "owner",
    ) -> None:
        given: dict[str, Any] = locals()  # options of groups have the names of arguments
        check_flag("overlap_backward", overlap_backward)
        if not (distributed_config is None or isinstance(distributed_config, DistributedConfig)):
            raise TypeError(
                f"distributed_config must be a dmuon.DistributedConfig or None, got {type(distributed_config).__name__}"
            )
        if not (qk_clip is None or isinstance(qk_clip, QKClip)):
            raise TypeError(f"qk_clip must be a dmuon.QKClip or None, got {type(qk_clip).__name__}")
        if qk_clip is not None:
            if qk_clip.optimizer is not None and qk_clip.optimizer() is not None:
                raise ValueError("qk_clip is another optimizer's; build a dmuon.QKClip of its own for this one")
            qk_clip.optimizer = weakref.ref(self)
        defaults = {name: given[name] for name in MUON_OPTIONS if name in given}
        adamw: dict[str, Any] = {
            "lr": lr if adamw_lr is None else adamw_lr,
            "weight_decay": weight_decay if adamw_weight_decay is None else adamw_weight_decay,
            "betas": adamw_betas,
            "eps": adamw_eps,
            "master_weights": master_weights,
            "bf16_stochastic_round": bf16_stochastic_round,
        }
        check_strategy(strategy)
        self._defaults = {True: defaults, False: adamw}  # of groups, by their ``use_muon``
        self._canonical = names_of(params)  # names by ``id``, as far as they are known
        self._config, self._overlap, self._strategy = distributed_config, overlap_backward, strategy
        self._specs: dict[int, Remembered] = {}  # of Muon's parameters, by id
        self._split: list[tuple[Tensor, Remembered]] = []  # those that are not just one matrix
        self._laid_out: list[list[int]] | None = None  # per group, ids of the parameters for which the rest was made
        self._exchange: Exchange | None = None
        self._early: EarlyUpdates | None = None
        self._deferred: Deferred | None = None
        self._momentum = Momentum()
        self._versions: list[tuple[int, int]] = []  # of momentum after the last step, where ranks keep it whole
        self._done: list[Done] = []
        self._asked: MatrixRecord | None = None
        self._checked: list[Description] = []  # options of each group, which were found to be in order
        self._has_functions = False  # of the user's, which say how much of an update is taken, or orthogonalize
        self._proven: set[Any] = set()  # those that orthogonalize, and shapes
        self._steps = 0
        self._qk_clip = qk_clip
        self._built = False  # torch adds the first groups one by one
        # Schedulers look here for what they may cycle.
        super().__init__(
            groups_from(params, select, exclude, lr_multipliers, self._canonical),
            {name: defaults[name] for name in ("lr", "weight_decay", "momentum")},
        )
        self._built = True
        names = names_in(self.param_groups, self._canonical)
        check_halves(self.param_groups, names)
        has_moments = any(group.get("second_moment") for group in self.param_groups)
        if second_moment_beta != USUAL["second_moment_beta"] and not has_moments:
            raise ValueError("second_moment_beta is for second_moment='row' or 'element': say which, or leave it out")
        for ways in [strategy, *(group[STRATEGY] for group in self.param_groups if STRATEGY in group)]:
            require_fitting("strategy", ways_of(ways), [*names.values(), *self._canonical.values()])
        self._wrapping = Wrapping(params, self.param_groups, by_user=distributed_config is not None)
        self._lay_out()
        # They get the optimizer as an argument, and hold none: that would keep it until a garbage collection.
        follow: Any = type(self)._follow
        self.register_state_dict_pre_hook(follow)  # torch keys state by the parameters of the groups
        self.register_state_dict_post_hook(self._momentum.save)
        self._load_hook = self.register_load_state_dict_pre_hook(self._momentum.load)
        self.register_load_state_dict_post_hook(self._momentum.show_loaded)

    def __getstate__(self) -> dict[str, Any]:
        """For ``copy`` and ``pickle``, which are refused."""
        raise RuntimeError(
            "an optimizer, which knows where its model lies, cannot be copied or pickled: save optimizer.state_dict(), "
            "and load it into an optimizer that was built as this one was, over a model of its own"
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As torch calls it after a load."""
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch adds it, and groups that are added later would get it
        self.param_groups = [as_group(group) for group in self.param_groups]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch. Collective where several ranks hold matrices.

        Raises:
            ValueError: groups, options or state that do not fit, on all ranks of which one cannot load its own.
        """
        self._follow()
        self._load_hook.remove()  # after the user's hooks, which may adapt what they are given
        self._load_hook = self.register_load_state_dict_pre_hook(self._momentum.load)
        super().load_state_dict(state_dict if isinstance(state_dict, dict) else {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. Collective, as building the optimizer is.

        ``use_muon`` says which way it goes. Without that its matrices go to Muon and what has fewer dimensions to
        AdamW: two groups, if it has both.

        Raises:
            TypeError, ValueError: as the constructor.
        """
        count = len(self.param_groups)
        try:
            for group in routed_groups(param_group):
                for name, value in self._defaults[group["use_muon"]].items():
                    group.setdefault(name, value)
                if group["use_muon"]:
                    inherit_ns(group)
                own = self._config is not None and recipe_of(self._config) is None
                check_names(group)
                check_options(group)
                for param in group["params"]:
                    check_param(param, group["use_muon"], shards=self._config is not None, flat=own)
                for name in [name for name in RARE if name in group and group[name] == USUAL[name]]:
                    del group[name]
                if group.get("bf16_stochastic_round"):
                    group.setdefault(ROUNDING_STEP, 0)  # before a step, for who loads into what state dicts have
                super().add_param_group(as_group(group))
            if self._built:
                names = names_in(self.param_groups, self._canonical)
                check_halves(self.param_groups, names)
                for ways in [group[STRATEGY] for group in self.param_groups[count:] if STRATEGY in group]:
                    require_fitting("strategy", ways_of(ways), [*names.values()])
                self._lay_out()
        except Exception:
            del self.param_groups[count:]
            raise

    def _lay_out(self) -> None:
        """Residencies, batches and rounds for the present groups. Momentum moves into the new batches.

        Collective, as building the optimizer is. State is created at once, so that a checkpoint can be loaded before
        the first step; that of parameters that no group holds any more is forgotten.
        """
        self.flush()
        devices = (local_tensor(param).device for group in self.param_groups for param in group["params"])
        self._device = next(devices, torch.device("cpu"))
        self._timer = PhaseTimer(self._device)
        restore_specs(self._split)
        carry_over(self.param_groups, self._laid_out or [], self._canonical, self._specs)
        held = {id(p) for group in self.param_groups for p in group["params"]}
        for gone in [p for p in self.state if id(p) not in held]:
            del self.state[gone]
        left = {key for ids in self._laid_out or [] for key in ids} - held  # ids that others may get from now on
        for known in (self._canonical, self._wrapping.copies):
            for key in left & known.keys():
                del known[key]
        self._laid_out = None  # until all is made: what is refused below leaves some as it was
        if self._early is not None:
            self._early.forget()  # they read momentum that is about to be replaced
        muon = [p for group in self.param_groups if group["use_muon"] for p in group["params"]]
        self._names = names_in(self.param_groups, self._canonical)  # by id of the parameter
        for param in (param for group in self.param_groups for param in group["params"]):
            if " " not in self._names[id(param)]:  # which others share, whatever groups they have
                setattr(param, NAME, self._names[id(param)])
        self._wrapping.note(self.param_groups)
        planned = next((g for g in self.param_groups if g["use_muon"] and g["params"]), None)
        ns = NsOptions.named(planned or {})
        self._left = {key: strategy for key, (strategy, _) in left_to_others().items()}
        self._strategies = strategies_of(self.param_groups, self._names, self._strategy, self._left)
        residencies = find_residencies(
            muon, self._names, self._config, self._wrapping.copies, self._device, ns, self._strategies
        )
        self._dedicated = [residency for residency in residencies if isinstance(residency, Dedicated)]
        self._exchange = next((residency for residency in residencies if isinstance(residency, Exchange)), None)
        rounds = lay_out(self.param_groups, residencies)
        for round_ in rounds:
            if isinstance(round_, FullReplicationRound) and self.param_groups[round_.index].get("momentum_device"):
                raise ValueError(
                    f"momentum_device of group {round_.index}: strategy='full_replication' keeps the momentum of whole "
                    "matrices on each device; use 'replicated', or leave momentum_device out"
                )
        fused = [round_ for round_ in rounds if isinstance(round_, FusedRound)]
        if fused and self._qk_clip is not None:
            raise ValueError("qk_clip scales weights in step(), and strategy='fused' changes them later: use 'owner'")
        if self._qk_clip is not None:
            self._qk_clip.lay_out(rounds, residencies, self.param_groups)
        batches = [batch for round_ in rounds for batch in round_.batches]
        momentum = {id(p): m for batch in batches for p, m in zip(batch.params, batch.momenta, strict=True)}
        masters, self._places = new_masters(self.param_groups), Places(self._names)
        for group in (group for group in self.param_groups if group.get("bf16_stochastic_round")):
            for param in group["params"]:
                if is_rounded(group, param):
                    self._places.of(param)  # here what cannot be placed is refused
        for batch in (batch for round_ in rounds for some in (round_.batches, round_.folded) for batch in some):
            batch.masters, batch.places = masters, self._places
        check_scalings(self.param_groups, rounds, self._names, self._clipped)
        self._second_moments = moments_of(self.param_groups, rounds)  # by number of the group
        self._scalings = scalings_of(self.param_groups, self._second_moments)  # with those that have no state
        moments = self._second_moments
        self._momentum.lay_out(residencies, self.param_groups, self._names, momentum, moments, masters, self.state)
        self._formats = [{name: group.get(name) for name in STATE_OPTIONS} for group in self.param_groups]
        for group in self.param_groups:
            keep_state_of_route(group, self.state)
        self._specs = {id(p): (spec_of(p), fault_of(p)) for p in muon}
        self._split = [(p, self._specs[id(p)]) for p in muon if self._specs[id(p)] != (MatrixSpec(), None)]
        self._residencies, self._rounds = residencies, rounds
        self._deferred = Deferred(fused, blocks_of_fsdp(), self._names) if fused else None
        prefetch = 1 if self._exchange is None else self._exchange.config.prefetch_count
        self._schedule = Schedule([one for one in rounds if not isinstance(one, FusedRound)], prefetch)
        # Parameters of which this rank orthogonalizes something; and of those in several batches, in how many.
        self._batched = [*{id(p): p for batch in batches for p in batch.params}.values()]
        updates = Counter(id(p) for batch in batches for p in batch.params)
        self._updates = {key: count for key, count in updates.items() if count > 1}
        self._moves = any(batch.is_moved or batch.on_host for batch in batches)  # state is stored on the host
        for residency in residencies:
            residency.compare(self._options, [group["params"] for group in self.param_groups], self._names)
        self._early = None
        alone = [round_ for round_ in rounds if isinstance(round_, AloneRound)]
        if self._overlap and alone:
            group_of = partial(_group_of, weakref.ref(self))
            self._early = EarlyUpdates(alone, group_of, self._momentum.shown, self._proven, self._device)
            for dedicated in self._dedicated:  # which hold it weakly
                dedicated.listen(self._early.landed)
        self._laid_out = [[*map(id, group["params"])] for group in self.param_groups]
        self._products = tell_products(self.param_groups, residencies, self._device)

    def flush(self) -> None:
        """Apply what strategy ``"fused"`` has left for later. Collective if it has left anything."""
        if self._deferred is not None:
            self._deferred.finish()

    def _options(self, groups: Sequence[int]) -> list[tuple[str, str]]:
        """What ranks compare of these groups, which need not have the same numbers on all ranks."""
        found: list[tuple[str, str]] = []
        for number, index in enumerate(groups):
            if index < len(self.param_groups):
                for name, value in (*describe(self.param_groups[index]), ("products", self._products[index])):
                    found.append((f"{name} of group {number}", value))
        return found if self._qk_clip is None else [*found, ("qk_clip", repr(self._qk_clip))]

    @property
    def _clipped(self) -> frozenset[int]:
        """Ids of the parameters that QK-clip scales."""
        return frozenset() if self._qk_clip is None else self._qk_clip.ids

    def _is_as_laid_out(self) -> bool:
        """Whether groups hold the parameters for which everything was made."""
        held = []
        for group in self.param_groups:  # in every step
            held.append([*map(id, group["params"])])
        return held == self._laid_out

    def _follow(self) -> None:
        """Flush, and lay out anew if groups hold other parameters than before. Collective then, as building is."""
        self.flush()
        if not self._is_as_laid_out():
            self._lay_out()
        for group in self.param_groups:  # of which something may have been unfrozen since
            keep_state_of_route(group, self.state)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @outside_compile
    @torch.inference_mode(False)  # of what is made in that mode, the next step could change nothing
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient, and start publishing what dmuon owns.

        A step that is refused has changed nothing, on all ranks that share matrices, and may be repeated.

        Raises:
            RuntimeError: inside a forward, a backward or torch's ``Join``, when gradients were left unreduced, while a
                CUDA graph is being captured, or if the model has other parameters by now.
            TypeError, ValueError: options, state or gradients that cannot be used.
        """
        check_moment(self._device, self._wrapping, self._names.keys())
        self.flush()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        fault: Exception | None = None
        adamw_updates: list[AdamWUpdate] = []
        try:
            adamw_updates = self._check()
        except Exception as error:  # ranks that share matrices with this one must hear of it
            fault = fault_of_flat(p for group in self.param_groups for p in group["params"]) or error
        present = self._present(fault)
        # From here on nothing is refused.
        if not self._steps:
            tell_first_step(self.param_groups, self._residencies)
        if self._steps % _SELDOM == 0:
            self._wrapping.tell_newcomers(self.param_groups)
        self._steps += 1
        self._timer.reset()
        self._done = []
        if self._momentum.replaced:
            self._momentum.adopt(self.state)
        if self._early is not None:
            self._early.join()
        with torch.autocast(self._device.type, enabled=False):  # a step may be called inside one
            self._update(present, adamw_updates)
        if self._moves:
            await_device(self._device)  # the host may read what is on its way there
        if self._device.type == "cpu" and self._steps % _SELDOM == 0:
            host.give_back_memory()
        return loss

    def _check(self) -> list[AdamWUpdate]:
        """Follow the model, and refuse what no step can go by: options, gradients, state. No weight changes.

        Returns:
            AdamW's updates, group by group.
        """
        if self._wrapping.follow(self.param_groups, self._names):
            self._lay_out()
        if not self._is_as_laid_out():
            self._names = names_in(self.param_groups, self._canonical)
            self._places = Places(self._names)
            self._wrapping.note(self.param_groups)
            for group in self.param_groups:
                keep_state_of_route(group, self.state)
        self._wrapping.require_averaged(self.param_groups, self._names)
        align_gradients(self.param_groups, self._names)
        described = [*map(describe, self.param_groups)]
        if described != self._checked:
            for index, group in enumerate(self.param_groups):
                try:
                    check_options(group, wait=False)
                except (TypeError, ValueError) as fault:
                    raise type(fault)(f"group {index} of the optimizer was edited: {fault}") from None
            if self._is_as_laid_out():
                self._check_edited()
            self._checked = described
            functions = [group.get(name) for group in self.param_groups for name in ("adjust_lr_fn", "orthogonalize")]
            self._has_functions = any(map(callable, functions))
        self._momentum.check(self.state)
        adamw_updates = []
        for group in self.param_groups:
            if not group["use_muon"]:
                adamw_updates.append(AdamWUpdate.of(group, self.state, self._names, self._places))
        return adamw_updates

    def _check_edited(self) -> None:
        """Refuse options by which everything was laid out, if they are others now, and follow the modes of decay."""
        if strategies_of(self.param_groups, self._names, self._strategy, self._left) != self._strategies:
            raise ValueError(
                "the strategy of a group was edited, by which matrices were laid out: build an optimizer with the new "
                "one, and load the state dict of this one into it"
            )
        for index, (before, group) in enumerate(zip(self._formats, self.param_groups, strict=True)):
            for name, value in before.items():
                if group.get(name) != value:
                    raise ValueError(
                        f"{name} of group {index} was edited, of which there is state: build the optimizer with it"
                    )
        check_scalings(self.param_groups, self._rounds, self._names, self._clipped)
        self._scalings = scalings_of(self.param_groups, self._second_moments)

    def _present(self, fault: Exception | None) -> set[int]:
        """Ids of the matrices to update: any rank has a gradient. Lays out anew if something has changed.

        Raises:
            Exception: ``fault``, of this rank, of which those hear that vote with it.
        """
        if self._split:
            restore_specs(self._split)
        changed: bool = not self._is_as_laid_out()
        if self._exchange is not None and self._exchange.keeps_momentum:
            self._exchange.edited = bool(self._momentum.replaced) or self._momentum.versions() != self._versions
        first = FirstError(fault)
        for again in (False, True):
            present: set[int] = set()
            with first:
                if self._has_functions and not changed:  # rounds know groups by their numbers
                    check_functions(self.param_groups, self._rounds, self._proven)
            for residency in self._residencies:  # those that vote on it come last
                with first:
                    ids = residency.before_step(changed, first.error)
                    changed = changed or ids is None
                    present |= ids or set()
            first.throw()
            if again or not changed:
                break
            self._lay_out()
            changed = False
        return present

    def _update(self, present: set[int], adamw_updates: Sequence[AdamWUpdate]) -> None:
        """Run all rounds. What a round completes is published at once."""
        changing = present
        if self._qk_clip is not None:
            self._qk_clip.begin()
            changing = present | self._qk_clip.ids  # also what is not updated is scaled before it is published
        missing = Counter(self._updates)
        options: list[dict[str, Any]] = []
        outdated: list[Tensor] = []
        for group in self.param_groups:
            if group.get("bf16_stochastic_round"):
                group[ROUNDING_STEP] = group.get(ROUNDING_STEP, 0) + 1
            if group["use_muon"]:
                # Once for each group: reading a tensor's number waits for the accelerator.
                group = {**USUAL, **group}
                l2 = group["weight_decay"] if group["weight_decay_mode"] == "l2" else 0.0
                group |= {"lr": group["lr_multiplier"] * float(group["lr"]), "l2": l2}
            options.append(group)
        with self._timer.phase("publish"):
            for param in self._batched if self._dedicated else ():
                if id(param) in changing:
                    outdated.append(param)
            before = None
            for dedicated in self._dedicated:
                before = dedicated.begin_update(outdated, before)
        asked, self._asked = self._asked, None
        step = Step(options, present, self._timer, None if asked is None else [], self._done, self._scalings)
        if self._deferred is not None:
            self._deferred.begin(step)
        for round_ in self._schedule.drive(step):
            if round_ is None:  # the last update is on its way
                with self._timer.phase("adamw"):
                    for update in adamw_updates:
                        update.run()
                continue
            if self._qk_clip is not None:
                self._qk_clip.scale(round_)
            if self._dedicated:
                updated: list[Tensor] = []
                for batch in round_.batches:
                    updated.extend(batch.params)
                if missing:
                    missing.subtract(map(id, updated))
                    updated = [param for param in updated if missing[id(param)] <= 0]
                with self._timer.phase("publish"):
                    for dedicated in self._dedicated:
                        dedicated.updated(updated)
        with self._timer.phase("publish"):
            for dedicated in self._dedicated:
                dedicated.end_update()
        if self._exchange is not None:
            self._exchange.end_update()
            self._versions = self._momentum.versions() if self._exchange.keeps_momentum else []
        if self._qk_clip is not None:
            self._qk_clip.finish()
        if asked is not None and step.record is not None:
            self.flush()
            asked.fill(step.record, self._residencies, self._names)
        if self._early is not None:
            self._early.forget()

    @property
    def last_step(self) -> StepStats:
        """Counters and time per phase of the last step. On an accelerator it waits for that step to finish."""
        early = self._early
        seconds = self._timer.seconds() | ({} if early is None else early.seconds())
        stats = step_stats(self._done, seconds, 0 if early is None else early.taken, self._names)
        return stats if self._qk_clip is None else replace(stats, **self._qk_clip.stats())

    def record_next_step(self) -> MatrixRecord:
        """What the next ``step()`` does to each matrix: root mean square of the update, learning rate, norms.

        Asking communicates nothing, and steps that nobody asked for compute nothing of it.

        Returns:
            A record, which is empty until then: read it by ``local()`` or ``gather()`` when you like.
        """
        if self._asked is None:
            self._asked = MatrixRecord()
        return self._asked

    def exchanged(self) -> list[Exchanged]:
        """The matrices that several ranks hold and this optimizer exchanges, in the order of the groups."""
        return [] if self._exchange is None else self._exchange.table()

    def exchange_report(self) -> list[str]:
        """Owners, batches, costs and predicted loads of what is exchanged, for people."""
        return [] if self._exchange is None else self._exchange.report()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch; gradients that wait for a synchronizing backward are dropped too."""
        for dedicated in self._dedicated:
            dedicated.drop_gradients()
        if self._early is not None:
            self._early.forget()
        super().zero_grad(set_to_none)


def _group_of(optimizer: weakref.ref[Muon], index: int) -> dict[str, Any]:
    """A group by index, since loading a state dict replaces groups; a strong reference would make a cycle."""
    alive = optimizer()
    assert alive is not None, "it holds who asks"
    return {**USUAL, **alive.param_groups[index]}
