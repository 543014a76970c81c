"""What depends on the kind of device, one folder for each kind. Neither imports the other.

cpu/   C kernels on CPUs, lanes in host memory
cuda/  Triton kernels on NVIDIA GPUs, lanes in device memory, steps as captured graphs

Each has a roles.py, which is a `Backend` (worker/parts.py).
"""
