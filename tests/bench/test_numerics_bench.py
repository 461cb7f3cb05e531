"""The bench of numerics judges the library's own arithmetic, not a copy of it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from dmuon.kernels import Variant, coefficient_sequence, iterate, orthogonalize

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


@pytest.mark.pitfall("P61")
@pytest.mark.parametrize(
    ("dtype", "variant"),
    [(torch.float32, Variant("standard", (), "torch", 2)), (torch.float16, Variant("gram", (2,), "torch", 2))],
)
def test_what_the_bench_judges_is_what_users_get(bench: ModuleType, dtype: torch.dtype, variant: Variant) -> None:
    x = torch.randn(2, 32, 160, generator=torch.Generator().manual_seed(0))
    form = bench.Form("", dtype, variant)
    found = form.run(x / torch.linalg.matrix_norm(x)[:, None, None], STEPS)
    ours = orthogonalize(x, coefficients="polar_express", dtype=dtype, backend="torch", method=variant.method)
    torch.testing.assert_close(found.float(), ours.float(), rtol=0.0, atol=2e-3 if dtype == torch.float16 else 1e-5)
