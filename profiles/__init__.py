"""Measured cost caches (JSON) that ship with dmuon; see ``dmuon.planning.cost_cache``."""
