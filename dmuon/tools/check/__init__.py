"""What ``dmuon-check`` checks: a small model on every topology, against one process, and the kernels of a GPU."""
