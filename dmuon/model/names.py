"""Canonical parameter names: the names that a model has without wrappers."""

from __future__ import annotations

__all__ = ["WRAPPER_PREFIXES", "canonical_fqn"]

WRAPPER_PREFIXES = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def canonical_fqn(name: str) -> str:
    """``name`` without the components that wrappers (compile, activation checkpointing) insert."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_PREFIXES)
