"""The native backend: C++ in ``csrc/``, and beside it the Python that calls each file."""
