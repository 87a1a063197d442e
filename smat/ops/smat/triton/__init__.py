"""Triton kernels of SMat-Attention: the long range, the whole op, the decoding step."""
