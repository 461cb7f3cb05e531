"""Newton–Schulz orthogonalization and the Muon update. Depends on torch only and knows no process group.

Triton is imported where its kernels are first used.
"""

from .arithmetic import Arithmetic, make_arithmetic
from .coefficients import (
    PRESETS,
    QUINTICS,
    Polynomial,
    amplification,
    check_storage,
    coefficient_sequence,
    is_safe,
    safe_restarts,
)
from .iteration import Iteration, iterate, make_iteration
from .newton_schulz import iteration_flops, newton_schulz_flops, orthogonalize, run
from .normalization import normalize
from .replay import drop_graphs
from .squares import Square, Squares
from .storage import HALF, MIXED, Storage, carrier_dtype, first_dtype, storage_dtype, storage_spans
from .streams import is_capturing, streams_in_place, streams_of
from .symmetric import symmetric_product
from .update import (
    apply_update_,
    momentum_norms,
    momentum_update,
    muon_update_,
    normalized,
    normalized_momentum,
    normalized_update,
    update_scale,
)
from .variant import (
    Variant,
    adapted,
    alternatives,
    backend_fault,
    batch_size,
    choose_variant,
    rule_on,
    variant_fault,
)

__all__ = [
    "HALF",
    "MIXED",
    "PRESETS",
    "QUINTICS",
    "Arithmetic",
    "Iteration",
    "Polynomial",
    "Square",
    "Squares",
    "Storage",
    "Variant",
    "adapted",
    "alternatives",
    "amplification",
    "apply_update_",
    "backend_fault",
    "batch_size",
    "carrier_dtype",
    "check_storage",
    "choose_variant",
    "coefficient_sequence",
    "drop_graphs",
    "first_dtype",
    "is_capturing",
    "is_safe",
    "iterate",
    "iteration_flops",
    "make_arithmetic",
    "make_iteration",
    "momentum_norms",
    "momentum_update",
    "muon_update_",
    "newton_schulz_flops",
    "normalize",
    "normalized",
    "normalized_momentum",
    "normalized_update",
    "orthogonalize",
    "rule_on",
    "run",
    "safe_restarts",
    "storage_dtype",
    "storage_spans",
    "streams_in_place",
    "streams_of",
    "symmetric_product",
    "update_scale",
    "variant_fault",
]
