"""Without a process group: one process trains alone."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from harness.assertions import assert_equal_weights
from harness.network import loss_of
from harness.oracle import reference_weights
from harness.toy import OPTIONS, batch, build

import dmuon


@pytest.mark.pitfall("P56")
def test_one_process_needs_no_process_group() -> None:
    assert not dist.is_initialized()
    model = build()
    optimizer = dmuon.Muon(model, **OPTIONS)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, *batch(step)).backward()
        optimizer.step()
    assert_equal_weights(dict(model.state_dict()), reference_weights(2))
    with pytest.raises(TypeError, match=r"mesh must be a torch\.distributed DeviceMesh"):
        dmuon.dedicate_params(model, None)  # type: ignore[arg-type]
    for use in (
        lambda: dmuon.set_requires_gradient_sync(model, False),
        lambda: dmuon.summon_full_params(model).__enter__(),
        lambda: dmuon.no_sync(model).__enter__(),
    ):
        with pytest.raises(ValueError, match=r"not dedicated: call dmuon\.dedicate_params"):
            use()
    assert dmuon.owned_parameters(model) == set()
