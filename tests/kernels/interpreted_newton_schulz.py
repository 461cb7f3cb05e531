"""Runs whole Newton–Schulz and the whole Muon update on the Triton kernels, in Triton's interpreter; prints JSON.

A process of its own: the interpreter is chosen when the kernels are decorated.
"""

from __future__ import annotations

import json

import torch
import zoo
from torch import Tensor

from dmuon.kernels import Variant, coefficient_sequence, muon_update_, orthogonalize
from dmuon.kernels import arithmetic as products_module
from dmuon.kernels import symmetric_triton as triton_symmetric
from dmuon.kernels import update as update_module
from dmuon.kernels import update_triton as triton_update
from dmuon.kernels.arithmetic import TritonArithmetic
from dmuon.kernels.iteration import iterate, make_iteration
from dmuon.kernels.symmetric_tiles import TileConfig

launches: list[str] = []
TILE = "32x32w4s2g8"


def counted(name: str, function):
    def call(*arguments, **options):
        launches.append(name)
        return function(*arguments, **options)

    return call


products_module.symmetric_product = counted("symmetric", triton_symmetric.symmetric_product)
for name in ("momentum_norms", "normalized_update", "apply_update"):
    setattr(triton_update, name, counted(name, getattr(triton_update, name)))
update_module._fused = lambda tensor: triton_update


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def whole_runs() -> dict[str, dict[str, object]]:
    found = {}
    for shape in ((2, 24, 40), (1, 33, 70), (1, 40, 24), (1, 32, 32)):
        x = gaussian(*shape)
        exact = orthogonalize(x.double(), method="standard", backend="torch")
        for dtype in (torch.float16, torch.float32):
            for method, restarts in (("standard", ()), ("gram", (2,)), ("gram", (2, 4))):
                for tile in (TILE, TILE.replace("s2", "s2d")):
                    launches.clear()
                    variant = Variant(method, restarts, "triton", 8, tile)
                    aligned = all(side * dtype.itemsize % 16 == 0 for side in shape[1:])
                    if ("d" in tile and not aligned) or (restarts == (2, 4) and shape[0] == 1):
                        continue
                    kept = x.clone()
                    ours = orthogonalize(x, variant=variant, dtype=dtype)
                    found[f"{shape} {dtype} {variant}"] = {
                        "error": relative(ours, exact),
                        "limit": 2e-2 if dtype == torch.float16 else 5e-5,
                        "launches": len(launches),
                        "products": products(method, restarts, dtype),
                        "unmodified": torch.equal(x, kept),
                        "again": torch.equal(ours, orthogonalize(x, variant=variant, dtype=dtype)),
                    }
    return found


def products(method: str, restarts: tuple[int, ...], dtype: torch.dtype) -> int:
    """Symmetric products of five steps: XXᵀ and R² a step, or per block as NUMERICS counts them."""
    if method == "standard":
        return 10
    blocks = len(restarts) + 1
    whole = {(2,): 1, (2, 4): 1}[restarts] if dtype == torch.float16 else 0
    return blocks + 5 + 3 * (5 - blocks) - whole


def stress_runs() -> dict[str, dict[str, float]]:
    """Largest singular values of what fp16 makes of matrices half of whose directions are nearly null, and exact ones.

    Rounding keeps the factors of a product from commuting there, so it matters which of them is read transposed.
    """
    m, n = 96, 224
    coefficients = coefficient_sequence("polar_express", 5)
    iteration = make_iteration(Variant("gram", (2,), "triton", 2), coefficients, torch.float16)
    found: dict[str, dict[str, float]] = {}
    names = ("half_null", "clustered_0.001")
    x = torch.stack(
        [zoo.with_spectrum(m, n, torch.tensor([1.0, low]).repeat_interleave(m // 2), 9) for low in (0, 1e-3)]
    )
    x /= torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    exact = orthogonalize(x.double(), method="standard", backend="torch")
    for tile in ("32x32w4s2g8", "32x32w4s2dg8"):
        arithmetic = TritonArithmetic(torch.float16, torch.float16, TileConfig.parse(tile))
        ours = iterate(x.half(), iteration, arithmetic)
        for name, matrix, ideal in zip(names, ours, exact, strict=True):
            found[f"{name} {tile}"] = {
                "sigma_max": float(torch.linalg.matrix_norm(matrix.double(), 2)),
                "ideal": float(torch.linalg.matrix_norm(ideal, 2)),
            }
    return found


def whole_updates() -> dict[str, dict[str, object]]:
    found = {}
    coefficients = coefficient_sequence("polar_express", 5)
    for dtype in (torch.float16, torch.float32):
        for nesterov in (True, False):
            k, m, n = 3, 24, 40
            grads = [gaussian(m, n, seed=i) for i in range(k)]
            grads[1][2, 3] = float("nan")
            momentum, params = gaussian(k, m, n, seed=7), [gaussian(m, n, seed=10 + i) for i in range(k)]
            average = torch.lerp(momentum.double(), torch.stack(grads).double(), 0.05)
            update = torch.lerp(torch.stack(grads).double(), average, 0.95) if nesterov else average
            exact = orthogonalize(update, method="standard", backend="torch")
            wanted = [p.double() * (1 - 0.02 * 0.1) - 0.02 * 0.5 * o for p, o in zip(params, exact, strict=True)]
            launches.clear()
            muon_update_(
                params,
                grads,
                momentum,
                lr=0.02,
                weight_decay=0.1,
                beta=0.95,
                nesterov=nesterov,
                scale=0.5,
                coefficients=coefficients,
                dtype=dtype,
                variant=Variant("gram", (2,), "triton", 8, TILE),
            )
            found[f"{dtype} nesterov={nesterov}"] = {
                "error": max(relative(params[i], wanted[i]) for i in (0, 2)),
                "limit": 1e-4 if dtype == torch.float16 else 1e-6,
                "passes": [name for name in launches if name != "symmetric"],
                "nan_stays": bool(params[1].isnan().all()),
            }
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({"runs": whole_runs(), "updates": whole_updates(), "stress": stress_runs()}))
