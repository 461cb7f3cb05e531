"""What ``bench/gpu_kernels.py`` checks and times."""
