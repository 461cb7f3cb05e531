"""Which way a batch of one shape is orthogonalized: form, restarts, what multiplies, how many matrices at once."""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal, TypeAlias

import torch

from .coefficients import Polynomial, Squares, checked_restarts, safe_restarts
from .device import HALF, INTERPRETED, kernels_of
from .replay import replays_right

Method: TypeAlias = Literal["auto", "standard", "gram"]
Products: TypeAlias = Literal["torch", "split", "triton", "quack"]
Backend: TypeAlias = "Literal['auto'] | Products"

METHODS: tuple[Method, ...] = ("auto", "standard", "gram")
PRODUCTS: tuple[Products, ...] = ("torch", "split", "triton", "quack")  # the last one that runs is taken
BACKENDS: tuple[Backend, ...] = ("auto", *PRODUCTS)

# CPU: matrices that run as one product together hold at most so many elements; more fall out of the cache.
_CPU_BATCH_ELEMENTS = 1 << 16

# CPU, as measured on one thread: the smallest side at which blocks of rows gain in every product,
# and at which those gain whose inner dimension is long.
_SPLIT_LEAST_SIDE = 768
_SPLIT_LEAST_SIDE_LONG = 512

# Accelerators: bound on what one batch's intermediate matrices take; more are run one piece after another.
_WORKSPACE_BYTES = 1 << 32

# Intermediate matrices of the small side beside two of the whole; blocks of squares have as many as squares.
_SQUARES = 4

# A CUDA graph keeps its workspace, so none is captured that needs more; where launches take long, matrices are small.
_REPLAY_BYTES = 1 << 25

# Below this side, or below this many tiles a multiprocessor, cuBLAS is taken.
_TRITON_LEAST_SIDE = 1024
_TRITON_WAVES = 2

# On the CPU a call takes as long as so many multiply-adds in fp32; and of the Gram form, which adds to diagonals, more.
_CPU_CALL = 8e4
_GRAM_CALL = 1.4

# On accelerators, to sum one number over ranks takes as long as so many multiply-adds of halves; by data sheets.
_SUM = 4000

# What a product with a symmetric result costs, relative to a whole one.
_SYMMETRIC_COST = {"torch": 1.0, "split": 0.7, "triton": 0.5, "quack": 0.5}


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run Newton–Schulz on a batch of matrices of one shape.

    Attributes:
        method: the form.
        restarts: of the Gram form, 0-based steps; empty in the standard form.
        backend: what computes products whose result is symmetric: ``"torch"`` all of it, ``"split"`` (CPU) block rows
            up to the diagonal, ``"triton"`` lower tiles, ``"quack"`` the same but for products of equal factors, which
            an installed quack computes.
        piece: at most so many matrices run as one batch.
        replay: launched as one CUDA graph.

    Raises:
        ValueError: no such form or back end, restarts that are not increasing or not the Gram form's, or no matrices
            at once.
    """

    method: Literal["standard", "gram"]
    restarts: tuple[int, ...]
    backend: Products
    piece: int
    replay: bool = False

    def __post_init__(self) -> None:
        if self.method not in METHODS[1:] or self.backend not in PRODUCTS:
            raise ValueError(f"{self.method!r} with {self.backend!r}: no such form or back end")
        increasing = all(a < b for a, b in itertools.pairwise((0, *self.restarts)))
        if not increasing or (self.restarts and self.method != "gram"):
            raise ValueError(f"restarts {self.restarts!r} must be increasing, from 1, and of the Gram form")
        if self.piece < 1:
            raise ValueError(f"piece {self.piece!r} must be at least 1")

    def __str__(self) -> str:
        restarts = "r" + ",".join(map(str, self.restarts)) if self.restarts else ""
        words = (self.method, restarts, self.backend, f"by{self.piece}", "replay" if self.replay else "")
        return " ".join(filter(None, words))


@lru_cache(maxsize=4096)
def choose_variant(
    shape: tuple[int, int],
    k: int,
    coefficients: Polynomial,
    dtype: torch.dtype,
    device: torch.device,
    *,
    method: Method = "auto",
    restarts: Literal["auto"] | tuple[int, ...] = "auto",
    backend: Backend = "auto",
    multiprocessors: int | None = None,
) -> Variant:
    """The rule for ``k`` matrices of ``shape`` ``(m, n)``; what is given is kept.

    Args:
        multiprocessors: of a GPU on which the Triton kernel runs, in place of those of ``device``, which need not be
            here.

    Raises:
        ValueError: an unknown or contradictory option, unsafe restarts, or a back end that cannot run here.
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r} is unknown; use one of {', '.join(METHODS)}")
    require_backend(backend, device, dtype)
    if method == "standard" and not isinstance(restarts, str):
        raise ValueError(f"restarts={restarts!r} needs the Gram form; use method='gram' or restarts='auto'")
    squares = isinstance(coefficients, Squares)
    if backend == "auto":
        backend = _usual_backend(shape, k, dtype, device, multiprocessors, fused=squares)
    held = max(map(len, coefficients.blocks)) if isinstance(coefficients, Squares) else _SQUARES
    piece = _largest_piece(shape, device, held)
    gram = Variant("gram", checked_restarts(restarts, coefficients, dtype), backend, piece)
    standard = Variant("standard", (), backend, piece)
    if method != "auto" or squares or not isinstance(restarts, str):  # squares have one form, by either name
        return standard if method == "standard" else gram
    call = _CPU_CALL / min(k, piece) if device.type == "cpu" else 0.0
    costs = [relative_cost(shape, coefficients, variant, dtype, call) for variant in (gram, standard)]
    return gram if costs[0] < costs[1] and dtype != torch.bfloat16 else standard


@lru_cache(maxsize=4096)
def sliced_variant(
    shape: tuple[int, int], k: int, slices: int, coefficients: Polynomial, storage: torch.dtype, device: torch.device
) -> Variant:
    """For ``k`` matrices of ``shape`` of which so many ranks have ``slices``; see ``total`` of :func:`run`.

    Restarts, at each of which ranks meet, do not depend on what multiplies there: they are safe ones of the Gram form;
    or before every step, which is the standard form, where that takes less, as of thin slices, and in bf16.
    """
    restarts = safe_restarts(coefficients, storage)
    if not isinstance(coefficients, Squares):
        every = tuple(range(1, len(coefficients)))
        of_sum = min(shape) ** 2 * (_SUM if storage in HALF and device.type != "cpu" else 0)

        def cost(restarts: tuple[int, ...]) -> float:
            variant = Variant("gram", restarts, "torch", k)
            return relative_cost(shape, coefficients, variant, storage, slices=slices) + (len(restarts) + 1) * of_sum

        restarts = every if storage == torch.bfloat16 or cost(every) < cost(restarts) else restarts
    chosen = choose_variant(shape, k, coefficients, storage, device, method="gram", restarts=restarts)
    return replace(chosen, piece=k)


def cost_of_slice(
    shape: tuple[int, int], slices: int, coefficients: Polynomial, storage: torch.dtype, device: torch.device
) -> float:
    """Operations for one of so many slices of a matrix; 1 is what the whole takes on one rank."""
    sliced = sliced_variant(shape, 1, slices, coefficients, storage, device)
    whole = choose_variant(shape, 1, coefficients, storage, device)
    of_slice = relative_cost(shape, coefficients, sliced, storage, slices=slices)
    return of_slice / relative_cost(shape, coefficients, whole, storage)


@lru_cache(maxsize=4096)
def step_variant(
    shape: tuple[int, int], k: int, coefficients: Polynomial, dtype: torch.dtype, device: torch.device
) -> Variant:
    """How a step runs ``k`` matrices of ``shape``: by the rule, and as one CUDA graph where launches take long."""
    chosen = choose_variant(shape, k, coefficients, dtype, device)
    small = 2 * k * (2 * math.prod(shape) + 4 * min(shape) ** 2) <= _REPLAY_BYTES
    return replace(chosen, replay=device.type == "cuda" and chosen.piece >= k and small and replays_right(device))


def batch_size(shape: tuple[int, int], k: int, device: torch.device) -> int:
    """How many of ``k`` matrices of ``shape`` run as one batch on ``device``, by rule."""
    return min(k, _largest_piece(shape, device))


@lru_cache(maxsize=64)
def products_on(device: torch.device, dtype: torch.dtype) -> tuple[Products, str]:
    """What computes products whose result is symmetric on ``device`` in ``dtype``, and why nothing before it does.

    On NVIDIA GPUs from Hopper on that is quack, where it is installed and was found right; on those from Ampere on
    Triton; on CPUs blocks of rows; and elsewhere the whole product. Small ones are whole ones everywhere.
    """
    faults: list[str] = []
    for name in reversed(PRODUCTS):
        fault = backend_fault(name, device, dtype)
        if fault is None:
            break
        faults.append(f"{name}: {fault}")
    return name, "; ".join(faults)


@lru_cache(maxsize=256)
def backend_fault(backend: Backend, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why ``backend`` cannot run on ``device`` in ``dtype``, or ``None`` if it can."""
    if backend == "split":
        return None if device.type == "cpu" else f"it splits products on the CPU, the matrix is on {device.type}"
    if backend == "triton":
        return triton_fault(device, dtype)
    if backend != "quack":
        return None
    if device.type != "cuda" or dtype not in HALF:
        return f"it multiplies fp16 and bf16 on NVIDIA GPUs, not {dtype} on {device.type}"
    # What has two factors is Triton's.
    fault = backend_fault("triton", device, dtype)
    if fault is None:
        try:
            folder = user_cache_directory()
        except RuntimeError:  # a user without a home
            folder = None
        fault = kernels_of("symmetric_quack").quack_fault(device, folder)
    return fault


def triton_fault(device: torch.device, dtype: torch.dtype) -> str | None:
    if dtype not in (*HALF, torch.float32):
        return f"{dtype} is none of fp16, bf16 and fp32"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cpu":
        if not INTERPRETED:
            return "on CPU the kernel runs in Triton's interpreter only, which is off"
        return "Triton's interpreter multiplies bf16 wrongly" if dtype == torch.bfloat16 else None
    if device.type != "cuda":
        return f"it needs CUDA, not {device.type}"
    if torch.version.hip is not None:
        return "it is untested on HIP"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    try:  # without a C compiler, for one, it does not build
        x = torch.ones(64, 64, device=device, dtype=dtype)
        kernels_of("symmetric_triton").symmetric_product(x, x)
    except Exception as error:  # whatever a compiler may raise
        return f"the kernel does not build ({type(error).__name__}: {error})"
    return None


def user_cache_directory() -> Path:
    """``dmuon`` in the user's cache folder (XDG base directories)."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "dmuon"


def require_backend(backend: Backend, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ``ValueError`` unless ``backend`` is one, and runs on ``device`` in ``dtype``."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; use one of {', '.join(BACKENDS)}")
    fault = backend_fault(backend, device, dtype)
    if fault is not None:
        raise ValueError(f"backend={backend!r} cannot run: {fault}; use backend='auto' or 'torch'")


def relative_cost(
    shape: tuple[int, int],
    coefficients: Polynomial,
    variant: Variant,
    dtype: torch.dtype,
    call: float = 0.0,
    slices: int = 1,
) -> float:
    """Multiply-adds for one matrix, a product with symmetric result counted as what it takes with the back end.

    ``call`` is added for each operation of a matrix, of the standard form; the Gram form's cost more. Of one of several
    ``slices``, what is there for that; see ``total`` of :func:`run`.
    """
    small, large = min(shape), max(shape) / slices
    half = _SYMMETRIC_COST[variant.backend]
    wide, square = small * small * large, small**3
    if isinstance(coefficients, Squares):  # per block XXᵀ and QX, and its squares
        return len(coefficients.blocks) * (half + 1) * wide + sum(map(len, coefficients.blocks)) * half * square
    steps, blocks = len(coefficients), len(variant.restarts) + 1
    if variant.method == "standard" or blocks == steps:  # which is the standard form
        update = 2 * wide if slices > 1 and is_thin(small, large, dtype) else half * square + wide
        return steps * (half * wide + update + 3 * call)
    # Per block: XXᵀ and QX. Per step: R²; except a block's first: QZ; except a block's last: RZ and ZV.
    inner = steps - blocks
    after_restarts = itertools.pairwise((*variant.restarts, steps))
    whole = sum(stop - start > 1 for start, stop in after_restarts) if whole_v(variant.backend, dtype) else 0
    calls = _GRAM_CALL * call * (3 * blocks + steps + 3 * inner)
    return blocks * (half * wide + wide) + (half * (steps + 3 * inner - whole) + whole) * square + calls


def is_thin(small: int, length: float, storage: torch.dtype) -> bool:
    """Whether ``R (R X)`` of a slice takes less than ``R² X``. Not in half, where ``R X`` would be rounded."""
    return storage not in HALF and 2 * length <= small


def whole_v(backend: str, dtype: torch.dtype) -> bool:
    """Whether the first ``V`` after a restart is computed whole where other symmetric results are mirrored.

    Mirrored, that one alone takes the largest singular value on the stress set out of range (bench/numerics.py: 1.31
    with Polar Express and r2 in fp16, 1.15 with this ``V`` whole).
    """
    return backend != "torch" and dtype in HALF


def _largest_piece(shape: tuple[int, int], device: torch.device, held: int = _SQUARES) -> int:
    small, large = max(1, min(shape)), max(1, max(shape))  # a side may be 0
    if device.type == "cpu":
        return max(1, _CPU_BATCH_ELEMENTS // (small * large))
    return max(1, _WORKSPACE_BYTES // (2 * (2 * small * large + held * small * small)))


def _usual_backend(
    shape: tuple[int, int], k: int, dtype: torch.dtype, device: torch.device, multiprocessors: int | None, fused: bool
) -> Products:
    """``fused``: of products that have several addends, which Triton adds in the same launch."""
    small, large = min(shape), max(shape)
    if device.type == "cpu":
        return "split" if small >= (_SPLIT_LEAST_SIDE_LONG if large >= 2 * small else _SPLIT_LEAST_SIDE) else "torch"
    is_small = small < _TRITON_LEAST_SIDE
    if device.type != "cuda" or dtype not in HALF or (is_small and not fused):
        return "torch"
    backend: Products = "triton"
    if multiprocessors is None:
        backend, _ = products_on(device, dtype)
        if backend == "torch":
            return "torch"
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    if fused:
        return "triton" if is_small else backend  # quack adds in passes of their own
    rows = -(-small // 128)
    tiles = k * rows * (rows + 1) // 2
    return backend if tiles >= _TRITON_WAVES * multiprocessors else "torch"
