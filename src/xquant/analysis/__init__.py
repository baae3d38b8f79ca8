"""What a method costs on a model and a GPU, from a configuration alone: bytes, what fits, the roofline."""
