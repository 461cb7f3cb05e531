"""The bench of numerics judges the library's own arithmetic, not a copy of it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from dmuon.kernels import coefficient_sequence, iterate

MODULE = "numerics"
STEPS = coefficient_sequence("polar_express", 5)


@pytest.mark.pitfall("P61")
def test_every_form_of_the_library_is_the_librarys_iteration(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[Any] = []

    def recorded(*arguments: Any) -> Any:
        results.append(iterate(*arguments))
        return results[-1]

    monkeypatch.setattr(bench, "iterate", recorded)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    forms = list(bench.library_forms())
    for count, form in enumerate(forms, 1):
        assert form.run(x / x.norm(), STEPS) is results[-1] and len(results) == count, form.name
    assert len(forms) > 10
