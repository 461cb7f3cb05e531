"""Console scripts: ``dmuon-check``, ``dmuon-plan`` and ``dmuon-profile``."""
