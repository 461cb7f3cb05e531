"""What ``bench/gpu_kernels.py`` and ``bench/gpu_hour.py`` time."""
