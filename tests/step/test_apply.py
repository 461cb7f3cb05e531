"""What the update of weights is given."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.nn as nn
from torch import Tensor

import dmuon
from dmuon.step import update
from dmuon.step.update import StepRecord


class Tagged(nn.Parameter):
    """As frameworks have them, with attributes of their own."""


def test_fused_updates_get_no_subclass_of_a_parameter() -> None:
    """They take tensors of two types, and all ranks must round alike, whatever their parameters are called."""
    seen: list[type] = []
    shipped = update.apply_update_

    def apply_update_(params: list[Tensor], *args: Any, **kwargs: Any) -> None:
        seen.extend(type(param) for param in params)
        shipped(params, *args, **kwargs)

    params = [Tagged(torch.ones(4, 3)), nn.Parameter(torch.ones(4, 3)), Tagged(torch.ones(5, 3))]
    optimizer = dmuon.Muon([{"params": params, "use_muon": True}], lr=0.1, weight_decay=0.0)
    for param in params:
        param.grad = torch.full_like(param, 0.5)
    with mock.patch.object(update, "apply_update_", apply_update_):
        optimizer.step()
    assert len(seen) == 3 and {*seen} <= {Tensor, nn.Parameter}
    assert torch.equal(params[0], params[1]) and not torch.equal(params[0], torch.ones(4, 3))


def test_a_rank_without_parts_of_named_matrices_records_nothing() -> None:
    record = StepRecord()
    record.note([(torch.ones(2, 2), 0)], (2, 2), 0.1, [], [])
    record.note([(torch.ones(2, 2), 0)], (2, 2), 0.1, [torch.ones(0, 2)], [torch.ones(0, 2)])
    assert not record.terms
    record.note([(torch.ones(2, 2), 0)], (2, 2), 0.1, [torch.ones(1, 2)], [torch.ones(1, 2)])
    assert [terms.numel for terms in record.terms] == [2]
