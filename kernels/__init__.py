"""Newton–Schulz orthogonalization and the Muon update. Depends on torch only and knows no process group.

Triton is imported where its kernels are first used.
"""

from .arithmetic import Arithmetic, symmetric_product
from .coefficients import (
    PRESETS,
    QUINTICS,
    Polynomial,
    Square,
    Squares,
    check_storage,
    coefficient_sequence,
    safe_restarts,
)
from .device import HALF, carrier_dtype, is_capturing, storage_dtype, streams_of
from .newton_schulz import iterate, newton_schulz_flops, normalize, orthogonalize, run
from .replay import drop_graphs
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
    backend_fault,
    batch_size,
    choose_variant,
    cost_of_slice,
    products_on,
    sliced_variant,
    step_variant,
    user_cache_directory,
)

__all__ = [
    "HALF",
    "PRESETS",
    "QUINTICS",
    "Arithmetic",
    "Polynomial",
    "Square",
    "Squares",
    "Variant",
    "apply_update_",
    "backend_fault",
    "batch_size",
    "carrier_dtype",
    "check_storage",
    "choose_variant",
    "coefficient_sequence",
    "cost_of_slice",
    "drop_graphs",
    "is_capturing",
    "iterate",
    "momentum_norms",
    "momentum_update",
    "muon_update_",
    "newton_schulz_flops",
    "normalize",
    "normalized",
    "normalized_momentum",
    "normalized_update",
    "orthogonalize",
    "products_on",
    "run",
    "safe_restarts",
    "sliced_variant",
    "step_variant",
    "storage_dtype",
    "streams_of",
    "symmetric_product",
    "update_scale",
    "user_cache_directory",
]
