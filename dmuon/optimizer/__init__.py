"""The optimizer that users call, its momentum, its groups, and clipping."""
