"""The fused passes of the Muon update: what they compute, in Triton's interpreter, and what they compile to."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from aot import compile_kernel
from interpreted_update import APPLY_CASES, MOMENTUM_CASES
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from dmuon.kernels import update_triton as triton_update
from dmuon.kernels.update_triton import momentum_norms, unsupported

KERNELS = (triton_update._momentum_kernel, triton_update._normalize_kernel, triton_update._apply_kernel)

# Of an output entry, over the largest. The interpreter truncates to bf16, a device rounds.
OUT_ERROR = {torch.float32: 5e-7, torch.float16: 2.0**-11 + 1e-5, torch.bfloat16: 2.0**-7}
BROKEN = ("nan", "inf", "both infinities")


pytestmark = pytest.mark.timeout(400)  # the first test waits for the interpreter


@pytest.fixture(scope="module")
def results(interpreted) -> dict:
    """What ``interpreted_update.py`` printed."""
    return json.loads(interpreted(__name__))


@pytest.mark.pitfall("P32", "P35", "P44")
@pytest.mark.parametrize("name", MOMENTUM_CASES)
def test_momentum_norm_and_update_equal_fp64(results, name):
    case, result = MOMENTUM_CASES[name], results["momentum"][name]
    subnormal = case.special == "subnormal"  # has few digits, and norms whose inverse is past fp32's range
    assert result["momentum error"] <= (1e-3 if subnormal else 2e-7)
    assert result["norm error"] <= 1e-6
    assert result["out error"] <= (0.1 if subnormal else OUT_ERROR[case.out])


@pytest.mark.parametrize("name", MOMENTUM_CASES)
def test_momentum_and_update_equal_the_torch_path(results, name):
    case, result = MOMENTUM_CASES[name], results["momentum"][name]
    # Triton 3.6's interpreter rounds a fused multiply-add twice; 3.9's, and devices, agree with torch in every bit.
    assert result["momentum against torch"] <= 1.2e-7
    assert result["norm against torch"] <= 1e-6
    assert result["out against torch"] <= 2 * OUT_ERROR[case.out]


@pytest.mark.pitfall("P38")
@pytest.mark.parametrize("name", MOMENTUM_CASES)
def test_a_norm_is_finite_exactly_if_its_matrix_is(results, name):
    case, result = MOMENTUM_CASES[name], results["momentum"][name]
    expected = [not (name in BROKEN and index == case.k // 2) for index in range(case.k)]
    assert result["finite norms"] == expected
    assert result["finite out"] == expected


@pytest.mark.pitfall("P38", "P45")
@pytest.mark.parametrize("name", MOMENTUM_CASES)
def test_a_batch_equals_second_runs_of_its_matrices_alone(results, name):
    assert results["momentum"][name]["second runs alone are equal"]


@pytest.mark.pitfall("P38")
@pytest.mark.parametrize("name", MOMENTUM_CASES)
def test_only_a_zero_matrix_gives_zeros(results, name):
    case, result = MOMENTUM_CASES[name], results["momentum"][name]
    assert result["zero out"] == [case.special == "zero" and index == case.k // 2 for index in range(case.k)]


@pytest.mark.pitfall("P39", "P44")
@pytest.mark.parametrize("name", MOMENTUM_CASES)
def test_nothing_but_momentum_and_the_output_changes(results, name):
    result = results["momentum"][name]
    assert result["gradients intact"]
    assert result["momentum left alone by the second pass"]
    assert result["margins intact"]
    assert result["versions"] == [1, 1], "autograd must see a write in place"


@pytest.mark.parametrize("name", APPLY_CASES)
def test_apply_equals_fp64_and_the_torch_path(results, name):
    case, result = APPLY_CASES[name], results["apply"][name]
    if case.param == torch.float32:
        assert result["error"] <= 2e-7
        assert result["against torch"] <= 1.2e-7
    elif case.param == torch.float16:
        assert result["rounding"] <= 2.0**-11 * 1.001 < result["torch rounding"], "one rounding, where torch has two"
    else:
        assert result["rounding"] <= 2.0**-7, "the interpreter truncates to bf16"
    assert result["unchanged"] == (case.lr == 0)


@pytest.mark.pitfall("P39", "P44", "P45")
@pytest.mark.parametrize("name", APPLY_CASES)
def test_nothing_but_parameters_changes(results, name):
    result = results["apply"][name]
    assert result["update intact"]
    assert result["margins intact"]
    assert result["repeats"]
    assert result["versions"] == [1], "autograd must see a write in place"


def test_bf16_without_rounding_is_exact(results):
    assert results["exact bf16"] == [0.75]


@pytest.mark.pitfall("P44")
def test_empty_batches_and_matrices(results):
    assert results["empty"] == {"no matrices": [], "no elements": [0.0, 0.0]}


@pytest.mark.pitfall("P44")
def test_offsets_pass_32_bits(results):
    size, start = 2**30, 2**30 - 2048
    assert results["offsets"] == [[index * size + start for index in range(5)], [start] * 5]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fit", None),
        ("strided matrix", "matrix 1 has strides (1, 4); it is not contiguous"),
        ("strided stack", "the stacked tensor has strides (24, 1, 4); it is not contiguous"),
        ("mixed dtypes", "matrix 1 is torch.float16, not torch.float32"),
        ("fp64", "matrix 0 is torch.float64, not torch.float32 or torch.float16 or torch.bfloat16"),
        ("fp64 stack", "the stacked tensor is torch.float64, not torch.float32 or torch.float16 or torch.bfloat16"),
        ("too few", "the stacked tensor is (2, 4, 6), not (1, m, n)"),
        ("another shape", "matrix 1 is (6, 4), not (4, 6)"),
        ("two dimensions", "the stacked tensor is (4, 6), not (2, m, n)"),
        ("another device", "matrix 1 is on meta, not on cpu"),
        ("wrong device", "the tensors are on meta, not on cpu"),
        ("sparse", "matrix 1 is a Tensor of layout torch.sparse_coo, not a plain dense tensor"),
    ],
)
def test_unfit_tensors_are_named_and_refused(results, name, reason):
    told, refused = results["unsupported"][name]
    assert told == reason
    assert refused == (None if reason is None else f"{reason}; ask `unsupported` first and take the foreach path")


@pytest.mark.pitfall("P23", "P32")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("half momentum", "momentum must be fp32, got torch.float16"),
        ("fp32 norms", "norms is torch.float32, not torch.float64"),
        ("two norms", "norms is (2,), not (1,)"),
        ("strided out", "out has strides (24, 1, 4)"),
    ],
)
def test_unfit_arguments_are_refused(results, name, message):
    assert message in results["refused"][name]


def test_cpu_tensors_are_unsupported_without_the_interpreter():
    matrices, stacked = [torch.zeros(2, 3)], torch.zeros(1, 2, 3)
    assert unsupported(matrices, stacked) == "the tensors are on cpu, not on cuda"
    with pytest.raises(ValueError, match="on cpu, not on cuda"):
        momentum_norms(matrices, stacked, beta=0.9, nesterov=True)


MOMENTUM = {
    "grads": "*i64",
    "momentum": "*fp32",
    "partials": "*fp64",
    "grad_weight": "fp32",
    "beta": "fp32",
    "numel": "i32",
    "tiles": "i32",
}
NORMALIZE = {
    "grads": "*i64",
    "momentum": "*fp32",
    "norms": "*fp64",
    "out": "*fp16",
    "beta": "fp32",
    "eps": "fp32",
    "numel": "i32",
    "tiles": "i32",
}
APPLY = {
    "weights": "*i64",
    "update": "*fp16",
    "decay": "fp32",
    "step": "fp32",
    "numel": "i32",
    "tiles": "i32",
}
# Kernel, run-time types, compile-time values, vector loads and stores a thread makes of its 16 elements.
COMPILED = {
    "momentum": (KERNELS[0], MOMENTUM, {"NESTEROV": True, "GRAD": tl.float32}, 8, 4),
    "momentum, bf16 gradients": (KERNELS[0], MOMENTUM, {"NESTEROV": False, "GRAD": tl.bfloat16}, 6, 4),
    "normalize": (KERNELS[1], NORMALIZE, {"NESTEROV": True, "GRAD": tl.float32}, 8, 2),
    "normalize, bf16": (KERNELS[1], NORMALIZE | {"out": "*bf16"}, {"NESTEROV": True, "GRAD": tl.bfloat16}, 6, 2),
    "normalize, no nesterov": (KERNELS[1], NORMALIZE, {"NESTEROV": False, "GRAD": tl.float32}, 4, 2),
    "normalize, 64-bit size": (KERNELS[1], NORMALIZE | {"numel": "i64"}, {"NESTEROV": True, "GRAD": tl.float32}, 8, 2),
    "apply": (KERNELS[2], APPLY, {"PARAM": tl.float32}, 6, 4),
    "apply, bf16": (KERNELS[2], APPLY | {"update": "*bf16"}, {"PARAM": tl.bfloat16}, 4, 2),
}


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("name", COMPILED)
def test_aligned_kernels_move_16_bytes_at_a_time_and_do_not_spill(name, arch):
    kernel, types, values, loads, stores = COMPILED[name]
    compiled = compiled_update(kernel, types, {**values, "ALIGNED": True}, arch)
    assert compiled.spill_bytes == 0
    assert compiled.registers <= 64, "eight blocks must fit on a multiprocessor"
    assert compiled.ptx.count("ld.global.v4.b32") == loads
    assert compiled.ptx.count("st.global.v4.b32") == stores
    assert "ld.global.b32" not in compiled.ptx and "ld.global.b16" not in compiled.ptx
    assert ".ftz" not in compiled.ptx, "subnormals count"


@pytest.mark.parametrize("name", ["momentum", "normalize, bf16", "apply, bf16"])
def test_unaligned_kernels_compile_and_do_not_spill(name):
    kernel, types, values, _, _ = COMPILED[name]
    compiled = compiled_update(kernel, types, {**values, "ALIGNED": False}, 90)
    assert compiled.spill_bytes == 0
    assert ".v4." not in compiled.ptx, "a vector would trap at an odd address"


class Driver:
    """A driver of no device, for the launcher to compile for."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 99

    def get_current_stream(self, device):
        return 0


@pytest.mark.pitfall("P44", "P46")
@pytest.mark.parametrize("name", ["momentum", "normalize", "apply"])
def test_one_kernel_serves_all_sizes_addresses_and_values(monkeypatch, name):
    kernel, types, values, _, _ = COMPILED[name]
    monkeypatch.setattr(driver, "_active", Driver())
    memory = {"*i64": torch.int64, "*fp32": torch.float32, "*fp64": torch.float64, "*fp16": torch.float16}
    compiled = set()
    for offset, size, number in [(0, 4096, 0.9), (1, 17, 1.0), (3, 1, 0.0), (0, 2**31 - 1, 0.5), (0, 2**31, 0.5)]:
        arguments = {
            argument: torch.zeros(8, dtype=memory[kind])[offset:] if kind in memory else number
            for argument, kind in types.items()
        } | {"numel": size, "tiles": triton.cdiv(size, 2048)}
        kernel.warmup(**arguments, **values, ALIGNED=True, BLOCK=2048, grid=(1,), **triton_update._LAUNCH)
        compiled.update(kernel.device_caches[99][0])
        assert len(compiled) == (1 if size < 2**31 else 2), "a second kernel only for sizes past 32 bits"


def compiled_update(kernel, types, values, arch):
    """``kernel`` as the module launches it."""
    launch = triton_update._LAUNCH
    return compile_kernel(
        kernel,
        types,
        {**values, "BLOCK": triton_update._BLOCK},
        arch=arch,
        warps=launch["num_warps"],
        stages=launch["num_stages"],
    )
