"""Console scripts: ``dmuon-profile`` and ``dmuon-plan``."""
