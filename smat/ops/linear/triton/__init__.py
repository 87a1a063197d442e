"""Triton kernels of the causal branch (equation 8, adjoint 12)."""
