"""AdamW for what Muon does not take: one fused call on local tensors, which lie in memory as their parameters do."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from dmuon.model.matrix_spec import Names
from dmuon.platform.torch_private import local_tensor, share_spec
from dmuon.step.half_weights import MASTER, ROUNDING_STEP, Place, Places, has_master, is_widened, new_master, take_edits
from dmuon.step.residency import laid_out, like_param

MOMENTS = ("exp_avg", "exp_avg_sq")
_PLAIN = (Tensor, torch.nn.Parameter)
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_Row = Sequence[Tensor]  # local: parameter, gradient, both moments, step


def new_adamw_state(param: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
    """``step`` (0-D fp32 on the parameter's device), ``exp_avg`` and ``exp_avg_sq``; perhaps a master."""
    zeros = {
        name: torch.zeros_like(param, dtype=moments_dtype(param, group), memory_format=torch.preserve_format)
        for name in MOMENTS
    }
    masters = {MASTER: like_param(param, new_master(param))} if has_master(group, param) else {}
    return {"step": as_step(0.0, param), **zeros, **masters}


def moments_dtype(param: Tensor, group: Mapping[str, Any]) -> torch.dtype:
    """That of what is updated."""
    return torch.float32 if is_widened(group, param) else param.dtype


def as_step(value: Any, param: Tensor) -> Tensor:
    """A copy of a number of steps as the kernel reads it."""
    number = torch.as_tensor(value, dtype=torch.float32)
    return local_tensor(number).to(local_tensor(param).device, copy=True).reshape(())


@dataclass(frozen=True, slots=True, eq=False)
class AdamWUpdate:
    """One step of decoupled weight decay Adam (arXiv 1711.05101) on the parameters of a group that have gradients.

    AdamW is elementwise, so a sharded parameter is updated exactly by updating its local shard. One call takes all,
    where torch groups them by device and dtype; sharded ones stand beside others because only local tensors do.

    Attributes:
        rows: what the kernel walks.
        apart: the same of parameters that are widened, with gradients as they came, and of those with gaps between
            their elements; and what is updated in their place: masters, dense copies, or what is made by places.
    """

    group: Mapping[str, Any]
    rows: list[_Row] = field(default_factory=list)
    apart: list[tuple[_Row, Tensor | Place]] = field(default_factory=list)

    @classmethod
    def of(
        cls, group: Mapping[str, Any], state: Mapping[Tensor, MutableMapping[str, Any]], names: Names, places: Places
    ) -> AdamWUpdate:
        """Lay out what the kernel walks, which checks neither sizes nor strides; update nothing yet.

        Models are converted and moved, and users replace state and gradients, which :func:`align_gradients` has seen.

        Args:
            state: empty where it was cleared; parameters without a gradient may have none.
            places: of those that are rounded stochastically.
        """
        update = cls(group)
        widens = group.get("master_weights") or group.get("bf16_stochastic_round")  # not asked of each parameter
        for param in group["params"]:
            if param.grad is None:
                continue
            values = state[param]
            if not values:
                values.update(new_adamw_state(param, group))
            row = None if widens and is_widened(group, param) else _row_as_it_is(param, values)
            if row is None:
                update._lay(param, values, repr(names[id(param)]), places)
            else:
                update.rows.append(row)
        return update

    def _lay(self, param: Tensor, values: MutableMapping[str, Any], name: str, places: Places) -> None:
        widened, masters = is_widened(self.group, param), (MASTER,) if has_master(self.group, param) else ()
        if masters and values.get(MASTER) is None:
            values[MASTER] = like_param(param, new_master(param))
        for key in (*MOMENTS, *masters):
            values[key] = laid_out(param, values.get(key), f"{key} of {name}", dtype=moments_dtype(param, self.group))
        step = values.get("step", 0.0)
        kind = torch.Size(), torch.float32, param.device
        if not isinstance(step, Tensor) or (step.shape, step.dtype, step.device) != kind:
            values["step"] = as_step(step, param)
        assert param.grad is not None, "it is updated"
        grad = laid_out(param, param.grad, f"gradient of {name}", dtype=param.grad.dtype if widened else None)
        row = [local_tensor(t) for t in (param, grad, *(values[key] for key in MOMENTS), values["step"])]
        if widened:
            self.apart.append((row, local_tensor(values[MASTER]) if masters else places.of(param)))
            return
        dense = local_tensor(laid_out(param, param.detach(), name))
        if dense.stride() == row[0].stride():
            self.rows.append(row)
        else:
            self.apart.append((row, dense))

    @torch.no_grad()
    def run(self) -> None:
        """Update parameters and state."""
        self._run(self.rows)
        for (weight, grad, *state), kept in self.apart:  # one by one, as gradients are copied
            if isinstance(kept, Place):
                wide = new_master(weight)
            else:
                wide = kept
                take_edits([wide], [weight])
            self._run([[wide, grad.to(wide.dtype), *state]])
            if isinstance(kept, Place):
                kept.round(weight, wide, self.group[ROUNDING_STEP])
            else:
                weight.copy_(wide)

    def _run(self, rows: Sequence[_Row]) -> None:
        if rows:
            real = [_as_real(row) if row[0].is_complex() else row for row in rows]
            params, grads, averages, squares, steps = map(list, zip(*real, strict=True))
            beta1, beta2 = self.group["betas"]
            lr = self.group["lr"]
            if "lr_multiplier" in self.group:
                lr = self.group["lr_multiplier"] * lr
            adamw(
                params,
                grads,
                averages,
                squares,
                [],
                steps,
                fused=True,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=lr,
                weight_decay=self.group["weight_decay"],
                eps=self.group["eps"],
                maximize=False,
            )


def _row_as_it_is(param: Tensor, values: Mapping[str, Any]) -> _Row | None:
    """What the kernel walks of one parameter; None if something has to be laid out first. Every step pays for this."""
    row: tuple[Any, ...] = (param, param.grad, values.get("exp_avg"), values.get("exp_avg_sq"), values.get("step"))
    if isinstance(param, DTensor):
        if not (share_spec(param, row[2]) and share_spec(param, row[3])):
            return None
        row = (*map(local_tensor, row[:4]), row[4])
    local, grad, average, square, step = row
    if not (type(local) in _PLAIN and type(grad) is type(average) is type(square) is type(step) is Tensor):
        return None
    shape, device, dtype = local.shape, local.device, local.dtype
    if not (
        (shape == grad.shape == average.shape == square.shape)
        and (dtype == grad.dtype == average.dtype == square.dtype and step.dtype == torch.float32)
        and (device == grad.device == average.device == square.device == step.device)
    ):
        return None
    if local.is_contiguous():
        return row if grad.is_contiguous() and average.is_contiguous() and square.is_contiguous() else None
    alike = local.stride() == grad.stride() == average.stride() == square.stride()
    last = _CHANNELS_LAST.get(len(shape))
    return row if alike and last and local.is_contiguous(memory_format=last) else None


def _as_real(row: _Row) -> _Row:
    """Views of real and imaginary parts, which AdamW takes by themselves, as torch's does."""
    param, grad, average, square, step = row
    return (*map(torch.view_as_real, (param, grad.resolve_conj(), average, square)), step)
