"""Newton–Schulz orthogonalization and the Muon update. Depends on torch only and knows no process group."""

from .coefficients import PRESETS, amplification, coefficient_sequence, is_safe, safe_restarts
from .newton_schulz import batch_size, iteration_flops, newton_schulz_flops, orthogonalize
from .update import apply_update_, momentum_update, muon_update_, update_scale

__all__ = [
    "PRESETS",
    "amplification",
    "apply_update_",
    "batch_size",
    "coefficient_sequence",
    "is_safe",
    "iteration_flops",
    "momentum_update",
    "muon_update_",
    "newton_schulz_flops",
    "orthogonalize",
    "safe_restarts",
    "update_scale",
]
