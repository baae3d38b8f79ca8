"""The backend in plain torch, for every device: the reference, and attention a few blocks at a time."""
