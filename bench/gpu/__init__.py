"""What ``bench/gpu_kernels.py`` times."""
