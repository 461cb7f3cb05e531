"""QK-clip of MuonClip (Kimi K2, arXiv 2507.20534): rows that make queries and keys of too large logits are scaled.

Forwards note the largest logit of each head. ``step()`` joins these in one all-reduce, behind its votes and before its
rounds: so all ranks come to it in one order, those too that noted nothing. Behind each round it scales what that has
updated, before dedicated weights are published; biases, which AdamW updates, come last. No host waits for a device:
heads below the threshold are multiplied by one, which changes no bit.
"""

from __future__ import annotations

import warnings
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention.flex_attention import create_mask
from torch.overrides import TorchFunctionMode

from dmuon.comm.norm import reduce_terms
from dmuon.dedicated.owned_tensor import OwnedTensor
from dmuon.dedicated.runtime import runtime_of
from dmuon.model.blocks import canonical_fqn
from dmuon.model.matrix_spec import spec_of
from dmuon.optimizer.attention_heads import SAY_WHERE, AttentionHeads, attention_modules, layer_of
from dmuon.optimizer.groups import inside_ddp
from dmuon.platform.options import is_number
from dmuon.platform.torch_private import current_backward, local_tensor, outside_compile
from dmuon.step.batches import Batch
from dmuon.step.half_weights import take_edits
from dmuon.step.residency import Residency, part_like
from dmuon.step.rounds import Round

_FLEX = torch.ops.higher_order.flex_attention
_BLOCK_NUMEL = 2**24  # of logits that are computed at once
_Calls = list[tuple[Callable[..., Tensor], Any, Any]]  # by which to find their logits, and what they were given
_Table = tuple[Tensor, Tensor, str]  # a parameter, for each output the index of its factor, and a name


class QKClip:
    """QK-clip for :class:`dmuon.Muon`: ``Muon(model, qk_clip=QKClip(model))``.

    With the largest logit ``S`` of a head since the last step, and ``γ = min(1, threshold / S)``, a step ends by
    multiplying the head's rows of queries and of keys, biases too, by ``√γ``; rotated queries of MLA, whose keys all
    heads share, by ``γ``. Heads that share keys (GQA) share the largest of their logits, as in Megatron-LM: for each to
    have its own ``γ``, queries would have to grow by what keys shrink, without bound. What is frozen later, and heads
    whose logit is NaN or infinite, stay as they are. Nothing has to be saved.

    Args:
        model: before or after it was sharded, dedicated or wrapped.
        threshold: the paper's is 100.
        heads: by name of an attention module, in which ``*`` stands for anything, where its heads lie; nothing else is
            clipped then. ``None``: all attention in the model, which must be of known classes.

    Raises:
        TypeError, ValueError: by name, options and modules that cannot be used.
    """

    def __init__(
        self, model: nn.Module, threshold: float = 100.0, *, heads: Mapping[str, AttentionHeads] | None = None
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"QKClip: model must be a module, got {type(model).__name__}")
        if not is_number(threshold) or not 0 < threshold < inf:
            raise ValueError(f"QKClip: threshold must be a positive number, got {threshold!r}")
        self._threshold = float(threshold)
        self._modules = attention_modules(inside_ddp(model), heads)
        self._spans: dict[str, slice] = {}  # by module, its heads among all heads of queries
        key_of: list[int] = []  # of each head of queries, the head of keys
        for name, (_, spec) in self._modules.items():
            first = 1 + max(key_of, default=-1)
            self._spans[name] = slice(len(key_of), len(key_of) + spec.num_heads)
            key_of += [first + head * spec.keys // spec.num_heads for head in range(spec.num_heads)]
        self._key_of = torch.tensor(key_of)
        digest = zlib.crc32(repr([(name, spec) for name, (_, spec) in self._modules.items()]).encode())
        self._description = f"QKClip(threshold={self._threshold}, heads={len(key_of)} of digest {digest:08x})"
        self._maxima: Tensor | None = None  # fp64, of each head of queries since the last step
        self.reports = 0  # so far
        self._sharing: tuple[dist.ProcessGroup, torch.device] | None = None
        self._rows: dict[int, list[_Rows]] = {}  # by id of the round
        self.optimizer: weakref.ref[Any] | None = None  # whose it is
        self._biases: list[_Rows] = []
        self._factors = self._last = torch.empty(0)  # of the last step, and its maxima
        self.ids: frozenset[int] = frozenset()  # of the matrices

    def __repr__(self) -> str:
        """All that ranks must have in common."""
        return self._description

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Inside, attention modules note logits of their ``scaled_dot_product_attention`` and ``flex_attention``.

        That multiplies queries and keys again, some queries at a time. What masks exclude does not count. Compiled
        modules run in pieces. Run evaluations outside of it.

        Raises:
            RuntimeError: by name, a module whose forward called neither of the two.
        """
        watch, hooks = _Watch(self), []
        try:
            for name, (module, _) in self._modules.items():
                hooks.append(module.register_forward_pre_hook(watch.enter))
                hooks.append(module.register_forward_hook(partial(watch.leave, name), always_call=True))
            with watch:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def report(self, module: str, logits: Tensor) -> None:
        """Note logits of an attention module beside those noted since the last step. Communicates nothing.

        Args:
            module: its name in the model.
            logits: the largest of each head that this rank computes, ``(heads,)`` or ``(batch, heads, …)``. If these
                are not all, placements of the parameters say which.

        Raises:
            ValueError: no such module or heads.
        """
        name, found = canonical_fqn(module), local_tensor(logits.detach())
        found = found.transpose(0, 1).flatten(1).amax(1) if found.ndim > 1 else found.reshape(-1)
        if name not in self._modules:
            raise ValueError(f"QKClip: logits were reported for {module!r}; its modules are {', '.join(self._modules)}")
        begin = self._spans[name].start + _first_head(name, *self._modules[name], len(found))
        if self._maxima is None:
            with torch.inference_mode(False):  # whatever mode the first forward runs in
                self._maxima = torch.full(self._key_of.shape, -inf, dtype=torch.float64, device=found.device)
        span = self._maxima[begin : begin + len(found)]
        span.copy_(torch.maximum(span, found.to(span)))
        self.reports += 1

    def reset(self) -> None:
        """Forget what was noted since the last step, such as by a batch that is skipped."""
        self._maxima = None

    # -- for the optimizer -----------------------------------------------------------------------------------------

    def lay_out(
        self, rounds: Sequence[Round], residencies: Sequence[Residency], groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """Find what of which parameters is here, and who shares it.

        Raises:
            ValueError: by name, what this optimizer cannot scale.
        """
        by_muon = {id(p) for group in groups for p in group["params"] if group["use_muon"]}
        tables: dict[int, _Table] = {}  # by id
        biases: dict[int, _Table] = {}
        for name, (module, spec) in self._modules.items():
            rows = []
            for path in (spec.query, spec.key):
                weight, bias, outputs = layer_of(module, path)
                label = f"{name}.{path.partition('[')[0]}"
                if id(weight) not in by_muon or not (weight.requires_grad or self.ids):  # later it may freeze
                    raise ValueError(
                        f"QKClip: this optimizer does not update {label} by Muon (it is frozen, or goes to AdamW or "
                        f"another optimizer); leave the module out, by naming the others: {SAY_WHERE}"
                    )
                table = torch.zeros(weight.shape[spec_of(weight).dim - 1], dtype=torch.float64)
                _, table, known = tables.setdefault(id(weight), (weight, table, label))
                if known != label:
                    raise ValueError(f"QKClip: {label} is {known}; clip one of both modules: {SAY_WHERE}")
                if bias is not None:
                    biases[id(bias)] = bias, table, label
                rows.append((table, outputs))
            first = 1 + int(self._key_of[self._spans[name].start])
            _fill(name, spec, torch.arange(first, first + spec.keys), len(self._key_of), *rows)
        sharing = _sharing(residencies, [weight for weight, _, _ in tables.values() if weight.requires_grad])
        homes = {id(param): residency for residency in residencies for param in residency.params}
        rows_of = {id(round_): list[_Rows]() for round_ in rounds}
        for round_ in rounds:
            for batch in round_.batches:
                for key in batch.ids & tables.keys():
                    param, table, label = tables[key]
                    whole = table if batch.transposed else table.unsqueeze(1)
                    part = homes[key].part_of(param, whole.expand(param.shape), label)
                    rows_of[id(round_)].append(_Rows(param, batch, _factors_of(batch, part)))
        of_biases = []
        for bias, table, label in biases.values():
            index = part_like(bias, table, label).long().to(local_tensor(bias).device)
            of_biases.append(_Rows(bias, None, [(0, index)]))
        # From here on nothing is refused.
        self._key_of = self._key_of.to(local_tensor(weight).device)
        self._sharing, self._rows, self._biases, self.ids = sharing, rows_of, of_biases, frozenset(tables)

    def begin(self) -> None:
        """Join the maxima of all ranks, and find the factors. Collective over those that share the matrices."""
        keys, maxima = self._key_of, self._maxima
        is_noted = maxima is not None
        if maxima is None:
            maxima = torch.full(keys.shape, -inf, dtype=torch.float64)
        if self._sharing is not None:
            group, device = self._sharing
            maxima = maxima.to(device)
            reduce_terms(maxima, inf, group)
        if not is_noted:  # said behind what others wait for, as a warning may be made an error
            warnings.warn(
                "QKClip: no logits were noted on this rank since the last step, which clips by those of others alone: "
                "run the forward inside clip.collect(), or let attention modules call clip.report()",
                stacklevel=2,
            )
        self._last = maxima = maxima.to(keys.device)
        self.reset()
        finite = torch.where(maxima.isfinite(), maxima, -inf)
        largest = torch.full_like(finite, -inf).scatter_reduce_(0, keys, finite, "amax")
        gamma = torch.where(largest > self._threshold, self._threshold / largest, 1.0)
        self._factors = torch.cat([torch.ones_like(gamma[:1]), gamma.sqrt(), gamma])

    def scale(self, round_: Round) -> None:
        """The weights of a round have their new values."""
        for rows in self._rows[id(round_)]:
            rows.scale(self._factors)

    def finish(self) -> None:
        """So has all else."""
        for rows in self._biases:
            rows.scale(self._factors)

    def stats(self) -> dict[str, Any]:
        """Of the last step, as ``StepStats`` has them; nothing before it. Waits for an accelerator."""
        last = self._last.tolist()
        if not last:
            return {}
        logits = {name: tuple(last[span]) for name, span in self._spans.items()}
        clipped = sum(self._threshold < logit < inf for logit in last)
        return {"qk_logits": logits, "qk_max_logit": float(self._last.max()), "qk_clipped": clipped}


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """By number of a matrix that this rank has of ``param`` in ``batch``, for each output the index of its factor."""

    param: Tensor
    batch: Batch | None  # None of a bias
    factors_of: list[tuple[int, Tensor]]

    def scale(self, factors: Tensor) -> None:
        if not self.param.requires_grad or not self.factors_of:
            return
        batch, weight = self.batch, local_tensor(self.param)
        kept = weight if batch is None else batch.masters.get(id(self.param), weight)
        local = kept.to(weight.device)
        if local is not weight:  # of which the step updates nothing if it has no gradient
            take_edits([local], [weight])
        factors = factors.to(local.device, torch.promote_types(local.dtype, torch.float32))
        matrices = [local] if batch is None else batch.split([local])
        for number, index in self.factors_of:
            of_rows = factors[index]
            matrices[number].mul_(of_rows if batch is None else of_rows.unsqueeze(0 if batch.transposed else 1))
        if batch is not None:
            batch.put([local], matrices)
        if local is not weight:
            weight.copy_(local)
        if local is not kept:
            kept.copy_(local)


def _factors_of(batch: Batch, part: Tensor) -> list[tuple[int, Tensor]]:
    """Of this rank's matrices in ``part``, which lies as a parameter of ``batch``, those with outputs to scale."""
    found = []
    for number, matrix in enumerate(batch.split([local_tensor(part)])):
        if matrix.numel() and bool(matrix.any()):
            found.append((number, (matrix[0] if batch.transposed else matrix[:, 0]).long().to(batch.device)))
    return found


def _fill(
    name: str, spec: AttentionHeads, keys: Tensor, count: int, query: tuple[Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> None:
    """Note in tables, each beside the rows that are meant, where factors are: ``√γ`` at ``keys``, ``γ`` later."""
    (of_query, rows), (of_key, key_rows) = query, key
    length = len(key_rows) // spec.keys
    fits = len(key_rows) == spec.keys * length and len(rows) == spec.num_heads * (length + spec.shared_rotary)
    if not fits or spec.num_heads % spec.keys:
        raise ValueError(
            f"QKClip: {name} has {len(rows)} rows of queries and {len(key_rows)} of keys, which {spec} does not "
            "describe; parts of a fused layer have numbers, as in its dmuon.MatrixSpec: 'qkv[0]' and 'qkv[1]'"
        )
    indices = keys.double().unsqueeze(1)
    of_key[key_rows.view(spec.keys, -1)] = indices
    indices = indices.repeat_interleave(spec.num_heads // spec.keys, 0)
    of_query[rows.view(spec.num_heads, -1)[:, :length]] = indices
    of_query[rows.view(spec.num_heads, -1)[:, length:]] = indices + count


def _sharing(
    residencies: Sequence[Residency], weights: Sequence[Tensor]
) -> tuple[dist.ProcessGroup, torch.device] | None:
    """Who shares all these queries and keys, and the device of their communication; None if one process has all."""
    if not weights:
        return None
    for sharing in (one for residency in residencies for one in residency.shared()):
        sizes = Counter[int]()
        for param, _, (m, n) in sharing.matrices:
            sizes[id(param)] += m * n
        if all(sizes[id(weight)] == weight.numel() for weight in weights):  # and are no plain shards
            return sharing.group, sharing.device
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            "QKClip: no group of ranks is known to share all queries and keys, over which to join their logits; lay "
            "all attention out alike, by dedicate_params, as DTensors, or by DistributedDataParallel"
        )
    return None


def _first_head(name: str, module: nn.Module, spec: AttentionHeads, count: int) -> int:
    """The number of the first of ``count`` heads, by how tensor parallelism shards the layer that makes queries."""
    weight, parts, at = layer_of(module, spec.query)[0], 1, 0
    if count != spec.num_heads and isinstance(weight, DTensor):
        placed = list(enumerate(weight.placements))
        if isinstance(weight, OwnedTensor):  # at rest: only tensor parallelism, if there is any, shards the whole one
            runtime = runtime_of(weight)
            placed = placed[-1:] if runtime is not None and runtime.comm.tensor is not None else []
        for dim, placement in reversed(placed):
            if type(placement) is Shard and placement.dim == spec_of(weight).dim - 1:
                at += weight.device_mesh.get_local_rank(dim) * parts
                parts *= weight.device_mesh.size(dim)
    if parts * count != spec.num_heads:
        raise ValueError(
            f"QKClip: {name!r} has {spec.num_heads} heads, and logits of {count} were reported, which is no part that "
            f"{tuple(getattr(weight, 'placements', ()))} of its queries gives a rank; report those of all heads"
        )
    return at * count


# -- what a forward notes ----------------------------------------------------------------------------------------------


class _Watch(TorchFunctionMode):
    """Keeps what attention modules multiply until their forward ends; not of those that run again in backward.

    Compiled modules are traced together with :meth:`__torch_function__`, which therefore does no more than keep what it
    is given, and reads nothing that changes from step to step: each would be compiled again.
    """

    def __init__(self, clip: QKClip) -> None:
        super().__init__()
        self._clip = clip
        self._calls: _Calls | None = None  # of the module that runs, if one does
        # For each module that runs, one inside of the other: how many reports there were before, and calls around it.
        self._outside: list[tuple[int, _Calls | None]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._calls is not None and (func is F.scaled_dot_product_attention or func is _FLEX):
            self._calls.append((logits_of_flex if func is _FLEX else logits_of_sdpa, args, kwargs))
        return func(*args, **kwargs)

    @outside_compile
    def enter(self, _module: nn.Module, _args: Any) -> None:
        if current_backward() is None:
            self._outside.append((self._clip.reports, self._calls))
            self._calls = []

    @outside_compile
    def leave(self, name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        """``output`` is None where an error ended the forward."""
        if current_backward() is not None:
            return
        calls = self._calls or []
        reports, self._calls = self._outside.pop()
        for logits_of, args, kwargs in calls:
            self._clip.report(name, logits_of(*args, **kwargs))
        if self._clip.reports == reports and output is not None:
            raise RuntimeError(
                f"QKClip.collect(): the forward of {name!r} called neither scaled_dot_product_attention nor "
                "flex_attention (transformers need attn_implementation='sdpa' for that, and nn.MultiheadAttention "
                "hides its call): use one of them, or let the module call clip.report()"
            )


# -- the largest logits of a call, multiplied again from what it was given ---------------------------------------------


def logits_of_sdpa(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
    """The largest logit of each head, ``(heads,)``. The arguments are those of ``scaled_dot_product_attention``."""
    given = dict(zip(("attn_mask", "dropout_p", "is_causal"), args, strict=False)) | options

    def allowed(start: int, stop: int) -> Tensor | None:
        if given.get("is_causal", False):
            return torch.ones(stop - start, key.shape[2], dtype=torch.bool, device=query.device).tril(start)
        if given.get("attn_mask") is None:
            return None
        mask = local_tensor(given["attn_mask"])
        mask = mask[..., start:stop, :] if mask.shape[-2] > 1 else mask
        return mask if mask.dtype == torch.bool else mask > -1e4  # some exclude by that, or by what is far below

    return _largest_logits(query, key, given.get("scale"), allowed)


def logits_of_flex(
    query: Tensor, key: Tensor, _value: Tensor, score_mod: Any, block_mask: tuple[Any, ...], scale: float, *_: Any
) -> Tensor:
    """The same of ``flex_attention``. What ``score_mod`` makes ``-inf`` does not count; else it changes nothing."""

    def allowed(start: int, stop: int) -> Tensor:
        shape = (query.shape[0], query.shape[1], stop - start, key.shape[2], str(query.device))
        mask = create_mask(lambda b, h, i, j: block_mask[-1](b, h, i + start, j), *shape)
        return mask & create_mask(lambda score, b, h, i, j: score_mod(score, b, h, i + start, j), *shape)

    return _largest_logits(query, key, scale, allowed)


@torch.no_grad()
def _largest_logits(
    query: Tensor, key: Tensor, scale: float | None, allowed: Callable[[int, int], Tensor | None]
) -> Tensor:
    """Of ``query·key·scale`` in fp32 or wider, ``(heads,)``; ``-inf`` of a head of which no position counts.

    Args:
        allowed: which positions count, of a range of queries.
    """
    for tensor in (query, key):
        placements = tensor.placements if isinstance(tensor, DTensor) else ()
        whole = all(placement.is_replicate() or placement in (Shard(0), Shard(1)) for placement in placements)
        if tensor.is_nested or tensor.ndim != 4 or not whole:
            raise RuntimeError(
                "QKClip.collect() reads (batch, heads, length, width) with whole sequences, and was given "
                f"{tensor.ndim} dimensions of {placements or type(tensor)}: let the module call clip.report()"
            )
    query, key = local_tensor(query.detach()), local_tensor(key.detach())
    dtype = torch.promote_types(query.dtype, torch.float32)
    found = torch.full((query.shape[1],), -inf, dtype=dtype, device=query.device)
    width = query.shape[3]
    columns = key.to(dtype).transpose(2, 3).unsqueeze(2)
    rows = max(1, _BLOCK_NUMEL // max(1, query.shape[0] * query.shape[1] * key.shape[2]))
    with torch.autocast(query.device.type, enabled=False):
        for start in range(0, query.shape[2] if query.numel() and key.numel() else 0, rows):
            some = query[:, :, start : start + rows].to(dtype).unflatten(1, (key.shape[1], -1))
            logits = (some @ columns).flatten(1, 2) * (width**-0.5 if scale is None else scale)
            counting = allowed(start, start + logits.shape[2])
            if counting is not None:
                logits = logits.masked_fill(~counting, -inf)
            found = torch.maximum(found, logits.amax((0, 2, 3)))
    return found
