"""Copies within one process: plans, native and numpy copiers, and CUDA kernels."""
