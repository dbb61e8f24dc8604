"""The layer on a GPU: Triton's kernels as registered operators, their ways back as autograd's nodes."""

from .attention import fused_attention

__all__ = ["fused_attention"]
