"""Which way a batch of one shape is orthogonalized: form, restarts, what multiplies, how many matrices at once."""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal, TypeAlias

import torch

from .coefficients import Polynomial, Squares, checked_restarts, safe_restarts
from .device import HALF, INTERPRETED, kernels_of
from .replay import replays_right
from .symmetric_cpu import worth_splitting

Method: TypeAlias = Literal["auto", "standard", "gram"]
Products: TypeAlias = Literal["torch", "split", "triton", "quack"]
Backend: TypeAlias = "Literal['auto'] | Products"

METHODS: tuple[Method, ...] = ("auto", "standard", "gram")
PRODUCTS: tuple[Products, ...] = ("torch", "split", "triton", "quack")
BACKENDS: tuple[Backend, ...] = ("auto", *PRODUCTS)

# CPU: matrices that run as one product together hold at most so many elements; more fall out of the cache.
_CPU_BATCH_ELEMENTS = 1 << 16

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
) -> Variant:
    """The rule for ``k`` matrices of ``shape`` ``(m, n)``; what is given is kept.

    Raises:
        ValueError: an unknown or contradictory option, unsafe restarts, or a back end that cannot run here.
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r} is unknown; use one of {', '.join(METHODS)}")
    require_backend(backend, device, dtype)
    if method == "standard" and not isinstance(restarts, str):
        raise ValueError(f"restarts={restarts!r} needs the Gram form; use method='gram' or restarts='auto'")
    if backend == "auto":
        backend = _usual_backend(shape, k, dtype, device, fused=isinstance(coefficients, Squares))
    return _formed(shape, k, coefficients, dtype, device, method, restarts, backend)


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
        steps = len(coefficients)
        every = tuple(range(1, steps))
        of_sum = min(shape) ** 2 * (_SUM if storage in HALF and device.type != "cpu" else 0)
        often = relative_cost(shape, steps, None, dtype=storage, slices=slices) + steps * of_sum
        seldom = relative_cost(shape, steps, restarts, slices=slices) + (len(restarts) + 1) * of_sum
        restarts = every if storage == torch.bfloat16 or often < seldom else restarts
    chosen = choose_variant(shape, k, coefficients, storage, device, method="gram", restarts=restarts)
    return replace(chosen, piece=k)


def cost_of_slice(
    shape: tuple[int, int], slices: int, coefficients: Polynomial, storage: torch.dtype, device: torch.device
) -> float:
    """Operations for one of so many slices of a matrix; 1 is what the whole takes on one rank."""
    sliced = sliced_variant(shape, 1, slices, coefficients, storage, device)
    whole = choose_variant(shape, 1, coefficients, storage, device)
    if isinstance(coefficients, Squares):
        return squares_cost(shape, coefficients, sliced.backend, slices) / squares_cost(
            shape, coefficients, whole.backend
        )
    steps, costs = len(coefficients), []
    for variant, count in ((sliced, slices), (whole, 1)):
        restarts = variant.restarts if variant.method == "gram" and len(variant.restarts) + 1 < steps else None
        costs.append(relative_cost(shape, steps, restarts, variant.backend, storage, slices=count))
    return costs[0] / costs[1]


def rule_on(
    multiprocessors: int, shape: tuple[int, int], k: int, coefficients: Polynomial, dtype: torch.dtype
) -> Variant:
    """What :func:`choose_variant` chooses on a GPU of so many multiprocessors, which need not be here.

    The Triton kernel runs there.
    """
    fused = isinstance(coefficients, Squares)
    halves = dtype in HALF and _takes_halves(shape, k, multiprocessors, fused)
    return _formed(shape, k, coefficients, dtype, torch.device("cuda"), "auto", "auto", "triton" if halves else "torch")


def _formed(
    shape: tuple[int, int],
    k: int,
    coefficients: Polynomial,
    dtype: torch.dtype,
    device: torch.device,
    method: Method,
    restarts: Literal["auto"] | tuple[int, ...],
    backend: Products,
) -> Variant:
    """With ``backend``: the form that takes fewer operations, unless it is given."""
    explicit = not isinstance(restarts, str)
    schedule = checked_restarts(restarts, coefficients, dtype)
    if isinstance(coefficients, Squares):  # one form, which both names mean
        method = "gram" if method == "auto" else method
    elif method == "auto":
        call = _CPU_CALL / min(k, _largest_piece(shape, device)) if device.type == "cpu" else 0.0
        gram = relative_cost(shape, len(coefficients), schedule, backend, dtype, call)
        cheaper = gram < relative_cost(shape, len(coefficients), None, backend, dtype, call)
        method = "gram" if explicit or (cheaper and dtype != torch.bfloat16) else "standard"
    held = max(map(len, coefficients.blocks)) if isinstance(coefficients, Squares) else _SQUARES
    return Variant(method, schedule if method == "gram" else (), backend, _largest_piece(shape, device, held))


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
    order: tuple[Products, ...] = ("quack", "triton", "split", "torch")
    faults: list[str] = []
    for name in order:
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


def variant_fault(variant: Variant, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why ``variant`` cannot run on ``device`` in ``dtype``, or ``None`` if it can."""
    fault = backend_fault(variant.backend, device, dtype)
    if fault is not None:
        return fault
    if variant.replay and device.type != "cuda":
        return f"CUDA graphs are not replayed on {device.type}"
    return None


def require_backend(backend: Backend, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ``ValueError`` unless ``backend`` is one, and runs on ``device`` in ``dtype``."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; use one of {', '.join(BACKENDS)}")
    fault = backend_fault(backend, device, dtype)
    if fault is not None:
        raise ValueError(f"backend={backend!r} cannot run: {fault}; use backend='auto' or 'torch'")


def relative_cost(
    shape: tuple[int, int],
    steps: int,
    restarts: Sequence[int] | None,
    backend: Backend = "torch",
    dtype: torch.dtype = torch.float32,
    call: float = 0.0,
    slices: int = 1,
) -> float:
    """Multiply-adds for one matrix, a product with symmetric result counted as what it takes with ``backend``.

    ``call`` is added for each operation of a matrix, of the standard form; the Gram form's cost more. Of one of several
    ``slices``, what is there for that; see ``total`` of :func:`run`.
    """
    small, large = min(shape), max(shape) / slices
    half = _SYMMETRIC_COST[backend]
    wide, square = small * small * large, small**3
    if restarts is None:
        update = 2 * wide if slices > 1 and is_thin(small, large, dtype) else half * square + wide
        return steps * (half * wide + update + 3 * call)
    blocks = len(restarts) + 1
    # Per block: XXᵀ and QX. Per step: R²; except a block's first: QZ; except a block's last: RZ and ZV.
    inner = steps - blocks
    after_restarts = itertools.pairwise((*restarts, steps))
    whole = sum(stop - start > 1 for start, stop in after_restarts) if whole_v(backend, dtype) else 0
    calls = _GRAM_CALL * call * (3 * blocks + steps + 3 * inner)
    return blocks * (half * wide + wide) + (half * (steps + 3 * inner - whole) + whole) * square + calls


def is_thin(small: int, length: float, storage: torch.dtype) -> bool:
    """Whether ``R (R X)`` of a slice takes less than ``R² X``. Not in half, where ``R X`` would be rounded."""
    return storage not in HALF and 2 * length <= small


def squares_cost(shape: tuple[int, int], squares: Squares, backend: Backend = "torch", slices: int = 1) -> float:
    """As :func:`relative_cost`: per block ``XXᵀ`` and ``QX``, and its squares."""
    half = _SYMMETRIC_COST[backend]
    small, large = min(shape), max(shape) / slices
    count = sum(map(len, squares.blocks))
    return len(squares.blocks) * (half + 1) * small * small * large + count * half * small**3


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


def _usual_backend(shape: tuple[int, int], k: int, dtype: torch.dtype, device: torch.device, fused: bool) -> Products:
    """``fused``: of products that have several addends, which Triton adds in the same launch."""
    small, large = min(shape), max(shape)
    if device.type == "cpu":
        return "split" if worth_splitting(small, large) else "torch"
    if device.type != "cuda" or dtype not in HALF or (small < _TRITON_LEAST_SIDE and not fused):
        return "torch"
    backend, _ = products_on(device, dtype)
    if backend == "torch":
        return "torch"
    if fused and backend == "quack" and small < _TRITON_LEAST_SIDE:  # which adds in passes of their own
        backend = "triton"
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return backend if _takes_halves(shape, k, multiprocessors, fused) else "torch"


def _takes_halves(shape: tuple[int, int], k: int, multiprocessors: int, fused: bool) -> bool:
    """Whether kernels compute symmetric results, in half precision on a GPU where they run."""
    small = min(shape)
    rows = -(-small // 128)
    tiles = k * rows * (rows + 1) // 2
    return fused or (small >= _TRITON_LEAST_SIDE and tiles >= _TRITON_WAVES * multiprocessors)
