"""The fused passes of the Muon update: what they compile to."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from aot import Recorder, resources

from dmuon.kernels import update_triton as triton_update

KERNELS = tuple(getattr(triton_update, f"_{name}_kernel") for name in ("fold", "normalize", "apply"))


FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
FOLD = {"grads": torch.int64, "momentum": FP32, "partials": None, "out": FP32, "grad_weight": float, "beta": float}
MOMENTUM = FOLD | {"partials": torch.float64, "out": None}
NORM = MOMENTUM | {"grads": None}
NORMALIZE = {"grads": torch.int64, "momentum": FP32, "norms": torch.float64, "out": FP16, "beta": float, "eps": float}
APPLY = {"weights": torch.int64, "update": FP16, "decay": float, "step": float}
# Kernel, run-time types, compile-time values, vector loads and stores a thread makes of its 16 elements.
COMPILED = {
    "momentum": (KERNELS[0], MOMENTUM, {"NESTEROV": True, "DTYPE": tl.float32}, 8, 4),
    "normalize": (KERNELS[1], NORMALIZE, {"NESTEROV": True, "DTYPE": tl.float32}, 8, 2),
    "normalize, bf16": (KERNELS[1], NORMALIZE | {"out": BF16}, {"NESTEROV": True, "DTYPE": tl.bfloat16}, 6, 2),
    "normalize, 64-bit size": (KERNELS[1], NORMALIZE, {"NESTEROV": True, "DTYPE": tl.float32}, 8, 2),
    "apply": (KERNELS[2], APPLY, {"DTYPE": tl.float32}, 6, 4),
    "fold, bf16 gradients": (KERNELS[0], FOLD, {"NESTEROV": False, "DTYPE": tl.bfloat16}, 6, 8),
    "norm": (KERNELS[0], NORM, {"NESTEROV": False, "DTYPE": None}, 4, 0),
    "apply, bf16": (KERNELS[2], APPLY | {"update": BF16}, {"DTYPE": tl.bfloat16}, 4, 2),
}


def launch(recorder, name, size=4096, *, aligned=True, offset=0, number=0.9):
    """Compile the kernel of that name as the module launches it."""
    _, types, values, _, _ = COMPILED[name]
    arguments = {
        argument: number if kind is float else kind and torch.zeros(8, dtype=kind)[offset:]
        for argument, kind in types.items()
    }
    sizes = {"numel": size, "tiles": triton.cdiv(size, 2048)}
    recorder[(1,)](**arguments, **sizes, **values, ALIGNED=aligned, **triton_update.LAUNCH)
    return recorder.kernels[-1]


@pytest.mark.parametrize(("name", "arch"), list(zip(COMPILED, cycle((80, 90, 100)), strict=False)))
def test_aligned_kernels_move_16_bytes_at_a_time_and_do_not_spill(name, arch):
    kernel, _, _, loads, stores = COMPILED[name]
    compiled = resources(launch(Recorder(kernel, arch), name, 2**31 if "64-bit" in name else 4096))
    assert compiled.spill_bytes == 0
    assert compiled.registers <= 64, "eight blocks must fit on a multiprocessor"
    assert compiled.ptx.count("ld.global.v4.b32") == loads
    assert compiled.ptx.count("st.global.v4.b32") == stores
    assert "ld.global.b32" not in compiled.ptx and "ld.global.b16" not in compiled.ptx
    assert ".ftz" not in compiled.ptx, "subnormals count"


@pytest.mark.parametrize("name", ["momentum", "normalize, bf16", "apply, bf16"])
def test_unaligned_kernels_compile_and_do_not_spill(name):
    compiled = resources(launch(Recorder(COMPILED[name][0], 90), name, aligned=False))
    assert compiled.spill_bytes == 0
    assert ".v4." not in compiled.ptx, "a vector would trap at an odd address"


@pytest.mark.pitfall("P44", "P46")
@pytest.mark.parametrize("name", ["momentum", "normalize", "apply"])
def test_one_kernel_serves_all_sizes_addresses_and_values(name):
    recorder = Recorder(COMPILED[name][0], 90)
    for offset, size, number in [(0, 4096, 0.9), (1, 17, 1.0), (3, 1, 0.0), (0, 2**31 - 1, 0.5), (0, 2**31, 0.5)]:
        launch(recorder, name, size, offset=offset, number=number)
        assert recorder.variants == (1 if size < 2**31 else 2), "a second kernel only for sizes past 32 bits"
