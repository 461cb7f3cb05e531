"""The dedicated residency: every matrix lies whole on its owner."""
