"""What benchmarks/gpu.py does on a GPU, stage by stage."""
