"""What ``dmuon-check`` checks on every topology: a small model against one process; and how ranks report on it."""
