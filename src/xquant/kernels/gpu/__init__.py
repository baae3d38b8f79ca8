"""Triton kernels, for layers on a GPU: `support` says what they read, and where they can run.

Triton comes with torch's builds for CUDA. It is imported only where one of these kernels is chosen.
"""
