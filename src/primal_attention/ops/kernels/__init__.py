"""Triton kernels, one file each; every one has its twin in `ops/reference.py`.

Importing this package needs Triton. The interpreter (TRITON_INTERPRET=1) runs the same kernels on the CPU.
"""
