"""Measured cost caches (JSON) that ship with dmuon; see ``dmuon.cost_cache``."""
