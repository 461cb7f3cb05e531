"""What is known of the layouts of `timm`'s models, against what their forwards keep apart."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from harness.row_groups import row_groups

from dmuon.model.routing import route_parameters

pytestmark = [pytest.mark.slow, pytest.mark.pitfall("P91"), pytest.mark.filterwarnings("ignore")]

# Of each way to lie in memory one, run on what its own model gives it: by heads, in stacks, of unequal lengths.
RUN = (
    "beit_base_patch16_224", "botnet26t_256", "convit_tiny", "coatnet_nano_rw_224", "efficientformer_l1",
    "efficientvim_m1", "efficientvit_b0", "efficientvit_m0", "eva02_tiny_patch14_224", "gcvit_xxtiny", "gmlp_s16_224",
    "halonet26t", "iformer_s", "lambda_resnet26t", "levit_128s", "lowformer_b0", "maxvit_tiny_tf_224",
    "mobilevitv2_050", "pvt_v2_b0", "shvit_s1", "swin_tiny_patch4_window7_224", "tiny_vit_5m_224",
    "tnt_s_legacy_patch16_224", "vit_pwee_patch16_reg1_gap_256",
)  # fmt: skip
_WRAPPER = re.compile(r"Linear|Conv[12]d|ModuleList|Sequential|(Conv|Linear).*(Norm|Layer|Bn).*")


class _Called(nn.Module):
    def __init__(self, owner: nn.Module, args: Any, kwargs: Any) -> None:
        super().__init__()
        self.call = owner, args, kwargs

    def forward(self) -> Any:
        owner, args, kwargs = self.call
        return owner(*args, **kwargs)


def _owner(model: nn.Module, path: str) -> nn.Module:
    """What was written to hold a layer: not what only puts a norm behind it."""
    parts = path.split(".")
    for length in range(len(parts) - 1, -1, -1):
        owner = model.get_submodule(".".join(parts[:length]))
        if not _WRAPPER.fullmatch(type(owner).__name__):
            return owner
    return model


def by_numbers() -> None:
    """Each fused tensor in the module that holds it, with what its model gives to that."""
    import timm

    wrong, checked = [], 0
    for name in RUN:
        torch.manual_seed(0)
        model = timm.create_model(name).eval()
        routes = [route for route in route_parameters(model) if route.muon and len(route.spec.parts) > 1]
        assert routes, name
        owners = {type(_owner(model, r.fqn[: -len(".weight")])).__name__: r for r in reversed(routes)}
        calls: dict[str, Any] = {}
        hooks = []
        for kind, route in owners.items():
            owner = _owner(model, route.fqn[: -len(".weight")])

            def note(module: nn.Module, args: Any, kwargs: Any, kind: str = kind, calls: Any = calls) -> None:
                calls.setdefault(kind, _Called(module, args, kwargs))

            hooks.append(owner.register_forward_pre_hook(note, with_kwargs=True))
        with torch.no_grad():
            model(torch.randn(1, *model.default_cfg["input_size"]))
        for hook in hooks:
            hook.remove()
        for kind, route in owners.items():
            owner = _owner(model, route.fqn[: -len(".weight")])
            for param in owner.parameters():
                if param.ndim > 1:
                    nn.init.normal_(param, std=0.1)
            found = row_groups(calls[kind], {}, {"": route.param}, {"": 0})[""]
            runs = route.spec.runs(route.param.shape[0])
            parts = sorted([row for start, stop in part for row in range(start, stop)] for part in runs)
            checked += 1
            if found != parts:
                wrong.append((name, kind, route.fqn, len(parts), [len(group) for group in found][:8]))
    assert not wrong, wrong
    assert checked >= len(RUN)


@pytest.mark.timeout(920)
def test_parts_are_what_a_forward_keeps_apart() -> None:
    """In a process of its own: timm imports torchvision, and where there is none it gets one of empty names."""
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed (the extra 'frameworks')")
    tests = Path(__file__).parents[1]
    program = (
        "import sys; sys.path[:0] = [{0!r}, {0!r} + '/frameworks']; import stub_torchvision; stub_torchvision.stub(); "
        "from test_timm_families import by_numbers; by_numbers()"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program.format(str(tests))],
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]
