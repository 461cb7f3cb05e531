"""What ``dmuon-check`` checks: a small model on every topology, against one process, and a larger one for speed."""
