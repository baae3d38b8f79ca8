"""What Triton compiles: kernels, and the functions that they share."""
